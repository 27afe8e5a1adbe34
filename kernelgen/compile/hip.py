"""clang, the compiler of HIP text: to assembly and a code object, without ROCm, a driver or an AMD GPU."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kernelgen.compile.elf import is_whole
from kernelgen.compile.job import Job, shortened
from kernelgen.compile.leftovers import COMPILE_LIMIT_S, run, workspace
from kernelgen.emit.source import Source
from kernelgen.errors import CompileError, ToolMissingError

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
    compiled = functools.partial(_compile, path, arch)
    return Job(version, FLAGS, arch, "kernel.co", "kernel.hip", compiled, _check)


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


def _compile(path: str, arch: str, source: Source) -> tuple[bytes, dict[str, Any]]:
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

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", found)
        return int(match.group(1)) if match else 0

    return {
        "registers": number("vgpr_count"),
        "spill_bytes": 4 * number("vgpr_spill_count"),
        "stack_bytes": number("private_segment_fixed_size"),
        "shared_bytes": number("group_segment_fixed_size"),
    }


def _check(path: Path, entry: str) -> None:
    """Raise ToolMissingError unless the code object is whole and names the kernel."""
    data = path.read_bytes()
    if not (is_whole(data) and f"{entry}.kd".encode() in data):
        raise ToolMissingError(f"clang made {len(data)} bytes without the kernel {entry}; install another")
