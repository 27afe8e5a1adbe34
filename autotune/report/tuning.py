"""What a page shows of tuning: the searches, the tuned rows, winners and failures, and samplers replayed on records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from markupsafe import Markup

from autotune.bench.rows import SuiteRow, mapping, number, positive
from autotune.measure.timing import SAME, SLOWER, verdict
from autotune.measure.trial import STATES
from autotune.report import charts
from autotune.report.devices import PANELS, DeviceData
from autotune.report.rows import (
    Knob,
    contenders,
    knob_importances,
    knob_names,
    knobs,
    measured,
    plain_names,
    searched_knobs,
)
from autotune.report.sources import Sources
from autotune.text import MISSING, TUNED, contender_name, count, counters_text, direction_name, entry_note, unit_for
from autotune.workload.objective import FIGURES

STRIPS = 2
REASONS = 4
REASON_CHARS = 220


def search(data: DeviceData, sources: Sources) -> dict[str, Any]:
    """What the section shows.

    drawn, ranked_drawn: studies with figures. ranked: those that tell which knobs mattered; ranked_names: every knob,
    the one first that matters most over all studies. notes: why contenders have no time, each reason once. unreadable:
    lines of the trial files that were skipped. besides: columns that only entries of other objectives than time have.
    """
    tuned = [TunedRow(data, row, sources) for row in data.tuned]
    names = contenders(data.tuned)
    failed = (
        f"{contender_name(name)}: {row.reason(name)}"
        for row in data.tuned
        for name in names
        if math.isnan(row.times.get(name, 0.0))
    )
    studies = _studies(data)
    ranked = [study for study in studies if not study.importances.empty]
    shares = pd.concat([pd.Series(dtype=float), *(study.importances["importance"] for study in ranked)])
    drawn = enumerate(_longest(studies))
    replays = [Replay(name, record) for name, record in data.replays.items() if mapping(record.get("samplers"))]
    return {
        "tuned": tuned,
        "contenders": names,
        "unit": unit_for(time_us for row in data.tuned for time_us in row.times.values()),
        "notes": list(dict.fromkeys(failed)),
        "besides": [key for key in ("joules", "memory", "objectives") if any(key in row.record for row in data.tuned)],
        "knob_names": knob_names(row.schedule for row in tuned),
        "resource_names": plain_names(row.resources for row in tuned),
        "studies": studies,
        "drawn": [(s, charts.search_progress(s.trials, s.default_us, f"progress{i}", s.what)) for i, s in drawn],
        "ranked": ranked,
        "ranked_names": list(shares.groupby(level=0).sum().sort_values().index[::-1]),
        "ranked_drawn": [(study, *_knob_figures(study, index)) for index, study in enumerate(_longest(ranked))],
        "unranked": [study for study in studies if study.importances.empty],
        "unreadable": data.unreadable_lines,
        "outcomes": list(_outcomes(data.trials)),
        "replays": replays,
        "replayed_samplers": list(dict.fromkeys(name for replay in replays for name in replay.samplers)),
    }


# Studies: their progress, and which knobs mattered.


@dataclass(frozen=True)
class Study:
    """The trials of one search; default_us: the default's published time, or NaN."""

    title: str
    detail: str
    trials: pd.DataFrame
    default_us: float
    importances: pd.DataFrame

    @property
    def what(self) -> str:
        return f"{self.title}, {self.detail}"

    @property
    def timed(self) -> int:
        return len(measured(self.trials))

    def share(self, knob: str) -> tuple[float, float] | None:
        """(importance, variance explained) of a knob; None if this study did not vary it."""
        if knob not in self.importances.index:
            return None
        importance, explained = self.importances.loc[knob, ["importance", "explained"]]
        return float(importance), float(explained)


def _studies(data: DeviceData) -> list[Study]:
    """Each study, first those of entries, in their order."""
    by_file = {str(name): trials for name, trials in data.trials.groupby("file", sort=True)}
    studies = []
    for row in data.tuned:
        trials = by_file.pop(Path(str(mapping(row.record.get("trials")).get("file"))).stem, None)
        if trials is not None:
            title = f"{row.text('label')} \N{MIDDLE DOT} {direction_name(row.which)}"
            by = f"by {row.objectives}" if row.objectives else ""
            detail = ", ".join(filter(None, (row.graph, row.form, row.text("dtype"), row.text("layout"), by)))
            studies.append(Study(title, detail, trials, row.default_us, knob_importances(trials)))
    alone = (Study(name, "no published entry", trials, math.nan, knob_importances(trials))
             for name, trials in by_file.items())  # fmt: skip
    return [*studies, *alone]


def _longest(studies: Sequence[Study]) -> list[Study]:
    """The studies with the most trials, as many as have figures, in their order."""
    longest = sorted(range(len(studies)), key=lambda index: (-len(studies[index].trials), index))[:PANELS]
    return [studies[index] for index in sorted(longest)]


