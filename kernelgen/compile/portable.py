"""Host kernels for other machines than this one: for a level of processors, and for any torch's OpenMP.

A kernel of the cache is for this machine's processor and links the OpenMP library of this torch by its path. A kernel
of a pack links none: it takes the one that torch has loaded into the process, and shares its threads.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

from kernelgen.compile.elf import section
from kernelgen.compile.host import HOST_FLAGS, build, check_library, find_host_compiler
from kernelgen.compile.job import Job
from kernelgen.emit.source import Source
from kernelgen.errors import InputError, ToolMissingError

# By level (g++'s -march): what /proc/cpuinfo calls the features that its kernels may use.
_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"x86-64-v3": _V3, "x86-64-v4": (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")},
    "aarch64": {"armv8-a": ("asimd", "fp")},
}


@functools.lru_cache(maxsize=1)
def processor_features() -> frozenset[str]:
    """What /proc/cpuinfo says that this processor can do."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = next((line for line in lines if line.partition("\t")[0].strip() in ("flags", "Features")), "")
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


def portable_job(level: str) -> Job:
    """The host's compiler for a level; ToolMissingError unless it is g++, whose OpenMP is torch's."""
    features_of(level)
    compiler = find_host_compiler()
    if compiler.is_clang:
        raise ToolMissingError(f"{compiler.path} is clang, whose OpenMP is not torch's; set CXX to g++")
    usual = [flag for flag in HOST_FLAGS if not flag.startswith("-march")]
    # -fopenmp for the compiler proper alone: given to g++ it would link libgomp.
    flags = (*compiler.arguments, *usual, f"-march={level}", "-Wp,-fopenmp")
    names = ("kernel.so", "kernel.cpp")

    def compiled(source: Source) -> tuple[bytes, dict[str, Any]]:
        data = build(compiler, source.text, names[1], names[0], flags)
        return data, {"code_bytes": len(section(data, ".text"))}

    return Job(f"{compiler.path} {compiler.version}", flags, f"portable {level}", *names, compiled, check_library)
