"""A model's time with the schedules that it had before and with those that it loads now, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autotune.measure.timing import ratio_interval
from autotune.modules.base import TunedModule
from autotune.modules.convolution import TunedRows
from autotune.tune.from_model.needs import every_module

# Rounds of one call before and one after, at least and at most; between them the time decides.
FEWEST_ROUNDS, MOST_ROUNDS = 2, 50
# So many give an interval; a model of which this many take no more than SECONDS gets more.
ENOUGH_ROUNDS = 6
SECONDS = 5.0


@dataclass(frozen=True)
class PassTimes:
    """Medians in ms. low, high: 95% interval of ``before_ms / after_ms``, (0, inf) if there are too few ``rounds``."""

    name: str
    before_ms: float
    after_ms: float
    low: float
    high: float
    rounds: int

    @property
    def ratio(self) -> float:
        return self.before_ms / self.after_ms


class Loaded:
    """The operators that a model's modules have loaded: kept here while others are loaded in their place."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = (module for _, module in every_module(model))
        self._modules = [module for module in modules if isinstance(module, TunedModule | TunedRows)]
        self._states = [dict(vars(module)) for module in self._modules]

    def forget(self) -> None:
        """Make the modules look their schedules up again at the next call."""
        for module in self._modules:
            module._forget_operators()

    def put_back(self) -> None:
        """Give the modules the operators kept here."""
        for module, state in zip(self._modules, self._states, strict=True):
            vars(module).update(state)


def compare(
    passes: Mapping[str, Callable[[], Any]],
    model: torch.nn.Module,
    before: Loaded,
    device: torch.device,
    seconds: float = SECONDS,
) -> list[PassTimes]:
    """Time each pass in turn with the operators of ``before`` and with those that the model loads now, which it keeps.

    Only the schedules differ: both sides are one model, in one process, on the same inputs. The passes have run with
    ``before``. seconds: for each pass, if ENOUGH_ROUNDS take longer than SECONDS.
    """
    before.forget()
    for call in passes.values():
        call()
    after = Loaded(model)
    found = []
    for name, call in passes.items():
        samples: dict[str, list[float]] = {"before": [], "after": []}
        begin = time.monotonic()
        while _goes_on(len(samples["after"]), time.monotonic() - begin, seconds):
            for side, loaded in (("before", before), ("after", after)):
                loaded.put_back()
                samples[side].append(timed(call, device))
        low, high = ratio_interval(samples["after"], samples["before"], paired=True)
        old, new = (1e3 * statistics.median(samples[side]) for side in ("before", "after"))
        found.append(PassTimes(name, old, new, low, high, len(samples["after"])))
    return found


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, with all that it queued on the device."""
    _wait(device)
    begin = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _goes_on(rounds: int, passed: float, seconds: float) -> bool:
    if rounds < FEWEST_ROUNDS:
        return True
    return rounds < MOST_ROUNDS and passed < (seconds if rounds < ENOUGH_ROUNDS else min(seconds, SECONDS))