def _knob_figures(study: Study, index: int) -> tuple[Markup, dict[str, Markup]]:
    """The importances of a study's knobs, and the times by value of the most important ones, by knob."""
    values = searched_knobs(study.trials)
    strips = {
        knob: charts.knob_strip(study.trials, knob, values[knob], f"strip{index}-{knob}", study.what)
        for knob in list(study.importances.index)[:STRIPS]
    }
    return charts.importance_bars(study.importances, f"importance{index}", study.what), strips


# Published entries, and the outcomes of all trials.


class TunedRow:
    """A published entry, and what opens below its row. note: graph, kind, dtype and layout.

    certificate: empty in older entries.
    """

    def __init__(self, data: DeviceData, row: SuiteRow, sources: Sources) -> None:
        self.row, self.note = row, entry_note(row.record)
        self.schedule, self.resources, self.certificate, self.trials = (
            mapping(row.record.get(key)) for key in ("schedule", "resources", "certificate", "trials")
        )
        self.default = mapping(mapping(row.record.get("default")).get("schedule"))
        self.what = f"{row.record.get('label')}, {direction_name(row.which)}, {self.note}"
        self.sources = sources.of(row.record, entry_schedules(row))
        # Samples from this schedule's trials: an entry only stores median and quartiles of its published samples.
        study = str(self.trials.get("file")).rpartition("/")[2].removesuffix(".jsonl")
        trials = data.trials[data.trials["file"] == study]
        by_schedule = zip(trials["schedule"], trials["samples_us"], strict=True)
        samples = [time for tried, times in by_schedule if tried == self.schedule for time in times]
        self.strips = charts.strips({TUNED: samples}, f"{self.what}, in the search")

    @property
    def entry(self) -> dict[str, Any]:
        return self.row.record

    def knobs(self, names: Sequence[str]) -> tuple[Knob, ...]:
        return knobs(names, self.schedule, self.default)

    def searched(self, key: str) -> str:
        """A fact of the search behind it."""
        value = self.trials.get(key)
        return MISSING if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)

    def certified(self, key: str) -> float:
        return number(self.certificate.get(key))

    @property
    def errors(self) -> dict[str, float]:
        by_slot = mapping(self.entry["errors"][TUNED][self.row.which])
        return {slot: number(error) for slot, error in by_slot.items()}

    @property
    def gain(self) -> str:
        gain = mapping(self.entry.get("gain"))
        if not gain and self.schedule != self.default:
            return "faster than the default by the medians; this older entry has no interval"
        if not gain:
            second = mapping(self.entry.get("runner_up"))
            interval = number(second.get("low")), number(second.get("high"))
            is_clear = bool(second) and verdict(interval) in (SAME, SLOWER)
            return "default confirmed" if is_clear else "no clear gain; the default schedule is published"
        ratio, low, high, level = (number(gain.get(key)) for key in ("ratio", "low", "high", "level"))
        by = f" by {self.row.objectives}" if self.row.objectives else ""
        return f"{ratio:.3f}\N{MULTIPLICATION SIGN} ({low:.3f} to {high:.3f} at {level:.0%}){by}"

    @property
    def counters(self) -> str:
        """What ``ncu`` counted of a call, in words; empty without."""
        known = self.row.bytes > 0 and self.row.time_us > 0
        return counters_text(self.resources, self.row.bytes, self.row.time_us) if known else ""

    @property
    def front(self) -> Iterator[tuple[str, float, float, float, dict[str, Any]]]:
        """(name in the comparison, time in us, joules, bytes, schedule) of each schedule of a front."""
        for name, one in mapping(self.entry.get("front")).items():
            time_us, joules, memory = (number(mapping(one).get(key)) for key in FIGURES.values())
            yield name, time_us, joules, memory, mapping(mapping(one).get("schedule"))

    @property
    def summary(self) -> str:
        """What opens, in a line."""
        parts = {
            "schedule": True,
            "certificate": self.certificate,
            "source": any(not isinstance(source, str) for _, source, _ in self.sources),
            "raw samples of the search": self.strips,
        }
        return ", ".join(part for part, there in parts.items() if there)


def entry_schedules(row: SuiteRow) -> dict[str, Any]:
    """Direction to knobs, as in bench rows."""
    schedule = mapping(row.record.get("schedule"))
    return {row.which: schedule} if schedule else {}


