"""Publish search results as database entries, with times from a new comparison.

The minimum of many noisy measurements is biased, so trial times are not published. The best three schedules of each
direction are compared with the default and the peers in a separate process (see ``comparison``). The best there, by the
objective of the studies, is stored if it beats the default beyond the noise; otherwise the default is stored.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from autotune.compare.comparison import ComparisonResult, ComparisonSetting, Result, run_comparison
from autotune.database.entry import TIMES, Entry
from autotune.database.maintenance import (
    driver_version,
    environment_hash,
    hash_of_entry,
    hash_of_text,
    now_text,
    software_versions,
    source_text,
    stale_entries,
)
from autotune.database.store import Database, Table, load_table
from autotune.errors import ConfigError, WorkerError
from autotune.measure.timing import FASTER, LEVEL, SAME, SLOWER, ratio_interval, verdict
from autotune.measure.trial import Outcome, TrialJob, TrialSetting, run_trial
from autotune.measure.worker import Worker
from autotune.paths import typed
from autotune.search.study import Study
from autotune.text import NOT_COMPARED, direction_name, interval_text
from autotune.tune.settings import Settings
from autotune.workload.config import find_problem, load_graphs
from autotune.workload.graphs import GraphSpec, build_graph
from autotune.workload.known_kinds import kernel_kind
from autotune.workload.objective import FIGURES, TIME, Objective
from autotune.workload.workload import Workload, moved_bytes
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import EquituneError
from kernelgen.kernels.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION

CANDIDATES = 3
# Rounds in which the energy of a call is measured: they give an interval of two figures at the level of three others.
ENERGY_ROUNDS = 10
# A search of fewer trials than the first has tried little more than what is known already; the second is a good number.
ENOUGH_TRIALS, GOOD_TRIALS = 12, 40


def publish(
    workload: Workload,
    studies: Mapping[str, Study],
    settings: Settings,
    database: Database,
    *,
    deadline: float | None = None,
    worker: Worker | None = None,
    on_step: Callable[[str], None] = lambda text: None,
    on_failure: Callable[[str], None] = lambda text: None,
) -> list[Entry]:
    """Compare the best of ``studies`` (by direction) with the default and the peers; store and return the entries.

    The settings say which peers; if they leave that open, those for which the time until ``deadline`` suffices.
    deadline, worker: as for ``run_comparison``, a process that took no part in the search, by default a new one. A
    direction in which no schedule passed gets no entry, and :func:`why_kept` keeps some published ones. Raises
    WorkerError if the comparison itself cannot run.
    """
    ours = contenders({direction: study for direction, study in studies.items() if study.ranking})
    passes = tuple(ours["default"])
    if not passes:
        return []
    with_peers, objective, facts = settings.with_peers, settings.objective, settings.facts
    peers = None if with_peers in (None, True) else tuple(with_peers or ())  # type: ignore[arg-type]
    setting = ComparisonSetting(workload, settings.device, peers)
    candidates = [name for name in ours if name != "default"]
    how: dict[str, Any] = {"seconds_each": settings.seconds_each, "on_step": on_step, "worker": worker}
    how["deadline"] = deadline
    how["energy"] = ENERGY_ROUNDS if "energy" in objective.figures else 0
    comparison = run_comparison(setting, passes, ours, optional=candidates, asked=bool(with_peers), **how)
    rows = {name: row.values() for name, row in comparison.results.items() if name in candidates}
    left_out = [name for name, row in rows.items() if all(each.error.startswith(NOT_COMPARED) for each in row)]
    if left_out:
        on_failure(f"{workload.label}: {', '.join(left_out)} not compared, the time was over")
    if with_peers and (cost := seconds_by_peer(comparison, ours)):
        each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in cost.items())
        on_failure(f"{workload.label}: the peers took {sum(cost.values()):.0f} s ({each})")
    entries, software, environment = [], software_versions(facts), environment_hash(facts)
    for direction in passes:
        study = studies[direction]
        file, states = study.path.relative_to(settings.results_dir), [line["state"] for line in study.finished.values()]
        trials = {"file": file.as_posix(), "count": len(states), "ok": states.count("ok"), "sampler": study.sampler}
        trials |= {"seed": settings.seed, **({"ended": study.ended} if study.ended else {})}
        entry = entry_of(workload, direction, facts, ours, comparison, trials, software, environment, objective)
        if entry is None:
            why = comparison.results["default"][direction].error or f"the default has no figure of {objective}"
            on_failure(f"{workload.label} {direction}: not published, {why}")
            continue
        if why := why_kept(database, entry, software, driver_version(facts)):
            on_failure(f"{workload.label} {direction}: {why}")
            continue
        database.put(entry)
        entries.append(entry)
    database.save()
    return entries


def seconds_by_peer(comparison: ComparisonResult, ours: Collection[str]) -> dict[str, float]:
    """What preparing and warming up each peer took; sampling is shared, and comes on top."""
    peers = [name for name in comparison.results if name not in ours]
    seconds = comparison.seconds.items()
    return {name: sum(taken for part, taken in seconds if name in part.split()) for name in peers}


def why_kept(database: Database, new: Entry, software: Mapping[str, str], driver: str | None) -> str:
    """Why the published entry stays, in words; empty if there is none, or ``new`` may replace it.

    It stays if it rests on more trials, is not stale, and the interval of its gain is not below that of ``new``. One
    of another objective does not: the user asks for this one.
    """
    old = database.get(new.identity)
    if old is None or old.trials.get("count", 0) <= new.trials["count"] or old.failed_check:
        return ""
    if old.objective != new.objective:
        return ""
    if new.gain and new.gain["low"] > (old.gain.get("high", math.inf) if _is_faster(old) else 1.0):
        return ""
    if stale_entries(Table.of(load_table(database.path).device, [old]), software, driver):
        return ""
    return (
        f"the published entry of {old.trials['count']} trials ({old.label}) stays: the new one rests on "
        f"{new.trials['count']}, and is not faster by its interval"
    )


def _is_faster(entry: Entry) -> bool:
    """Whether another schedule than the default was published; older entries have no ``gain`` then either."""
    return bool(entry.gain) or entry.schedule != entry.default["schedule"]


def contenders(studies: Mapping[str, Study]) -> dict[str, dict[str, Knobs]]:
    """The default and the best other schedules of each direction, by rank; of a front one more."""
    ours: dict[str, dict[str, Knobs]] = {"default": {name: study.space.default for name, study in studies.items()}}
    for direction, study in studies.items():
        ranked = [study.schedule_of(line) for line in study.ranking]
        others = [schedule for schedule in ranked if schedule != study.space.default]
        for rank, schedule in enumerate(others[: CANDIDATES + study.objective.is_front], start=1):
            ours.setdefault(f"candidate {rank}", {})[direction] = schedule
    return ours


def entry_of(
    workload: Workload,
    direction: str,
    facts: DeviceFacts,
    ours: Mapping[str, Mapping[str, Knobs]],
    comparison: ComparisonResult,
    trials: Mapping[str, Any],
    software: Mapping[str, str],
    environment: str,
    objective: Objective = TIME,
) -> Entry | None:
    """The database entry of one direction; None if the default failed, because every entry is relative to it.

    environment: hash of all versions that a figure depends on (``software`` and the driver).
    """
    results = {name: row[direction] for name, row in comparison.results.items() if direction in row}
    measured = [name for name, r in results.items() if name in ours and objective.values(r.figures) is not None]
    if "default" not in measured:
        return None
    winner, gain, runner_up = winner_of(results, measured, objective)

    front = objective.front({"name": name, **results[name].figures} for name in measured) if objective.is_front else []

    def known_of(name: str) -> dict[str, Any]:
        return {"schedule": ours[name][direction].to_dict(), **_figures(results[name], objective)}

    moved = moved_bytes(workload, direction)
    return Entry(
        **workload.facts(direction),
        schedule=ours[winner][direction].to_dict(),
        **_figures(results[winner], objective),  # type: ignore[arg-type]
        default=known_of("default"),
        peers={name: _peer(result, results[winner], objective) for name, result in results.items() if name not in ours},
        errors=comparison.errors[winner][direction],
        tolerance=workload.tolerance,
        bytes=moved,
        copy_bandwidth=comparison.copy_bandwidth,
        floor_us=moved / comparison.copy_bandwidth * 1e6,
        resources=comparison.resources[winner][direction],
        generator=GENERATOR_VERSION,
        software=software,
        date=now_text(),
        trials=trials,
        gain=gain,
        runner_up=runner_up,
        conditions=timing.conditions if (timing := results[winner].timing) is not None else {},
        certificate=comparison.certificates[winner][direction] | {"environment": environment},
        source=hash_of_text(source_text(workload.spec(direction, facts), ours[winner][direction])),
        objective=str(objective),
        front={line["name"]: known_of(line["name"]) for line in front},
    )


def winner_of(
    results: Mapping[str, Result], ours: Iterable[str], objective: Objective = TIME
) -> tuple[str, dict[str, float], dict[str, float]]:
    """Our best contender that beats the default beyond the noise, else the default; with ``gain`` and ``runner_up``.

    ours: names with all figures of the objective. gain: the default's product of figures over the winner's (a speed-up,
    for time), with the 95% interval; empty if the default won. runner_up: then that of the best other. So that the
    default is beaten by noise in at most one of forty comparisons, each of several others has to beat it at a higher
    level. Of a front, the winner also has no figure that is worse than the default's by its interval.
    """

    def product(name: str, by: Objective = objective) -> float:
        return by.product(by.figures_of(results[name].figures) or ())

    others = sorted(set(ours) - {"default"}, key=lambda name: (product(name), product(name, TIME), name))
    gains = []
    for name in others:
        pair = results[name], results["default"]
        # Equal memory is decided by time.
        by = TIME if objective.figures == ("memory",) and product(name) == product("default") else objective
        intervals = _intervals(*pair, by, LEVEL)
        low, high = map(by.product, zip(*intervals, strict=True))
        gains.append({"ratio": product("default", by) / product(name, by), "low": low, "high": high, "level": LEVEL})
        strictly = by.product(low for low, _ in _intervals(*pair, by, 1 - (1 - LEVEL) / len(others)))
        is_worse = objective.is_front and SLOWER in map(verdict, intervals)
        if low > 1.0 and strictly > 1.0 and not is_worse:
            return name, gains[-1], {}
    return "default", {}, {} if not gains or math.isinf(gains[0]["high"]) else gains[0]


def _intervals(ours: Result, theirs: Result, objective: Objective, level: float) -> list[tuple[float, float]]:
    """Of the ratio of theirs to ours, by figure; all hold together at ``level``. Bytes are the same in each call."""
    noisy = sum(name != "memory" for name in objective.figures)
    each = level if noisy < 2 else 1 - (1 - level) / noisy
    found = []
    for name in objective.figures:
        if name == "memory":
            ratio = max(1, theirs.memory_bytes or 0) / max(1, ours.memory_bytes or 0)
            found.append((ratio, ratio))
        else:
            found.append(ratio_interval(ours.samples(name), theirs.samples(name), each, paired=True))
    return found


def verdict_of(entry: Entry) -> str:
    """Whether the published schedule beats the default by its objective, or the default is confirmed, by intervals.

    Without an interval, after too few rounds or in an older entry, it is unclear.
    """
    if entry.gain and entry.objective == "memory" and entry.memory_bytes == entry.default[FIGURES["memory"]]:
        return f"{FASTER} than the default in as much memory"
    if entry.gain:
        return f"better than the default{entry.by}" if entry.by else f"{FASTER} than the default"
    if entry.schedule != entry.default["schedule"]:
        return f"{FASTER} than the default by the medians; this older entry has no interval"
    second = entry.runner_up
    if not second and entry.trials.get("ok", 0) < 2:
        return "only the default was tried"
    is_clear = bool(second) and verdict((second["low"], second["high"])) in (SAME, SLOWER)
    return f"default confirmed{entry.by}" if is_clear else f"unclear{entry.by}, so the default stays"


def why_unfinished(entry: Entry, trials: int | None = None) -> str:
    """Why a search of the entry's kernel should go on, in words; empty if it is done.

    trials: how many are wanted now, if the user says so. A kernel is done if its search had enough trials, or ended by
    itself, and its verdict is clear or rests on a good number of trials of a machine at rest. An entry of another
    generator is done: ``equitune db stale`` says whether it holds.
    """
    if entry.generator != GENERATOR_VERSION:
        return ""
    count = entry.trials.get("count", 0)
    unclear = bool(entry.runner_up) and verdict_of(entry).startswith("unclear")
    if unclear and entry.conditions.get("noise"):
        return "unclear, not at rest"
    ended = entry.trials.get("ended") or "time"
    wanted = GOOD_TRIALS if unclear else ENOUGH_TRIALS
    if trials is not None:
        few = count < trials and ended not in ("patience", "exhausted")
    else:
        few = count < wanted and ended in ("time", "interrupted")
    return f"{'unclear' if unclear else 'too few trials'} ({count})" if few else ""


def gained(entries: Iterable[Entry]) -> str:
    """What was gained over the default, in one line: a speed-up with its interval, or none."""
    entries = list(entries)
    several = len({entry.label for entry in entries}) > 1
    parts: dict[str, list[str]] = {}
    for entry in entries:
        name = f"{entry.label} {direction_name(entry.direction)}" if several else direction_name(entry.direction)
        parts.setdefault(verdict_of(entry), []).append(f"{name} {interval_text(entry.gain)}" if entry.gain else name)
    lines = [f"{what}: {', '.join(names)}" for what, names in parts.items()]
    noise = [str(entry.conditions["noise"]) for entry in entries if entry.conditions.get("noise")]
    return "; ".join([*lines, *[f"not at rest: {text}; compare again later" for text in noise[-1:]]])


def _peer(theirs: Result, ours: Result, objective: Objective) -> dict[str, Any]:
    """A peer's times, with the interval ``low`` to ``high`` of their ratio to ours, or how many samples are too few."""
    if theirs.timing is None or ours.timing is None:
        return theirs.summary()
    low, high = ratio_interval(ours.timing.samples_us, theirs.timing.samples_us, paired=True)
    return (
        theirs.summary()
        | _besides_time(theirs, objective)
        | ({"low": low, "high": high} if math.isfinite(high) else {"samples": len(theirs.timing.samples_us)})
    )


