"""Loads and stores of one path group as C++ text: what an edge loads, where sums go, how wide an access may be."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from kernelgen.arithmetic.couplings import EdgeValue, PathBody, PathTerms, edge_slots, path_body, path_terms
from kernelgen.kernels.product.channelwise import Group, Plan, row_spans
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import BYTES

# Buffers of node features, by side of the product.
NODE_BUFFERS = {"in1": ("x", "tx"), "out": ("g", "tg")}


@dataclass(frozen=True)
class Facts:
    """What all groups of one kernel share, from its plan."""

    plan: Plan

    @property
    def schedule(self) -> CudaSchedule:
        return self.plan.spec.cuda

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
            fields += [f"{name}{p}[C]" for name in self.kernel.plan.weight_operands for p in self.paths]
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
                dim = self.problem.dim_in1 if side == "in1" else self.problem.dim_out
                cache = self.edge_cache if self.kernel.plain else "Keep"
                for b in blocks:
                    start = f"b.{name} + (long long){row} * {dim} + {getattr(self.problem, side)[b].offset}"
                    width = self._widths(side, b)[1]
                    yield f"load_block<{cache}, {width}, MUL>({start}, u, active, {into}{name}{b});"

    def load_weights(self, into: str, edge: str, only: int | None = None) -> Iterator[str]:
        """Load the weights of an edge into ``into`` + buffer + path; without one the row that all edges share.

        only: of this path.
        """
        row = f" + (long long){edge} * {self.problem.weight_numel}" if edge else ""
        cache = self.edge_cache if edge else "Keep"
        for name in self.kernel.plan.weight_operands:
            for p in self.paths if only is None else (only,):
                start = f"b.{name}{row} + {self.problem.paths[p].weight_offset} + u"
                yield f"load_weights<{cache}, {self.weight_width(p)}>({start}, active, {into}{name}{p});"

    def weight_width(self, path: int) -> int:
        offset = self.problem.paths[path].weight_offset
        return self.kernel.width(self.problem.weight_numel, offset, self.channels)

    def put_block(self, how: str, side: str, block: int, source: str, row: str) -> str:
        """Store or add (``how``) a block to a row."""
        b, (row_width, width) = getattr(self.problem, side)[block], self._widths(side, block)
        if how == "Store" and self.kernel.plain and self.kernel.schedule.stream:
            how = "StoreStream"
        start = f"{self.out_row(side, row)} + {b.offset}"
        if self.kernel.schedule.writes == "lanes" or b.dim == 1:
            return f"put_block<{how}, {width}, MUL>({start}, u, active, {source});"
        left = f"stage + {self.kernel.plan.exchange_start}"
        # With which a lane leaves its channels of a block in shared memory.
        step = self.kernel.width(self.channels * (b.dim if self.kernel.plan.spec.layout == "mul_ir" else 1))
        return f"put_rows<{how}, {step}, {row_width}, MUL>(team, {left}, {start}, first_channel, {source});"

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

    def _widths(self, side: str, block: int) -> tuple[int, int]:
        """Elements of an access in a block of x (``in1``) or of g (``out``): in memory's order, and by channels."""
        b, tile = getattr(self.problem, side)[block], self.kernel.plan.tile
        row = self.problem.dim_in1 if side == "in1" else self.problem.dim_out
        if self.kernel.plan.spec.layout == "mul_ir":
            by_channels = self.kernel.width(row, b.offset, self.channels * b.dim)
            return self.kernel.width(row, b.offset, b.mul * b.dim, tile * b.dim), by_channels
        return self.kernel.width(row, b.offset, b.mul, tile), self.kernel.width(row, b.offset, b.mul, self.channels)


# The edge operand of one path group as C++ text: how a lane gets the edge values of its paths, and the sums of dF/dy.
#
# ``inline``: every lane computes the values of each edge from y. ``shared``: they are computed once an edge, one edge a
# lane, and read from shared memory. ``basis``: as ``shared``, but values that are multiples of each other are stored
# once, and lanes scale them.

# Buffers of y rows, with the prefixes of their edge values' names.
Y_BUFFERS = (("y", "m"), ("ty", "tm"))


def _linear(value: EdgeValue, row: str) -> str:
    """``Real(0.5) * y[1] - Real(0.2) * y[3]``: an edge value in terms of a y row."""
    text = ""
    for component, coefficient in value.terms:
        sign = " - " if coefficient < 0 else " + "
        factor = "" if abs(coefficient) == 1 else f"Real({abs(coefficient)!r}) * "
        text += f"{sign}{factor}{row}[{component}]"
    return text[3:] if text.startswith(" + ") else "-" + text[3:]


