"""A schedule tuned on another graph class or layout, for this one."""

from __future__ import annotations

import dataclasses

from autotune.database.candidates.choice import is_legal, why_illegal
from autotune.database.candidates.query import Query
from autotune.database.entry import Entry
from kernelgen.kernels.knobs import Knobs


def fitted_schedule(query: Query, entry: Entry) -> tuple[Knobs, str]:
    """An entry's schedule with the knobs adjusted that depend on the graph class and the layout; how, in words."""
    reason = _why_nearest(query, entry)
    schedule = query.once((id(entry), "layout"), lambda: _in_layout(query, entry))
    there, here = entry.parsed_graph_class, query.graph_class
    if here is not None and here.log2_degree != there.log2_degree:
        factor = here.log2_degree - there.log2_degree
        schedule, fit = query.once((id(entry), factor), lambda: _fit(query, schedule, factor))
        reason += fit
    if there.waits_for_longest(query.spec.facts):
        return schedule, reason
    schedule, fit = for_skew(query, schedule)
    return schedule, reason + fit


def for_skew(query: Query, schedule: Knobs) -> tuple[Knobs, str]:
    """A schedule for the query's graph if that is skewed, and what was changed, in words; as it is if that is illegal.

    Deterministic kernels add in no other order than a node's own, so they keep their schedule.
    """
    even = schedule.for_skew()
    if not query.waits_for_longest or even == schedule or even.key in query.faults:
        return schedule, ""
    if query.once(("legal", even), lambda: why_illegal(query, even)):
        return schedule, ""
    return even, ", in runs of equal length for its longest node"


def _fit(query: Query, schedule: Knobs, log2_factor: int) -> tuple[Knobs, str]:
    """The schedule for that factor of edges per node, and what was changed, in words."""
    fitted = schedule.for_degree(2.0**log2_factor)
    if fitted == schedule or fitted.key in query.faults:
        return schedule, ""
    before, after = schedule.to_dict(), fitted.to_dict()
    changed = ", ".join(f"{name}={getattr(fitted, name)}" for name, value in after.items() if value != before[name])
    return fitted, f", with {changed} for its degree"


def _in_layout(query: Query, entry: Entry) -> Knobs:
    """An entry's schedule; that of another layout in the form for this one, if that is legal.

    Only for gradients of x, which are added in memory: there the form makes up for the layout (on an H200, 0.63 to 1.01
    times as long on 5,184 and on 21 atoms). Results are stored once; that form took 0.99 to 1.13 times as long.
    """
    schedule = entry.tuned_schedule
    adds = query.spec.operation == "conv" and "x" in query.spec.direction.live_outputs
    if entry.layout == query.spec.layout or not adds:
        return schedule
    moved = dataclasses.replace(entry, schedule=schedule.for_layout(query.spec.layout).to_dict())
    return moved.tuned_schedule if is_legal(query, moved, []) else schedule


def _why_nearest(query: Query, entry: Entry) -> str:
    if query.graph_class is None:
        why = ", the largest tuned graph (no graph class given)"
    elif query.graph_class.text == entry.graph_class:
        why = ""
    else:
        why = f", the nearest to {query.graph_class.text}"
    if entry.problem != query.spec.problem.key:
        why += ", for paths in another order or irreps of other parities"
    return why if entry.layout == query.spec.layout else f"{why}, in layout {entry.layout}"
