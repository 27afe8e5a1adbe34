"""The device function of one path group as C++ text: its registers, and the computation for an edge.

A lane keeps the sums of its channels in registers: for the near side (the nodes that a run belongs to) from edge to
edge, for the far side during one edge. A row struct holds what is loaded for an edge, so that rows can be prefetched.
Loads and stores are in ``kernelgen.kernels.product.memory``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from kernelgen.arithmetic.couplings import PathBody
from kernelgen.kernels.product.channelwise import Group, Plan, stage_stride
from kernelgen.kernels.product.memory import NODE_BUFFERS, EdgeOperand, EdgeSums, Facts, GroupMemory
from kernelgen.kernels.spec import BYTES


class GroupEmitter:
    """The device function of one path group: :meth:`_walk` writes the loop over edges, :meth:`_edge` its body."""

    def __init__(self, kernel: Facts, number: int, group: Group) -> None:
        self.kernel, self.number, self.group = kernel, number, group
        self.first_unit = sum(kernel.plan.tiles(before) for before in kernel.plan.groups[:number])
        self.plan, self.problem = kernel.plan, kernel.plan.spec.problem
        self.near, self.owner = self.plan.near, self.plan.owner
        self.lines: list[str] = []
        self.depth = 1
        # Paths of one input block are consecutive, so that its gradient is complete after the last of them.
        self.paths = sorted(group.paths, key=lambda p: (self.problem.paths[p].in1, p))
        self.memory = GroupMemory(kernel, group, self.paths)
        self.operand = EdgeOperand(kernel, self.paths, stage_stride(kernel.plan, group.paths))
        self.y_sums = EdgeSums(kernel.plan)
        self.ring = WeightRing(self.plan, group, self.paths, self.plan.value_elements) if self.plan.ring else None
        self.sums = kernel.plan.sums_elements
        # Statements before the first write to memory.
        self.await_zeros: tuple[str, ...] = ()
        self.not_awaited: tuple[str, ...] = ()
        if kernel.schedule.zeros == "inside":
            self.not_awaited = ("bool awaited = false;",)
            self.await_zeros = ("if (!awaited) await_zeros(b.ready, b.launch);", "awaited = true;")

    def put(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    @contextmanager
    def scope(self, opening: str) -> Iterator[None]:
        self.put(opening + " {")
        self.depth += 1
        yield
        self.depth -= 1
        self.put("}")

    def _walk(self) -> None:
        """The loop over a run of edges: staged indices and edge values, prefetched rows."""
        kernel, prefetch = self.kernel, self.kernel.schedule.prefetch != "none"
        by_destination = not self.owner and not kernel.plain and bool({"g", "tg"} & {*kernel.live, *kernel.operands})
        copies = kernel.schedule.prefetch == "copy"
        self.put(*self.not_awaited)
        if by_destination:
            self.put("int destination = -1;")
        if self.plan.stores_whole_rows:
            self.put(
                "// Whether the row of the first edge is cut, and that of the last one.",
                "bool cut = begin > 0 && is_one_row(b.receiver, b.perm, begin - 1, begin);",
                "const bool goes_on = end < b.num_edges && is_one_row(b.receiver, b.perm, end - 1, end);",
            )
        if self.ring:
            self.put(*self.ring.begin())
        with self.scope("for (int base = begin; base < end; base += STAGE)"):
            self._stage(by_destination)
            if self.ring:
                self.put(*self.ring.fill())
            self.put(f"Row{self.number} row{', next_row' if copies else ''};")
            if prefetch:
                self.put("const int first = team.broadcast(my_edge, 0), first_far = team.broadcast(my_far, 0);")
                self._load_row("next_row." if copies else "row.", "first", "first_far")
            with self.scope("for (int j = 0; j < count; ++j)"):
                self.put("const int edge = team.broadcast(my_edge, j), far = team.broadcast(my_far, j);")
                if prefetch:
                    self.put(
                        "const int next = team.broadcast(my_edge, j + 1), next_far = team.broadcast(my_far, j + 1);"
                    )
                    self.put("const bool more = j + 1 < count;")
                    if copies:  # only this waits for the loads
                        self.put("row = next_row;")
                        with self.scope("if (more)"):
                            self._load_row("next_row.", "next", "next_far")
                else:
                    self._load_row("row.", "edge", "far")
                if by_destination:
                    self._change_destination()
                if self.ring:
                    self.put(*self.ring.wait())
                self.put(*self.await_zeros)
                self._edge()
                if self.ring:
                    self.put(*self.ring.refill())
            if self.plan.joins_y:
                self.put(*self.y_sums.join())
            elif kernel.staged:
                self.put("team.sync();")

    def _stage(self, by_destination: bool) -> None:
        """One edge a lane: its indices, and its edge values."""
        kernel = self.kernel
        self.put("const int count = min(STAGE, end - base);", "// one edge a lane: its indices, and its edge values")
        self.put("int my_edge = 0, my_far = 0;" + (" int my_destination = 0;" if by_destination else ""))
        with self.scope("if (team.lane < count)"):
            self.put("my_edge = base + team.lane;")
            if self.owner or self.plan.spec.permuted or self.plan.stores_whole_rows:
                self.put("if (b.perm) my_edge = b.perm[my_edge];")
            far = "receiver" if self.near == "in1" else "sender"
            self.put("my_far = my_edge;" if kernel.plain else f"my_far = int(b.{far}[my_edge]);")
            if by_destination:
                self.put("my_destination = int(b.receiver[my_edge]);")
            self.put(*self.memory.ask("my_edge", "my_far"))
            if kernel.staged:
                self.put(*self.operand.stage())
        if kernel.staged:
            self.put("team.sync();")

    def _load_row(self, into: str, edge: str, far: str) -> None:
        """Load all that an edge needs from memory except its y row."""
        for side in NODE_BUFFERS:
            if side != self.near:
                self.put(*self.memory.load_node(side, into, far))
        if not (self.problem.shared_weights or self.ring):
            self.put(*self.memory.load_weights(into, edge))

    def _reload(self, p: int) -> None:
        """Load the next edge's data into the registers that path p was the last to read."""
        loads: list[str] = []
        for side, blocks in (("in1", self.group.in1), ("out", self.group.out)):
            for b in blocks if side != self.near else ():
                if p == [q for q in self.paths if getattr(self.problem.paths[q], side) == b][-1]:
                    loads += self.memory.load_node(side, "row.", "next_far", only=b)
        if not (self.problem.shared_weights or self.ring):
            loads += self.memory.load_weights("row.", "next", only=p)
        if loads:
            with self.scope("if (more)"):
                self.put(*loads)

    def _change_destination(self) -> None:
        self.put("const int next_destination = team.broadcast(my_destination, j);")
        with self.scope("if (next_destination != destination)"):
            if "g" in self.kernel.live:
                with self.scope("if (destination >= 0)"):
                    self._put_destination()
                    self.put(*(f"clear(og{b});" for b in self.group.out))
            self.put("destination = next_destination;")
            self.put(*self.memory.load_node("out", "", "destination"))

    def _put_destination(self) -> None:
        """Add the sums to the row of the edges' destination, or store them where all of its edges are in this run."""
        if not self.plan.stores_whole_rows:
            self.put(*self.memory.flush("out", "destination", owned=False))
            return
        with self.scope("if (cut)"):
            self.put("await_zeros(b.ready, b.launch);")
            self.put(*self.memory.flush("out", "destination", owned=False))
        with self.scope("else"):
            self.put(*self.memory.flush("out", "destination", owned=True))
        self.put("cut = false;")

    # ---- the function ----------------------------------------------------------------------------------------------

    def text(self) -> str:
        names = ", ".join(self.problem.in1[b].text for b in self.group.in1)
        self._channels()
        self._declare()
        if self.owner:
            self.put(*self.memory.load_node(self.near, "", "node"))
        self._walk()
        self._finish()
        members = [f"    Real {field};" for field in self.memory.row_fields()] or ["    int nothing;"]
        return "\n".join(
            [
                f"// What group {self.number} loads for an edge.",
                *(f"struct Row{self.number} {{", *members, "};", ""),
                f"// Group {self.number}: paths {', '.join(map(str, self.paths))} of {names}.",
                f"DEVICE void group_{self.number}(const Buffers& b, const Team& team, const int unit, const int node,",
                "                    const int begin, const int end, Real* const stage, Real* const sums)",
                *("{", *self.lines, "}", ""),
                *(self._finish_together() if self.sums else ()),
            ]
        )

    def _channels(self) -> None:
        """Define a lane's channels: C of them, from u on."""
        self.put(
            f"constexpr int MUL = {self.group.mul};",
            f"const int first_channel = (unit - {self.first_unit}) * LANES * C;",
            "const int u = first_channel + team.lane * C;",
            f"const bool active = {'true' if self.group.mul % self.plan.tile == 0 else 'u < MUL'};",
        )

    def _finish_together(self) -> list[str]:
        """The function that adds the sums of the teams of a node."""
        self.lines, schedule = [], self.kernel.schedule
        self.put(*self.not_awaited, *self.await_zeros)
        side = "in1" if self.plan.node_sums == "x" else "out"
        self._channels()
        # Elements from one team's sums to the next one's.
        step = self.sums * schedule.warps_per_edge
        finish = self._finish_by_blocks if schedule.finish == "blocks" else self._finish_unrolled
        finish(side, schedule.teams_per_node, step)
        stage = ", Real* const stage" * bool(self.plan.exchange_elements)
        return [
            f"DEVICE void finish_{self.number}(const Buffers& b, const Team& team, const int unit, const int node,",
            f"                     const int share, const Real* const parts{stage})",
            *("{", *self.lines, "}", ""),
        ]

    def _finish_by_blocks(self, side: str, teams: int, step: int) -> None:
        """Each team adds some of the blocks, with separate code for each."""
        for position, (name, dim, offset) in enumerate(self._node_sums()):
            with self.scope(f"if (share == {position % teams})"):
                self.put(
                    f"Real {name}[{dim}][C];",
                    f"gather<{teams}, {step}>(parts + {offset} * C * LANES + team.lane, {name});",
                    *self.memory.flush(side, "node", owned=True, only=self.memory.blocks(side)[position]),
                )

    def _finish_unrolled(self, side: str, teams: int, step: int) -> None:
        """Each of n teams adds every n-th component of all blocks: equal shares, and all reads before any write."""
        sums = list(zip(self.memory.blocks(side), self._node_sums(), strict=True))
        for how in ("Store", "Add"):
            chosen = [(b, dim, first) for b, (_, dim, first) in sums if self.memory.owned_how(side, b) == how]
            ends = list(itertools.accumulate((dim for _, dim, _ in chosen), initial=0))
            if not chosen:
                continue
            cases = [
                (end, f"(k - {end - dim})", b, first) for end, (b, dim, first) in zip(ends[1:], chosen, strict=True)
            ]
            left = _by_case([(end, f"{first} + {m}") for end, m, _, first in cases])
            place = _by_case([(end, self.memory.place(side, b, m, "v")) for end, m, b, _ in cases])
            mine = f"active && share + i * {teams} < {ends[-1]}"
            with self.scope(f"UNROLL for (int i = 0; i < {-(-ends[-1] // teams)}; ++i)"):
                # A team without a component reads the last one.
                self.put(f"const int k = min(share + i * {teams}, {ends[-1] - 1});")
                self.put(f"const Real* const from = parts + ({left}) * C * LANES + team.lane;")
                with self.scope("UNROLL for (int c = 0; c < C; ++c)"):
                    self.put("const int v = u + c;", "Real sum[1] = {from[c * LANES]};")
                    self.put(f"UNROLL for (int n = 1; n < {teams}; ++n) sum[0] += from[n * {step} + c * LANES];")
                    self.put(f"if ({mine}) {how}::put<1>({self.memory.out_row(side, 'node')} + ({place}), sum);")

    def _node_sums(self) -> list[tuple[str, int, int]]:
        """Name, components and first component of each block of the sums at the run's node."""
        side, stem = ("in1", "ox") if self.plan.node_sums == "x" else ("out", "og")
        dims = [getattr(self.problem, side)[b].dim for b in self.memory.blocks(side)]
        offsets = itertools.accumulate(dims, initial=0)
        return [(f"{stem}{b}", d, o) for b, d, o in zip(self.memory.blocks(side), dims, offsets, strict=False)]

    def _declare(self) -> None:
        """Declare what is kept from edge to edge: rows and sums of the near side, shared weights and their sums."""
        kernel = self.kernel
        if self.near:
            self.put(
                *(f"Real {field} = {{}};" for field in self.memory.node_fields(self.near, NODE_BUFFERS[self.near]))
            )
        if "g" in kernel.live:
            self.put(*(f"Real og{b}[{self.problem.out[b].dim}][C] = {{}};" for b in self.group.out))
        if "x" in kernel.live and self.near == "in1":
            self.put(*(f"Real ox{b}[{self.problem.in1[b].dim}][C] = {{}};" for b in self.group.in1))
        if self.problem.shared_weights:
            for name in ("w", "tw"):
                if name in kernel.operands:
                    self.put(*(f"Real all_{name}{p}[C];" for p in self.paths))
            self.put(*self.memory.load_weights("all_", ""))
            if "w" in kernel.live:
                self.put(*(f"Real sum_w{p}[C] = {{}};" for p in self.paths))

    # ---- one edge --------------------------------------------------------------------------------------------------

    def _edge(self) -> None:
        """The body of the loop, for one edge whose row is loaded."""
        kernel = self.kernel
        self.put(*self.operand.begin())
        if "y" in kernel.live:
            self.put(f"Real oy[{self.problem.dim_in2}] = {{}};")
        far_sums = "g" in kernel.live and self.near != "out"
        if far_sums:
            self.put(*(f"clear(og{b});" for b in self.group.out))
        far_x = "x" in kernel.live and self.near != "in1"
        for position, p in enumerate(self.paths):
            block = self.problem.paths[p].in1
            if far_x and (position == 0 or self.problem.paths[self.paths[position - 1]].in1 != block):
                self.put(f"Real ox{block}[{self.problem.in1[block].dim}][C] = {{}};")
            self._path(p)
            if kernel.schedule.prefetch.startswith(("reload", "ring")):
                self._reload(p)
            last = position + 1 == len(self.paths) or self.problem.paths[self.paths[position + 1]].in1 != block
            if far_x and last:
                sole = kernel.plain and block in self.plan.exclusive_in1
                self.put(self.memory.put_block("Store" if sole else "Add", "in1", block, f"ox{block}", "far"))
        if "y" in kernel.live:
            self.put(*self.y_sums.put())
        if far_sums:
            self.put(*self.memory.flush("out", "far", owned=kernel.plain))

    def _path(self, p: int) -> None:
        kernel, path, body = self.kernel, self.problem.paths[p], self.kernel.bodies[p]
        blocks = self.problem.in1[path.in1], self.problem.in2[path.in2], self.problem.out[path.out]
        self.put(*self.operand.fetch(p, body))
        self.put(
            f"{{  // path {p}: {blocks[0].text} x {blocks[1].text} -> {blocks[2].text}, "
            f"weights {path.weight_offset}..{path.weight_offset + path.mul - 1}"
        )
        self.depth += 1
        if self.ring:
            self.put(*self.ring.load(p))
        self.put(*self.operand.bind(p, body))
        adjoints = [name for name in body.accumulates if name.startswith("r")]
        if adjoints:
            self.put("Real " + ", ".join(f"{name} = 0" for name in adjoints) + ";")
        per_edge_weight = "w" in kernel.live and not self.problem.shared_weights
        if per_edge_weight:
            self.put(f"Real sum_w{p}[C] = {{}};")
        with self.scope("UNROLL for (int c = 0; c < C; ++c)"):
            self._channel(p, body)
        for k, value in enumerate(kernel.terms[p].values):
            if f"r{p}_{k}" in adjoints:
                self.put(*(f"oy[{m}] += Real({c!r}) * r{p}_{k};" for m, c in value.terms))
        if per_edge_weight:
            self._put_weight_gradient(p)
        self.depth -= 1
        self.put("}")

    def _put_weight_gradient(self, p: int) -> None:
        """Store the gradients of an edge's own weights."""
        width = self.memory.weight_width(p)
        start = f"b.out_w + (long long)edge * {self.problem.weight_numel} + {self.problem.paths[p].weight_offset} + u"
        self.put(f"if (active) store<{width}, {self.memory.edge_cache}>({start}, sum_w{p});")

    def _channel(self, p: int, body: PathBody) -> None:
        """Bind the body's names to this channel's registers and write its statements."""
        near = NODE_BUFFERS.get(self.near, ())
        for name in body.reads:
            stem, _, m = name.partition("_")
            buffer = stem.rstrip("0123456789")
            if buffer in ("w", "tw"):
                place = f"{'all_' if self.problem.shared_weights else 'ring_' if self.ring else 'row.'}{stem}[c]"
            elif buffer in ("x", "tx", "g", "tg"):
                place = f"{stem}[{m}][c]" if buffer in near else f"row.{stem}[{m}][c]"
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
        if not self.sums:
            self.put(*self.await_zeros)
        if self.sums:
            self.put(
                *(f"leave(sums + {offset} * C * LANES + team.lane, {name});" for name, _, offset in self._node_sums())
            )
        elif "g" in kernel.live and self.owner == "receiver":
            self.put(*self.memory.flush("out", "node", owned=True))
        elif "g" in kernel.live and self.near == "out":
            with self.scope("if (destination >= 0)"):
                if self.plan.stores_whole_rows:
                    self.put("cut = cut || goes_on;")
                self._put_destination()
        if "x" in kernel.live and self.near == "in1" and not self.sums:
            self.put(*self.memory.flush("in1", "node", owned=True))
        if self.problem.shared_weights and "w" in kernel.live:
            if self.sums:
                self.put(*self.await_zeros)  # a team without edges has not yet waited
            for p in self.paths:
                offset = self.problem.paths[p].weight_offset
                self.put(f"if (active) add<{self.memory.weight_width(p)}>(b.out_w + {offset} + u, sum_w{p});")


