"""Fits oblivious trees to logarithms of slowdowns, by gradient boosting with squared errors.

Friedman, Greedy function approximation, Annals of Statistics 29 (2001). It takes a second for ten thousand trials with
NumPy alone, and gives the same numbers everywhere, so that a fitted file can be checked against the records.
scikit-learn's histogram boosting ranked held-out problems no better.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.database import predicted
from autotune.database import trials as trial_archive
from autotune.database.entry import Entry
from autotune.database.maintenance import hash_of_text
from autotune.database.model_of_time import STEP, Features, Trees, Winner, knobs_of, schedule_of
from autotune.database.nearest import canonical_product
from autotune.database.store import is_slug, replace_file
from autotune.errors import ConfigError
from autotune.workload.workload import GraphClass
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import EquituneError, ScheduleError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.channelwise import Plan
from kernelgen.kernels.product.plan import OwnersPlan, default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule, schedule_from_dict
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem, shape_of

# Slowdowns beyond this are alike: nobody chooses among them.
CAP = np.log(3.0)


@dataclass(frozen=True)
class Settings:
    """share: of the features, for a tree. ridge: added to a leaf's weight. bins: at most, of a feature's values."""

    trees: int = 75
    depth: int = 6
    rate: float = 0.2
    ridge: float = 3.0
    share: float = 0.4
    bins: int = 24


def fit_studies(studies: Sequence[Trials], settings: Settings | None = None, seeds: int = 8) -> Trees:
    """The mean of ``seeds`` models. Fast schedules weigh more; a study with many trials weighs less for each."""
    rows = np.concatenate([study.rows for study in studies])
    slow = np.concatenate([study.slowdowns() for study in studies])
    counts = np.concatenate([np.full(len(study.times_us), len(study.times_us)) for study in studies])
    weights = counts**-0.75 * np.exp(-0.5 * slow)
    chosen = settings or Settings()
    return Trees.mean([fit(rows, np.minimum(slow, CAP), weights, chosen, seed) for seed in range(seeds)])


def fit(rows: np.ndarray, wanted: np.ndarray, weights: np.ndarray, settings: Settings, seed: int = 0) -> Trees:
    """One model. rows: [n, features]; wanted, weights: [n]."""
    weights = weights / weights.mean()
    cuts = [_cuts(column, settings.bins) for column in rows.T]
    binned = np.stack([np.searchsorted(cut, column) for cut, column in zip(cuts, rows.T, strict=True)], 1)
    base = round(float(np.average(wanted, weights=weights)) / STEP)
    left, generator = wanted - base * STEP, random.Random(seed)
    useful = [feature for feature, cut in enumerate(cuts) if len(cut)]
    features, thresholds, values = [], [], []
    for _ in range(settings.trees):
        offered = [feature for feature in useful if generator.random() < settings.share] or useful
        asked, leaves = _grow(binned[:, offered], [len(cuts[f]) for f in offered], left * weights, weights, settings)
        size = 1 << settings.depth
        totals, weight = (np.bincount(leaves, what, size) for what in (left * weights, weights))
        steps = np.rint(settings.rate * totals / (weight + settings.ridge) / STEP).astype(np.int64)
        left = left - steps[leaves] * STEP
        features.append([offered[feature] for feature, _ in asked])
        thresholds.append([float(cuts[offered[feature]][place]) for feature, place in asked])
        values.append(steps)
    return Trees(np.array(features), np.array(thresholds), np.array(values), base)


def _cuts(column: np.ndarray, bins: int) -> np.ndarray:
    """Thresholds between the values of a feature; if there are too many, about as many rows between any two."""
    known = np.unique(column)
    between = (known[1:] + known[:-1]) / 2
    if len(between) >= bins:
        wanted = np.quantile(column, np.linspace(0, 1, bins + 1)[1:-1], method="nearest")
        between = between[np.unique(np.minimum(np.searchsorted(known, wanted), len(between) - 1))]
    return np.unique(np.round(between, 5))


def _grow(
    binned: np.ndarray, counts: Sequence[int], gradients: np.ndarray, weights: np.ndarray, settings: Settings
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """One tree: the question of each level, as feature and threshold, and every row's leaf.

    counts: thresholds of each feature. A level takes the question with the largest gain over all of its nodes.
    """
    number, bins = binned.shape[1], settings.bins
    places, leaves = binned + np.arange(number) * bins, np.zeros(len(binned), dtype=np.int64)
    outside = np.arange(bins - 1) >= np.array(counts)[:, None]
    asked: list[tuple[int, int]] = []
    for level in range(settings.depth):
        nodes = 1 << level
        keys = (places + (leaves * (number * bins))[:, None]).ravel()
        below, weight = (
            np.bincount(keys, np.repeat(what, number), nodes * number * bins).reshape(nodes, number, bins).cumsum(2)
            for what in (gradients, weights)
        )
        above, other = below[:, :, -1:] - below, weight[:, :, -1:] - weight
        gains = (below**2 / (weight + settings.ridge) + above**2 / (other + settings.ridge)).sum(0)[:, :-1]
        # Rounded: two questions that divide the rows alike differ in their last digits, and the first of them counts.
        gains = np.where(outside, -1.0, np.round(gains, 6))
        feature, place = divmod(int(gains.argmax()), bins - 1)
        asked.append((feature, place))
        leaves = leaves + (binned[:, feature] > place) * nodes
    return asked, leaves


# Label, operation, direction, dtype, layout, graph class: what names a study in records.
Name = tuple[str, str, str, str, str, str]


def name_of(entry: Entry) -> Name:
    """The name of the study that an entry cites; no two of a database's entries that the model serves share one."""
    return entry.label, entry.operation, entry.direction, entry.dtype, entry.layout, entry.graph_class


