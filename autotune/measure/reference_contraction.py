"""Reference of symmetric contractions: test tensors, and values and derivatives in float64 by e3nn's couplings alone.

Features are coupled one factor at a time by ``wigner_3j``, in every order of intermediate irreps. Each of these *paths*
is a polynomial, and together they span the space of which the generator takes a basis. What remains to be known is
which combination of paths a weight of that basis means: it is fitted to the basis at random points, and the fit must be
exact. So an error in the basis, or a basis of a smaller or larger space, shows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autotune.errors import WorkerError
from autotune.measure.references import CHUNK_ELEMENTS, Reference
from autotune.workload.graphs import build_graph
from autotune.workload.workload import Tensors, Workload, normal_numbers, relayout
from kernelgen.arithmetic.contraction import CONTRACTION_DIRECTIONS
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.compat import o3
from kernelgen.problem.contraction import ContractionProblem

# Relative residual of an exact fit; one that misses a polynomial leaves about one.
EXACT = 1e-9
# By an irrep's degree and parity.
Coupled = dict[tuple[int, int], torch.Tensor]


def make_features(workload: Workload, device: torch.device | str, seed: int = 0) -> Tensors:
    """Features x, weights w [elements, weights, channels], g and all tangents; ``sender`` has the nodes' elements."""
    problem, source = contraction_of(workload), workload.graph.source
    graph, draw = build_graph(workload.graph), normal_numbers(workload, device, seed)
    nodes, table = graph.num_edges, (source.elements, len(polynomials(problem)), problem.channels)  # type: ignore[union-attr]
    x, tx = (draw(nodes, problem.dim_in * problem.channels) for _ in range(2))
    g, tg = (draw(nodes, problem.dim_out * problem.channels) for _ in range(2))
    w, tw, none = draw(*table), draw(*table), draw(nodes, 0)
    return Tensors(x, none, w, g, tx, none, tw, tg, graph.sender.to(device), None, nodes)


def contraction_of(workload: Workload) -> ContractionProblem:
    assert isinstance(workload.problem, ContractionProblem)
    return workload.problem


def by_component(problem: ContractionProblem, slot: str, rows: torch.Tensor, layout: str) -> torch.Tensor:
    """Rows of slot x or g as [rows, components, channels]."""
    if layout == "mul_ir" and slot == "x":
        return rows.view(len(rows), problem.channels, problem.dim_in).mT
    irreps = "+".join(f"{problem.channels}x{irrep}" for irrep in problem.irreps_out.split("+"))
    turned = rows if slot == "x" else relayout(rows, irreps, layout, "ir_mul")
    return turned.view(len(rows), -1, problem.channels)


def from_component(problem: ContractionProblem, slot: str, values: torch.Tensor, layout: str) -> torch.Tensor:
    """Inverse of :func:`by_component`."""
    if layout == "mul_ir" and slot == "x":
        return values.mT.flatten(1)
    irreps = "+".join(f"{problem.channels}x{irrep}" for irrep in problem.irreps_out.split("+"))
    return values.flatten(1) if slot == "x" else relayout(values.flatten(1), irreps, "ir_mul", layout)


