"""A symmetric contraction as products of coupled irreps: fewer operations than monomial by monomial.

A polynomial of degree n is a sum of couplings of polynomials of degree n - 1, its *sources*, with one input irrep. All
that are coupled from the same middle irrep, with the same input irrep, to the same output block share that coupling,
because it is linear: their sources are summed first, each with its weight,

    y[L] += C(k, b -> L) (sum over s of w[s] S_s[k]) x[b].

Symmetric polynomials can be coupled in several ways, of which ``cheapest_couplings`` picks a basis.
Everything is a product of two values or a sum, so derivatives follow by the chain rule (``coupled_statements``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kernelgen.e3nn_import import o3, wigner_3j
from kernelgen.problem.irreps import blocks_of
from kernelgen.problem.symmetric_contraction import ContractionProblem

ZERO = 1e-9
# Squares of coefficients are fractions with denominators of at most this.
_DENOMINATOR = 10**4

# Indices of components, ascending: (0, 3, 3) is x_0 x_3^2.
Monomial = tuple[int, ...]
# Components of a polynomial-valued irrep: coefficients by monomial.
Values = tuple[dict[Monomial, float], ...]
# Coefficients by (first, second, output component).
Coupling = Mapping[tuple[int, int, int], float]
# Products that are formed once if so many sums take them; each sum multiplies for itself otherwise.
SHARED_BY = 4


@dataclass(frozen=True)
class Source:
    """Components of irrep (l, p), of degree len(kind) in the input: a block, or ``first`` coupled with block ``last``.

    kind: the input blocks, ascending, of its factors.
    """

    kind: tuple[int, ...]
    l: int  # noqa: E741
    p: int
    last: int = -1
    first: Source | None = None

    @property
    def tag(self) -> str:
        """Its part of a name."""
        return f"{self.first.tag}_{self.last}l{self.l}" if self.first else f"{self.last}"


@dataclass(frozen=True)
class Joint:
    """The coupling of middle irrep (l, p) with input block ``block`` to output block ``out``."""

    l: int  # noqa: E741
    p: int
    block: int
    out: int


@dataclass(frozen=True)
class Middle:
    """What is coupled from one middle irrep: for each joint its sources, with the number of the weight of each."""

    l: int  # noqa: E741
    p: int
    joints: Mapping[Joint, Mapping[Source, int]]

    @property
    def name(self) -> str:
        """The irrep's name, such as 2e."""
        return f"{self.l}{'e' if self.p == 1 else 'o'}"

    @property
    def weights(self) -> tuple[int, ...]:
        """Numbers of the weights that its joints take, ascending."""
        return tuple(sorted(r for sources in self.joints.values() for r in sources.values()))

    @property
    def sources(self) -> list[Source]:
        """All sources, each after those that it is coupled from."""
        found: dict[Source, None] = {}
        for source in itertools.chain.from_iterable(self.joints.values()):
            found |= dict.fromkeys(line_of(source))
        return sorted(found, key=lambda source: (len(source.kind), source.kind, source.tag))


def line_of(source: Source | None) -> Iterator[Source]:
    """A source after those that it is coupled from."""
    if source is not None:
        yield from line_of(source.first)
        yield source


@functools.cache
def coupling(l1: int, l2: int, l3: int, is_same: bool = False) -> Coupling:
    """Clebsch-Gordan coefficients, scaled so that the most frequent is 1 and the first positive.

    is_same: of an irrep with itself; (a, b) and (b, a) are one pair then. Empty if it vanishes.
    """
    values = wigner_3j(l1, l2, l3).numpy()
    found: dict[tuple[int, int, int], float] = defaultdict(float)
    for a, b, m in np.argwhere(np.abs(values) > ZERO).tolist():
        place = (min(a, b), max(a, b), m) if is_same else (a, b, m)
        found[place] += values[a, b, m]
    kept = {place: value for place, value in sorted(found.items()) if abs(value) > ZERO}
    if not kept:
        return {}
    sizes = [round(abs(value), 9) for value in kept.values()]
    often = max(dict.fromkeys(sizes), key=sizes.count)
    scale = next(abs(value) for value in kept.values() if abs(abs(value) - often) < 1e-8)
    scale = scale if next(iter(kept.values())) > 0 else -scale
    return {place: exact(value / scale) for place, value in kept.items()}


def operations_of(terms: Coupling) -> int:
    """Multiply-adds and products of a coupling of given values."""
    return sum(len(uses) + is_shared(uses) for uses in by_pair(terms).values())


def by_pair(terms: Coupling) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """Output components with coefficients, by pair of components."""
    found: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for (a, b, m), value in terms.items():
        found[a, b].append((m, value))
    return found


