"""The reference of the numerics tests: e3nn in float64, with first and second derivatives by autograd."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from e3nn import o3

from kernelgen.arithmetic.directions import DIRECTIONS, OPERANDS, Direction
from kernelgen.ops.product import Operator
from kernelgen.problem.product import TensorProductProblem


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Set torch's default dtype, which decides the precision of e3nn's constants."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, eq=False)
class Case:
    """Random float64 inputs of one problem and graph, shared by tests; ``sender`` is None for a plain product."""

    problem: TensorProductProblem
    tensors: dict[str, torch.Tensor]
    sender: torch.Tensor | None
    receiver: torch.Tensor | None
    num_out: int


@functools.lru_cache(maxsize=256)
def make_case(
    problem: TensorProductProblem, operation: str, *, edges: int = 40, nodes: int = 7, num_out: int = 6, seed: int = 0
) -> Case:
    """A random case; node num_out - 1 has no edges, so that isolated destinations are always covered."""
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
        tensors["t" + name] = normal(*shape)
    return Case(problem, tensors, sender, receiver, rows_out)


@functools.lru_cache(maxsize=64)
def e3nn_product(problem: TensorProductProblem) -> torch.nn.Module:
    """The e3nn module of a problem, built once because e3nn compiles code for each."""
    return e3nn_module(problem)


def e3nn_module(problem: TensorProductProblem) -> o3.TensorProduct:
    """The same, built anew: in float64, from the problem's fields alone, so that no code of ours is on both sides."""
    paths = [(i.in1, i.in2, i.out, i.mode, i.has_weight, i.path_weight) for i in problem.instructions]
    with float64():
        return o3.TensorProduct(
            problem.irreps_in1,
            problem.irreps_in2,
            problem.irreps_out,
            paths,
            irrep_normalization=problem.irrep_normalization,
            path_normalization=problem.path_normalization,
            internal_weights=False,
            shared_weights=problem.shared_weights,
            compile_right=False,
        )


def forward(case: Case, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """e3nn's product, with gather and sum by destination for a convolution."""
    product = e3nn_product(case.problem)
    if case.sender is None or case.receiver is None:
        return product(x, y, w)
    messages = product(x[case.sender], y, w)
    return messages.new_zeros(case.num_out, messages.shape[1]).index_add(0, case.receiver, messages)


@functools.lru_cache(maxsize=512)
def expected(case: Case, direction: str) -> Mapping[str, torch.Tensor]:
    """Float64 results of a named direction, keyed by slot, computed once for all forms of a kernel."""
    tangents, outputs = DIRECTIONS[direction].tangents, DIRECTIONS[direction].outputs
    leaf = {name: case.tensors[name].clone().requires_grad_() for name in "xywg"}
    out = forward(case, leaf["x"], leaf["y"], leaf["w"])
    if direction == "forward":
        return {"g": out.detach()}
    first = torch.autograd.grad(out, [leaf[n] for n in "xyw"], leaf["g"], create_graph=True, materialize_grads=True)
    gradients = dict(zip("xywg", (*first, out), strict=True))
    if not tangents:
        return {slot: gradients[slot].detach() for slot in outputs}
    total = sum((gradients[n] * case.tensors["t" + n]).sum() for n in tangents)
    second = torch.autograd.grad(total, [leaf[n] for n in outputs], materialize_grads=True)
    return dict(zip(outputs, second, strict=True))


# Their kernels have parts of what those of backward and double_backward have.
PARTIAL = ("source_backward", "edge_backward", "joint_backward")


def directions_with_one_part(place: int) -> list[str]:
    """All but two of ``PARTIAL``: of as many cases as there are, each part is in one."""
    return [name for name in DIRECTIONS if name not in PARTIAL or name == PARTIAL[place % len(PARTIAL)]]


def relayout(rows: torch.Tensor, irreps: str, *, to_ir_mul: bool) -> torch.Tensor:
    """Convert feature rows from mul_ir to ir_mul, or back."""
    parts, offset = [], 0
    for mul, ir in o3.Irreps(irreps):
        block = rows[:, offset : offset + mul * ir.dim]
        shape = (mul, ir.dim) if to_ir_mul else (ir.dim, mul)
        parts.append(block.reshape(-1, *shape).transpose(1, 2).reshape(len(rows), -1))
        offset += mul * ir.dim
    return torch.cat(parts, 1) if parts else rows


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``wanted``; infinity for NaN."""
    error = (found.double() - wanted).norm() / wanted.norm().clamp_min(1e-300)
    return float(error) if torch.isfinite(error) else float("inf")


def assert_matches_e3nn(
    operator: Operator, case: Case, directions: Iterable[str], tolerance: float, device: str = "cpu"
) -> None:
    """Compare every output and gradient of an operator, each alone, with outputs filled with NaN before."""
    irreps = {"x": case.problem.irreps_in1, "g": case.problem.irreps_out}

    def convert(name: str, rows: torch.Tensor) -> torch.Tensor:
        if operator.layout == "ir_mul" and name[-1] in irreps:
            rows = relayout(rows, irreps[name[-1]], to_ir_mul=True)
        return rows.to(operator.dtype).to(device).contiguous()

    t = {name: convert(name, rows) for name, rows in case.tensors.items()}
    indices = [None if index is None else index.to(device) for index in (case.sender, case.receiver)]
    where = (*indices, case.num_out)
    errors = {}
    for direction in directions:
        operands = tuple(t[name] for name in OPERANDS)
        found = operator.run(DIRECTIONS[direction], operands, *where, None, poison=True)
        for slot, wanted in expected(case, direction).items():
            rows = found[slot].cpu()
            if operator.layout == "ir_mul" and slot in irreps:
                rows = relayout(rows, irreps[slot], to_ir_mul=False)
            errors[f"{direction} {slot}"] = relative_error(rows, wanted)
    assert max(errors.values()) < tolerance, f"{operator}: {errors}"


def run_direct(
    operator: Operator, direction: str | Direction, tensors: Mapping[str, torch.Tensor], *edges: Any, **options: Any
) -> dict[str, torch.Tensor]:
    """Outputs of a direction with all operands that ``tensors`` has. edges: sender, receiver, num_out and order."""
    asked = DIRECTIONS[direction] if isinstance(direction, str) else direction
    return operator.run(asked, tuple(map(tensors.get, OPERANDS)), *edges, **options)


def copied(module: torch.nn.Module, how: str) -> torch.nn.Module:
    """A copy by ``deepcopy``, ``pickle`` or ``torch.save``."""
    if how == "deepcopy":
        return copy.deepcopy(module)
    if how == "pickle":
        return pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
