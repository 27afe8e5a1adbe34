"""Settings of a tuning run: arguments override the config's values, which override defaults."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.database.store import writable_results_dir
from autotune.measure.timing import require_figures
from autotune.search.shared import Sharing
from autotune.search.study import Study
from autotune.text import figures_text
from autotune.workload.config import TuneConfig, by_problem, load_config
from autotune.workload.objective import TIME, Objective
from autotune.workload.toml_tables import check_seed
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts, device_facts

if TYPE_CHECKING:
    import optuna
    from rich.console import Console

DEFAULT_BUDGET_S = 600.0
# Trials without a gain of 1% after which a search on a GPU ends. In the 12 studies of results/trials on an H200 (160
# to 400 trials each) a limit of 60 would have ended up to 11% above the best of the whole study, 100 too in one study,
# 120 at most 2%. At 6 to 10 trials a second that is about 15 s. On a CPU a trial takes seconds and the budget decides.
PATIENCE = {"cpu": None, "cuda": 120}
# Sampling time of each contender in a direction, without peers. On a GPU our kernels take at most a few milliseconds,
# so nearly all reach the full number of samples, and the rest do not take long.
SECONDS_EACH = {"cpu": 2.0, "cuda": 0.4}
SECONDS_EACH_WITH_PEERS = 2.0


@dataclass(frozen=True)
class Settings:
    """Settings of one tuning run, with all defaults filled in."""

    device: str
    facts: DeviceFacts
    budget_s: float | None
    trials: int | None
    sampler: str
    storage: str | optuna.storages.BaseStorage
    seed: int
    results_dir: Path
    # None: those for which a third of the budget suffices.
    with_peers: bool | Collection[str] | None
    patience: int | None = None
    # For workloads with their own number in the config.
    workload_trials: Mapping[Workload, int] = field(default_factory=dict)
    sharing: Sharing = "alone"
    # Number of parallel compilers.
    compilers: int = 1
    objective: Objective = TIME

    @property
    def seconds_each(self) -> float:
        return SECONDS_EACH[self.facts.backend] if self.with_peers is False else SECONDS_EACH_WITH_PEERS


def resolve(
    config: TuneConfig | str | Path,
    device: str | None,
    budget: float | None,
    trials: int | None,
    sampler: str | None,
    storage: str | optuna.storages.BaseStorage | None,
    seed: int,
    results_dir: str | Path | None,
    with_peers: bool | Collection[str] | None,
    patience: int | None = None,
    tuners: int | None = None,
    objective: str = str(TIME),
) -> tuple[Settings, tuple[Workload, ...]]:
    """Combine arguments, the config's values and defaults, in this order of precedence.

    tuners: number of tuners on this host that share studies, through ``storage`` if given, else in the results folder.
    None: this tuner has the results folder to itself; a given storage is shared anyway.
    """
    import torch

    check_seed(seed)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    facts = device_facts(device)
    by = Objective.parse(objective)
    require_figures(by, device)
    loaded = config if isinstance(config, TuneConfig) else load_config(config, facts.backend)
    if isinstance(with_peers, Collection):
        from autotune.compare.peers import chosen_peers

        with_peers = chosen_peers(with_peers, device)
    trials_given = trials is not None
    trials = trials if trials_given else loaded.trials
    budget = loaded.budget_s if budget is None else budget
    own_trials = {} if trials_given else loaded.workload_trials
    if budget is None and trials is None and not set(loaded.workloads) <= set(own_trials):
        budget = DEFAULT_BUDGET_S
    folder = Path(results_dir) if results_dir is not None else writable_results_dir()
    sharing: Sharing = "storage" if storage else "folder" if tuners else "alone"
    storage = storage or f"sqlite:///{folder.resolve() / 'studies' / facts.slug}.db"
    patience = patience or loaded.patience or PATIENCE[facts.backend]
    sampler = sampler or loaded.sampler
    compilers = max(1, len(os.sched_getaffinity(0)) // (tuners or 1))
    options = (sampler, storage, seed, folder, with_peers, patience, own_trials, sharing, compilers, by)
    return Settings(device, facts, budget, trials, *options), tuple(by_problem(loaded.workloads))


# Progress of a run: a bar on a terminal, a line every ten seconds elsewhere.

LINE_EVERY_S = 10.0
WATCH_EVERY_S = 5.0
# Is told the lines so far, the last of them what is running now, and whether something was published. Nothing is
# measured meanwhile.
Watch = Callable[[Sequence[str], bool], None]


def status_text(study: Study) -> str:
    """State of a search: the best figures beside the default's (a comparison judges them later), and failures."""
    lines = (("best", study.best), ("default", study.default))
    texts = [f"{name} {text}" for name, line in lines if line and (text := figures_text(line))]
    return ", ".join([*texts, f"{study.failures} failed"])


