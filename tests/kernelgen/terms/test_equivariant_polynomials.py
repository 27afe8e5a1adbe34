"""The basis of equivariant polynomials: complete, independent, equivariant; and other polynomials in terms of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from e3nn import o3
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import float64
from torch import Tensor

from kernelgen.arithmetic import contraction_couplings
from kernelgen.arithmetic import contraction_couplings as cheapest_couplings
from kernelgen.arithmetic.contraction_couplings import Polynomial, coordinates, polynomials
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.problem.other_kinds import ContractionProblem

MACE = "0e+1o+2e+3o"
PROBLEMS = [
    ContractionProblem(MACE, "0e+1o+2e", 3, 1),
    ContractionProblem("0e+1o+2e", "0e+1o+2e+0o+1e", 4, 1),
    ContractionProblem("1o+0o+1o", "1e+1o+2e+2o", 3, 1),
    ContractionProblem("2e", "4e+2e+0e", 4, 1),
]
EACH_PROBLEM = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)


def points(problem: ContractionProblem, count: int) -> Tensor:
    return torch.randn(count, problem.dim_in, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def values(one: Polynomial, x: Tensor) -> Tensor:
    """[points, components] of a polynomial at points [points, components of the features]."""
    sums = [
        sum((coefficient * x[:, list(monomial)].prod(1) for monomial, coefficient in terms), torch.zeros_like(x[:, 0]))
        for terms in one.components
    ]
    return torch.stack(sums, 1)


def groups(problem: ContractionProblem) -> Iterator[tuple[int, int, list[Polynomial]]]:
    """Polynomials by output block and degree, also where there is none."""
    basis = polynomials(problem)
    for block, degree in itertools.product(range(len(problem.out)), range(1, problem.correlation + 1)):
        yield block, degree, [one for one in basis if (one.block, one.degree) == (block, degree)]


def multiplicity(problem: ContractionProblem, block: int, degree: int) -> int:
    """How often an output irrep occurs among polynomials of a degree: by weights of rotations about an axis."""
    weights = [(m, ir.p) for _, ir in o3.Irreps(problem.irreps_in) for m in range(-ir.l, ir.l + 1)]
    found: Counter[tuple[int, int]] = Counter()
    for chosen in itertools.combinations_with_replacement(weights, degree):
        parity = 1
        for _, p in chosen:
            parity *= p
        found[sum(m for m, _ in chosen), parity] += 1
    ir = o3.Irreps(problem.irreps_out)[block].ir
    return found[ir.l, ir.p] - found[ir.l + 1, ir.p]


def coupled(irreps: str, degree: int) -> dict[o3.Irrep, list[Tensor]]:
    """Couplings [2l+1, components ** degree] of copies of the features, one after the other, by irrep of the result."""
    blocks = list(zip(o3.Irreps(irreps), o3.Irreps(irreps).slices(), strict=True))
    dim, found = o3.Irreps(irreps).dim, {}
    for (_, ir), part in blocks:
        found.setdefault(ir, []).append(torch.eye(dim, dtype=torch.float64)[part])
    for _ in range(degree - 1):
        before, found = found, {}
        for (left, tensors), ((_, right), part) in itertools.product(before.items(), blocks):
            for ir in left * right:
                three = o3.wigner_3j(ir.l, left.l, right.l, dtype=torch.float64)
                for tensor in tensors:
                    more = torch.zeros(2 * ir.l + 1, tensor.shape[1], dim, dtype=torch.float64)
                    more[:, :, part] = torch.einsum("mab,ai->mib", three, tensor)
                    found.setdefault(ir, []).append(more.flatten(1))
    return found


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    caches = (polynomials, cheapest_couplings.couplings_of, contraction_couplings.coupling)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("irreps_out, count", [("0e", 13), ("0e+1o", 29), ("0e+1o+2e", 49)])
def test_the_number_of_weights_of_mace(irreps_out: str, count: int) -> None:
    assert len(polynomials(ContractionProblem(MACE, irreps_out, 3, 128))) == count


@EACH_PROBLEM
def test_a_complete_basis(problem: ContractionProblem) -> None:
    """As many as the group has, and independent: so they are all."""
    for block, degree, basis in groups(problem):
        assert len(basis) == multiplicity(problem, block, degree)
        if basis:
            x = points(problem, 3 * len(basis))
            rows = torch.stack([values(one, x).flatten() for one in basis])
            rows = rows / rows.norm(dim=1, keepdim=True)
            assert float(torch.linalg.svdvals(rows).min()) > 1e-4


def assert_equivariant(problem: ContractionProblem) -> None:
    x = points(problem, 4)
    for alpha, beta, gamma, inverts in ((0.3, 1.1, -2.0, 0), (2.1, 0.4, 0.7, 1)):
        angles = [torch.tensor(angle, dtype=torch.float64) for angle in (alpha, beta, gamma)]
        with float64():  # e3nn makes the generators of rotations in the default precision
            turn_in, *turns = (
                o3.Irreps(irreps).D_from_angles(*angles, torch.tensor(inverts))
                for irreps in (problem.irreps_in, *problem.irreps_out.split("+"))
            )
        for one in polynomials(problem):
            wanted = values(one, x) @ turns[one.block].T
            torch.testing.assert_close(
                values(one, x @ turn_in.T), wanted, rtol=0, atol=1e-11 * float(wanted.abs().max())
            )


@EACH_PROBLEM
def test_every_polynomial_is_equivariant(problem: ContractionProblem) -> None:
    assert_equivariant(problem)


irreps = st.lists(st.sampled_from(["0e", "0o", "1o", "1e", "2e", "2o"]), min_size=1, max_size=3).map("+".join)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=st.builds(ContractionProblem, irreps, irreps, st.integers(1, 3), st.just(1)))
def test_drawn_irreps(problem: ContractionProblem) -> None:
    for block, degree, basis in groups(problem):
        assert len(basis) == multiplicity(problem, block, degree)
    assert_equivariant(problem)


@EACH_PROBLEM
def test_the_form_of_a_basis(problem: ContractionProblem) -> None:
    """The order of the weights is that of blocks and degrees."""
    basis = polynomials(problem)
    assert [(one.block, one.degree) for one in basis] == sorted((one.block, one.degree) for one in basis)
    for one in basis:
        monomials = [monomial for terms in one.components for monomial, _ in terms]
        assert one.monomial == monomials[0]
        assert all(len(other) == one.degree and list(other) == sorted(other) for other in monomials)


@EACH_PROBLEM
def test_a_polynomial_has_one_degree_in_each_input_irrep(problem: ContractionProblem) -> None:
    owner = [number for number, (_, ir) in enumerate(o3.Irreps(problem.irreps_in)) for _ in range(ir.dim)]
    for one in polynomials(problem):
        kinds = {tuple(owner[i] for i in monomial) for terms in one.components for monomial, _ in terms}
        assert len(kinds) == 1


@EACH_PROBLEM
def test_signs_of_couplings_change_nothing(
    problem: ContractionProblem, monkeypatch: pytest.MonkeyPatch, fresh_caches: None
) -> None:
    """e3nn 0.4 and 0.6 differ in some of them."""
    wanted, given, flipped = polynomials(problem), o3.wigner_3j, []

    def other(a: int, b: int, c: int, **options: object) -> Tensor:
        flipped.append((a, b, c))
        return -given(a, b, c, **options) if (a + 2 * b + c) % 3 else given(a, b, c, **options)

    for cache in (polynomials, cheapest_couplings.couplings_of, contraction_couplings.coupling):
        cache.cache_clear()
    monkeypatch.setattr(contraction_couplings.o3, "wigner_3j", other)
    assert polynomials(problem) == wanted
    assert len({(a + 2 * b + c) % 3 > 0 for a, b, c in flipped}) == 2


@pytest.mark.parametrize(
    "problem",
    [ContractionProblem("0e+1o+2e", "0e+1o+2e", 3, 1), ContractionProblem("0e+1o", "0e+1o", 4, 1)],
    ids=lambda problem: problem.key,
)
def test_coordinates_of_other_polynomials(problem: ContractionProblem) -> None:
    """MACE's own: features coupled one after the other, along every path."""
    x = points(problem, 6)
    for block, degree, basis in groups(problem):
        paths = torch.stack(coupled(problem.irreps_in, degree)[o3.Irreps(problem.irreps_out)[block].ir], 2)
        found = coordinates(problem, block, degree, paths)
        assert found.shape == (len(basis), paths.shape[2]) and len(basis) <= paths.shape[2]
        powers = x
        for _ in range(degree - 1):
            powers = (powers[:, :, None] * x[:, None]).flatten(1)
        wanted = torch.einsum("mik,ni->nmk", paths, powers)
        by_basis = torch.stack([values(one, x) for one in basis], 2) @ found
        torch.testing.assert_close(by_basis, wanted, rtol=0, atol=1e-12 * float(wanted.abs().max()))
        assert torch.linalg.matrix_rank(found) == len(basis)
        rounded = coordinates(problem, block, degree, paths.float())
        torch.testing.assert_close(rounded, found, rtol=0, atol=1e-5)


