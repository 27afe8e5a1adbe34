"""A stored bench row with the values that the report needs: ratios, errors and resources.

Rows of older files lack some keys, and a contender may have failed: unknown values are NaN, None or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.bench.rows import less_accurate
from autotune.text import DEFAULT, TUNED
from autotune.workload.kinds.base import KernelKind
from autotune.workload.kinds.registry import KINDS, OPERATIONS, kernel_kind

# Names of groups, with short ones; a mean is over the rows of one group.
GROUPS = {name: short for kind in KINDS for name, short in kind.groups.items()}


def number(value: Any) -> float:
    """A finite float, or NaN for None, text, infinities and missing values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def mapping(value: Any) -> dict[str, Any]:
    """``value`` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def sample_times(value: Any) -> list[float]:
    """The valid times in a stored list of samples, without null, text and values that are not positive."""
    return [time for item in (value if isinstance(value, list) else ()) if (time := number(item)) > 0]


@dataclass(frozen=True)
class Accuracy:
    """A relative error against float64 e3nn, NaN if not a number. ``place``: direction, output, worst block."""

    error: float
    place: str


@dataclass(frozen=True)
class SuiteRow:
    """One row of the bench; times in microseconds, memory in bytes."""

    record: dict[str, Any]

    def text(self, key: str) -> str:
        return str(self.record.get(key) or "")

    @property
    def which(self) -> str:
        """The pass, such as ``force_step``."""
        return self.text("pass")

    @property
    def graph(self) -> str:
        return str(mapping(self.record.get("graph")).get("name") or self.text("graph_class"))

    @property
    def edges(self) -> float:
        return number(mapping(self.record.get("graph")).get("edges"))

    @property
    def nodes(self) -> float:
        return number(mapping(self.record.get("graph")).get("nodes"))

    @property
    def deterministic(self) -> bool:
        return self.record.get("deterministic") is True

    @property
    def kind(self) -> KernelKind:
        operation = self.text("operation")
        return kernel_kind(operation) if operation in OPERATIONS else KINDS[0]

    @property
    def size(self) -> str:
        """What its graph has, such as ``460,710 edges, 5,184 nodes``; empty if unknown."""
        return self.kind.size_text(self.edges, self.nodes)

    @property
    def group(self) -> str:
        return self.kind.group(self.text("problem"), self.text("operation"), self.text("dtype"))

    @property
    def kernel(self) -> tuple[str, ...]:
        """The key shared by the deterministic and the normal row of a kernel."""
        names = ("label", "problem", "operation", "dtype", "layout", "graph_class", "pass")
        return (*(self.text(name) for name in names), self.graph)

    @cached_property
    def times(self) -> dict[str, float]:
        """Contender -> median; NaN if it failed."""
        given = {name: number(mapping(timing).get("time_us")) for name, timing in self._timings.items()}
        return {name: time if time > 0 else math.nan for name, time in given.items()}

    @property
    def _timings(self) -> dict[str, Any]:
        return mapping(self.record.get("times"))

    def reason(self, contender: str) -> str:
        """Why a contender has no time."""
        return str(mapping(self._timings.get(contender)).get("error") or "no time was recorded")

    @property
    def time_us(self) -> float:
        return self.times.get(TUNED, math.nan)

    @property
    def default_us(self) -> float:
        return self.times.get(DEFAULT, math.nan)

    @property
    def default_ratio(self) -> float:
        """The default's time over the tuned kernel's."""
        return self.default_us / self.time_us

    @property
    def floor_us(self) -> float:
        floor = number(self.record.get("floor_us"))
        return floor if floor > 0 else math.nan

    @property
    def bytes(self) -> float:
        """Compulsory traffic."""
        return number(self.record.get("bytes"))

    @property
    def copy_us(self) -> float:
        """Time of a copy of as many bytes, in the same run; NaN in older records."""
        return number(self.record.get("copy_us"))

    def order_us(self, contender: str = TUNED) -> float:
        """Time of ordering a graph that is met for the first time (``order_ms``); NaN if it was not measured."""
        given = self.record.get("order_ms")
        ours = given if contender == TUNED else None
        return 1e3 * number(given.get(contender) if isinstance(given, dict) else ours)

    @property
    def new_graph_ratio(self) -> float:
        """The speed-up if every call meets a new graph: each contender's call and its ordering. NaN if not measured."""
        known = [time for name in self._peers if (time := self.times[name] + self.order_us(name)) > 0]
        return min(known) / (self.time_us + self.order_us()) if known else math.nan

    @property
    def over_floor(self) -> float:
        return self.time_us / self.floor_us

    @cached_property
    def peer(self) -> str | None:
        """The fastest peer that has a time, and no larger errors than ours may be."""
        timed = [name for name in self._peers if self.times[name] > 0]
        return min(timed, key=lambda name: self.times[name]) if timed else None

    @cached_property
    def _peers(self) -> tuple[str, ...]:
        others = {TUNED, DEFAULT} | self.less_accurate
        return tuple(name for name in self.times if name not in others)

    @cached_property
    def less_accurate(self) -> frozenset[str]:
        """Contenders that are timed, but not compared: see :func:`autotune.bench.rows.less_accurate`."""
        return less_accurate(self.record)

    @property
    def peer_us(self) -> float:
        return self.times[self.peer] if self.peer else math.nan

    @property
    def ratio(self) -> float:
        """Speed-up over the fastest peer; NaN without a peer's time or ours."""
        return self.peer_us / self.time_us

    @property
    def untuned_ratio(self) -> float:
        """The untuned default's speed-up over the fastest peer; NaN without a time of either."""
        return self.peer_us / self.default_us

    @property
    def loses(self) -> bool:
        """Whether it is slower than the fastest peer, or failed where a peer did not."""
        return self.ratio < 1 or (math.isnan(self.time_us) and self.peer is not None)

    def memory(self, contender: str | None) -> float:
        return number(mapping(self.record.get("memory")).get(contender or ""))

    @property
    def exceeds_memory(self) -> bool:
        """Whether it needs more memory than the fastest peer; False if either is unknown."""
        return self.memory(TUNED) > self.memory(self.peer)

    @property
    def host_us(self) -> dict[str, float]:
        """Contender -> host time of a call."""
        given = {name: number(value) for name, value in mapping(self.record.get("host_us")).items()}
        return {name: value for name, value in given.items() if not math.isnan(value)}

    def samples(self, contender: str) -> list[float]:
        """Raw samples in measured order, in microseconds, without invalid values."""
        given = mapping(mapping(self.record.get("times")).get(contender)).get("samples_us")
        return sample_times(given)

    def schedules(self, contender: str) -> dict[str, dict[str, Any]]:
        """Direction -> knobs."""
        return _by_direction(self.record.get("schedules"), contender)

    def resources(self, contender: str) -> dict[str, dict[str, Any]]:
        """Direction -> the compiler's report."""
        return _by_direction(self.record.get("resources"), contender)

    def accuracy(self, contender: str = TUNED) -> Accuracy | None:
        """The largest error of a contender; one that is not a number (NaN, null, infinity) counts as the largest."""
        by_direction = mapping(mapping(self.record.get("errors")).get(contender))
        found = [
            Accuracy(error, ", ".join(filter(None, (direction.replace("_", " "), slot, where))))
            for direction, slots in by_direction.items()
            for slot, leaf in mapping(slots).items()
            for error, where in _leaf(leaf)
        ]
        return max(found, key=lambda a: math.inf if math.isnan(a.error) else a.error, default=None)


def _by_direction(value: Any, contender: str) -> dict[str, dict[str, Any]]:
    given = mapping(mapping(value).get(contender))
    return {name: found for name, found in given.items() if isinstance(found, dict)}


def _leaf(value: Any) -> Iterator[tuple[float, str]]:
    """The error of one output and its worst block, stored as a number, or as a number and text in an object or list."""
    if value is None or isinstance(value, int | float):
        yield number(value), ""
    elif isinstance(value, dict | list):
        parts = list(value.values()) if isinstance(value, dict) else value
        numbers = [number(part) for part in parts if part is None or isinstance(part, float)]
        if numbers:
            yield numbers[0], ", ".join(str(part) for part in parts if isinstance(part, str | int))


def prices(rows: Iterable[SuiteRow]) -> list[tuple[SuiteRow, SuiteRow, float]]:
    """(normal row, deterministic row of the same kernel, deterministic time / normal time), in the rows' order."""
    listed = list(rows)
    normal = {row.kernel: row for row in listed if not row.deterministic}
    pairs = [(normal[row.kernel], row) for row in listed if row.deterministic and row.kernel in normal]
    return [(plain, row, row.time_us / plain.time_us) for plain, row in pairs]
