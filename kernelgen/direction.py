"""Which derivative of the form a kernel computes: forward, backward and double backward as one kind of value.

A kernel sums *monomials* of the form. Forward and backward use the single monomial F(x, y, w, g). Double backward
differentiates ``<tx, dF/dx> + <ty, dF/dy> + <tw, dF/dw>``, which is F(tx,y,w,g) + F(x,ty,w,g) + F(x,y,tw,g): the
tangents are the cotangents of the three first gradients. An output ``o`` is the sum of the derivatives with
respect to slot ``o`` of every monomial whose slot ``o`` holds the primal operand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kernelgen.errors import ProblemError

SLOTS = "xyw"


@dataclass(frozen=True)
class Monomial:
    """One term F(x, y, w, g): the names of the buffers that stand in its first three slots (``x`` or ``tx``, ...)."""

    x: str
    y: str
    w: str


@dataclass(frozen=True)
class Direction:
    """``tangents``: which of x, y, w come with a tangent; ``outputs``: which of x, y, w, g get a gradient.

    The gradient with respect to g is the forward value. Both are strings in the order ``xywg``.
    """

    name: str
    tangents: str
    outputs: str

    def __post_init__(self) -> None:
        for text, allowed in ((self.tangents, "xyw"), (self.outputs, "xywg")):
            if text != "".join(slot for slot in allowed if slot in text) or (text is self.outputs and not text):
                raise ProblemError(f"direction {self}: {text!r} is not an ordered choice from {allowed!r}")

    @property
    def monomials(self) -> tuple[Monomial, ...]:
        if not self.tangents:
            return (Monomial("x", "y", "w"),)
        return tuple(
            Monomial(*("t" + slot if slot == tangent else slot for slot in SLOTS)) for tangent in self.tangents
        )

    @property
    def live_outputs(self) -> str:
        """Outputs that some monomial reaches; the others are identically zero."""
        return "".join(
            slot
            for slot in self.outputs
            if slot == "g" or any(getattr(monomial, slot) == slot for monomial in self.monomials)
        )

    @property
    def operands(self) -> tuple[str, ...]:
        """Buffers that the kernel reads, in the order x tx y ty w tw g."""
        needed: set[str] = set()
        for monomial in self.monomials:
            for out in self.live_outputs:
                if out == "g":
                    needed |= {monomial.x, monomial.y, monomial.w}
                elif getattr(monomial, out) == out:
                    needed |= {getattr(monomial, slot) for slot in SLOTS if slot != out} | {"g"}
        return tuple(name for name in ("x", "tx", "y", "ty", "w", "tw", "g") if name in needed)

    @property
    def text(self) -> str:
        """For example ``backward:->xyw`` or ``double_backward:y->xwg``."""
        return f"{self.name}:{self.tangents}->{self.outputs}"


@functools.cache
def forward() -> Direction:
    return Direction("forward", "", "g")


@functools.cache
def backward(outputs: str = "xyw") -> Direction:
    """Gradients with respect to ``outputs`` given the output's cotangent g."""
    return Direction("backward", "", outputs)


@functools.cache
def double_backward(tangents: str = "xyw", outputs: str = "xywg") -> Direction:
    """Gradients of the first gradients, given the cotangents (``tangents``) of those that have one."""
    return Direction("double_backward", tangents, outputs)


DIRECTIONS = {"forward": forward(), "backward": backward(), "double_backward": double_backward()}
