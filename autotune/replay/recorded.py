"""Read a file of ``equitune record`` as a :class:`Record`: a search space with known outcomes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.database import trials as trial_archive
from autotune.database.entry import Entry
from autotune.errors import ConfigError
from autotune.search.space import Space
from autotune.search.starting_points import starting_points
from autotune.workload.workload import GraphClass
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import schedule_from_dict
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem


@dataclass(frozen=True)
class RecordedSpace(Space):
    """A space whose legal schedules are the recorded ones, whatever the present generator's limits."""

    lines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def broken_limit(self, schedule: Knobs) -> str | None:
        return None if schedule.key in self.lines else "not in the record"

    def in_order(self) -> Iterator[Knobs]:
        """The default schedule, then all others in the order of the choices."""
        every = (
            self.schedule(dict(zip(self.knobs, values, strict=True)))
            for values in itertools.product(*self.knobs.values())
        )
        return (schedule for schedule in dict.fromkeys((self.default, *every)) if self.broken_limit(schedule) is None)


@dataclass(frozen=True)
class Record:
    """``header``: as :func:`autotune.replay.record.header` writes it."""

    path: Path
    header: Mapping[str, Any]
    space: RecordedSpace

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """Schedules that passed and were fully timed, fastest first."""
        timed = (line for line in self.space.lines.values() if line["state"] == "ok" and not line["cut"])
        return sorted(timed, key=lambda line: line["time_us"])

    @property
    def best_us(self) -> float:
        return self.measured[0]["time_us"]

    @property
    def default_us(self) -> float | None:
        return self.space.lines[self.space.default.key]["time_us"]

    def transfers(self, entries: Iterable[Entry]) -> dict[str, list[Knobs]]:
        """The tuner's starting points from entries of other problems only, or also of other graphs of this problem."""
        head = self.header
        others = [entry for entry in entries if entry.problem != head["problem"]]
        known = {
            "other problems": others,
            "other graphs too": [*others, *(e for e in entries if self._is_another_graph(e))],
        }
        graph_class = GraphClass.parse(head["graph_class"])
        return {name: starting_points(self.space, graph_class, found) for name, found in known.items()}

    def _is_another_graph(self, entry: Entry) -> bool:
        return entry.problem == self.header["problem"] and entry.graph_class != self.header["graph_class"]


def load_record(path: Path) -> Record:
    """The record in a file, packed or not; ConfigError if invalid, without the default schedule or without times."""
    header, *lines = trial_archive.read_study(path) or [{}]
    if header.get("record") != 1:
        raise ConfigError(f"{path} is no record; expected a file that `equitune record` wrote")
    try:
        by_key = {schedule_from_dict(line["schedule"]).key: line for line in lines}
        default = schedule_from_dict(header["default"])
        facts = {key: value for key, value in header["device"].items() if key != "slug"}
        spec = Spec(
            TensorProductProblem.from_key(header["problem"]),
            DIRECTIONS[header["direction"]],
            default,
            header["operation"],
            header["dtype"],
            header["layout"],
            "int64",
            DeviceFacts(**facts),
            header["deterministic"],
        )
        knobs = MappingProxyType({knob: tuple(choices) for knob, choices in header["knobs"].items()})
        probes = tuple(schedule_from_dict(schedule) for schedule in header["probes"])
    except (EquituneError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be understood by this version: {error!r}") from error
    record = Record(path, header, RecordedSpace(spec, knobs, probes, by_key))
    if default.key not in by_key or not record.measured:
        raise ConfigError(f"{path} has no time of the default schedule; go on with `equitune record`")
    return record
