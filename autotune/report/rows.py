"""The rows of a page as frozen data: of kernels and of models, their knobs, and which of these mattered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from autotune.bench.model_rows import ENOUGH, is_of_one_run, our_form
from autotune.bench.rows import less_accurate
from autotune.bench.whole_models import is_largest
from autotune.database.maintenance import hash_of_text
from autotune.measure.timing import LEVEL, ratio_interval
from autotune.text import (
    CAPTURED,
    DEFAULT,
    JOINT,
    MISSING,
    STOCK,
    TUNED,
    direction_name,
    is_ours,
    kind_text,
    path_and_form,
    significant,
    time_text,
)
from autotune.workload.kind import KernelKind
from autotune.workload.known_kinds import KINDS, OPERATIONS, kernel_kind

# A stored bench row with the values that the report needs: ratios, errors and resources.
#
# Rows of older files lack some keys, and a contender may have failed: unknown values are NaN, None or empty.

# Names of groups, with short ones; a mean is over the rows of one group.
GROUPS = {name: short for kind in KINDS for name, short in kind.groups.items()}


def rows_text(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def number(value: Any) -> float:
    """A finite float, or NaN for None, text, infinities and missing values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def positive(value: Any) -> float:
    """A finite positive float, else NaN."""
    return number(value) if number(value) > 0 else math.nan


