"""The whole job of ``equitune tune``: a config and a device enter, searches run, database entries leave.

Each workload is searched direction by direction in one worker process, then the best of all its directions are
compared in a fresh one and published. Everything finished is on the disk at any moment: trials as lines, entries by
atomic replacement; Ctrl-C publishes what there is, and a second run goes on where the first ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from autotune import records
from autotune.config import TuneConfig, load_config
from autotune.database import Database, database_path, device_record, writable_results_dir
from autotune.entry import Entry
from autotune.jobs import TrialSetting
from autotune.neighbours import KIN, KIN_STARTS, known_entries, starting_points
from autotune.progress import Progress, time_text
from autotune.publish import driver_version, publish
from autotune.sampling import choose_sampler, proposals_ahead
from autotune.search import search
from autotune.space import Space, search_space
from autotune.study import Study
from autotune.trials import SAMPLING_S, Measurer, compile_ahead
from autotune.worker import Worker
from autotune.workload import Workload
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.schedule import schedule_from_dict
from kernelgen.version import GENERATOR_VERSION

if TYPE_CHECKING:
    import optuna
    from rich.console import Console

DEFAULT_BUDGET_S = 600.0
# Share of a workload's time that is kept for the comparison, until one has shown how long it takes.
COMPARISON_SHARE = 0.3
# Trials without a gain of 1% after which a search on a GPU ends. In the 12 studies of results/trials on an H200 (160
# to 400 trials each) 60 would have ended up to 11% above what the whole study found, 100 as well in one of them, 120
# at most 2%. At 6 to 10 trials a second that is some 15 s. On a CPU a trial takes seconds and the budget is the limit.
PATIENCE = {"cpu": None, "cuda": 120}


@dataclass(frozen=True)
class Settings:
    """What one run of the tuner was asked for, with all defaults filled in."""

    device: str
    facts: DeviceFacts
    budget_s: float | None
    trials: int | None
    sampler: str
    storage: str | optuna.storages.BaseStorage
    seed: int
    results_dir: Path
    with_peers: bool
    patience: int | None = None


def tune(
    config: TuneConfig | str | Path,
    device: str | None = None,
    budget: float | None = None,
    trials: int | None = None,
    sampler: str | None = None,
    storage: str | optuna.storages.BaseStorage | None = None,
    seed: int = 0,
    results_dir: str | Path | None = None,
    with_peers: bool = True,
    patience: int | None = None,
    console: Console | None = None,
) -> list[Entry]:
    """Tune every workload and direction of a config; returns the entries that the run published.

    budget: seconds for the whole config, comparisons with the peers included. trials: finished trials a study, those
    of earlier runs included. Where neither is given here or in the config, the budget is ten minutes. sampler: one of
    ``autotune.config.SAMPLERS``. storage: an Optuna storage or its URL that gets a copy of the trials, by default
    SQLite under ``results_dir``. with_peers: compare with the peers too, not only with the default schedule. patience:
    trials in a row without a gain of 1% that end a search; by default ``PATIENCE`` of the backend.
    """
    settings, workloads = resolve(
        config, device, budget, trials, sampler, storage, seed, results_dir, with_peers, patience
    )
    path = database_path(settings.results_dir, settings.facts.slug)
    database = Database.load(path, device_record(settings.facts, driver_version(settings.facts)))
    entries: list[Entry] = []
    with Progress(console) as progress:
        clock = Clock(settings.budget_s, len(workloads))
        for workload in workloads:
            published, interrupted = _tune_workload(workload, settings, database, clock, progress)
            entries += published
            if interrupted:
                progress.note("interrupted; run the same command again to go on")
                break
    return entries


def resolve(
    config: TuneConfig | str | Path,
    device: str | None,
    budget: float | None,
    trials: int | None,
    sampler: str | None,
    storage: str | optuna.storages.BaseStorage | None,
    seed: int,
    results_dir: str | Path | None,
    with_peers: bool,
    patience: int | None = None,
) -> tuple[Settings, tuple[Workload, ...]]:
    """Arguments over the config's values over defaults."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    facts = device_facts(device)
    loaded = config if isinstance(config, TuneConfig) else load_config(config, facts.backend)
    trials = loaded.trials if trials is None else trials
    budget = loaded.budget_s if budget is None else budget
    if trials is None and budget is None:
        budget = DEFAULT_BUDGET_S
    folder = Path(results_dir) if results_dir is not None else writable_results_dir()
    storage = storage or f"sqlite:///{folder.resolve() / 'studies' / facts.slug}.db"
    patience = patience or loaded.patience or PATIENCE[facts.backend]
    sampler = sampler or loaded.sampler
    chosen = Settings(device, facts, budget, trials, sampler, storage, seed, folder, with_peers, patience)
    return chosen, loaded.workloads


@dataclass
class Clock:
    """Shares the budget among workloads, and a workload's share between its searches and its comparison."""

    budget_s: float | None
    workloads: int
    begin: float = field(default_factory=time.monotonic)
    comparison_s: float | None = None

    def end_of_searches(self) -> float | None:
        """When the next workload's searches should end; called once for each workload."""
        if self.budget_s is None:
            return None
        share = max(0.0, self.begin + self.budget_s - time.monotonic()) / self.workloads
        self.workloads -= 1
        kept = COMPARISON_SHARE * share if self.comparison_s is None else min(self.comparison_s, 0.7 * share)
        return time.monotonic() + share - kept


