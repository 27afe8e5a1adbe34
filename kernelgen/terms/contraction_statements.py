"""The statements of a symmetric contraction for one node and one channel, in C++, for each of its derivatives.

The value is ``y[o] = sum over r of w[r] P_r[m](x)``, with basis polynomials P_r of ``equivariant_polynomials`` and o
the output component of P_r's component m. With cotangents g of y, and tangents tx, tw (the cotangents of first
gradients):

    forward           y
    backward          dF/dx, dF/dw of F = sum over o of g[o] y[o]
    double_backward   derivatives by x, w and g of S = <tx, dF/dx> + <tw, dF/dw>

S is the part in e of F(x + e tx, w + e tw, g). So its derivatives are those of F computed with dual numbers: to each
value of the backward kernel there is a second one, its change along the tangents, whose name begins with d.

Polynomials that have the same degree in each input irrep share their monomials, and share none with others: they
are a *part*. In a part, monomials form a tree in which a child has one more factor. Going down, products of factors are
formed once for all monomials that begin with them (p); coming back, their cotangents (a) are summed over children. This
is reverse differentiation in an order that keeps few values alive at any time. Names that the caller declares:

    x3 tx3    component 3 of the features, of their tangent
    w5 tw5    the weight of P_5, and its tangent
    g2        the cotangent of output component 2
    y2, ox3, ow5, og2    sums, which the statements add to

All others are local to a part: ``P5_1`` is component 1 of polynomial 5, ``D5_1`` its change, ``v5_1`` is w5 g[o].
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelgen.errors import ProblemError
from kernelgen.problem.irreps import blocks_of
from kernelgen.problem.symmetric_contraction import ContractionProblem
from kernelgen.terms.equivariant_polynomials import Monomial, Polynomial, polynomials

# Leaves and inner nodes of the tree of monomials: by (polynomial, component) the coefficient; by component the child.
Tree = Mapping[int, Any]


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
    """The statements of polynomials that share monomials, in a scope of their own.

    weights: numbers of the polynomials. statements: in order; each is at most one multiply-add a sum.
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

    apart: gradients of x, and all else, are computed by two walks over a part's monomials instead of one: about a
    tenth more operations, and fewer values alive at a time.
    """
    blocks = [number for number, block in enumerate(blocks_of(problem.irreps_in)) for _ in range(block.dim)]
    shared: dict[Monomial, list[int]] = {}
    basis = polynomials(problem)
    for number, one in enumerate(basis):
        shared.setdefault(tuple(blocks[i] for i in one.monomial), []).append(number)
    irreps = problem.irreps_in.split("+")
    found = []
    for kind, numbers in sorted(shared.items()):
        title = " ".join(irreps[b] for b in kind)
        writers = [_Writer(problem, direction, {r: basis[r] for r in numbers})]
        if apart and writers[0].adjoint and (writers[0].values or writers[0].changes):
            writers = [dataclasses.replace(writers[0], does=does) for does in ("sums", "features")]
        found += [writer.part(title) for writer in writers]
    return tuple(found)


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


@dataclass
class _Writer:
    """Writes one part. does: all of it, the gradient of x (``features``), or all else (``sums``).

    values, changes: whether P and D are wanted. adjoint: whether the gradient of x is.
    """

    problem: ContractionProblem
    direction: ContractionDirection
    basis: dict[int, Polynomial]
    does: str = "all"
    lines: list[str] = field(default_factory=list, init=False)
    known: set[str] = field(default_factory=set, init=False)
    combined: dict[tuple, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        direction = self.direction
        outputs, tangents = set(direction.outputs), set(direction.tangents)
        self.dual = bool(tangents)
        self.adjoint = "x" in outputs and self.does != "sums"
        self.values = direction.name == "forward" or (
            "w" in outputs if not tangents else "g" in outputs and "w" in tangents
        )
        self.changes = "x" in tangents and bool(outputs & set("wg"))
        self.along_x, self.along_w = "x" in tangents, "w" in tangents
        if self.does == "features":
            self.values = self.changes = False

    def part(self, title: str) -> Part:
        if self.adjoint:
            for r, m, o in self.components():
                if self.along_x or not self.dual:
                    self.let(f"v{r}_{m}", f"w{r} * g{o}")
                if self.along_w:
                    self.let(f"dv{r}_{m}", f"tw{r} * g{o}")
        self.visit(self.tree(), (), "", "")
        if self.does != "features":
            self.finish()
        return Part(title, tuple(self.basis), tuple(self.lines))

    def components(self) -> Iterator[tuple[int, int, int]]:
        """Polynomial, its component, and the component of the output."""
        for r, one in self.basis.items():
            offset = self.problem.out[one.block].offset
            for m in range(len(one.components)):
                yield r, m, offset + m

    def tree(self) -> Tree:
        root: dict[int, Any] = {}
        for r, m, _ in self.components():
            for monomial, coefficient in self.basis[r].components[m]:
                node = root
                for i in monomial[:-1]:
                    node = node.setdefault(i, {})
                node.setdefault(monomial[-1], {})[r, m] = coefficient
        return root

    # Statements.

    def let(self, name: str, value: str) -> str:
        self.lines.append(f"const V {name} = {value};")
        return name

    def add(self, name: str, value: str, minus: bool = False) -> None:
        """Add to a sum of the caller's, or to a local one, which the first term declares."""
        if name in self.known or re.fullmatch(r"y\d+|o[xwg]\d+", name):
            self.lines.append(f"{name} {'-' if minus else '+'}= {value};")
        else:
            self.known.add(name)
            self.lines.append(f"V {name} = {'-' if minus else ''}{value};")

    def scaled(self, name: str, coefficient: float, value: str) -> None:
        """Add coefficient * value."""
        size = abs(coefficient)
        self.add(name, value if size == 1 else f"Real({size!r}) * {value}", coefficient < 0)

    # The tree. p: the product of the factors so far ("" for none), dp: its change along tx ("" for none).

    def visit(self, tree: Tree, prefix: Monomial, p: str, dp: str) -> tuple[str, str]:
        """Write a node's children; the names of the node's cotangent and its change, "" for none."""
        tag = "_".join(map(str, prefix))
        a, da = (f"a{tag}", f"da{tag}") if self.adjoint and prefix else ("", "")
        depth = len(prefix) + 1
        for i, child in tree.items():
            inner = not isinstance(next(iter(child)), tuple)
            if inner:
                q, dq = self.product(f"{tag}_{i}".lstrip("_"), i, p, dp)
                c, dc, minus = *self.visit(child, (*prefix, i), q, dq), False
            else:
                if self.values or self.changes:
                    self.leaf(child, f"{tag}_{i}".lstrip("_"), i, p, dp, depth)
                c, dc, minus = self.combinations(child) if self.adjoint else ("", "", False)
            if self.adjoint:
                self.pull(i, p, dp, c, dc, minus, a, da)
        return (a if a in self.known else ""), (da if da in self.known else "")

    def product(self, tag: str, i: int, p: str, dp: str) -> tuple[str, str]:
        """The product of p and x[i], and its change."""
        if not p:
            return f"x{i}", f"tx{i}" if self.along_x else ""
        change = ""
        if self.along_x:
            change = self.let(f"dp{tag}", f"{dp} * x{i} + {p} * tx{i}")
        needed = self.values or self.adjoint or self.along_x
        return (self.let(f"p{tag}", f"{p} * x{i}") if needed else ""), change

    def leaf(self, terms: Mapping[tuple[int, int], float], tag: str, i: int, p: str, dp: str, depth: int) -> None:
        """Add a monomial to the polynomials that have it, and its change to theirs."""
        for wanted, stem, value in (
            (self.values, "P", f"{p} * x{i}"),
            (self.changes, "D", f"{dp} * x{i} + {p} * tx{i}"),
        ):
            if not wanted:
                continue
            if depth == 1:
                name = f"x{i}" if stem == "P" else f"tx{i}"
            else:
                name = self.let(f"{'t' if stem == 'P' else 'dt'}{tag}", value)
            for (r, m), coefficient in terms.items():
                self.scaled(f"{stem}{r}_{m}", coefficient, name)

    def combinations(self, terms: Mapping[tuple[int, int], float]) -> tuple[str, str, bool]:
        """The cotangent of a monomial, and its change: combinations of w g and tw g. Whether both are to be negated."""
        minus = next(iter(terms.values())) < 0
        key = tuple((r, m, -c if minus else c) for (r, m), c in terms.items())
        found = [
            self.combined.get((stem, key)) or self.combination(stem, key) if wanted else ""
            for stem, wanted in (("v", self.along_x or not self.dual), ("dv", self.along_w))
        ]
        return found[0], found[1], minus

    def combination(self, stem: str, key: tuple[tuple[int, int, float], ...]) -> str:
        text = ""
        for r, m, c in key:
            factor = "" if abs(c) == 1 else f"Real({abs(c)!r}) * "
            text += (" - " if c < 0 else " + " if text else "") + f"{factor}{stem}{r}_{m}"
        plain = len(key) == 1 and key[0][2] == 1
        name = text if plain else self.let(f"{'c' if stem == 'v' else 'dc'}{len(self.combined)}", text)
        self.combined[stem, key] = name
        return name

    def pull(self, i: int, p: str, dp: str, c: str, dc: str, minus: bool, a: str, da: str) -> None:
        """Hand a child's cotangent c (change dc) to component i of x and to the node's own cotangent a (change da)."""
        if not self.dual:
            self.add(f"ox{i}", f"{c} * {p}" if p else c, minus)
            if a:
                self.add(a, f"{c} * x{i}", minus)
            return
        if dc:
            self.add(f"ox{i}", f"{dc} * {p}" if p else dc, minus)
        if c and dp:
            self.add(f"ox{i}", f"{c} * {dp}", minus)
        if a and c:
            self.add(a, f"{c} * x{i}", minus)
        if a and dc:
            self.add(da, f"{dc} * x{i}", minus)
        if a and c and self.along_x:
            self.add(da, f"{c} * tx{i}", minus)

    def finish(self) -> None:
        """Weights and cotangents meet the polynomials."""
        outputs = self.direction.outputs
        for r, m, o in self.components():
            value, change = f"P{r}_{m}", f"D{r}_{m}"
            if self.direction.name == "forward":
                self.add(f"y{o}", f"w{r} * {value}")
                continue
            if "w" in outputs and (not self.dual or self.along_x):
                self.add(f"ow{r}", f"g{o} * {change if self.dual else value}")
            if "g" in outputs and self.along_x:
                self.add(f"og{o}", f"w{r} * {change}")
            if "g" in outputs and self.along_w:
                self.add(f"og{o}", f"tw{r} * {value}")
