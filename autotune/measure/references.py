"""Check the outputs of any implementation: relative errors against e3nn in float64.

Contributions of the product are per edge, so the output rows of some nodes can be checked completely, without another
run on a smaller graph. Nodes are chosen (the first and last, those of least and greatest degree, then random ones)
until their edges, in and out, reach ``max_edges``. e3nn computes these edges in float64, chunk by chunk. This gives
exactly, for the full graph, every output row of these nodes (g: all edges into them), every gradient row of these nodes
(x: all edges out of them) and every y and w row of these edges. Shared weights have one gradient row that sums over all
edges, so for them all edges are used. Other rows must be finite.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from autotune.errors import WorkerError
from autotune.workload.graphs import build_graph
from autotune.workload.kind import Problem
from autotune.workload.workload import Tensors, Workload, make_tensors, normal_numbers, relayout
from kernelgen.arithmetic.contraction import CONTRACTION_DIRECTIONS
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.arithmetic.directions import DIRECTIONS, HARMONICS_DIRECTIONS, Direction
from kernelgen.compat import o3
from kernelgen.errors import InputError
from kernelgen.problem.irreps import blocks_of
from kernelgen.problem.other_kinds import ContractionProblem, HarmonicsProblem, VectorProblem
from kernelgen.problem.product import RadialProblem, TensorProductProblem

# Edges checked by default: e3nn's double backward in float64 takes a few seconds for them.
MAX_EDGES = {"cpu": 768, "cuda": 12288}
# Most elements of a chunk of edges in its widest operand; e3nn holds about 20 times as much.
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 12 << 20}


@functools.lru_cache(maxsize=4)
def e3nn_product(problem: TensorProductProblem, dtype: torch.dtype, device: torch.device) -> o3.TensorProduct:
    """e3nn's product. All graphs of a problem share it, because code generation takes seconds for many paths."""
    product = _built_ahead.pop(problem, None) or problem.reference()
    return product.to(device=device, dtype=dtype)


def build_ahead(problem: Problem) -> None:
    """Call :func:`e3nn_product` on the host in advance, in a process that must not use a device yet."""
    if (
        isinstance(problem, TensorProductProblem)
        and problem not in _built_ahead
        and not e3nn_product.cache_info().currsize
    ):
        _built_ahead[problem] = problem.reference()


_built_ahead: dict[TensorProductProblem, o3.TensorProduct] = {}


