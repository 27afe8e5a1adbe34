"""The functions of a path group some of whose gradients tensor cores form from coupled cotangents.

What is staged comes first. x of an edge's 8 channels is scaled so far that its products with weights, and
with what weights meet, stay below 2^15: then halves hold them as they are. Scales return only where gradients leave,
also those of paths that lanes multiply.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernelgen.arithmetic.couplings import PathTerms, coupled_rows
from kernelgen.kernels.product.channelwise import Group
from kernelgen.kernels.product.memory import EdgeOperand
from kernelgen.kernels.radial.group import RadialGroup, ScaledEdgeRows
from kernelgen.kernels.radial.plan import RadialPlan
from kernelgen.problem.product import PRODUCTS

# Components of x that are added in one chain of products to a gradient of y: tensor cores truncate sums.
CHAIN = 8
# Over a lane's channels of its edges.
EVERY = "UNROLL for (int i = 0; i < EDGES; ++i) UNROLL for (int c = 0; c < C; ++c)"


class CoupledGroup(RadialGroup):
    """The functions of one path group with coupled cotangents.

    A warp stages a receiver's cotangents and attributes of edges. Coupled cotangents (see ``include/coupled.cuh``) are
    computed once for a receiver, from couplings that are numbers here. They and the y of an edge are scaled below 2^15
    by powers of two, also for paths that lanes multiply.
    """

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        coupled = plan.coupled(group)
        self.lane_paths = [p for p in self.paths if p not in coupled]
        self.coupled_paths = [p for p in self.paths if p in coupled]
        self.blocks_of_y = plan.coupled_in2(group)
        self.operand = EdgeOperand(self.kernel, self.lane_paths, plan.value_stride(group))
        self.meets = bool({"x", "w"} & set(self.live))
        self.first_row, self.count_rows = plan.first_rows(group), plan.coupled_rows(group)
        # Where coupled cotangents begin in the warp's shared memory, and attributes of its staged edges.
        self.coupled_place = plan.value_reals(group) + 16 * self.slices * plan.shared_components(group)
        self.attribute_place = self.coupled_place + self.slices * plan.coupled_reals(group)
        self.lay = ScaledEdgeRows()
        # Components of x in the chain of products of each gradient of y.
        self.chains = dict.fromkeys(self.blocks_of_y, 0)

    def _dim1(self, p: int) -> int:
        return self.problem.in1[self.problem.paths[p].in1].dim

    def _dim2(self, p: int) -> int:
        return self.problem.in2[self.problem.paths[p].in2].dim

    @property
    def _slice_rows(self) -> int:
        """Halves of the coupled cotangents of 8 channels."""
        return 8 * self.count_rows * (2 if PRODUCTS[self.radial.spec.accuracy] > 1 else 1)

    def halves_at(self, place: int, kind: str = "const unsigned short*") -> str:
        """A place in the warp's shared memory as an address of halves."""
        return f"reinterpret_cast<{kind}>(stage + {place})"

    # ---- a receiver ------------------------------------------------------------------------------------------------

    def _group(self) -> list[str]:
        return [f"    {self.clears}", *super()._group()]

    @property
    def cleared_from(self) -> int:
        return self.coupled_place

    @property
    def clears(self) -> str:
        """Before coupled cotangents are there: some rows stay as they are."""
        places = f"int k = {self.cleared_from} + team.lane; k < {self.attribute_place}; k += 32"
        return f"for ({places}) stage[k] = Real(0);  // no row is without numbers"

    node_back = "node_back"  # of the scale of a receiver's cotangents

    def _given(self) -> str:
        return ", my_back, node_back" if self.meets else ", node_back"

    def _taken(self) -> str:
        return ", const Real my_back, const Real node_back" if self.meets else ", const Real node_back"

    def _stage_node(self) -> None:
        """The receiver's cotangents to shared memory, with one scale: coupled, and for other paths as they are."""
        row = f"b.g + (long long)node * {self.problem.dim_out}"
        channels = f"for (int n = team.lane; n < {16 * self.slices}; n += 32)"
        self.put("unsigned largest = 0;")
        with self.scope(channels):
            for block in self.group.out:
                b = self.problem.out[block]
                self.put(f"Real g{block}[{b.dim}];")
                self.put(f"take_channel<MUL>({row} + {b.offset}, first_channel + n, Real(1), g{block});")
                self.put(f"largest = max(largest, largest_of(g{block}));")
        bound = f"bound_of(__reduce_max_sync(0xffffffffu, largest)) + {self._reach()}"
        self.put(f"const Scale node_scale = scale_of_bound({bound});", "const Real node_back = node_scale.back;")
        with self.scope(channels):
            rows = self.halves_at(self.coupled_place, "unsigned short*")
            self.put(f"unsigned short* const left = {rows} + n / 8 * {self._slice_rows} + n % 8;")
            for block in self.group.out:
                b = self.problem.out[block]
                self.put(f"Real g{block}[{b.dim}];")
                self.put(f"take_channel<MUL>({row} + {b.offset}, first_channel + n, node_scale.into, g{block});")
            components = self.radial.shared_components(self.group)
            for block in self.radial.lane_out(self.group):
                place = f"stage + n / 16 * {16 * components} + n % 16 + {self._place_of_node(block)}"
                self.put(f"leave_channel(g{block}, {place});")
            for p in self.coupled_paths:
                self._leave_rows(p)

    def _leave_rows(self, p: int) -> None:
        path, dim2 = self.problem.paths[p], self._dim2(p)
        rows = coupled_rows(self.kernel.terms[p], self.problem.in2[path.in2].offset, dim2)
        sums = (" + ".join(f"Real({factor!r}) * g{path.out}[{m}]" for m, factor in terms) for terms in rows)
        values = ", ".join(each or "Real(0)" for each in sums)
        self.put(
            f"const Real rows{p}[{len(rows)}] = {{{values}}};",
            f"leave_rows<{self.count_rows}>(rows{p}, left + {8 * self.first_row[p]});",
        )

    def _reach(self) -> int:
        """Binary digits of the largest sum of magnitudes of couplings over components of g, of all paths."""
        most = 0.0
        for p in self.paths:
            first = self.problem.in2[self.problem.paths[p].in2].offset
            rows = coupled_rows(self.kernel.terms[p], first, self._dim2(p))
            most = max(most, *(sum(abs(factor) for _, factor in row) for row in rows))
        return math.frexp(most)[1]

    def _place_of_node(self, block: int) -> int:
        out = self.radial.lane_out(self.group)
        before = out[: out.index(block)]
        return self.radial.value_reals(self.group) + 16 * sum(self.problem.out[b].dim for b in before)

    # Edges that are staged at a time, and statements that ask for what their steps need.
    most_staged = "STAGE"
    asks: tuple[str, ...] = ()

    @property
    def _if_staged(self) -> str:
        """Before what only lanes with an edge write."""
        return "if (team.lane < STAGE) " if self.radial.stage < 32 else ""

    def _stage_edges(self) -> None:
        """One edge a lane: its indices, its attributes with a scale, and the values that lanes multiply."""
        row = self.problem.dim_in2
        self.put(
            f"const int count = min({self.most_staged}, end - base), last = base + min(team.lane, count - 1);",
            "const int my_edge = b.perm ? b.perm[last] : last;",
            "const int my_far = int(b.sender[my_edge]);",
            *self.asks,
        )
        if "y" in self.kernel.operands:
            self.put(
                *self.operand.load("my_edge"),
                f"const Scale my_scale = scale_of(largest_of<{row}>(y));",
                "const Real my_back = my_scale.back, my_into = team.lane < count ? my_scale.into : Real(0);",
                f"UNROLL for (int k = 0; k < {row}; ++k) y[k] *= my_into;",
            )
        if self.lane_paths:
            *lines, store = self.operand.stage()[len(self.operand.load("my_edge")) :]
            self.put(*lines, self._if_staged + store)
        for number, block in enumerate(self.blocks_of_y if self.meets else ()):
            b = self.problem.in2[block]
            start = self.halves_at(self.attribute_place, "unsigned short*")
            place = f"{start} + {16 * self.radial.stage * number} + 8 * team.lane"
            self.put(f"{self._if_staged}leave_attributes<{b.dim}>(y + {b.offset}, {place});")
        self.put(*self._keep_staged(), "__syncwarp(0xffffffffu);")

    def _keep_staged(self) -> tuple[str, ...]:
        """What else of staged edges is kept in shared memory."""
        return ()

    # ---- a step ----------------------------------------------------------------------------------------------------

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
            # Weights (2^30 for each hidden feature) times x are below 2^15, and so is what weights meet, a sum over
            # components of x and y of such products.
            terms = max(self._dim1(p) * self._dim2(p) for p in self.paths)
            self._find_slice_scales(str(30 + math.ceil(math.log2(max(self.radial.spec.hidden, terms)))))
            for block in self.group.in1:
                m = f"UNROLL for (int m = 0; m < {self.problem.in1[block].dim}; ++m)"
                self.put(f"{EVERY} {m} rows[i].x{block}[m][c] *= gradient_scale[i].into;")
        if "w" in self.live:  # what brings sums of a slice back: of hidden features but for the matrix
            self._return_hidden_scales()
        if "y" in self.live:  # of attributes but for weights
            back = f"back_y[i] = gradient_scale[i].back * {self.node_back};"
            self.put("Real back_y[EDGES];", f"UNROLL for (int i = 0; i < EDGES; ++i) {back}")
        place = self.halves_at(self.coupled_place) + f" + s * {self._slice_rows}" * bool(self._slice_loop)
        self.put(f"const unsigned short* const coupled = {place};")
        for block in self.blocks_of_y if "y" in self.live else ():
            self.put(f"Real of_y{block}[4] = {{}}, small_y{block}[4] = {{}};")

    def _find_slice_scales(self, bound: str) -> None:
        self.put("Scale gradient_scale[EDGES];")
        self._find_scales(bound)

    def _return_hidden_scales(self) -> None:
        scale = "hidden_scale[i] = {Real(1), gradient_scale[i].back * back[i]};"
        self.put("Scale hidden_scale[EDGES];", f"UNROLL for (int i = 0; i < EDGES; ++i) {scale}")

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
        met_before = {self.problem.paths[q].in2 for q in self.paths[:position] if q in self.coupled_paths}
        if self.meets and path.in2 not in met_before:
            place = 16 * self.radial.stage * self.blocks_of_y.index(path.in2)
            start = f"{self.halves_at(self.attribute_place)} + {place} + 8 * j"
            self.put(f"unsigned y{path.in2}[4];", f"take_attributes(team, {start}, y{path.in2});")
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


