"""The edge operand of one path group as C++ text: how a lane gets the edge values of its paths, and the sums of dF/dy.

``inline``: every lane computes the values of each edge from y. ``shared``: they are computed once an edge, one edge a
lane, and read from shared memory. ``basis``: as ``shared``, but values that are multiples of each other are stored
once, and lanes scale them.
"""

from __future__ import annotations

from kernelgen.emit.cuda.memory_access import Facts
from kernelgen.plan.channelwise import Plan, joint_elements
from kernelgen.terms.clebsch_gordan import EdgeValue, edge_slots
from kernelgen.terms.path_statements import PathBody

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
        units, part = self.plan.units, joint_elements(self.plan)
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
