"""Finds the host's C++ compiler (``$CXX`` with arguments, if set), runs it with a time limit and checks its output.

A kernel of the cache is for this machine's processor and links the OpenMP library of this torch by its path. A kernel
of a pack is for a level of processors and links none: it takes the one that torch has loaded into the process, and
shares its threads.
"""

from __future__ import annotations

import _ctypes
import ctypes
import errno
import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.compile.job import COMPILE_LIMIT_S, Job, debug_level, is_whole, run, section, shortened, workspace
from kernelgen.errors import CacheError, CompileError, InputError, ToolMissingError, cause_of
from kernelgen.files import processor_lines
from kernelgen.kernels.source import Source

VERSION_LIMIT_S = 30.0
HOST_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
# By level (g++'s -march): what /proc/cpuinfo calls the features that its kernels may use.
_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"x86-64-v3": _V3, "x86-64-v4": (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")},
    "aarch64": {"armv8-a": ("asimd", "fp")},
}
_TRIAL = '#include <omp.h>\nextern "C" int trial() { return omp_get_max_threads(); }\n'


@dataclass(frozen=True)
class HostCompiler:
    """``path`` of the executable, first line of ``--version``, and the arguments from ``$CXX``, which come first."""

    path: str
    version: str
    arguments: tuple[str, ...] = ()

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version.lower()

    @property
    def flags(self) -> tuple[str, ...]:
        """All arguments of a kernel's compilation except file names."""
        return (*self.arguments, *HOST_FLAGS, *_openmp_flags(self))


def find_host_compiler() -> HostCompiler:
    """``$CXX``, else the first of g++, c++ and clang++ that runs; ToolMissingError if there is none."""
    return _host_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=16)
def _host_compiler(cxx: str, _path: str) -> HostCompiler:
    try:
        candidates = [shlex.split(cxx)] if cxx.strip() else [["g++"], ["c++"], ["clang++"]]
    except ValueError as error:
        raise ToolMissingError(
            f"CXX={cxx!r} is no command ({error}); set it to a C++ compiler and its arguments, quoted as for a shell"
        ) from error
    hung = ""
    for command in candidates:
        path = shutil.which(command[0])
        if path is None:
            continue
        try:
            shown = run([path, *command[1:], "--version"], VERSION_LIMIT_S)
        except OSError:
            continue
        except subprocess.TimeoutExpired:
            hung = f" ({path} --version did not end within {VERSION_LIMIT_S:g} s)"
            continue
        if shown.returncode == 0:
            return HostCompiler(path, (shown.stdout.splitlines() or ["unknown"])[0].strip(), tuple(command[1:]))
    tried = f"$CXX={cxx!r}" if cxx.strip() else "g++, c++ and clang++"
    raise ToolMissingError(
        f"no C++ compiler: tried {tried}{hung}; install one with OpenMP (for example: apt install g++) or set CXX to "
        f"its path"
    )


def try_host_compiler() -> HostCompiler:
    """The compiler, after a trial compilation; raises what :func:`build` raises."""
    compiler = find_host_compiler()
    build(compiler, _TRIAL, "trial.cpp", "trial.so", compiler.flags, limit_s=VERSION_LIMIT_S)
    return compiler


def build(
    compiler: HostCompiler,
    text: str,
    source_name: str,
    binary_name: str,
    flags: Sequence[str],
    limit_s: float | None = None,
) -> bytes:
    """The bytes of the shared library of a source. limit_s: time limit in seconds, by default ``COMPILE_LIMIT_S``.

    Raises CompileError with the compiler's log or after the time limit; ToolMissingError if the command is not a C++
    compiler with OpenMP; CacheError if temporary files cannot be written.
    """
    # The source comes before the libraries in the flags: the linker resolves from left to right.
    command = [compiler.path, source_name, "-o", binary_name, *flags]
    try:
        with workspace() as folder:
            (folder / source_name).write_text(text)
            done = _compile(command, COMPILE_LIMIT_S if limit_s is None else limit_s, folder)
            made = folder / binary_name
            data = made.read_bytes() if made.exists() else b""
    except OSError as error:
        raise _no_room(str(error)) from error
    if done.returncode == 0:
        if is_whole(data):
            return data
        raise ToolMissingError(
            f"{compiler.path} ({compiler.version}) reports success, but its output ({len(data)} bytes) is no whole "
            f"library; repair it, or set CXX to another C++ compiler"
        )
    if any(os.strerror(code) in done.stderr for code in (errno.ENOSPC, errno.EDQUOT)):
        raise _no_room(shortened(done.stderr))
    if "omp.h" in done.stderr or "lomp" in done.stderr:
        raise ToolMissingError(f"{compiler.path} has no OpenMP; install libomp-dev, or use g++: set CXX=g++")
    raise CompileError(f"{shlex.join(command)} failed:\n{shortened(done.stderr or done.stdout)}")


