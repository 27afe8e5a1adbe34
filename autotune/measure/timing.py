"""Time a callable: median, quartiles and raw samples in microseconds, as a :class:`Timing`; and what disturbs it.

Every sample starts with a cold last-level cache: a larger buffer is written first. On a GPU two events enclose one
call, queued behind that write and a wait longer than the host's launch time. So device time is measured, as in a model
that keeps the device busy. On a CPU wall time is measured.
Sampling stops when the median is precise enough or time is up, after at least ``min_samples``; or earlier, if the first
samples are much too slow (``hopeless_us``).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from autotune.workload.objective import Objective
from kernelgen.errors import InputError, ToolMissingError

# What disturbs a measurement: other work on its cores, the hypervisor, a throttled GPU, other processes on the GPU.
#
# A :class:`Watch` gives the :class:`Conditions` since its last reading. :func:`waited_ns` is exact enough for one
# sample: the time in which this process's threads were ready to run and did not.

# Cores that others may keep busy, or a hypervisor may take, unnoticed: a share of one core, or of all of them.
BUSY_CORES, BUSY_SHARE = 0.25, 0.02
# A reading of the kernel's clock ticks (10 ms on each core) means nothing for a shorter time, in seconds.
SHORTEST_S = 0.2
# Fields of a line of /proc/stat: times in which a core ran nothing, and what a hypervisor took.
IDLE, IOWAIT, STEAL = 3, 4, 7
# NVML's reasons for lower clocks that change a time. An idle GPU and clocks that a person chose do not.
THROTTLES = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "temperature",
    "HwThermalSlowdown": "temperature",
    "HwPowerBrakeSlowdown": "power brake",
}


@dataclass(frozen=True)
class Conditions:
    """load: cores that other processes kept busy. steal: cores that the hypervisor took. throttle: reasons for lower
    clocks. gpu_processes: other processes that computed on the GPU. retaken: samples taken again because something
    disturbed them. disturbed: share of the samples that were kept although something did."""

    load: float = 0.0
    steal: float = 0.0
    throttle: tuple[str, ...] = ()
    gpu_processes: int = 0
    retaken: int = 0
    disturbed: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As records store it: without what was not met. ``noise``: the reasons not to trust the times, in words."""
        values: dict[str, Any] = {"load": round(self.load, 2), "steal": round(self.steal, 2)}
        values |= {"throttle": list(self.throttle), "gpu_processes": self.gpu_processes, "retaken": self.retaken}
        values |= {"disturbed": round(self.disturbed, 2), "noise": self.noise}
        return {name: value for name, value in values.items() if value}

    @property
    def noise(self) -> str:
        """Why times measured now are not those of a machine at rest; empty if they are."""
        limit = max(BUSY_CORES, BUSY_SHARE * len(os.sched_getaffinity(0)))
        found = []
        if self.load > limit:
            found.append(f"other processes kept {self.load:.1f} cores busy")
        if self.steal > limit:
            found.append(f"the hypervisor took {self.steal:.1f} cores")
        if self.throttle:
            found.append(f"the GPU was throttled ({', '.join(self.throttle)})")
        if self.gpu_processes:
            count = "another process" if self.gpu_processes == 1 else f"{self.gpu_processes} other processes"
            found.append(f"{count} computed on the GPU")
        if self.disturbed > 0.5 and not found:
            found.append(f"{self.disturbed:.0%} of the samples were disturbed")
        return "; ".join(found)


