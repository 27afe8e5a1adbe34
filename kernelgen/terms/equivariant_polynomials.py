"""A basis of the equivariant polynomials of one channel's components, from Clebsch-Gordan coefficients.

Polynomials of degree n + 1 that transform as an irrep are spanned by products of those of degree n with the components
of one input irrep (by Euler's formula, n P = sum_i x_i dP/dx_i). Of these, :func:`polynomials` keeps a basis with as
few terms as possible, each polynomial with one degree in each input irrep. It depends on the space alone, not on signs
of couplings, which differ between versions of e3nn. MACE's own polynomials (its ``U`` tensors) are linear combinations,
which :func:`coordinates` finds; there are up to four times as many, because those of different couplings are linearly
dependent once they are symmetric.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernelgen.e3nn_import import o3
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.problem.irreps import blocks_of
from kernelgen.problem.symmetric_contraction import ContractionProblem

ZERO = 1e-9
# Squares of coefficients are fractions with denominators of at most this.
_DENOMINATOR = 10**4
# Combinations of monomials tried in the search for sparse polynomials.
_MOST_CANDIDATES = 20_000

# Indices of components, ascending: (0, 3, 3) is x_0 x_3^2.
Monomial = tuple[int, ...]
Space = Any  # numpy array [polynomials, components, monomials]


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
    for number, (_, ir) in enumerate(o3.Irreps(problem.irreps_out)):
        for degree in range(1, problem.correlation + 1):
            space = _sparse(_space(problem.irreps_in, ir.l, ir.p, degree))
            found += [_polynomial(number, degree, problem.dim_in, one) for one in space]
    return tuple(found)


def coordinates(problem: ContractionProblem, block: int, degree: int, tensor: Tensor) -> Tensor:
    """The coefficients [polynomials, paths] of MACE's polynomials in the basis of an output block and degree.

    tensor: ``U`` [2l+1, components ** degree, paths], of which the symmetric part counts. Raises UnsupportedError if
    it is not in the space, which other couplings than O(3)'s would be; ProblemError for another shape.
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
    size = max(1.0, float(np.abs(given).max(initial=0.0)))
    # Files in float32 hold couplings rounded to it.
    if np.abs(rest).max(initial=0.0) > 1e-5 * size:
        raise UnsupportedError("these polynomials are not symmetric O(3)-equivariant ones; keep the package's module")
    return torch.from_numpy(found)


@functools.cache
def _monomials(count: int, degree: int) -> tuple[Monomial, ...]:
    return tuple(itertools.combinations_with_replacement(range(count), degree))


@functools.cache
def _products(count: int, degree: int) -> np.ndarray:
    """[monomials, components]: the number, among those of the next degree, of a monomial times a component."""
    place = {monomial: number for number, monomial in enumerate(_monomials(count, degree + 1))}
    rows = [[place[tuple(sorted((*one, i)))] for i in range(count)] for one in _monomials(count, degree)]
    return np.array(rows)


@functools.lru_cache(maxsize=256)
def _space(irreps_in: str, l: int, p: int, degree: int) -> Space:  # noqa: E741
    """The basis of polynomials of a degree that transform as irrep (l, p)."""
    blocks = list(zip(blocks_of(irreps_in), (ir.p for _, ir in o3.Irreps(irreps_in)), strict=True))
    count = sum(block.dim for block, _ in blocks)
    found = [np.zeros((0, 2 * l + 1, len(_monomials(count, degree))))]
    for block, parity in blocks:
        if degree == 1:
            if (block.l, parity) == (l, p):
                found.append(np.eye(count)[None, block.offset : block.offset + block.dim])
            continue
        for lower in range(abs(l - block.l), l + block.l + 1):
            found.append(_coupled(_space(irreps_in, lower, p * parity, degree - 1), lower, block, l, degree - 1, count))
    return _echelon(np.concatenate(found))


def _coupled(space: Space, lower: int, block: Any, l: int, degree: int, count: int) -> Space:  # noqa: E741
    """Products of polynomials of irrep ``lower`` with the components of a block, coupled to irrep l."""
    out = np.zeros((len(space), 2 * l + 1, len(_monomials(count, degree + 1))))
    if len(space) == 0:
        return out
    coupling = o3.wigner_3j(lower, block.l, l, dtype=torch.float64).numpy()
    products = _products(count, degree)
    for m2 in range(block.dim):
        parts = np.einsum("am,rai->rmi", coupling[:, m2], space)
        target = products[:, block.offset + m2]  # distinct for distinct monomials
        out[:, :, target] += parts
    return out


