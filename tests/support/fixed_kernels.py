"""Hand-written CUDA kernels on the host, lane by lane (see cuda_emulator.hpp), in place of their launches."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_emulator import with_runtime
from torch import Tensor

from kernelgen.kernels.source import Source
from kernelgen.ops import tall_products
from kernelgen.runtime.kernel import FixedKernel


@functools.cache
def _loaded(source: Source) -> Any:
    head = re.search(rf"{source.entry}\((.*?)\)\s*\{{", source.text, re.DOTALL)
    assert head is not None
    kinds = [re.sub(r"__restrict__|\w+$", "", parameter.strip()).strip() for parameter in head[1].split(",")]
    call = f"{source.entry}({', '.join(f'({kind})q[{place}]' for place, kind in enumerate(kinds))})"
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder) / "kernel.inc", Path(folder) / "kernel.so"
        text.write_text(source.text)
        command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
        command += [f'-DKERNEL_TEXT="{text}"', f"-DKERNEL_CALL={call}"]
        # Shared memory of an inline function is static here, and else one for all libraries that have such a function.
        command += ["-fno-gnu-unique"]
        command += ["-DTENSOR_CORES"] if "mma.sync" in source.text else []
        command += ["-DIN_TF32"] if "multiply_add_tf32" in source.text else []
        subprocess.run([*command, str(with_runtime()), "-o", str(library), "-lm"], check=True)
        return ctypes.CDLL(str(library)).emulate


def run_on_host(kernel: FixedKernel, device: int, blocks: int, *values: int) -> None:
    """What ``FixedKernel.launch`` does, on tensors of the host."""
    arguments = (ctypes.c_void_p * 16)(*values)
    sizes = [ctypes.c_longlong(0)] * 3
    assert blocks > 0, "a GPU refuses a grid without blocks"
    _loaded(kernel.source)(arguments, *sizes, ctypes.c_int(blocks), ctypes.c_int(kernel.threads))


def emulate_launches(patch: pytest.MonkeyPatch) -> None:
    """Have every hand-written kernel run on the host."""
    patch.setattr(FixedKernel, "launch", run_on_host)


def take_few_edges(patch: pytest.MonkeyPatch, device: str) -> None:
    """Have kernels of edges run for any number of edges, on a CPU lane by lane."""
    patch.setattr(tall_products, "LEAST_ROWS", 1)
    if device == "cpu":
        emulate_launches(patch)
        patch.setattr(tall_products, "takes", lambda tensor, sources: tensor.dtype is torch.float32)
        patch.setattr(tall_products, "multiply_halves", _multiply_halves)


def _multiply_halves(out: Tensor, a: Tensor, b: Tensor, *, keep: bool) -> None:
    out.copy_(torch.addmm(out, a.float(), b.float().t(), beta=int(keep)))


def watched_launches(patch: pytest.MonkeyPatch) -> list[str]:
    """Entries of hand-written kernels as they are launched, without ``equitune_``."""
    run, found = FixedKernel.launch, []

    def launch(kernel: FixedKernel, *arguments: int) -> None:
        found.append(kernel.source.entry.removeprefix("equitune_"))
        run(kernel, *arguments)

    patch.setattr(FixedKernel, "launch", launch)
    return found
