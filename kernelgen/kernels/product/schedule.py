"""Schedules of kernels of tensor products, for CUDA and for the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kernelgen.kernels.knobs import Knobs, power_of_two_at_most, read_schedule

if TYPE_CHECKING:
    from typing_extensions import Self

# Fewest edges of a run that is worth a permutation of edges by receiver.
LONG_RUN = 8


@dataclass(frozen=True)
class Schedule(Knobs):
    """Knobs that both backends share.

    fuse: gather, product and sum by destination in one kernel (False: torch gathers and scatters around it).
    accumulate: ``registers``: one worker takes all edges of a node and keeps their sums. ``atomics``: each worker takes
        a run of edges and adds its partial sums to memory (atomically, or under a lock on the CPU). ``owners`` (CUDA,
        gradients): in one launch, some blocks own senders and write the gradients of x; the others take runs of edges
        and write the other gradients (for a plain product all), without zeroed outputs or additions in memory.
    order: with ``registers``, the end of an edge whose node owns it. ``receiver``: values (and products with the
        cotangent) stay in registers, and gradients of x are added to memory. ``sender``: the other way round.
    path_groups: number of parts of the paths; each part has its own accumulators and loop over edges.
    edges_per_chunk: edges that a worker takes if it does not own a node.
    """

    fuse: bool = True
    accumulate: str = "registers"
    order: str = "receiver"
    path_groups: int = 1
    edges_per_chunk: int = 32

    @property
    def has_long_runs(self) -> bool:
        """Whether a worker takes so many edges that it saves memory accesses if their receivers are the same."""
        return self.accumulate == "atomics" and self.edges_per_chunk >= LONG_RUN

    @property
    def owner(self) -> str:
        """The end of an edge whose node has its own worker, so that edges must be ordered by it; empty for none."""
        return {"registers": self.order, "owners": "sender"}.get(self.accumulate, "")

    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "fuse": (True, False),
        "accumulate": ("registers", "atomics"),
        "order": ("receiver", "sender"),
        "path_groups": tuple(range(1, 129)),
        "edges_per_chunk": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    }


@dataclass(frozen=True)
class CudaSchedule(Schedule):
    """Knobs of a CUDA kernel. A *team* is a warp, or a part of one, whose lanes process one run of edges.

    edges_per_warp: teams in a warp; a team has ``32 / edges_per_warp`` lanes.
    channels_per_thread: channels of a lane, in registers; a team covers lanes x channels_per_thread channels.
    warps_per_edge: teams of one block that share a run of edges and split its channels and path groups.
    teams_per_node: with ``registers``, teams of one block that split the edges of a node. They add their sums in shared
        memory, in a fixed order.
    finish: how those teams divide the final addition. ``blocks``: each team adds whole irrep blocks, with separate code
        for each. ``unrolled``: each of n teams adds every n-th component of all blocks; no read waits for another.
    edge_operand: ``inline``: every lane computes the edge values. ``shared``: a team computes them once, in shared
        memory. ``basis``: as ``shared``, but values that are multiples of each other are kept once.
    stage_edges: edges whose indices (and edge values) a team fetches at a time; at most its lanes.
    prefetch: where a team loads the next edge's features and weights during this edge. ``reload``: into this edge's
        registers, each after its last use. ``copy``: into separate registers. ``ring2``, ``ring4``: features as with
        ``reload``, weights by asynchronous copies to shared memory, two or four edges ahead. ``none``: nowhere.
    ahead: prefetch to the L2 cache. ``weights``, ``rows``: a team that fetches the indices of ``stage_edges`` edges
        prefetches their weights or all of their rows. ``all``: the kernel prefetches all that it reads as it starts.
        ``along``: as ``all``, but after the first load and in fewer instructions. ``none``: nothing.
    stream: caches evict rows that only one edge uses (weights; all rows of a plain product) first.
    block_size: threads of a block. min_blocks: registers are limited so that this many blocks fit on a multiprocessor
        (1: as many registers as a thread can have; 0: the compiler chooses, often fewer).
    zeros: outputs that the kernel adds to are zeroed ``apart``, by a launch before it, or ``inside``, by its own first
        blocks; the other blocks wait for those before their first sum. ``cut`` (values summed in long runs of edges by
        receiver): a row whose edges are all in one run is stored. Only rows that a run's end cuts are added to, and
        only those and rows without edges are zeroed, by the first blocks.
    runs: of workers that own no node. ``fixed``: each takes ``edges_per_chunk`` edges. ``waves``: at most about that,
        and as many fewer that all blocks fill whole waves of the device.
    writes: how rows of x's gradient and of values reach memory. ``lanes``: each lane writes its own channels. ``rows``:
        lanes exchange them in shared memory and write in the order of memory: fewer sectors with layout ``mul_ir``.
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
    writes: str = "lanes"
    runs: str = "fixed"

    backend: ClassVar[str] = "cuda"
    younger: ClassVar[tuple[str, ...]] = ("finish", "zeros", "writes", "runs")
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
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
        "zeros": ("apart", "inside", "cut"),
        "writes": ("lanes", "rows"),
        "runs": ("fixed", "waves"),
    }

    @property
    def lanes(self) -> int:
        return 32 // self.edges_per_warp

    def for_degree(self, share: float) -> Self:
        """Scale ``teams_per_node`` so that a team keeps its number of edges, but never use more teams than before.

        Of kernels tuned on an H200, 26 of 46 had 2 to 8 teams a node at 158 edges a node, and none of 32 at 6.
        """
        teams = power_of_two_at_most(self.teams_per_node * share) if self.accumulate == "registers" else 1
        return dataclasses.replace(self, teams_per_node=min(self.teams_per_node, teams))

    def for_skew(self) -> Self:
        """Workers take runs of equal length instead of whole nodes, so that none ends long after the others.

        On graphs of even degrees such runs take 0.99 to 1.17 times as long (medians of 13 to 72 pairs of trials on an
        H200 by direction: backward 0.99, of edges 1.00, joint 1.05, forward 1.08, double 1.17). Shorter ones that fill
        the last wave too: with 2.3 waves of 32 edges, a third less of them one after the other.
        """
        if self.has_long_runs and self.fuse:
            return dataclasses.replace(self, runs="waves")
        if self.accumulate != "registers" or not self.fuse:
            return self
        plain = type(self)()
        return dataclasses.replace(
            self,
            accumulate="atomics",
            order=plain.order,
            edges_per_chunk=plain.edges_per_chunk,
            teams_per_node=plain.teams_per_node,
            finish=plain.finish,
            runs="waves",
        )

    def for_layout(self, layout: str) -> Self:
        """Write rows in the order of memory with ``mul_ir``, where a lane's own channels lie apart."""
        return dataclasses.replace(self, writes="rows" if layout == "mul_ir" else "lanes")


@dataclass(frozen=True)
class HostSchedule(Schedule):
    """Knobs of a host C++ kernel.

    channel_block: channels in one vector variable (one or several machine vectors).
    threads: most OpenMP threads, never more than torch's number; 0: by the amount of work, at most torch's number.
    """

    channel_block: int = 16
    threads: int = 0

    backend: ClassVar[str] = "cpu"
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Schedule.choices,
        "channel_block": (4, 8, 16, 32, 64),
        "threads": tuple(range(0, 257)),
    }


SCHEDULES: dict[str, type[Schedule]] = {"cuda": CudaSchedule, "cpu": HostSchedule}


def schedule_from_dict(data: Mapping[str, Any]) -> Schedule:
    """The schedule written by ``to_dict``; ScheduleError for an unknown backend, knob or value."""
    return read_schedule(data, SCHEDULES)
