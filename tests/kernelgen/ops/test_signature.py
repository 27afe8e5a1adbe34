"""What follows from a signature: schemas, which exported programs name, and all derivatives of a new operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelgen
from kernelgen.errors import UnsupportedError
from kernelgen.ops.base import OPERATORS
from kernelgen.ops.library import DifferentiableOperator, Maybe, Signature, call, define, differentiable

kernelgen.register_operators()
GRAPH = (
    "Tensor? sender, Tensor? receiver, Tensor? spans, Tensor? perm, Tensor? sender_spans, Tensor? sender_perm, "
    "SymInt num_out"
)
SCHEMAS = {
    "sh_forward": "(Tensor v, str spec) -> Tensor",
    "sh_backward": "(Tensor v, Tensor g, str spec) -> Tensor",
    "sh_double_backward": "(Tensor v, Tensor g, Tensor t, str outputs, str spec) -> (Tensor, Tensor)",
    "sc_forward": "(Tensor x, Tensor w, Tensor elements, str spec) -> Tensor",
    "sc_backward": "(Tensor x, Tensor w, Tensor g, Tensor elements, str outputs, str spec) -> (Tensor, Tensor)",
    "sc_double_backward": "(Tensor x, Tensor w, Tensor g, Tensor? tx, Tensor? tw, Tensor elements, str outputs, "
    "str spec) -> (Tensor, Tensor, Tensor)",
    "tp_forward": f"(Tensor x, Tensor y, Tensor w, {GRAPH}, str spec) -> Tensor",
    "tp_backward": f"(Tensor x, Tensor y, Tensor w, Tensor g, {GRAPH}, str outputs, str spec) -> "
    "(Tensor, Tensor, Tensor)",
    "tp_double_backward": "(Tensor x, Tensor y, Tensor w, Tensor g, Tensor? tx, Tensor? ty, Tensor? tw, "
    f"{GRAPH}, str outputs, str spec) -> (Tensor, Tensor, Tensor, Tensor)",
    "tp_order": "(Tensor nodes, SymInt num_out, SymInt count, str end, str spec) -> (Tensor, Tensor)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_programs_exported_before_find_their_ops(name: str) -> None:
    assert str(getattr(torch.ops.equitune, name).default._schema) == f"equitune::{name}{SCHEMAS[name]}"


SCALED = Signature(
    name="test_scaled",
    slots="xw",
    inputs=("x", "w"),
    tangents=("tx", "tw"),
    rest=("Tensor scale",),
    is_multilinear=True,
    noun="a scaled product",
    instead="torch.mul",
)
define(SCALED)
SCALE = torch.tensor([[2.0]], dtype=torch.float64)


class Scaled(DifferentiableOperator):
    """``scale * x * w`` of rows, whose derivatives are easily written down."""

    signature = SCALED
    row_slots = "xwg"
    dim_out = 3
    spec = _kernel_spec = _default_schedule = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.text = "scaled"

    def op_forward(self, x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return scale * x * w

    def op_backward(self, x: Tensor, w: Tensor, g: Tensor, scale: Tensor, outputs: str) -> dict[str, Tensor]:
        found = {"x": w, "w": x}
        return {slot: scale * g * found[slot] for slot in outputs}

    def op_double_backward(
        self, x: Tensor, w: Tensor, g: Tensor, tx: Maybe, tw: Maybe, scale: Tensor, outputs: str
    ) -> dict[str, Tensor]:
        of_x, of_w = (torch.zeros_like(x) if t is None else t for t in (tx, tw))
        found = {"x": of_w * g, "w": of_x * g, "g": of_x * w + of_w * x}
        return {slot: scale * found[slot] for slot in outputs}


@pytest.fixture(params=["eager", "op"])
def value(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, Tensor], Tensor]:
    operator = Scaled()
    monkeypatch.setitem(OPERATORS, operator.text, operator)
    if request.param == "eager":
        return lambda x, w: differentiable(operator, x, w, SCALE)
    return lambda x, w: call("test_scaled_forward", x, w, SCALE, operator.text)


def rows() -> tuple[Tensor, Tensor]:
    x, w = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return x, w


def test_both_derivatives_follow(value: Callable[..., Tensor]) -> None:
    assert torch.autograd.gradcheck(value, rows(), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(value, rows())


def test_hessian_products_follow(value: Callable[..., Tensor]) -> None:
    x, w = (t.detach() for t in rows())

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return value(x, w).sum()

    found = torch.autograd.functional.hvp(loss, (x, w), (w, x))[1]
    torch.testing.assert_close(found, (2 * x, 2 * w))


def test_third_derivatives_are_refused_by_name(value: Callable[..., Tensor]) -> None:
    x, w = rows()
    (first,) = torch.autograd.grad(value(x, w).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), w, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"third derivatives of a scaled product .* differentiate torch\.mul"):
        torch.autograd.grad(second.sum(), x)


def test_transforms_follow(value: Callable[..., Tensor]) -> None:
    x, w = (t.detach() for t in rows())
    found, change = torch.func.jvp(value, (x, w), (w, x))
    torch.testing.assert_close((found, change), (2 * x * w, 2 * (w * w + x * x)))
    items = torch.stack([w, 3 * w])
    torch.testing.assert_close(torch.func.vmap(value, (None, 0))(x, items), 2 * x * items)
    of_x = torch.func.grad(lambda x: value(x, w).square().sum())
    torch.testing.assert_close(of_x(x), 8 * x * w * w)
    torch.testing.assert_close(torch.func.jvp(of_x, (x,), (w,))[1], 8 * w**3)


def test_fake_tensors_have_the_shapes(value: Callable[..., Tensor]) -> None:
    x, w = (t.detach() for t in rows())
    with FakeTensorMode() as mode:
        x, w, scale = (mode.from_tensor(t) for t in (x, w, SCALE))
        out = torch.ops.equitune.test_scaled_forward(x, w, scale, "scaled")
        found = torch.ops.equitune.test_scaled_double_backward(x, w, out, x, None, scale, "xg", "scaled")
    assert [tuple(t.shape) for t in (out, *found)] == [(4, 3), (4, 3), (0,), (4, 3)]
