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
# A direction that is a part of another, or nearly: where it has no winner of its own, the other's is the best guess.
KIN = {"edge_backward": "backward", "joint_backward": "double_backward"}
# Schedules that a search takes over from the kindred direction's search of the same run.
KIN_STARTS = 2


def known_entries(*directories: Path) -> list[Entry]:
    """Every entry of every device, in these directories and in the shipped and the user's databases."""
    folders = dict.fromkeys((*database_dirs(), *directories))
    # A device's file has no dot in its stem; files kept aside do.
    files = [path for folder in folders for path in sorted(folder.glob("*.json")) if "." not in path.stem]
    return [entry for path in files for entry in load_table(path).by_identity.values()]


def starting_points(space: Space, graph_class: GraphClass, entries: Iterable[Entry]) -> list[Schedule]:
    """Winners of the same (or kindred) direction and backend moved into ``space``.

    The same problem comes first, within it the same direction, then the nearest graph class. A winner of the same
    direction for another problem is a guess, but a better one than chance.
    """
    spec = space.spec
    directions = (spec.direction.name, KIN.get(spec.direction.name))
    related = [
        entry
        for entry in entries
        if entry.operation == spec.operation
        and entry.direction in directions
        and entry.tuned_schedule.backend == spec.facts.backend
    ]

    def rank(entry: Entry) -> tuple:
        other = entry.parsed_graph_class
        return (
            entry.problem != spec.problem.key,
            entry.direction != spec.direction.name,
            entry.deterministic != spec.deterministic,
            entry.dtype != spec.dtype,
            graph_class.distance(other),
            entry.layout != spec.layout,
            entry.label,
        )

    moved = (space.nearest(entry.tuned_schedule) for entry in sorted(related, key=rank))
    return list(dict.fromkeys(schedule for schedule in moved if space.broken_limit(schedule) is None))[:MOST]