def _tune_workload(
    workload: Workload, settings: Settings, database: Database, clock: Clock, progress: Progress
) -> tuple[list[Entry], bool]:
    """Entries, and whether the user wants to end."""
    studies: dict[str, Study] = {}
    with ExitStack() as stack:
        interrupted = _search_directions(workload, settings, clock.end_of_searches(), studies, stack, progress)
        known = _still_valid(workload, studies, database)
        if len(known) == len(workload.directions):
            progress.note(f"{workload.label}: nothing new to publish")
            return known, interrupted
        begin = time.monotonic()
        try:
            entries = publish(
                workload,
                studies,
                settings.device,
                database,
                settings.results_dir,
                settings.seed,
                with_peers=settings.with_peers,
                on_step=lambda text: progress.note(f"{workload.label}: {text}"),
            )
        except KeyboardInterrupt:
            progress.note(f"{workload.label}: the comparison was interrupted, so nothing is published")
            return [], True
    clock.comparison_s = time.monotonic() - begin
    for entry in entries:
        gain = entry.default["time_us"] / entry.time_us
        progress.note(f"{entry.label} {entry.direction}: published {time_text(entry.time_us)}, {gain:.2f}x the default")
    return entries, interrupted


def _search_directions(
    workload: Workload,
    settings: Settings,
    end: float | None,
    studies: dict[str, Study],
    stack: ExitStack,
    progress: Progress,
) -> bool:
    """Fill ``studies`` by direction, sharing the time until ``end``; whether the user wants to end."""
    try:
        with Worker(TrialSetting(workload, settings.device)) as worker:
            # Its imports and references take some ten seconds, in which the first kernels are compiled here.
            worker.launch()
            for index, direction in enumerate(workload.directions):
                now, left = time.monotonic(), len(workload.directions) - index
                deadline = None if end is None else now + max(0.0, end - now) / left
                study = stack.enter_context(open_study(workload, direction, settings, deadline, studies))
                studies[direction] = study
                if _search(study, worker, workload, direction, settings, deadline, progress) == "interrupted":
                    return True
    except KeyboardInterrupt:
        return True
    return False


def open_study(
    workload: Workload,
    direction: str,
    settings: Settings,
    deadline: float | None,
    siblings: Mapping[str, Study] = MappingProxyType({}),
) -> Study:
    """The study of one direction with what earlier runs, the databases and this run's other directions know of it."""
    space = space_of(workload, direction, settings.facts)
    sampler = settings.sampler
    if sampler == "auto":
        seconds = None if deadline is None else deadline - time.monotonic()
        sampler = choose_sampler(space, settings.trials, seconds)
    name = study_name(workload, direction)
    kin = siblings.get(KIN.get(direction, ""))
    starts = [schedule_from_dict(line["schedule"]) for line in kin.ranking[:KIN_STARTS]] if kin else []
    starts += starting_points(space, workload.graph_class(), known_entries(settings.results_dir))
    path = records.study_path(settings.results_dir, settings.facts.slug, name)
    return Study(space, name, path, settings.storage, sampler=sampler, seed=settings.seed, starts=starts)


def space_of(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    """The whole search space of one direction of a workload."""
    kernel = (workload.problem, workload.operation, direction, workload.dtype)
    return search_space(*kernel, facts, workload.layout, workload.deterministic)


def study_name(workload: Workload, direction: str) -> str:
    """Names the study and its file of trials."""
    parts = (workload.label, workload.operation, direction, workload.dtype, workload.layout)
    kind = ("deterministic",) if workload.deterministic else ()
    return "-".join((*parts, workload.graph_class().text, *kind))


def _search(
    study: Study,
    worker: Worker,
    workload: Workload,
    direction: str,
    settings: Settings,
    deadline: float | None,
    progress: Progress,
) -> str:
    measure = Measurer(worker, direction, SAMPLING_S[settings.facts.backend])
    progress.start(f"{workload.label} {direction}", study, settings.trials, deadline)
    end = search(
        study,
        lambda schedule: compile_ahead(study.space, schedule),
        measure,
        trials=settings.trials,
        deadline=deadline,
        patience=settings.patience,
        overlap=settings.facts.backend == "cuda",
        workers=proposals_ahead(study.sampler, len(os.sched_getaffinity(0))),
        on_trial=lambda line: progress.update(),
    )
    progress.stop()
    return end


def _still_valid(workload: Workload, studies: dict[str, Study], database: Database) -> list[Entry]:
    """Entries of this generator that stand on exactly the trials there are."""
    found = (database.get(workload.identity(direction)) for direction in studies)
    return [
        entry
        for entry, study in zip(found, studies.values(), strict=True)
        if entry is not None
        and entry.generator == GENERATOR_VERSION
        and entry.trials.get("count") == len(study.finished)
        and entry.default_schedule == study.space.default
    ]
