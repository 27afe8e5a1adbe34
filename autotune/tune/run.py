"""The main loop of ``equitune tune``: search every workload of a config and publish database entries.

Each workload is searched direction by direction in one worker process. The best schedules of all its directions are
then compared in another and published (see :class:`WorkerPairs`). Finished work is always on the disk: trials as lines,
entries by atomic replacement. Ctrl-C publishes what was found, and a second run continues.

Tuners that share studies work on the same workloads at once (:func:`begun_elsewhere` sets the order). The last tuner at
work on a workload publishes it: it sees all trials, one comparison suffices, and nobody waits. At the end a tuner looks
again at workloads that it left to others, in case those were killed.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotune.compare.precompile import IdleProcess
from autotune.database import trials as trial_records
from autotune.database.entry import Entry
from autotune.database.lookup import Finder
from autotune.database.maintenance import driver_version
from autotune.database.store import Database, database_path, device_record, load_table
from autotune.database.trials import quarantine_path
from autotune.measure.counters import Profiler, profiler_for
from autotune.measure.kinds import space_of
from autotune.measure.space import Space
from autotune.measure.timing import require_figures
from autotune.measure.trial import TrialSetting
from autotune.measure.worker import Worker, names_of, on_each
from autotune.search.loop import SAMPLING_S, CompilersAhead, Measurer, compile_ahead, search
from autotune.search.samplers import choose_sampler, proposals_ahead
from autotune.search.starting_points import (
    KIN,
    KIN_STARTS,
    known_entries,
    other_path_groups,
    starting_points,
    storing_rows,
)
from autotune.search.study import Study, study_name
from autotune.tune.publish import CANDIDATES, ENOUGH_TRIALS, GOOD_TRIALS, gained, publish, why_unfinished
from autotune.tune.settings import Progress, Settings, Watch, resolve
from autotune.workload.config import TuneConfig
from autotune.workload.kind import Problem
from autotune.workload.objective import TIME, Objective
from autotune.workload.toml_tables import parse_duration
from autotune.workload.workload import Workload
from kernelgen.errors import TuningMissError
from kernelgen.kernels.knobs import Knobs
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
    with_peers: bool | Collection[str] | None = None,
    patience: int | None = None,
    objective: str = str(TIME),
    counters: str = "auto",
    console: Console | None = None,
    tuners: int | None = None,
    tuner: str = "",
    fewest_trials: int | None = None,
    watch: Watch | None = None,
) -> list[Entry]:
    """Tune every workload and direction of a config, problem by problem; returns the published entries.

    budget: seconds for the whole config, including comparisons. trials: finished trials per study, including those of
    earlier runs; overrides the config. If neither is given here or in the config, the budget is ten minutes. sampler:
    one of ``autotune.workload.toml_tables.SAMPLERS``. storage: an Optuna storage or its URL, through which all tuners
    that name it share their studies; by default studies are not shared, and SQLite under ``results_dir`` gets a copy.
    tuners: number of tuners on this host that share the results folder, this one (named ``tuner``) included; by default
    it works alone. with_peers: whether to compare with the peers too, whatever that takes, or the names of those to
    compare with; by default with those for which a third of the budget suffices. patience: end a search after this many
    trials in a row without a gain of 1%; by default ``PATIENCE`` of the backend. objective: what is minimised, as
    a text (:mod:`autotune.workload.objective`); a ToolMissingError on a device that does not count it. counters:
    ``auto`` counts on a GPU, where ``ncu`` is there, what the best few do (:mod:`autotune.measure.counters`); ``none``.
    fewest_trials: search each direction by at least as many trials, the first workload's also if the budget ends
    before. By default one trial of its first direction is made in any case. Directions and workloads for which the
    budget is too short are left to a later run. watch: is told between measurements what happens.
    """
    settings, workloads = resolve(
        config, device, budget, trials, sampler, storage, seed, results_dir, with_peers, patience, tuners, objective
    )
    path = database_path(settings.results_dir, settings.facts.slug)
    record = device_record(settings.facts, driver_version(settings.facts))
    entries: list[Entry] = []
    with Progress(console, tuner, watch) as progress, WorkerPairs(settings.device) as pairs:
        time_budget = TimeBudget(settings.budget_s, len(workloads))
        progress.end = None if settings.budget_s is None else time_budget.begin + settings.budget_s
        profiler = profiler_for(counters, settings.device, settings.facts, progress.note)
        problems = list(dict.fromkeys(workload.problem for workload in workloads))
        nearest = {problem: tuple(problems[number : number + 2]) for number, problem in enumerate(problems)}
        shared = progress, fewest_trials, profiler
        jobs = deque(_Job(each, settings, pairs, nearest[each.problem], *shared) for each in workloads)
        jobs[0].comes_first = True
        while jobs:
            if not jobs[0].comes_first and time_budget.is_spent(fewest_trials or 1, jobs[0].workload):
                left = sum(not job.looks_again for job in jobs)  # the others' tuners publish the rest
                progress.note(f"the time is up; {left} of {len(workloads)} workloads are left")
                break
            job = jobs.popleft()
            published, interrupted = job.run(path, record, time_budget)
            entries += published
            if published:
                progress.published()
            if job.left and not job.looks_again:
                job.looks_again = True
                jobs.append(job)
            if interrupted:
                progress.note("interrupted; to continue, run the same command again")
                break
        if entries:
            progress.note(gained(entries))
    return entries


@dataclass
class _Job:
    """One workload: its searches, then its comparison.

    problems: its own and the next one, if any. comes_first: whether it is searched by the fewest trials even after the
    end of the budget. out_of_time: directions whose search ended when its time was over. searched: those whose search
    has ended, and was not interrupted. left: others were expected to publish. looks_again: the second look, which does
    not search. end: when the comparison should end; it leaves out candidates and peers that do not fit.
    """

    workload: Workload
    settings: Settings
    pairs: WorkerPairs
    problems: tuple[Problem, ...]
    progress: Progress
    fewest_trials: int | None
    profiler: Profiler | None = None
    comes_first: bool = False
    studies: dict[str, Study] = field(default_factory=dict)
    out_of_time: list[str] = field(default_factory=list)
    searched: list[str] = field(default_factory=list)
    left: bool = False
    looks_again: bool = False
    end: float | None = None
    setup_s: float = 0.0
    trial_s: float = 0.0

    def __post_init__(self) -> None:
        trials = self.settings.workload_trials.get(self.workload, self.settings.trials)
        self.settings = replace(self.settings, trials=trials)

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
            if self.trial_s:
                time_budget.setup_s, time_budget.trial_s = self.setup_s, self.trial_s
            if self.left:
                if not self.looks_again:
                    progress.note(f"{workload.label}: another tuner is still working on it and will publish it")
                return [], interrupted
            database = Database.load(path, record)
            ready = {name: s for name, s in self.studies.items() if name in self.searched or not self.fewest_trials}
            known = self._still_valid(ready, database)
            if len(known) == len(ready):
                why = "nothing new to publish" if ready else "too few trials to publish; a later run goes on"
                progress.note(f"{workload.label}: {why}")
                return known, interrupted
            try:
                entries = self._publish(database, ready)
            except KeyboardInterrupt:
                progress.note(f"{workload.label}: comparison interrupted, nothing published")
                return [], True
            if self.profiler is not None and entries:
                progress.start(f"{workload.label}: counting with ncu")
                try:
                    entries = self._with_counters(self.profiler, database, ready, entries)
                except KeyboardInterrupt:
                    return entries, True
            compared = time.monotonic()
        time_budget.comparison_s = compared - searched
        if self.out_of_time:
            tried = min(len(self.studies[direction].finished) for direction in self.out_of_time)
            search_s = GOOD_TRIALS * sum(study.trial_s(self.settings.compilers) for study in self.studies.values())
            if advice := time_budget.advice(tried, search_s):
                progress.note(f"{workload.label}: {advice}")
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
        pair = self.pairs.of(self.workload.problem)
        kept_s = 0.0 if self.profiler is None else self.profiler.kept_s(self.end)
        # The searching process releases its memory and leaves the device idle during the comparison.
        pair.rest()
        entries = publish(
            self.workload,
            studies,
            self.settings,
            database,
            deadline=None if self.end is None else self.end - kept_s,
            worker=pair.comparing,
            on_step=lambda text: self.progress.start(f"{self.workload.label}: {text}"),
            on_failure=self.progress.note,
        )
        pair.rest()
        return entries

    def _with_counters(
        self, profiler: Profiler, database: Database, studies: Mapping[str, Study], entries: list[Entry]
    ) -> list[Entry]:
        """Count what calls of each entry's schedule, the default and the best others do; the entries with that stored.

        Trials get it too. Without counters the entries stay as they are.
        """
        schedules: dict[str, list[Knobs]] = {}
        for entry in entries:
            study = studies[entry.direction]
            ranked = [study.schedule_of(line) for line in study.ranking[:CANDIDATES]]
            best = dict.fromkeys((entry.tuned_schedule, study.space.default, *ranked))
            schedules[entry.direction] = list(best)[:CANDIDATES]
        counted = profiler.count(self.workload, schedules, self.end)
        if not counted:
            return entries
        for direction, chosen in schedules.items():
            for schedule, found in zip(chosen, counted[direction], strict=True):
                studies[direction].add_resources(schedule, found)
        entries = [replace(one, resources={**one.resources, **counted[one.direction][0]}) for one in entries]
        for entry in entries:
            database.put(entry)
        database.save()
        return entries

    def _search_directions(self, end: float | None, stack: ExitStack) -> bool:
        """Fill ``studies`` by direction, sharing the time until ``end``; returns whether the user wants to stop."""
        workload, pair, worker = self.workload, None, None
        compilers = stack.enter_context(CompilersAhead())
        try:
            pair = self.pairs.of(workload.problem)
            for index, direction in enumerate(workload.directions):
                left, cuda = len(workload.directions) - index, self.settings.facts.backend == "cuda"
                deadline = _share_until(self._before_comparing(end), left)
                study = stack.enter_context(open_study(workload, direction, self.settings, deadline, self.studies))
                self.studies[direction] = study
                study.ended = self._is_finished(study)
                if self.looks_again or study.ended:
                    self.searched.append(direction)
                    continue
                if worker is None:
                    # Its imports and references take about ten seconds. Meanwhile the first kernels compile here.
                    self.progress.start(f"{workload.label}: starting a process")
                    begin, worker = time.monotonic(), pair.search(workload)
                    self.pairs.launch(*self.problems)
                    if cuda:
                        compilers.compile(*first_schedules(workload, direction, self.settings))
                    if cuda or self.fewest_trials:
                        worker.settle()
                        self.setup_s = time.monotonic() - begin
                        # Set-up time counts for no single direction.
                        deadline = _share_until(self._before_comparing(end), left)
                if cuda:
                    for following in workload.directions[index + 1 : index + 2]:
                        compilers.compile(*first_schedules(workload, following, self.settings))
                begin, before = time.monotonic(), len(study.finished)
                in_any_case = self.comes_first and (self.fewest_trials or not index)
                latest = None if in_any_case else self._before_comparing(self.progress.end, another=True)
                study.ended = self._search_direction(study, worker, direction, deadline, latest)
                if study.ended == "interrupted":
                    raise KeyboardInterrupt
                self.out_of_time += [direction] if study.ended == "time" else []
                enough = study.ended != "time" or len(study.finished) >= (self.fewest_trials or 1)
                self.searched += [direction] if enough else []
                tried = max(1, len(study.finished) - before)
                self.trial_s = max(self.trial_s, (time.monotonic() - begin) / tried)
        except KeyboardInterrupt:
            if pair is not None:
                # It may still run a trial, whose answer nobody needs.
                pair.searching.close()
            return True
        return False

    def _before_comparing(self, end: float | None, another: bool = False) -> float | None:
        """``end`` of a search, earlier if what was tried could else not be compared in time with the defaults.

        another: the latest that another direction may begin, before ``end`` of the whole run; its first trial takes as
        long as any before.
        """
        if end is None or self.end is None:
            return end
        lines = [next(iter(study.finished.values()), {}) for study in self.studies.values()]
        first = [line.get("measure_s", 0.0) for line in lines]
        if another:
            longest = max(first, default=0.0)
            return end - longest - COMPARED * (sum(first) + longest)
        return min(end, self.end - COMPARED * sum(first))

    def _search_direction(
        self, study: Study, worker: Worker, direction: str, deadline: float | None, latest: float | None
    ) -> str:
        """Search one direction; returns why it ended. ``deadline``, ``latest``: as for ``search``."""
        settings, progress = self.settings, self.progress
        progress.start(f"{self.workload.label} {direction}", study, settings.trials)
        ended = search(
            study,
            lambda schedule: compile_ahead(study.space, schedule),
            Measurer(worker, direction, SAMPLING_S[settings.facts.backend], figures=settings.objective.figures),
            trials=settings.trials,
            deadline=deadline,
            fewest=self.fewest_trials or 1,
            latest=latest,
            patience=settings.patience,
            overlap=settings.facts.backend == "cuda",
            workers=proposals_ahead(study.sampler, settings.compilers),
            on_trial=lambda line: progress.update(),
        )
        progress.stop()
        return ended

    def _still_valid(self, studies: Mapping[str, Study], database: Database) -> list[Entry]:
        """Entries of this generator and objective that are based on exactly the present trials.

        Where each direction gets a number of trials, those that are not finished do not count: another comparison may
        find the machine at rest, or notes that the search has come to an end.
        """
        found = (database.get(self.workload.identity(direction)) for direction in studies)
        return [
            entry
            for entry, study in zip(found, studies.values(), strict=True)
            if entry is not None
            and entry.generator == GENERATOR_VERSION
            and entry.objective == str(self.settings.objective)
            and entry.trials.get("count") == len(study.finished)
            and entry.default["schedule"] == study.space.default.to_dict()
            and not (self.fewest_trials and why_unfinished(entry))
        ]

    def _is_finished(self, study: Study) -> str:
        """Why a search would end at once, as ``search`` says it; empty if it would not."""
        trials, patience = self.settings.trials, self.settings.patience
        if patience is not None and study.stale >= patience:
            return "patience"
        return "trials" if trials is not None and len(study.finished) >= trials else ""


def _share_until(end: float | None, left: int) -> float | None:
    """End of the next search, if ``left`` searches share the time until ``end`` equally."""
    now = time.monotonic()
    return None if end is None else now + max(0.0, end - now) / left


def first_schedules(workload: Workload, direction: str, settings: Settings) -> tuple[Space, list[Knobs]]:
    """The first schedules of a search that are known before this run's other directions have been searched."""
    space = space_of(workload, direction, settings.facts)
    return space, list(dict.fromkeys((space.default, *known_starts(space, workload, settings))))


