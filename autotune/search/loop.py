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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autotune.measure.trial import Outcome
from autotune.search.pruning import why_hopeless
from autotune.search.study import Proposal, Study
from kernelgen.errors import CompileError
from kernelgen.schedule.knobs import Knobs


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a kernel: seconds that it took, registers, spills and the like."""

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
    patience: int | None = None,
    overlap: bool = False,
    workers: int = 1,
    prune: bool = True,
    pool: Executor | None = None,
    on_trial: Callable[[dict[str, Any]], None] = lambda line: None,
) -> str:
    """Returns ``trials``, ``time``, ``patience``, ``exhausted`` or ``interrupted`` (Ctrl-C).

    trials: finished trials of this study at which to stop, those of earlier runs included. deadline: as
    ``time.monotonic()``; the first trial, the default schedule, is measured in any case. patience: stop after so many
    trials without a gain (:attr:`Study.stale`). overlap: compile while the device measures (on a CPU the compiler
    would disturb the clock). workers: compilers at a time. prune: skip what the compiler's report shows to be
    hopeless. pool: where compilations run, by default threads.
    """
    ahead: Ahead = deque()
    pool = pool or ThreadPoolExecutor(workers)
    try:
        while trials is None or len(study.finished) < trials:
            if deadline is not None and study.finished and time.monotonic() >= deadline:
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
            index = _next_ready(ahead) if overlap and study.finished else 0
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


def _fill(study: Study, ahead: Ahead, pool: Executor, prepare: Prepare, room: int) -> None:
    while len(ahead) < room:
        proposal = study.propose()
        if proposal is None:
            return
        ahead.append((proposal, pool.submit(prepare, proposal.schedule)))


def _next_ready(ahead: Ahead) -> int:
    """The first whose compilation has ended: a slow one must not keep the device waiting for those behind it."""
    wait([future for _, future in ahead], return_when=FIRST_COMPLETED)
    return next(index for index, (_, future) in enumerate(ahead) if future.done())


def _outcome(study: Study, proposal: Proposal, future: Future[Compiled], measure: Measure, prune: bool) -> Outcome:
    try:
        compiled = future.result()
    except CompileError as error:
        return Outcome("compile", str(error)[-2000:])
    seconds = round(compiled.seconds, 3)
    best = study.best
    hopeless = why_hopeless(compiled.resources, best["resources"] if best else None) if prune else None
    if hopeless is not None:
        return Outcome("pruned", hopeless, resources=compiled.resources, compile_s=seconds)
    begin = time.monotonic()
    outcome = measure(proposal.schedule, study.best_us)
    return dataclasses.replace(outcome, compile_s=seconds, measure_s=round(time.monotonic() - begin, 3))
