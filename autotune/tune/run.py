"""The main loop of ``equitune tune``: search every workload of a config and publish database entries.

Each workload is searched direction by direction in one worker process. The best schedules of all its directions are
then compared in another and published (see ``worker_pairs``). Finished work is always on the disk: trials as lines,
entries by atomic replacement. Ctrl-C publishes what was found, and a second run continues.

Tuners that share studies work on the same workloads at once (``multi_device`` sets the order). The last tuner at work
on a workload publishes it: it sees all trials, one comparison suffices, and nobody waits. At the end a tuner looks
again at workloads that it left to others, in case those were killed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.database.entry import Entry
from autotune.database.maintenance import driver_version
from autotune.database.store import Database, database_path, device_record
from autotune.search.study import Study
from autotune.search.trial_steps import CompilersAhead
from autotune.text import time_text
from autotune.tune.budget import TimeBudget
from autotune.tune.progress import Progress
from autotune.tune.publish import publish
from autotune.tune.settings import Settings, resolve
from autotune.tune.studies import first_schedules, open_study, search_direction
from autotune.tune.worker_pairs import WorkerPairs
from autotune.workload.config import TuneConfig
from autotune.workload.kinds.base import Problem
from autotune.workload.workload import Workload
from kernelgen.version import GENERATOR_VERSION

if TYPE_CHECKING:
    import optuna
    from rich.console import Console


def tune(
    config: TuneConfig | str | Path,
    device: str | None = None,
    budget: float | None = None,
    trials: int | None = None,
    sampler: str | None = None,
    storage: str | optuna.storages.BaseStorage | None = None,
    seed: int = 0,
    results_dir: str | Path | None = None,
    with_peers: bool | None = None,
    patience: int | None = None,
    console: Console | None = None,
    tuners: int | None = None,
    tuner: str = "",
    fewest_trials: int | None = None,
) -> list[Entry]:
    """Tune every workload and direction of a config, problem by problem; returns the published entries.

    budget: seconds for the whole config, including comparisons. trials: finished trials per study, including those of
    earlier runs; overrides the config. If neither is given here or in the config, the budget is ten minutes. sampler:
    one of ``autotune.workload.toml_tables.SAMPLERS``. storage: an Optuna storage or its URL, through which all tuners
    that name it share their studies; by default studies are not shared, and SQLite under ``results_dir`` gets a copy.
    tuners: number of tuners on this host that share the results folder, this one (named ``tuner``) included; by default
    it works alone. with_peers: whether to compare with the peers too, not only with the default schedule; by
    default with those for which a third of the budget suffices. patience: end a search after this many trials in a row
    without a gain of 1%; by default ``PATIENCE`` of the backend.
    fewest_trials: search each direction by at least as many trials, and leave workloads for which the budget is too
    short then to a later run. By default each workload gets at least one trial a direction and a comparison.
    """
    settings, workloads = resolve(
        config, device, budget, trials, sampler, storage, seed, results_dir, with_peers, patience, tuners
    )
    path = database_path(settings.results_dir, settings.facts.slug)
    record = device_record(settings.facts, driver_version(settings.facts))
    entries: list[Entry] = []
    with Progress(console, tuner) as progress, WorkerPairs(settings.device) as pairs:
        time_budget = TimeBudget(settings.budget_s, len(workloads))
        problems = list(dict.fromkeys(workload.problem for workload in workloads))
        nearest = {problem: tuple(problems[number : number + 2]) for number, problem in enumerate(problems)}
        jobs = deque(_Job(each, settings, pairs, nearest[each.problem], progress, fewest_trials) for each in workloads)
        while jobs:
            begun = len(jobs) < len(workloads)
            if begun and fewest_trials and time_budget.is_spent(fewest_trials, jobs[0].workload):
                progress.note(f"the time is up; {len(jobs)} of {len(workloads)} workloads are left")
                break
            job = jobs.popleft()
            published, interrupted = job.run(path, record, time_budget)
            entries += published
            if job.left and not job.looks_again:
                job.looks_again = True
                jobs.append(job)
            if interrupted:
                progress.note("interrupted; to continue, run the same command again")
                break
    return entries


class _Job:
    """One workload: its searches, then its comparison. ``problems``: its own and the next one, if any."""

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        pairs: WorkerPairs,
        problems: tuple[Problem, ...],
        progress: Progress,
        fewest_trials: int | None,
    ) -> None:
        trials = settings.workload_trials.get(workload, settings.trials)
        self.workload, self.settings = workload, replace(settings, trials=trials)
        self.pairs, self.problems, self.progress = pairs, problems, progress
        self.fewest_trials, self.setup_s, self.trial_s = fewest_trials, 0.0, 0.0
        self.studies: dict[str, Study] = {}
        # Directions whose search has ended, and was not interrupted.
        self.searched: list[str] = []
        # left: others were expected to publish. looks_again: the second look, which does not search.
        self.left, self.looks_again = False, False
        # When the comparison should end; it leaves out peers that do not fit.
        self.end: float | None = None

    def run(self, path: Path, record: Mapping[str, Any], time_budget: TimeBudget) -> tuple[list[Entry], bool]:
        """The entries, and whether the user wants to stop. ``path``, ``record``: the database and its device."""
        workload, progress, begin = self.workload, self.progress, time.monotonic()
        with ExitStack() as stack:
            end_of_searches = None
            if not self.looks_again:
                end_of_searches, self.end = time_budget.next_ends()
            interrupted = self._search_directions(end_of_searches, stack)
            searched = time.monotonic()
            self.left = not self._is_last(wait=not interrupted)
            if self.left:
                progress.note(f"{workload.label}: another tuner is still working on it and will publish it")
                return [], interrupted
            database = Database.load(path, record)
            ready = {name: s for name, s in self.studies.items() if name in self.searched or not self.fewest_trials}
            known = _still_valid(workload, ready, database)
            if len(known) == len(ready):
                why = "nothing new to publish" if ready else "too few trials to publish; a later run goes on"
                progress.note(f"{workload.label}: {why}")
                return known, interrupted
            try:
                entries = self._publish(database, ready)
            except KeyboardInterrupt:
                progress.note(f"{workload.label}: comparison interrupted, nothing published")
                return [], True
            compared = time.monotonic()
        time_budget.comparison_s = compared - searched
        time_budget.setup_s, time_budget.trial_s = self.setup_s, self.trial_s
        for entry in entries:
            gain = entry.default["time_us"] / entry.time_us
            progress.note(
                f"{entry.label} {entry.direction}: published {time_text(entry.time_us)}, {gain:.2f}x the default"
            )
        name = f"{workload.label} on {workload.graph.name}, {workload.operation} {workload.dtype}"
        shares = f"search {searched - begin:.1f} s, comparison {compared - searched:.1f} s"
        progress.note(f"{name}: {time.monotonic() - begin:.1f} s ({shares})")
        return entries, interrupted

    def _is_last(self, wait: bool) -> bool:
        """Whether this tuner should publish; if so, it has read all records of the others.

        Its own claims have ended. So if tuners end at the same time, at least one sees nobody at work; if several do,
        one of them gets the claim to compare.
        """
        studies = list(self.studies.values())
        last = not any(study.others_at_work(wait, comparing=self.looks_again) for study in studies)
        if last and studies:
            last = studies[0].claim_comparison()
        for study in studies:
            study.refresh()
        return last

    def _publish(self, database: Database, studies: Mapping[str, Study]) -> list[Entry]:
        pair, settings = self.pairs.of(self.workload.problem), self.settings
        # The searching process releases its memory and leaves the device idle during the comparison.
        pair.rest()
        entries = publish(
            self.workload,
            studies,
            settings.device,
            database,
            settings.results_dir,
            settings.seed,
            with_peers=settings.with_peers is not False,
            deadline=None if settings.with_peers else self.end,
            seconds_each=settings.seconds_each,
            worker=pair.comparing,
            on_step=lambda text: self.progress.note(f"{self.workload.label}: {text}"),
        )
        pair.rest()
        return entries

    def _search_directions(self, end: float | None, stack: ExitStack) -> bool:
        """Fill ``studies`` by direction, sharing the time until ``end``; returns whether the user wants to stop."""
        workload, pair, worker = self.workload, None, None
        compilers = stack.enter_context(CompilersAhead())
        try:
            pair = self.pairs.of(workload.problem)
            for index, direction in enumerate(workload.directions):
                left, cuda = len(workload.directions) - index, self.settings.facts.backend == "cuda"
                deadline = _share_until(end, left)
                study = stack.enter_context(open_study(workload, direction, self.settings, deadline, self.studies))
                self.studies[direction] = study
                if self.looks_again or self._is_finished(study):
                    self.searched.append(direction)
                    continue
                if worker is None:
                    # Its imports and references take about ten seconds. Meanwhile the first kernels compile here.
                    begin, worker = time.monotonic(), pair.search(workload)
                    self.pairs.launch(*self.problems)
                    if cuda:
                        compilers.compile(*first_schedules(workload, direction, self.settings))
                    if cuda or self.fewest_trials:
                        worker.settle()
                        self.setup_s = time.monotonic() - begin
                        deadline = _share_until(end, left)  # set-up time counts for no single direction
                if cuda:
                    for following in workload.directions[index + 1 : index + 2]:
                        compilers.compile(*first_schedules(workload, following, self.settings))
                begin, before = time.monotonic(), len(study.finished)
                how = (self.settings, deadline, self.progress, self.fewest_trials or 1)
                if search_direction(study, worker, workload, direction, *how) == "interrupted":
                    raise KeyboardInterrupt
                self.searched.append(direction)
                tried = max(1, len(study.finished) - before)
                self.trial_s = max(self.trial_s, (time.monotonic() - begin) / tried)
        except KeyboardInterrupt:
            if pair is not None:
                # It may still run a trial, whose answer nobody needs.
                pair.searching.close()
            return True
        return False

    def _is_finished(self, study: Study) -> bool:
        trials, patience = self.settings.trials, self.settings.patience
        enough = trials is not None and len(study.finished) >= trials
        return enough or (patience is not None and study.stale >= patience)


def _share_until(end: float | None, left: int) -> float | None:
    """End of the next search, if ``left`` searches share the time until ``end`` equally."""
    now = time.monotonic()
    return None if end is None else now + max(0.0, end - now) / left


def _still_valid(workload: Workload, studies: Mapping[str, Study], database: Database) -> list[Entry]:
    """Entries of this generator that are based on exactly the present trials."""
    found = (database.get(workload.identity(direction)) for direction in studies)
    return [
        entry
        for entry, study in zip(found, studies.values(), strict=True)
        if entry is not None
        and entry.generator == GENERATOR_VERSION
        and entry.trials.get("count") == len(study.finished)
        and entry.default["schedule"] == study.space.default.to_dict()
    ]
