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
from kernelgen.plan.radial_convolution import RadialPlan
from kernelgen.problem.radial_convolution import PRODUCTS

# Most paths whose gradients are summed in tensor cores, which truncate, before floats are added.
HIDDEN_CHAIN = 6
# The next slice's features are loaded before so many last paths, with one chain before the last one. Products that
# begin later wait for them. By times on an H200: 1.378 ms for 1.446 in MACE large's gradients, 1.021 for 0.988 in tf32.
PATHS_AHEAD = 2
# Most components of x of which features are loaded so: they take registers.
MOST_AHEAD = 5


@dataclass(frozen=True)
class WarpgroupRows(ScaledEdgeRows):
    """As rows of edges; hidden features go through shared memory, where they are a left operand."""

    edge, far, matrix_scale = "walk.edge[{}]", "walk.far[place]", "walk.matrix_scale"

    def load_hidden(self) -> list[str]:
        return [*super().load_hidden(), "leave_hidden(team, hi, lo, hidden);"]


class WarpgroupGroup(ProductsInFlight, CoupledGroup):
    """The functions of one path group."""

    # So all four warps stage edges in the same steps: while one waits for memory, the others wait for it.
    most_staged = "(!is_there ? 0 : round % 2 ? 16 : STAGE)"
    _of_block = _taken_count = ""
    node_back = "walk.node_back"

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        self.lay = WarpgroupRows()
        self.keeps_edges = False
        self.walk_place = self.attribute_place + plan.attribute_reals(group)
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
    def is_one_chain(self) -> bool:
        """Whether one chain has all gradients of hidden features of a step: in a class that forgives truncation."""
        return "w" in self.live and PRODUCTS[self.radial.spec.accuracy] == 1

    @property
    def _chain(self) -> int:
        """Paths of a chain of sums of gradients of hidden features, an even number."""
        count = len(self.paths)
        chains = -(-count // HIDDEN_CHAIN)
        return -(-count // (2 * chains)) * 2

    @property
    def cost(self) -> int:
        """By times of blocks on an H200 (to 7%), not by instructions: warps wait for each other at products."""
        statements = {p: len(self.kernel.bodies[p].statements) for p in self.paths}
        features = sum(self.problem.in1[block].dim for block in self.group.in1)
        of_slice = 2 * (sum(statements.values()) + 4 * len(self.paths) + 15 * features + 70)
        return self.slices * of_slice + 3 * sum(statements[p] for p in self.lane_paths) + 1000

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
            f"volatile Walk& walk = *reinterpret_cast<volatile Walk*>(stage + {self.walk_place});",
            "begin_walk(walk, share, matrix_scale);",
            f"Node{self.number} kept = {{}};",
            "int j = 0;",
            "Real back_of_lane = 0;" * self.meets,
        )
        with self.scope('_Pragma("unroll 1") for (int round = 0; round < walk.rounds; ++round)'):
            self.put("const bool is_there = round < walk.count;", "j += 16;")
            with self.scope("if (!is_there || j >= walk.staged)"):
                self._next_edges()
            self._steps()
        return self.lines

    def _next_edges(self) -> None:
        """Stage further edges of the receiver, or the next one and its first edges; behind the last edge none."""
        self.put("__syncwarp(0xffffffffu);", "int base = walk.base + walk.staged, end = walk.behind;")
        with self.scope("if (is_there && base >= end)"):
            self.put("int run = walk.run, node;")
            with self.scope("do"):
                self.put(
                    "++run;",
                    "const int* const span = b.spans + 3 * run;",
                    "node = team.broadcast(span[0], 0);",
                    "base = team.broadcast(max(span[1], walk.first), 0);",
                    "end = team.broadcast(min(span[2], walk.end), 0);",
                )
            self.lines[-1] += " while (base >= end);"
            self.put("walk.run = run, walk.behind = end;")
            self._stage_node()
            self.put("walk.node_back = node_back;")
        self._stage_edges()
        self.put("j = 0;")
        if self.meets:
            self.put("back_of_lane = my_back;")

    def _keep_staged(self) -> tuple[str, ...]:
        keep = "walk.edge[team.lane] = my_edge, walk.far[team.lane] = my_far;"
        is_read = "__syncwarp(0xffffffffu);  // all lanes have read what was there"
        return is_read, "walk.base = base, walk.staged = count;", self._if_staged + keep

    def _steps(self) -> None:
        self.put(f"step_{self.number}<1>(b, team, stage, u, active, walk{self._given()}, j, kept);")

    def _given(self) -> str:
        return ", back_of_lane" * self.meets + ", hidden"

    @property
    def _of_staged(self) -> str:
        return "volatile Walk& walk" + ", const Real my_back" * self.meets + ", unsigned short* const hidden"

    def _find_edges_again(self) -> None:
        if self.is_one_chain:
            self._return_hidden_scales()
            self._return_hidden_sums()
        self.put("int edges[EDGES];", f"UNROLL for (int i = 0; i < EDGES; ++i) edges[i] = walk.edge[{self.lay.place}];")
        if "y" in self.live:
            self.put("const int count = walk.staged;")

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
        if self.is_one_chain:
            self.put(
                "Real of_hidden[2 * STEPS][4] = {};",
                "Scale gradient_scale[EDGES];",
                "UNROLL for (int i = 0; i < EDGES; ++i) gradient_scale[i] = scale_of_bound(0);",
            )

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
        if "w" in self.live and not self.is_one_chain:
            self.put("Real of_hidden[2 * STEPS][4];")
        super()._scale_slice()

    def _find_slice_scales(self, bound: str) -> None:
        """With one chain the least scale of the slices so far, which what is summed has too."""
        if not self.is_one_chain:
            super()._find_slice_scales(bound)
            return
        self.put("Scale slice_scale[EDGES];", "Real factor[EDGES];")
        self._find_scales(bound, "slice_scale")
        self.put("UNROLL for (int i = 0; i < EDGES; ++i) factor[i] = lower(gradient_scale[i], slice_scale[i]);")
        self.put("multiply_rows(factor, of_hidden);")

    def _end_slice(self) -> None:
        """Sums of the last products."""
        if "w" in self.live:
            self._wait_for_hidden()
            if not self.is_one_chain:
                self._return_hidden_sums()
        if self.forms_weights:
            self._wait_for("next", "weights0")
        self.put("UNROLL for (int i = 0; i < EDGES; ++i) rows[i] = ahead[i];")

    def _path_of_tile(self, position: int, p: int) -> None:
        """Before one of the last paths features of the next slice are on their way, behind the last one if many."""
        components = sum(self.problem.in1[block].dim for block in self.group.in1)
        before = max(0, len(self.paths) - (1 if self.is_one_chain else PATHS_AHEAD))
        if components <= MOST_AHEAD and position == before:
            self._load_next()
        super()._path_of_tile(position, p)
        if components > MOST_AHEAD and position + 1 == len(self.paths):
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
        if at and at % chain == 0 and not self.is_one_chain:
            self._wait_for_hidden()
            self._return_hidden_sums()
        adds = self.is_one_chain or at % chain
        how = f"{'true' if position % 2 else 'false'}, {'true' if adds else 'false'}"
        self.put(
            f"halve_gradients(gradient, {parts});",
            f"begin_hidden<{how}>(here.slice + {at * self.radial.path_halves}, {parts}, of_hidden);",
        )
        self.begun.append(f"hidden{pair}")

    def _wait_for_hidden(self) -> None:
        last = [products for products in self.begun if products.startswith("hidden")]
        self._wait_for(last[-1] if last else "none", "of_hidden")

    def _return_hidden_sums(self) -> None:
        self.put("end_hidden(of_hidden, hidden_scale, of_h);")
