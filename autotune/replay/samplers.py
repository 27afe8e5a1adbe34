"""Replay samplers on a record, without a device: how many trials does each take to come near the best schedule?

From a :class:`Record` it computes the best time after each trial, for every sampler and seed. The search is the tuner's
own (:func:`autotune.search.loop.search` with a :class:`Study`), so pending proposals, constraints, pruning and starting
points are as on the device. Only compilation and timing come from the record.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.database import trials as trial_archive
from autotune.database.entry import Entry
from autotune.database.store import replace_file
from autotune.errors import ConfigError, StudyError, check_known
from autotune.measure.kinds import space_of
from autotune.measure.space import Space
from autotune.measure.trial import Outcome, TrialSetting
from autotune.measure.worker import Worker
from autotune.paths import typed
from autotune.search.loop import SAMPLING_S, Compiled, Measurer, compile_ahead, search, why_hopeless
from autotune.search.samplers import proposals_ahead
from autotune.search.starting_points import starting_points
from autotune.search.study import Study, study_name
from autotune.text import time_text
from autotune.tune.settings import Progress
from autotune.workload.config import TuneConfig
from autotune.workload.known_kinds import kernel_kind, problem_from_key
from autotune.workload.workload import GraphClass, Workload
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import CompileError, EquituneError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import schedule_from_dict
from kernelgen.version import GENERATOR_VERSION

# Number of seeds per sampler; a Gaussian process takes seconds per trial, and the default order has no seed.
SEEDS = {"tpe": 20, "climb": 20, "gp": 5, "random": 20, "default": 1}
NEAR = (0.02, 0.05, 0.10)
# The tuner's sampler for spaces that it cannot search completely.
OWN = "climb"


class AtOnce(Executor):
    """Runs a submitted call at once, so that replays are reproducible."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


def run(
    record: Record,
    sampler: str,
    seed: int,
    trials: int,
    *,
    ahead: int,
    prune: bool = True,
    starts: Sequence[Knobs] = (),
) -> list[float]:
    """The best time so far (infinite before the first) after each trial of one search.

    ahead: number of pending proposals, as many as the tuner has compilers. Pruned schedules count as trials.
    """
    if sampler == "default":
        outcomes = (_outcome(record.space.lines[s.key]) for s in itertools.islice(record.space.in_order(), trials))
        timed = (o.time_us if o.ok and not o.cut and o.time_us else math.inf for o in outcomes)
        return list(itertools.accumulate(timed, min))
    best: list[float] = []

    def prepare(schedule: Knobs) -> Compiled:
        line = record.space.lines[schedule.key]
        if line["state"] == "compile":
            raise CompileError(line["reason"])
        return Compiled(line["compile_s"] or 0.0, line["resources"])

    with Study(record.space, record.header["study"], sampler=sampler, seed=seed, starts=starts) as study:
        end = search(
            study,
            prepare,
            lambda schedule, best_us: _outcome(record.space.lines[schedule.key]),
            trials=trials,
            overlap=True,
            workers=ahead,
            prune=prune,
            pool=AtOnce(),
            on_trial=lambda line: best.append(math.inf if study.best_us is None else study.best_us),
        )
    if end == "interrupted":
        raise KeyboardInterrupt
    return best


def trials_to(best: Sequence[float], target_us: float) -> int | None:
    """Number of trials until the best so far is at most ``target_us``; None if it never is."""
    return next((count for count, time_us in enumerate(best, 1) if time_us <= target_us), None)


