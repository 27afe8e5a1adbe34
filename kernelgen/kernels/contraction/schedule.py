"""Schedules of kernels of symmetric contractions, for CUDA and for the host, and their spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.arithmetic.contraction import ContractionDirection
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs, read_schedule
from kernelgen.kernels.spec import BYTES
from kernelgen.problem.contraction import ContractionProblem


@dataclass(frozen=True)
class ContractionSchedule(Knobs):
    """Base of the schedules of both backends.

    nodes_per_task: consecutive nodes that a worker takes, one after the other. Gradients of the weights are summed over
    them. 0, on a GPU: as few as let all tasks run at the same time.
    order: nodes as they are ``given``, or by ``element``, so that neighbours share weights. Rows of gradients of the
    weights need the latter.
    gradients: of the features and of all else by one walk over a part's values (``together``) or by two (``apart``).
    """

    nodes_per_task: int = 1
    order: str = "given"
    gradients: str = "together"


@dataclass(frozen=True)
class ContractionCudaSchedule(ContractionSchedule):
    """Knobs of a CUDA kernel: a thread has one channel of a task's nodes.

    block_size: threads of a block. min_blocks: registers are limited so that this many blocks fit on a multiprocessor
    (0: no limit). pace: warps of a block run ``free``, or wait for each other after each of the ``parts`` of the
    statements: these are thousands in a row, and so one fetch of instructions serves all warps. sums: where gradients
    of the weights are summed over a task's nodes: in ``registers`` or in ``memory``. adds: how a task's sums reach the
    gradient: by ``rows`` of their own, which are summed afterwards in a fixed order, or by ``atomic`` additions, which
    take no memory and have no fixed order (with sums in memory after each node). zeros: what is added to is zeroed
    ``apart``, by a launch before, or ``inside``, by the kernel's own first blocks.
    """

    block_size: int = 128
    min_blocks: int = 0
    pace: str = "free"
    sums: str = "registers"
    adds: str = "rows"
    zeros: str = "apart"

    backend: ClassVar[str] = "cuda"
    choices: ClassVar[dict[str, tuple]] = {
        "nodes_per_task": (0, 1, 2, 4, 8, 16, 32, 64),
        "order": ("given", "element"),
        "gradients": ("together", "apart"),
        "block_size": (32, 64, 128, 256, 512),
        "min_blocks": (0, 1, 2, 3, 4, 5, 6, 8, 12, 16),
        "pace": ("free", "parts"),
        "sums": ("registers", "memory"),
        "adds": ("rows", "atomic"),
        "zeros": ("apart", "inside"),
    }
    younger: ClassVar[tuple[str, ...]] = ("adds", "zeros")

    @property
    def canonical(self) -> ContractionCudaSchedule:
        # A block of one warp waits for nothing.
        return dataclasses.replace(self, pace="free") if self.block_size == 32 else self


@dataclass(frozen=True)
class ContractionHostSchedule(ContractionSchedule):
    """Knobs of a host C++ kernel.

    channel_block: channels computed together with SIMD instructions.
    threads: most OpenMP threads, never more than torch's number; 0: by the amount of work, at most torch's number.
    """

    channel_block: int = 16
    threads: int = 0

    backend: ClassVar[str] = "cpu"
    choices: ClassVar[dict[str, tuple]] = {
        "nodes_per_task": (1, 2, 4, 8, 16, 32, 64),
        "order": ("given", "element"),
        "gradients": ("together", "apart"),
        "channel_block": (1, 2, 4, 8, 16, 32, 64),
        "threads": tuple(range(0, 257)),
    }


CONTRACTION_SCHEDULES: dict[str, type[ContractionSchedule]] = {
    "cuda": ContractionCudaSchedule,
    "cpu": ContractionHostSchedule,
}
LAYOUTS = ("mul_ir", "ir_mul")


def in_fixed_order(schedule: ContractionSchedule) -> ContractionSchedule:
    """The schedule, with no sum that depends on the order in which tasks run."""
    if isinstance(schedule, ContractionCudaSchedule) and schedule.adds == "atomic":
        return dataclasses.replace(schedule, nodes_per_task=0, order="element", adds="rows", zeros="apart")
    return schedule


def contraction_schedule_from_dict(data: Mapping[str, Any]) -> ContractionSchedule:
    """The schedule written by ``to_dict``; ScheduleError for an unknown backend, knob or value."""
    return read_schedule(data, CONTRACTION_SCHEDULES)


@dataclass(frozen=True)
class ContractionSpec:
    """Everything that determines one kernel's source.

    layout: ``ir_mul``, features [nodes, dim_in, channels] and outputs [nodes, dim_out, channels]; or ``mul_ir``, as
    MACE has them: features [nodes, channels, dim_in], and outputs in e3nn's order, [channels, 2l+1] for each irrep.
    index: dtype of the nodes' elements. facts: the target device.
    """

    problem: ContractionProblem
    direction: ContractionDirection
    schedule: ContractionSchedule
    dtype: str
    layout: str
    index: str
    facts: DeviceFacts
    # What other kernels are stored and looked up by too.
    operation: ClassVar[str] = "contraction"
    deterministic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", tuple(BYTES)), ("layout", LAYOUTS), ("index", ("int32", "int64"))):
            if getattr(self, name) not in allowed:
                raise ScheduleError(f"{name} is {getattr(self, name)!r}; expected one of {allowed}")
        if not isinstance(self.schedule, ContractionSchedule):
            raise ScheduleError(f"the schedule is a {type(self.schedule).__name__}; expected a ContractionSchedule")
        if self.schedule.backend != self.facts.backend:
            raise ScheduleError(f"a {self.schedule.backend or 'plain'} schedule cannot run on {self.facts.name}")

    @property
    def row_work(self) -> int:
        """The work of a node, measured in elements of its features and output."""
        return 8 * self.problem.channels * (self.problem.dim_in + self.problem.dim_out)