def _figures(result: Result, objective: Objective) -> dict[str, float]:
    summary = result.summary()
    return {name: summary[name] for name in TIMES} | _besides_time(result, objective)


def _besides_time(result: Result, objective: Objective) -> dict[str, float]:
    """What the objective asks for besides time, by the keys of records, as far as it was measured."""
    keys = [FIGURES[name] for name in objective.figures if name != "time"]
    return {key: result.figures[key] for key in keys if key in result.figures}


# Check entries again on this machine (``equitune db verify``), and note the verdicts in the entries.
#
# A missing certificate is filled in: one is measured with each check.
#
# Lookup no longer loads an entry whose kernel fails to compile, fails to run or gives wrong values. An entry whose time
# has drifted is still loaded, and the report shows both times.

# A time has drifted if it differs by more than this factor either way.
DRIFT = 1.15
LIMIT_S = 120.0


@dataclass(frozen=True)
class Verdict:
    """``state``: ``ok``, ``drifted``, ``skipped`` (graph unknown here), or the state of a failed trial.

    ratio: time now over the entry's; None if nothing was timed. certificate: a new one, if the entry had none or a
    wrong one.
    """

    entry: Entry
    state: str
    reason: str = ""
    time_us: float | None = None
    ratio: float | None = None
    certificate: Mapping[str, Any] | None = None

    @property
    def noted(self) -> Entry:
        """The entry with this verdict noted, or unchanged if it was skipped."""
        if self.state == "skipped":
            return self.entry
        found = {"date": now_text(), "state": self.state, "reason": self.reason, "time_us": self.time_us}
        certificate = self.entry.certificate if self.certificate is None else self.certificate
        checked = {name: value for name, value in found.items() if value}
        return dataclasses.replace(self.entry, checked=checked, certificate=certificate)


