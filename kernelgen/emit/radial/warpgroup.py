"""The functions of a path group whose warps multiply four at a time, by ``wgmma``; see ``include/warpgroup.cuh``.

Weights of some paths are formed while lanes multiply those of the paths before, and gradients of weights go to those of
hidden features while lanes go on. All four warps have to come to the same products, so a warp without further edges
goes through steps whose loads and sums are off. Groups of products end in the order in which they begin; what waits for
one says how many later ones may still run.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.emit.radial.coupled import CoupledGroup
from kernelgen.emit.radial.fragments import ScaledEdgeRows
from kernelgen.emit.radial.in_flight import HIDDEN, ProductsInFlight
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial import RadialPlan

# Most paths whose gradients are summed in tensor cores, which truncate, before floats are added.
HIDDEN_CHAIN = 6


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
    most_staged = "(round % 2 ? 16 : STAGE)"

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        self.lay = WarpgroupRows()

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
    def _active(self) -> str:
        return "is_there" if self.group.mul % (16 * self.slices) == 0 else "is_there && u < MUL"

    @property
    def work_of_path(self) -> int:
        return 20 + 4 * self.radial.spec.steps

    # ---- the loop --------------------------------------------------------------------------------------------------

    def _group(self) -> list[str]:
        self.lines = []
        self.put(
            f"constexpr int MUL = {self.group.mul};",
            f"const int first_channel = part * {16 * self.slices};",
            f"const int u = first_channel + {self.lay.first_channel};",
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
            "int run = share.run - 1, node = 0, base = 0, end = 0, staged = 0, j = 0;",
            "int edge_of_lane = 0, far_of_lane = 0;",
            "Real back_of_lane = 0, back_of_node = 0;",
        )
        with self.scope('_Pragma("unroll 1") for (int round = 0; round < share.rounds; ++round)'):
            self.put("const bool is_there = round < share.count;", "j = is_there && round > 0 ? j + 16 : 0;")
            with self.scope("if (is_there && j >= staged)"):
                self._next_edges()
            self.put(f"const bool active = {self._active};")
            self._steps()
        return self.lines

    def _next_edges(self) -> None:
        """Stage further edges of the receiver, or the next one and its first edges."""
        self.put("__syncwarp(0xffffffffu);", "base += staged;")
        with self.scope("if (base >= end)"):
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
        return (", back_of_lane" if self.meets else "") + ", back_of_node, is_there, hidden"

    def _taken(self) -> str:
        return super()._taken() + ", const bool is_there, unsigned short* const hidden"

    def _put_edges(self) -> None:
        if self.writes_edges:
            with self.scope("if (is_there)"):
                super()._put_edges()

    # ---- products of a slice ---------------------------------------------------------------------------------------

    def _begin_weights(self, first: int) -> list[str]:
        """Begin to form weights of paths from one on; nothing beyond the last one."""
        count, name = len(self._batch(first)), f"weights{first}"
        if not count or not self.forms_weights:
            return []
        self.begun.append(name)
        place = f"here.slice + {first * self.radial.path_halves}"
        return [f"Real {name}[{count}][4];", f"begin_edge_weights(hidden, {place}, {name});"]

    def _scale_slice(self) -> None:
        """Features are on their way when the first products begin."""
        self.begun = []
        if "w" in self.live:
            self.put("Real of_hidden[2 * STEPS][4];")
        self.put(*self._begin_weights(0))
        super()._scale_slice()

    def _path_of_slice(self, position: int, p: int) -> None:
        if position % self.at_once == 0 and self.forms_weights:
            name = f"weights{position}"
            if name in self.begun:
                self._wait_for(name, name)
            self.put(*self._begin_weights(position + self.at_once))
        super()._path_of_slice(position, p)

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
        how = f"{'true' if position % 2 else 'false'}, {'true' if at % chain else 'false'}"
        self.put(
            f"halve_gradients(gradient, {parts});",
            f"begin_hidden<{how}>(here.slice + {at * self.radial.path_halves}, {parts}, of_hidden);",
        )
        self.begun.append(f"hidden{pair}")
        if is_last or (at + 2) % chain == 0:
            self._wait_for(f"hidden{pair}", "of_hidden")
            self.put("end_hidden(of_hidden, hidden_scale, of_h);")
