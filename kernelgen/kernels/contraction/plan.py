"""The plan of a kernel of a symmetric contraction, and its default schedule.

The kernel takes the arguments of all kernels (``kernelgen.kernels.spec.BUFFERS``): features are ``x``, weights
``w`` [elements, weights, channels], cotangents of the output ``g``; ``tx``, ``tw`` are tangents, and gradients are
``out_x``, ``out_w``, ``out_g`` (the output itself too). ``sender`` has the element of each node, ``perm`` the nodes in
the order of their elements. ``num_edges`` is the number of nodes, and ``num_in`` that of a task (``task_nodes``).

Tasks of consecutive nodes sum gradients of the weights in rows of their own, [tasks + elements, weights, channels]:
task t has those of element e in row t + e. No two pairs (t, e) share a row, because neither decreases along the nodes
in the order of their elements. Other rows are not written by a GPU. Rows are summed by element afterwards, in a fixed
order, so no sum depends on the order of work. With ``adds=atomic`` there are no rows: tasks add to the gradient itself,
[elements, weights, channels], which is zero before, or which the kernel zeroes (``zeros=inside``): ``num_out`` is the
number of elements.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kernelgen.arithmetic.contraction import ContractionDirection, Part, contraction_parts
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.contraction.schedule import (
    ContractionCudaSchedule,
    ContractionHostSchedule,
    ContractionSchedule,
    ContractionSpec,
)
from kernelgen.kernels.knobs import power_of_two_at_most
from kernelgen.kernels.spec import BYTES, ORDER_OF_BLOCKS
from kernelgen.problem.contraction import ContractionProblem

# More sums of weights' gradients than this a thread spill with what the statements hold (MACE's large has 196 bytes in
# float32, its medium in float64 232). Where they fit, sums in memory took 1.3 and 1.6 times as long on an H200.
MOST_SUMS_BYTES = {"backward": 256, "double_backward": 128}


@dataclass(frozen=True)
class ContractionPlan:
    """The statements for one node and channel, and the number of weights of an element and channel."""

    spec: ContractionSpec
    parts: tuple[Part, ...]
    weights: int
    # Fields of a product's plan.
    zeroed: frozenset[str] = frozenset()
    owner: str = ""
    partial_y: int = 0
    shared_bytes: int = 0

    @property
    def schedule(self) -> ContractionSchedule:
        return self.spec.schedule

    @property
    def sums_weights(self) -> bool:
        """Whether gradients of the weights are summed over nodes."""
        return self.spec.direction.name != "forward" and "w" in self.spec.direction.outputs

    @property
    def writes_zeros(self) -> bool:
        """Whether the kernel zeroes the gradient of the weights itself."""
        return isinstance(self.schedule, ContractionCudaSchedule) and self.schedule.zeros == "inside"

    @property
    def has_rows(self) -> bool:
        """Whether each task has rows of its own for these sums."""
        return self.sums_weights and getattr(self.schedule, "adds", "rows") == "rows"


def contraction_plan(spec: ContractionSpec) -> ContractionPlan:
    """The plan of a spec; ScheduleError with the broken limit.

    A kernel that adds to nothing gets ``zeros="apart"`` in the plan's own schedule.
    """
    schedule, facts = spec.schedule, spec.facts
    parts = contraction_parts(spec.problem, spec.direction, schedule.gradients == "apart")
    plan = ContractionPlan(spec, parts, len(polynomials(spec.problem)))
    if plan.has_rows and schedule.order != "element":
        raise ScheduleError("order='given' is not for rows of gradients of the weights; take order='element'")
    if isinstance(schedule, ContractionHostSchedule):
        facts.check_cores(schedule.threads)
    else:
        assert isinstance(schedule, ContractionCudaSchedule)
        facts.check_threads(schedule.block_size, schedule.min_blocks)
        plan = _check_zeros(plan, schedule)
    if plan.sums_weights and (facts.backend == "cpu" or not plan.has_rows):
        return dataclasses.replace(plan, zeroed=frozenset({"w"}))
    return plan


def _check_zeros(plan: ContractionPlan, schedule: ContractionCudaSchedule) -> ContractionPlan:
    if schedule.zeros == "apart":
        return plan
    if plan.spec.facts.is_hip:
        raise ScheduleError(f"zeros={schedule.zeros!r} {ORDER_OF_BLOCKS}")
    if plan.sums_weights and not plan.has_rows:
        return plan
    apart = dataclasses.replace(schedule, zeros="apart")
    return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, schedule=apart))


def task_nodes(plan: ContractionPlan, nodes: int, registers: int) -> int:
    """Nodes of a task. registers: of a thread of the compiled kernel, 0 if unknown.

    Without a number in the schedule: as few as let all tasks run at the same time, for each task of a GPU adds up a row
    of sums, and the last of several waves of blocks leaves multiprocessors idle.
    """
    schedule, facts = plan.schedule, plan.spec.facts
    if schedule.nodes_per_task:
        return schedule.nodes_per_task
    assert isinstance(schedule, ContractionCudaSchedule)
    # Registers are allocated to threads by eights.
    fit = min(facts.max_threads_per_unit, facts.registers_per_unit // (8 * -(-max(1, registers) // 8)))
    threads = facts.units * (fit // schedule.block_size * schedule.block_size)
    tasks = max(1, threads // plan.spec.problem.channels)
    return max(1, -(-nodes // tasks))


def default_contraction_schedule(
    problem: ContractionProblem, direction: ContractionDirection, dtype: str, facts: DeviceFacts
) -> ContractionSchedule:
    """A legal schedule by simple rules, without a search."""
    sums = direction.name != "forward" and "w" in direction.outputs
    if facts.backend == "cpu":
        lanes = facts.vector_bytes // BYTES[dtype]
        block = min(lanes, power_of_two_at_most(problem.channels))
        return ContractionHostSchedule(8 if sums else 1, "element" if sums else "given", channel_block=block)
    if not sums:
        return ContractionCudaSchedule()
    zeros = "apart" if facts.is_hip else "inside"
    # A double takes two registers.
    if len(polynomials(problem)) * BYTES[dtype] > MOST_SUMS_BYTES[direction.name]:
        # Sums in memory are added after each node, so longer tasks and neighbours of one element save nothing.
        return ContractionCudaSchedule(sums="memory", adds="atomic", zeros=zeros)
    # 0: tasks fill the device once.
    return ContractionCudaSchedule(0, "element", adds="atomic", zeros=zeros)
