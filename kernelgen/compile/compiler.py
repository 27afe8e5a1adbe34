"""Compiles source to a binary on disk: by the host's C++ compiler, by NVRTC for CUDA, or by clang for HIP.

None needs the target device or a CUDA driver. The cache on disk (see ``cache``) is keyed by source, flags, compiler
version and architecture.

Environment: ``CXX`` is the host compiler, with arguments if any; ``EQUITUNE_CACHE`` the directory of the cache.
``EQUITUNE_PACK`` names packs of compiled kernels (see ``pack_file``), ``EQUITUNE_PACKS`` folders of them.
``EQUITUNE_DEBUG`` writes files to ``$EQUITUNE_DEBUG_DIR`` or ``./equitune-debug``:

    0 or unset   nothing
    1            for every kernel: its source, and its resource usage and compile command as JSON
    2            the same, compiled with line information for debuggers and profilers
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernelgen.compile import cache
from kernelgen.compile.cache import Binary
from kernelgen.compile.gpu import cuda_job, hip_job
from kernelgen.compile.host import host_job
from kernelgen.compile.job import Job, debug_level
from kernelgen.compile.pack_file import find_in_packs, find_shipped
from kernelgen.device import DeviceFacts
from kernelgen.errors import CacheError, CompileError, ToolMissingError, cause_of
from kernelgen.kernels.source import Source

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
        if facts.backend == "cuda" and cache.find(cache.key_of(source, job), job.binary_name) is None:
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
    key = cache.key_of(source, job)
    binary = cache.find(key, job.binary_name)
    if binary is None:
        with cache.one_at_a_time(key):
            binary = cache.find(key, job.binary_name) or _compiled(job, source, key)
    if debug_level():
        _write_debug(source, job, key, binary)
    return binary


def _compiled(job: Job, source: Source, key: str) -> Binary:
    data, resources = job.compile(source)
    return cache.publish(
        key, job.binary_name, data, job.source_name, source.text, resources, lambda path: job.check(path, source.entry)
    )


def compile_many(
    items: Sequence[tuple[Source, DeviceFacts]], workers: int | None = None
) -> list[Binary | CompileError]:
    """Compile in parallel; results in order, a CompileError as a value where the compiler rejects a source.

    Threads suffice: g++ is a separate process, and NVRTC releases the interpreter's lock.
    """

    def attempt(item: tuple[Source, DeviceFacts]) -> Binary | CompileError:
        try:
            return compile_source(*item)
        except CompileError as error:
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
