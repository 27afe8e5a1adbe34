"""The families of kernels (products, harmonics, products of harmonics): all in which they differ for the tuner.

The name of an operation (``conv``, ``plain``, ``harmonics``, ``vectors``) enters :func:`family_of`, a :class:`Family`
leaves. The first half of its methods chooses and stores schedules, and a model's lookup needs no more; the second half
runs kernels and loads what that takes when it is called.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.errors import ConfigError
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.plan.defaults import default_schedule
from kernelgen.plan.planner import make_plan
from kernelgen.problem.edge_vectors import VectorProblem
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.schedule.knobs import Knobs
from kernelgen.schedule.tensor_product import SCHEDULES, Schedule, schedule_from_dict
from kernelgen.terms.directions import DIRECTIONS, Direction, fixed_order_parts

if TYPE_CHECKING:
    from torch import Tensor

    from autotune.baselines.passes import Call
    from autotune.space import Space
    from autotune.verify import Reference
    from autotune.workload import Tensors, Workload
    from kernelgen.runtime.graph import EdgeOrder

Problem = TensorProductProblem | HarmonicsProblem | VectorProblem
Run = Callable[[], "dict[str, Tensor]"]


class Family(ABC):
    """operations: that it has. directions: by name, each with its ``outputs``. inputs: slots that get gradients.

    A *spec* is all that determines one kernel (``kernelgen``'s, with operation, layout and deterministic). An
    *operator* is what runs the kernels of a problem.
    """

    operations: ClassVar[tuple[str, ...]]
    directions: ClassVar[Mapping[str, Any]]
    inputs: ClassVar[str]

    @abstractmethod
    def check(self, workload: Workload) -> None:
        """ConfigError for a workload that has no kernels."""

    @abstractmethod
    def read(self, data: Mapping[str, Any]) -> Knobs:
        """The schedule that ``to_dict`` wrote; ScheduleError for an unknown knob or value."""

    @abstractmethod
    def spec(
        self,
        problem: Any,
        operation: str,
        direction: Any,
        dtype: str,
        layout: str,
        facts: DeviceFacts,
        deterministic: bool = False,
    ) -> Any:
        """With a blank schedule; ``direction`` by name or as such."""

    @abstractmethod
    def default(self, spec: Any, num_edges: int | None) -> Knobs:
        """The schedule of a kernel that was never tuned; num_edges: as for ``default_schedule``."""

    @abstractmethod
    def plan(self, spec: Any) -> Any:
        """What an emitter takes; ScheduleError if the spec's schedule is not legal, or makes the kernel of another."""

    def kernel_spec(self, spec: Any, schedule: Knobs) -> Any:
        """What is compiled for a schedule."""
        return dataclasses.replace(spec, schedule=schedule)

    @abstractmethod
    def describe(self, problem: Any) -> tuple[str, ...]:
        """Lines for people."""

    @abstractmethod
    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        """The whole search space of one direction."""

    @abstractmethod
    def tensors(self, workload: Workload, device: Any) -> Tensors:
        """Operands, cotangent and tangents."""

    @abstractmethod
    def irreps(self, workload: Workload) -> dict[str, str]:
        """Of the operands (and outputs) that turn with the coordinates, by slot."""

    @abstractmethod
    def compulsory_bytes(self, workload: Workload, direction: str, num_edges: int, num_nodes: int) -> int:
        """Bytes that any kernel must move: every operand read once, every output written once."""

    @abstractmethod
    def reference(self, workload: Workload, device: Any, tensors: Tensors | None = None) -> Reference:
        """The float64 values of e3nn that outputs are held to."""

    @abstractmethod
    def build(self, workload: Workload, schedules: Mapping[str, Knobs], device: str) -> Any:
        """The operator with these schedules by direction; other directions take the default."""

    @abstractmethod
    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        """Of the kernels that an operator takes for some directions."""

    @abstractmethod
    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        """The operator as a differentiable function of its inputs."""

    @abstractmethod
    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        """One direction with every output asked for, without autograd; outputs by slot (``g`` is the value).

        poison: outputs are full of NaN before the kernel runs.
        """


class Products(Family):
    """Tensor products, as convolutions or edge by edge."""

    operations: ClassVar[tuple[str, ...]] = ("conv", "plain")
    directions: ClassVar[Mapping[str, Any]] = DIRECTIONS
    inputs = "xyw"

    def check(self, workload: Workload) -> None:
        if workload.operation == "conv" and not workload.graph.has_nodes:
            raise ConfigError(
                f"graph {workload.graph.name!r} has edges alone, and a convolution needs nodes; "
                "expected operation = 'plain', or another graph"
            )

    def read(self, data: Mapping[str, Any]) -> Schedule:
        return schedule_from_dict(data)

    def spec(
        self,
        problem: TensorProductProblem,
        operation: str,
        direction: str | Direction,
        dtype: str,
        layout: str,
        facts: DeviceFacts,
        deterministic: bool = False,
    ) -> Spec:
        asked = DIRECTIONS[direction] if isinstance(direction, str) else direction
        if deterministic and operation == "conv":
            # Of the kernels that share the work, the one that takes the schedule of this name.
            asked = fixed_order_parts(asked)[-1]
        blank = SCHEDULES[facts.backend]()
        return Spec(problem, asked, blank, operation, dtype, layout, "int64", facts, deterministic)

    def default(self, spec: Spec, num_edges: int | None) -> Schedule:
        return default_schedule(spec, num_edges)

    def plan(self, spec: Any) -> Any:
        plan = make_plan(spec)
        if plan.spec.schedule != spec.schedule:
            raise ScheduleError(f"{spec.schedule.key} makes the kernel of {plan.spec.schedule.key}")
        return plan

    def kernel_spec(self, spec: Spec, schedule: Knobs) -> Spec:
        """Without fusion torch gathers and sums around a plain kernel, so that is the kernel."""
        assert isinstance(schedule, Schedule)
        return dataclasses.replace(spec, schedule=schedule, operation=spec.operation if schedule.fuse else "plain")

    def describe(self, problem: TensorProductProblem) -> tuple[str, ...]:
        return (
            f"{problem.irreps_in1} x {problem.irreps_in2} -> {problem.irreps_out}",
            f"{len(problem.paths)} paths, {problem.weight_numel:,} weights, {problem.dim_out:,} outputs",
        )

    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        from autotune.spaces import search_space

        kernel = (workload.product, workload.operation, direction, workload.dtype)
        return search_space(*kernel, facts, workload.layout, workload.deterministic, workload.num_edges)

    def tensors(self, workload: Workload, device: Any) -> Tensors:
        from autotune.workload import make_tensors

        return make_tensors(workload, device)

    def irreps(self, workload: Workload) -> dict[str, str]:
        problem = workload.product
        return {"x": problem.irreps_in1, "y": problem.irreps_in2, "g": problem.irreps_out}

    def compulsory_bytes(self, workload: Workload, direction: str, num_edges: int, num_nodes: int) -> int:
        from autotune.workload import compulsory_bytes

        return compulsory_bytes(workload, direction, num_edges, num_nodes)

    def reference(self, workload: Workload, device: Any, tensors: Tensors | None = None) -> Reference:
        from autotune.verify import Reference

        return Reference(workload, device, tensors)

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> Any:
        from autotune.jobs import build_for

        return build_for(workload, schedules, device)

    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        return [spec for name in directions for spec in operator.specs(name)]

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        if not workload.is_conv:
            return operator
        edges = (tensors.sender, tensors.receiver)
        return lambda x, y, w: operator(x, y, w, *edges, num_out=tensors.num_nodes, order=order)

    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        from autotune.jobs import run_call

        return run_call(operator, direction, tensors, order, poison)


@functools.cache
def _families() -> dict[str, Family]:
    from autotune.harmonics_family import Harmonics
    from autotune.vectors_family import Vectors

    return {operation: family for family in (Products(), Harmonics(), Vectors()) for operation in family.operations}


def family_of(operation: str) -> Family:
    """The family that has an operation; ConfigError for an unknown one."""
    if operation not in _families():
        raise ConfigError(f"operation is {operation!r}; expected one of {tuple(_families())}")
    return _families()[operation]


def operations_of(problem: Problem) -> tuple[str, ...]:
    """The operations that a problem has, the usual one first."""
    usual = {HarmonicsProblem: "harmonics", VectorProblem: "vectors"}.get(type(problem), "conv")
    return family_of(usual).operations
