"""Starting points of a search besides the default: winners of similar kernels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.database.entry import Entry, is_alike
from autotune.database.nearest import device_distance
from autotune.database.predicted import by_predicted_time, is_predicted, with_other_groups
from autotune.database.store import database_dirs, device_files, load_table
from autotune.measure.space import Space
from autotune.workload.workload import GraphClass
from kernelgen.device import DeviceFacts
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.radial.plan import RadialSchedule
from kernelgen.problem.product import shape_of

MOST = 8
# Directions that are (nearly) part of another: without a winner of its own, the other's is the best guess.
KIN = {
    "edge_backward": "backward",
    "feature_backward": "forward",
    "joint_backward": "double_backward",
    "double_backward": "joint_backward",
}
# Number of schedules taken from the related direction's search of the same run.
KIN_STARTS = 2


def known_entries(facts: DeviceFacts, *directories: Path) -> list[Entry]:
    """Every entry of every device, in these directories and in the shipped and the user's databases.

    Sorted by device: this one first, then the nearest in architecture and size.
    """
    folders = dict.fromkeys((*database_dirs(), *directories))
    files = [path for folder in folders for path in device_files(folder)]
    tables = [(path.stem != facts.slug, load_table(path)) for path in files]
    tables.sort(key=lambda item: (item[0], device_distance(item[1].device, facts)))
    return [entry for _, table in tables for entry in table.by_identity.values()]


def starting_points(
    space: Space, graph_class: GraphClass, entries: Iterable[Entry], *, by_time: bool = True
) -> list[Knobs]:
    """Winners of the same (or related) direction and backend, moved into ``space``.

    Winners of the same shape (``shape_of``), nearest graph class first, alternate with those of other problems on the
    nearest graph class, because the number of edges can matter more than the irreps. Ties keep the order of
    ``entries``. On a GPU winners of large graphs are not used for small ones (see ``lookup``), nor the reverse.

    by_time: those of other problems, also with other counts of path groups, in the order of the model of time, where it
        serves this kernel (``database.prediction``). On an H200's trials, each problem held out in turn, the best of
        its first two then takes 1.06 times the tuned time; of the default and the first by kinship 1.13 (``starts`` in
        ``results/replay/defaults-nvidia-h200.json``).
    """
    spec = space.spec
    directions = (spec.direction.name, KIN.get(spec.direction.name))
    related = [
        entry
        for entry in entries
        if entry.operation == spec.operation
        and entry.direction in directions
        and entry.tuned_schedule.backend == spec.facts.backend
        and is_alike(spec, graph_class, entry)
    ]

    def rank(entry: Entry) -> tuple[Any, ...]:
        return (
            entry.direction != spec.direction.name,
            entry.deterministic != spec.deterministic,
            entry.dtype != spec.dtype,
            graph_class.distance(entry.parsed_graph_class),
            entry.layout != spec.layout,
        )

    same: list[Entry] = []
    others: list[Entry] = []
    for entry in sorted(related, key=rank):
        (same if shape_of(entry.problem) == shape_of(spec.problem.key) else others).append(entry)
    others.sort(key=lambda entry: (entry.direction != spec.direction.name, *rank(entry)[3:]))
    of_shape, of_others = (_moved(space, found) for found in (same, others))
    if by_time and is_predicted(spec):
        varied = map(space.canonical, with_other_groups(space.knobs, spec, of_others))
        every = dict.fromkeys((*of_others, *(each for each in varied if space.broken_limit(each) is None)))
        of_others = by_predicted_time(spec, graph_class, list(every))
    turns = itertools.chain.from_iterable(itertools.zip_longest(of_shape, of_others))
    return list(dict.fromkeys(schedule for schedule in turns if schedule is not None))[:MOST]


def storing_rows(space: Space, schedule: Knobs) -> list[Knobs]:
    """A schedule in forms in which runs of edges store rows (``zeros="cut"``), where the space has such forms.

    As it takes runs on skewed graphs, and in runs of a fixed length, a power of two: those cut fewer rows, and where
    degrees are powers of two, as of nodes with k nearest neighbours, none but long ones. Longer runs cut fewer still.
    """
    if "cut" not in space.knobs.get("zeros", ()):
        return []
    even = space.nearest(schedule.for_skew())
    lengths = [length for length in space.knobs["edges_per_chunk"] if length > even.to_dict()["edges_per_chunk"]]
    fixed: dict[str, Any] = {"zeros": "cut", "runs": "fixed"}
    changes = [{"zeros": "cut"}, fixed, *({**fixed, "edges_per_chunk": length} for length in lengths)]
    return [space.canonical(dataclasses.replace(even, **change)) for change in changes]


def other_path_groups(space: Space, schedule: Knobs) -> list[Knobs]:
    """A fused radial schedule with one path group more, and with one fewer.

    Where sums just fit into registers one group more can be 10% faster, and none of the rules for defaults sees it.
    """
    if not isinstance(schedule, RadialSchedule):
        return []
    counts = (schedule.path_groups + 1, schedule.path_groups - 1)
    legal = (count for count in counts if count in space.knobs["path_groups"])
    return [space.canonical(dataclasses.replace(schedule, path_groups=count)) for count in legal]


def _moved(space: Space, entries: Iterable[Entry]) -> list[Knobs]:
    """The distinct legal schedules that entries' schedules become in a space."""
    moved = (space.nearest(_in_layout(entry, space.spec.layout)) for entry in entries)
    return [schedule for schedule in dict.fromkeys(moved) if space.broken_limit(schedule) is None]


def _in_layout(entry: Entry, layout: str) -> Knobs:
    return entry.tuned_schedule if entry.layout == layout else entry.tuned_schedule.for_layout(layout)


def untried_forms(space: Space, ranked: Sequence[Knobs]) -> list[Knobs]:
    """The fastest earlier trial (first of ``ranked``), changed to each kernel form that no earlier trial had.

    Such forms are new in the generator. The last schedule combines the first new form of every knob. Forms are choices
    that are not numbers, and ``min_blocks`` 1, which allows most registers. They rarely win with the default's other
    knobs.
    """
    new: dict[str, list[Any]] = {}
    for knob, choices in space.knobs.items() if ranked else ():
        known = {getattr(schedule, knob) for schedule in ranked}
        forms = (value for value in choices if isinstance(value, str | bool) or (knob, value) == ("min_blocks", 1))
        new[knob] = [value for value in forms if value not in known]
    changes = [{knob: value} for knob, values in new.items() for value in values]
    together = {knob: values[0] for knob, values in new.items() if values}
    changes += [together] if len(together) > 1 else []
    return [dataclasses.replace(ranked[0], **change) for change in changes]
