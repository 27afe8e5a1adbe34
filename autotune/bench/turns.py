"""The order of a bench: which group of workloads is next, and its process, set up while others are measured.

A group has one kind: what peers build for it serves all its graphs.
"""

from __future__ import annotations

import multiprocessing.connection
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from autotune.bench.plans import Plan
from autotune.compare.ahead import CompileAhead
from autotune.compare.precompile import kind_of
from autotune.measure.worker import START_LIMIT_S, Worker

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

Group = list[Plan]
# The next group; None if none is left or, unless it must be given, if none is ready.
Take = Callable[[bool], "Group | None"]


def ready_first(groups: Sequence[Group], ahead: CompileAhead) -> Take:
    """Groups in their order, those first that wait for no compilation."""
    left = list(groups)

    def take(must: bool) -> Group | None:
        kinds = [kind_of(group[0].workload) for group in left]
        if left and must:
            ahead.wait_for_one(kinds)
        for place, kind in enumerate(kinds):
            if ahead.is_ready(kind):
                return left.pop(place)
        return None

    return take


def in_turn(groups: Sequence[Group], turns: Synchronized[int]) -> Take:
    """Groups in their order, shared among processes that count ``turns``."""

    def take(must: bool) -> Group | None:
        with turns.get_lock():
            turn = turns.value
            turns.value += 1
        return groups[turn] if turn < len(groups) else None

    return take


def with_processes(take: Take, start: Callable[[Group], Worker], limit: int) -> Iterator[tuple[Worker, Group]]:
    """Each group with its process, the one that is set up first; ``limit``: how many processes live at a time."""
    waiting: list[tuple[Worker, Group]] = []
    with ExitStack() as stack:
        while True:
            while len(waiting) < limit and (group := take(not waiting)) is not None:
                worker = stack.enter_context(start(group))
                worker.launch()
                waiting.append((worker, group))
            if not waiting:
                return
            chosen = waiting.pop(_first_set_up([worker for worker, _ in waiting]))
            yield chosen
            chosen[0].close()


def _first_set_up(workers: Sequence[Worker]) -> int:
    """The place of the first process that has answered, after waiting for one; the first if none does in time."""
    if len(workers) == 1:
        return 0
    connections = [worker.launch() for worker in workers]
    ready = multiprocessing.connection.wait(connections, START_LIMIT_S)
    return next((place for place, connection in enumerate(connections) if connection in ready), 0)
