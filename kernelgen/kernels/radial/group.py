"""The device functions of one path group, and their step of 8 or 16 edges; and their loop over edges.

The arithmetic of a path is that of ``kernelgen.kernels.product.group``, for a lane's two channels of each of its edges.
Behind the last edge lanes repeat it, with edge values of zero, and add zeros to its gradients: a branch would keep
the compiler from interleaving paths. Weights come from ``include/radial.cuh`` right before a path uses them, and
gradients of weights go on to those of hidden features right after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernelgen.arithmetic.couplings import normalized_slots
from kernelgen.kernels.product.channelwise import Group
from kernelgen.kernels.product.group import GroupEmitter
from kernelgen.kernels.product.memory import EdgeOperand, Facts
from kernelgen.kernels.radial.plan import RadialPlan

# How products lie in a warp: what a lane has of them, and the calls of ``include/radial.cuh``.
#
# A lane has two neighbouring channels of its edges: for a value of two edges in each tile of 8, for gradients of two of
# 16 edges. ``i`` is the number of a lane's edge, ``j`` the first edge of the step, ``c`` 0 or 1.


@dataclass(frozen=True)
class ChannelRows:
    """Of a value: rows of products are 16 channels, columns are T tiles of 8 edges."""

    tiles: int
    # Whether hidden features of a step are loaded during the one before, to ``ahead``.
    is_ahead: bool = False
    channels = 16
    edges = "2 * T"
    far = "team.broadcast(my_far, place)"
    place = "j + i / 2 * 8 + 2 * team.quad + i % 2"
    first_channel = "2 * team.group"
    weight = "w[i / 2][i % 2 + 2 * c]"
    hidden = "unsigned hi[T][STEPS][2], lo[T][STEPS][2];"
    weights = "Real w[T][4];"

    def load_hidden(self) -> list[str]:
        """Hidden features of the step's edges, and scales of the lane's edges."""
        load = "load_hidden(b.w + edge * HIDDEN, team, hi[n], lo[n])"
        fetch: list[str] = []
        if self.is_ahead:
            load, fetch = "split_hidden(ahead, hi[n], lo[n])", [self._fetch("min(j + 8, STAGE - 8)")]
        return [
            "UNROLL for (int n = 0; n < T; ++n) {",
            *([] if self.is_ahead else ["    const long long edge = team.broadcast(my_edge, j + 8 * n + team.group);"]),
            f"    const Real back = {load} * matrix_scale;",
            "    UNROLL for (int i = 0; i < 2; ++i)",
            "        scale[2 * n + i] = __shfl_sync(0xffffffffu, back, 8 * team.quad + 4 * i, 32);",
            "}",
            *fetch,
        ]

    @staticmethod
    def _fetch(first: str) -> str:
        """Load to ``ahead`` from the staged edge ``first`` on."""
        edge = f"(long long)team.broadcast(my_edge, {first} + team.group)"
        return f"fetch_hidden(b.w + {edge} * HIDDEN, team, ahead);"

    def form(self, path: int) -> str:
        """Weights of the path whose part of the matrix begins at ``path``."""
        return f"form_weights<T>(here, {path}, hi, lo, w);"

    def steps(self, call: str) -> list[str]:
        """All steps of the staged edges; ``call`` has a place for T."""
        if self.is_ahead:
            return ["Real ahead[STEPS][4];", self._fetch("0"), f"for (; j < count; j += 8) {call.format(1)};"]
        if self.tiles == 1:
            return [f"for (; j < count; j += 8) {call.format(1)};"]
        return [f"for (; j + 8 < count; j += 16) {call.format(2)};", f"if (j < count) {call.format(1)};"]


@dataclass(frozen=True)
class EdgeRows:
    """Of gradients: rows of products are 16 edges, columns 8 channels; four lanes, a quad, have the same edges.

    Gradients of weights of two paths are the left operand of a product, those of four are summed in tensor cores.
    """

    channels = 8
    edges = "2"
    place = "j + team.group + 8 * i"
    edge, far = "team.broadcast(my_edge, {})", "team.broadcast(my_far, place)"
    matrix_scale = "matrix_scale"
    first_channel = "2 * team.quad"
    weight = "w[2 * i + c]"
    hidden = "unsigned hi[2][STEPS][2], lo[2][STEPS][2];"
    weights = "Real w[4];"
    halve = "split_gradients(gradient, gradient_scale"
    scale = "gradient_scale"

    def load_hidden(self) -> list[str]:
        return [
            "UNROLL for (int i = 0; i < 2; ++i) {",
            f"    const long long edge = {self.edge.format(self.place)};",
            f"    scale[i] = load_hidden(b.w + edge * HIDDEN, team, hi[i], lo[i]) * {self.matrix_scale};",
            "}",
        ]

    def form(self, path: int) -> str:
        return f"form_edge_weights(here, {path}, hi, lo, w);"

    def gradient(self, position: int) -> str:
        """The gradient of a lane's weight of a path, by the path's number in its group."""
        return f"gradient[{position % 2}][2 * i + c]"

    def to_hidden(self, position: int, count: int, path_halves: int) -> list[str]:
        """Statements after a path's gradients of weights. count: of the group's paths."""
        lines, is_last, pair = [], position + 1 == count, position // 2 % 2
        if position % 2 == 0 and is_last:
            lines.append("UNROLL for (int k = 0; k < 4; ++k) gradient[1][k] = Real(0);")
        if position % 2 or is_last:
            lines.append(f"{self.halve}, gradient_hi[{pair}], gradient_lo[{pair}]);")
        if position % 4 == 3 or is_last:
            how, first = f"{pair + 1}, {'true' if position % 2 else 'false'}", position // 4 * 4 * path_halves
            lines.append(f"add_to_hidden<{how}>(here, {first}, gradient_hi, gradient_lo, {self.scale}, of_h);")
        return lines

    def steps(self, call: str) -> list[str]:
        return [f"for (; j < count; j += 16) {call.format(1)};"]


@dataclass(frozen=True)
class ScaledEdgeRows(EdgeRows):
    """Of gradients with coupled cotangents: gradients of weights are small enough for halves as they are."""

    halve = "halve_gradients(gradient"
    scale = "hidden_scale"


# The loop of a path group over receivers and their edges, and what it keeps in shared memory and in registers.
#
# A block packs its part of the matrix once. Its warps then take shares of edges with equal work, receiver by receiver:
# a warp stages 32 edges at a time, and steps through them.

# After how many paths lanes load an edge's values again, and before which products of later weights do not begin.
ANEW_AFTER = {"four": 4, "reloaded": 1}


class RadialGroup(GroupEmitter):
    """The functions of one path group: its loop, and a step of it."""

    # Functions that leave a path's part of the matrix in shared memory, and what follows the last of them.
    packs, fetches, leaves = "pack_path", "fetch_path", "leave_path"
    shows_matrix: tuple[str, ...] = ("__syncthreads();",)
    # What a receiver adds to the work of its edges, in edges: half a step of none, on average, and what is done once.
    of_receiver = 12
    # What a group has besides, before its loop.
    prelude: tuple[str, ...] = ()

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(Facts(plan.product), number, group)
        self.radial = plan
        self.slices, self.channels = plan.slices(group), plan.channels
        self.slice_halves = len(group.paths) * plan.path_halves
        schedule = plan.spec.schedule
        self.lay = EdgeRows() if plan.spec.is_gradient else ChannelRows(schedule.tiles, schedule.ahead == "hidden")
        self.by_in2 = plan.spec.schedule.order == "in2"
        if self.by_in2:
            self.paths.sort(key=lambda p: (self.problem.paths[p].in2, self.problem.paths[p].in1, p))
            self.operand = EdgeOperand(self.kernel, self.paths, self.operand.stride)
        self.factors = dict.fromkeys(self.paths, 1.0)
        if not plan.spec.is_gradient:
            self.operand = NormalizedOperand(self.kernel, self.paths, plan.value_stride(group))
            self.factors = self.operand.factors
        self.live = self.kernel.live
        self.forms_weights = "w" in self.kernel.operands
        self.has_cotangents = "g" in self.kernel.operands
        self.writes_edges = self.keeps_edges = bool({"y", "w"} & set(self.live))

    def _kept(self) -> list[tuple[str, int]]:
        """Name and components of the sums that a lane keeps for a node."""
        return [(f"og{b}", self.problem.out[b].dim) for b in self.group.out if "g" in self.live]

    @property
    def _slice_loop(self) -> str:
        """The loop over a block's slices; empty if there is one."""
        count = self.slices * self.channels // self.lay.channels
        return f'_Pragma("unroll 1") for (int s = 0; s < {count}; ++s)' if count > 1 else ""

    @property
    def _active(self) -> str:
        """Whether a lane has channels, of a block's slices from ``u`` on."""
        return "true" if self.group.mul % (self.channels * self.slices) == 0 else "u < MUL"

    def _begin_group(self) -> None:
        """The group's channels, and loads of the matrix."""
        self.lines = []
        self.put(
            f"constexpr int MUL = {self.group.mul};",
            f"const int first_channel = part * {self.channels * self.slices};",
            f"const int u = first_channel + {self.lay.first_channel};",
            f"const bool active = {self._active};",
            *self.prelude,
        )
        if self.radial.loads_matrix_at_once:
            self._fetch_paths(range(self.slices * len(self.paths)))

    def _group(self) -> list[str]:
        self._begin_group()
        if self.radial.stores_rows:  # while the matrix is on its way
            self._zero_rows_without_edges()
        self.put("const int run_of_first = run_of(team, b.spans, num_out, first_edge);")
        self._show_matrix()
        with self.scope("for (int run = run_of_first; run < num_out; ++run)"):
            # A receiver and those of its edges that are in the warp's share; all lanes have the same: compilers see it.
            self.put(
                "const int* const span = b.spans + 3 * run;",
                "const int node = team.broadcast(span[0], 0);",
                "const int begin = team.broadcast(max(span[1], first_edge), 0);",
                "const int end = team.broadcast(min(span[2], end_edge), 0);",
                "if (begin >= end_edge) break;",
                "if (begin >= end) continue;",
            )
            self.put(f"Node{self.number} kept = {{}};")
            if self.has_cotangents:
                self._stage_node()
            with self.scope("for (int base = begin; base < end; base += STAGE)"):
                self._stage_edges()
                self._steps()
                self.put("__syncwarp(0xffffffffu);")
            if self.radial.stores_rows:
                self._put_row()
            elif "g" in self.live:
                for block in self.group.out:
                    self.put(f"put_sums<MUL>({self._start_of(block)}, u, active, team, kept.og{block});")
        return self.lines

    def _stage_node(self) -> None:
        """The receiver's cotangents to shared memory, which all lanes have read for the receiver before.

        ``node_bound`` is what gradients of weights are bounded by, apart from x and the edge's values.
        """
        row = f"b.g + (long long)node * {self.problem.dim_out}"
        components = self.radial.shared_components(self.group)
        self.put("unsigned largest = 0;")
        with self.scope(f"for (int s = 0; s < {self.slices}; ++s)"):
            self.put(
                "const int v = first_channel + 2 * team.group + 16 * s;",
                f"Real* const left = stage + s * {16 * components};",
            )
            for block in self.group.out:
                b, place = self.problem.out[block], self._place_of_node(block)
                staged = f"stage_block<MUL, {b.dim}>({row} + {b.offset}, v, v < MUL, team, left + {place})"
                self.put(f"largest = max(largest, {staged});")
        if "w" in self.live:
            # A bound is e for magnitudes below 2^(e - 126): those of a product of three and a number below 2^reach.
            bound = "bound_of(__reduce_max_sync(0xffffffffu, largest))"
            self.put(f"const int node_bound = {bound} - {2 * 126 - self._reach()};")

    def _reach(self) -> int:
        """Binary digits of the sum over a path's terms of magnitudes by which they scale staged values."""
        most = 0.0
        for p in self.paths:
            scales = [abs(self.operand.slots[p, k][1]) for k in range(len(self.kernel.terms[p].values))]
            most = max(most, sum(scales[entry.value] for entry in self.kernel.terms[p].entries))
        return math.frexp(most)[1]

    def _place_of_node(self, block: int) -> int:
        """Where a block of the receiver's cotangents begins in the warp's shared memory."""
        before = self.group.out[: self.group.out.index(block)]
        return self.radial.value_reals(self.group) + 16 * sum(self.problem.out[b].dim for b in before)

    def _given(self) -> str:
        """Further arguments of a step."""
        return ", my_bound" if "w" in self.live else ", ahead" * (self.radial.spec.schedule.ahead == "hidden")

    def _steps(self) -> None:
        """All tiles of the staged edges."""
        arguments = f"b, team, stage, u, active, matrix_scale, my_edge, my_far{self._given()}, j, count, kept"
        self.put("int j = 0;", *self.lay.steps(f"step_{self.number}<{{}}>({arguments})"))

    def _starts_of_paths(self) -> list[str]:
        """Where the paths' columns of the matrix begin, at channel ``first``."""
        return [f"b.tw + {self.problem.paths[p].weight_offset} + first" for p in self.paths]

    def _first_of(self, s: int | str) -> str:
        """A slice's first channel, and how many it has."""
        channels = self.channels
        return f"const int first = first_channel + {channels} * {s}, inside = min({channels}, MUL - first);"

    def _factor(self, position: int) -> str:
        """What a path's part of the matrix is multiplied by."""
        return f"Real({self.factors[self.paths[position]]!r})"

    def _fetch_paths(self, places: range) -> None:
        """Loads of some paths' parts; a place is the number of a slice's path."""
        self.put(f"Real held[{len(places)}][PAIRS][2];")
        starts = self._starts_of_paths()
        for s in range(self.slices):
            with self.scope(""):
                self.put(self._first_of(s))
                for position, start in enumerate(starts):
                    if (place := s * len(starts) + position) in places:
                        held = f"held[{place - places.start}]"
                        self.put(f"{self.fetches}({start}, {self.problem.weight_numel}, inside, {held});")

    def _take_factors(self, places: range) -> None:
        for k, place in enumerate(places):
            self.put(f"largest = max(largest, take_factor(held[{k}], {self._factor(place % len(self.paths))}));")

    def _leave_paths(self, places: range) -> None:
        for k, place in enumerate(places):
            self.put(f"{self.leaves}(held[{k}], scale.into, slice + {place * self.radial.path_halves});")

    def _show_matrix(self) -> None:
        """The block's part of the matrix to shared memory, with one scale."""
        self.put("unsigned largest = 0;")
        if self.radial.loads_matrix_at_once:
            places = range(self.slices * len(self.paths))
            self._take_factors(places)
            self._scale_matrix()
            self._leave_paths(places)
        else:
            self._load_matrix()
        self.put(*self.shows_matrix)

    def _scale_matrix(self) -> None:
        self.put(
            "const Scale scale = scale_of(largest_of_block(largest, reinterpret_cast<unsigned*>(slice)));",
            "const Real matrix_scale = scale.back;",
        )

    def _load_matrix(self) -> None:
        """In two passes over memory: nothing of it has been fetched."""
        weights, starts = self.problem.weight_numel, self._starts_of_paths()
        here = self._first_of("s")
        with self.scope(f"for (int s = 0; s < {self.slices}; ++s)"):
            self.put(here)
            for position, start in enumerate(starts):
                found = f"largest_of_path({start}, {weights}, inside, {self._factor(position)})"
                self.put(f"largest = max(largest, {found});")
        self._scale_matrix()
        with self.scope(f"for (int s = 0; s < {self.slices}; ++s)"):
            self.put(here)
            for position, start in enumerate(starts):
                place = f"slice + s * {self.slice_halves} + {position * self.radial.path_halves}"
                self.put(f"{self.packs}({start}, {weights}, inside, {self._factor(position)}, scale.into, {place});")

    def _stage_edges(self) -> None:
        """One edge a lane: its indices, and its values in shared memory; zeros beyond the last."""
        self.put(
            "const int count = min(STAGE, end - base), last = base + min(team.lane, count - 1);",
            "const int my_edge = b.perm ? b.perm[last] : last;",
            "const int my_far = int(b.sender[my_edge]);",
        )
        *lines, store = self.operand.stage()
        self.put(*lines)
        self.put(f"if (team.lane >= count) UNROLL for (int k = 0; k < {self.operand.stride}; ++k) values[k] = Real(0);")
        if "w" in self.live:
            self.put(f"const int my_bound = node_bound + bound_of(largest_of<{self.operand.stride}>(values));")
        self.put(store, "__syncwarp(0xffffffffu);")

    def _start_of(self, block: int) -> str:
        """Where a block of the receiver's row begins."""
        return f"{self.memory.out_row('out', 'node')} + {self.problem.out[block].offset}"

    # Whether others too have sums of a receiver's row.
    is_cut = "span[1] < first_edge || span[2] > end_edge"

    def _put_row(self) -> None:
        """Store the receiver's sums; add them if other shares have edges of it, and this is not the first of them."""
        self.put(
            f"const bool is_cut = {self.is_cut};",
            "const bool adds = is_cut && !is_first_of_row(team, marks + node);",
        )
        for block in self.group.out:
            self.put(f"put_row<MUL>(adds, {self._start_of(block)}, u, active, team, kept.og{block});")
        self.put("if (is_cut && !adds) end_row(team, marks + node);")

    def _zero_rows_without_edges(self) -> None:
        """Zeros for all channels of the part; a share has as much of the runs as of the edges."""
        with self.scope("for (int at = first_run; at < end_run; at += 32)"):
            self.put("const int mine = node_without_edges(b.spans, end_run, at + team.lane);")
            with self.scope(
                "for (unsigned left = __ballot_sync(0xffffffffu, mine >= 0); left; left &= left - 1)",
            ):
                self.put("const int node = team.broadcast(mine, __ffs(left) - 1);")
                for block in self.group.out:
                    dim = self.problem.out[block].dim
                    self.put(f"put_zeros<MUL, {dim}>({self._start_of(block)}, u, active, team);")

    # ---- the functions ---------------------------------------------------------------------------------------------

    @property
    def cost(self) -> int:
        """The work of an edge, measured in instructions: those of a path are about its statements and its products.

        Beside groups with coupled cotangents, that of a part of an edge.
        """
        of_slice = sum(4 * len(self.kernel.bodies[p].statements) + 12 * self.radial.spec.steps for p in self.paths)
        return 2 * self.slices * of_slice + 650 if self.radial.spec.schedule.coupled else of_slice

    def text(self) -> str:
        first = "first_" if self._slice_loop else ""
        fields, number = [f"    Real {field};" for field in self.memory.row_fields()], self.number
        rows = ",\n                    const int first_run, const int end_run, unsigned* const marks"
        return "\n".join(
            [
                f"// What group {number} has of an edge, and of a node.",
                *(f"struct Row{number} {{", *fields, "};"),
                *(f"struct Node{number} {{", *(f"    Real {name}[{dim}][C];" for name, dim in self._kept()), "};"),
                "",
                f"// Group {number}: paths {', '.join(map(str, self.paths))}; a step of the staged edges from j on.",
                "template <int T>",
                f"DEVICE void step_{number}(const Buffers& b, const Warp& team, const Real* const stage,",
                f"                   const int {first}u, const bool is_active{self._of_block},",
                f"                   {self._of_staged}, const int j{self._taken_count},",
                f"                   Node{number}& node)",
                *("{", *self._step(), "}", ""),
                f"DEVICE void group_{number}(const Buffers& b, const Warp& team, const int part, const int first_edge,",
                "                    const int end_edge, const int num_out, unsigned short* const slice,",
                f"                    Real* const stage{rows * self.radial.stores_rows})",
                *("{", *self._group(), "}", ""),
            ]
        )

    # Parameters of a step: what is of the block, and of the staged edges.
    _of_block, _taken_count = ", const Real matrix_scale", ", const int count"

    @property
    def _of_staged(self) -> str:
        return f"const int my_edge, const int my_far{self._taken()}"

    def _taken(self) -> str:
        """Further parameters of a step."""
        ahead = ", Real (&ahead)[STEPS][4]" * (self.radial.spec.schedule.ahead == "hidden")
        return ", const int my_bound" if "w" in self.live else ahead

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _step(self) -> list[str]:
        self.lines = []
        self.put(f"constexpr int MUL = {self.group.mul};")
        self.put(*(f"Real (&{name})[{dim}][C] = node.{name};" for name, dim in self._kept()))
        self.put(f"constexpr int EDGES = {self.lay.edges};  // of a lane")
        self._take_edges()
        self._declare_sums()
        if "w" in self.live:
            self.put("Real of_h[2][STEPS][4] = {};")
        self._before_slices()
        with self.scope(self._slice_loop):
            self._start_slice()
            if "y" in self.live:
                self.put(f"Real of_y[EDGES][{4 * self._quarters}] = {{}};")
            for position, p in enumerate(self.paths):
                self._path_of_slice(position, p)
            self._end_slice()
        self._put_edges()
        return self.lines

    def _take_edges(self) -> None:
        """What a step has of its edges."""
        self._take_hidden()
        self._find_edges()

    def _take_hidden(self) -> None:
        if self.forms_weights:
            self.put(self.lay.hidden, "Real scale[EDGES];", *self.lay.load_hidden())

    def _declare_sums(self) -> None:
        """Sums of the edges' attributes over slices."""
        if "y" in self.live:
            self.put(f"Real y_sums[EDGES][{self._quarters}] = {{}};")

    @property
    def _quarters(self) -> int:
        """Elements of a row of gradients of y that a lane of a quad sums; every fourth one."""
        return -(-self.problem.dim_in2 // 4)

    def _find_edges(self) -> None:
        """The lane's edges and their senders; with one slice also their features, which are in flight soonest here."""
        self.put(f"int fars[EDGES]{', edges[EDGES]' * self.keeps_edges}{self._of_edges()};")
        if not self._slice_loop:
            self.put(f"Row{self.number} rows[EDGES];")
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self.put(f"const int place = {self.lay.place};")
            if self.keeps_edges:
                self.put("edges[i] = team.broadcast(my_edge, place);")
            self.put(*self._find_values())
            self.put(f"fars[i] = {self.lay.far};")
            if not self._slice_loop:
                self._load_features()

    def _of_edges(self) -> str:
        """What a step has of the lane's edges besides their numbers."""
        return ", bound[EDGES]" if "w" in self.live else ""

    def _find_values(self) -> list[str]:
        """Its values for edge ``i`` at ``place``."""
        return ["bound[i] = team.broadcast(my_bound, place);"] if "w" in self.live else []

    def _load_features(self, far: str = "fars[i]") -> None:
        self.put("const bool active = is_active;", f"Row{self.number}& row = rows[i];")
        self.put(*self.memory.load_node("in1", "row.", far))
        for block in self.group.in1 if self._scales_features else ():
            every = f"UNROLL for (int m = 0; m < {self.problem.in1[block].dim}; ++m)"
            self.put(f"{every} UNROLL for (int c = 0; c < C; ++c) row.x{block}[m][c] *= scale[i];")

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
            )
            self._load_slice()
        else:
            self.put("const Warp& here = team;")
        if self.has_cotangents:
            place = f" + s / {per} * {of_slice} + s % {per} * {self.lay.channels}" if self._slice_loop else ""
            self.put(f"const Real* const cotangents = stage + {self.lay.first_channel}{place};")
        self._scale_slice()

    def _before_slices(self) -> None:
        """What the first slice finds."""

    def _end_slice(self) -> None:
        """What a slice leaves for the next one."""

    def _load_slice(self) -> None:
        """Features of a slice."""
        self.put(f"Row{self.number} rows[EDGES];")
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self._load_features()

    def _scale_slice(self) -> None:
        """Scales of gradients of weights, by the features of the slice."""
        if "w" in self.live:
            self.put("Scale gradient_scale[EDGES];", *self._gradients())
            self._find_scales("bound[i]")

    def _gradients(self) -> list[str]:
        """Gradients of weights that wait for others."""
        return ["Real gradient[2][4];", "unsigned gradient_hi[2][4], gradient_lo[2][4];"]

    def _find_scales(self, bound: str, name: str = "gradient_scale") -> None:
        """For each edge the scale that brings products of a feature and what has the bound below 2^15."""
        largest = "0u"
        for block in self.group.in1:
            largest = f"max({largest}, largest_of(rows[i].x{block}))"
        self.put(f"UNROLL for (int i = 0; i < EDGES; ++i) {name}[i] = scale_of_quad({bound}, {largest});")

    def _path_of_slice(self, position: int, p: int) -> None:
        """A path's gradients, and those of x and y that it is the last to add to."""
        block, blocks = self.problem.paths[p].in1, [self.problem.paths[q].in1 for q in self.paths]
        if "x" in self.live and block not in blocks[:position]:
            self.put(f"Real of_x{block}[EDGES][{self.problem.in1[block].dim}][C] = {{}};")
        self._path_of_tile(position, p)
        if "x" in self.live and block not in blocks[position + 1 :]:
            self._put_features(block)
        if "y" in self.live:
            self._sum_attributes(position)

    def _path_of_tile(self, position: int, p: int) -> None:
        """Weights of a path, its arithmetic for each edge of the lane, and what its gradients of weights give."""
        block = self.problem.paths[p].in1
        dim = self.problem.in1[block].dim
        # Whether nothing of the paths before stays in registers, so that the compiler has room.
        every = ANEW_AFTER.get(self.radial.spec.schedule.edge_values)
        with self.scope(""):
            if every is not None and position % every == 0:
                self.put("__syncwarp(0xffffffffu);  // the compiler keeps no value from before")
            if self.forms_weights:
                self._form_weights(position)
            if self.has_cotangents:
                out = self.problem.paths[p].out
                self.put(f"Real g{out}[{self.problem.out[out].dim}][C];")
                self.put(f"take_block(cotangents + {self._place_of_node(out)}, g{out});")
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                self.put(f"Row{self.number}& row = rows[i];")
                if self.forms_weights:
                    self.put(f"UNROLL for (int c = 0; c < C; ++c) row.w{p}[c] = {self._weight};")
                stride = self.operand.stride
                self.put(f"const Real* const staged = stage + ({self.lay.place}) * {stride};")
                if "y" in self.live:
                    self.put(f"Real (&oy)[{4 * self._quarters}] = of_y[i];")
                if "x" in self.live:
                    self.put(f"Real (&ox{block})[{dim}][C] = of_x{block}[i];")
                self.operand.begin()  # no value is loaded yet in this scope
                self._path(p)
            self._give_hidden(position)

    def _form_weights(self, position: int) -> None:
        self.put(self.lay.weights, self.lay.form(position * self.radial.path_halves))

    @property
    def _weight(self) -> str:
        """Weight ``c`` of edge ``i``."""
        return self.lay.weight if self._scales_features else f"{self.lay.weight} * scale[i]"

    @property
    def _scales_features(self) -> bool:
        """Whether features take the scale of a value's weights: they are fewer."""
        components = sum(self.problem.in1[block].dim for block in self.group.in1)
        return not self.radial.spec.is_gradient and components < len(self.paths)

    def _give_hidden(self, position: int) -> None:
        """What a path's gradients of weights give for hidden features, if it is the last of several."""
        if "w" in self.live:
            assert isinstance(self.lay, EdgeRows)
            self.put(*self.lay.to_hidden(position, len(self.paths), self.radial.path_halves))

    def _put_weight_gradient(self, p: int) -> None:
        assert isinstance(self.lay, EdgeRows)
        gradient = self.lay.gradient(self.paths.index(p))
        self.put(f"UNROLL for (int c = 0; c < C; ++c) {gradient} = sum_w{p}[c];")

    def _put_features(self, block: int) -> None:
        """Add the gradients of a block of the edges' features."""
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            self.put(
                "const bool active = is_active;",
                self.memory.put_block("Add", "in1", block, f"of_x{block}[i]", "fars[i]"),
            )

    def _sum_attributes(self, position: int) -> None:
        """Sum gradients of the edges' attributes over the channels of a quad, four that no later path adds to."""
        of_block = {self.problem.paths[q].in2: k for k, q in enumerate(self.paths)}
        last = [of_block.get(b, -1) for b, block in enumerate(self.problem.in2) for _ in range(block.mul * block.dim)]
        for quarter in range(self._quarters):
            if max(last[4 * quarter : 4 * quarter + 4]) == position:
                add = f"y_sums[i][{quarter}] += sum_to_quad(team, of_y[i] + {4 * quarter});"
                self.put(f"UNROLL for (int i = 0; i < EDGES; ++i) {add}")

    def _put_edges(self) -> None:
        """Add the gradients of the edges' attributes and hidden features."""
        if not self.writes_edges:
            return
        self._find_edges_again()
        with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
            if "y" in self.live:
                self._put_attributes()
            if "w" in self.live:
                assert isinstance(self.lay, EdgeRows)
                row = "b.out_w + (long long)edges[i] * HIDDEN"
                self.put(f"put_hidden({row}, team, of_h[i], {self.lay.matrix_scale});")

    def _find_edges_again(self) -> None:
        """What a step has not kept of its edges."""

    def _put_attributes(self) -> None:
        """Add the gradients of the attributes of edge ``i``."""
        row = self.problem.dim_in2
        self.put(
            f"Real* const start = b.out_y + (long long)edges[i] * {row} + team.quad;",
            f"UNROLL for (int k = 0; k < {self._quarters}; ++k) {{",
            f"    const Real sum[1] = {{{self.lay.place} < count ? y_sums[i][k] : Real(0)}};",
            f"    {'' if row % 4 == 0 else f'if (4 * k + team.quad < {row}) '}add<1>(start + 4 * k, sum);",
            "}",
        )


# Edge values of a value's kernel: paths have a factor each, which their part of the matrix takes; lanes scale none.


class NormalizedOperand(EdgeOperand):
    """Edge values of one group. ``factors``: by path, what its staged values are to be multiplied by."""

    def __init__(self, kernel: Facts, paths: list[int], stride: int) -> None:
        super().__init__(kernel, paths, stride)
        self.staged_values, slots, self.factors = normalized_slots([kernel.terms[p] for p in paths])
        self.slots = {name: (slot, 1.0) for name, slot in slots.items()}