class Watch:
    """Reads what happens on the cores of this process and on its device, from construction or the last reading on."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._throttle: set[str] = set()
        self._begin = self._reading()

    def glance(self) -> bool:
        """Whether the GPU's clocks are throttled at this moment; the next reading has the reason."""
        found = throttle_reasons(self.device)
        self._throttle |= found
        return bool(found)

    def read(self, retaken: int = 0, disturbed: float = 0.0) -> Conditions:
        """The conditions since the last reading; ``retaken``, ``disturbed``: of samples since then."""
        begin, end = self._begin, self._reading()
        throttle, self._throttle, self._begin = tuple(sorted(self._throttle)), set(), end
        seconds = end[0] - begin[0]
        others = gpu_processes(self.device, begin[4])
        if self.device.type == "cuda" or seconds < SHORTEST_S:
            # A GPU's times are not the host's; a short time has too few clock ticks.
            return Conditions(0.0, 0.0, throttle, others, retaken, disturbed)
        own, busy, steal = ((later - earlier) / seconds for earlier, later in zip(begin[1:4], end[1:4], strict=True))
        return Conditions(max(0.0, busy - own), steal, throttle, others, retaken, disturbed)

    def _reading(self) -> tuple[float, float, float, float, int]:
        """Seconds of the clock, of this process, of all work on its cores and of the hypervisor; microseconds UTC."""
        return time.perf_counter(), time.process_time(), *_cores_s(), time.time_ns() // 1000


def _cores_s() -> tuple[float, float]:
    """Seconds of work on the cores of this process, and seconds that the hypervisor took from them."""
    names, tick_s = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 1 / os.sysconf("SC_CLK_TCK")
    busy = steal = 0.0
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    for name, *ticks in map(str.split, lines):
        if name in names:
            # The last two fields, of guests, are part of the first two.
            times = [int(value) * tick_s for value in ticks[:8]]
            steal += times[STEAL]
            busy += sum(times) - times[IDLE] - times[IOWAIT] - times[STEAL]
    return busy, steal


def waited_ns() -> int:
    """Nanoseconds in which threads of this process waited for a core, so far; 0 where Linux does not say."""
    waited = 0
    try:
        for thread in os.scandir("/proc/self/task"):
            with open(f"{thread.path}/schedstat", "rb") as file:
                waited += int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return waited


@functools.lru_cache(maxsize=8)
def _nvml(device: torch.device) -> tuple[Any, Any]:
    """NVML's module and its handle of a GPU; None for both without."""
    if device.type != "cuda":
        return None, None
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # no module, no library, no permission: then nothing is known
        return None, None


def _answer_of_nvml(device: torch.device, question: str, *arguments: Any) -> Any:
    """What one of NVML's functions says of a GPU; None without NVML, and where it does not answer for this GPU."""
    nvml, handle = _nvml(device)
    try:
        return None if nvml is None else getattr(nvml, question)(handle, *arguments)
    except Exception:
        return None


def throttle_reasons(device: torch.device) -> set[str]:
    """Why a GPU's clocks are lower than they could be, now, in words."""
    active, (nvml, _) = _answer_of_nvml(device, "nvmlDeviceGetCurrentClocksThrottleReasons") or 0, _nvml(device)
    return {text for name, text in THROTTLES.items() if active & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)}


def energy_j(device: torch.device) -> float | None:
    """Joules that a GPU has taken so far, by a counter that moves a few times a second; None where NVML has none."""
    millijoules = _answer_of_nvml(device, "nvmlDeviceGetTotalEnergyConsumption")
    return None if millijoules is None else float(millijoules) / 1e3


def require_energy(device: torch.device | str) -> None:
    """ToolMissingError, with what to do, unless the device's energy is counted."""
    if energy_j(torch.device(device)) is None:
        raise ToolMissingError(
            f"the energy of device {str(device)!r} is not counted; expected an NVIDIA GPU from Volta on whose counter "
            "NVML reads: install nvidia-ml-py, or leave energy out"
        )


def require_figures(objective: Objective, device: torch.device | str) -> None:
    """ToolMissingError, with what to do, unless a device has all figures of an objective; a CPU has time alone."""
    try:
        if "energy" in objective.figures:
            require_energy(device)
        if "memory" in objective.figures and torch.device(device).type != "cuda":
            raise ToolMissingError(
                f"the memory of a call is not counted on device {str(device)!r}, which has times alone; expected a "
                "GPU, whose memory torch's allocator counts: tune there, or leave memory out"
            )
    except ToolMissingError as error:
        raise ToolMissingError(f"objective {objective}: {error}") from None