def workload_of(
    entry: Entry, directions: tuple[str, ...], graphs: Mapping[str, GraphSpec], by_size: bool = False
) -> Workload:
    """The workload of an entry; ConfigError if its graph is unknown or has changed.

    by_size: an unknown graph, such as that of a user's model, is replaced by a random one of its size.
    """
    name = entry.graph["name"]
    if name not in graphs and not by_size:
        raise ConfigError(f"graph {name!r} is not known here; expected it in configs/graphs.toml")
    problem = find_problem(entry.problem)
    sizes = entry.graph["edges"], entry.graph["nodes"]
    graph = graphs.get(name) or GraphSpec(name, kernel_kind(entry.operation).graph_of_size(*sizes))
    workload = Workload(
        *(entry.label, problem, entry.operation, graph, entry.dtype, entry.layout, directions), entry.deterministic
    )
    built = build_graph(graph)
    if name in graphs and (built.num_edges, built.num_nodes) != sizes:
        raise ConfigError(f"graph {name!r} has {built.num_edges} edges here and had {entry.graph['edges']}")
    return workload


def workloads_of(
    entries: Iterable[Entry], by_size: bool = False
) -> Iterator[tuple[list[Entry], Workload | EquituneError]]:
    """Groups of entries that differ in direction only, with their workload or the reason why there is none.

    by_size: as for :func:`workload_of`.
    """
    graphs = load_graphs()

    def kind(entry: Entry) -> tuple[Any, ...]:
        return (*entry.identity[:2], *entry.identity[3:], entry.graph["name"])

    for _, group in itertools.groupby(sorted(entries, key=kind), key=kind):
        same = list(group)
        try:
            yield same, workload_of(same[0], tuple(entry.direction for entry in same), graphs, by_size)
        except EquituneError as error:
            yield same, error


