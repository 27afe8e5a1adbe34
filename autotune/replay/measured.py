"""Measure choices that are estimates only, on the archive's GPU: each beside the tuned schedule and the rules' default.

The record of the replay has every choice with its estimate. The most expensive come first, with the other estimates of
their problem and graph, which share a process and a comparison. Each comparison is stored at once (see ``fit``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from autotune.compare.comparison import ComparisonSetting, Result, run_comparison
from autotune.compare.precompile import IdleProcess, compile_ahead, kernels_of
from autotune.database.entry import Entry
from autotune.database.maintenance import driver_version, now_text, software_versions
from autotune.database.model_of_time import schedule_of
from autotune.database.predicted import edges_for_rules
from autotune.database.store import database_path, load_table
from autotune.database.trials import SUFFIX
from autotune.errors import ConfigError, WorkerError
from autotune.measure.worker import Worker
from autotune.paths import typed
from autotune.replay import fit
from autotune.replay.untuned import DRAWN, Cost, digests, record_path
from autotune.tune.publish import workloads_of
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import EquituneError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.version import GENERATOR_VERSION

SECONDS_EACH = 0.5
# Kernels are compiled for so many choices at a time: enough for all cores, few that the limit of time makes useless.
TOGETHER = 32
OURS = ("tuned", "chosen", "rules")
LOST = Result(error="no result")


@dataclass(frozen=True)
class Choice:
    """The schedule chosen for a held-out study, and its cost by the record. entry: what was tuned for the study."""

    entry: Entry
    schedule: CudaSchedule
    cost: Cost


@dataclass(frozen=True)
class Group:
    """Choices of one workload, which are compared in one process; each has another direction."""

    workload: Workload
    choices: tuple[Choice, ...]

    def contenders(self, facts: DeviceFacts) -> dict[str, dict[str, Knobs]]:
        """Schedules by contender (``OURS``) and direction."""
        found: dict[str, dict[str, Knobs]] = {name: {} for name in OURS}
        for one in self.choices:
            spec = fit.spec_of(one.entry, facts)
            assert spec is not None
            rules = default_schedule(spec, edges_for_rules(facts, one.entry.parsed_graph_class))
            for name, schedule in zip(OURS, (one.entry.tuned_schedule, one.schedule, rules), strict=True):
                found[name][one.entry.direction] = schedule
        return found


def read_choices(archive: Path, results: Path) -> list[Choice]:
    """The choices of a replay's record, with the costs that comparisons gave since.

    archive: ``results/trials/DEVICE.jsonl.gz``. ConfigError if the record is none of this archive and database.
    """
    slug = archive.name.removesuffix(SUFFIX)
    path, again = record_path(results, slug), f"run first: {typed(f'replay defaults {archive}')}"
    if not (archive.is_file() and path.is_file()):
        raise ConfigError(f"{archive} or its record {path} does not exist; {again}")
    database = database_path(results, slug)
    tables = (load_table(database_path(folder, slug)) for folder in (results, results / DRAWN))
    known = (entry for table in tables for entry in table.by_identity.values())
    entries = {fit.name_of(entry): entry for entry in known if not entry.deterministic}
    compared = fit.read_comparisons(fit.comparisons_path(results, slug))
    try:
        record = parse_json(path.read_bytes())
        told, here = (record["archive"], record["drawn"]), digests(archive, results)
        if told != here:
            raise ValueError(f"it is of the trials {told}, and these are {here}")
        choices = []
        for row in record["rows"]:
            entry, schedule = entries[tuple(row[:6])], schedule_of(row[9])
            found = compared.get(fit.key_of(entry, schedule))
            choices.append(Choice(entry, schedule, Cost(found.ratio, True, True) if found else Cost(row[7], row[8])))
        return choices
    except (KeyError, IndexError, ValueError, TypeError, EquituneError) as error:
        text = f"{path} has no choices for {archive} and {database} ({cause_of(error)}); {again}"
        raise ConfigError(text) from error


def groups_of(choices: Sequence[Choice], say: Callable[[str], None]) -> list[Group]:
    """Estimates by workload, the group with the most expensive one first; those without their graph are told."""
    estimates = {fit.name_of(one.entry): one for one in choices if not one.cost.measured}
    groups = []
    for same, workload in workloads_of(one.entry for one in estimates.values()):
        skipped = f"{same[0].label}: estimates skipped: {len(same)}, "
        if isinstance(workload, EquituneError):
            say(f"{skipped}{workload}")
        elif (found := workload.graph_class().text) != same[0].graph_class:
            say(f"{skipped}graph {workload.graph.name!r} has class {found} here")
        else:
            groups.append(Group(workload, tuple(estimates[fit.name_of(entry)] for entry in same)))
    return sorted(groups, key=lambda group: max(one.cost.ratio for one in group.choices), reverse=True)


def measure_choices(
    archive: Path, results: Path, device: str, seconds: float, say: Callable[[str], None]
) -> tuple[list[Choice], int]:
    """Measure for about so many seconds; returns all choices with what is known now, and how many failed.

    No comparison begins after that time. Raises ConfigError for another device or another archive than the record's.
    """
    end, slug = monotonic() + seconds, archive.name.removesuffix(SUFFIX)
    facts = device_facts(device)
    if facts.slug != slug or facts.backend != "cuda":
        kind = "" if facts.backend == "cuda" else ", which is no GPU"
        raise ConfigError(f"--measure on {device} ({facts.name}){kind}; expected the GPU of the archive, {slug}")
    groups = groups_of(read_choices(archive, results), say)
    run: dict[str, Any] = {"date": now_text(), "generator": GENERATOR_VERSION, "software": software_versions(facts)}
    run["driver"] = driver_version(facts)
    failed = 0
    for group, found in _compare_each(groups, facts, device, end, say):
        fit.store_comparisons(fit.comparisons_path(results, slug), slug, run, found)
        failed += len(group.choices) - len(found)
    return read_choices(archive, results), failed


def _compare_each(
    groups: Sequence[Group], facts: DeviceFacts, device: str, end: float, say: Callable[[str], None]
) -> Iterator[tuple[Group, list[fit.Compared]]]:
    """Compile for some groups on all cores, compare them one after another, and so on until the time has come."""
    if not groups:
        return
    with Worker(IdleProcess(groups[0].workload.problem, device)) as worker:
        worker.launch()
        before = itertools.accumulate((len(group.choices) for group in groups), initial=0)
        numbered = zip((count // TOGETHER for count in before), groups, strict=False)
        for _, some in itertools.groupby(numbered, key=lambda pair: pair[0]):
            together = [group for _, group in some]
            if monotonic() >= end:
                return
            _compile(together, facts, device, say)
            for group in together:
                if monotonic() >= end:
                    return
                yield group, _compare(group, facts, device, worker, say)


def _compile(groups: Sequence[Group], facts: DeviceFacts, device: str, say: Callable[[str], None]) -> None:
    specs: list[Any] = []
    for group in groups:
        for schedules in group.contenders(facts).values():
            for direction, schedule in schedules.items():
                try:
                    specs += kernels_of(group.workload, [{direction: schedule}], [direction], device)
                except EquituneError:
                    continue  # the comparison says why
    begin = monotonic()
    compile_ahead(specs, device, say)
    say(f"compiled in {monotonic() - begin:.0f} s")


def _compare(
    group: Group, facts: DeviceFacts, device: str, worker: Worker, say: Callable[[str], None]
) -> list[fit.Compared]:
    """The choices for which both schedules have a time; failures are told."""
    ours, setting = group.contenders(facts), ComparisonSetting(group.workload, device, ())
    passes = tuple(one.entry.direction for one in group.choices)
    try:
        compared = run_comparison(setting, passes, ours, seconds_each=SECONDS_EACH, worker=worker)
    except WorkerError as error:
        worker.close()
        say(f"{group.workload.label} on {group.workload.graph.name}: not compared, {error}")
        return []
    found = []
    for one in group.choices:
        results = {name: compared.results.get(name, {}).get(one.entry.direction, LOST) for name in OURS}
        times = {name: result.timing.time_us for name, result in results.items() if result.timing}
        shown = [f"{key} {times[key]:.1f} us" if key in times else f"{key}: {results[key].error}" for key in results]
        text = f"{' '.join(fit.name_of(one.entry))}: {', '.join(shown)}"
        if {"tuned", "chosen"} <= times.keys():
            text += f"; {times['chosen'] / times['tuned']:.3f}, estimated {one.cost.ratio:.3f}"
            key = fit.key_of(one.entry, one.schedule)
            found.append(fit.Compared(*key, times["chosen"], times["tuned"], times.get("rules")))
        say(text)
    return found
