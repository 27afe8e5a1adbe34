"""The search loop: propose schedules, compile them in parallel, measure them one by one, until a limit is reached.

It takes a :class:`Study` and two functions (compile a schedule; measure a schedule), and returns why it ended. The
study holds everything measured, whatever ends the loop.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autotune.measure.trial import Outcome
from autotune.search.pruning import why_hopeless
from autotune.search.study import Proposal, Study
from kernelgen.errors import CompileError
from kernelgen.kernels.knobs import Knobs


@dataclass(frozen=True)
class Compiled:
    """The compiler's report on a kernel: compile time in seconds, registers, spills and the like."""

    seconds: float
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Compiles a schedule into the cache; raises CompileError.
Prepare = Callable[[Knobs], Compiled]
# Measures a schedule, given the best time so far.
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
    patience: int | None = None,
    overlap: bool = False,
    workers: int = 1,
    prune: bool = True,
    pool: Executor | None = None,
    on_trial: Callable[[dict[str, Any]], None] = lambda line: None,
) -> str:
    """Returns ``trials``, ``time``, ``patience``, ``exhausted`` or ``interrupted`` (Ctrl-C).

    trials: stop at this number of finished trials, those of earlier runs included. deadline: in ``time.monotonic()``;
    the first ``fewest`` trials are measured in any case (the first is the default schedule). patience: stop after this
    many trials without a gain (:attr:`Study.stale`). overlap: compile while the device measures (on a CPU compilers
    would disturb the timing). workers: number of parallel compilers. prune: skip kernels that cannot win according to
    the compiler's report. pool: where compilations run, by default threads.
    """
    ahead: Ahead = deque()
    pool = pool or ThreadPoolExecutor(workers)
    try:
        while trials is None or len(study.finished) < trials:
            limit = deadline if len(study.finished) >= fewest else None
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
            index = _next_ready(ahead, limit) if overlap and study.finished else 0
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


def _next_ready(ahead: Ahead, limit: float | None) -> int | None:
    """Index of the first finished compilation, so that the device does not wait for a slow one; None at the limit."""
    seconds = None if limit is None else max(0.0, limit - time.monotonic())
    wait([future for _, future in ahead], seconds, FIRST_COMPLETED)
    return next((index for index, (_, future) in enumerate(ahead) if future.done()), None)


def _outcome(study: Study, proposal: Proposal, future: Future[Compiled], measure: Measure, prune: bool) -> Outcome:
    try:
        compiled = future.result()
    except CompileError as error:
        return Outcome("compile", str(error)[-2000:])
    seconds = round(compiled.seconds, 3)
    best = study.best
    hopeless = None
    if prune:
        facts = study.space.spec.facts
        hopeless = why_hopeless(compiled.resources, best["resources"] if best else None, facts)
    if hopeless is not None:
        return Outcome("pruned", hopeless, resources=compiled.resources, compile_s=seconds)
    begin = time.monotonic()
    outcome = measure(proposal.schedule, study.best_us)
    return dataclasses.replace(outcome, compile_s=seconds, measure_s=round(time.monotonic() - begin, 3))