class Paths:
    """The paths of features x [dim_in, rows], degree by degree. Rows are last, since all else is small.

    lower: by degree, those of each irrep (degree, parity), [paths, 2l+1, rows]; of degree 0 there is the number 1.
    """

    def __init__(self, problem: ContractionProblem, x: torch.Tensor) -> None:
        irreps, self._outputs = o3.Irreps(problem.irreps_in), [irrep for _, irrep in o3.Irreps(problem.irreps_out)]
        self._factors = [(irrep, x[part]) for (_, irrep), part in zip(irreps, irreps.slices(), strict=True)]
        self._matrices: dict[tuple[int, int, int], torch.Tensor] = {}
        self.lower: list[Coupled] = [{(0, 1): x.new_ones(1, 1, x.shape[1])}]
        most, highest = max(irrep.l for _, irrep in irreps), max(irrep.l for irrep in self._outputs)
        for degree in range(1, problem.correlation):
            # An irrep of a higher degree than this cannot come down to an output's with the factors that are left.
            reach = highest + most * (problem.correlation - degree)
            self.lower.append(self._next(self.lower[-1], reach))

    def _next(self, lower: Coupled, reach: int) -> Coupled:
        """Products with one more factor."""
        parts: dict[tuple[int, int], list[torch.Tensor]] = {}
        for (l, p), paths in lower.items():  # noqa: E741
            for number, (factor, _) in enumerate(self._factors):
                for out in o3.Irrep(l, p) * factor:
                    if out.l <= reach:
                        parts.setdefault((out.l, out.p), []).append(combined(paths, self._matrix(l, number, out.l)))
        return {irrep: torch.cat(pieces) for irrep, pieces in parts.items()}

    def pieces(self, degree: int, out: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Paths of an output's irrep in groups: those of one degree less, and the matrix [2l'+1, 2l+1, rows]."""
        for (l, p), paths in self.lower[degree - 1].items():  # noqa: E741
            for number, (factor, _) in enumerate(self._factors):
                if out in o3.Irrep(l, p) * factor:
                    yield paths, self._matrix(l, number, out.l)

    def _matrix(self, l: int, number: int, l_out: int) -> torch.Tensor:  # noqa: E741
        """The coupling with a factor, contracted with that factor's components."""
        key = (l, number, l_out)
        if key not in self._matrices:
            factor, rows = self._factors[number]
            coupling = _coupling(l, factor.l, l_out).to(rows.device)
            shape = (2 * l + 1, 2 * l_out + 1, rows.shape[1])
            self._matrices[key] = (coupling.mT.reshape(-1, len(rows)) @ rows).view(shape)
        return self._matrices[key]


