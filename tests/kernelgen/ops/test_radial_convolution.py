"""Convolutions with weights formed part by part: values and derivatives of the whole, and how much exists at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.ops import radial_convolution as convolution
from kernelgen.ops.product import build
from kernelgen.ops.radial_convolution import radial_product
from kernelgen.problem.product import TensorProductProblem

PROBLEM = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o+2e", "0e+1o")
NODES, HIDDEN = 13, 6


def graph(is_sorted: bool, edges: int = 150) -> tuple[Tensor, Tensor]:
    """Sender and receiver; one receiver has 40 edges, and two have none."""
    generator = torch.Generator().manual_seed(edges)
    receiver = torch.randint(2, NODES - 1, (edges,), generator=generator)
    receiver[: min(edges, 40)] = 5
    receiver = receiver[torch.randperm(edges, generator=generator)]
    return torch.randint(NODES, (edges,), generator=generator), receiver.sort().values if is_sorted else receiver


def tensors(edges: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "x": (NODES, PROBLEM.dim_in1),
        "y": (edges, PROBLEM.dim_in2),
        "h": (edges, HIDDEN),
        "m": (HIDDEN, PROBLEM.weight_numel),
        "g": (NODES, PROBLEM.dim_out),
    }
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)  # noqa: E731
    return {name: draw(shape) for name, shape in shapes.items()} | {
        f"t{name}": draw(shape) for name, shape in shapes.items() if name != "g"
    }


def derivatives(function: Callable[..., Tensor], given: dict[str, Tensor], wanted: str, tangents: str) -> list[Tensor]:
    """The value, its first gradients, and those of <tangents, first gradients>."""
    inputs = {name: given[name].clone().requires_grad_(name in wanted) for name in "xyhm"}
    g = given["g"].clone().requires_grad_()
    out = function(*inputs.values())
    slots = [name for name in "xyhm" if name in wanted]
    first = torch.autograd.grad(out, [inputs[name] for name in slots], g, create_graph=True)
    found = [out, *first]
    if tangents:
        total = sum((one * given[f"t{slot}"]).sum() for slot, one in zip(slots, first, strict=True) if slot in tangents)
        of = [inputs[name] for name in slots] + [g]
        found += torch.autograd.grad(total, of, allow_unused=True, materialize_grads=True)
    return [one.detach() for one in found]


def assert_is_whole(most: int, is_sorted: bool, wanted: str = "xyhm", tangents: str = "xyhm", **options: Any) -> None:
    sender, receiver = (index.to(options.get("device", "cpu")) for index in graph(is_sorted))
    operator = build(PROBLEM, operation="conv", dtype=torch.float64, **options)
    given = tensors(len(sender), options.get("device", "cpu"))

    def whole(x: Tensor, y: Tensor, h: Tensor, m: Tensor) -> Tensor:
        return operator(x, y, h @ m, sender, receiver)

    def by_parts(x: Tensor, y: Tensor, h: Tensor, m: Tensor) -> Tensor:
        return radial_product(x, y, h, m, sender, receiver, NODES, operator, most)

    found = derivatives(by_parts, given, wanted, tangents)
    for one, other in zip(found, derivatives(whole, given, wanted, tangents), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("most", [1, 17, 60, 149])
def test_value_and_derivatives(most: int, is_sorted: bool) -> None:
    for layout in ("ir_mul", "mul_ir"):
        assert_is_whole(most, is_sorted, layout=layout)


@pytest.mark.parametrize("tangents", ["x", "y", "h", "m", "yh", "xm", ""])
@pytest.mark.parametrize("wanted", ["xyhm", "yh", "hm", "x"])
def test_some_gradients_and_some_tangents(wanted: str, tangents: str) -> None:
    assert_is_whole(30, False, wanted, "".join(slot for slot in tangents if slot in wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_on_a_gpu(deterministic: bool) -> None:
    for most in (17, 60):
        assert_is_whole(most, False, device="cuda", deterministic=deterministic)


@pytest.mark.slow
def test_by_finite_differences() -> None:
    sender, receiver = graph(False, 11)
    operator = build(PROBLEM, operation="conv", dtype=torch.float64)
    inputs = [one.requires_grad_() for name, one in tensors(11).items() if name in "xyhm"]

    def function(x: Tensor, y: Tensor, h: Tensor, m: Tensor) -> Tensor:
        return radial_product(x, y, h, m, sender, receiver, NODES, operator, 4)

    # Along drawn directions: one by one takes a minute.
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("edges", [0, 1, 30])
def test_few_edges_are_one_part(edges: int) -> None:
    sender, receiver = graph(False, edges)
    operator, given = build(PROBLEM, operation="conv", dtype=torch.float64), tensors(edges)
    x, y, h, m = (given[name] for name in "xyhm")
    found = radial_product(x, y, h, m, sender, receiver, NODES, operator, 30)
    assert torch.equal(found, operator(x, y, h @ m, sender, receiver))


def test_what_exists_at_a_time_and_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product has more rows than a part, but for a receiver with more edges; the backward pass keeps no weights."""
    sender, receiver = graph(False)
    operator, given = build(PROBLEM, operation="conv", dtype=torch.float64), tensors(150)
    x, y, h, m = (given[name].requires_grad_() for name in "xyhm")
    rows, kept, product = [], [], torch.mm

    def counted(a: Tensor, b: Tensor) -> Tensor:
        if a.shape[0] != HIDDEN:  # that of the matrix's gradient sums over edges
            rows.append(a.shape[0])
        return product(a, b)

    monkeypatch.setattr(convolution.torch, "mm", counted)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = radial_product(x, y, h, m, sender, receiver, NODES, operator, 30)
    torch.autograd.grad(out.square().sum(), (x, y, h, m))
    largest = int(torch.bincount(receiver).max())
    assert largest > 40 and sum(rows) == 3 * 150 and max(rows) == largest
    assert sorted(rows)[:-3] and max(count for count in rows if count != largest) <= 30
    assert (150, PROBLEM.weight_numel) not in kept and (150, HIDDEN) in kept


