"""The loop of a path group over receivers and their edges, and what it keeps in shared memory and in registers.

A block packs its part of the matrix once. Its warps then take shares of edges with equal work, receiver by receiver: a
warp stages 32 edges at a time, and steps through them.
"""

from __future__ import annotations

import math

from kernelgen.emit.cuda.edge_operand import EdgeOperand
from kernelgen.emit.cuda.memory_access import Facts
from kernelgen.emit.cuda.path_group import GroupEmitter
from kernelgen.emit.radial.fragments import ChannelRows, EdgeRows
from kernelgen.emit.radial.normalized import NormalizedOperand
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial_convolution import RadialPlan


class RadialWalk(GroupEmitter):
    """The loop of one path group, in which :class:`RadialGroup` has the steps."""

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

    def _group(self) -> list[str]:
        self.lines = []
        self.put(
            f"constexpr int MUL = {self.group.mul};",
            f"const int first_channel = part * {self.channels * self.slices};",
            f"const int u = first_channel + {self.lay.first_channel};",
            f"const bool active = {self._active};",
            *self.prelude,
        )
        at_once = self.radial.loads_matrix_at_once
        if at_once:
            self._fetch_matrix()
        if self.radial.stores_rows:  # while the matrix is on its way
            self._zero_rows_without_edges()
        self.put("const int run_of_first = run_of(team, b.spans, num_out, first_edge);")
        (self._leave_matrix if at_once else self._load_matrix)()
        with self.scope("for (int run = run_of_first; run < num_out; ++run)"):
            self._edges_of_run()
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
                self.put(*(self._put_node(block) for block in self.group.out))
        return self.lines

    def _edges_of_run(self) -> None:
        """A receiver and those of its edges that are in the warp's share. All lanes have the same: compilers see it."""
        self.put(
            "const int* const span = b.spans + 3 * run;",
            "const int node = team.broadcast(span[0], 0);",
            "const int begin = team.broadcast(max(span[1], first_edge), 0);",
            "const int end = team.broadcast(min(span[2], end_edge), 0);",
            "if (begin >= end_edge) break;",
            "if (begin >= end) continue;",
        )

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

    def _fetch_matrix(self) -> None:
        """All loads of the block's part of the matrix."""
        self._fetch_paths(range(self.slices * len(self.paths)))

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

    def _leave_matrix(self) -> None:
        """What was fetched to shared memory, with one scale."""
        places = range(self.slices * len(self.paths))
        self.put("unsigned largest = 0;")
        self._take_factors(places)
        self._scale_matrix()
        self._leave_paths(places)
        self.put(*self.shows_matrix)

    def _scale_matrix(self) -> None:
        self.put(
            "const Scale scale = scale_of(largest_of_block(largest, reinterpret_cast<unsigned*>(slice)));",
            "const Real matrix_scale = scale.back;",
        )

    def _load_matrix(self) -> None:
        """The block's part of the matrix to shared memory, with one scale."""
        weights, starts = self.problem.weight_numel, self._starts_of_paths()
        here = self._first_of("s")
        self.put("unsigned largest = 0;")
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
        self.put(*self.shows_matrix)

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

    def _put_node(self, block: int) -> str:
        return f"put_sums<MUL>({self._start_of(block)}, u, active, team, kept.og{block});"

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
