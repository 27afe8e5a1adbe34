"""Several tuners of one host, a process for each device: they share every study and the results folder.

A config, devices and what ``autotune.tune.tune`` takes enter; the studies and entries that the tuners leave in the
results folder are the result. A tuner that dies takes nothing with it but the trial that it was at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.config import TuneConfig
from autotune.devices import on_each

# budget, trials, sampler, storage, seed, results_dir, with_peers, patience
Options = tuple[float | None, int | None, str | None, str | None, int, Path, bool, int | None]


def tune_together(config: TuneConfig, devices: Sequence[str], *options: *Options) -> None:
    """One tuner a device; ``options``: what follows the device in the arguments of ``tune``.

    Returns when all have ended. KeyboardInterrupt if the user ended them, StudyError if one did not end well.
    """
    on_each(devices, "tuner", _tune, config, options, len(devices))


def _tune(device: str, name: str, config: TuneConfig, options: Options, tuners: int) -> None:
    from rich.console import Console

    from autotune.tune import tune

    # Bars of several processes would overwrite each other, lines do not.
    console = Console(stderr=True, force_terminal=False)
    tune(config, device, *options, console, tuners, name)
