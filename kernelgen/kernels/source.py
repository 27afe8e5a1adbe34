"""Generated source: the result of an emitter and the input of a compiler; what an emitter is, and how a kernel is
launched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

ENTRY = "equitune_kernel"


@dataclass(frozen=True)
class Source:
    """``text`` is complete and contains its hand-written headers; ``entry`` is its only ``extern "C"`` symbol.

    arch_suffix: ``a`` for CUDA text with instructions that one architecture alone has: its code runs on no other.
    """

    text: str
    language: str
    entry: str = ENTRY
    arch_suffix: str = ""


class Emitter(NamedTuple):
    """source: of a plan. launch: how a plan's CUDA kernel is launched."""

    source: Callable[[Any], Source]
    launch: Callable[[Any], LaunchRule]


@functools.cache
def included(name: str) -> str:
    """The text of a hand-written header of ``include/``, which kernels contain, or of its section: ``file:section``.

    A section begins after its line ``//// section`` and ends before the next one.
    """
    file, _, section = name.partition(":")
    text = resources.files("kernelgen.kernels").joinpath(f"include/{file}").read_text()
    return text.split(f"//// {section}\n", 1)[1].split("//// ", 1)[0] if section else text


# How a CUDA kernel is launched, as data: Python and programs without Python evaluate the same rule.


@dataclass(frozen=True)
class Share:
    """``scale`` blocks for each part of ``times`` x count, divided by each of ``per`` one after the other, rounded up.

    count: ``edges``, ``in`` or ``out`` (nodes read and written), or ``tasks``: edges divided by nodes read, rounded up.
    """

    count: str
    per: tuple[int, ...] = ()
    times: int = 1
    scale: int = 1

    def blocks(self, num_edges: int, num_in: int, num_out: int) -> int:
        if self.count == "tasks":
            parts = -(-num_edges // num_in)
        else:
            parts = {"edges": num_edges, "in": num_in, "out": num_out}[self.count]
        parts *= self.times
        for each in self.per:
            parts = -(-parts // each)
        return self.scale * parts


@dataclass(frozen=True)
class LaunchRule:
    """threads: of a block. shared: its bytes of dynamic shared memory. Blocks are ``fixed`` and those of all shares.

    most_of_unit: at most so many blocks for each multiprocessor; 0: any number. whole_waves: as many blocks more that
    they fill whole waves of the device, which the kernel divides its work among.
    """

    threads: int
    shared: int
    shares: tuple[Share, ...]
    fixed: int = 0
    most_of_unit: int = 0
    whole_waves: bool = False

    def geometry(self, num_edges: int, num_in: int, num_out: int, units: int, held: int = 0) -> tuple[int, int, int]:
        """Blocks, threads a block and bytes of shared memory.

        units: multiprocessors of the device. held: blocks that each of them holds at a time, 0 if that is not known.
        """
        blocks = sum(share.blocks(num_edges, num_in, num_out) for share in self.shares)
        if self.whole_waves and (wave := units * held // self.shares[0].scale * self.shares[0].scale):
            blocks = -(-blocks // wave) * wave
        blocks += self.fixed
        if self.most_of_unit:
            blocks = min(blocks, self.most_of_unit * units)
        return blocks, self.threads, self.shared

    def to_dict(self) -> dict[str, Any]:
        """The rule as JSON's types."""
        return dataclasses.asdict(self)
