"""Schedules, spec and plan of kernels that form a convolution's edge weights, ``h @ matrix``, in registers."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.arithmetic.couplings import normalized_slots, path_terms
from kernelgen.arithmetic.directions import Direction
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.channelwise import Group, Plan, padded_stride, stage_stride
from kernelgen.kernels.product.plan import product_plan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import PRODUCTS, TensorProductProblem

# Hidden features are multiplied in steps of this many.
STEP = 16
MOST_HIDDEN = 128


@dataclass(frozen=True)
class RadialSchedule(Knobs):
    """Knobs of a CUDA kernel: a warp takes 16 channels of a share of all edges, by tiles of 8 edges, 16 for gradients.

    path_groups: parts of the paths; a block has one part, and keeps its slice of the matrix in shared memory.
    warps: of a block. min_blocks: blocks that share a multiprocessor; so many are started.
    tiles: of a value's 8 edges that are multiplied by one load of the matrix from shared memory; four with ``wgmma``.
    order: of paths; by the block of the first input, or of the second, whose gradient holds registers meanwhile.
    edge_values: whether lanes keep an edge's values from path to path, or reload them from shared memory for each path
        or ``four`` of them.
    slices: of 16 channels that a warp takes one after the other for the same edges, whose gradients it adds once.
    coupled: from how many terms for each component of x tensor cores form a path's gradients; 0: no path's.
    ahead: ``hidden`` if a value's hidden features are loaded during the step before the one that splits them.
    products: what multiplies hidden features by the matrix, and gradients of weights by its transpose: ``mma`` of each
        warp, or ``wgmma`` of four warps at a time, which Hopper alone has: of a value they have 64 channels of the
        same edges; gradients are those with coupled cotangents.
    paths_at_once: whose weights ``wgmma`` forms, while lanes multiply those of the paths before.
    """

    path_groups: int = 1
    warps: int = 8
    min_blocks: int = 1
    tiles: int = 1
    order: str = "in1"
    edge_values: str = "kept"
    slices: int = 1
    coupled: int = 0
    ahead: str = "none"
    products: str = "mma"
    paths_at_once: int = 4

    backend: ClassVar[str] = "cuda"
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "path_groups": tuple(range(1, 129)),
        "warps": (2, 4, 8, 12, 16),
        "min_blocks": (1, 2, 3, 4),
        "tiles": (1, 2, 4),
        "order": ("in1", "in2"),
        "edge_values": ("kept", "four", "reloaded"),
        "slices": (1, 2, 4, 8),
        "coupled": (0, 1, 2, 4),
        "ahead": ("none", "hidden"),
        "products": ("mma", "wgmma"),
        "paths_at_once": (1, 2, 3, 4, 5, 6, 8, 10),
    }
    younger: ClassVar[tuple[str, ...]] = ("coupled", "ahead", "products", "paths_at_once")

    @property
    def canonical(self) -> RadialSchedule:
        if self.products == "wgmma":
            return self
        return dataclasses.replace(self, paths_at_once=RadialSchedule.paths_at_once)

    def by_single_warps(self) -> RadialSchedule:
        """The nearest form without ``wgmma``: a value has two tiles at most, which leave no room for loads ahead."""
        form = dataclasses.replace(self, products="mma", paths_at_once=RadialSchedule.paths_at_once)
        if self.tiles == 1:
            return form
        return dataclasses.replace(form, tiles=2, ahead="none", edge_values="four")


def operands_of(direction: Direction) -> tuple[str, ...]:
    """Buffers that a direction's kernel reads: the product's, where ``w`` is h, and the matrix ``tw``."""
    return (*direction.operands, "tw")


@dataclass(frozen=True)
class RadialSpec:
    """Everything that determines one kernel's source.

    Buffers: ``w`` is h [edges, hidden], ``tw`` the matrix [hidden, weights], ``out_w`` the gradient of h; the others
    are those of a convolution. direction: forward, or backward with outputs of ``xyw``, without tangents. accuracy: a
    name of ``PRODUCTS``. layout, index, facts: as in ``Spec``.
    """

    problem: TensorProductProblem
    hidden: int
    direction: Direction
    schedule: RadialSchedule
    accuracy: str
    layout: str
    index: str
    facts: DeviceFacts
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.accuracy not in PRODUCTS:
            raise ScheduleError(f"accuracy is {self.accuracy!r}; expected one of {tuple(PRODUCTS)}")
        if self.dtype != "float32":
            raise ScheduleError(f"dtype is {self.dtype!r}; weights are formed in registers for float32 alone")
        if self.direction.tangents:
            raise ScheduleError(f"{self.direction.text} has tangents; expected a value or first gradients")

    @property
    def is_gradient(self) -> bool:
        """Whether the kernel has gradients, not the value."""
        return "g" not in self.direction.outputs

    @property
    def row_work(self) -> int:
        """The work of an edge, measured in weights."""
        return self.problem.weight_numel

    @property
    def operands(self) -> tuple[str, ...]:
        """Buffers that the kernel reads."""
        return operands_of(self.direction)

    @property
    def steps(self) -> int:
        """Steps of the product over hidden features, padded."""
        return -(-self.hidden // STEP)


# Which problems have a kernel that forms edge weights in registers, and which knobs it may have on which devices.

# Warps that multiply together by ``wgmma``, and architectures that have it.
WARPGROUP, WITH_WGMMA = 4, ("sm_90",)


def refusal(problem: TensorProductProblem, hidden: int) -> str:
    """Why no such kernel exists for a problem and a number of hidden features; empty if one does."""
    if not problem.is_channelwise or problem.shared_weights or not problem.paths:
        return "expected weighted uvu paths with one copy of the second input, and weights of each edge"
    if hidden % 4 or not 4 <= hidden <= MOST_HIDDEN:
        return f"{hidden} hidden features; expected a multiple of 4 up to {MOST_HIDDEN}"
    if any(block.mul % 2 for block in (*problem.in1, *problem.out)):
        return "an odd number of channels; expected even ones"
    return ""


def check_form(spec: RadialSpec) -> None:
    """Raise ScheduleError for knobs of the other kind of kernel: a value's, or gradients'."""
    schedule = spec.schedule
    if spec.is_gradient and schedule.tiles > 1:
        raise ScheduleError(f"{schedule.tiles} tiles; expected 1, because a product of gradients has 16 edges")
    if schedule.tiles > 2 and schedule.products != "wgmma":
        raise ScheduleError(f"{schedule.tiles} tiles; expected at most 2: only products=wgmma has registers left")
    if not spec.is_gradient and schedule.slices > 1:
        raise ScheduleError(
            f"{schedule.slices} slices; expected 1, because a warp keeps sums of a receiver in registers"
        )
    if schedule.ahead == "hidden" and (spec.is_gradient or (schedule.tiles > 1 and schedule.products == "mma")):
        raise ScheduleError(
            "ahead=hidden; expected none: only a value's kernel with one tile, or with wgmma, has registers left"
        )
    if not spec.is_gradient and schedule.coupled:
        raise ScheduleError(f"coupled={schedule.coupled}; expected 0, because a value has no cotangents")
    if schedule.products == "wgmma":
        _check_warpgroups(spec)
    elif schedule.paths_at_once != RadialSchedule.paths_at_once:
        raise ScheduleError(
            f"paths_at_once={schedule.paths_at_once}; expected {RadialSchedule.paths_at_once}: without products=wgmma "
            "it has no effect"
        )


def _check_warpgroups(spec: RadialSpec) -> None:
    """Raise ScheduleError where four warps cannot multiply together."""
    schedule, arch = spec.schedule, spec.facts.arch
    if arch not in WITH_WGMMA:
        raise ScheduleError(
            f"products=wgmma; expected mma, because {arch} has no wgmma: only compute capability 9.0 has"
        )
    if spec.is_gradient and not schedule.coupled:
        raise ScheduleError("products=wgmma; expected mma: only gradients with coupled cotangents, and values, have it")
    if schedule.warps % WARPGROUP:
        raise ScheduleError(f"{schedule.warps} warps; expected a multiple of {WARPGROUP}: so many multiply together")


# The plan of a kernel that forms edge weights in registers; checks every limit.


# Components of a row of coupled cotangents: the columns of a tensor core's product.
COLUMNS = 8
# Edges whose values a warp keeps in shared memory at a time, one a lane; those of most products.
STAGE, TILE = 32, 16
# Channels of a warp: the rows of a tensor core's product.
CHANNELS = 16
# Halves after each row of the matrix in shared memory, so that eight rows lie in different banks.
PADDING = 8
# Elements of the matrix that a thread may hold in registers, before sums need these; of 64 channels all but some.
MOST_HELD = 128
REGISTERS, SPARE = 65536, 48
# The buffer of a value's kernel with marks of rows that several warps add to; see ``whole_rows`` in ``radial.cuh``.
MARKS = "out_y"


@dataclass(frozen=True)
class RadialPlan:
    """How blocks divide a fused radial convolution, and what they have in shared memory.

    product: the plan of the convolution whose path arithmetic the kernel has, with teams of 16 channels.
    """

    spec: RadialSpec
    product: Plan
    zeroed: frozenset[str]
    shared_bytes: int
    owner: str = "receiver"
    partial_y: int = 0

    # ---- paths with coupled cotangents, and where these lie in shared memory -----------------------------------------
    #
    # For a path and a component i of x, ``H[i, j] = sum_k C[i, j, k] g[k]`` is formed once for a receiver's cotangents
    # g. The gradients of x, y and the weights are products of tensor cores with it; see ``coupled.py``.

    def coupled(self, group: Group) -> tuple[int, ...]:
        """Paths of a group whose gradients tensor cores form: from so many terms for each component of x on."""
        least, terms, problem = self.spec.schedule.coupled, path_terms(self.spec.problem), self.spec.problem

        def is_coupled(p: int) -> bool:
            fits = problem.in2[problem.paths[p].in2].dim <= COLUMNS - 1
            return fits and len(terms[p].entries) >= least * terms[p].dim1

        return tuple(p for p in group.paths if least and is_coupled(p))

    def lane_paths(self, group: Group) -> tuple[int, ...]:
        """The other paths, whose gradients lanes compute from edge values."""
        coupled = self.coupled(group)
        return tuple(p for p in group.paths if p not in coupled)

    def lane_out(self, group: Group) -> tuple[int, ...]:
        """Blocks of cotangents of :meth:`lane_paths`."""
        used = {self.spec.problem.paths[p].out for p in self.lane_paths(group)}
        return tuple(b for b in group.out if b in used)

    def coupled_in2(self, group: Group) -> tuple[int, ...]:
        """Blocks of the second input that coupled paths have."""
        return tuple(sorted({self.spec.problem.paths[p].in2 for p in self.coupled(group)}))

    def first_rows(self, group: Group) -> dict[int, int]:
        """The row where coupled cotangents of each path begin, among those of 8 channels; one is before all.

        Paths with the most components of y are last: a load has 8 rows from a row on, or from the one before.
        """
        problem, rows, row = self.spec.problem, {}, 1
        for p in sorted(self.coupled(group), key=lambda p: problem.in2[problem.paths[p].in2].dim):
            rows[p] = row
            row += problem.in1[problem.paths[p].in1].dim * problem.in2[problem.paths[p].in2].dim
        return rows

    def coupled_rows(self, group: Group) -> int:
        """Rows in shared memory of coupled cotangents of 8 channels.

        Five more than a multiple of 8: so high and low parts that one load has lie in different banks.
        """
        problem, ends = self.spec.problem, [0]
        for p, row in self.first_rows(group).items():
            dim1, block = problem.in1[problem.paths[p].in1].dim, problem.in2[problem.paths[p].in2]
            ends += [row + dim1 * block.dim, row + (dim1 - 1) * block.dim - block.offset % 2 + COLUMNS]
        return max(ends) + (5 - max(ends)) % 8 if len(ends) > 1 else 0

    def coupled_reals(self, group: Group) -> int:
        """Elements in shared memory of a slice's coupled cotangents, each two halves or one."""
        return self.coupled_rows(group) * COLUMNS * (2 if PRODUCTS[self.spec.accuracy] > 1 else 1)

    # ---- blocks ----------------------------------------------------------------------------------------------------

    def slices(self, group: Group) -> int:
        """Slices of 16 channels of a group in a block: not more than there are; with coupled cotangents, than fit."""
        most = min(self.spec.schedule.slices, self.product.tiles(group))
        while (
            self.spec.schedule.coupled and most > 1 and self._bytes_with(group, most, self.stage) > self._bytes_of_block
        ):
            most = -(-most // 2)
        return most

    @functools.cached_property
    def stage(self) -> int:
        """Edges that a warp stages at a time: one a lane, or half as many if only these leave room for couplings."""
        groups = self.product.groups
        is_large = any(self._bytes_with(each, 1, STAGE) > self._bytes_of_block for each in groups)
        return STAGE // 2 if self.spec.schedule.coupled and is_large else STAGE

    @property
    def _bytes_of_block(self) -> int:
        facts = self.spec.facts
        return min(facts.shared_per_block, facts.shared_per_unit // self.spec.schedule.min_blocks)

    def bytes_of(self, group: Group) -> int:
        """Bytes of shared memory of a block with a part of a group."""
        return self._bytes_with(group, self.slices(group), self.stage)

    def _bytes_with(self, group: Group, slices: int, stage: int) -> int:
        of_matrix = slices * len(group.paths) * self.path_halves + self.hidden_halves
        return 2 * of_matrix + 4 * self.spec.schedule.warps * self._stream_with(group, slices, stage)

    def parts(self, group: Group) -> int:
        """Blocks that share an edge's channels in a group."""
        return -(-CHANNELS * self.product.tiles(group) // (self.channels * self.slices(group)))

    def slice_halves(self, group: Group) -> int:
        """Halves in shared memory of a block's part of the matrix; without coupled cotangents, of the largest part."""
        groups = (group,) if self.spec.schedule.coupled else self.product.groups
        return max(self.slices(each) * len(each.paths) for each in groups) * self.path_halves

    @property
    def row_halves(self) -> int:
        """Halves in shared memory of a channel's row of the matrix; ``wgmma`` has them in blocks of 8 rows by 8."""
        return self.spec.steps * STEP + (0 if self.by_warpgroups else PADDING)

    @property
    def by_warpgroups(self) -> bool:
        """Whether four warps multiply together."""
        return self.spec.schedule.products == "wgmma"

    @property
    def channels(self) -> int:
        """Channels of a slice of the matrix, 16; of a value whose rows of products are those of four warps, 64."""
        return CHANNELS * (WARPGROUP if self.by_warpgroups and not self.spec.is_gradient else 1)

    def copies(self, group: Group) -> int:
        """How often a value's rows of products have a group's channels, if they are few; each with edges of its own."""
        if self.channels == CHANNELS:
            return 1
        return min(WARPGROUP // min(self.product.tiles(group), WARPGROUP), self.spec.schedule.tiles)

    @property
    def teams(self) -> int:
        """Parts of a block with edges of their own: warps, or four warps with one receiver and 64 channels."""
        return self.spec.schedule.warps * CHANNELS // self.channels

    @property
    def hidden_halves(self) -> int:
        """Halves in shared memory of hidden features, if ``wgmma`` has them: 16 edges of a warp, 32 of a team."""
        if not self.by_warpgroups or "w" not in self.spec.direction.operands:
            return 0
        return self.teams * (TILE if self.spec.is_gradient else self.buffers * STAGE) * self._halves_of_edge

    @property
    def _halves_of_edge(self) -> int:
        return self.spec.steps * STEP * (2 if PRODUCTS[self.spec.accuracy] > 1 else 1)

    @functools.cached_property
    def buffers(self) -> int:
        """Places in shared memory that the staged edges of a team have by turns: two if they fit."""
        if self.channels == CHANNELS:
            return 1
        values = max(self._stream_with(group, self.slices(group), STAGE) for group in self.product.groups)
        of_buffer = self.teams * (2 * STAGE * self._halves_of_edge + 4 * values)
        return 2 if 2 * self.slice_halves(self.product.groups[0]) + 2 * of_buffer <= self._bytes_of_block else 1

    @property
    def path_halves(self) -> int:
        """Halves in shared memory of a path's part of the matrix, high and low."""
        return self.channels * self.row_halves * (2 if PRODUCTS[self.spec.accuracy] > 1 else 1)

    @property
    def stores_rows(self) -> bool:
        """Whether a value's rows are stored, but for those that a warp's share of the edges cuts; else all are sums.

        A block of a row that several groups write has to start from zero, as has one that none writes.
        """
        problem = self.spec.problem
        written = self.product.exclusive_out & {path.out for path in problem.paths}
        return not self.spec.is_gradient and len(written) == len(problem.out)

    @property
    def parts_in_sequence(self) -> bool:
        """Whether all blocks have the same work, some of them of two parts; else blocks have one part each."""
        return self.stores_rows or bool(self.spec.schedule.coupled)

    @property
    def marks(self) -> int:
        """Parts of an edge, each with marks of all receivers that start from zero, in buffer ``MARKS``; 0: no marks.

        Each warp has marks of its own: it waits for no other of its team.
        """
        return self.channels // CHANNELS * sum(map(self.parts, self.product.groups)) if self.stores_rows else 0

    @property
    def loads_matrix_at_once(self) -> bool:
        """Whether a block has all loads of its part of the matrix in flight together."""
        paths = max(len(group.paths) * self.slices(group) for group in self.product.groups)
        return (not self.spec.is_gradient or bool(self.spec.schedule.coupled)) and paths <= self.paths_held

    @property
    def paths_held(self) -> int:
        """Paths whose part of the matrix the threads of a block can hold in registers."""
        threads = 32 * self.spec.schedule.warps
        pairs = -(-self.spec.steps * STEP * self.channels // (2 * threads))
        most = MOST_HELD if self.channels == CHANNELS else min(REGISTERS // threads, 255) - SPARE
        return most // (2 * pairs)

    def stream_reals(self, group: Group) -> int:
        """Elements in shared memory of a warp: the values of its staged edges, and its receiver's cotangents."""
        return self.buffers * self._stream_with(group, self.slices(group), self.stage)

    def _stream_with(self, group: Group, slices: int, stage: int) -> int:
        of_slice = CHANNELS * self.shared_components(group) + self.coupled_reals(group)
        of_edges = stage * (self.value_stride(group) + self._attributes_of(group))
        return slices * of_slice + of_edges + self.walk_reals(stage)

    def _attributes_of(self, group: Group) -> int:
        """Elements in shared memory of an edge's attributes: a block of them takes two rows of halves."""
        return COLUMNS * len(self.coupled_in2(group))

    def attribute_reals(self, group: Group) -> int:
        """Elements in shared memory of the attributes of a warp's staged edges, for coupled paths."""
        return self.stage * self._attributes_of(group)

    def walk_reals(self, stage: int) -> int:
        """Elements in shared memory of what a warp knows of its steps: ``Walk`` of ``warpgroup.cuh``."""
        return 12 + 2 * stage if self.by_warpgroups and self.spec.is_gradient else 0

    def value_reals(self, group: Group) -> int:
        """Elements in shared memory of the values of a warp's staged edges."""
        return self.stage * self.value_stride(group)

    def value_stride(self, group: Group) -> int:
        """Elements of one edge's values: those of paths that lanes multiply."""
        if not self.spec.is_gradient:
            return padded_stride(_normalized_values(self.spec.problem, group.paths), self.spec.dtype)
        paths = self.lane_paths(group)
        return stage_stride(self.product, paths) if paths else 0

    def shared_components(self, group: Group) -> int:
        """Components of a receiver's cotangents in shared memory."""
        return sum(self.spec.problem.out[b].dim for b in self.lane_out(group)) if self.spec.is_gradient else 0


@functools.lru_cache(maxsize=4096)
def _normalized_values(problem: TensorProductProblem, paths: tuple[int, ...]) -> int:
    """Edge values that a value's kernel stores for some paths."""
    terms = path_terms(problem)
    return len(normalized_slots([terms[p] for p in paths])[0])


def radial_plan(spec: RadialSpec) -> RadialPlan:
    """The plan of a spec. Raises UnsupportedError for problems of no such kernel, ScheduleError with a broken limit."""
    if why := refusal(spec.problem, spec.hidden):
        raise UnsupportedError(f"weights cannot be formed in registers: {why}")
    schedule, facts = spec.schedule, spec.facts
    if facts.backend != "cuda" or facts.is_hip:
        raise UnsupportedError(
            f"weights are formed in registers by NVIDIA's tensor cores, not on {facts.name}; take an NVIDIA GPU, or "
            'have them formed in memory for some edges at a time: accelerate(model, memory="low"), or '
            "autotune.RadialTensorProductConv"
        )
    inner = CudaSchedule(
        path_groups=schedule.path_groups,
        edges_per_warp=4,
        channels_per_thread=2,
        edge_operand="basis",
        stage_edges=TILE // 2,
        block_size=32,
        min_blocks=1,
    )
    check_form(spec)
    product = product_plan(
        Spec(spec.problem, spec.direction, inner, "conv", spec.dtype, spec.layout, spec.index, facts)
    )
    assert isinstance(product, Plan)
    plan = RadialPlan(spec, product, frozenset(), 0)
    zeroed = frozenset() if plan.stores_rows else frozenset(f"out_{slot}" for slot in spec.direction.outputs)
    if schedule.coupled:
        shared = max(map(plan.bytes_of, product.groups))
    else:
        values = plan.teams * max(map(plan.stream_reals, product.groups))
        shared = 2 * (plan.slice_halves(product.groups[0]) + plan.hidden_halves) + 4 * values
    facts.check_threads(32 * schedule.warps, schedule.min_blocks)
    if shared > facts.shared_per_block or shared * schedule.min_blocks > facts.shared_per_unit:
        raise ScheduleError(
            f"{schedule.min_blocks} blocks of {shared} bytes of shared memory; there are {facts.shared_per_block} a "
            f"block and {facts.shared_per_unit} a multiprocessor: use more path_groups or fewer warps"
        )
    if (parts := sum(map(plan.parts, product.groups))) > schedule.min_blocks * facts.units:
        raise ScheduleError(f"{parts} parts of an edge for {schedule.min_blocks * facts.units} blocks")
    return dataclasses.replace(plan, zeroed=zeroed, shared_bytes=shared)


# Chooses legal schedules for untuned radial convolutions, by simple rules.
#
# A better default does not need a new generator version: what a kernel computes does not depend on it.

# Registers of a lane for what stays during a step of edges, by tiles; with more, much would spill.
_MOST_KEPT = {1: 150, 2: 210}
# Registers of a lane for a node's sums with products of four warps, by tiles of 8 edges: of one group, and with four
# tiles of each of several. MACE large took 0.778 ms with 62 in three groups and 0.826 with 80 in two.
_MOST_SUMS, _MOST_OF_SEVERAL = {2: 150, 4: 84}, 78
# Up to so many hidden features it was found that a group more pays.
MEASURED_HIDDEN = 64
# Components of x times paths of a group with coupled cotangents; with more, much would spill. On an H200 MACE large
# took 1.54 ms with 40 in two groups and 2.33 with 153 in one, SevenNet-l3i5 1.65 with 49 in six, 2.41 with 70 in four.
_MOST_COUPLED = 50


def _kept(plan: RadialPlan, group: Group) -> int:
    """Registers of a lane for a node's sums, and for its edges' features, a path's weighted ones, and hidden ones."""
    spec = plan.spec
    dims = [spec.problem.in1[b].dim for b in group.in1]
    far = 2 * (sum(dims) + max(dims))
    halves = 4 * spec.steps * (2 if PRODUCTS[spec.accuracy] > 1 else 1)
    return 2 * sum(spec.problem.out[b].dim for b in group.out) + spec.schedule.tiles * (2 * far + halves)


def default_radial_schedule(spec: RadialSpec) -> RadialSpec:
    """The spec with the default schedule. Raises ScheduleError if none fits.

    By times on an H200. Of a value two tiles, where sums stay in registers, else 12 warps that load hidden features
    ahead. Of gradients coupled cotangents, unless they need more than twice as many path groups as others. Products of
    four warps, where the device has them: of gradients if they leave as many slices, of a value if they need no more
    path groups, or in class ``ieee`` one more than several. A value of MACE medium took 0.370 ms for 0.418, gradients
    0.650 for 0.761, those of large 1.378 for 1.555; in class ``tf32`` 0.272 for 0.290, 0.451 for 0.485 and 0.988 for
    1.053.
    """
    is_exact = PRODUCTS[spec.accuracy] > 1
    if not spec.is_gradient:
        two = RadialSchedule(tiles=2, edge_values="four" if is_exact else "kept")
        of_warps = _fewest_groups(spec, (two, RadialSchedule(warps=12, ahead="hidden"), RadialSchedule()))
        return _value_by_warpgroups(of_warps)
    plain = RadialSchedule(order="in2", edge_values="reloaded")
    by_lanes = _fewest_groups(spec, tuple(dataclasses.replace(plain, slices=count) for count in (4, 2, 1)))
    try:
        coupled = _fewest_groups(spec, (RadialSchedule(order="in2", slices=4, coupled=4 if is_exact else 2),))
    except ScheduleError:
        return by_lanes
    if coupled.schedule.path_groups > 2 * by_lanes.schedule.path_groups:
        return by_lanes
    return _gradients_by_warpgroups(coupled)


def _value_by_warpgroups(spec: RadialSpec) -> RadialSpec:
    """The spec of a value with products of four warps; as it is where those are not legal, or need too many groups.

    Class ``tf32`` has registers for more sums with two tiles: MACE large took 0.585 ms in one group, 0.615 by warps.
    """
    is_exact = PRODUCTS[spec.accuracy] > 1
    four = RadialSchedule(tiles=4, ahead="hidden", products="wgmma", paths_at_once=1)
    two = () if is_exact else (RadialSchedule(tiles=2, products="wgmma", paths_at_once=1),)
    try:
        chosen = _fewest_groups(spec, (four, *two))
    except ScheduleError:
        return spec
    before, groups = spec.schedule.path_groups, chosen.schedule.path_groups
    if groups > before + (is_exact and before > 1 and spec.hidden <= MEASURED_HIDDEN):
        return spec
    if groups == 1 or not is_exact:
        return chosen
    return dataclasses.replace(spec, schedule=dataclasses.replace(chosen.schedule, ahead="none", paths_at_once=2))


def _gradients_by_warpgroups(spec: RadialSpec) -> RadialSpec:
    """The spec of gradients with products of four warps; as it is where those are not legal, or leave fewer slices."""
    schedule = dataclasses.replace(spec.schedule, products="wgmma", paths_at_once=10)
    chosen = dataclasses.replace(spec, schedule=schedule)
    try:
        before, after = radial_plan(spec), radial_plan(chosen)
    except ScheduleError:
        return spec
    pairs = zip(before.product.groups, after.product.groups, strict=True)
    return chosen if all(before.slices(one) <= after.slices(other) for one, other in pairs) else spec


def _fewest_groups(spec: RadialSpec, forms: tuple[RadialSchedule, ...]) -> RadialSpec:
    """The spec with the fewest path groups that fit, in the first form that does. Raises ScheduleError if none does.

    Of a value, a lane's sums must stay in registers; on an H200 every further group cost 10 to 20% (edges are loaded
    again). Gradients take several slices: fewer sums are added in memory.
    """
    last: RadialSpec | None = None
    for count in range(1, len(spec.problem.paths) + 1):
        for form in forms:
            chosen = dataclasses.replace(spec, schedule=dataclasses.replace(form, path_groups=count))
            try:
                plan = radial_plan(chosen)
            except ScheduleError:
                continue
            if all(_has_registers(plan, group) for group in plan.product.groups):
                return chosen
            last = chosen
    if last is None:
        raise ScheduleError(f"no schedule fits {spec.facts.name}: {spec.problem.key}, {spec.hidden} hidden features")
    return last


def _has_registers(plan: RadialPlan, group: Group) -> bool:
    spec = plan.spec
    if not spec.is_gradient and spec.schedule.products == "wgmma":
        is_one = spec.schedule.path_groups == 1 or spec.schedule.tiles < 4
        most = _MOST_SUMS[spec.schedule.tiles] if is_one else _MOST_OF_SEVERAL
        return 2 * sum(spec.problem.out[b].dim for b in group.out) <= most
    if not spec.is_gradient:
        return _kept(plan, group) <= _MOST_KEPT[spec.schedule.tiles]
    components = sum(spec.problem.in1[block].dim for block in group.in1)
    return not spec.schedule.coupled or components * len(group.paths) <= _MOST_COUPLED