class Reference:
    """Exact values for one workload's tensors, computed on the device, once per direction, on first use.

    ``tensors`` are those given to the implementation.
    ``checked_edges`` is the number of edges compared.
    """

    directions: ClassVar[Mapping[str, Any]] = DIRECTIONS
    inputs: ClassVar[str] = "xyw"
    # Rows checked by default, and whether it is all of them, because one gradient sums over all.
    most_rows: ClassVar[Mapping[str, int]] = MAX_EDGES
    sums_all_rows: ClassVar[bool] = False

    def __init__(
        self, workload: Workload, device: torch.device | str, tensors: Tensors, max_edges: int | None = None
    ) -> None:
        # Of a kind that fuses something into a product, that product.
        self.problem: Any = getattr(workload.problem, "product", workload.problem)
        self.workload, self.layout, self.is_conv = workload, workload.layout, workload.is_conv
        self.device = torch.device(device)
        self._product: Callable[..., torch.Tensor] | None = None
        self._expected: dict[str, dict[str, torch.Tensor]] = {}
        self._shares_weights = self.sums_all_rows or getattr(self.problem, "shared_weights", False)
        limit = max_edges or self.most_rows[self.device.type]
        self._choose_rows(tensors, tensors.num_edges if self._shares_weights else limit)
        self._keep_rows(tensors)

    @property
    def checked_edges(self) -> int:
        return int(self.edges.shape[0])

    def rows(self, slot: str) -> torch.Tensor | None:
        """Compared rows of a full output: nodes or edges; None for a shared weight row, which is compared whole."""
        if slot == "w" and self._shares_weights:
            return None
        return self.nodes if slot in "xg" and self.is_conv else self.edges

    def expected(self, direction: Direction | str) -> dict[str, torch.Tensor]:
        """Float64 values of the compared rows by slot, in the workload's layout (``g``: output or its cotangent)."""
        asked = self.direction(direction)
        if asked.text not in self._expected:
            self._expected[asked.text] = self._compute(asked)
        return self._expected[asked.text]

    def direction(self, direction: Any) -> Any:
        """The direction, given by name or as an object."""
        return self.directions[direction] if isinstance(direction, str) else direction

    def check(self, direction: Direction | str, outputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Relative error of every output by slot: the largest over blocks (x, y, g) or paths (w); NaN gives inf.

        ``outputs`` are the full tensors, keyed x, y, w, g. A block's error is ``|out - expected| / |expected|`` in the
        Euclidean norm over the compared rows.
        """
        expected = self.expected(direction)
        errors = {}
        for slot, output in outputs.items():
            if slot not in expected:
                raise InputError(
                    f"output {slot!r} is none of direction {direction}; expected some of {tuple(expected)}"
                )
            if list(output.shape) != self._shapes[slot]:
                raise InputError(f"output {slot!r} has shape {list(output.shape)}; expected {self._shapes[slot]}")
            rows = self.rows(slot)
            output = output.detach()
            compared = (output if rows is None else output[rows]).to(torch.float64)
            finite = bool(torch.isfinite(output).all())
            errors[slot] = self._worst_block(slot, compared, expected[slot]) if finite else math.inf
        return errors

    def _worst_block(self, slot: str, output: torch.Tensor, expected: torch.Tensor) -> float:
        """The worst block's error, reduced on the device: w may have hundreds of paths, and a trial checks twice."""
        if not output.shape[-1]:
            return 0.0
        widths = torch.tensor(self._widths(slot), device=self.device)
        blocks = torch.arange(len(widths), device=self.device).repeat_interleave(widths)
        rows = ((output - expected).square_(), expected.square())
        sums = [row.new_zeros(len(widths)).index_add_(0, blocks, row.reshape(-1, row.shape[-1]).sum(0)) for row in rows]
        # If zero is expected, any difference has infinite relative error.
        ratios = torch.where(sums[0] > 0, sums[0] / sums[1], 0.0)
        return math.sqrt(float(ratios.max()))

    def _widths(self, slot: str) -> list[int]:
        """Widths of the parts of a row that are compared separately."""
        if slot == "w":
            return [self.problem.weights_of(path) for path in self.problem.paths]
        return [block.mul * block.dim for block in blocks_of(self._irreps(slot))]

    def _choose_rows(self, tensors: Tensors, limit: int) -> None:
        """Choose ``edges`` to compute, and the ``nodes`` all of whose edges are among them."""
        count = tensors.num_edges
        if not self.is_conv:
            spread = torch.linspace(0, max(0, count - 1), min(limit, count), dtype=torch.float64)
            self.edges = self.nodes = spread.round().long().to(self.device)
            return
        assert tensors.sender is not None and tensors.receiver is not None
        if limit >= count:
            self.edges = torch.arange(count, device=self.device)
            self.nodes = torch.arange(tensors.num_nodes, device=self.device)
        else:
            self.nodes = choose_nodes(tensors.sender, tensors.receiver, tensors.num_nodes, limit).to(self.device)
            chosen = torch.zeros(tensors.num_nodes, dtype=torch.bool, device=self.device)
            chosen[self.nodes] = True
            self.edges = torch.nonzero(chosen[tensors.sender] | chosen[tensors.receiver]).flatten()

    def _keep_rows(self, tensors: Tensors) -> None:
        """Copy the rows that the chosen edges need, so that the full tensors can be freed."""
        names = ("x", "y", "w", "g")
        self._shapes = {name: list(getattr(tensors, name).shape) for name in names}
        sender = tensors.sender[self.edges] if tensors.sender is not None else self.edges
        receiver = tensors.receiver[self.edges] if tensors.receiver is not None else self.edges
        senders, self._sender = torch.unique(sender, return_inverse=True)
        receivers, self._receiver = torch.unique(receiver, return_inverse=True)
        rows = {"x": senders, "y": self.edges, "w": None if self._shares_weights else self.edges, "g": receivers}
        self._operands: dict[str, torch.Tensor] = {}
        for name in (*names, "tx", "ty", "tw", "tg"):
            taken = rows[name[-1]]
            tensor = getattr(tensors, name)
            self._operands[name] = tensor.clone() if taken is None else tensor[taken]
        self._from_x, self._to_x = self._positions(senders)
        self._from_g, self._to_g = self._positions(receivers)

    def _positions(self, present: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index pairs (row of ``present``, row of ``nodes``) for the compared nodes."""
        place = torch.searchsorted(self.nodes, present).clamp(max=max(0, len(self.nodes) - 1))
        kept = torch.nonzero(self.nodes[place] == present).flatten()
        return kept, place[kept]

    def _compute(self, direction: Direction) -> dict[str, torch.Tensor]:
        self._product = self._product or self._make_product()
        outputs = (slot for slot in direction.outputs if slot in "xg")
        sums = {slot: torch.zeros_like(self._operands[slot], dtype=torch.float64) for slot in outputs}
        pieces: dict[str, list[torch.Tensor]] = {slot: [] for slot in direction.outputs if slot in "yw"}
        size = max(1, CHUNK_ELEMENTS[self.device.type] // max(1, self._widest()))
        # TorchScript would profile and fuse e3nn's code in the first calls, which takes far longer than the calls.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            for chunk in torch.arange(len(self.edges), device=self.device).split(size):
                for slot, value in self._chunk(direction, chunk).items():
                    if slot in sums:
                        sums[slot].index_add_(0, (self._sender if slot == "x" else self._receiver)[chunk], value)
                    else:
                        pieces[slot].append(value)
        return {slot: self._assemble(slot, sums.get(slot), pieces.get(slot)) for slot in direction.outputs}

    def _widest(self) -> int:
        """Elements of an edge that e3nn holds some twenty times."""
        return max(self.problem.dim_in1, self.problem.dim_out, self.problem.weight_numel)

    def _make_product(self) -> Callable[..., torch.Tensor]:
        """e3nn's product of ``(x, y, w)`` in float64."""
        return e3nn_product(self.problem, torch.float64, self.device)

    def _assemble(self, slot: str, total: torch.Tensor | None, pieces: list[torch.Tensor] | None) -> torch.Tensor:
        if pieces is not None:
            width = self._shapes[slot][-1]
            if slot == "w" and self._shares_weights:
                zero = torch.zeros(width, dtype=torch.float64, device=self.device)
                return torch.stack([zero, *pieces]).sum(0)
            return torch.cat([torch.zeros(0, width, dtype=torch.float64, device=self.device), *pieces])
        assert total is not None
        source, target = (self._from_x, self._to_x) if slot == "x" else (self._from_g, self._to_g)
        value = total.new_zeros(len(self.nodes), total.shape[1])
        value[target] = total[source]
        return relayout(value, self._irreps(slot), "mul_ir", self.layout)

    def _irreps(self, slot: str) -> str:
        return self.workload.kind.irreps(self.workload.problem, "ir_mul")[slot]

    def _chunk(self, direction: Direction, chunk: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each edge's own contribution to every output, by autograd through e3nn, in ``mul_ir``."""
        assert self._product is not None
        held = {name: self._gather(name, chunk) for name in (*self.inputs, "g")}
        *inputs, g = held.values()
        if direction.name == "forward":
            return {"g": self._product(*inputs)}
        for tensor in held.values():
            tensor.requires_grad_()
        value = self._product(*inputs)
        if not direction.tangents:
            wanted = [held[slot] for slot in direction.outputs]
            return dict(zip(direction.outputs, torch.autograd.grad(value, wanted, g), strict=True))
        # The derivative with respect to g is the value itself, which a tangent of g contracts.
        slots = direction.tangents.replace("g", "")
        gradients = torch.autograd.grad(value, [held[s] for s in slots], g, create_graph=True) if slots else ()
        first = dict(zip(slots, gradients, strict=True)) | {"g": value}
        scalar = sum(
            ((self._gather("t" + slot, chunk) * first[slot]).sum() for slot in direction.tangents),
            start=value.new_zeros(()),
        )
        wanted = [held[slot] for slot in direction.outputs]
        second = torch.autograd.grad(scalar, wanted, allow_unused=True, materialize_grads=True)
        return dict(zip(direction.outputs, second, strict=True))

    def _gather(self, name: str, chunk: torch.Tensor) -> torch.Tensor:
        tensor, slot = self._operands[name], name[-1]
        if slot == "w" and self._shares_weights:
            return tensor.to(torch.float64)
        index = {"x": self._sender, "g": self._receiver}.get(slot)
        rows = tensor[chunk if index is None else index[chunk]].to(torch.float64)
        return relayout(rows, self._irreps(slot), self.layout, "mul_ir") if slot in "xg" else rows


def choose_nodes(sender: torch.Tensor, receiver: torch.Tensor, num_nodes: int, max_edges: int) -> torch.Tensor:
    """Sorted nodes with about ``max_edges`` edges in total, in and out; extreme nodes are chosen first."""
    into = torch.bincount(receiver, minlength=num_nodes).cpu()
    out_of = torch.bincount(sender, minlength=num_nodes).cpu()
    extremes = [0, num_nodes - 1, *(int(pick(d)) for d in (into, out_of) for pick in (torch.argmax, torch.argmin))]
    generator = torch.Generator().manual_seed(0)
    candidates = dict.fromkeys([*extremes, *torch.randperm(num_nodes, generator=generator).tolist()])
    chosen, total = [], 0
    for node in candidates:
        chosen.append(node)
        total += int(into[node] + out_of[node])
        if total >= max_edges:
            break
    return torch.tensor(sorted(chosen), dtype=torch.long)


# Reference of spherical harmonics: test vectors, and e3nn's values and derivatives in float64.
#
# Vectors are independent, so an evenly spread sample is compared, which includes the first and the last (and so all
# positions in a block of threads or a machine vector); outputs of the others must be finite.

MAX_VECTORS = {"cpu": 8192, "cuda": 65536}


def e3nn_harmonics(problem: HarmonicsProblem) -> o3.SphericalHarmonics:
    """e3nn's module."""
    return o3.SphericalHarmonics(list(problem.degrees), problem.normalize, problem.normalization)


def make_vectors(workload: Workload, device: torch.device | str, seed: int = 0) -> Tensors:
    """Vectors x of random directions and lengths 0.5 to 1.5, so that none dominates; their tangents and g.

    One vector per edge of the workload's graph. Everything else is empty.
    """
    count, draw = workload.num_edges, normal_numbers(workload, device, seed)
    directions, g, tx, none = (draw(count, width) for width in (3, workload.harmonics.dim_out, 3, 0))
    x = torch.nn.functional.normalize(directions) * (0.5 + torch.rand(count, 1, **draw.keywords))
    return Tensors(x, none, none, g, tx, none, none, none, None, None, count)


class HarmonicsReference(Reference):
    """Exact values for one workload's vectors."""

    directions, inputs, most_rows = HARMONICS_DIRECTIONS, "x", MAX_VECTORS

    def _make_product(self) -> Callable[..., torch.Tensor]:
        harmonics = e3nn_harmonics(self.problem)
        # Degree 0 alone has no autograd graph; 0 * v gives it one.
        return lambda v: harmonics(v) + 0 * v[:, :1]

    def _widest(self) -> int:
        return 8 * self.problem.dim_out


def make_vector_tensors(workload: Workload, device: torch.device | str, seed: int = 0) -> Tensors:
    """As for the product, with vectors y (tangents ty) of lengths 0.5 to 1.5, so that none dominates."""
    tensors, draw = make_tensors(workload, device, seed), normal_numbers(workload, device, seed + 1)
    directions, tangents = draw(tensors.num_edges, 3), draw(tensors.num_edges, 3)
    lengths = 0.5 + torch.rand(tensors.num_edges, 1, **draw.keywords)
    return dataclasses.replace(tensors, y=torch.nn.functional.normalize(directions) * lengths, ty=tangents)


class VectorsReference(Reference):
    """Exact values for one workload with vectors ``y``."""

    def _make_product(self) -> Callable[..., torch.Tensor]:
        product = e3nn_product(self.problem, torch.float64, self.device)
        assert isinstance(self.workload.problem, VectorProblem)
        harmonics = e3nn_harmonics(self.workload.problem.harmonics)
        return lambda x, v, w: product(x, harmonics(v), w)


def radial_problem(workload: Workload) -> RadialProblem:
    assert isinstance(workload.problem, RadialProblem)
    return workload.problem


def make_radial_tensors(workload: Workload, device: torch.device | str, seed: int = 0) -> Tensors:
    """Random normal tensors: w is h [edges, hidden], tw the matrix [hidden, weights], scaled to weights of size 1."""
    problem, graph, draw = radial_problem(workload), build_graph(workload.graph), normal_numbers(workload, device, seed)
    product, edges, nodes = problem.product, graph.num_edges, graph.num_nodes
    x, y = draw(nodes, product.dim_in1), draw(edges, product.dim_in2)
    h, g = draw(edges, problem.hidden), draw(nodes, product.dim_out)
    matrix = draw(problem.hidden, product.weight_numel) / problem.hidden**0.5
    none = draw(0, 1)  # first derivatives alone: no tangents
    return Tensors(x, y, h, g, none, none, matrix, none, graph.sender.to(device), graph.receiver.to(device), nodes)


class RadialReference(Reference):
    """Exact values for one workload, with gradients of h in the place of those of weights."""

    def __init__(self, workload: Workload, device: torch.device | str, tensors: Tensors) -> None:
        self._matrix = tensors.tw.double()
        super().__init__(workload, device, tensors)

    def _keep_rows(self, tensors: Tensors) -> None:
        of_slot = {"t" + slot: getattr(tensors, slot) for slot in "xywg"}  # not used
        super()._keep_rows(dataclasses.replace(tensors, **of_slot))

    def _widths(self, slot: str) -> list[int]:
        return [len(self._matrix)] if slot == "w" else super()._widths(slot)

    def _make_product(self) -> Callable[..., torch.Tensor]:
        product = e3nn_product(self.problem, torch.float64, self.device)
        return lambda x, y, h: product(x, y, h @ self._matrix)


# Reference of symmetric contractions: test tensors, and values and derivatives in float64 by e3nn's couplings alone.
#
# Features are coupled one factor at a time by ``wigner_3j``, in every order of intermediate irreps. Each of these
# *paths* is a polynomial, and together they span the space of which the generator takes a basis. What remains to be
# known is which combination of paths a weight of that basis means: it is fitted to the basis at random points, and the
# fit must be exact. So an error in the basis, or a basis of a smaller or larger space, shows.

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

    directions, inputs, sums_all_rows = CONTRACTION_DIRECTIONS, "xw", True

    def _keep_rows(self, tensors: Tensors) -> None:
        assert tensors.sender is not None
        self._shapes = {slot: list(getattr(tensors, slot).shape) for slot in "xwg"}
        self._elements = tensors.sender
        self._operands = {name: getattr(tensors, name) for name in ("x", "w", "g", "tx", "tw")}

    def _make_product(self) -> Callable[..., torch.Tensor]:
        return functools.partial(contract, self.problem)

    def _widths(self, slot: str) -> list[int]:
        """Of the blocks of components, and of each weight's channels."""
        return [self.problem.channels] * self._shapes["w"][1] if slot == "w" else super()._widths(slot)

    def _worst_block(self, slot: str, output: torch.Tensor, expected: torch.Tensor) -> float:
        if slot == "w":
            return super()._worst_block(slot, output.flatten(1), expected.flatten(1))
        both = (by_component(self.problem, slot, rows, self.layout).flatten(1) for rows in (output, expected))
        return super()._worst_block(slot, *both)

    def _compute(self, direction: Any) -> dict[str, torch.Tensor]:
        self._product = self._product or self._make_product()
        # Matrices of couplings dominate: with 16 components, some thousand numbers a channel.
        widest = self.problem.channels * self.problem.dim_in * 40
        chunks = self.edges.split(max(1, CHUNK_ELEMENTS[self.device.type] // widest))
        pieces = [self._chunk(direction, chunk) for chunk in chunks]
        values = {slot: torch.cat([piece[slot] for piece in pieces]) for slot in direction.outputs if slot != "w"}
        found = {slot: from_component(self.problem, slot, value, self.layout) for slot, value in values.items()}
        if direction.name != "forward" and "w" in direction.outputs:
            found["w"] = torch.zeros(self._shapes["w"], dtype=torch.float64, device=self.device)
            for chunk, piece in zip(chunks, pieces, strict=True):
                found["w"].index_add_(0, self._elements[chunk].long(), piece["w"])
        return found

    def _gather(self, name: str, chunk: torch.Tensor) -> torch.Tensor:
        if name.endswith("w"):
            return self._operands[name][self._elements[chunk].long()].to(torch.float64)
        rows = self._operands[name][chunk].to(torch.float64)
        return by_component(self.problem, name[-1], rows, self.layout).contiguous()
