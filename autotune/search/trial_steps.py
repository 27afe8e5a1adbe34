"""The two steps of a trial: compile a schedule here, measure it in the worker process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from autotune.measure.trial import Outcome, TrialJob, run_trial
from autotune.measure.worker import Worker
from autotune.search.loop import Compiled
from autotune.search.space import Space
from kernelgen.errors import EquituneError
from kernelgen.kernels.knobs import Knobs

# A job may take this many times the longest successful one, within these bounds.
LIMIT_FACTOR, LEAST_LIMIT_S, FIRST_LIMIT_S = 10.0, 20.0, 120.0
SAMPLING_S = {"cpu": 1.0, "cuda": 0.5}


@dataclass
class Measurer:
    """Runs trials in the worker, with a time limit derived from this study's trials so far."""

    worker: Worker
    direction: str
    sampling_s: float
    longest_s: float = 0.0

    def __call__(self, schedule: Knobs, best_us: float | None) -> Outcome:
        limit = max(LEAST_LIMIT_S, LIMIT_FACTOR * self.longest_s)
        if self.worker.fresh or not self.longest_s:
            limit = FIRST_LIMIT_S
        begin = time.monotonic()
        outcome = run_trial(self.worker, TrialJob(self.direction, schedule, best_us, self.sampling_s), limit)
        if outcome.ok and limit < FIRST_LIMIT_S:
            self.longest_s = max(self.longest_s, time.monotonic() - begin)
        elif outcome.ok:
            self.longest_s = self.longest_s or self.sampling_s
        return outcome


def compile_ahead(space: Space, schedule: Knobs) -> Compiled:
    """Compile the kernel of a schedule into the cache, where the worker finds it."""
    from kernelgen.build.compiler import compile_source
    from kernelgen.kernels.dispatch import emit

    begin = time.perf_counter()
    binary = compile_source(emit(space.plan(schedule)), space.spec.facts)
    return Compiled(time.perf_counter() - begin, binary.resources)


class CompilersAhead:
    """Compile the first schedules of the next search during the present one, so that the device does not wait."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4))

    def __enter__(self) -> CompilersAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def compile(self, space: Space, schedules: Iterable[Knobs]) -> None:
        """Start compiling; returns at once. The search compiles failures again, and records them."""
        for schedule in schedules:
            self._pool.submit(_compile_quietly, space, schedule)


def _compile_quietly(space: Space, schedule: Knobs) -> None:
    with suppress(EquituneError):
        compile_ahead(space, schedule)
