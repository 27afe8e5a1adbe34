"""Directions, the derivatives that a kernel computes: forward, backward, double backward; of products and harmonics.

A kernel sums *monomials* of the form F of ``couplings``. Forward and backward use the single monomial
F(x, y, w, g). Double backward differentiates ``<tx, dF/dx> + <ty, dF/dy> + <tw, dF/dw>``, which is
F(tx,y,w,g) + F(x,ty,w,g) + F(x,y,tw,g). The tangents are the cotangents of the three first gradients. A tangent of g
is the cotangent of the value itself; with it, one kernel serves a loss on both the value and first gradients
(``joint_backward``). An output ``o`` takes every monomial whose slot ``o`` holds the primal operand, and sums their
derivatives with respect to that slot.

Harmonics Y [rows, dim_out] of vectors v [rows, 3] have separate directions. With cotangents g of Y and tangents t of v:

    forward           Y                                              reads v
    backward          grad sum_i g_i Y_i                             reads v and g
    double_backward   x: Hessian(sum_i g_i Y_i) t,  g: t . grad Y_i  reads v, t and, for x, g
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kernelgen.errors import ProblemError

SLOTS = "xywg"
# Every buffer that a kernel may read, in the order of its arguments.
OPERANDS = tuple(prefix + slot for slot in SLOTS for prefix in ("", "t"))


@dataclass(frozen=True)
class Monomial:
    """One term of the form: the names of the buffers in its four slots (``x`` or ``tx``, ...)."""

    x: str
    y: str
    w: str
    g: str


@dataclass(frozen=True)
class Direction:
    """``tangents``: slots that have a tangent; ``outputs``: slots that get a gradient; both in the order ``xywg``.

    The gradient with respect to g is the forward value. ``name`` selects the kernel's schedule.
    """

    name: str
    tangents: str
    outputs: str

    def __post_init__(self) -> None:
        for text in (self.tangents, self.outputs):
            if text != "".join(slot for slot in SLOTS if slot in text) or (text is self.outputs and not text):
                raise ProblemError(f"direction {self}: {text!r} is not an ordered choice from {SLOTS!r}")

    @functools.cached_property
    def monomials(self) -> tuple[Monomial, ...]:
        if not self.tangents:
            return (Monomial(*SLOTS),)
        return tuple(
            Monomial(*("t" + slot if slot == tangent else slot for slot in SLOTS)) for tangent in self.tangents
        )

    @functools.cached_property
    def live_outputs(self) -> str:
        """Outputs to which some monomial contributes; the others are identically zero."""
        return "".join(
            slot for slot in self.outputs if any(getattr(monomial, slot) == slot for monomial in self.monomials)
        )

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Buffers that the kernel reads, in the order of :data:`OPERANDS`."""
        needed: set[str] = set()
        for monomial in self.monomials:
            for out in self.live_outputs:
                if getattr(monomial, out) == out:
                    needed |= {getattr(monomial, slot) for slot in SLOTS if slot != out}
        return tuple(name for name in OPERANDS if name in needed)

    @property
    def text(self) -> str:
        """For example ``backward:->xyw`` or ``double_backward:y->xwg``."""
        return f"{self.name}:{self.tangents}->{self.outputs}"


@functools.cache
def forward() -> Direction:
    return Direction("forward", "", "g")


@functools.cache
def backward(outputs: str = "xyw") -> Direction:
    """Gradients with respect to ``outputs``, given the output's cotangent g. Forces need the gradient of y alone."""
    return Direction({"x": "source_backward", "y": "edge_backward"}.get(outputs, "backward"), "", outputs)


@functools.cache
def double_backward(tangents: str = "xyw", outputs: str = "xywg") -> Direction:
    """Gradients of first gradients; ``tangents`` names the slots whose first gradient has a cotangent.

    A tangent of ``g`` is the value's cotangent; with it the value is differentiated too.
    """
    return Direction("joint_backward" if "g" in tangents else "double_backward", tangents, outputs)


DIRECTIONS = {
    direction.name: direction
    for direction in (
        *(forward(), backward(), backward("x"), backward("y")),
        *(double_backward(), double_backward("yg", "xyw")),
    )
}


@functools.cache
def fixed_order_parts(direction: Direction) -> tuple[Direction, ...]:
    """The parts of a direction in a deterministic convolution: gradients of x by sender, all others by receiver."""
    others = direction.live_outputs.replace("x", "")
    if "x" not in direction.live_outputs or not others:
        return (direction,)
    return (
        Direction("source_backward", direction.tangents, "x"),
        Direction(direction.name, direction.tangents, others),
    )


@dataclass(frozen=True)
class HarmonicsDirection(Direction):
    """``outputs``: ``x``, a gradient with respect to v, and ``g``, Y itself or a gradient with respect to g."""

    @property
    def operands(self) -> tuple[str, ...]:
        """Buffers that a call has: v as ``x``, t as ``tx``."""
        return {"forward": ("x",), "backward": ("x", "g"), "double_backward": ("x", "tx", "g")}[self.name]

    @property
    def text(self) -> str:
        return f"harmonics {self.name} -> {' '.join(self.outputs)}"


FORWARD = HarmonicsDirection("forward", "", "g")
BACKWARD = HarmonicsDirection("backward", "", "x")
DOUBLE_BACKWARD = {outputs: HarmonicsDirection("double_backward", "x", outputs) for outputs in ("xg", "x", "g")}
# By name, each with all of its outputs.
HARMONICS_DIRECTIONS = {d.name: d for d in (FORWARD, BACKWARD, DOUBLE_BACKWARD["xg"])}
