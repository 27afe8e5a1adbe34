"""Loads and stores of one path group as C++ text: what an edge loads, where sums go, how wide an access may be."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from kernelgen.plan.channelwise import Plan, exchange_start
from kernelgen.plan.l2_prefetch import row_spans
from kernelgen.plan.path_groups import Group
from kernelgen.problem.irreps import Block
from kernelgen.schedule.kernel_spec import BYTES
from kernelgen.schedule.tensor_product import CudaSchedule
from kernelgen.terms.clebsch_gordan import PathTerms, path_terms
from kernelgen.terms.path_statements import PathBody, path_body

# Buffers of node features, by side of the product.
NODE_BUFFERS = {"in1": ("x", "tx"), "out": ("g", "tg")}


@dataclass(frozen=True)
class Facts:
    """What all groups of one kernel share, from its plan."""

    plan: Plan

    @property
    def schedule(self) -> CudaSchedule:
        assert isinstance(self.plan.spec.schedule, CudaSchedule)
        return self.plan.spec.schedule

    @property
    def operands(self) -> tuple[str, ...]:
        return self.plan.spec.direction.operands

    @property
    def live(self) -> str:
        return self.plan.spec.direction.live_outputs

    @property
    def plain(self) -> bool:
        return self.plan.spec.operation == "plain"

    @property
    def staged(self) -> bool:
        return self.schedule.edge_operand != "inline"

    @property
    def widest(self) -> int:
        """Elements in a 16-byte access."""
        return 16 // BYTES[self.plan.spec.dtype]

    @functools.cached_property
    def terms(self) -> tuple[PathTerms, ...]:
        return path_terms(self.plan.spec.problem)

    @functools.cached_property
    def bodies(self) -> tuple[PathBody, ...]:
        return tuple(path_body(terms, self.plan.spec.direction) for terms in self.terms)

    def width(self, *divisible: int) -> int:
        """Elements of a memory access: the most that divide all these counts."""
        return next(w for w in (4, 2, 1) if w <= self.widest and all(number % w == 0 for number in divisible))


class GroupMemory:
    """Loads and stores of one group. ``row`` and ``edge`` are C++ expressions of a node's and an edge's number."""

    def __init__(self, kernel: Facts, group: Group, paths: list[int]) -> None:
        self.kernel, self.group, self.paths = kernel, group, paths
        self.problem = kernel.plan.spec.problem
        self.channels = kernel.schedule.channels_per_thread

    @property
    def edge_cache(self) -> str:
        """The caching of rows that only one edge uses: Keep or Stream."""
        return "Stream" if self.kernel.schedule.stream else "Keep"

    def blocks(self, side: str) -> tuple[int, ...]:
        return self.group.in1 if side == "in1" else self.group.out

    def ask(self, edge: str, far: str) -> Iterator[str]:
        """Prefetch to the L2 cache what an edge's ``row_fields`` will be loaded from."""
        rows = {
            "w": (edge, self.problem.weight_numel),
            "x": (far, self.problem.dim_in1),
            "g": (far, self.problem.dim_out),
        }
        for span in row_spans(self.kernel.plan, self.group):
            row, length = rows[span.slot]
            for name in (span.slot, "t" + span.slot):
                if name in self.kernel.operands:
                    start = f"{span.start}" + (f" + {span.step} * first_channel" if span.step else "")
                    yield f"ask<{span.length}>(b.{name} + (long long){row} * {length} + {start});"

    def row_fields(self) -> list[str]:
        """Fields of what is loaded for every edge: rows of nodes (not of the near side), and weights."""
        fields = []
        for side, buffers in NODE_BUFFERS.items():
            if side != self.kernel.plan.near:
                fields += self.node_fields(side, buffers)
        if not self.problem.shared_weights and not self.kernel.plan.ring:
            fields += [f"{name}{p}[C]" for name in ("w", "tw") if name in self.kernel.operands for p in self.paths]
        return fields

    def node_fields(self, side: str, buffers: tuple[str, ...]) -> list[str]:
        sizes = getattr(self.problem, side)
        read = [name for name in buffers if name in self.kernel.operands]
        return [f"{name}{b}[{sizes[b].dim}][C]" for name in read for b in self.blocks(side)]

    def load_node(self, side: str, into: str, row: str, only: int | None = None) -> Iterator[str]:
        """Load the rows of a node, for every operand of a side, into ``into`` + buffer + block. only: this block."""
        for name in NODE_BUFFERS[side]:
            if name in self.kernel.operands:
                blocks = self.blocks(side) if only is None else (only,)
                yield from (self._load_block(name, side, b, f"{into}{name}{b}", row) for b in blocks)

    def load_weights(self, into: str, edge: str, only: int | None = None) -> Iterator[str]:
        """Load the weights of an edge into ``into`` + buffer + path. only: of this path."""
        for name in ("w", "tw"):
            if name in self.kernel.operands:
                paths = self.paths if only is None else (only,)
                yield from (self.load_weight(name, p, f"{into}{name}{p}", edge) for p in paths)

    def load_weight(self, name: str, path: int, into: str, edge: str) -> str:
        """Load the weights of a path; an empty ``edge`` means the row that all edges share."""
        offset = self.problem.paths[path].weight_offset
        base = f"b.{name} + (long long){edge} * {self.problem.weight_numel}" if edge else f"b.{name}"
        cache = self.edge_cache if edge else "Keep"
        return f"load_weights<{cache}, {self.weight_width(path)}>({base} + {offset} + u, active, {into});"

    def weight_width(self, path: int) -> int:
        offset = self.problem.paths[path].weight_offset
        return self.kernel.width(self.problem.weight_numel, offset, self.channels)

    def put_block(self, how: str, side: str, block: int, source: str, row: str) -> str:
        """Store or add (``how``) a block to a row."""
        b, width = getattr(self.problem, side)[block], self._block_width(side, block)
        if how == "Store" and self.kernel.plain and self.kernel.schedule.stream:
            how = "StoreStream"
        start = f"{self.out_row(side, row)} + {b.offset}"
        if self.kernel.schedule.writes == "lanes" or b.dim == 1:
            return f"put_block<{how}, {width}, MUL>({start}, u, active, {source});"
        left = f"stage + {exchange_start(self.kernel.plan)}"
        widths = f"{self._exchange_step(b)}, {self._row_width(side, block)}"
        return f"put_rows<{how}, {widths}, MUL>(team, {left}, {start}, first_channel, {source});"

    def _exchange_step(self, b: Block) -> int:
        """Elements of an access with which a lane leaves its channels of a block in shared memory."""
        return self.kernel.width(self.channels * (b.dim if self.kernel.plan.spec.layout == "mul_ir" else 1))

    def _row_width(self, side: str, block: int) -> int:
        """Elements of an access of a lane that writes a block in the order of memory."""
        b = getattr(self.problem, side)[block]
        row = self.problem.dim_in1 if side == "in1" else self.problem.dim_out
        if self.kernel.plan.spec.layout == "mul_ir":
            return self.kernel.width(row, b.offset, b.mul * b.dim, self.kernel.plan.tile * b.dim)
        return self.kernel.width(row, b.offset, b.mul, self.kernel.plan.tile)

    def out_row(self, side: str, row: str) -> str:
        """Address of a node's row of results."""
        name, dim = ("out_x", self.problem.dim_in1) if side == "in1" else ("out_g", self.problem.dim_out)
        return f"b.{name} + (long long){row} * {dim}"

    def place(self, side: str, block: int, component: str, channel: str) -> str:
        """Position in a row of one component of a block's channel."""
        b = getattr(self.problem, side)[block]
        if self.kernel.plan.spec.layout == "mul_ir":
            return f"{b.offset} + {channel} * {b.dim} + {component}"
        return f"{b.offset} + {component} * MUL + {channel}"

    def owned_how(self, side: str, block: int) -> str:
        """Store if only this group writes the block, else Add."""
        exclusive = self.kernel.plan.exclusive_in1 if side == "in1" else self.kernel.plan.exclusive_out
        return "Store" if block in exclusive else "Add"

    def flush(self, side: str, row: str, owned: bool, only: int | None = None) -> Iterator[str]:
        """Write the sums of a side to a node's row. owned: no other team writes blocks of this group alone.

        only: the sums of this block.
        """
        stem = "ox" if side == "in1" else "og"
        for b in self.blocks(side) if only is None else (only,):
            yield self.put_block(self.owned_how(side, b) if owned else "Add", side, b, f"{stem}{b}", row)

    def _load_block(self, name: str, side: str, block: int, into: str, row: str) -> str:
        b = getattr(self.problem, side)[block]
        dim = self.problem.dim_in1 if side == "in1" else self.problem.dim_out
        width = self._block_width(side, block)
        cache = self.edge_cache if self.kernel.plain else "Keep"
        return (
            f"load_block<{cache}, {width}, MUL>(b.{name} + (long long){row} * {dim} + {b.offset}, u, active, {into});"
        )

    def _block_width(self, side: str, block: int) -> int:
        """Elements of an access in a block of x (``in1``) or of g (``out``)."""
        b = getattr(self.problem, side)[block]
        row = self.problem.dim_in1 if side == "in1" else self.problem.dim_out
        if self.kernel.plan.spec.layout == "mul_ir":
            return self.kernel.width(row, b.offset, self.channels * b.dim)
        return self.kernel.width(row, b.offset, b.mul, self.channels)