def known_starts(space: Space, workload: Workload, settings: Settings) -> list[Knobs]:
    """What modules run until this search has found something, then winners of similar kernels.

    The first, since a search must not end with a schedule that is slower than having none. Where runs of edges may
    store rows, the first in those forms comes next, and of fused radial kernels those of other counts of path groups.
    """
    graph_class = workload.graph_class()
    starts = starting_points(space, graph_class, known_entries(settings.facts, settings.results_dir))
    try:
        found = Finder(space.spec, strict=False).find(graph_class)
    except TuningMissError:  # the default is in quarantine
        return starts
    running = space.nearest(found.schedule)
    first = [running, *storing_rows(space, found.schedule), *other_path_groups(space, running)]
    return [*(schedule for schedule in first if space.broken_limit(schedule) is None), *starts]


def open_study(
    workload: Workload,
    direction: str,
    settings: Settings,
    deadline: float | None,
    siblings: Mapping[str, Study] = MappingProxyType({}),
) -> Study:
    """The study of one direction, started from earlier runs, the databases and this run's other directions."""
    space = space_of(workload, direction, settings.facts)
    sampler = settings.sampler
    if sampler == "auto":
        seconds = None if deadline is None else deadline - time.monotonic()
        sampler = choose_sampler(space, settings.trials, seconds)
    name = study_name(workload, direction, settings.objective)
    kin = siblings.get(KIN.get(direction, ""))
    starts = [kin.schedule_of(line) for line in kin.ranking[:KIN_STARTS]] if kin else []
    starts += known_starts(space, workload, settings)
    path = trial_records.study_path(settings.results_dir, settings.facts.slug, name)
    if not path.exists() and settings.sharing != "storage":
        # The trials that the entry of the same kernel and objective cites, under whatever label it was tuned.
        table = load_table(database_path(settings.results_dir, settings.facts.slug))
        entry = table.by_identity.get(workload.identity(direction))
        if entry is not None and entry.objective == str(settings.objective) and (file := entry.trials.get("file")):
            cited = settings.results_dir / file
            path = cited if cited.is_file() else path
    faults = quarantine_path(settings.results_dir, settings.facts.slug)
    options: dict[str, Any] = {"sampler": sampler, "seed": settings.seed, "sharing": settings.sharing}
    options["objective"] = settings.objective
    return Study(space, name, path, settings.storage, starts=starts, quarantine=faults, **options)