# Gradients of paths with one attribute or one cotangent, which lanes compute with as few products as they need.
#
# Such a path has one term for each component of x: ``w x[i] y g[i]`` with one component of y (of degree 0), or
# ``w x[i] y[i] g`` with one of g. Names are those of ``kernelgen.arithmetic.couplings``, for a lane's channel ``c``.


def has_one_attribute(terms: PathTerms) -> bool:
    """Whether all entries are the same component of y, with one factor."""
    signs = {entry.sign for entry in terms.entries}
    return len(terms.values) == len(signs) == len(terms.values[0].terms) == 1


def has_one_cotangent(terms: PathTerms) -> bool:
    """Whether each entry is one component of y with a factor, and there is one component of g."""
    return terms.dim3 == 1 and all(len(value.terms) == 1 for value in terms.values)


def with_one_attribute(terms: PathTerms, live: str, gradient: str) -> Iterator[str]:
    """Statements of a path: the sum of products of x and g serves weights and the attribute."""
    path, entries = terms.path, terms.entries
    p, (component, factor), sign = path.index, terms.values[0].terms[0], entries[0].sign
    products = " + ".join(f"row.x{path.in1}[{e.m1}][c] * g{path.out}[{e.m3}][c]" for e in entries)
    minus = "-" if sign < 0 else ""
    if "y" in live:
        yield f"Real r{p} = 0;"
    yield "UNROLL for (int c = 0; c < C; ++c) {"
    if "y" in live or "w" in live:
        yield f"    const Real product = {products};"
    if "w" in live:
        yield f"    {gradient} = {minus}m{p}_0 * product;"
    if "y" in live:
        yield f"    r{p} += row.w{p}[c] * product;"
    if "x" in live:
        yield f"    const Real weighted = {minus}m{p}_0 * row.w{p}[c];"
        for e in entries:
            yield f"    ox{path.in1}[{e.m1}][c] += weighted * g{path.out}[{e.m3}][c];"
    yield "}"
    if "y" in live:
        yield f"oy[{component}] += Real({sign * factor!r}) * r{p};"


