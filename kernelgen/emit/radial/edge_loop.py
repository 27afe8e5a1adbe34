"""The loop of a path group over receivers and their edges, and what it keeps in shared memory and in registers.

A block packs its part of the matrix once. A warp then takes receivers, or pieces of their edges: it stages 32 edges at
a time, and steps through them.
"""

from __future__ import annotations

from kernelgen.emit.cuda.edge_operand import EdgeOperand
from kernelgen.emit.cuda.memory_access import Facts
from kernelgen.emit.cuda.path_group import GroupEmitter
from kernelgen.emit.radial.fragments import ChannelRows, EdgeRows
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial import RadialPlan


class RadialWalk(GroupEmitter):
    """The loop of one path group, in which :class:`RadialGroup` has the steps."""

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(Facts(plan.product), number, group)
        self.radial = plan
        self.slices = plan.slices(group)
        self.slice_halves = len(group.paths) * plan.path_halves
        schedule = plan.spec.schedule
        self.lay = EdgeRows() if schedule.rows == "edges" else ChannelRows(schedule.tiles)
        self.by_in2 = plan.spec.schedule.order == "in2"
        if self.by_in2:
            self.paths.sort(key=lambda p: (self.problem.paths[p].in2, self.problem.paths[p].in1, p))
            self.operand = EdgeOperand(self.kernel, self.paths, self.operand.stride)
        self.live = self.kernel.live
        self.forms_weights = "w" in self.kernel.operands
        self.shares_node = plan.shared_components(group) > 0
        self.writes_edges = bool({"y", "w"} & set(self.live))

    def _kept(self) -> list[tuple[str, int]]:
        """Name and components of what a lane keeps for a node: the operand's blocks at its end, and sums."""
        in_registers = "g" in self.kernel.operands and not self.shares_node
        kept = [(f"g{b}", self.problem.out[b].dim) for b in self.group.out if in_registers]
        return kept + [(f"og{b}", self.problem.out[b].dim) for b in self.group.out if "g" in self.live]

    @property
    def _slice_loop(self) -> str:
        """The loop over a block's slices; empty if there is one."""
        count = self.slices * 16 // self.lay.channels
        return f'_Pragma("unroll 1") for (int s = 0; s < {count}; ++s)' if count > 1 else ""

    @property
    def _active(self) -> str:
        """Whether a lane has channels, of a block's slices from ``u`` on."""
        return "true" if self.group.mul % (16 * self.slices) == 0 else "u < MUL"

    def _group(self) -> list[str]:
        self.lines = []
        self.put(
            f"constexpr int MUL = {self.group.mul};",
            f"const int first_channel = part * {16 * self.slices};",
            f"const int u = first_channel + {self.lay.first_channel};",
            f"const bool active = {self._active};",
        )
        self._load_matrix()
        pieces = self.radial.spec.schedule.pieces
        runs = f"{pieces} * num_out" if pieces > 1 else "num_out"
        with self.scope(f"for (long long run = first_run; run < {runs}; run += runs_apart)"):
            self._edges_of_run(pieces)
            self.put(f"Node{self.number} kept = {{}};")
            if self.shares_node:
                self._stage_node()
            elif self.near == "out":
                self.put(*self.memory.load_node("out", "kept.", "node"))
            with self.scope("for (int base = begin; base < end; base += STAGE)"):
                self._stage_edges()
                self._steps()
                self.put("__syncwarp(0xffffffffu);")
            if "g" in self.live:
                self.put(*(self._put_node(block) for block in self.group.out))
        return self.lines

    def _edges_of_run(self, pieces: int) -> None:
        """A receiver and its edges; or, in stages, a piece of them."""
        if pieces == 1:
            self.put("const int* const span = b.spans + 3 * run;")
            self.put("const int node = span[0], begin = span[1], end = span[2];")
            return
        self.put(
            f"const int* const span = b.spans + 3 * (run / {pieces});",
            f"const int share = (span[2] - span[1] + {pieces} * STAGE - 1) / ({pieces} * STAGE) * STAGE;",
            f"const int node = span[0], begin = span[1] + int(run % {pieces}) * share;",
            "const int end = min(span[2], begin + share);",
            "if (begin >= end) continue;",
        )

    def _stage_node(self) -> None:
        """The receiver's cotangents to shared memory, which all lanes have read for the receiver before."""
        row = f"b.g + (long long)node * {self.problem.dim_out}"
        components = self.radial.shared_components(self.group)
        with self.scope(f"for (int s = 0; s < {self.slices}; ++s)"):
            self.put(
                "const int v = first_channel + 2 * team.group + 16 * s;",
                f"Real* const left = stage + s * {16 * components};",
            )
            for block in self.group.out:
                b, place = self.problem.out[block], self._place_of_node(block)
                self.put(f"stage_block<MUL, {b.dim}>({row} + {b.offset}, v, v < MUL, team, left + {place});")

    def _place_of_node(self, block: int) -> int:
        """Where a block of the receiver's cotangents begins in the warp's shared memory."""
        before = self.group.out[: self.group.out.index(block)]
        return self.radial.value_reals(self.group) + 16 * sum(self.problem.out[b].dim for b in before)

    def _steps(self) -> None:
        """All tiles of the staged edges."""
        arguments = "b, team, stage, u, active, matrix_scale, my_edge, my_far, j, count, kept"
        self.put("int j = 0;", *self.lay.steps(f"step_{self.number}<{{}}>({arguments})"))

    def _load_matrix(self) -> None:
        """The block's part of the matrix to shared memory, with one scale."""
        weights = self.problem.weight_numel
        starts = [f"b.tw + {self.problem.paths[p].weight_offset} + first" for p in self.paths]
        here = "const int first = first_channel + 16 * s, inside = min(16, MUL - first);"
        self.put("unsigned largest = 0;")
        with self.scope(f"for (int s = 0; s < {self.slices}; ++s)"):
            self.put(here)
            self.put(*(f"largest = max(largest, largest_of_path({start}, {weights}, inside));" for start in starts))
        self.put(
            "const Scale scale = scale_of(largest_of_block(largest, reinterpret_cast<unsigned*>(slice)));",
            "const Real matrix_scale = scale.back;",
        )
        with self.scope(f"for (int s = 0; s < {self.slices}; ++s)"):
            self.put(here)
            for position, start in enumerate(starts):
                place = f"slice + s * {self.slice_halves} + {position * self.radial.path_halves}"
                self.put(f"pack_path({start}, {weights}, inside, scale.into, {place});")
        self.put("__syncthreads();")

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
        self.put(store, "__syncwarp(0xffffffffu);")

    def _put_node(self, block: int) -> str:
        b = self.problem.out[block]
        start = f"{self.memory.out_row('out', 'node')} + {b.offset}"
        return f"put_sums<{self.memory.owned_how('out', block)}, MUL>({start}, u, active, team, kept.og{block});"