# Worker processes of a tuning run: for each problem, one that searches and one that compares.
#
# The workloads of one problem share its :class:`WorkerPair`, which is set up anew for each: imports, e3nn's product and
# the code that torch compiled for it stay. So winners are measured again in a process that took no part in their
# search.


class WorkerPair:
    """The two processes of one problem. Each starts when first needed, or at :meth:`launch`."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self._idle = problem, IdleProcess(problem, device)
        self.searching, self.comparing = Worker(self._idle), Worker(self._idle)

    def launch(self) -> None:
        self.searching.launch()
        self.comparing.launch()

    def search(self, workload: Workload) -> Worker:
        """Start setting up the searching process for a workload; returns it at once."""
        self.searching.reopen(TrialSetting(workload, self._idle.device))
        self.searching.launch()
        return self.searching

    def rest(self) -> None:
        """Release what both hold on the device, and wait until done: neither may disturb the other."""
        for worker in (self.searching, self.comparing):
            worker.reopen(self._idle)
        for worker in (self.searching, self.comparing):
            worker.settle()

    def close(self) -> None:
        self.searching.close()
        self.comparing.close()


class WorkerPairs:
    """The present problem's pair and the next one's, whose imports run in parallel."""

    def __init__(self, device: str) -> None:
        self.device = device
        # On a CPU, imports during a measurement would disturb it.
        self.ahead = device.startswith("cuda")
        self._pairs: dict[Problem, WorkerPair] = {}

    def __enter__(self) -> WorkerPairs:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs.values():
            pair.close()

    def of(self, problem: Problem) -> WorkerPair:
        """The problem's pair; ends those of earlier problems, not those that were launched ahead."""
        for other in itertools.takewhile(lambda known: known != problem, tuple(self._pairs)):
            self._pairs.pop(other).close()
        return self._pair(problem)

    def launch(self, *problems: Problem) -> None:
        """Start the processes of problems, if that disturbs no measurement."""
        if self.ahead:
            for problem in problems:
                self._pair(problem).launch()

    def _pair(self, problem: Problem) -> WorkerPair:
        if problem not in self._pairs:
            self._pairs[problem] = WorkerPair(problem, self.device)
        return self._pairs[problem]


