"""What a search minimises: time, energy or memory of a call, a weighted product of them, or several at once.

- ``time`` (the default): microseconds, by the sampler of all times.
- ``energy``: joules of the whole GPU for one of many calls in a row, by NVML's counter.
- ``memory``: bytes of device memory that a call takes beyond its inputs, results included. Of equal ones the fastest
  counts.
- ``time=1,energy=0.5``: the product of each figure to the power of its weight. Only ratios count: 1% of the first
  weighs as much as 2% of the second.
- ``pareto:time,memory``: all schedules to which none is better in one figure and at least as good in the others.

An :class:`Objective` reads records: trials, entries and their parts, with the keys of :data:`FIGURES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autotune.errors import ConfigError

# Figures of a call, with their keys in records.
FIGURES = {"time": "time_us", "energy": "joules", "memory": "memory_bytes"}
FRONT = "pareto:"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Objective:
    """weights: by figure, in the order of :data:`FIGURES`, the largest 1. is_front: each figure is minimised by itself.

    Prints as the text that :meth:`parse` reads; equal objectives have equal texts.
    """

    weights: tuple[tuple[str, float], ...] = (("time", 1.0),)
    is_front: bool = False

    @classmethod
    def parse(cls, text: str) -> Objective:
        """The objective of a text as in the first lines of this file; ConfigError for another."""
        weights: dict[str, float] = {}
        front = text.startswith(FRONT)
        for part in text.removeprefix(FRONT).split(","):
            name, equals, weight = (word.strip() for word in part.partition("="))
            given = _weight(weight) if equals else 1.0
            if name not in FIGURES or name in weights or not 0 < given < math.inf or (front and equals):
                raise ConfigError(f"objective {text!r}: {part.strip()!r} does not fit there; {_EXPECTED}")
            weights[name] = given
        if front and len(weights) < 2:
            raise ConfigError(f"objective {text!r} has one figure; {_EXPECTED}")
        largest = max(weights.values())
        # As many digits as the text has, so that an objective is the same after it was stored.
        ordered = ((name, float(f"{weights[name] / largest:g}")) for name in FIGURES if name in weights)
        return cls(tuple(ordered), front)

    def __str__(self) -> str:
        if self.is_front:
            return FRONT + ",".join(self.figures)
        if len(self.weights) == 1:
            return self.figures[0]
        return ",".join(f"{name}={weight:g}" for name, weight in self.weights)

    @property
    def figures(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.weights)

    @property
    def by(self) -> str:
        """What a text adds to a gain, a default confirmed or a study; empty for time."""
        return "" if self == TIME else f" by {self}"

    @property
    def study_suffix(self) -> str:
        """Of the name of a study, whose trials are of this objective alone; empty for time."""
        return self.by.translate(str.maketrans(" :,", "---", "="))

    @property
    def directions(self) -> list[Literal["minimize"]]:
        """Of Optuna's study: one, or of a front one for each figure."""
        return ["minimize"] * (len(self.figures) if self.is_front else 1)

    @property
    def follows_time(self) -> bool:
        """Whether a kernel that takes far longer than another cannot be better: least memory may cost any time."""
        return "memory" not in self.figures

    def figures_of(self, record: Record) -> list[float] | None:
        """What a record has of each figure, positive: no memory at all counts as a byte. None if one is missing."""
        found = []
        for name in self.figures:
            value = record.get(FIGURES[name])
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                return None
            found.append(max(1.0, float(value)) if name == "memory" else float(value))
        return found if all(found) else None

    def values(self, record: Record) -> list[float] | None:
        """What Optuna minimises: the weighted product, or each figure of a front; None if one was not measured."""
        found = self.figures_of(record)
        return found if found is None or self.is_front else [self.product(found)]

    def product(self, values: Iterable[float]) -> float:
        """The geometric mean of values by figure (or of their ratios), with the weights."""
        total = sum(weight for _, weight in self.weights)
        return math.prod(value ** (weight / total) for value, (_, weight) in zip(values, self.weights, strict=True))

    def front(self, records: Iterable[Any]) -> list[Any]:
        """Those to which none is better in one figure and at least as good in the others, by their first figure."""
        kept: list[tuple[list[float], Any]] = []
        known = [(values, record) for record in records if (values := self.figures_of(record)) is not None]
        for values, record in sorted(known, key=lambda pair: pair[0]):
            if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
                kept.append((values, record))
        return [record for _, record in kept]

    def ranked(self, records: Iterable[Any]) -> list[Any]:
        """The records that have all figures, best first: of a front, its ends, then its middle, then all others."""
        known = [(values, record) for record in records if (values := self.figures_of(record)) is not None]
        places: dict[int, int] = {}
        if self.is_front and known:
            places = {id(record): 1 for record in self.front(record for _, record in known)}
            on_front = [pair for pair in known if id(pair[1]) in places]
            for index in range(len(self.weights)):
                places[id(min(on_front, key=lambda pair: pair[0][index])[1])] = 0

        def place(pair: tuple[list[float], Any]) -> tuple[float, ...]:
            values, record = pair
            return places.get(id(record), 2), self.product(values), record[FIGURES["time"]]

        return [record for _, record in sorted(known, key=place)]


TIME = Objective()
_EXPECTED = "expected time, energy or memory, weights such as time=1,energy=0.5, or pareto:time,memory"


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
