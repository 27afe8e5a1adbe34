"""The equivariant polynomials of one channel's components that a contraction's couplings make: its basis.

MACE's own polynomials (its ``U`` tensors) are linear combinations, which :func:`coordinates` finds; there are up to
four times as many, because those of different couplings are linearly dependent once they are symmetric.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.problem.symmetric_contraction import ContractionProblem
from kernelgen.terms.cheapest_couplings import couplings_of
from kernelgen.terms.contraction_couplings import Monomial


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
