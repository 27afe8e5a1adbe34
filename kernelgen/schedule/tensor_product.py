"""Schedules of the kernels of tensor products: their knobs as frozen data, for CUDA and for the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kernelgen.schedule.knobs import Knobs, power_of_two_at_most, read_schedule


@dataclass(frozen=True)
class Schedule(Knobs):
    """Knobs that both backends share.

    fuse: gather, product and sum by destination in one kernel (False: torch gathers and scatters around it).
    accumulate: ``registers`` gives all edges of a node to one worker that keeps their sums; ``atomics`` gives each
        worker a run of edges and adds its partial sums to memory (atomically, or under a lock on the CPU). CUDA,
        gradients: ``owners``, in one launch some blocks own the senders and write the gradients of x, others take runs
        of edges and write the rest, so that nothing starts from zero and nothing is added in memory; of a plain product
        these take all gradients.
    order: with ``registers``, the end of an edge whose node owns it. By ``receiver`` values (and products with the
        cotangent) stay in registers and gradients of x are added to memory; by ``sender`` it is the other way round.
    path_groups: how many parts the paths are split into; each part has its own accumulators and loop over edges.
    edges_per_chunk: edges a worker takes where it does not own a node.
    """

    fuse: bool = True
    accumulate: str = "registers"
    order: str = "receiver"
    path_groups: int = 1
    edges_per_chunk: int = 32

    @property
    def owner(self) -> str:
        """The end of an edge whose node has a worker of its own, by which edges must be ordered; empty for none."""
        return {"registers": self.order, "owners": "sender"}.get(self.accumulate, "")

    choices: ClassVar[dict[str, tuple]] = {
        "fuse": (True, False),
        "accumulate": ("registers", "atomics"),
        "order": ("receiver", "sender"),
        "path_groups": tuple(range(1, 129)),
        "edges_per_chunk": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    }


@dataclass(frozen=True)
class CudaSchedule(Schedule):
    """Knobs of a CUDA kernel. A *team* is the set of lanes of a warp that works through one run of edges.

    edges_per_warp: teams in a warp; a team has ``32 / edges_per_warp`` lanes.
    channels_per_thread: channels in a lane's registers; the lanes of a team cover lanes x channels channels.
    warps_per_edge: teams of one block that share a run of edges and split its channels and path groups.
    teams_per_node: with ``registers``, teams of one block that split the edges of a node; their sums meet in shared
        memory, in a fixed order.
    finish: how those teams share out the sums: whole ``blocks``, each in code of its own, or every so many-th
        component of all, ``unrolled``, so that no read waits for another.
    edge_operand: ``inline`` forms the edge values in every lane, ``shared`` forms them once a team in shared memory,
        ``basis`` keeps there only one of those that are multiples of each other.
    stage_edges: edges whose indices (and edge values) a team fetches at a time; at most its lanes.
    prefetch: features and weights of the next edge are loaded while this one is worked on: ``reload``, each where this
        edge's was, once that has been used for the last time; ``copy``, in registers of their own; or ``none``.
        ``ring2``, ``ring4``: features so, weights by asynchronous copies to shared memory, two or four edges ahead.
    ahead: what a team asks the L2 cache for as it fetches the indices of ``stage_edges`` edges: their ``weights``, all
        of their ``rows``, or ``none``; or ``all``: as it starts, the kernel asks for everything that it reads;
        ``along``: so too, behind the first load of its own and in fewer instructions.
    stream: rows that only one edge uses (weights; of a plain product all rows) are the first to leave the caches.
    block_size, min_blocks: threads a block; blocks a multiprocessor that registers are limited for (1: as many as a
        thread can have; 0: as the compiler likes, often fewer than that).
    zeros: what the kernel adds to is filled with zeros by a launch ``apart``, or ``inside``, by its own first blocks,
        for which the others wait before their first sum.
    """

    edges_per_warp: int = 1
    channels_per_thread: int = 1
    warps_per_edge: int = 1
    teams_per_node: int = 1
    edge_operand: str = "inline"
    stage_edges: int = 32
    prefetch: str = "none"
    ahead: str = "none"
    stream: bool = False
    block_size: int = 128
    min_blocks: int = 0
    finish: str = "blocks"
    zeros: str = "apart"

    backend: ClassVar[str] = "cuda"
    younger: ClassVar[tuple[str, ...]] = ("finish", "zeros")
    choices: ClassVar[dict[str, tuple]] = {
        **Schedule.choices,
        "accumulate": ("registers", "atomics", "owners"),
        "edges_per_warp": (1, 2, 4, 8),
        "channels_per_thread": (1, 2, 4),
        "warps_per_edge": (1, 2, 4, 8, 16),
        "teams_per_node": (1, 2, 4, 8, 16),
        "edge_operand": ("inline", "shared", "basis"),
        "stage_edges": (4, 8, 16, 32),
        "prefetch": ("none", "reload", "copy", "ring2", "ring4"),
        "ahead": ("none", "weights", "rows", "all", "along"),
        "stream": (False, True),
        "block_size": (32, 64, 128, 256, 512),
        "min_blocks": (0, 1, 2, 3, 4, 6, 8, 12, 16),
        "finish": ("blocks", "unrolled"),
        "zeros": ("apart", "inside"),
    }

    @property
    def lanes(self) -> int:
        return 32 // self.edges_per_warp

    def for_degree(self, share: float) -> Self:
        """A team keeps as many edges as it had; more teams than before are never formed.

        Of kernels tuned on an H200, 26 of 46 had 2 to 8 teams a node at 158 edges a node, and none of 32 at 6.
        """
        teams = power_of_two_at_most(self.teams_per_node * share) if self.accumulate == "registers" else 1
        return dataclasses.replace(self, teams_per_node=min(self.teams_per_node, teams))


@dataclass(frozen=True)
class HostSchedule(Schedule):
    """Knobs of a host C++ kernel.

    channel_block: channels held in one vector variable (several machine vectors where it is wider than one).
    threads: OpenMP threads, 0 for as many as torch uses.
    """

    channel_block: int = 16
    threads: int = 0

    backend: ClassVar[str] = "cpu"
    choices: ClassVar[dict[str, tuple]] = {
        **Schedule.choices,
        "channel_block": (4, 8, 16, 32, 64),
        "threads": tuple(range(0, 257)),
    }


SCHEDULES: dict[str, type[Schedule]] = {"cuda": CudaSchedule, "cpu": HostSchedule}


def schedule_from_dict(data: Mapping[str, Any]) -> Schedule:
    """The schedule written by ``to_dict``; ScheduleError for an unknown backend, knob or value."""
    return read_schedule(data, SCHEDULES)