def mapping(value: Any) -> dict[str, Any]:
    """``value`` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def sample_times(value: Any) -> list[float]:
    """The valid times in a stored list of samples, without null, text and values that are not positive."""
    return [number(item) for item in (value if isinstance(value, list) else ()) if number(item) > 0]


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

    def number(self, key: str) -> float:
        return number(self.record.get(key))

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
    def deterministic(self) -> bool:
        return self.record.get("deterministic") is True

    @property
    def kind(self) -> KernelKind:
        operation = self.text("operation")
        return kernel_kind(operation) if operation in OPERATIONS else KINDS[0]

    @property
    def form(self) -> str:
        """How it differs from a normal convolution: plain, deterministic, both or nothing."""
        return kind_text(self.text("operation"), self.deterministic)

    @property
    def size(self) -> str:
        """What its graph has, such as ``460,710 edges, 5,184 nodes``; empty if unknown."""
        return self.kind.size_text(self.edges, number(mapping(self.record.get("graph")).get("nodes")))

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
        return {name: positive(self._timing(name).get("time_us")) for name in mapping(self.record.get("times"))}

    def _timing(self, contender: str) -> dict[str, Any]:
        return mapping(mapping(self.record.get("times")).get(contender))

    def reason(self, contender: str) -> str:
        """Why a contender has no time."""
        return str(self._timing(contender).get("error") or "no time was recorded")

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
        return positive(self.record.get("floor_us"))

    @property
    def bytes(self) -> float:
        """Compulsory traffic."""
        return self.number("bytes")

    @property
    def dram_bytes(self) -> float:
        """Traffic that ``ncu`` counted, of an entry's row; NaN elsewhere."""
        resources = mapping(self.record.get("resources"))
        return number(resources.get("dram_read_bytes")) + number(resources.get("dram_write_bytes"))

    @property
    def copy_us(self) -> float:
        """Time of a copy of as many bytes, in the same run; NaN in older records."""
        return self.number("copy_us")

    def order_us(self, contender: str = TUNED) -> float:
        """Time of ordering a graph that is met for the first time (``order_ms``); NaN if it was not measured."""
        order_ms = self.record.get("order_ms")
        ours = order_ms if contender == TUNED else None  # older rows have one number, which is ours
        return 1e3 * number(order_ms.get(contender) if isinstance(order_ms, dict) else ours)

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

    @property
    def what(self) -> str:
        """The row in words."""
        return f"{self.text('label')} on {self.graph}, {direction_name(self.which)}"

    @property
    def least_us(self) -> float:
        """The time of a copy of as many bytes, or of the traffic floor where it was not measured."""
        return self.floor_us if math.isnan(self.copy_us) else self.copy_us

    @property
    def fastest_host(self) -> str | None:
        """The peer whose call costs the host least."""
        peers = [name for name in self.host_us if name not in (TUNED, DEFAULT)]
        return min(peers, key=lambda name: self.host_us[name], default=None)

    def memory(self, contender: str | None) -> float:
        return number(mapping(self.record.get("memory")).get(contender or ""))

    def joules(self, contender: str) -> float:
        """Of a call; NaN if it was not measured."""
        return number(mapping(self.record.get("joules")).get(contender))

    @property
    def objectives(self) -> str:
        """By what its schedules were tuned, where it was not time."""
        return " and ".join(sorted(set(map(str, mapping(self.record.get("objectives")).values()))))

    @property
    def memory_ratio(self) -> float:
        theirs = self.memory(self.peer)
        return self.memory(TUNED) / theirs if theirs > 0 else math.nan

    @property
    def exceeds_memory(self) -> bool:
        """Whether it needs more memory than the fastest peer; False if either is unknown."""
        return self.memory(TUNED) > self.memory(self.peer)

    @property
    def host_us(self) -> dict[str, float]:
        """Contender -> host time of a call."""
        times = {name: number(value) for name, value in mapping(self.record.get("host_us")).items()}
        return {name: time_us for name, time_us in times.items() if not math.isnan(time_us)}

    def samples(self, contender: str) -> list[float]:
        """Raw samples in measured order, in microseconds, without invalid values."""
        return sample_times(self._timing(contender).get("samples_us"))

    def quartiles_us(self, contender: str) -> tuple[float, float]:
        q1, q3 = (number(self._timing(contender).get(key)) for key in ("q1_us", "q3_us"))
        return q1, q3

    def interval(self, contender: str) -> str:
        """Of the ratio to the tuned time, for default and fastest peer; paired by rounds, as sampled in turn."""
        ours, theirs = self.samples(TUNED), self.samples(contender)
        if contender not in (DEFAULT, self.peer) or not ours or not theirs:
            return ""
        low, high = ratio_interval(ours, theirs, paired=True)
        return f"{low:.3f} to {high:.3f} at {LEVEL:.0%}" if math.isfinite(high) else ""

    @property
    def default_schedule(self) -> Any:
        """Knobs of the default, as an entry keeps them; None in other records."""
        return self._timing(DEFAULT).get("schedule")

    def stored_interval(self, contender: str) -> tuple[float, float] | None:
        """Of the ratio to the tuned time, as an entry keeps it, without samples; None if it does not."""
        gain = {} if self.objectives else mapping(self.record.get("gain"))  # of another objective it is no time's
        kept = gain if contender == DEFAULT else self._timing(contender)
        low, high = number(kept.get("low")), number(kept.get("high"))
        return None if math.isnan(low) or math.isnan(high) else (low, high)

    def stored_count(self, contender: str) -> int | None:
        """Of samples too few for an interval, as an entry keeps it; None if it does not."""
        kept = self._timing(contender).get("samples")
        return kept if isinstance(kept, int) else None

    def schedules(self, contender: str) -> dict[str, dict[str, Any]]:
        """Direction -> knobs."""
        return _by_direction(self.record.get("schedules"), contender)

    def resources(self, contender: str) -> dict[str, dict[str, Any]]:
        """Direction -> the compiler's report."""
        return _by_direction(self.record.get("resources"), contender)

    def accuracy(self, contender: str = TUNED) -> Accuracy | None:
        """The largest error of a contender; one that is not a number (NaN, null, infinity) counts as the largest."""
        by_direction = mapping(mapping(self.record.get("errors")).get(contender))
        errors = [
            Accuracy(error, ", ".join(filter(None, (direction.replace("_", " "), slot, where))))
            for direction, slots in by_direction.items()
            for slot, leaf in mapping(slots).items()
            for error, where in _leaf(leaf)
        ]
        return max(errors, key=lambda a: math.inf if math.isnan(a.error) else a.error, default=None)


def met(rows: Iterable[SuiteRow | ModelRow], key: str) -> list[str]:
    """All values of a field of rows, such as the generator, in order."""
    return sorted({row.text(key) for row in rows} - {""})


def entry_row(entry: dict[str, Any]) -> SuiteRow:
    """A published entry as a row of its direction."""
    times = {TUNED: entry, DEFAULT: entry.get("default"), **mapping(entry.get("peers"))}
    times = {name: timing for name, timing in times.items() if isinstance(timing, dict)}
    direction, objective = str(entry.get("direction")), entry.get("objective")
    known = {"pass": direction, "times": times, "errors": {TUNED: {direction: entry.get("errors")}}}
    known |= {"objectives": {direction: objective}} if objective else {}
    for name, key in (("joules", "joules"), ("memory", "memory_bytes")):
        figures = {name: timing[key] for name, timing in times.items() if key in timing}
        known |= {name: figures} if figures else {}
    return SuiteRow(entry | known)