def check_library(path: Path, entry: str) -> None:
    """Raise ToolMissingError unless the shared library loads here and has the function ``entry``."""
    try:
        library = ctypes.CDLL(str(path))
        try:
            getattr(library, entry)
        finally:
            _ctypes.dlclose(library._handle)  # a tuner compiles thousands and runs few of them
    except (OSError, AttributeError) as error:
        raise ToolMissingError(
            f"the C++ compiler's output cannot be loaded ({error}); repair the compiler or set CXX to another one, or "
            f"set EQUITUNE_CACHE to a folder from which programs may run"
        ) from error


def _openmp_flags(compiler: HostCompiler) -> tuple[str, ...]:
    """OpenMP flags; they link torch's own libgomp if the torch wheel has one.

    Kernel and torch then share a thread pool, and ``torch.set_num_threads`` applies to both. Clang's OpenMP does not
    run on libgomp.
    """
    torch = importlib.util.find_spec("torch")  # its folder, without an import
    places = torch.submodule_search_locations or [] if torch else []
    bundled = sorted(library for place in places for library in (Path(place) / "lib").glob("libgomp*.so*"))
    if compiler.is_clang or not bundled:
        return ("-fopenmp",)
    library = bundled[0]
    # -fopenmp appends the compiler's own libgomp; as-needed keeps it from being loaded beside torch's.
    return ("-fopenmp", str(library), f"-Wl,-rpath,{library.parent}", "-Wl,--as-needed")


def _no_room(reason: str) -> CacheError:
    return CacheError(
        f"the compiler's temporary files cannot be written ({reason}); free some space, or set TMPDIR to another folder"
    )


def _compile(command: Sequence[str], limit_s: float, folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return run(command, limit_s, folder)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{shlex.join(command)} did not end within {limit_s:g} s and was stopped") from error
    except OSError as error:
        raise ToolMissingError(f"{command[0]} cannot be run ({cause_of(error)}); set CXX to a C++ compiler") from error


def host_job() -> Job:
    """The host's compiler with the flags for kernels; ToolMissingError if there is none."""
    compiler = find_host_compiler()
    return _job(compiler, (*compiler.flags, *(["-g"] if debug_level() >= 2 else [])), _processor())


def portable_job(level: str) -> Job:
    """The host's compiler for a level; ToolMissingError unless it is g++, whose OpenMP is torch's."""
    features_of(level)
    compiler = find_host_compiler()
    if compiler.is_clang:
        raise ToolMissingError(f"{compiler.path} is clang, whose OpenMP is not torch's; set CXX to g++")
    usual = [flag for flag in HOST_FLAGS if not flag.startswith("-march")]
    # -fopenmp for the compiler proper alone: given to g++ it would link libgomp.
    return _job(compiler, (*compiler.arguments, *usual, f"-march={level}", "-Wp,-fopenmp"), f"portable {level}")


def _job(compiler: HostCompiler, flags: tuple[str, ...], target: str) -> Job:
    names = ("kernel.so", "kernel.cpp")

    def compiled(source: Source) -> tuple[bytes, dict[str, Any]]:
        data = build(compiler, source.text, names[1], names[0], flags)
        return data, {"code_bytes": len(section(data, ".text"))}

    return Job(f"{compiler.path} {compiler.version}", flags, target, *names, compiled, check_library)


@functools.lru_cache(maxsize=1)
def processor_features() -> frozenset[str]:
    """What /proc/cpuinfo says that this processor can do."""
    lines = (line for line in processor_lines() if line.partition("\t")[0].strip() in ("flags", "Features"))
    found = next(lines, "")
    return frozenset(found.partition(":")[2].split())


def default_level() -> str:
    """The lowest level of this machine's type; ``native`` for a type without levels."""
    return next(iter(LEVELS.get(platform.machine(), {})), "native")


def features_of(level: str) -> tuple[str, ...]:
    """The features that kernels of a level need; all of this processor for ``native``. InputError if it is unknown."""
    known = LEVELS.get(platform.machine(), {})
    if level == "native":
        return tuple(sorted(processor_features()))
    if level not in known:
        raise InputError(f"cpu is {level!r}; expected one of {', '.join((*known, 'native'))} on {platform.machine()}")
    return known[level]


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """The processor that -march=native compiles for."""
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    told = {line for line in processor_lines() if line.partition("\t")[0].strip() in wanted}
    return os.uname().machine + "".join(sorted(told))