def _echelon(space: Space) -> Space:
    """The reduced row echelon form, without zero rows."""
    rows = space.reshape(len(space), math.prod(space.shape[1:])).copy()
    rank = 0
    for column in np.flatnonzero(np.abs(rows).max(axis=0, initial=0.0) > ZERO):
        if rank == len(rows):
            break
        best = rank + int(np.abs(rows[rank:, column]).argmax())
        if abs(rows[best, column]) < ZERO:
            rows[rank:, column] = 0
            continue
        rows[[rank, best]] = rows[[best, rank]]
        rows[rank] /= rows[rank, column]
        others = np.arange(len(rows)) != rank
        rows[others] -= rows[others, column, None] * rows[rank]
        rank += 1
    rows = rows[:rank]
    rows[np.abs(rows) < ZERO] = 0
    return rows.reshape(rank, *space.shape[1:])


def _sparse(space: Space) -> Space:
    """A basis of the same space with the fewest terms.

    Rows in echelon form have one degree in each input irrep; those that share monomials span a space of few dimensions.
    Its sparsest basis is among the polynomials that have as few monomials as any with some of theirs (those that vanish
    at dimensions - 1 others), of which the sparsest independent ones are taken.
    """
    rows = space.reshape(len(space), math.prod(space.shape[1:]))
    found, left = [], list(range(len(rows)))
    while left:
        group = [left.pop(0)]
        while joining := [row for row in left if np.any(rows[group].any(axis=0) & (rows[row] != 0))]:
            group += joining
            left = [row for row in left if row not in joining]
        found.append(_sparsest(rows[sorted(group)]))
    return np.concatenate(found or [rows]).reshape(space.shape)


def _sparsest(rows: np.ndarray) -> np.ndarray:
    """The sparsest basis of the span of a few rows; the rows themselves if there are too many to search."""
    size = len(rows)
    if size == 1:
        return rows
    # Columns up to a factor.
    columns = rows.T[np.abs(rows).max(axis=0) > ZERO]
    columns = columns / np.linalg.norm(columns, axis=1)[:, None]
    columns *= np.sign(columns[np.arange(len(columns)), (np.abs(columns) > ZERO).argmax(axis=1)])[:, None]
    columns = columns[np.unique(columns.round(9), axis=0, return_index=True)[1]]
    if math.comb(len(columns), size - 1) > _MOST_CANDIDATES:
        return rows
    candidates = {}
    for chosen in itertools.combinations(range(len(columns)), size - 1):
        _, sizes, kernel = np.linalg.svd(columns[list(chosen)])
        if sizes[-1] > ZERO:
            one = kernel[-1] @ rows
            one[np.abs(one) < ZERO] = 0
            places = np.flatnonzero(one)
            candidates[len(places), tuple(places.tolist())] = one / one[places[0]]
    kept: list[np.ndarray] = []
    for key in sorted(candidates):
        if np.linalg.matrix_rank(np.stack([*kept, candidates[key]]), tol=1e-6) > len(kept):
            kept.append(candidates[key])
            if len(kept) == size:
                return np.stack(kept)
    return rows


def _polynomial(block: int, degree: int, count: int, values: np.ndarray) -> Polynomial:
    """A row of a basis, scaled so that its most frequent coefficient is 1 or -1."""
    monomials = _monomials(count, degree)
    exact = {(m, i): _exact(values[m, i]) for m, i in np.argwhere(values).tolist()}
    sizes = [abs(value) for value in exact.values()]
    scale = max(dict.fromkeys(sizes), key=sizes.count)
    components = tuple(
        tuple((monomials[i], _exact(exact[m, i] / scale)) for i in range(len(monomials)) if (m, i) in exact)
        for m in range(len(values))
    )
    return Polynomial(block, degree, components)


def _exact(value: float) -> float:
    """The root of a fraction that this is, so that texts do not depend on rounding; else 13 digits of it."""
    square = Fraction(value * value).limit_denominator(_DENOMINATOR)
    root = math.copysign(math.sqrt(square), value)
    return root if abs(root - value) < 1e-11 else float(f"{value:.13g}")


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
