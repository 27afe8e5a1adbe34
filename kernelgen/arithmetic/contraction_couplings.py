"""A symmetric contraction as couplings of irreps: its polynomials, and which of their couplings are computed."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from kernelgen.compat import o3, wigner_3j
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.problem.irreps import blocks_of
from kernelgen.problem.other_kinds import ContractionProblem

# The equivariant polynomials of one channel's components that a contraction's couplings make: its basis.
#
# MACE's own polynomials (its ``U`` tensors) are linear combinations, which :func:`coordinates` finds; there are up to
# four times as many, because those of different couplings are linearly dependent once they are symmetric.


@dataclass(frozen=True)
class Polynomial:
    """A basis polynomial: values in output ``block``, and for each component its monomials with coefficients."""

    block: int
    degree: int
    components: tuple[tuple[tuple[Monomial, float], ...], ...]

    @property
    def monomial(self) -> Monomial:
        """Some monomial of it; all have as many factors of each input irrep."""
        return next(terms[0][0] for terms in self.components if terms)


@functools.lru_cache(maxsize=64)
def polynomials(problem: ContractionProblem) -> tuple[Polynomial, ...]:
    """The basis, by output block and degree: the order of the weights."""
    found = []
    basis = couplings_of(problem)
    for joint, source in basis.chosen:
        values = basis.space.joined(joint, source)
        components = tuple(tuple(sorted(terms.items())) for terms in values)
        found.append(Polynomial(joint.out, len(source.kind) + 1, components))
    return tuple(found)


def coordinates(problem: ContractionProblem, block: int, degree: int, tensor: Tensor) -> Tensor:
    """The coefficients [polynomials, paths] of MACE's polynomials in the basis of an output block and degree.

    tensor: ``U`` [2l+1, components ** degree, paths], of which the symmetric part counts. Raises UnsupportedError if
    it is not in the space, which other couplings than O(3)'s would be; ProblemError for another shape.
    """
    return fitted(problem, block, degree, tensor)[0]


def fitted(problem: ContractionProblem, block: int, degree: int, tensor: Tensor) -> tuple[Tensor, float]:
    """What :func:`coordinates` gives, and the largest element that they leave of the tensor, relative to its largest.

    That is about 1e-16 for exact couplings and 1e-8 for those that were rounded to float32.
    """
    dim, powers = problem.out[block].dim, problem.dim_in**degree
    if tensor.dim() < 3 or tensor.shape[0] != dim or math.prod(tensor.shape[1:-1]) != powers:
        raise ProblemError(f"polynomials have shape {tuple(tensor.shape)}; expected ({dim}, {powers}, paths)")
    basis = [one for one in polynomials(problem) if (one.block, one.degree) == (block, degree)]
    given = _symmetric_part(tensor.double().cpu().numpy(), problem.dim_in, degree)
    monomials = _monomials(problem.dim_in, degree)
    place = {monomial: number for number, monomial in enumerate(monomials)}
    values = np.zeros((len(basis), *given.shape[:2]))
    for number, one in enumerate(basis):
        for m, terms in enumerate(one.components):
            for monomial, coefficient in terms:
                values[number, m, place[monomial]] = coefficient
    columns = values.reshape(len(basis), math.prod(given.shape[:2])).T
    found = np.linalg.lstsq(columns, given.reshape(len(columns), given.shape[2]), rcond=None)[0]
    rest = given - (columns @ found).reshape(given.shape)
    left = float(np.abs(rest).max(initial=0.0)) / max(1.0, float(np.abs(given).max(initial=0.0)))
    if left > 1e-5:
        raise UnsupportedError("these polynomials are not symmetric O(3)-equivariant ones; keep the package's module")
    return torch.from_numpy(found), left


@functools.cache
def _monomials(count: int, degree: int) -> tuple[Monomial, ...]:
    return tuple(itertools.combinations_with_replacement(range(count), degree))


def _symmetric_part(tensor: np.ndarray, count: int, degree: int) -> np.ndarray:
    """[components of the output, monomials, paths] of a tensor [2l+1, components ** degree, paths]."""
    out = np.zeros((tensor.shape[0], len(_monomials(count, degree)), tensor.shape[-1]))
    place = {monomial: number for number, monomial in enumerate(_monomials(count, degree))}
    indices = itertools.product(range(count), repeat=degree)
    target = np.fromiter((place[tuple(sorted(one))] for one in indices), int, count**degree)
    flat = tensor.reshape(tensor.shape[0], count**degree, tensor.shape[-1])
    for m in range(len(out)):
        np.add.at(out[m], target, flat[m])
    return out


# Picks a basis of a contraction's polynomials among their couplings, such that few operations are left.
#
# Polynomials of an output block with the same degree in each input block are coupled in several ways, which are
# linearly dependent once they are symmetric. From each such group independent ones are taken, those first that add the
# fewest operations to what the other groups compute already; the groups take turns.

_ROUNDS = 3
# Singular values of dependent polynomials are below this; coefficients are about 1.
_INDEPENDENT = 1e-6


@dataclass(frozen=True)
class Couplings:
    """A basis: a joint and a source for each weight."""

    space: CouplingSpace
    chosen: tuple[tuple[Joint, Source], ...]

    def middles(self) -> list[Middle]:
        """The couplings by middle irrep."""
        found: dict[tuple[int, int], dict[Joint, dict[Source, int]]] = defaultdict(lambda: defaultdict(dict))
        for number, (joint, source) in enumerate(self.chosen):
            found[joint.l, joint.p][joint][source] = number
        return [Middle(*key, found[key]) for key in sorted(found)]


@dataclass
class _Group:
    """The couplings that make polynomials of one output block and kind, and as many independent ones as there are."""

    candidates: list[tuple[Joint, Source]]
    values: np.ndarray
    rank: int
    chosen: list[int] = field(default_factory=list)


@functools.lru_cache(maxsize=64)
def couplings_of(problem: ContractionProblem) -> Couplings:
    """The couplings that are a basis, picked so that few operations are left."""
    space = CouplingSpace(problem)
    groups = list(_groups(space))
    for _ in range(_ROUNDS):
        for group in groups:
            group.chosen = []
            group.chosen = _cheapest(space, group, groups)
    return Couplings(space, tuple(group.candidates[choice] for group in groups for choice in group.chosen))


def _groups(space: CouplingSpace) -> Iterator[_Group]:
    """By output block, degree and kind: the order of the weights."""
    numbers = range(len(space.blocks))
    for out, degree in itertools.product(range(len(space.outs)), range(1, space.problem.correlation + 1)):
        for kind in itertools.combinations_with_replacement(numbers, degree):
            candidates = list(space.candidates(kind, out))
            values = [space.joined(*candidate) for candidate in candidates]
            places: dict[tuple[int, Monomial], int] = {}
            for m, monomial in ((m, monomial) for one in values for m, terms in enumerate(one) for monomial in terms):
                places.setdefault((m, monomial), len(places))
            table = np.zeros((len(values), len(places)))
            for row, one in zip(table, values, strict=True):
                for m, terms in enumerate(one):
                    row[[places[m, monomial] for monomial in terms]] = list(terms.values())
            if table.size:
                yield _Group(candidates, table, int(np.linalg.matrix_rank(table, tol=_INDEPENDENT)))


def _cheapest(space: CouplingSpace, group: _Group, groups: list[_Group]) -> list[int]:
    """Independent couplings of a group that add the fewest operations to those of the other groups."""
    others = [other.candidates[choice] for other in groups for choice in other.chosen]
    joints = {joint for joint, _ in others}
    sources = {(source.l, source.p, one) for _, source in others for one in line_of(source)}
    chosen: list[int] = []
    while len(chosen) < group.rank:
        best, least = -1, 0.0
        for number, (joint, source) in enumerate(group.candidates):
            rows = group.values[[*chosen, number]]
            if number in chosen or np.linalg.matrix_rank(rows, tol=_INDEPENDENT) <= len(chosen):
                continue
            cost = float(2 * source.l + 1)
            if joint not in joints:
                cost += operations_of(space.joint_terms(joint))
            for one in line_of(source):
                if one.first is not None and (source.l, source.p, one) not in sources:
                    cost += operations_of(space.terms(one))
            if best < 0 or cost < least:
                best, least = number, cost
        chosen.append(best)
        joint, source = group.candidates[best]
        joints.add(joint)
        sources |= {(source.l, source.p, one) for one in line_of(source)}
    return chosen


# A symmetric contraction as products of coupled irreps: fewer operations than monomial by monomial.
#
# A polynomial of degree n is a sum of couplings of polynomials of degree n - 1, its *sources*, with one input irrep.
# All that are coupled from the same middle irrep, with the same input irrep, to the same output block share that
# coupling, because it is linear: their sources are summed first, each with its weight,
#
#     y[L] += C(k, b -> L) (sum over s of w[s] S_s[k]) x[b].
#
# Symmetric polynomials can be coupled in several ways, of which :func:`couplings_of` picks a basis.
# Everything is a product of two values or a sum, so derivatives follow by the chain rule (``contraction``).

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
            found: Values = ({(): 1.0},)
            if source.first is not None:
                found = self._coupled(source.first, source.last, 2 * source.l + 1, self.terms(source))
            elif source.kind:
                offset = self.blocks[source.last][0].offset
                found = tuple({(offset + m,): 1.0} for m in range(2 * source.l + 1))
            self._values[source] = found
        return self._values[source]

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
