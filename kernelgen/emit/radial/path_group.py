"""The device functions of one path group: a step of 8 or 16 edges, and the loop over a node's edges.

The arithmetic of a path is that of ``kernelgen.emit.cuda.path_group``, for a lane's two channels of each of its edges.
Weights come from :func:`form_weights` of ``include/radial.cuh`` right before a path uses them, and gradients of weights
go on to :func:`add_to_hidden` right after.
"""

from __future__ import annotations

from kernelgen.emit.cuda.memory_access import Facts
from kernelgen.emit.cuda.path_group import GroupEmitter
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial import STAGE, RadialPlan


class RadialGroup(GroupEmitter):
    """The functions of one path group."""

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(Facts(plan.product), number, group)
        self.radial = plan
        self.live = self.kernel.live
        self.forms_weights = "w" in self.kernel.operands
        self.writes_edges = bool({"y", "w"} & set(self.live))
        self.slices = plan.slices(group)
        self.joins = self.writes_edges and self.slices > 1

    @property
    def cost(self) -> int:
        """The work of an edge, measured in instructions: those of a path are about its statements and its products."""
        return sum(4 * len(self.kernel.bodies[p].statements) + 12 * self.radial.spec.steps for p in self.paths)

    def text(self) -> str:
        fields, number = [f"    Real {field};" for field in self.memory.row_fields()], self.number
        return "\n".join(
            [
                f"// What group {number} has of an edge, and of a node.",
                *(f"struct Row{number} {{", *fields, "};"),
                *(f"struct Node{number} {{", *(f"    Real {name}[{dim}][C];" for name, dim in self._kept()), "};"),
                "",
                f"// Group {number}: paths {', '.join(map(str, self.paths))}; edges j to j + 8 T - 1 of those staged.",
                "template <int T>",
                f"DEVICE void step_{number}(const Buffers& b, const Warp& team, const Real* const stage, const int u,",
                "                   const bool is_active, const Real matrix_scale, const int my_edge,",
                f"                   const int my_far, const int j, const int count, Node{number}& node,",
                "                   Real* const joint)",
                *("{", *self._step(), "}", ""),
                f"DEVICE void group_{number}(const Buffers& b, Warp team, const int first_tile, const int first_run,",
                "                    const int runs_apart, const long long num_out, unsigned short* const slice,",
                "                    Real* const stage, Real* const joint)",
                *("{", *self._group(), "}", ""),
            ]
        )

    def _kept(self) -> list[tuple[str, int]]:
        """Name and components of what a lane keeps for a node: the operand's blocks at its end, and sums."""
        kept = [(f"g{b}", self.problem.out[b].dim) for b in self.group.out if "g" in self.kernel.operands]
        return kept + [(f"og{b}", self.problem.out[b].dim) for b in self.group.out if "g" in self.live]

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _step(self) -> list[str]:
        self.lines, problem = [], self.problem
        self.put(f"constexpr int MUL = {self.group.mul};")
        self.put(*(f"Real (&{name})[{dim}][C] = node.{name};" for name, dim in self._kept()))
        self.put("constexpr int EDGES = 2 * T;  // of a lane")
        if self.forms_weights:
            self._load_hidden()
        self.put(f"Row{self.number} rows[EDGES];", f"int fars[EDGES]{', edges[EDGES]' * self.writes_edges};")
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self.put("const int place = j + i / 2 * 8 + 2 * team.quad + i % 2;")
            self.put("const bool active = is_active;", f"Row{self.number}& row = rows[i];")
            if self.writes_edges:
                self.put("edges[i] = team.broadcast(my_edge, place);")
            self.put("fars[i] = team.broadcast(my_far, place);")
            self.put(*self.memory.load_node("in1", "row.", "fars[i]"))
        if "y" in self.live:
            self.put(f"Real of_y[EDGES][{problem.dim_in2}] = {{}};")
        if "w" in self.live:
            self.put("Real of_h[T][STEPS][4] = {};")
        for position, p in enumerate(self.paths):
            self._path_of_tile(position, p)
        self._put_edges()
        return self.lines

    def _load_hidden(self) -> None:
        self.put("unsigned hi[T][STEPS][2], lo[T][STEPS][2];", "Real scale[EDGES];")
        if self.slices > 1:
            self.put(f"const Real* const staged_hidden = stage + {self.radial.value_reals(self.group)};")
            with self.scope("UNROLL for (int n = 0; n < T; ++n)"):
                row = f"(j + 8 * n + team.group) * {self.radial.row_halves // 2}"
                self.put(f"take_hidden(reinterpret_cast<const unsigned*>(staged_hidden) + {row}, team, hi[n], lo[n]);")
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                place = f"{self._scales - self.radial.value_reals(self.group)} + j + i / 2 * 8 + 2 * team.quad + i % 2"
                self.put(f"scale[i] = staged_hidden[{place}] * matrix_scale;")
            return
        with self.scope("UNROLL for (int n = 0; n < T; ++n)"):
            self.put(
                "const long long edge = team.broadcast(my_edge, j + 8 * n + team.group);",
                "const Real back = load_hidden(b.w + edge * HIDDEN, team, hi[n], lo[n]) * matrix_scale;",
                "UNROLL for (int i = 0; i < 2; ++i)",
                "    scale[2 * n + i] = __shfl_sync(0xffffffffu, back, 8 * team.quad + 4 * i, 32);",
            )

    def _path_of_tile(self, position: int, p: int) -> None:
        """Weights of a path, its arithmetic for each edge of the lane, and what its gradients of weights give."""
        block, offset = self.problem.paths[p].in1, position * self.radial.path_halves
        blocks = [self.problem.paths[q].in1 for q in self.paths]
        opens = "x" in self.live and (position == 0 or blocks[position - 1] != block)
        closes = "x" in self.live and (position + 1 == len(blocks) or blocks[position + 1] != block)
        dim = self.problem.in1[block].dim
        if opens:
            self.put(f"Real of_x{block}[EDGES][{dim}][C] = {{}};")
        with self.scope(""):
            if self.forms_weights:
                self.put("Real w[T][4];", f"form_weights<T>(team, {offset}, hi, lo, w);")
            if "w" in self.live:
                self.put("Real gradient[T][4];")
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                self.put(f"Row{self.number}& row = rows[i];")
                if self.forms_weights:
                    self.put(f"UNROLL for (int c = 0; c < C; ++c) row.w{p}[c] = w[i / 2][i % 2 + 2 * c] * scale[i];")
                stride = self.operand.stride
                self.put(f"const Real* const staged = stage + (j + i / 2 * 8 + 2 * team.quad + i % 2) * {stride};")
                if "y" in self.live:
                    self.put(f"Real (&oy)[{self.problem.dim_in2}] = of_y[i];")
                if "x" in self.live:
                    self.put(f"Real (&ox{block})[{dim}][C] = of_x{block}[i];")
                self.operand.begin()  # no value is loaded yet in this scope
                self._path(p)
            if "w" in self.live:
                self.put(f"add_to_hidden<T>(team, {offset}, gradient, of_h);")
        if closes:
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                self.put(
                    "const bool active = is_active && j + i / 2 * 8 + 2 * team.quad + i % 2 < count;",
                    self.memory.put_block("Add", "in1", block, f"of_x{block}[i]", "fars[i]"),
                )

    def _put_weight_gradient(self, p: int) -> None:
        self.put(f"UNROLL for (int c = 0; c < C; ++c) gradient[i / 2][i % 2 + 2 * c] = sum_w{p}[c];")

    def _put_edges(self) -> None:
        """Add the gradients of an edge's own rows."""
        if not self.writes_edges:
            return
        if self.joins:
            self._join_edges()
            return
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self.put("const bool is_there = j + i / 2 * 8 + 2 * team.quad + i % 2 < count;")
            if "y" in self.live:
                row = f"b.out_y + (long long)edges[i] * {self.problem.dim_in2}"
                self.put(f"sum_over_channels<Add>(team, of_y[i], is_there, {row});")
            if "w" in self.live:
                row = "b.out_w + (long long)edges[i] * HIDDEN"
                self.put(f"if (is_there) put_hidden<Add>({row}, team, i % 2, of_h[i / 2], matrix_scale);")

    def _join_edges(self) -> None:
        """Leave the gradients of edges in shared memory; each warp of the stream adds those of some edges to memory.

        ``joint`` is the half of the buffer that the step before did not use, so one barrier a step is enough.
        """
        row, y = self.radial.joint_row, "y" in self.live
        apart = 8 * self.radial.spec.schedule.tiles * row
        columns = 16 * self.radial.spec.steps if "w" in self.live else 0
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self.put(f"Real* const mine = joint + team.part * {apart} + (i / 2 * 8 + 2 * team.quad + i % 2) * {row};")
            if y:
                self.put(f"sum_over_channels<Store>(team, of_y[i], true, mine + {columns});")
            if "w" in self.live:
                self.put("put_hidden<Store>(mine, team, i % 2, of_h[i / 2], matrix_scale);")
        self.put(f"meet<{self.slices}>(team.stream);")
        with self.scope(f"for (int e = team.part; e < min(8 * T, count - j); e += {self.slices})"):
            self.put(
                "const long long edge = team.broadcast(my_edge, j + e);", f"const Real* const left = joint + e * {row};"
            )
            if "w" in self.live:
                self.put(f"add_parts<{self.slices}, {apart}, HIDDEN>(team, left, b.out_w + edge * HIDDEN);")
            if y:
                dim = self.problem.dim_in2
                self.put(f"add_parts<{self.slices}, {apart}, {dim}>(team, left + {columns}, b.out_y + edge * {dim});")

    # ---- the loop over edges ---------------------------------------------------------------------------------------

    def _group(self) -> list[str]:
        self.lines = []
        self.put(
            f"constexpr int MUL = {self.group.mul};",
            "const int first_channel = (first_tile + team.part) * 16;",
            "const int u = first_channel + 2 * team.group;",
            f"const bool active = {'true' if self.group.mul % (16 * self.slices) == 0 else 'u < MUL'};",
        )
        self._load_matrix()
        with self.scope("for (long long run = first_run; run < num_out; run += runs_apart)"):
            self.put("const int* const span = b.spans + 3 * run;")
            self.put("const int node = span[0], begin = span[1], end = span[2];")
            self.put(f"Node{self.number} kept = {{}};")
            if self.near == "out":
                self.put(*self.memory.load_node("out", "kept.", "node"))
            with self.scope("for (int base = begin; base < end; base += STAGE)"):
                self._stage_edges()
                self._steps()
                self.put(self._meeting)
            if "g" in self.live:
                self.put(*(self._put_node(block) for block in self.group.out))
        return self.lines

    def _steps(self) -> None:
        """All tiles of the staged edges; every step takes the other half of the joint buffer."""
        arguments = "b, team, stage, u, active, matrix_scale, my_edge, my_far, j, count, kept"
        half = self.radial.joint_reals // 2
        joint = f"joint + (turn ^= 1) * {half}" if self.joins else "joint"
        self.put("int j = 0;")
        if self.radial.spec.schedule.tiles == 2:
            self.put(f"for (; j + 8 < count; j += 16) step_{self.number}<2>({arguments}, {joint});")
            self.put(f"if (j < count) step_{self.number}<1>({arguments}, {joint});")
        else:
            self.put(f"for (; j < count; j += 8) step_{self.number}<1>({arguments}, {joint});")

    def _load_matrix(self) -> None:
        """The block's part of the matrix to shared memory, with one scale."""
        weights = self.problem.weight_numel
        starts = [f"b.tw + {self.problem.paths[p].weight_offset} + first" for p in self.paths]
        here = "const int first = (first_tile + s) * 16, inside = min(16, MUL - first);"
        self.put("unsigned largest = 0;")
        with self.scope(f"for (int s = 0; s < {self.slices}; ++s)"):
            self.put(here)
            self.put(*(f"largest = max(largest, largest_of_path({start}, {weights}, inside));" for start in starts))
        self.put(
            "const Scale scale = scale_of(largest_of_block(largest, reinterpret_cast<unsigned*>(slice)));",
            "const Real matrix_scale = scale.back;",
        )
        of_slice = len(self.paths) * self.radial.path_halves
        with self.scope(f"for (int s = 0; s < {self.slices}; ++s)"):
            self.put(here)
            for position, start in enumerate(starts):
                place = f"slice + s * {of_slice} + {position * self.radial.path_halves}"
                self.put(f"pack_path({start}, {weights}, inside, scale.into, {place});")
        self.put("__syncthreads();", f"team.slice = slice + team.part * {of_slice};")
        if self.joins:
            self.put("int turn = 0;  // half of the joint buffer")

    def _stage_edges(self) -> None:
        """One edge a lane: its indices, and its values in shared memory; zeros beyond the last."""
        self.put(
            "const int count = min(STAGE, end - base), last = base + min(team.lane, count - 1);",
            "const int my_edge = b.perm ? b.perm[last] : last;",
            "const int my_far = int(b.sender[my_edge]);",
        )
        with self.scope("if (team.part == 0)" if self.slices > 1 else ""):
            *lines, store = self.operand.stage()
            self.put(*lines)
            self.put(
                f"if (team.lane >= count) UNROLL for (int k = 0; k < {self.operand.stride}; ++k) values[k] = Real(0);"
            )
            self.put(store)
        if self.slices > 1 and self.forms_weights:
            values, row = self.radial.value_reals(self.group), self.radial.row_halves // 2
            with self.scope(f"for (int e = team.part; e < (count + 7) / 8 * 8; e += {self.slices})"):
                self.put(
                    "const Real* const hidden = b.w + (long long)team.broadcast(my_edge, e) * HIDDEN;",
                    f"unsigned* const left = reinterpret_cast<unsigned*>(stage + {values}) + e * {row};",
                    f"leave_hidden(hidden, team, left, stage + {self._scales} + e);",
                )
        self.put(self._meeting)

    @property
    def _meeting(self) -> str:
        """The statement after which all warps that share staged edges see them."""
        return f"meet<{self.slices}>(team.stream);" if self.slices > 1 else "__syncwarp(0xffffffffu);"

    @property
    def _scales(self) -> int:
        """Where the scales of staged hidden features begin."""
        plan = self.radial
        return plan.value_reals(self.group) + STAGE * plan.row_halves // 2 + plan.low_rows

    def _put_node(self, block: int) -> str:
        b = self.problem.out[block]
        start = f"{self.memory.out_row('out', 'node')} + {b.offset}"
        return f"put_sums<{self.memory.owned_how('out', block)}, MUL>({start}, u, active, team, kept.og{block});"