def test_coordinates_where_there_is_no_polynomial() -> None:
    problem = ContractionProblem("1o", "1e", 2, 1)
    assert coordinates(problem, 0, 1, torch.zeros(3, 3, 2)).shape == (0, 2)
    # The cross product of a vector with itself: antisymmetric, so zero.
    cross = o3.wigner_3j(1, 1, 1, dtype=torch.float64).reshape(3, 9, 1)
    assert coordinates(problem, 0, 2, cross).shape == (0, 1)
    assert coordinates(ContractionProblem("1o", "1o", 1, 1), 0, 1, torch.zeros(3, 3, 0)).shape == (1, 0)


@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_polynomials_outside_the_space_are_refused(size: float) -> None:
    problem = ContractionProblem("0e+1o", "0e", 2, 1)
    paths = torch.stack(coupled(problem.irreps_in, 2)[o3.Irrep("0e")], 2)
    coordinates(problem, 0, 2, paths)
    paths[0, 1, 0] += size  # x_0 x_1: a component of a vector
    with pytest.raises(UnsupportedError, match="not symmetric O.3.-equivariant ones; keep the package's module"):
        coordinates(problem, 0, 2, paths)


@pytest.mark.parametrize("shape", [(1, 16), (3, 16, 2), (1, 4, 2), (1, 15, 2)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    problem = ContractionProblem("0e+1o", "0e", 2, 1)
    assert coordinates(problem, 0, 2, torch.zeros(1, 4, 4, 2)).shape == (2, 2)
    with pytest.raises(ProblemError, match=r"polynomials have shape .*; expected \(1, 16, paths\)"):
        coordinates(problem, 0, 2, torch.zeros(shape))
