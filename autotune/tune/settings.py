"""Settings of a tuning run: arguments override the config's values, which override defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.database.store import writable_results_dir
from autotune.search.sharing.claims import Sharing
from autotune.workload.config import TuneConfig, by_problem, load_config
from autotune.workload.toml_tables import check_seed
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts, device_facts

if TYPE_CHECKING:
    import optuna

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
