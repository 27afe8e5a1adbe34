"""The search loop: propose schedules, compile them in parallel, measure them one by one, until a limit is reached.

It takes a :class:`Study` and two functions (compile a schedule; measure a schedule), and returns why it ended. The
study holds everything measured, whatever ends the loop.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from autotune.measure.space import Space
from autotune.measure.trial import Outcome, TrialJob, run_trial
from autotune.measure.worker import Worker
from autotune.search.study import Proposal, Study
from autotune.workload.objective import TIME
from kernelgen.device import DeviceFacts
from kernelgen.errors import CompileError, EquituneError
from kernelgen.kernels.knobs import Knobs


@dataclass(frozen=True)
class Compiled:
    """The compiler's report on a kernel: compile time in seconds, registers, spills and the like."""

    seconds: float
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Compiles a schedule into the cache; raises CompileError.
Prepare = Callable[[Knobs], Compiled]
# Measures a schedule, given the least time so far.
Measure = Callable[[Knobs, float | None], Outcome]
Ahead = deque[tuple[Proposal, Future[Compiled]]]


def search(
    study: Study,
    prepare: Prepare,
    measure: Measure,
    *,
    trials: int | None = None,
    deadline: float | None = None,
    fewest: int = 1,
    latest: float | None = None,
    patience: int | None = None,
    overlap: bool = False,
    workers: int = 1,
    prune: bool = True,
    pool: Executor | None = None,
    on_trial: Callable[[dict[str, Any]], None] = lambda line: None,
) -> str:
    """Returns ``trials``, ``time``, ``patience``, ``exhausted`` or ``interrupted`` (Ctrl-C).

    trials: stop at this number of finished trials, those of earlier runs included. deadline: in ``time.monotonic()``;
    the first ``fewest`` trials (the default schedule is the first) are measured until ``latest``, by default in any
    case. patience: stop after this many trials without a gain (:attr:`Study.stale`). overlap: compile while the device
    measures (on a CPU compilers would disturb the timing). workers: number of parallel compilers. prune: skip kernels
    that cannot win according to the compiler's report. pool: where compilations run, by default threads.
    """
    ahead: Ahead = deque()
    pool = pool or ThreadPoolExecutor(workers)
    try:
        while trials is None or len(study.finished) < trials:
            limit = deadline if len(study.finished) >= fewest else latest
            if limit is not None and time.monotonic() >= limit:
                return "time"
            if patience is not None and study.stale >= patience:
                return "patience"
            if overlap or not ahead:
                room = workers if trials is None else min(workers, trials - len(study.finished))
                with uninterrupted():
                    _fill(study, ahead, pool, prepare, room)
            if not ahead:
                return "exhausted"
            if not overlap:
                wait([future for _, future in ahead])
            index: int | None = 0
            if overlap and study.finished:
                # The first that is compiled, so that the device does not wait for a slow one.
                seconds = None if limit is None else max(0.0, limit - time.monotonic())
                wait([future for _, future in ahead], seconds, FIRST_COMPLETED)
                index = next((place for place, (_, future) in enumerate(ahead) if future.done()), None)
            if index is None:
                return "time"
            proposal, future = ahead[index]
            outcome = _outcome(study, proposal, future, measure, prune)
            with uninterrupted():
                del ahead[index]
                on_trial(study.finish(proposal, outcome))
        return "trials"
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        with uninterrupted():
            # Without overlap compilers would disturb what is timed next; with it nobody waits minutes for a slow one.
            pool.shutdown(wait=not overlap, cancel_futures=True)
            for proposal, _ in ahead:
                study.drop(proposal)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, so that records and storage stay consistent.

    Only the main thread can be interrupted; other threads have nothing to delay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _fill(study: Study, ahead: Ahead, pool: Executor, prepare: Prepare, room: int) -> None:
    while len(ahead) < room:
        proposal = study.propose()
        if proposal is None:
            return
        ahead.append((proposal, pool.submit(prepare, proposal.schedule)))


def _outcome(study: Study, proposal: Proposal, future: Future[Compiled], measure: Measure, prune: bool) -> Outcome:
    try:
        compiled = future.result()
    except CompileError as error:
        return Outcome("compile", str(error)[-2000:])
    seconds, best = round(compiled.seconds, 3), study.best
    known = compiled.resources, best["resources"] if best else None, study.space.spec.facts
    if prune and (hopeless := why_hopeless(*known)) is not None:
        return Outcome("pruned", hopeless, resources=compiled.resources, compile_s=seconds)
    begin = time.monotonic()
    outcome = measure(proposal.schedule, study.pace_us)
    return dataclasses.replace(outcome, compile_s=seconds, measure_s=round(time.monotonic() - begin, 3))


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
    figures: tuple[str, ...] = TIME.figures

    def __call__(self, schedule: Knobs, best_us: float | None) -> Outcome:
        limit = max(LEAST_LIMIT_S, LIMIT_FACTOR * self.longest_s)
        if self.worker.fresh or not self.longest_s:
            limit = FIRST_LIMIT_S
        begin = time.monotonic()
        job = TrialJob(self.direction, schedule, best_us, self.sampling_s, figures=self.figures)
        outcome = run_trial(self.worker, job, limit)
        if outcome.ok and limit < FIRST_LIMIT_S:
            self.longest_s = max(self.longest_s, time.monotonic() - begin)
        elif outcome.ok:
            self.longest_s = self.longest_s or self.sampling_s
        return outcome


def compile_ahead(space: Space, schedule: Knobs) -> Compiled:
    """Compile the kernel of a schedule into the cache, where the worker finds it."""
    from kernelgen.compile.compiler import compile_source
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


# Skip compiled kernels that cannot win, judged by the registers that the compiler spills.
#
# Evidence from 7,541 fused trials on an H200 (``results/trials``): 436 spill more than 640 bytes per thread (loads and
# stores), and the fastest measured one of these took 1.39 times its study's best. At 580 bytes a kernel for one
# molecule, where launch and latency matter most, came within 1.08 times. Smaller spills predict nothing: winners spill
# up to 464 bytes. Nor does occupancy: in most studies winners keep 8 warps on a multiprocessor, close to the fewest
# that occurred. Spilled registers live in a multiprocessor's L1: with 8 warps these 640 bytes (320 of storage) fill 80
# KB of an H200's 256 KB. So a multiprocessor with a smaller L1 has a smaller limit in proportion, which nothing but
# this reason supports. If a problem makes every kernel spill (many paths, float64), the limit follows the spills of the
# fastest kernel so far.

# The limit that was found on an H200, and its unified L1 cache and shared memory.
SPILL_BYTES, L1_OF_H200 = 640, 256 << 10
SPILL_RATIO = 2


def spill_limit(facts: DeviceFacts) -> int:
    """Bytes a thread (loads and stores) from which on a kernel is hopeless; older records lack the size of L1."""
    return SPILL_BYTES * (facts.l1_per_unit or L1_OF_H200) // L1_OF_H200


def why_hopeless(resources: Mapping[str, Any], best: Mapping[str, Any] | None, facts: DeviceFacts) -> str | None:
    """Why a kernel with these resources cannot win, or None; ``best``: those of the fastest so far, None if none.

    Nothing is skipped before a first time, so the first schedule of a study is always measured.
    """
    if best is None:
        return None
    spills, limit = resources.get("spill_bytes", 0), max(spill_limit(facts), SPILL_RATIO * best.get("spill_bytes", 0))
    if spills <= limit:
        return None
    return (
        f"spills {spills} bytes a thread; the fastest so far spills {best.get('spill_bytes', 0)}, the limit is {limit}"
    )
