"""Replay samplers on a record, without a device: how many trials does each take to come near the best schedule?

From a :class:`Record` it computes the best time after each trial, for every sampler and seed. The search is the tuner's
own (:func:`autotune.search.loop.search` with a :class:`Study`), so pending proposals, constraints, pruning and starting
points are as on the device. Only compilation and timing come from the record.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.database.store import replace_file
from autotune.errors import ConfigError, unknown_name
from autotune.measure.trial import Outcome
from autotune.replay.recorded import Record
from autotune.search.loop import Compiled, search
from autotune.search.pruning import why_hopeless
from autotune.search.samplers import proposals_ahead
from autotune.search.study import Study
from kernelgen.errors import CompileError
from kernelgen.kernels.knobs import Knobs

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

    def measure(schedule: Knobs, best_us: float | None) -> Outcome:
        return _outcome(record.space.lines[schedule.key])

    with Study(record.space, record.header["study"], sampler=sampler, seed=seed, starts=starts) as study:
        end = search(
            study,
            prepare,
            measure,
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
        if sampler not in SEEDS:
            raise ConfigError(unknown_name("sampler", sampler, SEEDS))
        count = 1 if sampler == "default" else seeds or SEEDS[sampler]
        options: dict[str, Any] = {"ahead": ahead or proposals_ahead(sampler, compilers), "prune": prune}
        runs = [run(record, sampler, seed, trials, **options, starts=starts) for seed in range(count)]
        near = {f"{near:.2f}": [trials_to(best, (1 + near) * record.best_us) for best in runs] for near in NEAR}
        return {"trials_to": near, "curve": _median_curve(runs, record.best_us)}

    found = {sampler: searched(sampler) for sampler in samplers}
    moved = {name: {"starts": len(starts), **searched(OWN, starts)} for name, starts in transfers.items() if starts}
    facts = (
        "study",
        "label",
        "problem",
        "operation",
        "direction",
        "dtype",
        "layout",
        "graph",
        "graph_class",
        "generator",
    )
    return {
        "record": record.path.stem,
        **{key: record.header[key] for key in facts},
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
    best = record.measured[0]
    facts, lines = record.space.spec.facts, record.space.lines.values()
    skipped = [line for line in lines if why_hopeless(line["resources"], best["resources"], facts)]
    times = [line["time_us"] for line in skipped if line["state"] == "ok"]
    return {"skipped": len(skipped), "fastest_skipped": round(min(times) / best["time_us"], 4) if times else None}


def write_replay(results_dir: Path, data: Mapping[str, Any]) -> Path:
    """Write ``results/replay/RECORD.json``, replacing the whole file."""
    path = Path(results_dir) / "replay" / f"{data['record']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
    return path


def _median_curve(runs: Sequence[Sequence[float]], best_us: float) -> list[float | None]:
    """Median over runs of best so far over best of all; a finished run keeps its last value."""
    columns = itertools.zip_longest(*runs)
    curve: list[float | None] = []
    last = [math.inf] * len(runs)
    for column in columns:
        last = [before if now is None else now for before, now in zip(last, column, strict=True)]
        median = statistics.median(last)
        curve.append(None if math.isinf(median) else round(median / best_us, 4))
    return curve


def _outcome(line: Mapping[str, Any]) -> Outcome:
    return Outcome(
        line["state"],
        line["reason"],
        line["time_us"],
        line["q1_us"],
        line["q3_us"],
        cut=line["cut"],
        errors=line["errors"],
        resources=line["resources"],
    )


def replay_table(data: Mapping[str, Any]) -> Any:
    """A table for the terminal: trials to reach each distance from the best, as median over seeds and range."""
    from rich.table import Table

    title = f"{data['label']} {data['direction']}: {data['space_size']} schedules, best {data['best_us']:.4g} us"
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