class Progress:
    """What is running, the best so far, and the time left of the run; use as a context manager.

    tuner: name to print, among several tuners. watch: is told the same every few seconds. end: of the run, in
    ``time.monotonic()``, if it has a budget.
    """

    def __init__(self, console: Console | None = None, tuner: str = "", watch: Watch | None = None) -> None:
        from rich import progress
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self.end: float | None = None
        self._prefix = f"[{tuner}] " if tuner else ""
        names = ("{task.description}", "{task.fields[count]}", "{task.fields[status]}")
        title, *figures = (progress.TextColumn(name, markup=False) for name in names)
        columns = (title, progress.BarColumn(bar_width=20), *figures)
        self._bar = progress.Progress(
            *columns, console=self.console, disable=not self.console.is_terminal, transient=True
        )
        self._task = self._bar.add_task("starting", total=1.0, count="", status="")
        self._study: Study | None = None
        self._trials: int | None = None
        self._title, self._begin, self._last_line = "starting", time.monotonic(), time.monotonic()
        self._watch, self._watched, self._notes = watch, -math.inf, list[str]()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, title: str, study: Study | None = None, trials: int | None = None) -> None:
        """Show what is running; of a search, its study until :meth:`stop`. trials: how many are wanted."""
        self._title, self._study, self._trials = title, study, trials
        self.update()

    def update(self) -> None:
        """Show the present state."""
        now = time.monotonic()
        (count, *status), end = self._figures(), self.end
        left = [] if end is None else [f"{end - now:.0f} s left" if end > now else f"{now - end:.0f} s over the budget"]
        done, texts = self._fraction(now), ", ".join(status + left)
        self._bar.update(self._task, description=self._title, completed=done, count=count, status=texts)
        line = f"{self._title}: {', '.join(filter(None, [count, *status, *left]))}"
        if self._watch is not None and now - self._watched >= WATCH_EVERY_S:
            self._watch([*self._notes, line], False)
            self._watched = now
        if not self.console.is_terminal and now - self._last_line >= LINE_EVERY_S:
            self._print(line)

    def published(self) -> None:
        """Say to who watches that there are new entries."""
        if self._watch is not None:
            self._watch(self._notes, True)

    def stop(self) -> None:
        """Print the final line of a search."""
        self.note(f"{self._title}: {', '.join(self._figures())}")
        self._study = None

    def note(self, text: str) -> None:
        """Print one line of plain text."""
        self._notes.append(text)
        self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(f"{self._prefix}{text}", markup=False, highlight=False, soft_wrap=True)
        self._last_line = time.monotonic()

    def _figures(self) -> tuple[str, ...]:
        if self._study is None:
            return ("",)
        done = len(self._study.finished)
        return f"{done} trials" if self._trials is None else f"{done}/{self._trials} trials", status_text(self._study)

    def _fraction(self, now: float) -> float:
        """Of the run, or of a search if the run has no budget."""
        if self.end is not None:
            return min(1.0, (now - self._begin) / max(1e-9, self.end - self._begin))
        return min(1.0, len(self._study.finished) / self._trials) if self._study and self._trials else 0.0
