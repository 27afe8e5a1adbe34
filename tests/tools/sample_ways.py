"""Why a comparison's times on small graphs are longer than a search's: one kernel, sampled in the ways of both.

    python tests/tools/sample_ways.py --device cuda

A search calls the operator on tensors that lie between NaN, takes five samples in a row, and first runs other code. A
comparison calls through autograd, on tensors as they come, one sample at a time, while the device waits for the host.
Each line of the table changes one of these. Prints medians in microseconds, their ratio to the search's way (geometric
means at the end), and the number of kernels of a call where the profiler sees a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from graph_choice import module, workloads

from autotune.measure.kinds import AutogradPasses, guarded, measured_kind, order_of
from autotune.measure.timing import Sampler
from autotune.text import geometric_mean
from autotune.workload.workload import Workload

DIRECTIONS = ("forward", "backward", "edge_backward", "joint_backward")
ROW = 5


class Way(NamedTuple):
    """between_nan: tensors are; autograd: the call goes through it; row: samples in a row; cold: other code first."""

    between_nan: bool
    autograd: bool
    row: int
    cold: bool


SEARCH = Way(True, False, ROW, True)
COMPARISON = Way(False, True, 1, False)
WAYS = {
    "search": SEARCH,
    "tensors as they come": SEARCH._replace(between_nan=False),
    "one at a time": SEARCH._replace(row=1),
    "no other code": SEARCH._replace(cold=False),
    "autograd": SEARCH._replace(between_nan=False, autograd=True),
    "comparison without autograd": COMPARISON._replace(autograd=False),
    "comparison": COMPARISON,
}


def calls_of(workload: Workload, direction: str, device: str) -> dict[tuple[bool, bool], Callable[[], object]]:
    """By whether tensors lie between NaN, and whether autograd is asked."""
    kind, found = measured_kind(workload.operation), {}
    told = module(workload.product, workload.layout, workload.graph_class().text).tuning
    plain = kind.tensors(workload, device)
    for between_nan in (True, False):
        tensors = guarded(kind.tensors(workload, device)) if between_nan else plain
        operator = kind.build(workload, {name: told[name].schedule for name in DIRECTIONS}, device)
        order = order_of(tensors)
        found[between_nan, False] = kind.run(operator, direction, tensors, order, poison=False)
        if not between_nan:
            passes = AutogradPasses(kind.call(workload, operator, tensors, order), tensors)
            found[False, True] = getattr(passes, direction)
    return found


def sampled(workload: Workload, direction: str, device: str, rounds: int) -> dict[str, float]:
    """The median of each way; all ways take turns."""
    calls = calls_of(workload, direction, device)
    samplers = {
        name: Sampler(calls[way.between_nan, way.autograd], device, cold_code=way.cold) for name, way in WAYS.items()
    }
    for sampler in samplers.values():
        sampler.warm_up(20)
    samples: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, sampler in samplers.items():
            time.sleep(2e-3)  # as long as a comparison's next request takes
            samples[name] += sampler.take(WAYS[name].row)
    print(f"{workload.label} {direction}", end=": ")
    print(", ".join(f"{name} {statistics.median(values):.2f}" for name, values in samples.items()))
    if device != "cpu":
        print("  kernels of a call:", {autograd: kernels(calls[False, autograd]) for autograd in (False, True)})
    return {name: statistics.median(values) for name, values in samples.items()}


def kernels(call: Callable[[], object]) -> list[str]:
    """What a call has a GPU do, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events: Any = profile.events()
    return [event.name[:40] for event in events if event.device_type == torch.autograd.DeviceType.CUDA]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--problems", default="mace-mp-first,mace-mp-medium,nequip-water,sevennet-0,batmobile-l3")
    parser.add_argument("--graphs", default="aspirin")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in WAYS}
    for workload in workloads(given.problems.split(","), given.graphs.split(","), "ir_mul", given.device):
        for direction in DIRECTIONS:
            found = sampled(workload, direction, given.device, given.rounds)
            for name, median in found.items():
                ratios[name].setdefault(direction, []).append(median / found["search"])
    for name, by_direction in ratios.items():
        means = {direction: round(geometric_mean(values), 3) for direction, values in by_direction.items()}
        print(f"{name:30s}", means)


if __name__ == "__main__":
    main()
