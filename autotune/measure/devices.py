"""Run a function on several devices of one host, with one process per device.

The function's files on the disk are the result. Ctrl-C is forwarded once to each process. A process that dies loses
only its current work.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from autotune.errors import StudyError
from autotune.measure import processes
from autotune.measure.fork_server import CONTEXT
from kernelgen.errors import EquituneError, InputError

FAILED = 2


def devices_named(text: str, resolve: Callable[[str], str]) -> list[str]:
    """Devices from ``all`` (GPUs), ``0,1`` or ``cpu,cpu``; ``resolve`` rejects missing ones."""
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
        raise InputError(f"--devices is {text!r}; expected GPUs or the CPU, not both: they share no studies")
    twice = sorted({device for device in devices if devices.count(device) > 1} - {"cpu"})
    if twice:
        raise InputError(
            f"--devices names {', '.join(twice)} twice; expected each GPU once: "
            "two tuners on one GPU disturb each other's times"
        )
    return devices


def names_of(devices: Sequence[str]) -> list[str]:
    """Unique names of the devices' processes."""
    return [device if devices.count(device) == 1 else f"{device} {n}" for n, device in enumerate(devices, 1)]


def on_each(devices: Sequence[str], what: str, work: Callable[..., None], *arguments: Any) -> None:
    """Start one process per device, which calls ``work(device, name, *arguments)``. ``what``: its noun in messages.

    Each sees only its own GPU, as cuda:0, because some libraries always use the first GPU.
    Returns when all have ended. Raises KeyboardInterrupt if the user ended them, StudyError if one failed.
    """
    if devices.count("cpu") > 1:
        print(
            f"note: a {what} beside another on one CPU disturbs its timings; compare nothing with them", file=sys.stderr
        )
    # Not daemons, because they start processes themselves.
    started = {
        name: CONTEXT.Process(target=_work, args=(work, device, name, arguments))
        for name, device in zip(names_of(devices), devices, strict=True)
    }
    for process in started.values():
        process.start()
    interrupted = False
    for process in started.values():
        while process.is_alive():
            try:
                process.join()
            except KeyboardInterrupt:
                interrupted = True
                _interrupt(started.values())
    lost = [f"the {what} on {name} {_end(process)}" for name, process in started.items() if process.exitcode]
    if lost:
        raise StudyError(f"{'; '.join(lost)}. Finished work is kept; to continue, run the same command again")
    if interrupted:
        raise KeyboardInterrupt


def _interrupt(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)


def _end(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code}, see above)"


def _work(work: Callable[..., None], device: str, name: str, arguments: tuple) -> None:
    # A new process group: the terminal's Ctrl-C reaches the parent alone, which forwards it once.
    os.setpgrp()
    processes.end_with_parent()
    warnings.showwarning = lambda message, *_, **__: print(f"[{name}] warning: {message}", file=sys.stderr)
    try:
        work(_alone(device), name, *arguments)
    except EquituneError as error:
        print(f"[{name}] error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(0)


def _alone(device: str) -> str:
    """Hide all other GPUs from this process, which must not have used one yet; returns the device's new name."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device
    index = number or "0"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)].strip() if visible else index
    return "cuda:0"