def gpu_processes(device: torch.device, since_us: int) -> int:
    """The number of other processes that computed on a GPU since a time of the host's clock, in microseconds."""
    samples = _answer_of_nvml(device, "nvmlDeviceGetProcessUtilization", since_us)  # none if nothing computed
    active = {sample.pid for sample in samples or () if sample.smUtil > 0}
    # In a container NVML may number processes as the host does: then one of them is this one.
    return len(active - {os.getpid()}) if os.getpid() in active else max(0, len(active) - 1)


MIN_SAMPLES = 10
MAX_SAMPLES = 200
# Relative half-width of the median's 95% interval at which sampling may stop.
PRECISION = 0.02
# Seconds of warm-up calls before the first sample, as in a comparison: our kernels tune nothing and fill no caches.
WARM_UP_S = {"cpu": 0.05, "cuda": 0.02}
# Number of samples after which a candidate may be given up as too slow.
FIRST_LOOK = 3
HOPELESS_RATIO = 2.0
# Calls of at least this many seconds get no second warm-up call.
LONG_CALL_S = 1.0
# Number of calls in a row to measure host time, the least and the most, and about the seconds that a row may take.
MIN_HOST_CALLS, HOST_CALLS, HOST_ROW_S = 10, 50, 0.02
# Number of calls to measure peak memory, and the pause before each, in which other threads release the last call's.
PEAK_CALLS, PEAK_PAUSE_S = 3, 1e-3
# Seconds of calls in a row whose energy is measured, those before it, about those between two readings, and the longest
# between two steps of a counter that moves.
ENERGY_S, STEADY_S, READING_S, COUNTER_S = 1.0, 0.3, 0.01, 5.0
# The first of these for a trial, and for one of several rounds of a comparison.
ENERGY_ROUND_S = 0.5
# Device clock cycles of the wait before a sample: about a millisecond, doubled, up to about 130 ms, until it exceeds
# the least time in which the host launched a warm call; and again if the device reached a sample before the host had
# launched all of it, several times in a row. A single time may be a delay of the host, and all contenders should
# wait equally. cuEquivariance's host takes 39 ms for one force step of a large contraction.
LEAD_CYCLES, LEAD_S, MAX_LEAD_CYCLES, LEAD_ATTEMPTS = 2_000_000, 1e-3, 256_000_000, 3
# A sample is disturbed if threads waited for a core longer than this share of it. It is taken again: so many times more
# than samples were not disturbed, since where all are that is in vain, and for so many seconds. Before that a throttled
# GPU rests.
WAITED_SHARE, MOST_RETAKEN, RETAKEN_S, THROTTLED_PAUSE_S = 0.02, 5, 0.3, 0.05


@dataclass(frozen=True)
class Timing:
    """``time_us`` is the median. ``clocks``: the SM clock in MHz while sampling (least, median, most), None if unknown.

    ``cut`` marks a candidate given up early, with a median of fewer than ``MIN_SAMPLES`` samples. ``conditions`` are
    those of the machine meanwhile, as :class:`autotune.measure.timing.Conditions` stores them.
    """

    time_us: float
    q1_us: float
    q3_us: float
    samples_us: tuple[float, ...]
    clocks: dict[str, Any] | None
    cut: bool
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "time_us": self.time_us,
            "q1_us": self.q1_us,
            "q3_us": self.q3_us,
            "samples_us": list(self.samples_us),
            **({"conditions": dict(self.conditions)} if self.conditions else {}),
        }


def timing_of(
    samples_us: list[float],
    clocks: dict[str, Any] | None = None,
    cut: bool = False,
    conditions: Mapping[str, Any] = MappingProxyType({}),
) -> Timing:
    """Median and quartiles of raw samples, rounded to a nanosecond."""
    rounded = [round(sample, 3) for sample in samples_us]
    if len(rounded) == 1:
        return Timing(rounded[0], rounded[0], rounded[0], tuple(rounded), clocks, cut, dict(conditions))
    q1, median, q3 = (round(cut_point, 3) for cut_point in statistics.quantiles(rounded, n=4, method="inclusive"))
    return Timing(median, q1, q3, tuple(rounded), clocks, cut, dict(conditions))


