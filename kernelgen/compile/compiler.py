"""Compiles source to a binary on disk: by the host's C++ compiler, by NVRTC for CUDA, or by clang for HIP.

None needs the target device or a CUDA driver. The cache on disk is keyed by source, flags, compiler version and
architecture.

Environment: ``CXX`` is the host compiler, with arguments if any; ``EQUITUNE_CACHE`` the directory of the cache.
``EQUITUNE_PACK`` names packs of compiled kernels (see ``pack_file``), ``EQUITUNE_PACKS`` folders of them.
``EQUITUNE_DEBUG`` writes files to ``$EQUITUNE_DEBUG_DIR`` or ``./equitune-debug``:

    0 or unset   nothing
    1            for every kernel: its source, and its resource usage and compile command as JSON
    2            the same, compiled with line information for debuggers and profilers
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import filelock
import platformdirs

from kernelgen.compile.gpu import cuda_job, hip_job
from kernelgen.compile.host import host_job
from kernelgen.compile.job import Binary, Job, debug_level, fresh_folder, sweep_once
from kernelgen.compile.pack_file import find_in_packs, find_shipped
from kernelgen.device import DeviceFacts
from kernelgen.errors import CacheError, CompileError, ToolMissingError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.source import Source

Item = TypeVar("Item")
Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)
# Called with the source and the device of each kernel that is asked for.
RECORDERS: list[Callable[[Source, DeviceFacts], None]] = []


def compile_source(source: Source, facts: DeviceFacts) -> Binary:
    """The binary of ``source`` for ``facts``, from a pack, the cache, a folder of packs or the compiler.

    Kernels for the CPU come from a folder of packs only where there is no compiler or its output cannot be stored.
    Raises PackError for a pack that cannot be used, and what :func:`compile_by` raises.
    """
    for recorder in tuple(RECORDERS):
        recorder(source, facts)
    packed = find_in_packs(source, facts)
    if packed is not None:
        return packed
    try:
        if facts.is_hip:
            job = hip_job(facts.arch)
        else:
            job = cuda_job(facts.arch + source.arch_suffix) if facts.backend == "cuda" else host_job()
        if facts.backend == "cuda" and find(key_of(source, job), job.binary_name) is None:
            shipped = find_shipped(source, facts)
            if shipped is not None:
                return shipped
        return compile_by(job, source)
    except (ToolMissingError, CacheError):
        shipped = find_shipped(source, facts)
        if shipped is None:
            raise
        return shipped


def compile_by(job: Job, source: Source) -> Binary:
    """The binary of ``source`` from the cache or the job's compiler.

    Raises CompileError with the compiler's log, ToolMissingError without a working compiler, CacheError if the cache
    cannot be written or another user could have written the entry.
    """
    key = key_of(source, job)
    binary = find(key, job.binary_name)
    if binary is None:
        with one_at_a_time(key):
            binary = find(key, job.binary_name) or _compiled(job, source, key)
    if debug_level():
        _write_debug(source, job, key, binary)
    return binary


def _compiled(job: Job, source: Source, key: str) -> Binary:
    data, resources = job.compile(source)
    return publish(
        key, job.binary_name, data, job.source_name, source.text, resources, lambda path: job.check(path, source.entry)
    )


def compile_many(
    items: Sequence[tuple[Source, DeviceFacts]], workers: int | None = None
) -> list[Binary | CompileError]:
    """Compile in parallel; results in order, a CompileError as a value where the compiler rejects a source.

    Threads suffice: g++ is a separate process, and NVRTC releases the interpreter's lock.
    """
    return in_threads(lambda item: compile_source(*item), items, CompileError, workers)


def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], refused: type[Error], workers: int | None = None
) -> list[Result | Error]:
    """What a function gives for each item, in order; errors of the type ``refused`` as values."""

    def attempt(item: Item) -> Result | Error:
        try:
            return function(item)
        except refused as error:
            return error

    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(attempt, items))


def _write_debug(source: Source, job: Job, key: str, binary: Binary) -> None:
    folder = Path(os.environ.get("EQUITUNE_DEBUG_DIR") or "equitune-debug")
    record = {
        "binary": str(binary.path),
        "compiler": job.identity,
        "flags": job.flags,
        "target": job.target,
        "resources": binary.resources,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{key[:16]}{Path(job.source_name).suffix}").write_text(source.text)
        (folder / f"{key[:16]}.json").write_text(json.dumps(record, indent=1))
    except OSError as error:  # only a warning: the kernel itself is usable
        warnings.warn(
            f"EQUITUNE_DEBUG: nothing can be written to {folder} ({cause_of(error)}); "
            "set EQUITUNE_DEBUG_DIR to another folder",
            stacklevel=2,
        )


# Stores compiled kernels on disk and finds them by key.
#
# An entry is a directory named by its key. It holds the binary, its source and ``entry.json`` (resources and the
# binary's hash). Each entry is written beside its final place and published by one rename, so concurrent processes see
# a whole entry or none. An entry whose hash does not match (truncated, edited) is replaced by a new compilation.
#
# A kernel runs with the rights of the user who loads it. So the cache and every entry must belong to this user, and
# nobody else may write to them. Anything else is refused, not replaced.


_WRITABLE_BY_OTHERS = 0o022
# The beginning of the names of folders that are not entries: new ones, and damaged ones on their way out.
_TEMPORARY = ".new"
# The longest wait for another process that compiles the same kernel, in seconds.
WAIT_S = 300.0


def cache_dir() -> Path:
    """``$EQUITUNE_CACHE`` or the platform's cache directory."""
    chosen = os.environ.get("EQUITUNE_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("equitune"))


def key_of(source: Source, job: Job) -> str:
    """The key of a source that a job compiles: by text, entry point, compiler, flags and target."""
    return digest(source.text, source.entry, job.identity, *job.flags, job.target)


def digest(*parts: str) -> str:
    """sha256 over the parts, each with its length."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode()
        total.update(f"{len(data)}:".encode())
        total.update(data)
    return total.hexdigest()


def require_private() -> None:
    """Raise CacheError if the cache belongs to another user or others may write to it; a missing one is fine."""
    with suppress(FileNotFoundError):
        _require_private(cache_dir())


def find(key: str, binary_name: str) -> Binary | None:
    """The entry of ``key``, or None if it is missing or damaged.

    Raises CacheError if another user could have written it.
    """
    folder = _folder(key)
    try:
        for path in (cache_dir(), folder.parent, folder, folder / "entry.json", folder / binary_name):
            _require_private(path)
        entry = parse_json((folder / "entry.json").read_bytes())
        data = (folder / binary_name).read_bytes()
        if entry["sha256"] != hashlib.sha256(data).hexdigest():
            return None
        return Binary(folder / binary_name, dict(entry["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def one_at_a_time(key: str) -> Iterator[None]:
    """Inside, no other process or thread compiles the kernel of ``key``: of many that start together one compiles.

    Where a lock cannot be had (a read-only folder, a file system without locks, after ``WAIT_S``) it goes on without.
    """
    lock = filelock.FileLock(cache_dir() / f".lock-{key[:32]}", timeout=WAIT_S, mode=0o600)
    try:
        with suppress(OSError, NotImplementedError, filelock.Timeout):
            cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire()
        yield
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def publish(
    key: str,
    binary_name: str,
    binary: bytes,
    source_name: str,
    source: str,
    resources: dict[Any, Any],
    check: Callable[[Path], None] | None = None,
) -> Binary:
    """Store a compiled kernel. If several processes store the same key, one entry stays.

    check: called before the entry is published; raises if the binary cannot be used.
    """
    folder = _folder(key)
    try:
        # Closed to others, whatever the umask is.
        cache = cache_dir()
        cache.parent.mkdir(parents=True, exist_ok=True)
        for path in (cache, folder.parent):
            path.mkdir(mode=0o700, exist_ok=True)
            _require_private(path)
        sweep_once(_TEMPORARY, cache_dir())
        fresh = fresh_folder(_TEMPORARY, cache_dir())
        try:
            entry = {"sha256": hashlib.sha256(binary).hexdigest(), "resources": resources}
            _write(fresh / binary_name, binary)
            _write(fresh / source_name, source.encode())
            _write(fresh / "entry.json", json.dumps(entry, indent=1, sort_keys=True).encode())
            if check is not None:
                check(fresh / binary_name)
            _rename_into_place(fresh, folder, key, binary_name)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise CacheError(
            f"the kernel cache {cache_dir()} cannot be written ({cause_of(error)}); free some space if it is full, or "
            f"set EQUITUNE_CACHE to a writable folder"
        ) from error
    return Binary(folder / binary_name, resources)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)


def _require_private(path: Path) -> None:
    """Raise CacheError unless ``path`` (if a link, also its target) is this user's and closed to writes of others.

    Folders above the cache are not checked: even in a shared folder such as /tmp nobody can create one as this user.
    """
    user, target = os.geteuid(), path.stat()
    whole = path == cache_dir()
    what = f"the kernel cache {path}" if whole else f"{path} in the kernel cache"
    remedy = "set EQUITUNE_CACHE to a folder of your own"
    for owner in (path.lstat().st_uid, target.st_uid):
        if owner != user:
            remedy = remedy if whole else f"remove it, or {remedy}"
            raise CacheError(
                f"{what} belongs to user {owner}, not to you (user {user}), and a kernel from it "
                f"would run with your rights; {remedy}"
            )
    if target.st_mode & _WRITABLE_BY_OTHERS:
        raise CacheError(
            f"{what} can be written by other users (mode {target.st_mode & 0o7777:04o}), and a "
            f"kernel from it would run with your rights; run chmod -R go-w {cache_dir()}, or {remedy}"
        )


def _rename_into_place(fresh: Path, folder: Path, key: str, binary_name: str) -> None:
    for _ in range(10):
        try:
            os.rename(fresh, folder)
            return
        except OSError:
            if find(key, binary_name) is not None:
                return  # another process was first: use its entry
            # A damaged entry is in the way: move it aside by one rename, then try again.
            aside = fresh_folder(_TEMPORARY, cache_dir())
            try:
                os.rename(folder, aside)
            except OSError:
                pass  # another process moved it first
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    raise CacheError(f"the kernel cache entry {folder} cannot be replaced; remove it or set EQUITUNE_CACHE")


def _folder(key: str) -> Path:
    return cache_dir() / key[:2] / key
