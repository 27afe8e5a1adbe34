"""The yardstick of the numerics tests: e3nn in float64, with its first and second derivatives by autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from e3nn import o3

from kernelgen import TensorProductProblem


@dataclass(frozen=True)
class Case:
    """Random float64 inputs of one problem and graph; ``sender`` is None for the plain product."""

    problem: TensorProductProblem
    tensors: dict[str, torch.Tensor]
    sender: torch.Tensor | None
    receiver: torch.Tensor | None
    num_out: int


def make_case(
    problem: TensorProductProblem, operation: str, *, edges: int = 40, nodes: int = 7, num_out: int = 6, seed: int = 0
) -> Case:
    """Node num_out - 1 never receives, so isolated destinations are always covered."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sender = receiver = None
    rows_in, rows_out = edges, edges
    if operation == "conv":
        sender = torch.randint(0, nodes, (edges,), generator=generator)
        receiver = torch.randint(0, max(1, num_out - 1), (edges,), generator=generator)
        rows_in, rows_out = nodes, num_out
    weights = (problem.weight_numel,) if problem.shared_weights else (edges, problem.weight_numel)
    tensors = {}
    for name, shape in (
        ("x", (rows_in, problem.dim_in1)),
        ("y", (edges, problem.dim_in2)),
        ("w", weights),
        ("g", (rows_out, problem.dim_out)),
    ):
        tensors[name] = normal(*shape)
        if name != "g":
            tensors["t" + name] = normal(*shape)
    return Case(problem, tensors, sender, receiver, rows_out)


def forward(case: Case, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """e3nn's product, with gather and sum by destination for a convolution."""
    product = case.problem.reference(compile_right=False).to(torch.float64)
    if case.sender is None or case.receiver is None:
        return product(x, y, w)
    messages = product(x[case.sender], y, w)
    return messages.new_zeros(case.num_out, messages.shape[1]).index_add(0, case.receiver, messages)


def expected(case: Case, direction: str) -> dict[str, torch.Tensor]:
    """Float64 results of ``forward``, ``backward`` or ``double_backward``, keyed by slot."""
    leaf = {name: case.tensors[name].clone().requires_grad_() for name in "xywg"}
    out = forward(case, leaf["x"], leaf["y"], leaf["w"])
    if direction == "forward":
        return {"g": out.detach()}
    first = torch.autograd.grad(out, [leaf[n] for n in "xyw"], leaf["g"], create_graph=True)
    if direction == "backward":
        return dict(zip("xyw", (grad.detach() for grad in first), strict=True))
    total = sum((grad * case.tensors["t" + n]).sum() for grad, n in zip(first, "xyw", strict=True))
    second = torch.autograd.grad(total, [leaf[n] for n in "xywg"])
    return dict(zip("xywg", second, strict=True))


def relayout(rows: torch.Tensor, irreps: str, *, to_ir_mul: bool) -> torch.Tensor:
    """Feature rows from mul_ir to ir_mul, or back."""
    parts, offset = [], 0
    for mul, ir in o3.Irreps(irreps):
        block = rows[:, offset : offset + mul * ir.dim]
        shape = (mul, ir.dim) if to_ir_mul else (ir.dim, mul)
        parts.append(block.reshape(-1, *shape).transpose(1, 2).reshape(len(rows), -1))
        offset += mul * ir.dim
    return torch.cat(parts, 1) if parts else rows


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expectation, NaN told as infinity."""
    error = (found.double() - wanted).norm() / wanted.norm().clamp_min(1e-300)
    return float(error) if torch.isfinite(error) else float("inf")
