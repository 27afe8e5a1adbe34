"""Picks a basis of a contraction's polynomials among their couplings, such that few operations are left.

Polynomials of an output block with the same degree in each input block are coupled in several ways, which are linearly
dependent once they are symmetric. From each such group independent ones are taken, those first that add the fewest
operations to what the other groups compute already; the groups take turns.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kernelgen.problem.symmetric_contraction import ContractionProblem
from kernelgen.terms.contraction_couplings import (
    CouplingSpace,
    Joint,
    Middle,
    Monomial,
    Source,
    line_of,
    operations_of,
)

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
