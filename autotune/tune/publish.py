"""Publish search results as database entries, with times from a new comparison.

The minimum of many noisy measurements is biased, so trial times are not published. The best three schedules of each
direction are compared with the default and the peers in a separate process (see ``comparison``). The fastest there is
stored if it beats the default beyond the noise; otherwise the default is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.compare.comparison import ComparisonResult, Result, run_comparison
from autotune.compare.comparison_worker import ComparisonSetting
from autotune.database.entry import Entry
from autotune.database.maintenance import environment_hash, hash_of_text, now_text, software_versions, source_text
from autotune.database.store import Database
from autotune.measure.timing import LEVEL, ratio_interval
from autotune.measure.worker import Worker
from autotune.search.study import Study
from autotune.workload.graphs import build_graph
from autotune.workload.workload import Workload, moved_bytes
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.kernels.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION

CANDIDATES = 3


def publish(
    workload: Workload,
    studies: Mapping[str, Study],
    device: str,
    database: Database,
    results_dir: Path,
    seed: int,
    *,
    with_peers: bool = True,
    deadline: float | None = None,
    seconds_each: float = 2.0,
    worker: Worker | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Entry]:
    """Compare the best of ``studies`` (by direction) with the default and the peers; store and return the entries.

    deadline: as for ``run_comparison``. worker: also as for that, one that took no part in the search; by default a new
    one. A direction in which no schedule passed gets no entry. Raises WorkerError if the comparison itself cannot run.
    """
    ours = contenders({direction: study for direction, study in studies.items() if study.ranking})
    passes = tuple(ours["default"])
    if not passes:
        return []
    setting = ComparisonSetting(workload, device, None if with_peers else ())
    how: dict[str, Any] = {"seconds_each": seconds_each, "on_step": on_step, "worker": worker, "deadline": deadline}
    comparison = run_comparison(setting, passes, ours, **how)
    entries, facts = [], device_facts(device)
    software = software_versions(facts)
    environment = environment_hash(facts)
    for direction in passes:
        trials = trials_record(studies[direction], results_dir, seed)
        entry = entry_of(workload, direction, facts, ours, comparison, trials, software, environment)
        if entry is None:
            on_step(f"{workload.label} {direction}: not published, {comparison.results['default'][direction].error}")
            continue
        database.put(entry)
        entries.append(entry)
    database.save()
    return entries


def contenders(studies: Mapping[str, Study]) -> dict[str, dict[str, Knobs]]:
    """The default and the best other schedules of each direction, by rank."""
    ours: dict[str, dict[str, Knobs]] = {"default": {name: study.space.default for name, study in studies.items()}}
    for direction, study in studies.items():
        ranked = [study.schedule_of(line) for line in study.ranking]
        others = [schedule for schedule in ranked if schedule != study.space.default]
        for rank, schedule in enumerate(others[:CANDIDATES], start=1):
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
) -> Entry | None:
    """The database entry of one direction; None if the default failed, because every entry is relative to it.

    environment: hash of all versions that a figure depends on (``software`` and the driver).
    """
    results = {name: row[direction] for name, row in comparison.results.items() if direction in row}
    times = {name: r.timing.median_us for name, r in results.items() if name in ours and r.timing is not None}
    if "default" not in times:
        return None
    winner, gain = winner_of(results, times)
    graph = build_graph(workload.graph)
    moved = moved_bytes(workload, direction)
    return Entry(
        label=workload.label,
        problem=workload.problem.key,
        operation=workload.operation,
        direction=direction,
        dtype=workload.dtype,
        layout=workload.layout,
        graph_class=workload.graph_class().text,
        graph={"name": graph.name, "edges": graph.num_edges, "nodes": graph.num_nodes},
        schedule=ours[winner][direction].to_dict(),
        **_times(results[winner]),  # type: ignore[arg-type]
        default={"schedule": ours["default"][direction].to_dict(), **_times(results["default"])},
        peers={name: result.summary() for name, result in results.items() if name not in ours},
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
        deterministic=workload.deterministic,
        gain=gain,
        certificate=comparison.certificates[winner][direction] | {"environment": environment},
        source=hash_of_text(
            source_text(
                *(workload.problem, workload.operation, direction, workload.dtype, workload.layout),
                *(workload.deterministic, ours[winner][direction], facts),
            )
        ),
    )


def winner_of(results: Mapping[str, Result], times: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """Our fastest contender if it beats the default beyond the noise, else the default; with its ``gain``.

    ``gain``: speed-up over the default, with the 95% interval; empty if the default won.
    """
    samples = {name: timing.samples_us for name in times if (timing := results[name].timing) is not None}
    for name in sorted((name for name in times if name != "default"), key=lambda name: (times[name], name)):
        low, high = ratio_interval(samples[name], samples["default"], paired=True)
        if low > 1.0:
            return name, {"ratio": times["default"] / times[name], "low": low, "high": high, "level": LEVEL}
    return "default", {}


def trials_record(study: Study, results_dir: Path, seed: int) -> dict[str, Any]:
    ok = sum(line["state"] == "ok" for line in study.finished.values())
    file = study.path.relative_to(results_dir).as_posix()
    return {"file": file, "count": len(study.finished), "ok": ok, "sampler": study.sampler, "seed": seed}


def _times(result: Result) -> dict[str, float]:
    summary = result.summary()
    return {name: summary[name] for name in ("time_us", "q1_us", "q3_us")}
