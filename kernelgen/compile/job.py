"""A :class:`Job` is one compiler with its flags; how compilers run, and what they leave behind."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.kernels.source import Source

# The common interface of the compilers: a :class:`Job` is one compiler with its flags.

_LOG_LIMIT = 4000


@dataclass(frozen=True)
class Job:
    """One compiler, its flags and its target: all of a cache key except the source.

    compile: returns the binary of a source and its resource usage. check: raises ToolMissingError unless the binary can
    be used and has the function of that name.
    """

    identity: str
    flags: tuple[str, ...]
    target: str
    binary_name: str
    source_name: str
    compile: Callable[[Source], tuple[bytes, dict[str, Any]]]
    check: Callable[[Path, str], None]


@dataclass(frozen=True)
class Binary:
    """A compiled kernel on disk; ``resources`` as the compiler reports them (registers, bytes of code, ...)."""

    path: Path
    resources: dict[str, Any]


def debug_level() -> int:
    """The level in ``EQUITUNE_DEBUG``, see ``kernelgen.compile.compiler``."""
    text = os.environ.get("EQUITUNE_DEBUG", "")
    return int(text) if text.isdecimal() else int(bool(text))


def shortened(log: str) -> str:
    """The beginning of a compiler's log."""
    return log if len(log) <= _LOG_LIMIT else log[:_LOG_LIMIT] + f"\n... {len(log) - _LOG_LIMIT} more characters"


# Runs compilers in temporary folders so that nothing is left of either, also if this process is killed.
#
# A killed process cannot clean up. A shell waits beside each compiler: it ends the compiler and removes its folder when
# this process is gone. If the shell is killed too (a whole container, a lost machine), the folder stays until the next
# process that compiles sweeps it: its name has the number of the process that made it.

COMPILE_LIMIT_S = 600.0
# A folder of a process that is gone is swept when nothing was written into it for so long: the process may run on
# another machine, which shares the folder, and compiles for ``COMPILE_LIMIT_S`` at most.
SWEPT_AFTER_S = 3 * COMPILE_LIMIT_S
# Reads a line, or the end of the pipe that this process held open.
_WATCH = 'read -r _ || { kill -s KILL -- "-$1"; if [ -n "$2" ]; then rm -rf -- "$2"; fi; }'


def fresh_folder(kind: str, parent: Path) -> Path:
    """A new folder for temporary files, which :func:`sweep` finds if this process cannot remove it.

    kind: the beginning of its name, such as ``.new``.
    """
    return Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-", dir=parent))


@contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder for a compiler, removed afterwards."""
    parent = Path(tempfile.gettempdir())
    sweep_once("equitune", parent)
    folder = fresh_folder("equitune", parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.lru_cache(maxsize=16)
def sweep_once(kind: str, parent: Path) -> None:
    """:func:`sweep`, once a process."""
    sweep(kind, parent)


def sweep(kind: str, parent: Path) -> None:
    """Remove folders of :func:`fresh_folder` whose process is gone and that nobody has written to for a while."""
    named = re.compile(rf"{re.escape(kind)}-(\d+)-\w+")
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            made_by = named.fullmatch(entry.name)
            if made_by and not _is_alive(int(made_by[1])):
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > SWEPT_AFTER_S:
                        shutil.rmtree(entry.path, ignore_errors=True)  # which refuses links


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True


def run(command: Sequence[str], limit_s: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a folder if one is given.

    It is stopped with its child processes after the time limit, which raises TimeoutExpired, and when this process
    ends; then its folder is removed too. OSError if it cannot be run.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,  # g++ runs the compiler proper as a child
    ) as process:
        try:
            with _watched(process.pid, folder):
                out, log = process.communicate(timeout=limit_s)
        except BaseException:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, log)


@contextmanager
def _watched(group: int, folder: Path | None) -> Iterator[None]:
    """Meanwhile a shell waits for the end of this process, to end that group of processes and remove the folder."""
    ours, theirs = None, None
    watcher: subprocess.Popen[bytes] | None = None
    with suppress(OSError):  # without a shell nobody watches
        theirs, ours = os.pipe()
        watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sh", str(group), str(folder or "")],
            cwd="/",
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this process's group does not reach it
        )
    if theirs is not None:
        os.close(theirs)
    try:
        yield
    finally:
        if ours is not None:
            with suppress(OSError):
                os.write(ours, b"\n")
            os.close(ours)
        if watcher is not None:
            watcher.wait()


# Reads ELF files that compilers wrote: whether one is complete, and its sections.

_NO_BITS = 8


def is_whole(elf: bytes) -> bool:
    """Whether an ELF file has both of its tables and all that they name. Loading a torn file may crash the process."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return elf[:4] == b"\x7fELF"  # 32 bits or big-endian: not checked further
    if len(elf) < 0x40:
        return False
    segments_at, sections_at = struct.unpack_from("<QQ", elf, 0x20)
    segment_size, segments, section_size, sections = struct.unpack_from("<HHHH", elf, 0x36)
    ends = [sections_at + section_size * sections, segments_at + segment_size * segments]
    if not sections_at or section_size < 0x40 or (segments and segment_size < 0x38) or max(ends) > len(elf):
        return False
    for at in range(sections_at, ends[0], section_size):
        kind, _, _, begin, size = struct.unpack_from("<IQQQQ", elf, at + 4)
        ends.append(0 if kind == _NO_BITS else begin + size)
    for at in range(segments_at, ends[1], segment_size or 1):
        begin, _, _, size = struct.unpack_from("<QQQQ", elf, at + 8)
        ends.append(begin + size)
    return max(ends) <= len(elf)


def section(elf: bytes, name: str) -> bytes:
    """A section of a complete 64-bit little-endian ELF file; empty if there is none of that name."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return b""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    for name_at, _, _, _, at, size in headers:
        start = names_at + name_at
        if elf[start : elf.index(b"\0", start)] == name.encode():
            return elf[at : at + size]
    return b""
