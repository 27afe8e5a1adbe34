"""The first run of a direction that has a shortlist: every schedule runs on the call's own tensors; the fastest stays.

A shortlist is the schedule that is likeliest to be fast where nobody has searched, and the next likely ones. All are
compiled at once, in threads. Then they run by turns with a cold cache, a few times each. One whose results differ from
the first one's is not taken. Processes that train one model together (``torch.distributed``) take the choice of the
process that made it first, so that all of them run the same kernels.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import Direction
from kernelgen.compile.compiler import in_threads
from kernelgen.errors import EquituneError
from kernelgen.runtime.call import AnyRunner, Graph, Operands

Run = Callable[[], dict[str, Tensor]]

# Most and fewest timed runs of each schedule, and the seconds after which no more rounds begin.
ROUNDS, FEWEST_ROUNDS, SECONDS = 7, 2, 0.3
# Relative difference of two schedules' results beyond rounding, by dtype.
SAME = {torch.float32: 1e-4, torch.float64: 1e-10}
# Another schedule must be this much faster than the first one.
GAIN = 1.01
# Device clock cycles of the wait before a timed run, in which the host launches it: about a millisecond.
_WAIT_CYCLES = 2_000_000
# A kernel on fewer edges is all launch.
FEWEST_EDGES = 32
# Elements of a result that are compared, at most.
_COMPARED = 1 << 24


class Choice(NamedTuple):
    """What a first run found. times_us: of each schedule, infinite for one that failed or differed.

    operator: the operator that ran; schedules: its shortlist; place: of the schedule that stays.
    """

    operator: Any
    direction: Direction
    num_edges: int
    num_out: int
    schedules: tuple[Any, ...]
    times_us: tuple[float, ...]
    place: int


# Called with every choice, in the thread of the call. They must not raise.
LISTENERS: list[Callable[[Choice], None]] = []


def can_choose(x: Tensor, num_edges: int) -> bool:
    """Whether a call tells which schedule is fast: it is no check on a few edges, and is not being captured."""
    return num_edges >= FEWEST_EDGES and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def choose(
    operator: Any,
    direction: Direction,
    schedules: tuple[Any, ...],
    make: Callable[[Any], AnyRunner],
    operands: Operands,
    graph: Graph,
) -> Choice:
    """The fastest of a shortlist on a call's tensors. make: the runner of a schedule, compiled.

    A schedule that cannot be made is left out; if none can, the first one's error is raised.
    """
    made = in_threads(make, schedules, EquituneError, len(schedules))
    usable = [None if isinstance(each, EquituneError) else functools.partial(each, operands, graph) for each in made]
    if not any(usable):
        assert isinstance(made[0], EquituneError)
        raise made[0]
    x = operands[0]
    assert x is not None
    names = (operator.problem.key, operator.operation, operator.layout, str(x.dtype), direction.name)
    times_us = agreed((*names, *(schedule.key for schedule in schedules)), lambda: times_of(usable, x.device))
    if usable[best_of(times_us)] is None:
        times_us = times_of(usable, x.device)
    return Choice(operator, direction, graph.num_edges, graph.num_out, schedules, times_us, best_of(times_us))


def agreed(shortlist: Sequence[object], take: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """The times of a shortlist by ``take``, or those that another process of ``torch.distributed``'s group took first.

    Nobody waits for another process: all take them, unless one is ready, and the first one's count.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return take()
    store = distributed.distributed_c10d._get_default_store()
    key = "equitune/first-run/" + hashlib.sha256("\n".join(map(str, shortlist)).encode()).hexdigest()
    if not store.check([key]):
        store.compare_set(key, "", json.dumps(take()))
    return tuple(json.loads(store.get(key)))


def times_of(runs: Sequence[Run | None], device: torch.device) -> tuple[float, ...]:
    """Median microseconds of each run; infinite for None, and for results that differ from the first run's.

    Only the first one counts if there is no memory for more.
    """
    first = next(place for place, run in enumerate(runs) if run is not None)
    times: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()
    try:
        with torch.no_grad():
            alike = _alike(runs, first)
            for rounds in itertools.count(1):
                taken = _time_cuda(alike, device) if device.type == "cuda" else _time_host(alike)
                for place, time_us in taken.items():
                    times[place].append(time_us)
                enough = time.perf_counter() - begin > SECONDS and rounds >= FEWEST_ROUNDS
                if enough or rounds == ROUNDS:
                    break
    except torch.OutOfMemoryError:
        return tuple(0.0 if place == first else math.inf for place in range(len(runs)))
    return tuple(statistics.median(found) if found else math.inf for found in times)


def best_of(times_us: Sequence[float]) -> int:
    """The place of the least time; an earlier one, unless a later one is faster by :data:`GAIN`."""
    best = 0
    for place, time_us in enumerate(times_us):
        if time_us * GAIN < times_us[best]:
            best = place
    return best


def _alike(runs: Sequence[Run | None], first: int) -> dict[int, Run]:
    """The runs whose results are those of the first one, by their places; this also warms them up."""
    found: dict[int, Run] = {}
    expected: dict[str, Tensor] = {}
    for place, run in enumerate(runs):
        if run is None:
            continue
        results = run()
        if place == first:
            expected = results
        if all(_same(results[slot], expected[slot]) for slot in expected):
            found[place] = run
    return found


def _same(given: Tensor, expected: Tensor) -> bool:
    here, there = (tensor.reshape(-1)[:_COMPARED] for tensor in (given, expected))
    scale = float(there.abs().amax()) if there.numel() else 0.0
    difference = float((here - there).abs().amax()) if there.numel() else 0.0
    # Results that are not numbers cannot be compared: the first schedule's stay.
    return math.isfinite(scale) and difference <= SAME[expected.dtype] * scale


def _time_cuda(runs: dict[int, Run], device: torch.device) -> dict[int, float]:
    """One time of each run, by events, each with a cold L2 and launched before the device reaches it."""
    events: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
    with torch.cuda.device(device):
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        evicting = torch.empty(max(size, 32 << 20) // 4, dtype=torch.float32, device=device)
        for place, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            evicting.zero_()
            torch.cuda._sleep(_WAIT_CYCLES)
            start.record()
            run()
            end.record()
            end.synchronize()
            events[place] = (start, end)
    return {place: start.elapsed_time(end) * 1e3 for place, (start, end) in events.items()}


def _time_host(runs: dict[int, Run]) -> dict[int, float]:
    found = {}
    for place, run in runs.items():
        begin = time.perf_counter_ns()
        run()
        found[place] = (time.perf_counter_ns() - begin) / 1e3
    return found
