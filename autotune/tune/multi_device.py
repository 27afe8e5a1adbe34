"""Several tuners on one host, one process per device, which share every study and the results folder.

Their studies and entries in the results folder are the result. A tuner that dies loses only its current trial.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.measure.worker import names_of, on_each
from autotune.workload.config import TuneConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

# budget, trials, sampler, storage, seed, results_dir, with_peers, patience
Options = tuple[float | None, int | None, str | None, str | None, int, Path, bool | None, int | None]


def tune_together(config: TuneConfig, devices: Sequence[str], *options: Unpack[Options]) -> None:
    """Run one tuner per device; ``options``: the arguments of ``tune`` after the device.

    Returns when all have ended. Raises KeyboardInterrupt if the user ended them, StudyError if one failed.
    """
    on_each(devices, "tuner", _tune, config, options, names_of(devices))


def begun_elsewhere(config: TuneConfig, turn: int, tuners: int) -> TuneConfig:
    """The config rotated for one of several tuners: each starts at another workload.

    So tuners work on different workloads first, and join each other's at the end. Only for searches with a trial limit:
    with a time limit, a tuner that joins late would search on and compare again.
    """
    start = turn * len(config.workloads) // tuners
    return dataclasses.replace(config, workloads=config.workloads[start:] + config.workloads[:start])


def _tune(device: str, name: str, config: TuneConfig, options: Options, tuners: list[str]) -> None:
    from rich.console import Console

    from autotune.tune.run import tune

    budget, trials = options[:2]
    if budget is None and config.budget_s is None and (trials or config.trials or config.workload_trials):
        config = begun_elsewhere(config, tuners.index(name), len(tuners))
    # Progress bars of several processes would overwrite each other; lines do not.
    console = Console(stderr=True, force_terminal=False)
    tune(config, device, *options, console, len(tuners), name)