@dataclass(frozen=True, eq=False)
class Trials:
    """The trials of one study that the present generator can still make.

    times_us: medians by schedule; of a measurement that was cut short, the median until then. tuned_us: the least that
    was fully measured, which is what choices are compared with: as trials on the same graph, not as published.
    rows: features, [schedules, features], in the order of ``times_us``.
    compared: schedules that were measured in turn with the tuned one.
    """

    entry: Entry
    spec: Spec
    graph_class: GraphClass
    shape: str
    times_us: Mapping[CudaSchedule, float]
    tuned_us: float
    rows: np.ndarray
    compared: frozenset[CudaSchedule] = frozenset()

    def plan(self, schedule: CudaSchedule) -> Plan | OwnersPlan:
        plan = predicted.plan_of(self.spec, schedule)
        assert plan is not None
        return plan

    def slowdowns(self) -> np.ndarray:
        """Logarithms of times over the tuned time, [schedules]."""
        return np.log(np.array(list(self.times_us.values())) / self.tuned_us)


def facts_of(device: Mapping[str, Any]) -> DeviceFacts:
    """Facts of a database's CUDA device; ConfigError for another backend."""
    if device.get("backend") != "cuda":
        raise ConfigError(
            f"the model of time is for trials of CUDA devices, and these are of {device.get('name')!r}; "
            "expected for example results/trials/nvidia-h200.jsonl.gz"
        )
    return cuda_facts(str(device["arch"]), str(device["name"]), int(device["units"]))


def spec_of(entry: Entry, facts: DeviceFacts) -> Spec | None:
    """The spec of an entry's kernel, if the model serves it."""
    if entry.operation not in ("conv", "plain"):
        return None
    spec = entry.spec(facts)
    return spec if predicted.serves(spec) else None


def read_studies(folder: Path, entries: Iterable[Entry], facts: DeviceFacts) -> list[Trials]:
    """The studies that entries cite, in the order of the entries. folder: ``results/trials/DEVICE``."""
    found, _ = trial_archive.read_device(folder)
    return [
        trials
        for entry in entries
        if (spec := spec_of(entry, facts)) is not None
        and (lines := found.get(Path(str(entry.trials.get("file", ""))).stem))
        and (trials := _trials(entry, spec, lines)) is not None
    ]


def _trials(entry: Entry, spec: Spec, lines: trial_archive.Lines) -> Trials | None:
    """Later lines replace earlier ones of the same kernel: the newest generator's are last."""
    graph_class = entry.parsed_graph_class
    spec = dataclasses.replace(
        spec, schedule=default_schedule(spec, predicted.edges_for_rules(spec.facts, graph_class))
    )
    timed = {schedule: (time_us, cut) for schedule, time_us, cut in _timed(spec, lines)}
    whole = [time_us for time_us, cut in timed.values() if not cut]
    if not whole:
        return None
    times_us = {schedule: time_us for schedule, (time_us, _) in timed.items()}
    features = Features(spec, graph_class)
    rows = np.array([features.of(plan) for plan in predicted.planned(spec, times_us).values()])
    return Trials(entry, spec, graph_class, shape_of(entry.problem), times_us, min(whole), rows)


def _timed(spec: Spec, lines: trial_archive.Lines) -> Iterator[tuple[CudaSchedule, float, bool]]:
    for line in lines:
        if line["state"] != "ok":
            continue
        try:
            schedule = canonical_product(spec, schedule_from_dict(line["schedule"]))
        except ScheduleError:  # a knob or value that was taken out
            continue
        plan = predicted.plan_of(spec, schedule) if schedule.fuse else None
        if plan is not None and isinstance(plan.spec.schedule, CudaSchedule) and math.isfinite(line["time_us"]):
            yield plan.spec.schedule, float(line["time_us"]), bool(line.get("cut"))