# Divide a run's time budget among its workloads, and a workload's share between searches and comparison.

# Most of a workload's time that its comparison takes: peers for which there is none are left out.
COMPARISON_SHARE = 1 / 3
# To compare the defaults takes about so many times the first trials of their directions: 2.3, 2.0 and 1.4 times as much
# processor time for one to three directions of the convolution of MACE-MP-0 medium on two cores.
COMPARED = 2.0
BUDGETS = ("1m", "2m", "5m", "10m", "20m", "30m", "1h", "2h", "4h", "8h", "24h")


@dataclass
class TimeBudget:
    """Durations of the last workload: its comparison, the set-up of its worker, a trial of its slowest direction."""

    budget_s: float | None
    workloads: int
    begin: float = field(default_factory=time.monotonic)
    comparison_s: float | None = None
    setup_s: float = 0.0
    trial_s: float = 0.0

    def __post_init__(self) -> None:
        self.shares = self.workloads

    def advice(self, tried: int, search_s: float) -> str:
        """That ``tried`` trials are too few, and which budget gives a good number; empty if they are enough.

        search_s: seconds that a workload's searches would take by a good number of trials.
        """
        if tried >= ENOUGH_TRIALS or self.budget_s is None:
            return ""
        needed = max(self.budget_s, self.shares * search_s / (1 - COMPARISON_SHARE))
        longer = next((text for text in BUDGETS if parse_duration(text) > needed), BUDGETS[-1])
        trials = "1 trial is" if tried == 1 else f"{tried} trials of a direction are"
        return f"{trials} too few to tune; --budget {longer} gives about {GOOD_TRIALS}"

    def is_spent(self, fewest_trials: int, workload: Workload) -> bool:
        """Whether too little is left for one more workload: to set it up, search it and compare, as the last one."""
        if self.budget_s is None:
            return False
        searches_s = self.trial_s * fewest_trials * len(workload.directions)
        return self.begin + self.budget_s - time.monotonic() < self.setup_s + searches_s + (self.comparison_s or 0.0)

    def next_ends(self) -> tuple[float | None, float | None]:
        """When the next workload's searches and its comparison should end; call once per workload."""
        if self.budget_s is None:
            return None, None
        now = time.monotonic()
        share = max(0.0, self.begin + self.budget_s - now) / self.workloads
        self.workloads -= 1
        kept = COMPARISON_SHARE * share
        kept = kept if self.comparison_s is None else min(self.comparison_s, kept)
        return now + share - kept, now + share