def is_shared(uses: Iterable[tuple[object, float]]) -> bool:
    """Whether a product is formed before it is added to the sums that take it, each with its coefficient."""
    uses = list(uses)
    return len(uses) >= SHARED_BY or any(abs(value) != 1 for _, value in uses)


def exact(value: float) -> float:
    """The root of a fraction that this is, so that texts do not depend on rounding; else 13 digits of it."""
    square = Fraction(value * value).limit_denominator(_DENOMINATOR)
    root = math.copysign(math.sqrt(square), value)
    return root if abs(root - value) < 1e-11 else float(f"{value:.13g}")


class CouplingSpace:
    """All sources and couplings of one problem, with their values as polynomials."""

    def __init__(self, problem: ContractionProblem) -> None:
        self.problem = problem
        inputs = o3.Irreps(problem.irreps_in)
        self.blocks = [(block, ir.p) for block, (_, ir) in zip(blocks_of(problem.irreps_in), inputs, strict=True)]
        self.outs = [(block, ir.p) for block, (_, ir) in zip(problem.out, o3.Irreps(problem.irreps_out), strict=True)]
        self._values: dict[Source, Values] = {}

    @functools.cached_property
    def sources(self) -> dict[tuple[int, ...], list[Source]]:
        """Sources by kind, of degrees up to the correlation less one."""
        found: dict[tuple[int, ...], list[Source]] = defaultdict(list)
        found[()] = [Source((), 0, 1)]
        last = []
        for number, (block, parity) in enumerate(self.blocks):
            last.append(Source((number,), block.l, parity, number))
            found[number,] = [last[-1]]
        for _ in range(2, self.problem.correlation):
            last = [one for source in last for one in self._longer(source)]
            for one in last:
                found[one.kind].append(one)
        return found

    def _longer(self, source: Source) -> Iterator[Source]:
        """The source coupled with each block that is not before its own last one; those that vanish are left out."""
        for number in range(source.last, len(self.blocks)):
            block, parity = self.blocks[number]
            for l in range(abs(source.l - block.l), source.l + block.l + 1):  # noqa: E741
                one = Source((*source.kind, number), l, source.p * parity, number, source)
                if any(self.values(one)):
                    yield one

    def terms(self, source: Source) -> Coupling:
        """The coupling of a source's ``first`` and ``last``."""
        assert source.first is not None
        block = self.blocks[source.last][0]
        return coupling(source.first.l, block.l, source.l, source.kind == (source.last, source.last))

    def values(self, source: Source) -> Values:
        """A source's components as polynomials."""
        if source not in self._values:
            self._values[source] = self._expanded(source)
        return self._values[source]

    def _expanded(self, source: Source) -> Values:
        if not source.kind:
            return ({(): 1.0},)
        offset = self.blocks[source.last][0].offset
        if source.first is None:
            return tuple({(offset + m,): 1.0} for m in range(2 * source.l + 1))
        return self._coupled(source.first, source.last, 2 * source.l + 1, self.terms(source))

    def _coupled(self, first: Source, last: int, dim: int, terms: Coupling) -> Values:
        offset, values = self.blocks[last][0].offset, self.values(first)
        found: list[dict[Monomial, float]] = [defaultdict(float) for _ in range(dim)]
        for (a, b, m), coefficient in terms.items():
            for monomial, value in values[a].items():
                found[m][tuple(sorted((*monomial, offset + b)))] += coefficient * value
        return tuple({key: value for key, value in one.items() if abs(value) > ZERO} for one in found)

    def joint_terms(self, joint: Joint) -> Coupling:
        """The coupling of a joint. Without a source the block itself is the output."""
        return coupling(joint.l, self.blocks[joint.block][0].l, self.outs[joint.out][0].l)

    def joined(self, joint: Joint, source: Source) -> Values:
        """The polynomials that a joint makes of a source."""
        return self._coupled(source, joint.block, self.outs[joint.out][0].dim, self.joint_terms(joint))

    def candidates(self, kind: tuple[int, ...], out: int) -> Iterator[tuple[Joint, Source]]:
        """All couplings of input blocks ``kind`` to an output block."""
        block, parity = self.outs[out]
        for number in dict.fromkeys(kind):
            near, near_parity = self.blocks[number]
            rest = list(kind)
            rest.remove(number)
            for source in self.sources[tuple(rest)]:
                fits = abs(source.l - near.l) <= block.l <= source.l + near.l
                if fits and source.p * near_parity == parity:
                    yield Joint(source.l, source.p, number, out), source