def replay(
    record: Record,
    samplers: Iterable[str],
    trials: int,
    *,
    seeds: int | None = None,
    ahead: int | None = None,
    prune: bool = True,
    transfers: Mapping[str, Sequence[Knobs]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run the samplers; the result is JSON data (``curve``: median over seeds of best so far over best of all).

    transfers: starting points by origin; the tuner's own sampler also runs from each of them.
    """
    compilers = record.header["workers"]

    def searched(sampler: str, starts: Sequence[Knobs] = ()) -> dict[str, Any]:
        if ":" not in sampler:
            check_known("sampler", sampler, SEEDS)
        count = 1 if sampler == "default" else seeds or SEEDS.get(sampler, SEEDS["tpe"])
        options: dict[str, Any] = {"ahead": ahead or proposals_ahead(sampler, compilers), "prune": prune}
        runs = [run(record, sampler, seed, trials, **options, starts=starts) for seed in range(count)]
        near = {f"{near:.2f}": [trials_to(best, (1 + near) * record.best_us) for best in runs] for near in NEAR}
        return {"trials_to": near, "curve": _median_curve(runs, record.best_us)}

    found = {sampler: searched(sampler) for sampler in samplers}
    moved = {name: {"starts": len(starts), **searched(OWN, starts)} for name, starts in transfers.items() if starts}
    facts = "study label problem operation direction dtype layout graph graph_class generator"
    return {
        "record": record.path.stem,
        **{key: record.header[key] for key in facts.split()},
        "device": record.header["device"]["slug"],
        "space_size": len(record.space.lines),
        "best_us": record.best_us,
        "default_us": record.default_us,
        "trials": trials,
        "ahead": ahead or proposals_ahead("tpe", compilers),
        "transfer": {"sampler": OWN, "from": moved},
        "pruning": pruning(record) if prune else None,
        "samplers": found,
    }


def pruning(record: Record) -> dict[str, Any]:
    """What pruning would skip once the best is known, and the fastest skipped schedule relative to the best."""
    best, facts = record.measured[0], record.space.spec.facts
    lines = record.space.lines.values()
    skipped = [line for line in lines if why_hopeless(line["resources"], best["resources"], facts)]
    times = [line["time_us"] for line in skipped if line["state"] == "ok"]
    return {"skipped": len(skipped), "fastest_skipped": round(min(times) / best["time_us"], 4) if times else None}


def write_replay(results_dir: Path, data: Mapping[str, Any]) -> Path:
    """Write ``results/replay/RECORD.json``, replacing the whole file."""
    path = Path(results_dir) / "replay" / f"{data['record']}.json"
    replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
    return path


def _median_curve(runs: Sequence[Sequence[float]], best_us: float) -> list[float | None]:
    """Median over runs of best so far over best of all; a finished run keeps its last value."""
    curve: list[float | None] = []
    last = [math.inf] * len(runs)
    for column in itertools.zip_longest(*runs):
        last = [before if now is None else now for before, now in zip(last, column, strict=True)]
        median = statistics.median(last)
        curve.append(None if math.isinf(median) else round(median / best_us, 4))
    return curve


def _outcome(line: Mapping[str, Any]) -> Outcome:
    known = "state reason time_us q1_us q3_us cut errors resources"
    return Outcome(**{name: line[name] for name in known.split()})


def replay_table(data: Mapping[str, Any]) -> Any:
    """A table for the terminal: trials to reach each distance from the best, as median over seeds and range."""
    from rich.table import Table

    title = f"{data['label']} {data['direction']}: {data['space_size']} schedules, best {time_text(data['best_us'])}"
    skipped = data["pruning"]
    note = f"default {data['default_us'] / data['best_us']:.2f}x the best, {data['ahead']} proposals under way"
    if skipped and skipped["skipped"]:
        note += f"; pruning skips {skipped['skipped']}"
        note += f", the fastest at {skipped['fastest_skipped']:.2f}x" if skipped["fastest_skipped"] else ""
    table = Table(title=title, caption=note)
    table.add_column("sampler")
    for near in NEAR:
        table.add_column(f"trials to {near:.0%}", justify="right")
    table.add_column("best / optimum at the end", justify="right")
    moved = {f"{data['transfer']['sampler']}, from {name}": run for name, run in data["transfer"]["from"].items()}
    for name, found in (data["samplers"] | moved).items():
        cells = [_counts_text(found["trials_to"][f"{near:.2f}"], data["trials"]) for near in NEAR]
        end = found["curve"][-1] if found["curve"] else None
        table.add_row(name, *cells, "-" if end is None else f"{end:.3f}")
    return table


def _counts_text(counts: Sequence[int | None], most: int) -> str:
    """``34 (12-88)``; a seed that never reached it counts as largest."""
    known = sorted(math.inf if count is None else count for count in counts)
    median, low, high = statistics.median_high(known), known[0], known[-1]
    shown = [f">{most}" if math.isinf(count) else f"{count:.0f}" for count in (median, low, high)]
    return shown[0] if low == high else f"{shown[0]} ({shown[1]}-{shown[2]})"


# Measure every legal schedule of a restricted space, to replay samplers later without a device.
#
# A config with a ``[record.BACKEND]`` table gives ``results/record/DEVICE/STUDY.jsonl``, one file per direction of
# every workload: a header line that says what was measured, then trial records as in a search, without raw samples.
# Nothing is pruned or published. Records on the disk are not measured again.

# Fields of the header that must agree for a run to continue a record.
SAME = ("generator", "knobs", "default")


def record(config: TuneConfig, device: str, results_dir: Path, progress: Progress) -> list[Path]:
    """Measure what the config requests; returns the complete files. A rerun continues after Ctrl-C."""
    facts = device_facts(device)
    restriction = config.record.get(facts.backend)
    if restriction is None:
        raise ConfigError(
            f"{config.path} has no table [record.{facts.backend}]: choices by knob, such as path_groups = [1, 2]"
        )
    if harmonics := [workload.label for workload in config.workloads if workload.operation == "harmonics"]:
        raise ConfigError(f"a search times all schedules of harmonics already; leave out {', '.join(harmonics)}")
    complete: list[Path] = []
    for workload in config.workloads:
        with Worker(TrialSetting(workload, device)) as worker:
            worker.launch()
            for direction in workload.directions:
                space = space_of(workload, direction, facts).restricted(restriction.choices(direction))
                path = trial_archive.study_path(results_dir, facts.slug, study_name(workload, direction), "record")
                if _record(workload, direction, space, path, worker, progress) == "interrupted":
                    progress.note("interrupted; to continue, run the same command again")
                    return complete
                complete.append(path)
    return complete


def _record(workload: Workload, direction: str, space: Space, path: Path, worker: Worker, progress: Progress) -> str:
    """Fill one file; returns why it ended."""
    facts, name = space.spec.facts, study_name(workload, direction)
    workers = len(os.sched_getaffinity(0))
    measurer = Measurer(worker, direction, SAMPLING_S[facts.backend])
    _write_header(path, header(workload, direction, space, workers))
    with Study(space, name, path, sampler="brute") as study:
        progress.start(f"record {workload.label} {direction}", study, space.count_legal(space.size + 1))
        end = search(
            study,
            lambda schedule: compile_ahead(space, schedule),
            lambda schedule, best_us: dataclasses.replace(measurer(schedule, best_us), samples_us=(), clocks=None),
            overlap=facts.backend == "cuda",
            workers=workers,
            prune=False,
            on_trial=lambda line: progress.update(),
        )
        progress.stop()
    return end


def header(workload: Workload, direction: str, space: Space, workers: int) -> dict[str, Any]:
    """Everything needed to rebuild the space; ``workers``: parallel compilers, and so pending proposals."""
    facts = space.spec.facts
    return {
        "record": 1,
        "study": study_name(workload, direction),
        **workload.facts(direction),
        "device": dataclasses.asdict(facts) | {"slug": facts.slug},
        "generator": GENERATOR_VERSION,
        "knobs": {knob: list(choices) for knob, choices in space.knobs.items()},
        "default": space.default.to_dict(),
        "probes": [schedule.to_dict() for schedule in space.probes],
        "workers": workers,
    }


def _write_header(path: Path, wanted: dict[str, Any]) -> None:
    """Start the file, or check that it was started for the same space and generator."""
    lines = trial_archive.read_study(path)
    if not lines:
        trial_archive.append(path, wanted)
    elif differing := [key for key in SAME if lines[0].get(key) != wanted[key]]:
        raise StudyError(
            f"{path} was recorded with another {' and '.join(differing)}; move it away to record anew, or go on with "
            "the version and config that it was begun with"
        )


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
    """``header``: as :func:`autotune.replay.samplers.header` writes it."""

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
        head, entries = self.header, list(entries)
        others = [entry for entry in entries if entry.problem != head["problem"]]
        graphs = [
            entry for entry in entries if entry.problem == head["problem"] and entry.graph_class != head["graph_class"]
        ]
        known = {"other problems": others, "other graphs too": [*others, *graphs]}
        graph_class = GraphClass.parse(head["graph_class"])
        return {name: starting_points(self.space, graph_class, found) for name, found in known.items()}


def load_record(path: Path) -> Record:
    """The record in a file, packed or not; ConfigError if invalid, without the default schedule or without times."""
    header, *lines = trial_archive.read_study(path) or [{}]
    if header.get("record") != 1:
        raise ConfigError(f"{path} is no record; expected a file that `equitune record` wrote")
    try:
        by_key = {schedule_from_dict(line["schedule"]).key: line for line in lines}
        default = schedule_from_dict(header["default"])
        facts = DeviceFacts(**{key: value for key, value in header["device"].items() if key != "slug"})
        operation, direction, dtype, layout = (header[key] for key in ("operation", "direction", "dtype", "layout"))
        kernel = (problem_from_key(header["problem"]), operation, direction, dtype, layout)
        blank = kernel_kind(operation).spec(*kernel, facts, header["deterministic"])
        spec = dataclasses.replace(blank, schedule=default)
        knobs = MappingProxyType({knob: tuple(choices) for knob, choices in header["knobs"].items()})
        probes = tuple(schedule_from_dict(schedule) for schedule in header["probes"])
    except (EquituneError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be understood by this version: {error!r}") from error
    record = Record(path, header, RecordedSpace(spec, knobs, probes, by_key))
    if default.key not in by_key or not record.measured:
        raise ConfigError(f"{path} has no time of the default schedule; go on with `{typed('record')}`")
    return record