def is_certified(entry: Entry) -> bool:
    """Whether the entry has a whole certificate within its tolerance."""
    return "equivariance" in entry.certificate and not entry.wrong_record


def recheck(
    entries: Iterable[Entry],
    device: str,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    times: bool = True,
) -> list[Verdict]:
    """Check, certify and time each entry's schedule in a disposable process; a verdict for each, failures included.

    times: False takes no times, which is most of the work.
    """
    verdicts: list[Verdict] = []
    environment = environment_hash(device_facts(device))

    def tell(verdict: Verdict) -> None:
        on_verdict(verdict)
        verdicts.append(verdict)

    with ExitStack() as stack:
        worker: Worker | None = None
        for same, workload in workloads_of(entries):
            if isinstance(workload, EquituneError):
                for entry in same:
                    tell(Verdict(entry, "skipped", str(workload)))
                continue
            setting = TrialSetting(workload, device)
            if worker is None:
                worker = stack.enter_context(Worker(setting))
            else:
                worker.reopen(setting)
            for entry in same:
                tell(_verdict(entry, worker, device, environment, times))
    return verdicts


def _verdict(entry: Entry, worker: Worker, device: str, environment: str, times: bool) -> Verdict:
    job = TrialJob(entry.direction, entry.tuned_schedule, max_seconds=1.0 if times else None, certifies=True)
    try:
        outcome: Outcome = run_trial(worker, job, LIMIT_S)
        if outcome.ok and entry.source and hash_of_entry(entry, device_facts(device)) != entry.source:
            return Verdict(entry, "skipped", f"its kernel's source is another now: {typed('db retune')}")
    except (WorkerError, EquituneError) as error:
        return Verdict(entry, "skipped", str(error))
    if not outcome.ok:
        return Verdict(entry, outcome.state, outcome.reason)
    new = None if is_certified(entry) else {**outcome.certificate, "environment": environment}
    wrong = (entry if new is None else dataclasses.replace(entry, certificate=new)).wrong_record
    if wrong:
        return Verdict(entry, "wrong", f"recorded: {wrong}", outcome.time_us, None, new)
    ratio = None if outcome.time_us is None else outcome.time_us / entry.time_us
    if ratio is not None and not 1 / DRIFT <= ratio <= DRIFT:
        reason = f"takes {ratio:.2f} times as long as recorded"
        return Verdict(entry, "drifted", reason, outcome.time_us, ratio, new)
    return Verdict(entry, "ok", "", outcome.time_us, ratio, new)