class EdgeOperand:
    """Edge values of one group. ``stride``: shared-memory elements of an edge."""

    def __init__(self, kernel: Facts, paths: list[int], stride: int) -> None:
        self.kernel, self.paths, self.stride = kernel, paths, stride
        self.rows = [(name, prefix) for name, prefix in Y_BUFFERS if name in kernel.operands]
        basis = kernel.schedule.edge_operand == "basis"
        self.staged_values, self.slots = edge_slots([kernel.terms[p] for p in paths], basis)
        self._loaded: set[int] = set()

    def load(self, edge: str) -> list[str]:
        """Load the y rows of an edge to registers."""
        dim = self.kernel.plan.spec.problem.dim_in2
        width, lines = self.kernel.width(dim), []
        if self.kernel.plan.spec.harmonics is not None:
            return [f"Real y[{dim}];", f"harmonics(b.y + (long long){edge} * 3, y);"] if self.rows else []
        for name, _ in self.rows:
            lines += [f"Real {name}[{dim}];", f"load<{width}>(b.{name} + (long long){edge} * {dim}, {name});"]
        return lines

    def stage(self) -> list[str]:
        """Compute the values of the lane's own edge and store them in shared memory."""
        lines = [*self.load("my_edge"), f"Real values[{self.stride}] = {{}};"]
        for number, (name, _) in enumerate(self.rows):
            first = number * len(self.staged_values)
            lines += [f"values[{first + k}] = {_linear(v, name)};" for k, v in enumerate(self.staged_values)]
        return [*lines, f"store<{self.kernel.widest}>(stage + team.lane * {self.stride}, values);"]

    def begin(self) -> list[str]:
        """Statements before an edge's first path."""
        self._loaded.clear()
        if self.kernel.staged:
            return [f"const Real* const staged = stage + j * {self.stride};"]
        return self.load("edge")

    def fetch(self, p: int, body: PathBody) -> list[str]:
        """Load the packs of staged values that path p is the first to read, before its braces: later paths use them."""
        if not self.kernel.staged:
            return []
        width = self.kernel.widest
        packs = {self._place(name, p, k)[0] // width for name, k in self._read(p, body)} - self._loaded
        self._loaded |= packs
        return [
            f"const Pack<{width}> pack{k} = *reinterpret_cast<const Pack<{width}>*>(staged + {width * k});"
            for k in sorted(packs)
        ]

    def bind(self, p: int, body: PathBody) -> list[str]:
        """Define the names of the edge values that a path reads."""
        lines, width = [], self.kernel.widest
        for name, k in self._read(p, body):
            buffer, prefix = name
            place = _linear(self.kernel.terms[p].values[k], buffer)
            if self.kernel.staged:
                slot, scale = self._place(name, p, k)
                factor = "" if scale == 1 else f"Real({scale!r}) * "
                place = f"{factor}pack{slot // width}.v[{slot % width}]"
            lines.append(f"const Real {prefix}{p}_{k} = {place};")
        return lines

    def _read(self, p: int, body: PathBody) -> list[tuple[tuple[str, str], int]]:
        """The edge values that a path's body reads, as (buffer and prefix, number)."""
        count = len(self.kernel.terms[p].values)
        return [(row, k) for row in self.rows for k in range(count) if f"{row[1]}{p}_{k}" in body.reads]

    def _place(self, row: tuple[str, str], p: int, k: int) -> tuple[int, float]:
        slot, scale = self.slots[p, k]
        return self.rows.index(row) * len(self.staged_values) + slot, scale


class EdgeSums:
    """How the lanes' sums for an edge's dF/dy reach memory: added, or stored if only one team has a part.

    With ``plan.joins_y`` each team stores its part in shared memory (``sums``, a row for each fetched edge). After the
    last fetched edge, the teams of the block each sum and write some of the rows.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.dim = plan, plan.spec.dim_y

    def put(self) -> list[str]:
        """Statements after an edge. The gradient by a vector is linear, so lanes apply it before the sum over lanes."""
        how, sums, lines = "Add" if "out_y" in self.plan.zeroed else "Store", "oy", []
        parts = self.plan.partial_y
        row = f"((long long)edge * {parts} + unit)" if parts else "(long long)edge"
        if self.plan.spec.harmonics is not None:
            sums, lines = "ov", ["Real ov[3];", "along_v(b.y + (long long)edge * 3, oy, ov);"]
        place = f"sums + j * {self.dim}" if self.plan.joins_y else f"b.out_y + {row} * {self.dim}"
        return [*lines, f"sum_over_team<{how}>(team, {sums}, {place});"]

    def join(self) -> list[str]:
        """Statements after the edges that were fetched together."""
        units, part = self.plan.units, self.plan.joint_elements
        return [
            "__syncthreads();",
            f"for (int j = unit; j < count; j += {units}) {{",
            "    const long long edge = team.broadcast(my_edge, j);",
            f"    for (int m = team.lane; m < {self.dim}; m += LANES) {{",
            f"        const Real* const parts = sums - unit * {part} + j * {self.dim} + m;",
            "        Real total = 0;",
            f"        UNROLL for (int k = 0; k < {units}; ++k) total += parts[k * {part}];",
            f"        b.out_y[edge * {self.dim} + m] = total;",
            "    }",
            "}",
            "__syncthreads();",
        ]