def combined(paths: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Paths [paths, i, rows] by a matrix [i, k, rows], [paths, k, rows]."""
    return (paths[:, :, None] * matrix).sum(1)


_coupling = functools.cache(functools.partial(o3.wigner_3j, dtype=torch.float64))


@functools.lru_cache(maxsize=16)
def meanings(problem: ContractionProblem) -> dict[tuple[int, int], torch.Tensor]:
    """By output block and degree, the combinations [weights, paths] that the basis polynomials are.

    Raises WorkerError if a basis polynomial is no combination of paths, or there are more or fewer than independent
    paths.
    """
    generator, found = torch.Generator().manual_seed(0), {}
    points = torch.randn(problem.dim_in, 4 + 2 * len(polynomials(problem)), generator=generator, dtype=torch.float64)
    known = Paths(problem, points)
    for block, (_, irrep) in enumerate(o3.Irreps(problem.irreps_out)):
        for degree in range(1, problem.correlation + 1):
            basis = [one for one in polynomials(problem) if (one.block, one.degree) == (block, degree)]
            pieces = [combined(*piece).flatten(1) for piece in known.pieces(degree, irrep)]
            paths = torch.cat(pieces) if pieces else points.new_zeros(0, points.shape[1] * irrep.dim)
            rank = int(torch.linalg.matrix_rank(paths))
            if rank != len(basis):
                raise WorkerError(f"the basis of {irrep}, degree {degree}, has {len(basis)} polynomials of {rank}")
            if not basis:
                continue
            values = torch.stack([_evaluated(one.components, points) for one in basis]).flatten(1)
            # Of the combinations that give the same polynomial, the one of least norm.
            fit = values @ torch.linalg.pinv(paths)
            rest = float((fit @ paths - values).norm() / values.norm())
            if not rest < EXACT:
                raise WorkerError(f"polynomials to {irrep} of degree {degree} are not equivariant, by {rest:.1e}")
            found[block, degree] = fit
    return found


def _evaluated(components: Any, points: torch.Tensor) -> torch.Tensor:
    """A basis polynomial at points [dim_in, rows], [2l+1, rows], term by term."""
    out = points.new_zeros(len(components), points.shape[1])
    for m, terms in enumerate(components):
        for monomial, coefficient in terms:
            out[m] += coefficient * points[list(monomial)].prod(0)
    return out


def contract(problem: ContractionProblem, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Values [nodes, components, channels] of x [nodes, components, channels], w [nodes, weights, channels]."""
    rows, weights = (tensor.movedim(1, 0).flatten(1) for tensor in (x, w))
    order = [(one.block, one.degree) for one in polynomials(problem)]
    known, values = Paths(problem, rows), []
    for block, (_, irrep) in enumerate(o3.Irreps(problem.irreps_out)):
        # Without this, values without any polynomial would have no autograd graph.
        total = 0 * (rows.sum(0) + weights.sum(0)).expand(irrep.dim, -1)
        for degree in range(1, problem.correlation + 1):
            meaning = meanings(problem).get((block, degree))
            if meaning is not None:
                places = [place for place, kind in enumerate(order) if kind == (block, degree)]
                of_path, begin = meaning.to(rows.device).T @ weights[places], 0
                for paths, matrix in known.pieces(degree, irrep):
                    given = of_path[begin : begin + len(paths), None]
                    total = total + combined((given * paths).sum(0, keepdim=True), matrix)[0]
                    begin += len(paths)
        values.append(total)
    return torch.cat(values).unflatten(1, (x.shape[0], x.shape[2])).movedim(0, 1)


class ContractionReference(Reference):
    """Exact values for one workload's nodes, all of them, since gradients of the weights sum over all."""

    directions = CONTRACTION_DIRECTIONS
    inputs = "xw"

    def __init__(self, workload: Workload, device: torch.device | str, tensors: Tensors) -> None:
        self.workload, self.contraction, self.layout = workload, contraction_of(workload), workload.layout
        self.device, self.is_conv = torch.device(device), False
        self._expected, self._product = {}, functools.partial(contract, self.contraction)
        self._choose_rows(tensors, tensors.num_edges)
        self._shapes = {slot: list(getattr(tensors, slot).shape) for slot in "xwg"}
        self._elements = tensors.sender
        self._operands = {name: getattr(tensors, name) for name in ("x", "w", "g", "tx", "tw")}

    def rows(self, slot: str) -> torch.Tensor | None:
        return None if slot == "w" else self.edges

    def _widths(self, slot: str) -> list[int]:
        """Of the blocks of components, and of each weight's channels."""
        problem = self.contraction
        if slot == "w":
            return [problem.channels] * self._shapes["w"][1]
        irreps = o3.Irreps(problem.irreps_in if slot == "x" else problem.irreps_out)
        return [problem.channels * irrep.dim for _, irrep in irreps]

    def _worst_block(self, slot: str, output: torch.Tensor, expected: torch.Tensor) -> float:
        if slot == "w":
            return super()._worst_block(slot, output.flatten(1), expected.flatten(1))
        both = (by_component(self.contraction, slot, rows, self.layout).flatten(1) for rows in (output, expected))
        return super()._worst_block(slot, *both)

    def _compute(self, direction: Any) -> dict[str, torch.Tensor]:
        # Matrices of couplings dominate: with 16 components, some thousand numbers a channel.
        widest = self.contraction.channels * self.contraction.dim_in * 40
        chunks = self.edges.split(max(1, CHUNK_ELEMENTS[self.device.type] // widest))
        pieces = [self._laid(self._chunk(direction, chunk)) for chunk in chunks]
        found = {slot: torch.cat([piece[slot] for piece in pieces]) for slot in direction.outputs if slot != "w"}
        if direction.name != "forward" and "w" in direction.outputs:
            found["w"] = torch.zeros(self._shapes["w"], dtype=torch.float64, device=self.device)
            for chunk, piece in zip(chunks, pieces, strict=True):
                found["w"].index_add_(0, self._rows_of(chunk), piece["w"])
        return found

    def _rows_of(self, chunk: torch.Tensor) -> torch.Tensor:
        assert self._elements is not None
        return self._elements[chunk].long()

    def _gather(self, name: str, chunk: torch.Tensor) -> torch.Tensor:
        if name.endswith("w"):
            return self._operands[name][self._rows_of(chunk)].to(torch.float64)
        rows = self._operands[name][chunk].to(torch.float64)
        return by_component(self.contraction, name[-1], rows, self.layout).contiguous()

    def _laid(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Detached, in the workload's layout."""
        return {
            slot: value.detach() if slot == "w" else from_component(self.contraction, slot, value.detach(), self.layout)
            for slot, value in values.items()
        }
