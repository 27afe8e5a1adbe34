"""One figure at a time: wall time of a step, its peak memory, and what the device did."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune.bench.models.kernel_groups import milliseconds_by_group

MIB = 1 << 20


@dataclass(frozen=True)
class Effort:
    """How long to measure half a cell: about ``seconds`` of samples, within these numbers; slow steps get fewer.

    warm_up_s: at most so long are warm-up calls, however many were asked for; tuning_s: in a process's first row of a
    pass. slow_s: a step that takes longer gets ``slow_samples``.
    """

    seconds: float = 1.0
    warm_up_s: float = 4.0
    tuning_s: float = 10.0
    most: int = 10
    least: int = 3
    slow_s: float = 0.5
    slow_samples: int = 1


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], device: str) -> float:
    """Seconds of one step, until the device is done."""
    synchronize(device)
    begin = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - begin


def warm_up(step: Callable[[], object], device: str, calls: int, limit_s: float) -> None:
    begin = time.perf_counter()
    for _ in range(calls):
        timed(step, device)
        if time.perf_counter() - begin > limit_s:
            break


def wall_samples_ms(step: Callable[[], object], device: str, effort: Effort) -> list[float]:
    """Milliseconds of single steps."""
    gc.collect()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < effort.most:
        samples.append(timed(step, device) * 1e3)
        spent = time.perf_counter() - begin
        least = effort.slow_samples if statistics.median(samples) > effort.slow_s * 1e3 else effort.least
        if len(samples) >= least and spent > effort.seconds:
            break
    return [round(sample, 4) for sample in samples]


def peak_mib(step: Callable[[], object], device: str) -> float | None:
    """Largest device memory that a step needs, weights and inputs included; None on a CPU.

    Allocated during the step, or kept by captured graphs, whose memory is nobody else's between their steps either.
    """
    if torch.device(device).type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    index = torch.device(device).index or 0
    kept = kept_by_graphs(torch.cuda.memory_snapshot(), index)
    return round((torch.cuda.max_memory_allocated(device) + kept) / MIB, 1)


def kept_by_graphs(segments: Sequence[Mapping[str, Any]], index: int) -> int:
    """Bytes of a device that belong to captured graphs and are not allocated now, by torch's list of segments."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def profile(step: Callable[[], object], device: str) -> dict[str, Any]:
    """Milliseconds of kernels, in all and by group, and their number in one step, warmed up before, by CUPTI; nothing
    on a CPU.

    A profiler that is left attached slows every later launch of the process, and other rows are still to be timed, so
    it is asked to detach.
    """
    if torch.device(device).type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity

    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # read when a profile ends
    synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    synchronize(device)  # it detaches during a later call of the driver
    kernels = [event for event in profiler.events() if _on_device(event)]
    times = [(event.name, event.time_range.elapsed_us()) for event in kernels]
    return {
        "device_ms": round(sum(time_us for _, time_us in times) / 1e3, 4),
        "launches": len(kernels),
        "device_parts_ms": milliseconds_by_group(times),
    }


def _on_device(event: Any) -> bool:
    from torch.autograd import DeviceType

    return event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
