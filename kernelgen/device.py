"""Device limits, needed to check and choose schedules; a table allows compilation without the device."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernelgen.errors import ScheduleError, ToolMissingError, UnsupportedError
from kernelgen.files import processor_lines


@dataclass(frozen=True)
class DeviceFacts:
    """``arch`` is ``sm_90`` or the host's machine type; memory in bytes; ``units`` are multiprocessors or cores.

    backend: the form of schedules and texts: ``cpu``, or ``cuda`` for a GPU, also for an AMD one (``gfx942``), whose
    text is the CUDA text in its HIP form. l1_per_unit: of a multiprocessor, what L1 cache and shared memory have
    together. l2_bytes: of the device. A host has 0 in every field of a GPU. wave: lanes that run in step.
    """

    backend: str
    name: str
    arch: str
    units: int
    shared_per_block: int = 0
    shared_per_unit: int = 0
    registers_per_unit: int = 65536
    max_threads_per_unit: int = 2048
    vector_bytes: int = 0
    l1_per_unit: int = 0
    l2_bytes: int = 0
    wave: int = 32

    @property
    def is_hip(self) -> bool:
        """Whether it is an AMD GPU: its kernels compile and are emulated, and were never run."""
        return self.arch.startswith("gfx")

    @property
    def warps(self) -> int:
        """Warps of a GPU that all its multiprocessors hold at once."""
        return self.units * self.max_threads_per_unit // 32

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


_KB, _MB = 1 << 10, 1 << 20
# One card of each architecture, which stands for all where no device is asked: name, architecture and multiprocessors;
# shared memory of a block and of a multiprocessor, and its registers and threads; then its L1 and the device's L2.
#
# CUDA: shared memory and threads from the CUDA C++ programming guide, table of technical specifications per compute
# capability; each block reserves 1 KB of a multiprocessor's shared memory. L1: the tuning guides of Ampere (192 KB on
# 8.0, 128 KB on 8.6), Ada (128 KB), Hopper (256 KB) and Blackwell (256 KB on 10.0, 128 KB on 12.0), section on unified
# shared memory and L1. All have 65,536 registers a multiprocessor and 255 a thread. Cards: NVIDIA's architecture white
# papers.
#
# AMD: the instruction set architecture guides (MI200, MI300, RDNA3): 64 KB of shared memory (LDS) a work group; vector
# registers of 512 KB a compute unit of CDNA, 384 KB of RDNA3 (192 KB a SIMD); last the lanes of a wave. Cards: AMD's
# data sheets; of an MI250X the half that is a device of its own.
_CARDS = {
    card.arch: card
    for card in (
        DeviceFacts("cuda", "NVIDIA A100", "sm_80", 108, 163 * _KB, 164 * _KB, 65536, 2048, 0, 192 * _KB, 40 * _MB),
        DeviceFacts("cuda", "NVIDIA A10", "sm_86", 72, 99 * _KB, 100 * _KB, 65536, 1536, 0, 128 * _KB, 6 * _MB),
        DeviceFacts("cuda", "NVIDIA L40S", "sm_89", 142, 99 * _KB, 100 * _KB, 65536, 1536, 0, 128 * _KB, 96 * _MB),
        DeviceFacts("cuda", "NVIDIA H200", "sm_90", 132, 227 * _KB, 228 * _KB, 65536, 2048, 0, 256 * _KB, 50 * _MB),
        DeviceFacts("cuda", "NVIDIA B200", "sm_100", 148, 227 * _KB, 228 * _KB, 65536, 2048, 0, 256 * _KB, 126 * _MB),
        DeviceFacts(
            "cuda", "NVIDIA GeForce RTX 5090", "sm_120", 170, 99 * _KB, 100 * _KB, 65536, 1536, 0, 128 * _KB, 96 * _MB
        ),
        DeviceFacts("cuda", "AMD Instinct MI250X", "gfx90a", 110, 64 * _KB, 64 * _KB, 131072, 2048, 0, 0, 8 * _MB, 64),
        DeviceFacts("cuda", "AMD Instinct MI300X", "gfx942", 304, 64 * _KB, 64 * _KB, 131072, 2048, 0, 0, 4 * _MB, 64),
        DeviceFacts("cuda", "AMD Radeon RX 7900 XTX", "gfx1100", 96, 64 * _KB, 64 * _KB, 98304, 1024, 0, 0, 6 * _MB),
    )
}
# The compute capabilities that kernels are checked for, without a device: see ``representative``.
CUDA_ARCHS = tuple(arch for arch in _CARDS if arch.startswith("sm_"))
HIP_ARCHS = tuple(arch for arch in _CARDS if arch.startswith("gfx"))
NOT_RUN = "kernels for AMD GPUs compile and are emulated, but were never run, so they are not launched"


def arch_number(arch: str) -> int:
    """Such as 90 of ``sm_90``."""
    return int("".join(c for c in arch if c.isdigit()) or 0)


def cuda_facts(arch: str, name: str | None = None, units: int = 132, l2_bytes: int | None = None) -> DeviceFacts:
    """Facts of a CUDA architecture from the table; an unknown one gets those of the nearest lower one.

    l2_bytes: by default that of the table's card.
    """
    known = [a for a in CUDA_ARCHS if arch_number(a) <= arch_number(arch)]
    if not arch.startswith("sm_") or not known:
        raise UnsupportedError(f"CUDA architecture {arch!r} is not supported; expected sm_80 or later")
    card = _CARDS[known[-1]]
    l2_bytes = card.l2_bytes if l2_bytes is None else l2_bytes
    return dataclasses.replace(card, name=name or arch, arch=arch, units=units, l2_bytes=l2_bytes)


def representative(arch: str) -> DeviceFacts:
    """Facts of one card of an architecture in ``CUDA_ARCHS`` or ``HIP_ARCHS``, without a device.

    A100, A10, L40S, H200, B200 and GeForce RTX 5090, or as :func:`hip_facts`. UnsupportedError for another.
    """
    if arch not in _CARDS:
        raise UnsupportedError(f"no card stands for {arch!r}; expected one of {', '.join(_CARDS)}")
    return _CARDS[arch]


def hip_facts(arch: str) -> DeviceFacts:
    """Facts of an AMD GPU in ``HIP_ARCHS``, to generate and compile its kernels; UnsupportedError for another."""
    if arch not in HIP_ARCHS:
        raise UnsupportedError(f"AMD architecture {arch!r} is not known; expected one of {', '.join(HIP_ARCHS)}")
    return _CARDS[arch]


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
    if torch.version.hip:
        raise UnsupportedError(f"{NOT_RUN}; torch {torch.__version__} is built for ROCm: use device cpu, or e3nn there")
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}"
    return cuda_facts(arch, properties.name, properties.multi_processor_count, properties.L2_cache_size)


# Facts that stand for every device of their backend, the last one first; see ``assumed``.
_assumed: list[DeviceFacts] = []


@contextmanager
def assumed(facts: DeviceFacts) -> Iterator[None]:
    """Inside of the ``with``, these are the :func:`device_facts` of their backend: kernels are made for elsewhere."""
    _assumed.append(facts)
    try:
        yield
    finally:
        _assumed.pop()


def device_facts(device: torch.device | str) -> DeviceFacts:
    """Facts of a torch device, cached."""
    device = torch.device(device)
    for facts in reversed(_assumed):
        if facts.backend == device.type:
            return facts
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {device} is not supported; expected cpu or cuda")
    index = device.index if device.index is not None else 0
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return _facts(device.type, index)


def _host_facts() -> DeviceFacts:
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in processor_lines())}
    name = " ".join((fields.get("model name") or platform.processor() or "cpu").replace("(R)", "").split())
    flags = fields.get("flags", "").split()
    vector = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return DeviceFacts("cpu", f"{name} {cores} cores", platform.machine(), cores, vector_bytes=vector)
