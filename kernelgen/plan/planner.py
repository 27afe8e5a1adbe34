"""Makes the plan of a spec (problem, direction, schedule, device): calls the planner of the spec's kind.

Planners alone decide legality: each raises a ScheduleError that names the broken limit. Emitters trust a plan. A
planner is an entry of ``PLANNERS``, by type of spec, in a file of this folder.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from kernelgen.folder import collected
from kernelgen.schedule.kernel_spec import AnySpec


class AnyPlan(Protocol):
    """What launching a kernel needs to know of it.

    zeroed: outputs that must be zero before the kernel adds to them. owner: the nodes that a worker owns
    (``sender``, ``receiver`` or none). partial_y: rows of partial sums of dF/dy.
    """

    @property
    def spec(self) -> AnySpec: ...
    @property
    def zeroed(self) -> frozenset[str]: ...
    @property
    def owner(self) -> str: ...
    @property
    def partial_y(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


@functools.singledispatch
def make_plan(spec: Any) -> Any:
    """The plan of a spec (of its kind's type), or ScheduleError with the broken limit."""
    raise TypeError(f"a {type(spec).__name__} is no spec; expected one of {[found.__name__ for found in _PLANNERS]}")


_PLANNERS = {spec: plan for planners in collected("kernelgen.plan", "PLANNERS") for spec, plan in planners.items()}
for _spec, _plan in _PLANNERS.items():
    make_plan.register(_spec, _plan)
