"""Times the first calls of a problem's convolution in a fresh process that may not compile; run it with packs at hand.

    EQUITUNE_PACK=some.pack python first_call.py mace-mp-medium cuda

Imports and the start of torch on the device are told apart. Fails if anything asks for a compiler.
"""

from __future__ import annotations

import sys
import time


def no_compiler(*_: object) -> None:
    raise AssertionError("a kernel would be compiled")


def main(name: str, device: str, dtype: str = "float32", layout: str = "mul_ir") -> None:
    for module in ("cuda.core", "cuda.bindings"):  # as if NVRTC and its Python were not installed
        sys.modules[module] = None  # type: ignore[assignment]
    began = time.perf_counter()
    import torch

    from autotune.modules.convolution import TensorProductConv
    from autotune.workload.config import find_problem
    from kernelgen.compile import compiler

    compiler.compile_by = no_compiler  # type: ignore[assignment]
    imported = time.perf_counter()
    torch.zeros(1, device=device).cpu()
    problem, of_torch = find_problem(name), getattr(torch, dtype)
    nodes, edges = 21, 400
    sender, receiver = torch.randint(nodes, (2, edges), device=device)
    x, y, w = (
        torch.randn(rows, width, device=device, dtype=of_torch, requires_grad=True)
        for rows, width in ((nodes, problem.dim_in1), (edges, problem.dim_in2), (edges, problem.weight_numel))
    )
    started = time.perf_counter()
    irreps = (problem.irreps_in1, problem.irreps_in2, problem.irreps_out, problem.e3nn_instructions)
    conv = TensorProductConv(*irreps, layout=layout, dtype=of_torch, device=device)
    out = conv(x, y, w, sender, receiver)
    value = float(out.detach().square().sum())
    called = time.perf_counter()
    out.square().sum().backward()
    norm = float(sum(one.grad.square().sum() for one in (x, y, w) if one.grad is not None))
    done = time.perf_counter()
    assert value > 0 and norm > 0 and value + norm < float("inf")
    print(
        f"{name} {dtype} {layout} on {device}: imports {imported - began:.2f} s, "
        f"torch's start {started - imported:.2f} s, module and first call {called - started:.2f} s, "
        f"first gradients {done - called:.2f} s; nothing was compiled"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
