"""What one run of the tuner is asked for: arguments over the config's values over defaults, as :class:`Settings`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.database.store import writable_results_dir
from autotune.search.sharing.claims import Sharing
from autotune.workload.config import TuneConfig, by_problem, check_seed, load_config
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts, device_facts

if TYPE_CHECKING:
    import optuna

DEFAULT_BUDGET_S = 600.0
# Trials without a gain of 1% after which a search on a GPU ends. In the 12 studies of results/trials on an H200 (160
# to 400 trials each) 60 would have ended up to 11% above what the whole study found, 100 as well in one of them, 120
# at most 2%. At 6 to 10 trials a second that is some 15 s. On a CPU a trial takes seconds and the budget is the limit.
PATIENCE = {"cpu": None, "cuda": 120}
# How long each contender of a comparison without peers is sampled in a direction. Kernels of ours take at most a few
# milliseconds on a GPU, so that this is the full number of samples for nearly all, and no waiting for the rest.
SECONDS_EACH = {"cpu": 2.0, "cuda": 0.4}
SECONDS_EACH_WITH_PEERS = 2.0


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
    # Of workloads with a number of their own in the config.
    workload_trials: Mapping[Workload, int] = field(default_factory=dict)
    sharing: Sharing = "alone"
    # Compilers at a time.
    compilers: int = 1

    @property
    def seconds_each(self) -> float:
        return SECONDS_EACH_WITH_PEERS if self.with_peers else SECONDS_EACH[self.facts.backend]


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
    tuners: int | None = None,
) -> tuple[Settings, tuple[Workload, ...]]:
    """Arguments over the config's values over defaults.

    tuners: of this host that share their studies, through ``storage`` if one is given, else in the results folder.
    None: the results folder is this tuner's alone, but a storage that is given is shared all the same.
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
