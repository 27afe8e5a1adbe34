"""Run a plan's generated CUDA text on the host (see cuda_emulator.hpp): the same buffers in, the same buffers out."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

from kernelgen.emit_cuda import emit_cuda, launch_geometry
from kernelgen.plan import BUFFERS, Plan


def emulate(plan: Plan, buffers: dict[str, torch.Tensor], num_edges: int, num_in: int, num_out: int) -> None:
    """Execute every lane of every block; outputs in ``buffers`` are written in place."""
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder) / "kernel.inc", Path(folder) / "kernel.so"
        text.write_text(emit_cuda(plan).text)
        shim = Path(__file__).with_name("cuda_emulator.hpp")
        command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f'-DKERNEL_TEXT="{text}"']
        subprocess.run([*command, str(shim), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).emulate
        pointers = (ctypes.c_void_p * len(BUFFERS))(
            *(buffers[name].data_ptr() if name in buffers else None for name in BUFFERS)
        )
        blocks, threads, _ = launch_geometry(plan, num_edges, num_in, num_out)
        function(
            pointers,
            *(ctypes.c_longlong(n) for n in (num_edges, num_in, num_out)),
            ctypes.c_int(blocks),
            ctypes.c_int(threads),
        )