def with_one_cotangent(terms: PathTerms, live: str, gradient: str) -> Iterator[str]:
    """Statements of a path: the weighted cotangent serves x and the attributes."""
    path, p = terms.path, terms.path.index
    g = f"g{path.out}[0][c]"
    if "y" in live:
        yield f"Real r{p}[{len(terms.entries)}] = {{}};"
    yield "UNROLL for (int c = 0; c < C; ++c) {"
    if "x" in live or "y" in live:
        yield f"    const Real weighted = row.w{p}[c] * {g};"
    for number, e in enumerate(terms.entries):
        sign = "-" if e.sign < 0 else "+"
        if "x" in live:
            yield f"    ox{path.in1}[{e.m1}][c] {sign}= m{p}_{e.value} * weighted;"
        if "y" in live:
            yield f"    r{p}[{number}] += row.x{path.in1}[{e.m1}][c] * weighted;"
    if "w" in live:
        signed = (f"{'-' if e.sign < 0 else '+'} m{p}_{e.value} * row.x{path.in1}[{e.m1}][c]" for e in terms.entries)
        yield f"    {gradient} = ({' '.join(signed)}) * {g};"
    yield "}"
    for number, e in enumerate(terms.entries if "y" in live else ()):
        component, factor = terms.values[e.value].terms[0]
        yield f"oy[{component}] += Real({e.sign * factor!r}) * r{p}[{number}];"
