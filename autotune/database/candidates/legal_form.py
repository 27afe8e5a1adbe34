"""A schedule tuned on another GPU in a form for this one: less shared memory, fewer threads at once, a smaller L2."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from autotune.database.candidates.choice import why_illegal
from autotune.database.candidates.query import Query
from autotune.database.entry import Entry
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.plan import bytes_ahead
from kernelgen.kernels.radial.schedule import RadialSchedule

Step = Callable[[Knobs], Knobs | None]
BLACKWELL = 100
# Most steps from a schedule to its legal form.
MOST_STEPS = 5


def legal_form(schedule: Knobs, is_legal: Callable[[Knobs], bool]) -> Knobs | None:
    """The schedule itself if it is legal, else the legal one that is the fewest steps away; None if there is none.

    A step gives one knob its next lower value, in this order of preference: fewer blocks that must fit at once; blocks
    of half the threads, twice as many of which must fit (what a team does stays as it is); fewer edges fetched at a
    time; fewer edges ahead; fewer teams a node; no rows prefetched to L2; zeros by a
    launch of their own. Products of four warps, which one architecture has, become those of each warp first.
    """
    if is_legal(schedule):
        return schedule
    steps = [step for step in _STEPS if step(schedule) is not None]
    for count in range(1, MOST_STEPS + 1):
        for chosen in itertools.combinations_with_replacement(steps, count):
            form = _after(schedule, chosen)
            if form is not None and is_legal(form):
                return form
    return None


def _after(schedule: Knobs, steps: Iterable[Step]) -> Knobs | None:
    form: Knobs | None = schedule
    for step in steps:
        form = None if form is None else step(form)
    return form


def _lower(schedule: Knobs, knob: str) -> Knobs | None:
    """With the knob's next lower value above 0; None if there is none."""
    values = [value for value in schedule.choices.get(knob, ()) if 0 < value < getattr(schedule, knob)]
    return _changed(schedule, **{knob: max(values)}) if values else None


def _half_the_block(schedule: Knobs) -> Knobs | None:
    form, doubled = _lower(schedule, "block_size"), 2 * getattr(schedule, "min_blocks", 0)
    if form is None or doubled not in form.choices["min_blocks"] or doubled <= 2:
        return form
    return _changed(form, min_blocks=doubled)


def _shorter_ring(schedule: Knobs) -> Knobs | None:
    return _changed(schedule, prefetch="ring2") if getattr(schedule, "prefetch", "") == "ring4" else None


def _zeros_apart(schedule: Knobs) -> Knobs | None:
    return _changed(schedule, zeros="apart") if getattr(schedule, "zeros", "apart") != "apart" else None


def _nothing_ahead(schedule: Knobs) -> Knobs | None:
    asks = getattr(schedule, "ahead", "") in ("weights", "rows")
    return _changed(schedule, ahead="none") if asks else None


def _by_single_warps(schedule: Knobs) -> Knobs | None:
    if isinstance(schedule, RadialSchedule) and schedule.products == "wgmma":
        return schedule.by_single_warps()
    return None


def _changed(schedule: Knobs, **values: Any) -> Knobs:
    return dataclasses.replace(schedule, **values)


_STEPS: tuple[Step, ...] = (
    _by_single_warps,
    functools.partial(_lower, knob="min_blocks"),
    _half_the_block,
    functools.partial(_lower, knob="stage_edges"),
    _shorter_ring,
    functools.partial(_lower, knob="stages"),
    functools.partial(_lower, knob="teams_per_node"),
    _nothing_ahead,
    _zeros_apart,
)


def within_limits(query: Query, entry: Entry, there: DeviceFacts) -> tuple[Entry, str]:
    """An entry of another device with a schedule that suits this one, and what was changed, in words.

    It is legal here, and what it prefetches fits into L2 if it did ``there``, where it was tuned. The entry itself
    where that holds, or for no form of it.
    """
    fitted_there = _fits_l2(query, entry.tuned_schedule, there)

    def suits(schedule: Knobs) -> bool:
        if query.once(("legal", schedule), lambda: why_illegal(query, schedule)):
            return False
        return not fitted_there or _fits_l2(query, schedule, query.spec.facts)

    found = legal_form(_with_registers(entry, there, query.spec.facts), suits)
    if found is None or found == entry.tuned_schedule:
        return entry, ""
    before, after = entry.tuned_schedule.to_dict(), found.to_dict()
    changed = ", ".join(f"{name}={value}" for name, value in after.items() if value != before.get(name))
    return dataclasses.replace(entry, schedule=after), f", with {changed} for this device's limits"


def _with_registers(entry: Entry, there: DeviceFacts, here: DeviceFacts) -> Knobs:
    """The schedule, without the limit of registers (``min_blocks``) if it bound before Blackwell and this is Blackwell.

    From compute capability 10.0 NVRTC 13.5 pairs floats and takes up to 1.4 times as many registers for the same text:
    kernels that spilled 0 and 36 bytes at their limit for sm_90 spill 1,808 and 2,828 there, and none without a limit.
    """
    schedule = entry.tuned_schedule
    limited = getattr(schedule, "block_size", 0) * getattr(schedule, "min_blocks", 0)
    if not (limited and _capability(there) < BLACKWELL <= _capability(here)):
        return schedule
    limit = there.registers_per_unit // limited // 8 * 8
    return _changed(schedule, min_blocks=0) if entry.resources.get("registers", 0) >= limit else schedule


def _capability(facts: DeviceFacts) -> int:
    number = facts.arch.removeprefix("sm_")
    return int(number) if number.isdecimal() else 0


def _fits_l2(query: Query, schedule: Knobs, facts: DeviceFacts) -> bool:
    if getattr(schedule, "ahead", "") not in ("weights", "rows"):
        return True
    try:
        spec = query.kind.kernel_spec(dataclasses.replace(query.spec, facts=facts), schedule)
        return bytes_ahead(query.kind.plan(spec, query.find_schedule)) <= facts.l2_bytes
    except ScheduleError:
        return False  # not legal there