def _by_case(cases: list[tuple[int, str]]) -> str:
    """A C++ expression that selects the first case whose end is above ``k``."""
    *others, (_, last) = cases
    return "".join(f"k < {end} ? {text} : " for end, text in others) + last


# A ring buffer of weights in shared memory, as C++ text: asynchronous copies, some edges ahead.
#
# A team copies its paths' weights of an edge in pieces of 16 bytes, one a lane and copy, and later reads them from
# shared memory. So loads of several edges are in flight at a time, and none of them holds a register.


class WeightRing:
    """The ring of one group. ``before``: elements before it in the team's shared memory."""

    def __init__(self, plan: Plan, group: Group, paths: list[int], before: int) -> None:
        self.plan, self.group, self.paths, self.before = plan, group, paths, before
        self.depth, self.row = plan.ring, plan.ring_row(group)
        self.lanes, self.piece = plan.lanes, 16 // BYTES[plan.spec.dtype]

    def begin(self) -> list[str]:
        """Once a group: define the ring and the lane's place within the pieces of one copy."""
        pieces = self.plan.tile // self.piece
        lines = [f"Real* const ring = stage + {self.before};"]
        if pieces < self.lanes:
            lines.append(f"const int ring_path = team.lane / {pieces};")
        return [*lines, f"const int ring_place = team.lane % {min(pieces, self.lanes)} * {self.piece};"]

    def fill(self) -> list[str]:
        """Before the first edge of a stage: start the copies for the first edges."""
        lines = []
        for slot in range(self.depth):
            lines += [f"const int ring_edge{slot} = team.broadcast(my_edge, {slot});", f"if ({slot} < count) {{"]
            lines += [*self._fetch(f"ring_edge{slot}", str(slot)), "}", "end_fetch();"]
        return lines

    def wait(self) -> list[str]:
        """At the start of an edge: wait until its row has arrived for all lanes."""
        return [
            f"await_fetches<{self.depth - 1}>();",
            "team.sync();",
            f"const Real* const fetched = ring + j % {self.depth} * {self.row};",
        ]

    def refill(self) -> list[str]:
        """At the end of an edge: start the copy for the edge that takes its slot."""
        return [
            f"const int later = team.broadcast(my_edge, j + {self.depth});",
            "team.sync();",
            f"if (j + {self.depth} < count) {{",
            *self._fetch("later", f"j % {self.depth}"),
            "}",
            "end_fetch();",
        ]

    def load(self, p: int) -> Iterator[str]:
        """Read the lane's channels of a path's weights."""
        channels = self.plan.tile // self.lanes
        for number, name in enumerate(self.plan.weight_operands):
            place = (number * len(self.paths) + self.paths.index(p)) * self.plan.tile
            yield f"Real ring_{name}{p}[C];"
            yield f"load<{min(channels, self.piece)}>(fetched + {place} + team.lane * C, ring_{name}{p});"

    def _fetch(self, edge: str, slot: str) -> Iterator[str]:
        """Copy the rows of an edge, 16 bytes a lane at a time."""
        problem, tile = self.plan.spec.problem, self.plan.tile
        pieces = tile // self.piece  # pieces of a path
        together, rounds = max(1, self.lanes // pieces), max(1, pieces // self.lanes)
        for number, name in enumerate(self.plan.weight_operands):
            row = f"b.{name} + (long long){edge} * {problem.weight_numel}"
            yield f"    const Real* const from_{name} = {row} + first_channel;"
            for first in range(0, len(self.paths), together):
                chosen = self.paths[first : first + together]
                offsets = [problem.paths[p].weight_offset for p in chosen]
                guard = f"if (ring_path < {len(chosen)}) " if len(chosen) < together else ""
                for turn in range(rounds):
                    step = turn * self.lanes * self.piece
                    place = (number * len(self.paths) + first) * tile + step
                    to = f"ring + {slot} * {self.row} + {place} + team.lane * {self.piece}"
                    yield f"    {guard}fetch16({to}, from_{name} + {_chosen(offsets)} + {step} + ring_place);"


def _chosen(offsets: list[int]) -> str:
    """The weight offset of the lane's path, as a C++ expression; ``offsets``: of the paths that are copied together."""
    steps = {b - a for a, b in zip(offsets, offsets[1:], strict=False)}
    if not steps:
        return str(offsets[0])
    if len(steps) == 1:
        return f"{offsets[0]} + ring_path * {steps.pop()}"
    text = str(offsets[-1])
    for number, offset in reversed(list(enumerate(offsets[:-1]))):
        text = f"ring_path == {number} ? {offset} : {text}"
    return f"({text})"
