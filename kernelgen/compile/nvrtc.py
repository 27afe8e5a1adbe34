"""NVRTC, the compiler of CUDA text: it needs neither a GPU nor a driver."""

from __future__ import annotations

import functools
import io
import re
import threading
from pathlib import Path
from typing import Any

from kernelgen.compile.elf import is_whole, section
from kernelgen.compile.job import Job, debug_level, shortened
from kernelgen.emit.source import Source
from kernelgen.errors import CompileError, ToolMissingError

SOURCE_NAME = "kernel.cu"
# cuda.core chooses its implementation at import; a thread that imports it meanwhile sees a partial module.
_import_lock = threading.Lock()


def cuda_job(arch: str) -> Job:
    """NVRTC for an architecture such as ``sm_90``; ToolMissingError if it is not installed."""
    with _import_lock:
        version = nvrtc_version()
    lineinfo = debug_level() >= 2
    flags = ("-std=c++17", "-lineinfo") if lineinfo else ("-std=c++17",)
    compiled = functools.partial(_compile, arch=arch, lineinfo=lineinfo)
    return Job(f"nvrtc {version}", flags, arch, "kernel.cubin", SOURCE_NAME, compiled, _check)


def ptx_job(arch: str) -> Job:
    """NVRTC for PTX, which drivers compile for architectures from ``arch`` on; ToolMissingError if it is missing."""
    job, flags = cuda_job(arch), (f"--gpu-architecture=compute_{arch.removeprefix('sm_')}", "-std=c++17")
    compiled = functools.partial(_compile_ptx, flags=flags)
    return Job(job.identity, flags, arch, "kernel.ptx", SOURCE_NAME, compiled, _check_ptx)


@functools.lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """Version of the NVRTC library found on this machine; ToolMissingError if there is none."""
    advice = (
        "install it with: pip install 'equitune[gpu]', or 'equitune[gpu-cu12]' for drivers before 580 (to compile, no "
        "CUDA toolkit or driver is needed)"
    )
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions  # noqa: F401  (fail now if compilation would lack them)
    except ImportError as error:
        raise ToolMissingError(f"cuda.core cannot be imported ({error}); {advice}") from error
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        first_line = (str(error).splitlines() or ["not found"])[0]
        raise ToolMissingError(f"NVRTC cannot be loaded ({first_line}); {advice}") from error
    return f"{major}.{minor}"


def has_nvrtc() -> bool:
    """Whether this machine has NVRTC."""
    try:
        return bool(nvrtc_version())
    except ToolMissingError:
        return False


def misfit(driver: tuple[int, int], version: str) -> str:
    """Why a driver (the CUDA version that it supports) cannot load what this NVRTC makes; empty if it can.

    Machine code runs on every driver of the same CUDA major version and of later ones.
    """
    if int(version.partition(".")[0]) <= driver[0]:
        return ""
    return (
        f"NVRTC {version} makes kernels for drivers of CUDA {version.partition('.')[0]}, and this driver supports CUDA "
        f"{driver[0]}.{driver[1]}: type pip uninstall nvidia-cuda-nvrtc cuda-bindings, then pip install "
        f"'equitune[gpu-cu{driver[0]}]', or install a newer driver"
    )


def unknown_arch(arch: str) -> str:
    """Why NVRTC cannot compile for ``sm_90`` or the like; empty if it can."""
    from cuda.bindings import nvrtc

    _, known = nvrtc.nvrtcGetSupportedArchs()
    if int(arch.removeprefix("sm_")) in known:
        return ""
    return f"NVRTC {nvrtc_version()} does not know {arch}, its newest is sm_{max(known)}: install a newer NVRTC"


def has_cache(version: str) -> bool:
    """Whether this NVRTC has a cache of its own, whose hits have no assembler report: since 12.9."""
    return tuple(map(int, version.split("."))) >= (12, 9)


def _compile(source: Source, arch: str, lineinfo: bool) -> tuple[bytes, dict[str, Any]]:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        name=SOURCE_NAME,
        arch=arch,
        std="c++17",
        lineinfo=True if lineinfo else None,
        ptxas_options=["-v"],
        no_cache=True if has_cache(nvrtc_version()) else None,
    )
    try:
        code = bytes(Program(source.text, "c++", options).compile("cubin", logs=log).code)
    except Exception as error:
        # cuda.core raises private types for NVRTC's errors; their message holds the compiler's log.
        raise CompileError(f"NVRTC for {arch} failed:\n{shortened(str(error))}") from error
    return code, parse_ptxas(log.getvalue(), source.entry)


def _compile_ptx(source: Source, flags: tuple[str, ...]) -> tuple[bytes, dict[str, Any]]:
    """By NVRTC's own functions, because cuda.core asks the driver whether it could load the PTX."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.text.encode(), SOURCE_NAME.encode(), 0, None, None)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        if int(status) != 0:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"NVRTC with {' '.join(flags)} failed:\n{shortened(log.decode(errors='replace'))}")
        _, size = nvrtc.nvrtcGetPTXSize(program)
        code = bytearray(size)
        nvrtc.nvrtcGetPTX(program, code)
        return bytes(code), {}
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(path: Path, entry: str) -> None:
    """Raise ToolMissingError unless the cubin has the kernel ``entry`` (only a device could load it)."""
    data = path.read_bytes()
    if not (is_whole(data) and section(data, f".text.{entry}")):
        raise ToolMissingError(
            f"NVRTC {nvrtc_version()} made {len(data)} bytes without the kernel {entry}; install another"
        )


def _check_ptx(path: Path, entry: str) -> None:
    """Raise ToolMissingError unless the PTX has the kernel ``entry``."""
    if f".entry {entry}(".encode() not in path.read_bytes():
        raise ToolMissingError(f"NVRTC {nvrtc_version()} made PTX without the kernel {entry}; install another")


def parse_ptxas(log: str, entry: str) -> dict[str, Any]:
    """Registers, spills, stack and static shared memory of ``entry`` from the assembler's ``-v`` report.

    Also ``serialized``, 1 if products of four warps wait for each other because the assembler could not do better; it
    says so in a remark alone.
    """
    serialized = {"serialized": 1} if "wgmma.mma_async instructions are serialized" in log else {}
    _, _, report = log.partition(f"Compiling entry function '{entry}'")
    report = report.split("Compiling entry function")[0]
    _, _, report = report.partition(f"Function properties for {entry}")

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    if "Used" not in report:
        return {}
    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "shared_bytes": number(r"(\d+) bytes smem"),
        **serialized,
    }