def contenders(rows: Iterable[SuiteRow]) -> list[str]:
    """Tuned, default, then the peers, by name."""
    names = {name for row in rows for name in row.times}
    return [name for name in (TUNED, DEFAULT) if name in names] + sorted(names - {TUNED, DEFAULT})


def _by_direction(value: Any, contender: str) -> dict[str, dict[str, Any]]:
    by_direction = mapping(mapping(value).get(contender))
    return {direction: record for direction, record in by_direction.items() if isinstance(record, dict)}


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


# Knobs and resources, as tables show them.


@dataclass(frozen=True)
class Knob:
    """A knob's value as text; default: the default's value where it is known and another one."""

    text: str
    default: str | None


def plain_names(records: Iterable[Any]) -> list[str]:
    """Names of all plain values, in order of first appearance."""
    names: dict[str, None] = {}
    for record in records:
        names |= {name: None for name, value in mapping(record).items() if not isinstance(value, dict | list)}
    return list(names)


def knob_names(schedules: Iterable[Any]) -> list[str]:
    return [name for name in plain_names(schedules) if name != "backend"]


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return MISSING if math.isnan(value) else f"{value:,g}"
    return MISSING if value is None else str(value)


def knobs(names: Iterable[str], chosen: dict[str, Any], default: dict[str, Any]) -> tuple[Knob, ...]:
    """One schedule's knobs; default: empty if it is not known."""
    changed = {name for name in names if default and chosen.get(name) != default.get(name)}
    return tuple(
        Knob(value_text(chosen.get(name)), value_text(default.get(name)) if name in changed else None)
        for name in names
    )  # fmt: skip


# A stored row of a whole model, from ``results/models/DEVICE.json``, with the values that the report needs.
#
# Times are in milliseconds there and in microseconds here, as in bench rows; memory in bytes. A contender without a
# figure has a sentence instead. Unknown values are NaN or empty.

MIB = 2.0**20
# The hash in rows of devices without a tuned entry.
NOTHING_TUNED = hash_of_text("")
PASS_NAMES = {
    "energy_forces": "energies and forces",
    "energy_forces_stress": "energies, forces and stress",
    "training": "training step",
    "md_step": "step of molecular dynamics (ASE)",
}


# In the order in which most readers look for them.
PACKAGES = ("mace", "nequip", "allegro", "sevennet")
SIZES = ("small", "medium", "large")


