"""The order in which entries are considered, and whether one can be loaded."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.database.candidates.query import Query
from autotune.database.entry import Entry, is_alike
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs


def by_nearness(query: Query, entries: Iterable[Entry]) -> list[Entry]:
    """Same layout first, then the nearest graph class, the larger graph, the problem itself; ties break by text."""

    def rank(entry: Entry) -> tuple:
        kind = entry.parsed_graph_class
        distance = 0.0 if query.graph_class is None else float(query.graph_class.distance(kind))
        other, texts = entry.problem != query.spec.problem.key, (entry.graph_class, entry.layout, entry.problem)
        return (entry.layout != query.spec.layout, distance, -kind.log2_edges, other, *texts)

    return sorted(
        (
            entry
            for entry in entries
            if entry.deterministic == query.spec.deterministic
            and (query.any_size or is_alike(query.spec, query.graph_class, entry))
        ),
        key=rank,
    )


def is_legal(query: Query, entry: Entry, skipped: list[str]) -> bool:
    """Whether the entry's schedule can be loaded; if not, the reason goes to ``skipped``."""
    if entry.failed_check:
        skipped.append(f"{entry.graph_class} {entry.layout}: failed its last check, {entry.failed_check}")
        return False
    if query.tolerance is not None and entry.worst_error > query.tolerance:
        skipped.append(f"{entry.graph_class} {entry.layout}: its error was {entry.worst_error:.1e}")
        return False
    if query.faults and (fault := query.faults.get(entry.tuned_schedule.key)):
        skipped.append(f"{entry.graph_class} {entry.layout}: its schedule is in quarantine here, {fault}")
        return False
    if reason := query.once(("legal", entry.tuned_schedule), lambda: why_illegal(query, entry.tuned_schedule)):
        skipped.append(f"{entry.graph_class} {entry.layout}: {reason}")
        return False
    return True


def why_illegal(query: Query, schedule: Knobs) -> str:
    """Why a schedule is not legal on the query's device; empty if it is."""
    if schedule.backend != query.spec.facts.backend:
        return f"a {schedule.backend} schedule cannot run on {query.spec.facts.name}"
    try:
        query.kind.plan(query.kind.kernel_spec(query.spec, schedule), query.find_schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def with_skipped(reason: str, skipped: list[str]) -> str:
    return f"{reason}; skipped: {' / '.join(skipped)}" if skipped else reason
