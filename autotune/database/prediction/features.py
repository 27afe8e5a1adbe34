"""What the model of time knows of a kernel: numbers of its schedule, direction and graph, and of its plan's work.

Sizes are logarithms to base 2. A problem's own sizes (paths, channels, rows) are none of them: a tree that asks for
those learns ten problems by heart. Numbers of the plan (``work``) say what they mean for a schedule.
"""

from __future__ import annotations

from autotune.database.prediction.work import NAMES as WORK
from autotune.database.prediction.work import log2, work_of
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.tensor_product import bytes_of_product
from kernelgen.kernels.product.channelwise import Plan
from kernelgen.kernels.product.plan import OwnersPlan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec

# Values of each named knob after the first, which all the others' zeros say.
NAMED = {
    "accumulate": ("atomics", "owners"),
    "order": ("sender",),
    "edge_operand": ("shared", "basis"),
    "prefetch": ("reload", "copy", "ring2", "ring4"),
    "ahead": ("weights", "rows", "all", "along"),
    "finish": ("unrolled",),
    "zeros": ("inside",),
    "writes": ("rows",),
}
COUNTED = (
    *("edges_per_chunk", "edges_per_warp", "channels_per_thread", "warps_per_edge", "teams_per_node"),
    *("stage_edges", "block_size"),
)
NAMES = (
    *(f"{knob}={value}" for knob, values in NAMED.items() for value in values),
    *COUNTED,
    *("path_groups", "groups_per_block", "paths_per_group", "stream", "min_blocks"),
    *("units", "teams_per_warp_slot", "edges_per_team", "teams_per_block", "fill_fewest", "fill_most"),
    *("edges", "degree", "convolution", "float64", "mul_ir", "deterministic"),
    *("live_x", "live_y", "live_w", "live_g", "tangents", "value_too", "bytes_per_edge"),
    *WORK,
)
WARP_SLOTS = 64


class Features:
    """The features of one kernel's schedules, in the order of :data:`NAMES`; what they share is computed once."""

    def __init__(self, spec: Spec, graph_class: GraphClass) -> None:
        problem, direction, conv = spec.problem, spec.direction, spec.operation == "conv"
        self._conv, self._paths, self._blocks = conv, len(problem.paths), len(problem.in1)
        self._muls = [path.mul for path in problem.paths]
        self._edges = 2.0**graph_class.log2_edges
        degree = 2.0**graph_class.log2_degree if conv else 1.0
        self._nodes = max(1.0, self._edges / degree)
        self._slots = spec.facts.units * WARP_SLOTS
        kernel = (problem, spec.operation, direction.name, spec.dtype)
        moved = bytes_of_product(*kernel, int(self._edges), int(self._nodes), problem.dim_in2)
        flags = (conv, spec.dtype == "float64", spec.layout == "mul_ir", spec.deterministic)
        self._shared = (
            *(log2(self._edges), log2(degree)),
            *map(float, flags),
            *(float(slot in direction.live_outputs) for slot in "xywg"),
            *(float(len(direction.tangents)), float("g" in direction.tangents), log2(moved / self._edges)),
        )

    def of(self, plan: Plan | OwnersPlan) -> list[float]:
        """The features of one schedule, by its plan."""
        schedule = plan.spec.schedule
        assert isinstance(schedule, CudaSchedule)
        groups, tile = schedule.path_groups, schedule.lanes * schedule.channels_per_thread
        owned = schedule.accumulate == "registers" and self._conv
        runs = self._nodes * schedule.teams_per_node if owned else self._edges / schedule.edges_per_chunk
        units = groups / self._paths * sum(-(-mul // tile) for mul in self._muls)
        values = (
            *(float(getattr(schedule, knob) == value) for knob, values in NAMED.items() for value in values),
            *(log2(getattr(schedule, knob)) for knob in COUNTED),
            *(float(groups), groups / self._blocks, self._paths / groups),
            *(float(schedule.stream), float(schedule.min_blocks)),
            *(log2(units), log2(runs * units / schedule.edges_per_warp / self._slots)),
            *(log2(self._edges / max(1.0, runs)), log2(schedule.block_size // schedule.lanes)),
            *(log2(min(self._muls) / tile), log2(max(self._muls) / tile)),
        )
        # Rounded, so that thresholds between two values separate them on every machine.
        return [round(value, 4) for value in (*values, *self._shared, *work_of(plan, self._edges, self._nodes))]
