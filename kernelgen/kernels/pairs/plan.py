"""The plan of a product whose paths pair copies of both inputs: every mode of e3nn, edge by edge.

A :class:`PairPlan` says what one team (a warp or a part of one, or a host thread) keeps in its scratch memory for one
edge, and which outputs must be zero before the launch. A path takes three steps, from which all derivatives are built:

    z[m3, k]  = sum over m1 of M[m1, m3](y_v) x[m1, u]      for each pair k = (u, v), M of ``couplings``
    g[m3, o] += sum over k of w[k, o] z[m3, k]              (or one weight a pair, or none)
    d[m3, k]  = sum over o of w[k, o] g[m3, o]              from which the gradients of x and y follow

With tangents, z and d are sums over the buffer pairs of all monomials whose other two buffers are the same.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from kernelgen.arithmetic.directions import Direction
from kernelgen.errors import ScheduleError
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import BYTES, Spec
from kernelgen.problem.product import Path, TensorProductProblem

# Most columns of a path's weights that a GPU's team works on at a time: in all, and for each of its lanes.
COLUMNS, COLUMNS_PER_LANE = 64, 4
WARP = 32
Buffers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Products:
    """The products of buffers that a direction needs, from its monomials.

    z: sums over (x, y). d: sums over (w, g). The value sums the products (buffer of w, z) in ``value``, the gradient of
    w those (buffer of g, z) in ``weight``, of x those (buffer of y, d) in ``x``, of y those (buffer of x, d) in ``y``.
    """

    z: tuple[Buffers, ...]
    value: tuple[tuple[str, Buffers], ...]
    weight: tuple[tuple[str, Buffers], ...]
    d: tuple[Buffers, ...]
    x: tuple[tuple[str, Buffers], ...]
    y: tuple[tuple[str, Buffers], ...]


@functools.cache
def products(direction: Direction) -> Products:
    """The products of a direction's live outputs."""

    def grouped(out: str, key: str, first: str, second: str) -> tuple[tuple[str, Buffers], ...]:
        found: dict[str, list[tuple[str, str]]] = {}
        for m in direction.monomials:
            if out in direction.live_outputs and getattr(m, out) == out:
                found.setdefault(getattr(m, key), []).append((getattr(m, first), getattr(m, second)))
        return tuple((name, tuple(pairs)) for name, pairs in found.items())

    value, weight = grouped("g", "w", "x", "y"), grouped("w", "g", "x", "y")
    x, y = grouped("x", "y", "w", "g"), grouped("y", "x", "w", "g")
    z = tuple(dict.fromkeys(buffers for _, buffers in (*value, *weight)))
    d = tuple(dict.fromkeys(buffers for _, buffers in (*x, *y)))
    return Products(z, value, weight, d, x, y)


@dataclass(frozen=True)
class PairPath:
    """One path with its sizes: copies ``mul1, mul2, mul3``, components ``dim1, dim2, dim3`` and ``pairs``."""

    path: Path
    muls: tuple[int, int, int]
    dims: tuple[int, int, int]
    pairs: int

    @property
    def columns(self) -> int:
        """Copies of the output."""
        return self.muls[2]

    @property
    def work(self) -> int:
        """Approximate multiply-adds for an edge."""
        return self.pairs * self.dims[2] * (self.columns + self.dims[0] * self.dims[1])


def pair_paths(problem: TensorProductProblem) -> list[PairPath]:
    """The paths that have pairs and outputs."""
    found = []
    for path in problem.paths:
        muls, mode = problem.muls(path), problem.mode(path)
        dims = (problem.in1[path.in1].dim, problem.in2[path.in2].dim, problem.out[path.out].dim)
        pairs = mode.count(muls[0], muls[1])
        if pairs and muls[2]:
            found.append(PairPath(path, muls, dims, pairs))
    return found


@dataclass(frozen=True)
class PairPlan:
    """``scratch``: first element of each array in a team's scratch memory; the last entry, ``end``, is its size.

    parts: the paths of each team that shares an edge. weight_sums: number of gradients of shared weights that a block
    sums in shared memory over its edges (0: it adds them to memory).
    """

    spec: Spec
    parts: tuple[tuple[PairPath, ...], ...]
    products: Products
    scratch: dict[str, int]
    zeroed: frozenset[str]
    shared_bytes: int = 0
    weight_sums: int = 0
    # Fields of a channelwise plan: no team owns a node, and every row of y's gradient is complete.
    owner: str = ""
    partial_y: int = 0

    @property
    def paths(self) -> tuple[PairPath, ...]:
        return tuple(path for part in self.parts for path in part)

    @property
    def is_conv(self) -> bool:
        return self.spec.operation == "conv"

    @property
    def sums_weights(self) -> bool:
        """Whether gradients of weights are summed over all edges."""
        return "out_w" in self.zeroed

    @property
    def on_gpu(self) -> bool:
        return self.spec.facts.backend == "cuda"

    @property
    def lanes(self) -> int:
        schedule = self.spec.schedule
        return schedule.lanes if isinstance(schedule, CudaSchedule) else 1

    @property
    def teams(self) -> int:
        schedule = self.spec.cuda
        return schedule.block_size // schedule.lanes

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether each output copy is one pair; pairs and their gradients then use the output's rows directly."""
        problem, paths = self.spec.problem, self.spec.problem.paths
        alone = all(problem.mode(path).result == "pair" and not path.has_weight for path in paths)
        once = sorted(path.out for path in paths) == list(range(len(problem.out)))
        return not self.is_conv and alone and once

    def is_dense(self, path: PairPath) -> bool:
        """Whether every pair has a weight for every copy of the output."""
        return self.spec.problem.mode(path.path).result == "w" and path.path.has_weight

    def in_registers(self, path: PairPath) -> bool:
        """Whether each lane of a team forms the path's only pair for itself."""
        return path.pairs == 1 and self.is_dense(path)

    def fetches(self, path: PairPath) -> bool:
        """Whether weights are copied asynchronously to scratch memory: if only ``d`` needs them."""
        ahead = self.on_gpu and bool(self.products.d) and not self.products.value
        return ahead and self.is_dense(path) and not self.in_registers(path)

    def tile(self, path: PairPath) -> int:
        """Columns of the weights worked on at a time."""
        return min(path.columns, COLUMNS, COLUMNS_PER_LANE * self.lanes) if self.on_gpu else path.columns

    def stride(self, path: PairPath) -> int:
        """Elements from row to row of weights in scratch memory: odd, so that a column spans different banks."""
        return self.tile(path) | 1


