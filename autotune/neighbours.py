"""Where a search starts besides the default: schedules that won for kernels like this one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autotune.database import database_dirs, load_table
from autotune.entry import Entry
from autotune.graphs import GraphClass
from autotune.space import Space
from kernelgen.schedule import Schedule

MOST = 6


def known_entries(*directories: Path) -> list[Entry]:
    """Every entry of every device, in these directories and in the shipped and the user's databases."""
    folders = dict.fromkeys((*database_dirs(), *directories))
    # A device's file has no dot in its stem; files kept aside do.
    files = [path for folder in folders for path in sorted(folder.glob("*.json")) if "." not in path.stem]
    return [entry for path in files for entry in load_table(path).by_identity.values()]


def starting_points(space: Space, graph_class: GraphClass, entries: Iterable[Entry]) -> list[Schedule]:
    """Winners of the same direction and backend moved into ``space``: same problem first, then the nearest graph class.

    A winner of the same direction for another problem is a guess, but a better one than chance.
    """
    spec = space.spec
    related = [
        entry
        for entry in entries
        if (entry.operation, entry.direction) == (spec.operation, spec.direction.name)
        and entry.tuned_schedule.backend == spec.facts.backend
    ]

    def rank(entry: Entry) -> tuple:
        other = entry.parsed_graph_class
        return (
            entry.problem != spec.problem.key,
            entry.dtype != spec.dtype,
            graph_class.distance(other),
            entry.layout != spec.layout,
            entry.label,
        )

    moved = (space.nearest(entry.tuned_schedule) for entry in sorted(related, key=rank))
    return list(dict.fromkeys(schedule for schedule in moved if space.broken_limit(schedule) is None))[:MOST]
