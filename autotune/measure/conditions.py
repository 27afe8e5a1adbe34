"""What disturbs a measurement: other work on its cores, the hypervisor, a throttled GPU, other processes on the GPU.

A :class:`Watch` gives the :class:`Conditions` since its last reading. :func:`waited_ns` is exact enough for one sample:
the time in which this process's threads were ready to run and did not.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotune.workload.objective import Objective
from kernelgen.errors import ToolMissingError

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


def throttle_reasons(device: torch.device) -> set[str]:
    """Why a GPU's clocks are lower than they could be, now, in words."""
    nvml, handle = _nvml(device)
    if nvml is None:
        return set()
    try:
        active = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except Exception:  # not on this GPU
        return set()
    return {text for name, text in THROTTLES.items() if active & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)}


def energy_j(device: torch.device) -> float | None:
    """Joules that a GPU has taken so far, by a counter that moves a few times a second; None where NVML has none."""
    nvml, handle = _nvml(device)
    if nvml is None:
        return None
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except Exception:  # not on this GPU
        return None


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
    nvml, handle = _nvml(device)
    if nvml is None:
        return 0
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except Exception:  # nothing computed, or not on this GPU
        return 0
    active = {sample.pid for sample in samples if sample.smUtil > 0}
    # In a container NVML may number processes as the host does: then one of them is this one.
    return len(active - {os.getpid()}) if os.getpid() in active else max(0, len(active) - 1)