# Several tuners on one host, one process per device, which share every study and the results folder.
#
# Their studies and entries in the results folder are the result. A tuner that dies loses only its current trial.


def tune_together(config: TuneConfig, devices: Sequence[str], **options: Any) -> None:
    """Run one tuner per device; ``options``: those of ``tune``.

    Returns when all have ended. Raises KeyboardInterrupt if the user ended them, StudyError if one failed.
    """
    for device in devices:
        require_figures(Objective.parse(options["objective"]), device)
    on_each(devices, "tuner", _tune, config, options, names_of(devices))


def begun_elsewhere(config: TuneConfig, turn: int, tuners: int) -> TuneConfig:
    """The config rotated for one of several tuners: each starts at another workload.

    So tuners work on different workloads first, and join each other's at the end. Only for searches with a trial limit:
    with a time limit, a tuner that joins late would search on and compare again.
    """
    start = turn * len(config.workloads) // tuners
    return dataclasses.replace(config, workloads=config.workloads[start:] + config.workloads[:start])


def _tune(device: str, name: str, config: TuneConfig, options: Mapping[str, Any], tuners: list[str]) -> None:
    from rich.console import Console

    has_trials = options["trials"] or config.trials or config.workload_trials
    if options["budget"] is None and config.budget_s is None and has_trials:
        config = begun_elsewhere(config, tuners.index(name), len(tuners))
    # Progress bars of several processes would overwrite each other; lines do not.
    console = Console(stderr=True, force_terminal=False)
    tune(config, device, **options, console=console, tuners=len(tuners), tuner=name)
