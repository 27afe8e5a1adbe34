"""The compilers of GPU text: NVRTC for CUDA, clang for HIP. Neither needs a GPU or a driver."""

from __future__ import annotations

import functools
import io
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

from kernelgen.compile.job import COMPILE_LIMIT_S, Job, debug_level, is_whole, run, section, shortened, workspace
from kernelgen.errors import CompileError, ToolMissingError
from kernelgen.kernels.source import Source

# NVRTC, the compiler of CUDA text: it needs neither a GPU nor a driver.

SOURCE_NAME = "kernel.cu"
# Of machine code since Volta.
INSTRUCTION_BYTES = 16
# cuda.core chooses its implementation at import; a thread that imports it meanwhile sees a partial module.
_import_lock = threading.Lock()


def cuda_job(arch: str) -> Job:
    """NVRTC for an architecture such as ``sm_90``; ToolMissingError if it is not installed."""
    with _import_lock:
        version = nvrtc_version()
    lineinfo = debug_level() >= 2
    flags = ("-std=c++17", "-lineinfo") if lineinfo else ("-std=c++17",)
    compiled = functools.partial(_compile_cuda, arch=arch, lineinfo=lineinfo)
    return Job(f"nvrtc {version}", flags, arch, "kernel.cubin", SOURCE_NAME, compiled, _check_cubin)


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


def _compile_cuda(source: Source, arch: str, lineinfo: bool) -> tuple[bytes, dict[str, Any]]:
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
    size = len(section(code, f".text.{source.entry}"))
    resources = parse_ptxas(log.getvalue(), source.entry)
    return code, {**resources, "code_bytes": size, "instructions": size // INSTRUCTION_BYTES} if size else resources


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


def _check_cubin(path: Path, entry: str) -> None:
    """Raise ToolMissingError unless the cubin has the kernel ``entry`` (only a device could load it)."""
    data = path.read_bytes()
    is_there = is_whole(data) and section(data, f".text.{entry}")
    _require(is_there, f"NVRTC {nvrtc_version()}", f"{len(data)} bytes", entry)


def _check_ptx(path: Path, entry: str) -> None:
    _require(f".entry {entry}(".encode() in path.read_bytes(), f"NVRTC {nvrtc_version()}", "PTX", entry)


def _require(has_kernel: object, compiler: str, made: str, entry: str) -> None:
    if not has_kernel:
        raise ToolMissingError(f"{compiler} made {made} without the kernel {entry}; install another")


def parse_ptxas(log: str, entry: str) -> dict[str, Any]:
    """Registers, spills, stack and static shared memory of ``entry`` from the assembler's ``-v`` report.

    Also ``serialized``, 1 if products of four warps wait for each other because the assembler could not do better; it
    says so in a remark alone.
    """
    serialized = {"serialized": 1} if "wgmma.mma_async instructions are serialized" in log else {}
    _, _, report = log.partition(f"Compiling entry function '{entry}'")
    report = report.split("Compiling entry function")[0]
    _, _, report = report.partition(f"Function properties for {entry}")

    if "Used" not in report:
        return {}
    return {
        "registers": _number(r"Used (\d+) registers", report),
        "spill_bytes": sum(_number(rf"(\d+) bytes spill {kind}", report) for kind in ("stores", "loads")),
        "stack_bytes": _number(r"(\d+) bytes stack frame", report),
        "shared_bytes": _number(r"(\d+) bytes smem", report),
        **serialized,
    }


def _number(pattern: str, text: str) -> int:
    """The number that the pattern finds; 0 if it finds none."""
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


# clang, the compiler of HIP text: to assembly and a code object, without ROCm, a driver or an AMD GPU.

# Names of clang that are looked for, after $HIP_CLANG.
NAMES = ("clang-19", "clang-20", "clang-21", "clang-18", "clang++", "clang")
FLAGS = (
    *("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-std=c++17", "-O3", "-ffp-contract=fast"),
    # Memory that torch allocates is coarse-grained: floats may be added there by one instruction.
    *("-munsafe-fp-atomics", "-Wno-pass-failed"),
)


def hip_job(arch: str) -> Job:
    """clang for an architecture such as ``gfx942``; ToolMissingError if there is none that knows AMD GPUs."""
    path, version = find_clang()
    compiled = functools.partial(_compile_hip, path, arch)
    return Job(version, FLAGS, arch, "kernel.co", "kernel.hip", compiled, _check_code_object)


@functools.lru_cache(maxsize=1)
def find_clang() -> tuple[str, str]:
    """Path and first line of ``--version`` of the first clang that compiles for AMD GPUs."""
    for name in filter(None, (os.environ.get("HIP_CLANG"), *NAMES)):
        path = shutil.which(name)
        if path is None:
            continue
        targets = _run([path, "--print-targets"])
        if targets.returncode == 0 and "amdgcn" in targets.stdout:
            return path, _run([path, "--version"]).stdout.splitlines()[0].strip()
    raise ToolMissingError(
        f"no clang for AMD GPUs: tried $HIP_CLANG, {', '.join(NAMES)}; install one (Debian: apt install clang-19 "
        "lld-19) or set HIP_CLANG to its path"
    )


def _run(command: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return run(command, COMPILE_LIMIT_S, folder)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} did not end within {COMPILE_LIMIT_S:g} s") from error


def _compile_hip(path: str, arch: str, source: Source) -> tuple[bytes, dict[str, Any]]:
    """The code object, linked from the assembly whose closing remarks say what the kernel needs."""
    with workspace() as folder:
        (folder / "kernel.hip").write_text(source.text)
        steps = (
            [path, *FLAGS, f"--offload-arch={arch}", "-S", "kernel.hip", "-o", "kernel.s"],
            [path, "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-nogpulib", "kernel.s", "-o", "kernel.co"],
        )
        for command in steps:
            done = _run(command, folder)
            if done.returncode != 0:
                raise CompileError(f"clang for {arch} failed:\n{shortened(done.stderr)}")
        resources = parse_metadata((folder / "kernel.s").read_text(), source.entry)
        return (folder / "kernel.co").read_bytes(), resources


def parse_metadata(assembly: str, entry: str) -> dict[str, Any]:
    """Registers of a lane, spills (bytes of a lane), stack and static shared memory of ``entry``, from its metadata."""
    kernels = assembly.partition("amdhsa.kernels:")[2].split("  - .a")
    found = next((text for text in kernels if re.search(rf"\.name:\s+{entry}\s", text)), "")
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", found),
        "spill_bytes": 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", found),
        "stack_bytes": _number(r"\.private_segment_fixed_size:\s+(\d+)", found),
        "shared_bytes": _number(r"\.group_segment_fixed_size:\s+(\d+)", found),
    }


def _check_code_object(path: Path, entry: str) -> None:
    data = path.read_bytes()
    _require(is_whole(data) and f"{entry}.kd".encode() in data, "clang", f"{len(data)} bytes", entry)
