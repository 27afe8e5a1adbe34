"""The loop of a search: propose, compile ahead in parallel, measure one after another, until a limit is reached.

A :class:`Study` and two functions (compile a schedule; measure a schedule) enter; the reason for the end leaves. All
that was measured is in the study, whatever ends the loop.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from autotune.jobs import Outcome
from autotune.study import Proposal, Study
from kernelgen.errors import CompileError
from kernelgen.schedule import Schedule

# Compiles a schedule into the cache and returns the seconds it took; raises CompileError.
Prepare = Callable[[Schedule], float]
# Measures a schedule, given the best time so far.
Measure = Callable[[Schedule, float | None], Outcome]


def search(
    study: Study,
    prepare: Prepare,
    measure: Measure,
    *,
    trials: int | None = None,
    deadline: float | None = None,
    overlap: bool = False,
    workers: int = 1,
    on_trial: Callable[[dict[str, Any]], None] = lambda line: None,
) -> str:
    """Returns ``trials``, ``time``, ``exhausted`` or ``interrupted`` (Ctrl-C).

    trials: finished trials of this study at which to stop, those of earlier runs included. deadline: as
    ``time.monotonic()``; the first trial, the default schedule, is measured in any case. overlap: compile while the
    device measures (on a CPU the compiler would disturb the clock). workers: compilers at a time.
    """
    ahead: deque[tuple[Proposal, Future[float]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        while trials is None or len(study.finished) < trials:
            if deadline is not None and study.finished and time.monotonic() >= deadline:
                return "time"
            if overlap or not ahead:
                room = workers if trials is None else min(workers, trials - len(study.finished))
                with uninterrupted():
                    _fill(study, ahead, pool, prepare, room)
            if not ahead:
                return "exhausted"
            if not overlap:
                wait([future for _, future in ahead])
            proposal, future = ahead[0]
            outcome = _measured(proposal, future, measure, study.best_us)
            with uninterrupted():
                ahead.popleft()
                on_trial(study.finish(proposal, outcome))
        return "trials"
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        with uninterrupted():
            pool.shutdown(wait=True, cancel_futures=True)
            for proposal, _ in ahead:
                study.drop(proposal)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block: records and storage must not be left half told.

    Only the main thread is ever interrupted; elsewhere there is nothing to put off.
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


def _fill(
    study: Study,
    ahead: deque[tuple[Proposal, Future[float]]],
    pool: ThreadPoolExecutor,
    prepare: Prepare,
    room: int,
) -> None:
    while len(ahead) < room:
        proposal = study.propose()
        if proposal is None:
            return
        ahead.append((proposal, pool.submit(prepare, proposal.schedule)))


def _measured(proposal: Proposal, future: Future[float], measure: Measure, best_us: float | None) -> Outcome:
    try:
        compile_s = future.result()
    except CompileError as error:
        return Outcome("compile", str(error)[-2000:])
    return dataclasses.replace(measure(proposal.schedule, best_us), compile_s=round(compile_s, 3))
