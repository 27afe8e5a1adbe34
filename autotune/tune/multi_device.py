"""Several tuners of one host, a process for each device: they share every study and the results folder.

A config, devices and what ``autotune.tune.run.tune`` takes enter; the studies and entries that the tuners leave in the
results folder are the result. A tuner that dies takes nothing with it but the trial that it was at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from autotune.measure.devices import names_of, on_each
from autotune.workload.config import TuneConfig

# budget, trials, sampler, storage, seed, results_dir, with_peers, patience
Options = tuple[float | None, int | None, str | None, str | None, int, Path, bool, int | None]


def tune_together(config: TuneConfig, devices: Sequence[str], *options: *Options) -> None:
    """One tuner a device; ``options``: what follows the device in the arguments of ``tune``.

    Returns when all have ended. KeyboardInterrupt if the user ended them, StudyError if one did not end well.
    """
    on_each(devices, "tuner", _tune, config, options, names_of(devices))


def begun_elsewhere(config: TuneConfig, turn: int, tuners: int) -> TuneConfig:
    """The config in the order of one of several tuners: each begins at another workload and goes round.

    So each sets up workloads of its own while there are any, and joins the others in theirs in the end. For searches
    that end with a number of trials: of a time, whoever came later would search on, and compare again.
    """
    start = turn * len(config.workloads) // tuners
    return dataclasses.replace(config, workloads=config.workloads[start:] + config.workloads[:start])


def _tune(device: str, name: str, config: TuneConfig, options: Options, tuners: list[str]) -> None:
    from rich.console import Console

    from autotune.tune.run import tune

    budget, trials = options[:2]
    if budget is None and config.budget_s is None and (trials or config.trials or config.workload_trials):
        config = begun_elsewhere(config, tuners.index(name), len(tuners))
    # Bars of several processes would overwrite each other, lines do not.
    console = Console(stderr=True, force_terminal=False)
    tune(config, device, *options, console, len(tuners), name)
