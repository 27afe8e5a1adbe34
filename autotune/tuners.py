"""Several tuners of one host, a process for each device: they share every study and the results folder.

A config, devices and what ``autotune.tune.tune`` takes enter; the studies and entries that the tuners leave in the
results folder are the result. Ctrl-C is handed on to each once; a tuner that dies takes nothing with it but the trial
that it was at.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from autotune.config import TuneConfig
from autotune.errors import StudyError
from kernelgen.errors import EquituneError, InputError

FAILED = 2
# budget, trials, sampler, storage, seed, results_dir, with_peers, patience
Options = tuple[float | None, int | None, str | None, str | None, int, Path, bool, int | None]


def devices_named(text: str, resolve: Callable[[str], str]) -> list[str]:
    """Devices from ``all`` (GPUs), ``0,1`` or ``cpu,cpu``; ``resolve`` refuses those that are not here."""
    import torch

    if text.strip() == "all":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise InputError("--devices all: torch sees no CUDA device; expected GPUs, or devices by name: cpu,cpu")
        return [f"cuda:{index}" for index in range(count)]
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(
            f"--devices is {text!r}; expected all, numbers of GPUs (0,1), or names (cuda:0,cuda:1 or cpu,cpu)"
        )
    devices = [resolve(f"cuda:{name}" if name.isdecimal() else name) for name in names]
    if len({device.split(":")[0] for device in devices}) > 1:
        raise InputError(f"--devices is {text!r}; expected GPUs or the CPU, not both: they have no studies in common")
    twice = sorted({device for device in devices if devices.count(device) > 1} - {"cpu"})
    if twice:
        raise InputError(f"--devices names {', '.join(twice)} twice; expected each GPU once, for tuners share no clock")
    return devices


def tune_together(config: TuneConfig, devices: Sequence[str], *options: *Options) -> None:
    """One tuner a device; ``options``: what follows the device in the arguments of ``tune``.

    Returns when all have ended. KeyboardInterrupt if the user ended them, StudyError if one did not end well.
    """
    if devices.count("cpu") > 1:
        print(
            "note: several tuners on one CPU disturb each other's timings; compare nothing with them", file=sys.stderr
        )
    context = multiprocessing.get_context("spawn")
    names = [device if devices.count(device) == 1 else f"{device} {n}" for n, device in enumerate(devices, 1)]
    # No daemons: they have children.
    tuners = {
        name: context.Process(target=_tune, args=(config, device, options, len(devices), name))
        for name, device in zip(names, devices, strict=True)
    }
    for tuner in tuners.values():
        tuner.start()
    interrupted = False
    for tuner in tuners.values():
        while tuner.is_alive():
            try:
                tuner.join()
            except KeyboardInterrupt:
                interrupted = True
                _interrupt(tuners.values())
    lost = [f"the tuner on {name} {_end(tuner)}" for name, tuner in tuners.items() if tuner.exitcode]
    if lost:
        raise StudyError(f"{'; '.join(lost)}. All finished trials are kept; run the same command again to go on")
    if interrupted:
        raise KeyboardInterrupt


def _interrupt(tuners: Iterable[BaseProcess]) -> None:
    for tuner in tuners:
        if tuner.is_alive() and tuner.pid is not None:
            os.kill(tuner.pid, signal.SIGINT)


def _end(tuner: BaseProcess) -> str:
    code = tuner.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code}, see above)"


def _tune(config: TuneConfig, device: str, options: Options, tuners: int, name: str) -> None:
    # A terminal's Ctrl-C reaches its whole process group, and the parent hands it on: once is enough.
    os.setpgrp()
    threading.Thread(target=_follow_parent, daemon=True).start()
    warnings.showwarning = lambda message, *_, **__: print(f"[{name}] warning: {message}", file=sys.stderr)
    from rich.console import Console

    from autotune.tune import tune

    # Bars of several processes would overwrite each other, lines do not.
    console = Console(stderr=True, force_terminal=False)
    try:
        tune(config, device, *options, console, tuners, name)
    except EquituneError as error:
        print(f"[{name}] error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(0)


def _follow_parent() -> None:
    """A killed parent cannot end its tuners."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
