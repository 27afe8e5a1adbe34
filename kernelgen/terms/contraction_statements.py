"""The statements of a symmetric contraction for one node and one channel, in C++, for each of its derivatives.

The value is ``y[o] = sum over r of w[r] P_r[m](x)``, with basis polynomials P_r of ``equivariant_polynomials`` and o
the output component of P_r's component m. With cotangents g of y, and tangents tx, tw (the cotangents of first
gradients):

    forward           y
    backward          dF/dx, dF/dw of F = sum over o of g[o] y[o]
    double_backward   derivatives by x, w and g of S = <tx, dF/dx> + <tw, dF/dw>

S is the part in e of F(x + e tx, w + e tw, g). So its derivatives are those of F computed with dual numbers: to each
value of the backward kernel there is a second one, its change along the tangents, whose name begins with d.

Polynomials are computed as couplings of irreps (``contraction_couplings``); those by way of one middle irrep are a
*part*. Names that the caller declares:

    x3 tx3    component 3 of the features, of their tangent
    w5 tw5    the weight of P_5, and its tangent
    g2        the cotangent of output component 2
    y2, ox3, ow5, og2    sums, which the statements add to

All others are local to a part, see ``coupled_statements``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kernelgen.errors import ProblemError
from kernelgen.problem.symmetric_contraction import ContractionProblem
from kernelgen.terms.cheapest_couplings import couplings_of
from kernelgen.terms.coupled_statements import CoupledWriter, PartValues
from kernelgen.terms.equivariant_polynomials import polynomials


@dataclass(frozen=True)
class ContractionDirection:
    """``tangents``: of x and w; ``outputs``: gradients of x, w and (forward: y itself) g; each in the order ``xwg``."""

    name: str
    tangents: str
    outputs: str

    def __post_init__(self) -> None:
        for text, slots in ((self.tangents, "xw"), (self.outputs, "xwg")):
            if text != "".join(slot for slot in slots if slot in text):
                raise ProblemError(f"direction {self}: {text!r} is not an ordered choice from {slots!r}")

    @property
    def operands(self) -> tuple[str, ...]:
        """Buffers that the kernel reads."""
        if self.name == "forward":
            return ("x", "w")
        if not self.tangents:
            return ("x", "w", "g") if "x" in self.outputs else ("x", "g")
        found = {"x"} | {"t" + slot for slot in self.tangents}
        if "x" in self.tangents and set(self.outputs) & set("xg"):
            found.add("w")
        if set(self.outputs) & set("xw"):
            found.add("g")
        return tuple(name for name in ("x", "tx", "w", "tw", "g") if name in found)

    @property
    def text(self) -> str:
        return f"contraction {self.name}:{self.tangents}->{self.outputs}"


FORWARD = ContractionDirection("forward", "", "g")


@functools.cache
def contraction_backward(outputs: str = "xw") -> ContractionDirection:
    """First gradients. Forces of a trained model need that of x alone."""
    return ContractionDirection("feature_backward" if outputs == "x" else "backward", "", outputs)


@functools.cache
def contraction_double_backward(tangents: str = "x", outputs: str = "xwg") -> ContractionDirection:
    """Gradients of first gradients; ``tangents`` names those that have a cotangent."""
    return ContractionDirection("double_backward", tangents, outputs)


# By name, each with its usual tangents and all of its outputs.
CONTRACTION_DIRECTIONS = {
    direction.name: direction
    for direction in (FORWARD, contraction_backward(), contraction_backward("x"), contraction_double_backward())
}


@dataclass(frozen=True)
class Part:
    """Statements in a scope of their own.

    weights: numbers of the polynomials that it has a share in. statements: in order, of one instruction each.
    """

    title: str
    weights: tuple[int, ...]
    statements: tuple[str, ...]

    def uses(self, stem: str) -> list[int]:
        """Numbers of the names ``stem`` followed by digits, ascending."""
        found = re.findall(rf"\b{stem}(\d+)\b", "\n".join(self.statements))
        return sorted(set(map(int, found)))


@functools.lru_cache(maxsize=64)
def contraction_parts(
    problem: ContractionProblem, direction: ContractionDirection, apart: bool = False
) -> tuple[Part, ...]:
    """The statements of a direction, part by part.

    apart: gradients of x, and all else, are computed by two walks over a part's values instead of one: up to a third
    more operations, and fewer values alive at a time.
    """
    stems = {"x": "ox", "w": "ow", "g": "y" if direction.name == "forward" else "og"}
    walks = [direction.outputs]
    if apart and "x" in direction.outputs and direction.outputs != "x":
        walks = [direction.outputs.replace("x", ""), "x"]
    basis = couplings_of(problem)
    parts = []
    for middle in basis.middles():
        values = PartValues(basis.space, middle)
        for outputs in walks:
            writer = CoupledWriter(direction.tangents, frozenset(stems[slot] for slot in outputs))
            if statements := writer.part(values):
                parts.append(Part(f"by way of {middle.name}", middle.weights, statements))
    return tuple(parts)


def operations(parts: Iterable[Part]) -> int:
    """Arithmetic instructions of the statements: multiply-adds, products and sums of vectors of channels."""
    total = 0
    for statement in itertools.chain.from_iterable(part.statements for part in parts):
        text = statement.split("=", 1)[1]
        products, sums = text.count("*"), text.count(" + ") + text.count(" - ")
        total += max(products, sums + ("+=" in statement or "-=" in statement))
    return total


def plain_operations(problem: ContractionProblem) -> int:
    """The same of the forward sum as it is written: each term by itself, with its coefficient, weight and factors."""
    return sum((one.degree + 1) * sum(map(len, one.components)) for one in polynomials(problem))
