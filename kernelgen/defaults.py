"""The schedule of a kernel that was never tuned: a :class:`Spec` enters, a legal schedule from simple facts leaves.

What a kernel computes does not depend on this module, so a better default does not make a new generator version.
"""

from __future__ import annotations

import dataclasses
import itertools

from kernelgen.errors import ScheduleError
from kernelgen.plan import BYTES, Spec, estimate_registers, make_plan
from kernelgen.schedule import CudaSchedule, HostSchedule, Schedule, power_of_two_at_most


def default_schedule(spec_without: Spec) -> Schedule:
    """A legal schedule from simple facts, never searched: ``spec_without.schedule`` is replaced, not read."""
    backend = spec_without.facts.backend
    if backend == "cpu":
        return _default_host(spec_without)
    lanes_wanted = max(1, min((path.mul for path in spec_without.problem.paths), default=1))
    edges_per_warp = min(8, max(1, 32 // (power_of_two_at_most(2 * lanes_wanted - 1))))
    least = len({path.mul for path in spec_without.problem.paths}) or 1
    most = max(1, len(spec_without.problem.paths))
    failure: ScheduleError | None = None
    for prefetch, groups in itertools.product((1, 0), range(least, most + 1)):
        schedule = CudaSchedule(
            order=_default_order(spec_without),
            path_groups=groups,
            edges_per_warp=edges_per_warp,
            edge_operand="shared",
            stage_edges=min(32, 32 // edges_per_warp),
            prefetch=prefetch,
        )
        try:
            plan = make_plan(dataclasses.replace(spec_without, schedule=schedule))
        except ScheduleError as error:
            failure = error
            continue
        if estimate_registers(plan) <= 168 or (groups == most and prefetch == 0):
            return schedule
    raise failure or ScheduleError("no default schedule is legal")


def _default_order(spec: Spec) -> str:
    """By receiver, unless only gradients of x are wanted in a fixed order."""
    return "sender" if spec.deterministic and spec.direction.live_outputs == "x" else "receiver"


def _default_host(spec: Spec) -> HostSchedule:
    lanes = spec.facts.vector_bytes // BYTES[spec.dtype]
    widest = max((path.mul for path in spec.problem.paths), default=1)
    block = max(4, min(64, lanes, power_of_two_at_most(widest)))
    return HostSchedule(order=_default_order(spec), path_groups=max(1, len(spec.problem.paths)), channel_block=block)
