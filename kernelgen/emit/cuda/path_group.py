"""The device function of one path group as C++ text: its registers, and the computation for an edge.

A lane keeps the sums of its channels in registers: for the near side (the nodes that a run belongs to) from edge to
edge, for the far side during one edge. A row struct holds what is loaded for an edge, so that rows can be prefetched.
Loads and stores are in ``kernelgen.emit.cuda.memory_access``, the loop over edges in ``kernelgen.emit.cuda.edge_loop``.
"""

from __future__ import annotations

import itertools

from kernelgen.emit.cuda.edge_loop import EdgeWalk
from kernelgen.emit.cuda.memory_access import NODE_BUFFERS
from kernelgen.plan.channelwise import exchange_elements
from kernelgen.terms.path_statements import PathBody


class GroupEmitter(EdgeWalk):
    """The device function of one path group."""

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
        stage = ", Real* const stage" * bool(exchange_elements(self.plan))
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
        self.put("UNROLL for (int c = 0; c < C; ++c) {")
        self.depth += 1
        self._channel(p, body)
        self.depth -= 1
        self.put("}")
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
