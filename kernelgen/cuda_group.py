"""The device function of one path group: registers, the loop over a run of edges, and the memory it touches.

Enters the kernel's facts (:class:`Facts`) and a :class:`Group`, leaves C++ text. A lane keeps the sums of its channels
in registers; a row struct holds what is loaded for an edge, so that rows can be fetched ahead of their use.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kernelgen.body import PathBody, path_body
from kernelgen.plan import BYTES, Group, Plan, stage_stride
from kernelgen.schedule import CudaSchedule
from kernelgen.terms import EdgeValue, PathTerms, path_terms


def _linear(value: EdgeValue, row: str) -> str:
    """``T(0.5) * y[1] - T(0.2) * y[3]``: an edge value in terms of a y row."""
    text = ""
    for component, coefficient in value.terms:
        sign = " - " if coefficient < 0 else " + "
        text += f"{sign}Real({abs(coefficient)!r}) * {row}[{component}]"
    return text[3:] if text.startswith(" + ") else "-" + text[3:]


@dataclass(frozen=True)
class Facts:
    """What all groups of one kernel share, read off its plan."""

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
    def owns(self) -> bool:
        return self.plan.owns_destination

    @property
    def staged(self) -> bool:
        return self.schedule.edge_operand == "shared"

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
        """Elements a memory access may take where all these element counts are multiples of it."""
        return next(w for w in (4, 2, 1) if w <= self.widest and all(number % w == 0 for number in divisible))


class GroupEmitter:
    """The device function of one path group."""

    def __init__(self, kernel: Facts, number: int, group: Group) -> None:
        self.kernel, self.number, self.group = kernel, number, group
        self.problem = kernel.plan.spec.problem
        self.lines: list[str] = []
        self.depth = 1
        # paths of one input block follow each other, so that its gradient is complete after the last of them
        self.paths = sorted(group.paths, key=lambda p: (self.problem.paths[p].in1, p))
        self.channels = kernel.schedule.channels_per_thread
        self.stride = stage_stride(kernel.plan, group)

    def put(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def text(self) -> str:
        kernel, group = self.kernel, self.group
        tile = kernel.schedule.lanes * self.channels
        names = ", ".join(self.problem.in1[b].text for b in group.in1)
        self.put(
            f"constexpr int MUL = {group.mul};",
            "const int u = (tile * LANES + team.lane) * C;",
            f"const bool active = {'true' if group.mul % tile == 0 else 'u < MUL'};",
        )
        self._declare_sums()
        if kernel.owns and "g" in kernel.operands:
            self._load_g("run")
        self._walk()
        self._finish()
        return "\n".join(
            [
                self._row_struct(),
                f"// Group {self.number}: paths {', '.join(map(str, self.paths))} of {names}.",
                f"DEVICE void group_{self.number}(const Buffers& b, const Team& team, const int tile, const int run,",
                "                    const int begin, const int end, Real* const stage)",
                "{",
                *self.lines,
                "}",
                "",
            ]
        )

    # ---- memory ----------------------------------------------------------------------------------------------

    def _block_width(self, side: str, block: int) -> int:
        """Elements an access may take in a block of x (``in1``) or of g (``out``)."""
        b = getattr(self.problem, side)[block]
        row = self.problem.dim_in1 if side == "in1" else self.problem.dim_out
        if self.kernel.plan.spec.layout == "mul_ir":
            return self.kernel.width(row, b.offset, self.channels * b.dim)
        return self.kernel.width(row, b.offset, b.mul, self.channels)

    def _weight_width(self, path: int) -> int:
        return self.kernel.width(self.problem.weight_numel, self.problem.paths[path].weight_offset, self.channels)

    def _row_struct(self) -> str:
        """What is loaded for every edge, as a struct, so that rows can be fetched ahead."""
        kernel, fields = self.kernel, []
        for name in ("x", "tx"):
            if name in kernel.operands:
                fields += [f"{name}{b}[{self.problem.in1[b].dim}][C]" for b in self.group.in1]
        if kernel.plain and "g" in kernel.operands:
            fields += [f"g{b}[{self.problem.out[b].dim}][C]" for b in self.group.out]
        if not self.problem.shared_weights:
            fields += [f"{name}{p}[C]" for name in ("w", "tw") if name in kernel.operands for p in self.paths]
        members = [f"    Real {field};" for field in fields] or ["    int nothing;"]
        title = f"// What group {self.number} loads for an edge."
        return "\n".join([title, f"struct Row{self.number} {{", *members, "};", ""])

    def _declare_sums(self) -> None:
        kernel = self.kernel
        if "g" in kernel.live:
            self.put(*(f"Real og{b}[{self.problem.out[b].dim}][C] = {{}};" for b in self.group.out))
        if "g" in kernel.operands and not kernel.plain:
            self.put(*(f"Real g{b}[{self.problem.out[b].dim}][C] = {{}};" for b in self.group.out))
        if self.problem.shared_weights:
            for name in ("w", "tw"):
                if name in kernel.operands:
                    for p in self.paths:
                        self.put(f"Real all_{name}{p}[C];", self._load_weight(name, p, f"all_{name}{p}", "0"))
            if "w" in kernel.live:
                self.put(*(f"Real sum_w{p}[C] = {{}};" for p in self.paths))

    def _load_weight(self, name: str, path: int, into: str, row: str) -> str:
        offset = self.problem.paths[path].weight_offset
        base = f"b.{name}" if row == "0" else f"b.{name} + {row} * {self.problem.weight_numel}"
        start = f"{base} + {offset} + u"
        return f"load_weights<{self._weight_width(path)}>({start}, active, {into});"

    def _load_block(self, name: str, side: str, block: int, into: str, row: str) -> str:
        b = getattr(self.problem, side)[block]
        dim = self.problem.dim_in1 if side == "in1" else self.problem.dim_out
        width = self._block_width(side, block)
        return f"load_block<{width}, MUL>(b.{name} + (long long){row} * {dim} + {b.offset}, u, active, {into});"

    def _put_block(self, how: str, side: str, block: int, source: str, row: str) -> str:
        b = getattr(self.problem, side)[block]
        name, dim = ("out_x", self.problem.dim_in1) if side == "in1" else ("out_g", self.problem.dim_out)
        width = self._block_width(side, block)
        return f"put_block<{how}, {width}, MUL>(b.{name} + (long long){row} * {dim} + {b.offset}, u, active, {source});"

    def _load_g(self, row: str) -> None:
        self.put(*(self._load_block("g", "out", b, f"g{b}", row) for b in self.group.out))

    def _flush_sums(self, row: str) -> None:
        for b in self.group.out:
            sole = b in self.kernel.plan.exclusive_out and (self.kernel.owns or self.kernel.plain)
            self.put(self._put_block("Store" if sole else "Add", "out", b, f"og{b}", row))

    def _load_row(self, row: str, edge: str, source: str) -> None:
        """Everything an edge needs from memory except its y row."""
        kernel = self.kernel
        for name in ("x", "tx"):
            if name in kernel.operands:
                self.put(*(self._load_block(name, "in1", b, f"{row}.{name}{b}", source) for b in self.group.in1))
        if kernel.plain and "g" in kernel.operands:
            self.put(*(self._load_block("g", "out", b, f"{row}.g{b}", edge) for b in self.group.out))
        if not self.problem.shared_weights:
            for name in ("w", "tw"):
                if name in kernel.operands:
                    at = f"(long long){edge}"
                    self.put(*(self._load_weight(name, p, f"{row}.{name}{p}", at) for p in self.paths))

    # ---- the loop over edges -----------------------------------------------------------------------------------

    def _walk(self) -> None:
        kernel, prefetch = self.kernel, self.kernel.schedule.prefetch
        by_destination = not kernel.owns and not kernel.plain and ("g" in kernel.live or "g" in kernel.operands)
        if by_destination:
            self.put("int destination = -1;")
        self.put("for (int base = begin; base < end; base += STAGE) {")
        self.depth += 1
        self.put("const int count = min(STAGE, end - base);", "// one edge a lane: its indices, and its edge values")
        self.put("int my_edge = 0, my_source = 0;" + (" int my_destination = 0;" if by_destination else ""))
        self.put("if (team.lane < count) {")
        self.depth += 1
        self.put("my_edge = base + team.lane;")
        if kernel.owns:
            self.put("if (b.perm) my_edge = b.perm[my_edge];")
        self.put("my_source = my_edge;" if kernel.plain else "my_source = int(b.sender[my_edge]);")
        if by_destination:
            self.put("my_destination = int(b.receiver[my_edge]);")
        if kernel.staged:
            self._stage_values()
        self.depth -= 1
        self.put("}")
        if kernel.staged:
            self.put("team.sync();")
        self.put(f"Row{self.number} rows[{prefetch + 1}];")
        for ahead in range(prefetch):
            self._fetch(ahead, f"{ahead}")
        self.put("for (int j = 0; j < count; ++j) {")
        self.depth += 1
        self.put("const int edge = team.broadcast(my_edge, j), source = team.broadcast(my_source, j);")
        self._fetch(prefetch, f"j + {prefetch}" if prefetch else "")
        if by_destination:
            self._change_destination()
        self._edge()
        if prefetch:
            self.put(f"UNROLL for (int k = 0; k < {prefetch}; ++k) rows[k] = rows[k + 1];")
        self.depth -= 1
        self.put("}")
        if kernel.staged:
            self.put("team.sync();")
        self.depth -= 1
        self.put("}")

    def _fetch(self, slot: int, position: str) -> None:
        """Load the row of the edge at a position of the stage (empty: the current edge, already at hand)."""
        if not position:
            self._load_row(f"rows[{slot}]", "edge", "source")
            return
        self.put(f"if ({position} < count) {{")
        self.depth += 1
        self.put(
            f"const int next = team.broadcast(my_edge, {position}), from = team.broadcast(my_source, {position});",
        )
        self._load_row(f"rows[{slot}]", "next", "from")
        self.depth -= 1
        self.put("}")

    def _change_destination(self) -> None:
        kernel = self.kernel
        self.put("const int next_destination = team.broadcast(my_destination, j);")
        self.put("if (next_destination != destination) {")
        self.depth += 1
        if "g" in kernel.live:
            self.put("if (destination >= 0) {")
            self.depth += 1
            self._flush_sums("destination")
            self.put(*(f"clear(og{b});" for b in self.group.out))
            self.depth -= 1
            self.put("}")
        self.put("destination = next_destination;")
        if "g" in kernel.operands:
            self._load_g("destination")
        self.depth -= 1
        self.put("}")

    def _y_rows(self) -> list[tuple[str, str]]:
        """(buffer, prefix of its edge values) for the y-like operands."""
        return [(n, p) for n, p in (("y", "m"), ("ty", "tm")) if n in self.kernel.operands]

    def _load_y(self, name: str, edge: str) -> None:
        dim = self.problem.dim_in2
        start = f"b.{name} + (long long){edge} * {dim}"
        self.put(f"Real {name}[{dim}];", f"load<{self.kernel.width(dim)}>({start}, {name});")

    def _value_slots(self) -> dict[str, int]:
        """Position of each edge value of this group in a staged edge."""
        names = [
            f"{prefix}{p}_{k}"
            for p in self.paths
            for _, prefix in self._y_rows()
            for k in range(len(self.kernel.terms[p].values))
        ]
        return {name: slot for slot, name in enumerate(names)}

    def _stage_values(self) -> None:
        for name, _ in self._y_rows():
            self._load_y(name, "my_edge")
        self.put(f"Real values[{self.stride}] = {{}};")
        slots = self._value_slots()
        for p in self.paths:
            for name, prefix in self._y_rows():
                for k, value in enumerate(self.kernel.terms[p].values):
                    self.put(f"values[{slots[f'{prefix}{p}_{k}']}] = {_linear(value, name)};")
        self.put(f"store<{self.kernel.widest}>(stage + team.lane * {self.stride}, values);")

    def _edge(self) -> None:
        kernel = self.kernel
        if kernel.staged:
            self.put(f"const Real* const staged = stage + j * {self.stride};")
        else:
            for name, _ in self._y_rows():
                self._load_y(name, "edge")
        if "y" in kernel.live:
            self.put(f"Real oy[{self.problem.dim_in2}] = {{}};")
        if kernel.plain and "g" in kernel.live:
            self.put(*(f"clear(og{b});" for b in self.group.out))
        loaded: set[int] = set()
        for position, p in enumerate(self.paths):
            block = self.problem.paths[p].in1
            if "x" in kernel.live and (position == 0 or self.problem.paths[self.paths[position - 1]].in1 != block):
                self.put(f"Real ox{block}[{self.problem.in1[block].dim}][C] = {{}};")
            self._path(p, loaded)
            last = position + 1 == len(self.paths) or self.problem.paths[self.paths[position + 1]].in1 != block
            if "x" in kernel.live and last:
                sole = kernel.plain and block in kernel.plan.exclusive_in1
                self.put(self._put_block("Store" if sole else "Add", "in1", block, f"ox{block}", "source"))
        if "y" in kernel.live:
            how = "Add" if "out_y" in kernel.plan.zeroed else "Store"
            self.put(f"sum_over_team<{how}>(team, oy, b.out_y + (long long)edge * {self.problem.dim_in2});")
        if kernel.plain and "g" in kernel.live:
            self._flush_sums("edge")

    def _path(self, p: int, loaded: set[int]) -> None:
        kernel, path, body = self.kernel, self.problem.paths[p], self.kernel.bodies[p]
        blocks = self.problem.in1[path.in1], self.problem.in2[path.in2], self.problem.out[path.out]
        self.put(
            f"{{  // path {p}: {blocks[0].text} x {blocks[1].text} -> {blocks[2].text}, "
            f"weights {path.weight_offset}..{path.weight_offset + path.mul - 1}"
        )
        if kernel.staged:
            # packs of edge values outlive the path's braces: two paths may share one
            self.lines[-1:-1] = self._pack_loads(p, body, loaded)
        self.depth += 1
        self._edge_values(p, body)
        adjoints = [name for name in body.accumulates if name.startswith("r")]
        if adjoints:
            self.put("Real " + ", ".join(f"{name} = 0" for name in adjoints) + ";")
        per_edge_weight = "w" in kernel.live and not self.problem.shared_weights
        if per_edge_weight:
            self.put(f"Real sum_w{p}[C] = {{}};")
        self.put("UNROLL for (int c = 0; c < C; ++c) {")
        self.depth += 1
        self._channel(p, body)
        self.depth -= 1
        self.put("}")
        for k, value in enumerate(kernel.terms[p].values):
            if f"r{p}_{k}" in adjoints:
                self.put(*(f"oy[{m}] += Real({c!r}) * r{p}_{k};" for m, c in value.terms))
        if per_edge_weight:
            width = self._weight_width(p)
            start = f"b.out_w + (long long)edge * {self.problem.weight_numel} + {path.weight_offset} + u"
            self.put(f"if (active) store<{width}>({start}, sum_w{p});")
        self.depth -= 1
        self.put("}")

    def _pack_loads(self, p: int, body: PathBody, loaded: set[int]) -> list[str]:
        width, slots = self.kernel.widest, self._value_slots()
        packs = sorted({slots[name] // width for name in body.reads if name in slots} - loaded)
        loaded.update(packs)
        indent = "    " * self.depth
        return [
            f"{indent}const Pack<{width}> pack{k} = *reinterpret_cast<const Pack<{width}>*>(staged + {width * k});"
            for k in packs
        ]

    def _edge_values(self, p: int, body: PathBody) -> None:
        slots, width = self._value_slots(), self.kernel.widest
        for name, prefix in self._y_rows():
            for k, value in enumerate(self.kernel.terms[p].values):
                m = f"{prefix}{p}_{k}"
                if m in body.reads and self.kernel.staged:
                    self.put(f"const Real {m} = pack{slots[m] // width}.v[{slots[m] % width}];")
                elif m in body.reads:
                    self.put(f"const Real {m} = {_linear(value, name)};")

    def _channel(self, p: int, body: PathBody) -> None:
        """Bind the body's names to this channel's registers, then its statements."""
        for name in body.reads:
            stem, _, m = name.partition("_")
            if stem.startswith(("w", "tw")):
                place = f"all_{stem}[c]" if self.problem.shared_weights else f"rows[0].{stem}[c]"
            elif stem.startswith("g") and not self.kernel.plain:
                place = f"{stem}[{m}][c]"
            elif stem.startswith(("x", "tx", "g")):
                place = f"rows[0].{stem}[{m}][c]"
            else:
                continue
            self.put(f"const Real {name} = {place};")
        for name in body.accumulates:
            stem, _, m = name.partition("_")
            if stem.startswith("ow"):
                self.put(f"Real& {name} = sum_w{p}[c];")
            elif not stem.startswith("r"):
                self.put(f"Real& {name} = {stem}[{m}][c];")
        self.put(*body.statements)

    def _finish(self) -> None:
        kernel = self.kernel
        if "g" in kernel.live and kernel.owns:
            self._flush_sums("run")
        elif "g" in kernel.live and not kernel.plain:
            self.put("if (destination >= 0) {")
            self.depth += 1
            self._flush_sums("destination")
            self.depth -= 1
            self.put("}")
        if self.problem.shared_weights and "w" in kernel.live:
            for p in self.paths:
                offset = self.problem.paths[p].weight_offset
                self.put(f"if (active) add<{self._weight_width(p)}>(b.out_w + {offset} + u, sum_w{p});")
