"""The functions of a path group some of whose gradients tensor cores form from coupled cotangents.

``coupled_stage`` has what is staged. x of an edge's 8 channels is scaled so far that its products with weights, and
with what weights meet, stay below 2^15: then halves hold them as they are. Scales return only where gradients leave,
also those of paths that lanes multiply.
"""

from __future__ import annotations

import math

from kernelgen.emit.radial.coupled_stage import CoupledWalk
from kernelgen.emit.radial.fragments import ScaledEdgeRows
from kernelgen.emit.radial.single_terms import (
    has_one_attribute,
    has_one_cotangent,
    with_one_attribute,
    with_one_cotangent,
)
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial_convolution import RadialPlan

# Components of x that are added in one chain of products to a gradient of y: tensor cores truncate sums.
CHAIN = 8
# Over a lane's channels of its edges.
EVERY = "UNROLL for (int i = 0; i < EDGES; ++i) UNROLL for (int c = 0; c < C; ++c)"


class CoupledGroup(CoupledWalk):
    """The functions of one path group with coupled cotangents."""

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        self.lay = ScaledEdgeRows()
        # Components of x in the chain of products of each gradient of y.
        self.chains = dict.fromkeys(self.blocks_of_y, 0)

    @property
    def cost(self) -> int:
        """The work of an edge of a part, in instructions of a warp for 16 edges (read from machine code, to 7%)."""
        statements = sum(len(self.kernel.bodies[p].statements) for p in self.lane_paths)
        components = sum(map(self._dim1, self.coupled_paths))
        features = sum(self.problem.in1[block].dim for block in self.group.in1)
        of_paths = 17 * self.radial.spec.steps * len(self.paths)
        return 2 * self.slices * (4 * statements + 34 * components + of_paths + 20 * features + 40) + 650

    def _of_edges(self) -> str:
        return ""

    def _find_values(self) -> list[str]:
        return [f"back[i] = __shfl_sync(0xffffffffu, my_back, place, 32) * {self.node_back};"] if self.meets else []

    def _find_edges(self) -> None:
        if self.meets:
            self.put("Real back[EDGES];  // from products of coupled cotangents and attributes")
        super()._find_edges()

    def _declare_sums(self) -> None:
        if "y" not in self.live:
            return
        if self.lane_paths:
            super()._declare_sums()
        self.put(*(f"Real sums_y{block}[EDGES][2] = {{}};" for block in self.blocks_of_y))

    def _scale_slice(self) -> None:
        """Scales of the slice's features, by which they are multiplied here."""
        if "w" in self.live:
            self.put(*self._gradients())
        if "x" in self.kernel.operands:
            self._find_slice_scales(str(15 + self._room()))
            for block in self.group.in1:
                m = f"UNROLL for (int m = 0; m < {self.problem.in1[block].dim}; ++m)"
                self.put(f"{EVERY} {m} rows[i].x{block}[m][c] *= gradient_scale[i].into;")
        self._return_scales()
        place = self.halves_at(self.coupled_place) + f" + s * {self._slice_rows}" * bool(self._slice_loop)
        self.put(f"const unsigned short* const coupled = {place};")
        for block in self.blocks_of_y if "y" in self.live else ():
            self.put(f"Real of_y{block}[4] = {{}}, small_y{block}[4] = {{}};")

    def _find_slice_scales(self, bound: str) -> None:
        self.put("Scale gradient_scale[EDGES];")
        self._find_scales(bound)

    def _return_scales(self) -> None:
        """What brings sums of a slice back: of attributes but for weights, of hidden features but for the matrix."""
        each = "UNROLL for (int i = 0; i < EDGES; ++i)"
        if "w" in self.live:
            self._return_hidden_scales()
        if "y" in self.live:
            self.put("Real back_y[EDGES];", f"{each} back_y[i] = gradient_scale[i].back * {self.node_back};")

    def _return_hidden_scales(self) -> None:
        scale = "hidden_scale[i] = {Real(1), gradient_scale[i].back * back[i]};"
        self.put("Scale hidden_scale[EDGES];", f"UNROLL for (int i = 0; i < EDGES; ++i) {scale}")

    def _room(self) -> int:
        """Binary digits below 1 of x, so that weights (2^30 for each hidden feature) times x are below 2^15.

        Also what weights meet, a sum over components of x and y of such products.
        """
        terms = max(self._dim1(p) * self._dim2(p) for p in self.paths)
        return 15 + math.ceil(math.log2(max(self.radial.spec.hidden, terms)))

    @property
    def _weight(self) -> str:
        return self.lay.weight

    def _path(self, p: int) -> None:
        terms, body = self.kernel.terms[p], self.kernel.bodies[p]
        form = with_one_attribute if has_one_attribute(terms) else with_one_cotangent
        if not (has_one_attribute(terms) or has_one_cotangent(terms)):
            super()._path(p)
            return
        assert isinstance(self.lay, ScaledEdgeRows)
        self.put(*self.operand.fetch(p, body))
        with self.scope(""):
            self.put(*self.operand.bind(p, body))
            self.put(*form(terms, self.live, self.lay.gradient(self.paths.index(p))))

    def _path_of_tile(self, position: int, p: int) -> None:
        if p in self.lane_paths:
            super()._path_of_tile(position, p)
            return
        path = self.problem.paths[p]
        self._take_attributes(position, path.in2)
        blocks = self.problem.in1[path.in1].text, self.problem.in2[path.in2].text, self.problem.out[path.out].text
        with self.scope(""):
            self.put(f"// path {p}: {blocks[0]} x {blocks[1]} -> {blocks[2]}, coupled")
            if self.forms_weights:
                self._form_weights(position)
            if "w" in self.live:
                self.put(f"UNROLL for (int k = 0; k < 4; ++k) gradient[{position % 2}][k] = Real(0);")
            for first in range(0, self._dim1(p), 2):
                self._components(position, p, first, min(2, self._dim1(p) - first))
            self._give_hidden(position)
        if "y" in self.live:
            self._end_chain(position, path.in2)

    def _take_attributes(self, position: int, block: int) -> None:
        """A block of the edges' attributes, if the path is the first that has it."""
        before = {self.problem.paths[p].in2 for p in self.paths[:position] if p in self.coupled_paths}
        if self.meets and block not in before:
            place = 16 * self.radial.stage * self.blocks_of_y.index(block)
            start = f"{self.halves_at(self.attribute_place)} + {place} + 8 * j"
            self.put(f"unsigned y{block}[4];", f"take_attributes(team, {start}, y{block});")

    def _components(self, position: int, p: int, first: int, count: int) -> None:
        """What one or two components of x of a path meet and give."""
        path, dim2 = self.problem.paths[p], self._dim2(p)
        row = self.first_row[p] + first * dim2
        every, rows = f"UNROLL for (int n = 0; n < {count}; ++n) {EVERY}", f"{self.count_rows}, {dim2}, {count}"
        x = f"rows[i].x{path.in1}[{first} + n][c]"
        with self.scope(""):
            if self.meets:
                self.put("Real met[2][4];", f"couple<{rows}>(team, coupled + {8 * row}, y{path.in2}, met);")
            if "x" in self.live:
                self.put(f"{every} of_x{path.in1}[i][{first} + n][c] += {self.lay.weight} * met[n][2 * i + c];")
            if "w" in self.live:
                self.put(f"{every} gradient[{position % 2}][2 * i + c] += {x} * met[n][2 * i + c];")
            if "y" in self.live:
                shift = self.problem.in2[path.in2].offset % 2
                self.put(
                    "Real weighted[2][4];",
                    f"{every} weighted[n][2 * i + c] = {self.lay.weight} * {x};",
                    f"add_to_attributes<{rows}>(team, coupled + {8 * (row - shift)}, weighted,",
                    f"                  of_y{path.in2}, small_y{path.in2});",
                )
                self.chains[path.in2] += count

    def _end_chain(self, position: int, block: int) -> None:
        """Add a chain of products to the sums of y if it is long, or the last one of a block."""
        later = [q for q in self.paths[position + 1 :] if q in self.coupled_paths]
        is_last = all(self.problem.paths[q].in2 != block for q in later)
        if not is_last and self.chains[block] < CHAIN:
            return
        self.chains[block] = 0
        with self.scope("UNROLL for (int k = 0; k < 4; ++k)"):
            self.put(f"sums_y{block}[k / 2][k % 2] += (of_y{block}[k] + small_y{block}[k]) * back_y[k / 2];")
            if not is_last:
                self.put(f"of_y{block}[k] = small_y{block}[k] = Real(0);")

    def _put_features(self, block: int) -> None:
        dim = self.problem.in1[block].dim
        value = f"of_x{block}[i][m][c]"
        self.put(f"{EVERY} UNROLL for (int m = 0; m < {dim}; ++m) {value} = {value} * back[i] * scale[i];")
        super()._put_features(block)

    def _quarters_of_lanes(self) -> dict[int, int]:
        """The last of the paths that lanes multiply, for each four elements of y that these add to."""
        last: dict[int, int] = {}
        for position, p in enumerate(self.paths):
            if p in self.lane_paths:
                b = self.problem.in2[self.problem.paths[p].in2]
                last |= dict.fromkeys(range(b.offset // 4, (b.offset + b.dim - 1) // 4 + 1), position)
        return last

    def _sum_attributes(self, position: int) -> None:
        for quarter, last in self._quarters_of_lanes().items():
            if last == position:
                add = f"y_sums[i][{quarter}] += sum_to_quad(team, of_y[i] + {4 * quarter}) * back_y[i];"
                self.put(f"UNROLL for (int i = 0; i < EDGES; ++i) {add}")

    def _put_attributes(self) -> None:
        row = self.problem.dim_in2
        self.put(
            f"Real* const start = b.out_y + (long long)edges[i] * {row};",
            f"const Real scale_y = {self.lay.place} < count ? scale[i] : Real(0);",
        )
        for k in self._quarters_of_lanes():
            end = row - 4 * k
            self.put(
                f"const Real sum{k}[1] = {{y_sums[i][{k}] * scale_y}};",
                f"{'' if end >= 4 else f'if (team.quad < {end}) '}add<1>(start + {4 * k} + team.quad, sum{k});",
            )
        for block in self.blocks_of_y:
            b = self.problem.in2[block]
            how = f"{b.offset % 2}, {b.offset % 2 + b.dim}, {1 + (row % 2 == 0)}"
            start = f"start + {b.offset - b.offset % 2}"
            self.put(f"put_pair<{how}>(team, {start}, sums_y{block}[i], scale_y);")
