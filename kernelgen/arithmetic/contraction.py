"""The statements of a symmetric contraction for one node and one channel, in C++, for each of its derivatives.

The value is ``y[o] = sum over r of w[r] P_r[m](x)``, with basis polynomials P_r of ``contraction_couplings`` and o
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

All others are local to a part, see :class:`CoupledWriter`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kernelgen.arithmetic.contraction_couplings import (
    CouplingSpace,
    Joint,
    Middle,
    Source,
    by_pair,
    couplings_of,
    is_shared,
)
from kernelgen.arithmetic.directions import Direction
from kernelgen.arithmetic.harmonics import Line, needed
from kernelgen.problem.other_kinds import ContractionProblem


@dataclass(frozen=True)
class ContractionDirection(Direction):
    """``tangents``: of x and w; ``outputs``: gradients of x, w and (forward: y itself) g; each in the order ``xwg``."""

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
        return f"contraction {super().text}"


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


# The statements of a contraction that is written as couplings, and of its derivatives by the chain rule.
#
# A part is one middle irrep. Its values are its sources (``q``), and for each joint the weighted sum of them (``s``)
# or, where that is less, the couplings themselves; joints come one after the other, each with what it hands back, so
# few values live at a time. Cotangents of a value begin with a, changes along the tangents with d, as in
# above.

# A coefficient and one or two factors, which are names.
Term = tuple[float, tuple[str, ...]]
# Sums of the caller's.
_SUM = re.compile(r"(y|ox|ow|og)\d+")


@dataclass(frozen=True)
class Value:
    """The sum of terms; ``name`` is a local value, or a component of the output, y3, which has other terms too."""

    name: str
    terms: tuple[Term, ...]


class PartValues:
    """The values of one part: ``sources``, and lists for one ``joint`` after the other."""

    def __init__(self, space: CouplingSpace, middle: Middle) -> None:
        self.space, self.middle = space, middle
        self.sources: list[Value] = []
        self.names: dict[Source, list[str]] = {}
        for source in middle.sources:
            self.names[source] = self._source(source)
        self.joints = [list(self._joint(n, *both)) for n, both in enumerate(middle.joints.items())]

    def _inputs(self, block: int) -> list[str]:
        one = self.space.blocks[block][0]
        return [f"x{one.offset + m}" for m in range(one.dim)]

    def _source(self, source: Source) -> list[str]:
        """The names of a source's components; values are appended."""
        if source.first is None:
            return self._inputs(source.last) if source.kind else []
        names = [f"q{source.tag}_{m}" for m in range(2 * source.l + 1)]
        terms = self.space.terms(source)
        self.sources += _coupled(f"q{source.tag}", terms, self.names[source.first], self._inputs(source.last), names)
        return names

    def _joint(self, number: int, joint: Joint, sources: Mapping[Source, int]) -> Iterator[Value]:
        """The weighted sum of the sources, and what the coupling adds to the output."""
        out, terms = self.space.outs[joint.out][0], self.space.joint_terms(joint)
        near, outputs = self._inputs(joint.block), [f"y{out.offset + m}" for m in range(out.dim)]
        if len(sources) == 1 and out.dim < 2 * joint.l + 1:
            [(source, r)] = sources.items()
            names = [f"z{number}_{m}" for m in range(out.dim)]
            yield from _coupled(f"z{number}", terms, self.names[source], near, names)
            yield from (Value(y, ((1.0, (f"w{r}", z)),)) for y, z in zip(outputs, names, strict=True))
            return
        sums = [f"s{number}_{a}" for a in range(2 * joint.l + 1)]
        for a, name in enumerate(sums):
            yield Value(name, tuple((1.0, (f"w{r}", *self.names[one][a : a + 1])) for one, r in sources.items()))
        yield from _coupled(f"s{number}", terms, sums, near, outputs)