def relative_half_width(samples_us: list[float]) -> float:
    """Half the width of the 95% interval of the median from order statistics, relative to the median."""
    ordered, count = sorted(samples_us), len(samples_us)
    reach = 0.98 * math.sqrt(count)
    low, high = math.floor(count / 2 - reach), math.ceil(count / 2 + reach)
    if low < 0 or high >= count:
        return math.inf
    return (ordered[high] - ordered[low]) / 2 / statistics.median(ordered)


def last_level_cache_bytes() -> int:
    """Size of the host's last-level cache as Linux reports it, else 32 MiB."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [
        int(text[:-1]) * units[text[-1]]
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := path.read_text().strip()) and text[-1] in units
    ]
    return max(sizes, default=32 << 20)


@functools.lru_cache(maxsize=4)
def _eviction_buffer(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    else:
        size = min(512 << 20, last_level_cache_bytes() * 5 // 4)
    return torch.zeros(max(size, 32 << 20) // 4, dtype=torch.float32, device=device)


class Sampler:
    """Takes single samples of one callable; comparisons interleave several samplers.

    late: the device reached the last sample before the host had launched all of it, even after the longest wait. Such a
    sample holds time of the host. Always False on a CPU.
    """

    def __init__(
        self,
        call: Callable[[], object],
        device: torch.device | str,
        cold_cache: bool = True,
        cold_code: bool = False,
    ) -> None:
        self.call = call
        self.device = torch.device(device)
        self._buffer = _eviction_buffer(self.device) if cold_cache else None
        self._cold_code = cold_code and self.device.type == "cuda"
        self._lead_cycles = LEAD_CYCLES
        self.late = False
        self.watch = Watch(self.device)
        # Samples taken, those taken again, and those kept although they were disturbed.
        self._taken = self._retaken = self._disturbed = 0
        self._retaken_s = 0.0

    def warm_up(
        self, min_calls: int = 2, seconds: float = 0.05, max_calls: int = 100, max_seconds: float = math.inf
    ) -> float:
        """Call until both minimums are reached, or fewer times if calls are long; returns the last call's seconds."""
        begin, calls, last, launch_s = time.perf_counter(), 0, 0.0, math.inf
        while calls < min_calls or (time.perf_counter() - begin < seconds and calls < max_calls):
            start = time.perf_counter()
            self.call()
            launch_s = min(launch_s, time.perf_counter() - start)
            synchronize(self.device)
            last, calls = time.perf_counter() - start, calls + 1
            if calls == 1 and self.device.type == "cuda":
                begin = time.perf_counter()  # the first call may compile and tune, and does not count
            elif last > LONG_CALL_S or time.perf_counter() - begin > max_seconds:
                break
        if self.device.type == "cuda" and calls:
            # A sample for which the host needs longer than the device waits would be thrown away.
            while self._lead_cycles < MAX_LEAD_CYCLES and self._lead_cycles * LEAD_S / LEAD_CYCLES < launch_s:
                self._lead_cycles *= 2
        return last

    def take(self, count: int) -> list[float]:
        """``count`` samples in microseconds; those that something disturbs are taken again, within a limit."""
        return self._take_cuda(count) if self.device.type == "cuda" else [self._take_host() for _ in range(count)]

    def conditions(self) -> Conditions:
        """What disturbed the samples since the last call of this."""
        found = self.watch.read(self._retaken, self._disturbed / max(1, self._taken))
        self._taken = self._retaken = self._disturbed = 0
        self._retaken_s = 0.0
        return found

    def _keeps(self, samples_us: list[float], is_disturbed: bool) -> bool:
        """Whether to keep new samples: undisturbed ones, and others once enough have been taken again."""
        count = len(samples_us)
        most = MOST_RETAKEN + self._taken - self._disturbed
        if is_disturbed and self._retaken < most and self._retaken_s < RETAKEN_S:
            self._retaken += count
            self._retaken_s += sum(samples_us) * 1e-6
            return False
        self._taken += count
        self._disturbed += count * is_disturbed
        return True

    def peak_bytes(self) -> int | None:
        """Device memory that one call takes beyond what was allocated before, results included; None on a CPU.

        Counts requested bytes: the allocator may reuse a block that is up to a megabyte larger. Takes the largest of a
        few calls, because autograd's thread may release a call's results during the next call, which then seems to
        need less.
        """
        peak = None
        for _ in range(PEAK_CALLS if self.device.type == "cuda" else 0):
            time.sleep(PEAK_PAUSE_S)
            synchronize(self.device)
            before = int(torch.cuda.memory_stats(self.device)["requested_bytes.all.current"])
            torch.cuda.reset_peak_memory_stats(self.device)
            self.call()
            synchronize(self.device)
            peak = max(peak or 0, int(torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"]) - before)
        return peak

    def host_row_us(self, seconds: float) -> float:
        """Microseconds until a call returns, averaged over a row of calls that starts with an empty device queue.

        ``seconds``: duration of one call including its device work, so that rows of long calls are short. Other work
        of the host only adds to the result, so take the least of several rows.
        """
        calls = max(MIN_HOST_CALLS, min(HOST_CALLS, int(HOST_ROW_S / max(seconds, 1e-9))))
        synchronize(self.device)
        start = time.perf_counter_ns()
        for _ in range(calls):
            self.call()
        row = (time.perf_counter_ns() - start) / 1e3 / calls
        synchronize(self.device)
        return round(row, 3)

    def _evict(self) -> None:
        if self._cold_code:
            from kernelgen.runtime.kernel import evict_code

            evict_code(self.device)
        if self._buffer is not None:
            self._buffer.add_(1.0)

    def _take_host(self) -> float:
        while True:
            self._evict()
            waited, start = waited_ns(), time.perf_counter_ns()
            self.call()
            passed = time.perf_counter_ns() - start
            if self._keeps([passed / 1e3], waited_ns() - waited > WAITED_SHARE * passed):
                return passed / 1e3

    def _take_cuda(self, count: int) -> list[float]:
        while True:
            with torch.cuda.device(self.device):
                pairs = [self._queue_sample() for _ in range(count)]
            is_throttled = self.watch.glance()
            synchronize(self.device)
            samples = [start.elapsed_time(end) * 1e3 for start, end in pairs]
            if self._keeps(samples, is_throttled):
                return samples
            time.sleep(THROTTLED_PAUSE_S)

    def _queue_sample(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """The events around a call, launched before the device reached it if the longest wait suffices for that."""
        for attempt in itertools.count(1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._evict()
            torch.cuda._sleep(self._lead_cycles)
            start.record()
            self.call()
            end.record()
            self.late = start.query()
            if not self.late or self._lead_cycles >= MAX_LEAD_CYCLES:
                break
            if attempt % LEAD_ATTEMPTS == 0:
                self._lead_cycles *= 2
        return start, end


def synchronize(device: torch.device | str) -> None:
    """Wait for a GPU; a CPU has done its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device | str) -> float:
    """Seconds of one call, with all that it queued on the device."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def joules_a_call(call: Callable[[], object], device: torch.device | str, seconds: float = ENERGY_S) -> float | None:
    """Energy of the whole GPU for one of many calls in a row, with warm caches; None where it is not counted.

    From one step of the counter to another, at least ``seconds`` apart, after so many calls that the power is steady.
    """
    where = torch.device(device)
    if energy_j(where) is None:
        return None
    began, rows = time.perf_counter(), 0
    while rows == 0 or time.perf_counter() - began < STEADY_S:
        call()
        synchronize(where)
        rows += 1
    each_row = max(1, int(READING_S * rows / (time.perf_counter() - began)))

    def counted(least_s: float) -> tuple[int, float]:
        """Calls until the counter next moves after ``least_s``, and what it says then; NaN if it does not move."""
        begin, calls, last = time.perf_counter(), 0, energy_j(where)
        while (passed := time.perf_counter() - begin) < least_s + COUNTER_S or calls <= each_row:
            for _ in range(each_row):
                call()
            synchronize(where)
            calls, before, last = calls + each_row, last, energy_j(where)
            if last is not None and last != before and passed >= least_s:
                return calls, last
        return calls, math.nan

    _, first_j = counted(0.0)
    calls, last_j = counted(seconds)
    return None if math.isnan(last_j - first_j) else (last_j - first_j) / calls


def sm_clock_mhz(device: torch.device | str) -> int | None:
    """Current SM clock, or None without a GPU or NVML."""
    if torch.device(device).type != "cuda":
        return None
    try:
        return torch.cuda.clock_rate(device)
    except Exception:  # NVML raises its own types, and torch ModuleNotFoundError; a missing clock is no error
        return None


def clock_summary(readings: list[int | None]) -> dict[str, Any] | None:
    known = [reading for reading in readings if reading is not None]
    return {"sm_mhz": [min(known), int(statistics.median(known)), max(known)]} if known else None


def time_callable(
    call: Callable[[], object],
    device: torch.device | str,
    *,
    min_samples: int = MIN_SAMPLES,
    max_samples: int = MAX_SAMPLES,
    max_seconds: float = 1.0,
    cold_cache: bool = True,
    cold_code: bool = False,
    hopeless_us: float | None = None,
) -> Timing:
    """Sample until the median's interval is narrow or ``max_seconds`` are over; at least ``min_samples``.

    ``cold_code``: on a GPU, start with a cold instruction cache, as between other kernels; in a comparison, other
    contenders ensure this. ``hopeless_us``: give up after the first few samples if their median exceeds it.
    """
    sampler = Sampler(call, device, cold_cache, cold_code)
    sampler.warm_up(seconds=WARM_UP_S[sampler.device.type])
    sampler.conditions()
    begin = time.perf_counter()
    samples: list[float] = []
    readings: list[int | None] = []
    is_cut = False
    while len(samples) < max_samples:
        samples += sampler.take(FIRST_LOOK if len(samples) < FIRST_LOOK else min(5, max_samples - len(samples)))
        readings.append(sm_clock_mhz(device))
        if hopeless_us is not None and statistics.median(samples) > hopeless_us:
            is_cut = len(samples) < min_samples
            break
        if len(samples) < min_samples:
            continue
        if time.perf_counter() - begin > max_seconds or relative_half_width(samples) < PRECISION:
            break
    return timing_of(samples, clock_summary(readings), is_cut, sampler.conditions().to_dict())


def copy_us(device: torch.device | str, moved: int) -> float:
    """Median time of a torch copy that moves ``moved`` bytes (read plus written), cold, sampled like contenders.

    Unlike a floor from a large copy's bandwidth, it includes launch, start-up and completion.
    """
    device = torch.device(device)
    source = torch.ones(max(1, moved // 8), dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    return time_callable(lambda: target.copy_(source), device, min_samples=20, max_seconds=0.2).time_us


@functools.lru_cache(maxsize=4)
def copy_bandwidth(device: torch.device | str) -> float:
    """Bytes per second that a large copy on the device moves (read plus written); measured once per process."""
    device = torch.device(device)
    count = (1 << 30 if device.type == "cuda" else 1 << 28) // 4
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    timing = time_callable(lambda: target.copy_(source), device, max_seconds=1.0, cold_cache=False)
    return 2 * 4 * count / (timing.time_us * 1e-6)


# Confidence interval and verdict for the ratio of two measured times, from raw samples.
#
# Times on a device are not normally distributed and have outliers, and medians are published. So the interval is of the
# ratio of medians and assumes no distribution. It covers the spread within the two runs, not
# differences between runs (clocks, temperature, other load); the verdict's tolerance allows for those.

LEVEL = 0.95
RESAMPLES = 2000
TOLERANCE = 0.02
FASTER, SLOWER, SAME, UNCLEAR = VERDICTS = ("faster", "slower", "level", "unclear")


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], level: float = LEVEL, *, paired: bool = False
) -> tuple[float, float]:
    """Interval of ``median(theirs) / median(ours)``; above 1, ours is faster.

    ours, theirs: samples in one unit, in any order, for a percentile bootstrap. paired: sample i of both comes from one
    round of one run. Then it is the interval of the median of the rounds' ratios from order statistics, which is exact
    for few rounds and on a busy machine too: what slows a whole round cancels, and a kernel is faster than itself in
    half of the rounds, whatever the noise. It is widened to hold the ratio of the medians. Only rounds with both count.

    Equal input gives an equal interval. If either side has too few samples for the level, the interval is (0, inf):
    even the range of n samples contains the true median with a probability of only 1 - 2^(1 - n), which reaches 95% at
    six. InputError if samples are not valid times.
    """
    if not 0 < level < 1:
        raise InputError(f"level is {level}; expected a number between 0 and 1, such as {LEVEL}")
    sides = [_times(name, samples) for name, samples in (("ours", ours), ("theirs", theirs))]
    if paired:
        rounds = min(map(len, sides))
        sides = [side[:rounds] for side in sides]
    if any(2.0 ** (1 - len(side)) > 1 - level for side in sides):
        return 0.0, math.inf
    if paired:
        ratios, ratio = np.sort(sides[1] / sides[0]), float(np.median(sides[1]) / np.median(sides[0]))
        outside = _rounds_outside(len(ratios), level)
        return min(float(ratios[outside]), ratio), max(float(ratios[-1 - outside]), ratio)
    # One random stream for both sides: equal streams would pair the draws of equal samples.
    generator = np.random.default_rng(0)
    draws = (side[generator.integers(0, len(side), (RESAMPLES, len(side)))] for side in sides)
    below, above = (np.median(each, axis=1) for each in draws)
    low, high = np.quantile(above / below, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def range_text(ours: Sequence[float], theirs: Sequence[float], *, paired: bool) -> str:
    """1.20 to 1.26: :func:`ratio_interval` of stored samples; empty if these are too few for one."""
    low, high = ratio_interval(ours, theirs, paired=paired) if ours and theirs else (0.0, math.inf)
    return f"{low:.2f} to {high:.2f}" if math.isfinite(high) else ""


def verdict(interval: tuple[float, float], tolerance: float = TOLERANCE) -> str:
    """``faster`` or ``slower`` (ours) beyond the tolerance, ``level`` within it, else ``unclear``.

    The tolerance is a factor: with 0.02, ratios from 1 / 1.02 to 1.02 are the same. So exchanging the sides only
    exchanges faster and slower.
    """
    if not tolerance >= 0:
        raise InputError(f"tolerance is {tolerance}; expected a number that is not negative, such as {TOLERANCE}")
    low, high = interval
    if low > 1 + tolerance:
        return FASTER
    if high < 1 / (1 + tolerance):
        return SLOWER
    return SAME if 1 / (1 + tolerance) <= low and high <= 1 + tolerance else UNCLEAR


def _times(name: str, samples: Sequence[float]) -> NDArray[np.float64]:
    times = np.asarray(samples, dtype=np.float64)
    if times.ndim != 1 or not times.size or not np.isfinite(times).all() or times.min() <= 0:
        raise InputError(
            f"{name} are {times.size} samples of shape {times.shape}, not all of them positive finite numbers; "
            "expected a list of times, samples_us of a stored row for one"
        )
    return times


def _rounds_outside(rounds: int, level: float) -> int:
    """How many of the sorted ratios lie outside the interval of their median, on each side."""
    most, outside, chance = (1 - level) / 2, 0, 2.0**-rounds
    while (chance := chance + math.comb(rounds, outside + 1) * 2.0**-rounds) <= most:
        outside += 1
    return outside
