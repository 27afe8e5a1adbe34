"""The plan of a kernel that forms edge weights in registers; checks every limit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.plan.channelwise import Plan, stage_stride
from kernelgen.plan.path_groups import Group
from kernelgen.plan.tensor_product import product_plan
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.schedule.radial import MOST_HIDDEN, PRODUCTS, STEP, RadialSchedule, RadialSpec
from kernelgen.schedule.tensor_product import CudaSchedule

# Edges whose values a warp keeps in shared memory at a time, one a lane; those of one product.
STAGE, TILE_EDGES = 32, 8
# Channels of a warp: the rows of a tensor core's product.
CHANNELS = 16
# Halves after each row of the matrix in shared memory, so that eight rows lie in different banks.
PADDING = 8


@dataclass(frozen=True)
class RadialPlan:
    """product: the plan of the convolution whose path arithmetic this kernel has, with teams of 16 channels."""

    spec: RadialSpec
    product: Plan
    zeroed: frozenset[str]
    shared_bytes: int
    owner: str = "receiver"
    partial_y: int = 0

    def slices(self, group: Group) -> int:
        """Slices of 16 channels of a group in a block: a divisor of the schedule's, not more than there are."""
        count = self.spec.schedule.slices
        while count > max(1, self.product.tiles(group)):
            count //= 2
        return count

    def parts(self, group: Group) -> int:
        """Blocks that share a receiver's edges in a group."""
        return -(-self.product.tiles(group) // self.slices(group))

    @property
    def slice_halves(self) -> int:
        """Halves in shared memory of a block's part of the matrix."""
        return max(self.slices(group) * len(group.paths) for group in self.product.groups) * self.path_halves

    @property
    def joint_row(self) -> int:
        """Elements in shared memory of a warp's gradients of an edge; of four edges, pairs lie in different banks."""
        outputs = self.spec.direction.outputs
        row = STEP * self.spec.steps * ("w" in outputs) + self.spec.problem.dim_in2 * ("y" in outputs)
        return row + (4 - row) % 16

    @property
    def joint_reals(self) -> int:
        """Elements in shared memory of a stream's gradients of edges, twice."""
        if self.spec.schedule.slices == 1 or not {"w", "y"} & set(self.spec.direction.outputs):
            return 0
        return 2 * self.spec.schedule.slices * TILE_EDGES * self.spec.schedule.tiles * self.joint_row

    @property
    def row_halves(self) -> int:
        """Halves in shared memory of a channel's row of the matrix."""
        return self.spec.steps * STEP + PADDING

    @property
    def path_halves(self) -> int:
        """Halves in shared memory of a path's part of the matrix, high and low."""
        return CHANNELS * self.row_halves * (2 if PRODUCTS[self.spec.accuracy] > 1 else 1)

    @property
    def low_rows(self) -> int:
        """Words in shared memory from the high parts of staged hidden features to the low ones, 0 without those."""
        return STAGE * self.row_halves // 2 if PRODUCTS[self.spec.accuracy] > 1 else 0

    def value_reals(self, group: Group) -> int:
        """Elements in shared memory of the edge values of a stream."""
        return STAGE * stage_stride(self.product, group)

    def stage_reals(self, group: Group) -> int:
        """The same with hidden features and their scales, where several warps share them."""
        if self.slices(group) == 1 or "w" not in self.spec.direction.operands:
            return self.value_reals(group)
        return self.value_reals(group) + STAGE * self.row_halves // 2 + self.low_rows + STAGE

    def stream_reals(self, group: Group) -> int:
        """Elements in shared memory of a stream."""
        return self.stage_reals(group) + (self.joint_reals if self.slices(group) > 1 else 0)


def refusal(problem: TensorProductProblem, hidden: int) -> str:
    """Why no such kernel exists for a problem and a number of hidden features; empty if one does."""
    if not problem.is_channelwise or problem.shared_weights or not problem.paths:
        return "expected weighted uvu paths with one copy of the second input, and weights of each edge"
    if hidden % 4 or not 4 <= hidden <= MOST_HIDDEN:
        return f"{hidden} hidden features; expected a multiple of 4 up to {MOST_HIDDEN}"
    if any(block.mul % 2 for block in (*problem.in1, *problem.out)):
        return "an odd number of channels; expected even ones"
    return ""


def radial_plan(spec: RadialSpec) -> RadialPlan:
    """The plan of a spec. Raises UnsupportedError for problems of no such kernel, ScheduleError with a broken limit."""
    if why := refusal(spec.problem, spec.hidden):
        raise UnsupportedError(f"weights cannot be formed in registers: {why}")
    schedule, facts = spec.schedule, spec.facts
    if facts.backend != "cuda" or facts.is_hip:
        raise UnsupportedError(f"weights are formed in registers by NVIDIA's tensor cores, not on {facts.name}")
    inner = CudaSchedule(
        path_groups=schedule.path_groups,
        edges_per_warp=4,
        channels_per_thread=2,
        edge_operand="basis",
        stage_edges=TILE_EDGES,
        block_size=32,
        min_blocks=1,
    )
    product = product_plan(
        Spec(spec.problem, spec.direction, inner, "conv", spec.dtype, spec.layout, spec.index, facts)
    )
    assert isinstance(product, Plan)
    added = {f"out_{slot}" for slot in "yw" if slot in spec.direction.outputs}
    plan = RadialPlan(spec, product, product.zeroed | added, 0)
    if schedule.warps % schedule.slices:
        raise ScheduleError(f"{schedule.warps} warps cannot share {schedule.slices} slices equally")
    streams = max(schedule.warps // plan.slices(group) * plan.stream_reals(group) for group in product.groups)
    shared = 2 * plan.slice_halves + 4 * streams
    facts.check_threads(32 * schedule.warps, schedule.min_blocks)
    if shared > facts.shared_per_block or shared * schedule.min_blocks > facts.shared_per_unit:
        raise ScheduleError(
            f"{schedule.min_blocks} blocks of {shared} bytes of shared memory; there are {facts.shared_per_block} a "
            f"block and {facts.shared_per_unit} a multiprocessor: use more path_groups or fewer warps"
        )
    if (parts := sum(map(plan.parts, product.groups))) > schedule.min_blocks * facts.units:
        raise ScheduleError(f"{parts} parts of an edge for {schedule.min_blocks * facts.units} blocks")
    return dataclasses.replace(plan, shared_bytes=shared)


# Registers of a lane for the sums and cotangents of a node, and for all else of an edge; more would spill.
_OF_NODE = {"forward": 80, "backward": 48}


def default_radial_schedule(spec: RadialSpec) -> RadialSpec:
    """The spec with the default schedule: the fewest path groups whose sums stay in registers.

    Gradients of edges are summed over as many slices as fit into shared memory, because their sums in memory are most
    of a kernel's traffic. Raises ScheduleError if nothing fits.
    """
    is_forward = spec.direction.name == "forward"
    most = _OF_NODE["forward" if is_forward else "backward"]
    for count in range(1, len(spec.problem.paths) + 1):
        for slices in (1,) if is_forward else (8, 4, 2, 1):
            schedule = RadialSchedule(path_groups=count, slices=slices)
            chosen = dataclasses.replace(spec, schedule=schedule)
            try:
                plan = radial_plan(chosen)
            except ScheduleError:
                continue
            widest = max(sum(spec.problem.out[b].dim for b in group.out) for group in plan.product.groups)
            if 2 * widest <= most or count == len(spec.problem.paths):
                return chosen
    raise ScheduleError(f"no schedule fits {spec.facts.name}: {spec.problem.key} with {spec.hidden} hidden features")


PLANNERS = {RadialSpec: radial_plan}