def _coupled(
    stem: str, terms: Mapping[tuple[int, int, int], float], first: list[str], second: list[str], out: list[str]
) -> Iterator[Value]:
    """The components ``out`` of a coupling of two values; products that several sums share come before."""
    found: dict[str, list[Term]] = defaultdict(list)
    for (a, b), uses in by_pair(terms).items():
        factors: tuple[str, ...] = (first[a], second[b])
        if is_shared(uses):
            product = f"{stem}p{a}_{b}"
            yield Value(product, ((1.0, factors),))
            factors = (product,)
        for m, coefficient in uses:
            found[out[m]].append((coefficient, factors))
    yield from (Value(name, tuple(found[name])) for name in out if found[name])


@dataclass
class CoupledWriter:
    """Writes the statements of one part.

    tangents: slots of x and w that have one; with any, gradients are changes of first ones. wanted: stems of the sums
    to be computed, of y, ox, ow, og.
    """

    tangents: str
    wanted: frozenset[str]
    lines: list[Line] = field(default_factory=list, init=False)
    known: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.is_dual = bool(self.tangents)

    def part(self, values: PartValues) -> tuple[str, ...]:
        """The statements, without those that nothing wanted depends on."""
        self.forward(values.sources)
        for joint in values.joints:
            self.forward(joint)
            self.backward(joint)
        self.backward(values.sources)

        def is_wanted(name: str) -> bool:
            stem = _SUM.fullmatch(name)
            return stem is not None and stem[1] in self.wanted

        return tuple(text for _, _, text in needed(self.lines, is_wanted))

    def change(self, name: str) -> str:
        """The name of a value's change along the tangents, "" for none."""
        if name[0] in "xw":
            return f"t{name}" if name[0] in self.tangents else ""
        if name[0] == "g":
            return ""
        return f"d{name}" if f"d{name}" in self.known else ""

    def add(self, target: str, coefficient: float, factors: tuple[str, ...]) -> None:
        """Add a term to a sum of the caller's, or to a local one, which its first term declares."""
        size, minus = abs(coefficient), coefficient < 0
        text = " * ".join(([f"Real({size!r})"] if size != 1 else []) + list(factors))
        if _SUM.fullmatch(target) or target in self.known:
            text = f"{target} {'-' if minus else '+'}= {text};"
        else:
            self.known.add(target)
            text = f"V {target} = {'-' if minus else ''}{text};"
        self.lines.append((target, factors, text))

    def forward(self, values: Iterable[Value]) -> None:
        """Values, and their changes."""
        for value in values:
            is_output = value.name[0] == "y"
            changed = f"og{value.name[1:]}" if is_output else f"d{value.name}"
            for coefficient, factors in value.terms:
                if not (is_output and self.is_dual):
                    self.add(value.name, coefficient, factors)
                for place, factor in enumerate(factors):
                    if change := self.change(factor):
                        self.add(changed, coefficient, (*factors[:place], change, *factors[place + 1 :]))

    def backward(self, values: Iterable[Value]) -> None:
        """Hand each value's cotangent to its factors."""
        for value in reversed(list(values)):
            a = f"g{value.name[1:]}" if value.name[0] == "y" else f"a{value.name}"
            has, changes = value.name[0] == "y" or a in self.known, f"d{a}" in self.known
            for coefficient, factors in value.terms:
                for place, factor in enumerate(factors):
                    rest = factors[:place] + factors[place + 1 :]
                    self.hand(factor, coefficient, (a,) if has else (), (f"d{a}",) if changes else (), rest)

    def hand(self, to: str, coefficient: float, a: tuple[str, ...], da: tuple[str, ...], rest: tuple[str, ...]) -> None:
        """Add a term to the cotangent of a factor, and to its change; ``rest`` is the other factor, if there is one."""
        target = f"o{to}" if to[0] in "xw" else f"a{to}"
        changed = target if to[0] in "xw" else f"d{target}"
        if a and not (self.is_dual and to[0] in "xw"):
            self.add(target, coefficient, (*a, *rest))
        if not self.is_dual:
            return
        if da:
            self.add(changed, coefficient, (*da, *rest))
        if a and rest and (change := self.change(rest[0])):
            self.add(changed, coefficient, (*a, change))
