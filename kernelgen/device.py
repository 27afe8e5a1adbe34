"""Device limits, needed to check and choose schedules; a table allows compilation without the device."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kernelgen.errors import ScheduleError, ToolMissingError, UnsupportedError


@dataclass(frozen=True)
class DeviceFacts:
    """``arch`` is ``sm_90`` or the host's machine type; memory in bytes; ``units`` are multiprocessors or cores."""

    backend: str
    name: str
    arch: str
    units: int
    shared_per_block: int = 0
    shared_per_unit: int = 0
    registers_per_unit: int = 65536
    max_threads_per_unit: int = 2048
    vector_bytes: int = 0

    @property
    def slug(self) -> str:
        """The name as a file name, for example ``nvidia-h200``, used under results/ and reports/."""
        kept = "".join(c if c.isalnum() else "-" for c in self.name.lower())
        return "-".join(part for part in kept.split("-") if part)

    def check_cores(self, threads: int) -> None:
        """Raise ScheduleError if ``threads`` exceeds the number of cores."""
        if threads > self.units:
            raise ScheduleError(f"threads={threads} exceeds the {self.units} cores of {self.name}")

    def check_threads(self, block_size: int, min_blocks: int) -> int:
        """Threads that a multiprocessor must hold at once; ScheduleError if they are too many."""
        threads = block_size * max(1, min_blocks)
        if threads > self.max_threads_per_unit:
            raise ScheduleError(
                f"block_size x min_blocks = {threads} threads exceeds the multiprocessor's {self.max_threads_per_unit}"
            )
        return threads


# Shared memory a block and a multiprocessor (bytes), threads a multiprocessor: CUDA programming guide, table of
# technical specifications per compute capability.
_CUDA_LIMITS = {
    "sm_80": (166912, 167936, 2048),
    "sm_86": (101376, 102400, 1536),
    "sm_89": (101376, 102400, 1536),
    "sm_90": (232448, 233472, 2048),
    "sm_100": (232448, 233472, 2048),
    "sm_120": (101376, 102400, 1536),
}


def cuda_facts(arch: str, name: str | None = None, units: int = 132) -> DeviceFacts:
    """Facts of a CUDA architecture from the table; an unknown one gets those of the nearest lower one."""
    number = int("".join(c for c in arch if c.isdigit()) or 0)
    known = [a for a in _CUDA_LIMITS if int(a[3:]) <= number]
    if not arch.startswith("sm_") or not known:
        raise UnsupportedError(f"CUDA architecture {arch!r} is not supported; expected sm_80 or later")
    per_block, per_unit, threads = _CUDA_LIMITS[max(known, key=lambda a: int(a[3:]))]
    return DeviceFacts("cuda", name or arch, arch, units, per_block, per_unit, 65536, threads)


def check_cuda() -> None:
    """Raise ToolMissingError, with a remedy, if torch has no CUDA device."""
    if torch.cuda.is_available():
        return
    advice = "install an NVIDIA driver"
    if not torch.backends.cuda.is_built():
        advice = f"torch {torch.__version__} is built without CUDA, install one that is built with it (see pytorch.org)"
    raise ToolMissingError(f"a CUDA device was asked for, but torch sees none; {advice} or use cpu")


@functools.lru_cache(maxsize=64)
def _facts(kind: str, index: int) -> DeviceFacts:
    if kind == "cpu":
        return _host_facts()
    check_cuda()
    properties = torch.cuda.get_device_properties(index)
    return cuda_facts(f"sm_{properties.major}{properties.minor}", properties.name, properties.multi_processor_count)


# Facts that stand for every CUDA device, the last one first; see ``assumed``.
_assumed: list[DeviceFacts] = []


@contextmanager
def assumed(facts: DeviceFacts) -> Iterator[None]:
    """Inside of the ``with``, :func:`device_facts` of CUDA devices are these: kernels are made for elsewhere."""
    _assumed.append(facts)
    try:
        yield
    finally:
        _assumed.pop()


def device_facts(device: torch.device | str) -> DeviceFacts:
    """Facts of a torch device, cached."""
    device = torch.device(device)
    if _assumed and device.type == "cuda":
        return _assumed[-1]
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {device} is not supported; expected cpu or cuda")
    index = device.index if device.index is not None else 0
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return _facts(device.type, index)


def _host_facts() -> DeviceFacts:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(
        (key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in info.splitlines()) if key
    )
    name = " ".join((fields.get("model name") or platform.processor() or "cpu").replace("(R)", "").split())
    flags = fields.get("flags", "").split()
    vector = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return DeviceFacts("cpu", f"{name} {cores} cores", platform.machine(), cores, vector_bytes=vector)
