"""Settings of a tuning run: arguments override the config's values, which override defaults."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.database.store import writable_results_dir
from autotune.search.shared import Sharing
from autotune.search.study import Study
from autotune.text import time_text
from autotune.workload.config import TuneConfig, by_problem, load_config
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
    with_peers: bool | None
    patience: int | None = None
    # For workloads with their own number in the config.
    workload_trials: Mapping[Workload, int] = field(default_factory=dict)
    sharing: Sharing = "alone"
    # Number of parallel compilers.
    compilers: int = 1

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
    with_peers: bool | None,
    patience: int | None = None,
    tuners: int | None = None,
) -> tuple[Settings, tuple[Workload, ...]]:
    """Combine arguments, the config's values and defaults, in this order of precedence.

    tuners: number of tuners on this host that share studies, through ``storage`` if given, else in the results folder.
    None: this tuner has the results folder to itself; a given storage is shared anyway.
    """
    import torch

    check_seed(seed)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    facts = device_facts(device)
    loaded = config if isinstance(config, TuneConfig) else load_config(config, facts.backend)
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
    options = (sampler, storage, seed, folder, with_peers, patience, own_trials, sharing, compilers)
    return Settings(device, facts, budget, trials, *options), tuple(by_problem(loaded.workloads))


# Show a search's progress: a bar on a terminal, occasional lines elsewhere.

LINE_EVERY_S = 10.0


def status_text(study: Study, end: float | None, now: float) -> str:
    """State of a search: best time against the default, failures and time left; ``end`` and ``now`` in seconds."""
    parts = []
    if study.best_us is not None:
        gain = f" ({study.default_us / study.best_us:.2f}x the default)" if study.default_us else ""
        parts.append(f"best {time_text(study.best_us)}{gain}")
    parts.append(f"{study.failures} failed")
    if end is not None:
        parts.append(f"{max(0.0, end - now):.0f} s left")
    return ", ".join(parts)


class Progress:
    """Follows one search at a time; use as a context manager. ``tuner``: name to print, among several tuners."""

    def __init__(self, console: Console | None = None, tuner: str = "") -> None:
        from rich import progress
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self._prefix = f"[{tuner}] " if tuner else ""
        names = ("{task.description}", "{task.fields[count]}", "{task.fields[status]}")
        title, *figures = (progress.TextColumn(name, markup=False) for name in names)
        columns = (title, progress.BarColumn(bar_width=20), *figures)
        self._bar = progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task: Any = None
        self._study: Study | None = None
        self._last_line = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, title: str, study: Study, trials: int | None, end: float | None) -> None:
        """Follow a study until ``trials`` are finished or ``time.monotonic()`` reaches ``end``."""
        self.stop()
        self._title, self._study, self._trials, self._end, self._begin = title, study, trials, end, time.monotonic()
        self._task = self._bar.add_task(title, total=1.0, count="", status="starting")
        self._last_line = time.monotonic()
        self.update()

    def update(self) -> None:
        """Show the study's present state."""
        if self._study is None:
            return
        now, done = time.monotonic(), len(self._study.finished)
        count = f"{done} trials" if self._trials is None else f"{done}/{self._trials} trials"
        status = status_text(self._study, self._end, now)
        self._bar.update(self._task, completed=self._fraction(now, done), count=count, status=status)
        self._line = f"{self._title}: {count}, {status}"
        if not self.console.is_terminal and now - self._last_line >= LINE_EVERY_S and done != self._trials:
            self.note(self._line)
            self._last_line = now

    def stop(self) -> None:
        """Print the final line of a search."""
        if self._study is not None:
            self._end = None
            self.update()
            self._bar.remove_task(self._task)
            self.note(self._line)
        self._study = None

    def note(self, text: str) -> None:
        """Print one line of plain text."""
        self.console.print(f"{self._prefix}{text}", markup=False, highlight=False, soft_wrap=True)

    def _fraction(self, now: float, done: int) -> float:
        by_trials = done / self._trials if self._trials else 0.0
        by_time = (now - self._begin) / max(1e-9, self._end - self._begin) if self._end is not None else 0.0
        return min(1.0, max(by_trials, by_time))
