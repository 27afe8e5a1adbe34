"""The functions of a path group whose warps multiply four at a time, by ``wgmma``; see ``include/warpgroup.cuh``.

Weights of some paths are formed while lanes multiply those of the paths before, and gradients of weights go to those of
hidden features while lanes go on. All four warps have to come to the same products, so a warp without further edges
goes through a step of none, in which it adds zeros to the rows of its last ones. Groups of products end in the order in
which they begin; what waits for one says how many later ones may still run.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.emit.radial.coupled import CoupledGroup
from kernelgen.emit.radial.fragments import ScaledEdgeRows
from kernelgen.emit.radial.warpgroup_calls import HIDDEN, ProductsInFlight
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial import RadialPlan

# Most paths whose gradients are summed in tensor cores, which truncate, before floats are added.
HIDDEN_CHAIN = 6
# Most components of x whose features of the next slice are loaded before the last path: they take registers.
MOST_AHEAD = 5


@dataclass(frozen=True)
class WarpgroupRows(ScaledEdgeRows):
    """As rows of edges; hidden features go through shared memory, where they are a left operand."""

    def load_hidden(self) -> list[str]:
        return [*super().load_hidden(), "leave_hidden(team, hi, lo, hidden);"]

    def steps(self, call: str) -> list[str]:
        return [f"{call.format(1)};"]


class WarpgroupGroup(ProductsInFlight, CoupledGroup):
    """The functions of one path group."""

    # So all four warps stage edges in the same steps: while one waits for memory, the others wait for it.
    most_staged = "(!is_there ? 0 : round % 2 ? 16 : STAGE)"

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        self.lay = WarpgroupRows()
        if self.forms_weights:
            self.asks = ("ask<HIDDEN>(b.w + (long long)my_edge * HIDDEN);",)

    @property
    def cleared_from(self) -> int:
        """Also the other cotangents: a warp that never has edges takes steps of none with what is there."""
        return self.radial.value_reals(self.group)

    @property
    def widths(self) -> set[int]:
        """Numbers of paths whose weights are formed at once."""
        starts = range(0, len(self.paths), self.at_once) if self.forms_weights else ()
        return {len(self._batch(first)) for first in starts}

    def _batch(self, first: int) -> list[int]:
        return self.paths[first : first + self.at_once]

    @property
    def _chain(self) -> int:
        """Paths of a chain of sums of gradients of hidden features, an even number."""
        count = len(self.paths)
        chains = -(-count // HIDDEN_CHAIN)
        return -(-count // (2 * chains)) * 2

    @property
    def work_of_path(self) -> int:
        """By time, not by instructions: warps wait for each other where products begin."""
        return 12 * self.radial.spec.steps

    # ---- the loop --------------------------------------------------------------------------------------------------

    def _group(self) -> list[str]:
        self.lines = []
        self.put(
            f"constexpr int MUL = {self.group.mul};",
            f"const int first_channel = part * {16 * self.slices};",
            f"const int u = first_channel + {self.lay.first_channel};",
            f"const bool active = {self._active};",
            HIDDEN,
            self.clears,
        )
        if self.radial.loads_matrix_at_once:
            self._fetch_matrix()
        self.put(
            "const int run_of_first = run_of(team, b.spans, num_out, first_edge);",
            "const Steps share = steps_of_warp(team, b.spans, num_out, run_of_first, first_edge, end_edge);",
        )
        (self._leave_matrix if self.radial.loads_matrix_at_once else self._load_matrix)()
        self.put(
            f"Node{self.number} kept = {{}};",
            "int run = share.run - 1, node = 0, base = 1, end = 1, staged = 0, j = 0;",
            "int edge_of_lane = 0, far_of_lane = 0;",
            "Real back_of_lane = 0, back_of_node = 0;",
        )
        with self.scope('_Pragma("unroll 1") for (int round = 0; round < share.rounds; ++round)'):
            self.put("const bool is_there = round < share.count;", "j += 16;")
            with self.scope("if (!is_there || j >= staged)"):
                self._next_edges()
            self._steps()
        return self.lines

    def _next_edges(self) -> None:
        """Stage further edges of the receiver, or the next one and its first edges; behind the last edge none."""
        self.put("__syncwarp(0xffffffffu);", "base += staged;")
        with self.scope("if (is_there && base >= end)"):
            with self.scope("do"):
                self.put(
                    "++run;",
                    "const int* const span = b.spans + 3 * run;",
                    "node = team.broadcast(span[0], 0);",
                    "base = team.broadcast(max(span[1], share.first), 0);",
                    "end = team.broadcast(min(span[2], share.end), 0);",
                )
            self.lines[-1] += " while (base >= end);"
            self._stage_node()
            self.put("back_of_node = node_back;")
        self._stage_edges()
        self.put("staged = count, edge_of_lane = my_edge, far_of_lane = my_far, j = 0;")
        if self.meets:
            self.put("back_of_lane = my_back;")

    def _steps(self) -> None:
        given = f"edge_of_lane, far_of_lane{self._given()}, j, staged, kept"
        self.put(*self.lay.steps(f"step_{self.number}<{{}}>(b, team, stage, u, active, matrix_scale, {given})"))

    def _given(self) -> str:
        return (", back_of_lane" if self.meets else "") + ", back_of_node, hidden"

    def _taken(self) -> str:
        return super()._taken() + ", unsigned short* const hidden"

    # ---- slices ----------------------------------------------------------------------------------------------------

    @property
    def _count_slices(self) -> int:
        """Slices of 8 channels of a block."""
        return self.slices * 16 // self.lay.channels

    def _take_edges(self) -> None:
        """Features of the first slice and hidden features are on their way together."""
        self._find_edges()
        self.put(f"Row{self.number} rows[EDGES];")
        self._load_ahead("first_u", "", "rows")
        self._take_hidden()

    def _before_slices(self) -> None:
        """Weights of the first slice's first paths."""
        self.begun = []
        if self.forms_weights:
            self.put(f"Real weights0[{len(self._batch(0))}][4];", *self._begin_weights(0, "team.slice"))
            self._wait_for("weights0", "weights0")

    def _load_ahead(self, first: str, unless: str, rows: str) -> None:
        """Features of channels from one on, to some rows; zeros ``unless`` there are any."""
        with self.scope(""):
            self.put(f"const int u = {first};", f"const bool active = {self._active}{unless};")
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                self.put(f"Row{self.number}& row = {rows}[i];", *self.memory.load_node("in1", "row.", "fars[i]"))

    def _load_slice(self) -> None:
        """They are there already. The next slice's part of the matrix; of the last one its own."""
        rows = self.lay.channels * self.radial.row_halves
        place = f"next / 2 * {self.slice_halves} + next % 2 * {rows}"
        self.put(
            f"const int next = min(s + 1, {self._count_slices - 1});",
            f"const unsigned short* const next_slice = team.slice + {place};",
        )

    def _scale_slice(self) -> None:
        self.begun = []
        if "w" in self.live:
            self.put("Real of_hidden[2 * STEPS][4];")
        super()._scale_slice()

    def _end_slice(self) -> None:
        """Sums of the last products."""
        if "w" in self.live:
            self._end_chain_of_hidden()
        if self.forms_weights:
            self._wait_for("next", "weights0")
        self.put("UNROLL for (int i = 0; i < EDGES; ++i) rows[i] = ahead[i];")

    def _path_of_tile(self, position: int, p: int) -> None:
        """Around the last path features of the next slice are on their way."""
        is_last = position + 1 == len(self.paths)
        fits = sum(self.problem.in1[block].dim for block in self.group.in1) <= MOST_AHEAD
        if is_last and fits:
            self._load_next()
        super()._path_of_tile(position, p)
        if is_last and not fits:
            self._load_next()

    def _load_next(self) -> None:
        self.put(f"Row{self.number} ahead[EDGES];")
        self._load_ahead(f"first_u + {self.lay.channels} * (s + 1)", f" && s + 1 < {self._count_slices}", "ahead")

    # ---- products of a slice ---------------------------------------------------------------------------------------

    def _begin_weights(self, first: int, matrix: str, name: str = "") -> list[str]:
        """Begin to form weights of paths from one on, of a slice of the matrix."""
        self.begun.append(name or f"weights{first}")
        place = f"{matrix} + {first * self.radial.path_halves}" if first else matrix
        return [f"begin_edge_weights(hidden, {place}, weights{first});"]

    def _path_of_slice(self, position: int, p: int) -> None:
        """Before the first path of some whose weights are there, those of the next ones begin.

        After the last ones of a slice the first ones of the next slice, in registers that they have had before.
        """
        if self.forms_weights and position % self.at_once == 0:
            later = position + self.at_once
            if position:
                self._wait_for(f"weights{position}", f"weights{position}")
            if later < len(self.paths):
                count = len(self._batch(later))
                self.put(f"Real weights{later}[{count}][4];", *self._begin_weights(later, "here.slice"))
            elif position:
                self.put(*self._begin_weights(0, "next_slice", "next"))
        super()._path_of_slice(position, p)
        if self.forms_weights and self.at_once >= len(self.paths) == position + 1:
            self.put(*self._begin_weights(0, "next_slice", "next"))

    def _form_weights(self, position: int) -> None:
        first = position // self.at_once * self.at_once
        self.put(f"const Real (&w)[4] = weights{first}[{position - first}];")

    def _give_hidden(self, position: int) -> None:
        if "w" not in self.live:
            return
        is_last, pair = position + 1 == len(self.paths), position // 2
        if position % 2 == 0 and not is_last:
            return
        if position % 2 == 0:
            self.put("UNROLL for (int k = 0; k < 4; ++k) gradient[1][k] = Real(0);")
        if f"hidden{pair - 1}" in self.begun:
            self._wait_for(f"hidden{pair - 1}")
        parts = f"gradient_hi[{pair % 2}], gradient_lo[{pair % 2}]"
        at, chain = position // 2 * 2, self._chain
        if at and at % chain == 0:
            self._end_chain_of_hidden()
        how = f"{'true' if position % 2 else 'false'}, {'true' if at % chain else 'false'}"
        self.put(
            f"halve_gradients(gradient, {parts});",
            f"begin_hidden<{how}>(here.slice + {at * self.radial.path_halves}, {parts}, of_hidden);",
        )
        self.begun.append(f"hidden{pair}")

    def _end_chain_of_hidden(self) -> None:
        last = [products for products in self.begun if products.startswith("hidden")]
        self._wait_for(last[-1] if last else "none", "of_hidden")
        self.put("end_hidden(of_hidden, hidden_scale, of_h);")