def pair_plan(spec: Spec) -> PairPlan:
    """The plan of a spec, or ScheduleError with the broken limit."""
    if spec.operation == "conv" and spec.schedule.accumulate != "atomics":
        raise ScheduleError(
            f"accumulate={spec.schedule.accumulate!r}: products of other modes than weighted uvu go edge by edge, so "
            "sums at nodes are added in memory (accumulate='atomics')"
        )
    problem, live = spec.problem, spec.direction.live_outputs
    parts, wanted = _parts(spec), products(spec.direction)
    zeroed = {"out_w"} if problem.shared_weights and "w" in live else set()
    summed = "xyg" if len(parts) > 1 else "xg" if spec.operation == "conv" else ""
    zeroed |= {f"out_{slot}" for slot in summed if slot in live}
    plan = PairPlan(spec, parts, wanted, {}, frozenset(zeroed))
    arrays = _arrays(plan)
    starts = dict(zip((*arrays, "end"), itertools.accumulate(arrays.values(), initial=0), strict=True))
    shared, sums = 0, 0
    if isinstance(spec.schedule, CudaSchedule):
        elements = plan.teams * starts["end"]
        sums = problem.weight_numel if "out_w" in zeroed else 0
        if (elements + sums) * BYTES[spec.dtype] > spec.facts.shared_per_block:
            sums = 0
        shared = (elements + sums) * BYTES[spec.dtype]
        check_block(spec, shared)
    return PairPlan(spec, parts, wanted, starts, plan.zeroed, shared, sums)


def check_block(spec: Spec, shared: int) -> None:
    """ScheduleError for a block with too many threads or bytes of shared memory."""
    schedule, facts = spec.cuda, spec.facts
    if shared > facts.shared_per_block:
        raise ScheduleError(
            f"block_size={schedule.block_size} needs {shared} bytes of shared memory; "
            f"there are {facts.shared_per_block}"
        )
    facts.check_threads(schedule.block_size, schedule.min_blocks)


def _parts(spec: Spec) -> tuple[tuple[PairPath, ...], ...]:
    """The paths of each of ``path_groups`` teams: assigned by decreasing work, each to the team with the least."""
    paths = pair_paths(spec.problem)
    count = spec.schedule.path_groups if isinstance(spec.schedule, CudaSchedule) else 1
    if count > max(1, len(paths)):
        raise ScheduleError(f"path_groups={count}: this problem allows 1 to {max(1, len(paths))} (one a path)")
    if count > 1 and isinstance(spec.schedule, CudaSchedule) and spec.schedule.lanes < WARP:
        raise ScheduleError(
            f"path_groups={count}, edges_per_warp={spec.schedule.edges_per_warp}: the teams of a warp keep in step, so "
            "those of different path groups take a warp each (edges_per_warp=1)"
        )
    if count > 1 and spec.deterministic:
        raise ScheduleError(
            f"path_groups={count}: teams that share an edge add to its rows in no fixed order; a deterministic kernel "
            "takes path_groups=1"
        )
    parts: list[list[PairPath]] = [[] for _ in range(count)]
    for path in sorted(paths, key=lambda path: -path.work):
        min(parts, key=lambda part: sum(other.work for other in part)).append(path)
    return tuple(tuple(sorted(part, key=lambda path: path.path.index)) for part in parts)


def _arrays(plan: PairPlan) -> dict[str, int]:
    """Elements of each scratch array: rows of operands and of sums, then the arrays of a path's steps."""
    problem, direction = plan.spec.problem, plan.spec.direction
    rows = {"x": problem.dim_in1, "y": problem.dim_in2} | ({} if plan.is_direct else {"g": problem.dim_out})
    arrays = {f"s_{name}": rows[name[-1]] for name in direction.operands if name[-1] in rows}
    arrays |= {f"o_{slot}": rows[slot] for slot in direction.live_outputs if slot in rows}
    if plan.is_direct:
        return arrays
    paths = [p for p in plan.paths if not plan.in_registers(p)]
    most = max((p.pairs * p.dims[2] for p in paths), default=0)
    arrays |= {f"z{number}": most for number in range(len(plan.products.z))}
    arrays |= {f"d{number}": most for number in range(len(plan.products.d))}
    chunk = max((plan.lanes * plan.stride(p) for p in paths if plan.is_dense(p)), default=0)
    weights = {w for sums in plan.products.d for w, _ in sums}
    return arrays | {f"c_{name}": chunk for name in ("w", "tw") if name in weights}