def test_indices_written_in_between_are_noticed() -> None:
    sender, receiver = graph(True)
    operator, given = build(PROBLEM, operation="conv", dtype=torch.float64), tensors(150)
    x, y, h, m = (given[name].requires_grad_() for name in "xyhm")
    out = radial_product(x, y, h, m, sender, receiver, NODES, operator, 30)
    sender[0] += 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_does_not_fit() -> None:
    sender, receiver = graph(True)
    operator, given = build(PROBLEM, operation="conv", dtype=torch.float64), tensors(150)
    x, y, h, m = (given[name] for name in "xyhm")
    edges = sender, receiver, NODES
    with pytest.raises(InputError, match=r"the matrix \(6, 3\); expected \(edges, hidden\) and \(hidden, "):
        radial_product(x, y, h, m[:, :3], *edges, operator, 30)
    with pytest.raises(InputError, match="h has 149 rows; expected 150"):
        radial_product(x, y, h[:149], m, *edges, operator, 30)
    (first,) = torch.autograd.grad(
        radial_product(x, y.requires_grad_(), h, m, *edges, operator, 30).square().sum(), y, create_graph=True
    )
    (second,) = torch.autograd.grad(first.square().sum(), y, create_graph=True)
    with pytest.raises(Exception, match="third derivatives"):
        second.sum().backward()


@pytest.mark.parametrize("wanted", ["xyhm", "yh", "x"])
def test_batched_gradients(wanted: str) -> None:
    """Several cotangents at a time, as Hessians take them, for first and second derivatives."""
    sender, receiver = graph(False)
    operator, given = build(PROBLEM, operation="conv", dtype=torch.float64), tensors(150)
    cotangents = torch.randn(3, NODES, PROBLEM.dim_out, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

    def found(function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = {name: given[name].clone().requires_grad_(name in wanted) for name in "xyhm"}
        of, g = [inputs[name] for name in wanted], given["g"].clone().requires_grad_()
        out = function(*inputs.values())
        first = torch.autograd.grad(out, of, g, create_graph=True)
        tangents = [torch.stack([given[f"t{name}"] * factor for factor in (1, -2)]) for name in wanted]
        second = torch.autograd.grad(
            first, [*of, g], tangents, is_grads_batched=True, allow_unused=True, retain_graph=True
        )
        batched = torch.autograd.grad(out, of, cotangents, is_grads_batched=True)
        return [*batched, *(torch.zeros(()) if one is None else one for one in second)]

    by_parts = found(lambda *xyhm: radial_product(*xyhm, sender, receiver, NODES, operator, 30))
    whole = found(lambda x, y, h, m: operator(x, y, h @ m, sender, receiver))
    for one, other in zip(by_parts, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