@dataclass(frozen=True, eq=False)
class Held:
    """A study whose problem is held out, with what may be known of it.

    pool: legal schedules: the rules' default, then other problems' winners, the nearest problem's first, then all of
    these with other counts of path groups. order: the pool by the model that was fitted without this problem. tried:
    the study's own trials by it.
    """

    study: Trials
    pool: Sequence[CudaSchedule]
    order: Sequence[CudaSchedule]
    tried: Sequence[CudaSchedule]


def winner_of(entry: Entry) -> Winner | None:
    """An entry's schedule as the table of the runtime has it; None if it was not tuned by time."""
    schedule = entry.tuned_schedule
    if not isinstance(schedule, CudaSchedule) or not schedule.fuse or entry.by:
        return None
    return Winner(schedule, entry.layout, predicted.is_small(entry.parsed_graph_class))


def hold_out(study: Trials, others: Sequence[Entry], trees: Trees) -> Held:
    """others: entries of the model's kinds; those of the study's shape are left out here."""
    entry = study.entry
    known = [
        other
        for other in others
        if other.operation == entry.operation
        and other.direction in predicted.directions_of(entry.direction)
        and shape_of(other.problem) != study.shape
        and winner_of(other) is not None
    ]
    known.sort(key=lambda other: _distance(study, other))
    winners = [winner for other in known if (winner := winner_of(other)) is not None]
    schedules = predicted.winners_for(study.spec, study.graph_class, winners)
    pool = list(predicted.planned(study.spec, predicted.pool_of(study.spec, study.graph_class, schedules)))
    order = predicted.ranked(trees, study.spec, study.graph_class, pool)
    tried = predicted.ranked(trees, study.spec, study.graph_class, study.times_us)
    return Held(study, pool, order, tried)


def _distance(study: Trials, other: Entry) -> tuple[bool, bool, float, bool, float]:
    """Another direction, then dtype, then the graph, then the layout, then the problem's sizes in factors of two."""
    graph = study.graph_class.distance(other.parsed_graph_class)
    here, there = _sizes(study.entry.problem), _sizes(other.problem)
    problem = sum(abs(a - b) for a, b in zip(here, there, strict=True))
    other_way = other.direction != study.entry.direction
    return other_way, other.dtype != study.entry.dtype, graph, other.layout != study.entry.layout, problem


@functools.cache
def _sizes(key: str) -> tuple[float, ...]:
    problem = TensorProductProblem.from_key(key)
    muls = [path.mul for path in problem.paths]
    sizes = (len(muls), min(muls), max(muls), problem.dim_in1, problem.dim_in2, problem.dim_out, problem.weight_numel)
    return tuple(math.log2(max(1, size)) for size in sizes)


# Every way to choose; None if it has no choice. ``measured``: among schedules that the held-out study has tried.
CHOICES: Mapping[str, Callable[[Held], CudaSchedule | None]] = {
    "rules": lambda held: held.pool[0],
    "nearest": lambda held: held.pool[min(1, len(held.pool) - 1)],
    "model": lambda held: held.order[0],
    "model, measured": lambda held: next((each for each in held.order if each in held.study.times_us), None),
    "model, any trial": lambda held: held.tried[0],
}

# The runtime's way to choose, by the name that records give it; and the same model's among a study's trials.
CHOSEN, ANY_TRIAL = "model", "model, any trial"
# The fastest of the shortlist that a first run tries (``prediction.predicted.shortlist``).
FIRST_RUN = "first run"


# Choices that were compared with the tuned schedule on their device: ``results/replay/measured-DEVICE.json``.
#
# A comparison counts for a choice as long as study, chosen and tuned schedule are the same; for any other choice there
# is an estimate again. It also is one more trial, from which the model learns for other problems. Each run of
# ``equitune replay defaults --measure`` has its date and software, and a row a choice.

RECORD = "measured"
NAMES = ("label", "operation", "direction", "dtype", "layout", "graph_class")
COLUMNS = (*NAMES, "schedule", "tuned", "ratio", "chosen_us", "tuned_us", "rules_us")
# Study, chosen schedule, hash of the tuned one.
Key = tuple[Name, CudaSchedule, str]


