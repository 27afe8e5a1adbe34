"""The plan of a kernel that forms edge weights in registers; checks every limit."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.plan.channelwise import Plan, padded_stride, staged_stride
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial.coupled import COLUMNS, CoupledPaths
from kernelgen.plan.tensor_product import product_plan
from kernelgen.problem.radial_convolution import PRODUCTS
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.schedule.radial import STEP, RadialSpec
from kernelgen.schedule.radial_knobs import WARPGROUP, check_form, refusal
from kernelgen.schedule.tensor_product import CudaSchedule
from kernelgen.terms.clebsch_gordan import normalized_slots, path_terms

# Edges whose values a warp keeps in shared memory at a time, one a lane; those of most products.
STAGE, TILE = 32, 16
# Channels of a warp: the rows of a tensor core's product.
CHANNELS = 16
# Halves after each row of the matrix in shared memory, so that eight rows lie in different banks.
PADDING = 8
# Elements of the matrix that a thread may hold in registers, before sums need these; of 64 channels all but some.
MOST_HELD = 128
REGISTERS, SPARE = 65536, 48
# The buffer of a value's kernel with marks of rows that several warps add to; see ``whole_rows.cuh``.
MARKS = "out_y"


@dataclass(frozen=True)
class RadialPlan(CoupledPaths):
    """How blocks divide a fused radial convolution, and what they have in shared memory."""

    zeroed: frozenset[str]
    shared_bytes: int
    owner: str = "receiver"
    partial_y: int = 0

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
        return staged_stride(self.product, paths) if paths else 0

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
            'have them formed in memory for some edges at a time: accelerate(model, edge_weights="streamed"), or '
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


PLANNERS = {RadialSpec: radial_plan}
