"""The device functions of one path group, and their step of 8 or 16 edges; the loop is in ``edge_loop``.

The arithmetic of a path is that of ``kernelgen.emit.cuda.path_group``, for a lane's two channels of each of its edges.
Weights come from ``include/radial.cuh`` right before a path uses them, and gradients of weights go on to those of
hidden features right after; ``fragments`` has these calls.
"""

from __future__ import annotations

from kernelgen.emit.radial.edge_loop import RadialWalk
from kernelgen.problem.irreps import Block


class RadialGroup(RadialWalk):
    """The functions of one path group."""

    @property
    def cost(self) -> int:
        """The work of an edge, measured in instructions: those of a path are about its statements and its products."""
        return sum(4 * len(self.kernel.bodies[p].statements) + 12 * self.radial.spec.steps for p in self.paths)

    def text(self) -> str:
        first = "first_" if self._slice_loop else ""
        fields, number = [f"    Real {field};" for field in self.memory.row_fields()], self.number
        return "\n".join(
            [
                f"// What group {number} has of an edge, and of a node.",
                *(f"struct Row{number} {{", *fields, "};"),
                *(f"struct Node{number} {{", *(f"    Real {name}[{dim}][C];" for name, dim in self._kept()), "};"),
                "",
                f"// Group {number}: paths {', '.join(map(str, self.paths))}; a step of the staged edges from j on.",
                "template <int T>",
                f"DEVICE void step_{number}(const Buffers& b, const Warp& team, const Real* const stage,",
                f"                   const int {first}u, const bool is_active, const Real matrix_scale,",
                "                   const int my_edge, const int my_far, const int j, const int count,",
                f"                   Node{number}& node)",
                *("{", *self._step(), "}", ""),
                f"DEVICE void group_{number}(const Buffers& b, const Warp& team, const int part, const int first_run,",
                "                    const int runs_apart, const long long num_out, unsigned short* const slice,",
                "                    Real* const stage)",
                *("{", *self._group(), "}", ""),
            ]
        )

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _step(self) -> list[str]:
        self.lines, problem = [], self.problem
        self.put(f"constexpr int MUL = {self.group.mul};")
        self.put(*(f"Real (&{name})[{dim}][C] = node.{name};" for name, dim in self._kept()))
        self.put(f"constexpr int EDGES = {self.lay.edges};  // of a lane")
        if self.forms_weights:
            self.put(self.lay.declared["hidden"], "Real scale[EDGES];", *self.lay.load_hidden())
        self._find_edges()
        of_y = f"Real of_y[EDGES][{problem.dim_in2}] = {{}};"
        if "y" in self.live and not self.by_in2:
            self.put(of_y)
        if "w" in self.live:
            self.put(self.lay.declared["of_h"])
        with self.scope(self._slice_loop):
            self._start_slice()
            if "y" in self.live and self.by_in2:
                self.put(of_y)
            for position, p in enumerate(self.paths):
                self._path_of_tile(position, p)
        if "y" in self.live and not self.by_in2:
            self._put_attributes(None)
        if "w" in self.live:
            self._put_hidden()
        return self.lines

    def _find_edges(self) -> None:
        """The lane's edges and their senders; with one slice also their features, which are in flight soonest here."""
        self.put(f"int fars[EDGES]{', edges[EDGES]' * self.writes_edges};")
        if not self._slice_loop:
            self.put(f"Row{self.number} rows[EDGES];")
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self.put(f"const int place = {self.lay.place};")
            if self.writes_edges:
                self.put("edges[i] = team.broadcast(my_edge, place);")
            self.put("fars[i] = team.broadcast(my_far, place);")
            if not self._slice_loop:
                self._load_features()

    def _load_features(self) -> None:
        self.put("const bool active = is_active;", f"Row{self.number}& row = rows[i];")
        self.put(*self.memory.load_node("in1", "row.", "fars[i]"))

    def _start_slice(self) -> None:
        """The lane's channels of a slice, its part of the matrix and of the cotangents, and the edges' features."""
        per, of_slice = 16 // self.lay.channels, 16 * self.radial.shared_components(self.group)
        rows = self.lay.channels * self.radial.row_halves
        if self._slice_loop:
            self.put(
                "Warp here = team;",
                f"here.slice += s / {per} * {self.slice_halves} + s % {per} * {rows};",
                f"const int u = first_u + {self.lay.channels} * s;",
                f"const bool is_active = {self._active};",
                f"Row{self.number} rows[EDGES];",
            )
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                self._load_features()
        else:
            self.put("const Warp& here = team;")
        if self.shares_node:
            place = f" + s / {per} * {of_slice} + s % {per} * {self.lay.channels}" if self._slice_loop else ""
            self.put(f"const Real* const cotangents = stage + {self.lay.first_channel}{place};")

    def _path_of_tile(self, position: int, p: int) -> None:
        """Weights of a path, its arithmetic for each edge of the lane, and what its gradients of weights give."""
        block, offset = self.problem.paths[p].in1, position * self.radial.path_halves
        blocks = [self.problem.paths[q].in1 for q in self.paths]
        dim = self.problem.in1[block].dim
        if "x" in self.live and block not in blocks[:position]:
            self.put(f"Real of_x{block}[EDGES][{dim}][C] = {{}};")
        with self.scope(""):
            if self.radial.spec.schedule.edge_values == "reloaded":
                self.put("__syncwarp(0xffffffffu);  // the compiler keeps no value from before")
            if self.forms_weights:
                self.put(self.lay.declared["w"], self.lay.form(offset))
            if "w" in self.live:
                self.put(*self.lay.begin_gradient(position))
            if self.shares_node:
                out = self.problem.paths[p].out
                self.put(f"Real g{out}[{self.problem.out[out].dim}][C];")
                self.put(f"take_block(cotangents + {self._place_of_node(out)}, g{out});")
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                self.put(f"Row{self.number}& row = rows[i];")
                if self.forms_weights:
                    self.put(f"UNROLL for (int c = 0; c < C; ++c) row.w{p}[c] = {self.lay.weight} * scale[i];")
                stride = self.operand.stride
                self.put(f"const Real* const staged = stage + ({self.lay.place}) * {stride};")
                if "y" in self.live:
                    self.put(f"Real (&oy)[{self.problem.dim_in2}] = of_y[i];")
                if "x" in self.live:
                    self.put(f"Real (&ox{block})[{dim}][C] = of_x{block}[i];")
                self.operand.begin()  # no value is loaded yet in this scope
                self._path(p)
            if "w" in self.live:
                self.put(*self.lay.to_hidden(position, len(self.paths), self.radial.path_halves))
        if "x" in self.live and block not in blocks[position + 1 :]:
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                self.put(
                    f"const bool active = is_active && {self.lay.place} < count;",
                    self.memory.put_block("Add", "in1", block, f"of_x{block}[i]", "fars[i]"),
                )
        of_edges = [self.problem.paths[q].in2 for q in self.paths]
        if "y" in self.live and self.by_in2 and of_edges[position] not in of_edges[position + 1 :]:
            self._put_attributes(self.problem.in2[of_edges[position]])

    def _put_weight_gradient(self, p: int) -> None:
        gradient = self.lay.gradient(self.paths.index(p))
        self.put(f"UNROLL for (int c = 0; c < C; ++c) {gradient} = sum_w{p}[c];")

    def _put_attributes(self, block: Block | None) -> None:
        """Add the gradients of a block of the edges' attributes; None: of all."""
        row = self.problem.dim_in2
        dim, offset = (row, 0) if block is None else (block.dim, block.offset)
        lanes = self.lay.lanes
        width = self.kernel.width(row, offset, dim // lanes) if dim % lanes == 0 else 1
        how = f"Add, {self.lay.apart}, {lanes}, {width}"
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self.put(
                f"const bool is_there = {self.lay.place} < count;",
                f"Real sums[{dim}];",
                f"UNROLL for (int m = 0; m < {dim}; ++m) sums[m] = of_y[i][{offset} + m];",
                f"Real* const start = b.out_y + (long long)edges[i] * {row} + {offset};",
                f"sum_over_channels<{how}>(team, sums, is_there, start);",
            )

    def _put_hidden(self) -> None:
        """Add the gradients of hidden features."""
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self.put(
                f"if ({self.lay.place} < count)",
                "    " + self.lay.put_hidden("b.out_w + (long long)edges[i] * HIDDEN"),
            )