@dataclass(frozen=True)
class ModelRow:
    """One model on one structure in one pass."""

    record: dict[str, Any]

    def text(self, key: str) -> str:
        return str(self.record.get(key) or "")

    @property
    def which(self) -> str:
        """The pass in words."""
        return PASS_NAMES.get(self.text("pass"), self.text("pass"))

    @property
    def random(self) -> bool:
        """Whether the weights are random; a model of a file names the file instead."""
        return self.record.get("weights", "random") == "random"

    @property
    def tuned(self) -> bool:
        """Whether anything was tuned on the device before the row was measured there."""
        return self.text("database") != NOTHING_TUNED

    @property
    def atoms(self) -> float:
        return number(self.record.get("atoms"))

    @property
    def edges(self) -> float:
        return number(self.record.get("edges"))

    @property
    def order(self) -> tuple[Any, ...]:
        """By package and model, then from the smallest structure to the largest, then by pass."""
        known = [*PASS_NAMES]
        which = known.index(self.text("pass")) if self.text("pass") in known else len(known)
        package, model = self.text("package"), self.text("model")
        home = PACKAGES.index(package) if package in PACKAGES else len(PACKAGES)
        stem, _, size = model.rpartition("-")
        named = (stem, SIZES.index(size)) if size in SIZES else (model, len(SIZES))
        return (home, *named, self.text("dtype"), self.atoms, self.text("structure"), which)

    @cached_property
    def contenders(self) -> dict[str, dict[str, Any]]:
        """Equitune, captured, with cuEquivariance, other paths by time, stock, the untuned default, then the failed."""
        cells = {name: mapping(cell) for name, cell in mapping(self.record.get("contenders")).items()}
        last = {TUNED: -3.0, CAPTURED: -2.0, JOINT: -1.0, STOCK: math.inf, DEFAULT: math.inf}

        def rank(name: str) -> tuple[bool, float, str]:
            time = positive(cells[name].get("wall_ms"))
            return math.isnan(time), last.get(name, time), name

        return {name: cells[name] for name in sorted(cells, key=rank)}

    def figure(self, contender: str | None, key: str) -> float:
        """A stored figure of a contender in the unit that ``key`` names; NaN without it."""
        return positive(self.contenders.get(contender or "", {}).get(key))

    def parts(self, contender: str, key: str) -> dict[str, float]:
        """Sizes by part, without empty ones, in the unit that ``key`` names.

        device_parts_ms: kernels by what they are for. held_parts_mib: what a forward pass keeps for its gradients.
        parts_ms: of a simulation's step.
        """
        sizes = mapping(self.contenders.get(contender, {}).get(key))
        return {str(part): number(size) for part, size in sizes.items() if number(size) > 0}

    def time_us(self, contender: str | None) -> float:
        """Wall time of one pass; NaN without a figure."""
        return 1e3 * self.figure(contender, "wall_ms")

    def device_us(self, contender: str | None) -> float:
        return 1e3 * self.figure(contender, "device_ms")

    def few_samples(self, contender: str) -> str:
        """``4 samples``, where a time has fewer than ten."""
        samples = self.contenders.get(contender, {}).get("wall_samples_ms")
        return f"{len(samples)} samples" if isinstance(samples, list) and len(samples) < ENOUGH else ""

    @property
    def of_one_run(self) -> bool:
        """Whether all its paths were measured in one run on one host."""
        return is_of_one_run({"contenders": self.contenders})

    def memory(self, contender: str | None) -> float:
        """Peak memory in bytes."""
        return MIB * self.figure(contender, "peak_mib")

    def nanoseconds_a_day(self, contender: str | None) -> float:
        """Simulated time in a day of wall time, by steps of a simulation; NaN for other passes."""
        if not self.is_step:
            return math.nan
        from autotune.bench.dynamics import nanoseconds_a_day  # ase comes with it

        return nanoseconds_a_day(self.time_us(contender) / 1e3)

    def reason(self, contender: str) -> str:
        """Why a contender has no time."""
        return str(self.contenders.get(contender, {}).get("error") or "no time was recorded")

    def errors(self, contender: str) -> dict[str, float]:
        """Relative errors by quantity; NaN for one that is not a number."""
        errors = mapping(self.contenders.get(contender, {}).get("errors"))
        return {str(name): number(error) for name, error in errors.items()}

    def step_text(self, contender: str) -> str:
        """Nanoseconds a day, and the parts of a step."""
        parts = ", ".join(f"{name} {time_text(1e3 * part)}" for name, part in self.parts(contender, "parts_ms").items())
        day = self.nanoseconds_a_day(contender)
        return "" if math.isnan(day) else f"{significant(day)} ns a day{parts and f': {parts}'}"

    @property
    def is_step(self) -> bool:
        """Whether its times are of a simulation's steps."""
        return self.text("pass") == "md_step"

    @property
    def software(self) -> list[tuple[str, str]]:
        versions = mapping(self.record.get("software"))
        return sorted((str(name), str(version)) for name, version in versions.items())

    @property
    def best_other(self) -> str | None:
        """The fastest of the others' paths, stock not among them."""
        return min((name for name in self._others if name != STOCK), key=self.time_us, default=None)

    @property
    def fastest(self) -> str | None:
        """The fastest of all without Equitune."""
        return min(self._others, key=self.time_us, default=None)

    @property
    def _others(self) -> list[str]:
        return [name for name in self.contenders if not is_ours(name) and self.time_us(name) > 0]

    @property
    def rival(self) -> str:
        """The path of the fastest, in whatever form it ran."""
        return path_and_form(self.fastest or "")[0]

    @property
    def ours(self) -> str:
        """Equitune's form that is compared with the fastest."""
        return our_form(self.contenders)

    def over(self, contender: str | None) -> float:
        """How many times as fast as ``contender`` Equitune is, eager."""
        return self.time_us(contender) / self.time_us(TUNED)

    @property
    def ratio(self) -> float:
        """Speed-up over the fastest other path, each in its fastest form."""
        return self.time_us(self.fastest) / self.time_us(self.ours)

    @property
    def device_ratio(self) -> float:
        """The least time of the device that another path takes, over ours: what the kernels alone give."""
        known = [self.device_us(name) for name in self._others]
        return min((time for time in known if time > 0), default=math.nan) / self.device_us(self.ours)

    def capture_ratio(self, path: str) -> float:
        """A path's eager time over its captured one."""
        return self.time_us(path) / self.time_us(f"{path}-captured")

    @property
    def memory_ratio(self) -> float:
        """Peak memory over that of the fastest other path."""
        return self.memory(self.ours) / self.memory(self.fastest)