@dataclass(frozen=True)
class Compared:
    """Medians in microseconds of a chosen schedule, of the tuned one and of the rules' default, sampled in turn.

    study: see :func:`~autotune.replay.fit.name_of`. tuned: see :func:`hash_of_schedule`. rules_us: None if
    that kernel failed.
    """

    study: Name
    schedule: CudaSchedule
    tuned: str
    chosen_us: float
    tuned_us: float
    rules_us: float | None = None

    @property
    def key(self) -> Key:
        return self.study, self.schedule, self.tuned

    @property
    def ratio(self) -> float:
        return self.chosen_us / self.tuned_us


def key_of(entry: Entry, schedule: CudaSchedule) -> Key:
    """What a comparison of a schedule with an entry's is found by."""
    return name_of(entry), schedule, hash_of_schedule(entry.tuned_schedule)


def hash_of_schedule(schedule: Knobs) -> str:
    """Equal for equal schedules."""
    return hash_of_text(schedule.key)


def comparisons_path(results: Path, slug: str) -> Path:
    """The file of a device."""
    assert is_slug(slug), slug
    return results / "replay" / f"measured-{slug}.json"


def read_comparisons(path: Path) -> dict[Key, Compared]:
    """The comparisons of all runs; none if there is no file. ConfigError for a file of another form."""
    return {compared.key: compared for run in _runs(path) for compared in map(_compared, run["rows"])}


def with_compared(study: Trials, compared: Iterable[Compared]) -> Trials:
    """A study with its compared choices among the trials: their ratio times its tuned time."""
    tuned = hash_of_schedule(study.entry.tuned_schedule)
    times_us, rows = dict(study.times_us), dict(zip(study.times_us, study.rows, strict=True))
    features = Features(study.spec, study.graph_class)
    found = {one.schedule: one for one in compared if (one.study, one.tuned) == (name_of(study.entry), tuned)}
    for schedule, one in found.items():
        times_us[schedule] = one.ratio * study.tuned_us
        rows[schedule] = np.array(features.of(study.plan(schedule)))
    ordered = np.array([rows[schedule] for schedule in times_us])
    return dataclasses.replace(study, times_us=times_us, rows=ordered, compared=frozenset(found))


def store_comparisons(path: Path, slug: str, run: Mapping[str, Any], found: Iterable[Compared]) -> None:
    """Add comparisons to a run, replacing earlier ones of the same choices; the file is replaced as a whole.

    run: what describes it (``date``, ``software``, ...), equal for all calls of one run.
    """
    new = {compared.key: compared for compared in found}
    runs = _runs(path)
    kept = [known | {"rows": [row for row in known["rows"] if _compared(row).key not in new]} for known in runs]
    same = next((known for known in kept if {**known, "rows": 0} == {**run, "rows": 0}), None)
    if same is None:
        same = {**run, "rows": []}
        kept.append(same)
    # In the order of COLUMNS; the ratio is there to be read.
    same["rows"] += [
        [*one.study, knobs_of(one.schedule), one.tuned, round(one.ratio, 4), one.chosen_us, one.tuned_us, one.rules_us]
        for one in new.values()
    ]
    head = f'"record": {json.dumps(RECORD)},\n"device": {json.dumps(slug)},\n"columns": {json.dumps(COLUMNS)}'
    texts = ",".join(_run_text(known) for known in kept if known["rows"])
    replace_file(path, f'{{\n{head},\n"runs": [\n{texts}]\n}}\n')


def _runs(path: Path) -> list[dict[str, Any]]:
    try:
        data = parse_json(path.read_bytes())
        if data["record"] != RECORD or tuple(data["columns"]) != COLUMNS:
            raise ValueError(f"record {data['record']!r} with columns {data['columns']}; expected {COLUMNS}")
        for run in data["runs"]:
            list(map(_compared, run["rows"]))
        return [dict(run) for run in data["runs"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, EquituneError) as error:
        raise ConfigError(f"{path} is no file of measured choices ({cause_of(error)}); move it away") from error


def _compared(row: list[Any]) -> Compared:
    study, (knobs, tuned, _, chosen_us, tuned_us, rules_us) = row[: len(NAMES)], row[len(NAMES) :]
    if min(chosen_us, tuned_us) <= 0:
        raise ValueError(f"times are {chosen_us!r} and {tuned_us!r}; expected positive microseconds")
    return Compared(tuple(study), schedule_of(knobs), tuned, chosen_us, tuned_us, rules_us)


def _run_text(run: dict[str, Any]) -> str:
    """A line for each row."""
    rows = ",\n".join(json.dumps(row, separators=(",", ":"), allow_nan=False) for row in run["rows"])
    told = json.dumps({name: value for name, value in run.items() if name != "rows"})
    return f'{told[:-1]}, "rows": [\n{rows}\n]}}\n'