def _outcomes(trials: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """By state of trials. reasons: the most frequent ones, and how often; others: how many more there are."""
    states = charts.states_of(trials)
    for state in (*STATES, "other") if len(trials) else ():
        chosen = trials[states == state]
        if len(chosen) or state not in ("other", "ok"):
            reasons = [] if state == "ok" else _reasons(chosen["reason"])
            told = {"reasons": reasons[:REASONS], "others": len(reasons[REASONS:])}
            yield {"state": state, "trials": len(chosen), "share": len(chosen) / len(trials), **told}


def _reasons(reasons: Iterable[Any]) -> list[tuple[str, int]]:
    """By frequency; those that differ only in numbers count as one, shown by its first example."""
    counts: Counter[str] = Counter()
    example: dict[str, str] = {}
    for reason in reasons:
        lines = (reason.strip() if isinstance(reason, str) else "").splitlines() or ["no reason recorded"]
        text = lines[0] if len(lines[0]) <= REASON_CHARS else lines[0][: REASON_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
        kind = re.sub(r"\d+(\.\d+)?", "#", text)
        counts[kind] += 1
        example.setdefault(kind, text)
    return [(example[kind], times) for kind, times in counts.most_common()]


# Samplers compared by replays of recorded trials.

SAMPLERS = {"tpe": "TPE", "climb": "TPE and neighbours", "gp": "GP", "random": "random", "default": "default order"}
NEAR = "0.05"


@dataclass(frozen=True)
class Trials:
    """The median of trials by seed as text and as a number (NaN if it was not reached), and the range."""

    text: str
    median: float
    spread: str


class Replay:
    """The replay of one record. name: of its file."""

    def __init__(self, name: str, record: Mapping[str, Any]) -> None:
        self.record, graph = record, record.get("graph")
        facts = [direction_name(record[key]) for key in ("label", "direction") if record.get(key)]
        self.title = " \N{MIDDLE DOT} ".join(facts) or name
        details = [mapping(graph).get("name") or graph, *map(record.get, ("operation", "dtype", "layout"))]
        self.detail = ", ".join(detail for detail in details if isinstance(detail, str) and detail) or name
        # The default's time over the best.
        best_us = positive(record.get("best_us"))
        self.default_ratio = number(record.get("default_us")) / best_us
        # Samplers by shown name, the usual ones first.
        by_name = {sampler_name(str(key)): mapping(value) for key, value in mapping(record["samplers"]).items()}
        order = [*SAMPLERS.values()]
        names = sorted(by_name, key=lambda one: (order.index(one) if one in order else 9, one))
        self.samplers = {sampler: by_name[sampler] for sampler in names}
        # The fewest trials of all samplers.
        medians = (self.trials(sampler).median for sampler in names)
        self.least = min((median for median in medians if not math.isnan(median)), default=math.nan)

    def number(self, key: str) -> float:
        return number(self.record.get(key))

    def pruned(self, key: str) -> float:
        """``skipped``: schedules that pruning would have skipped; ``fastest_skipped``: their fastest over the best."""
        return number(mapping(self.record.get("pruning")).get(key))

    def trials(self, sampler: str) -> Trials:
        """Until a schedule near the best was met."""
        return trials_of(mapping(self.samplers.get(sampler, {}).get("trials_to")).get(NEAR))

    @property
    def transfers(self) -> Iterator[tuple[str, str, float, Trials, Trials]]:
        """(sampler, origin, starts, trials without, with): of starting from the winners of other kernels."""
        moved = mapping(self.record.get("transfer"))
        sampler = sampler_name(str(moved.get("sampler")))
        for origin, result in mapping(moved.get("from")).items():
            started = trials_of(mapping(mapping(result).get("trials_to")).get(NEAR))
            yield sampler, str(origin), number(mapping(result).get("starts")), self.trials(sampler), started

    def figure(self, identifier: str) -> Markup | None:
        """None without curves."""
        curves = {
            sampler: [number(ratio) for ratio in result["curve"]]
            for sampler, result in self.samplers.items()
            if isinstance(result.get("curve"), list) and result["curve"]
        }
        return charts.sampler_curves(curves, identifier, f"{self.title}, {self.detail}") if curves else None


def sampler_name(key: str) -> str:
    """The shown name; ``default_order`` and ``default`` both mean the default order."""
    return SAMPLERS.get(key.lower().replace("_order", "").replace("-order", "").removesuffix(" order"), key)


def trials_of(per_seed: Any) -> Trials:
    """Of trials by seed; a seed that never reached it counts as largest."""
    seeds = per_seed if isinstance(per_seed, list) else []
    if not seeds:
        return Trials(MISSING, math.nan, "")
    counts = sorted(math.inf if math.isnan(number(value)) else number(value) for value in seeds)
    middle = median(counts)
    never = sum(math.isinf(value) for value in counts)
    low, high = ("never" if math.isinf(value) else count(value) for value in (counts[0], counts[-1]))
    spread = low if low == high else f"{low}\N{EN DASH}{high}" if not never else f"{low} to never"
    note = f"{spread}, {len(counts) - never} of {len(counts)} seeds" if never else f"{spread}, {len(counts)} seeds"
    if math.isinf(middle):
        return Trials("not reached", math.nan, note)
    return Trials(f"{middle:,.0f}" if middle == int(middle) else f"{middle:,.1f}", middle, note)