def model_rows(record: dict[str, Any], largest: bool = False) -> tuple[ModelRow, ...]:
    """The rows of a record in the order in which pages show them. largest: instead those of the largest crystals."""
    rows = (row for row in record.get("rows") or () if isinstance(row, dict) and is_largest(row) is largest)
    return tuple(sorted(map(ModelRow, rows), key=lambda row: row.order))


# Which knobs mattered in a study: Optuna's importances, recomputed from the trial records.

MIN_TRIALS = 12
# PED-ANOVA tells which knobs separate the fastest trials from all trials. The fastest tenth (its default) of a hundred
# trials is only ten points, so a quarter is used.
TARGET_QUANTILE = 0.25


def measured(trials: pd.DataFrame) -> pd.DataFrame:
    """Trials that were timed."""
    return trials[(trials["state"] == "ok") & trials["time_us"].notna()]


def searched_knobs(trials: pd.DataFrame) -> dict[str, list[Any]]:
    """Knobs that all timed trials have, with more than one value; the values in order."""
    schedules = list(measured(trials)["schedule"])
    knobs = {}
    for name in schedules[0] if schedules else ():
        if all(name in schedule for schedule in schedules):
            values = {repr(schedule[name]): schedule[name] for schedule in schedules}
            if len(values) > 1:
                numeric = all(isinstance(value, int | float) for value in values.values())
                knobs[name] = sorted(values.values(), key=None if numeric else str)
    return knobs


def knob_importances(trials: pd.DataFrame) -> pd.DataFrame:
    """Two measures per searched knob, most important knob first; no rows if there are too few trials.

    ``importance`` is Optuna's PED-ANOVA, which sums to 1: what separates the fastest trials from all trials. A knob
    that the sampler fixed early is nearly constant, and so has low importance. ``explained`` is the share of the
    variance of log time between the knob's values (adjusted for their number), which also detects such a knob.
    """
    timed, knobs = measured(trials), searched_knobs(trials)
    if len(timed) < MIN_TRIALS:
        knobs = {}
    importance = _ped_anova(timed, knobs) if len(knobs) > 1 else dict.fromkeys(knobs, 1.0)
    rows = [{"importance": importance[knob], "explained": explained_variance(timed, knob)} for knob in knobs]
    frame = pd.DataFrame(rows, index=list(knobs), columns=["importance", "explained"])
    return frame.loc[frame.max(axis=1).sort_values(ascending=False, kind="stable").index]


def explained_variance(timed: pd.DataFrame, knob: str) -> float:
    """Adjusted share (0 to 1) of the variance of log time between the values of one knob."""
    times = pd.Series(np.log(timed["time_us"].to_numpy(dtype=float)))
    groups = times.groupby([repr(schedule[knob]) for schedule in timed["schedule"]])
    total, within = ((times - times.mean()) ** 2).sum(), ((times - groups.transform("mean")) ** 2).sum()
    freedom = len(times) - groups.ngroups
    if total == 0 or freedom <= 0:
        return 0.0
    return max(0.0, float(1 - (within / freedom) / (total / (len(times) - 1))))


def _ped_anova(timed: pd.DataFrame, knobs: dict[str, list[Any]]) -> dict[str, float]:
    import optuna

    distributions: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution(tuple(values)) for name, values in knobs.items()
    }
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study()
            for schedule, time_us in zip(timed["schedule"], timed["time_us"], strict=True):
                params = {name: schedule[name] for name in knobs}
                study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=time_us))
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=TARGET_QUANTILE)
            return optuna.importance.get_param_importances(study, evaluator=evaluator)
    finally:
        optuna.logging.set_verbosity(verbosity)
