"""The functions of a path group whose warps multiply four at a time, by ``wgmma``; see ``include/warpgroup.cuh``.

Weights of some paths are formed while lanes multiply those of the paths before, and gradients of weights go to those of
hidden features while lanes go on. All four warps have to come to the same products, so a warp without further edges
goes through a step of none, in which it adds zeros to the rows of its last ones. Groups of products end in the order in
which they begin; what waits for one says how many later ones may still run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernelgen.kernels.product.channelwise import Group
from kernelgen.kernels.radial.coupled import CoupledGroup
from kernelgen.kernels.radial.group import ChannelRows, RadialGroup, ScaledEdgeRows
from kernelgen.kernels.radial.plan import RadialPlan
from kernelgen.problem.product import PRODUCTS

# ``wgmma`` instructions as C++ functions, one for each width (a number of tiles of 8 columns), and waits for them.
#
# Sums are arrays of a lane's registers, ``Real [tiles][4]``. Right operands are in shared memory, see
# ``include/warpgroup.cuh``: of weights, whose left operand is there as well, each column's halves are neighbours; of
# gradients of hidden features, whose left operand is in registers, each row's.

# Where a warpgroup's hidden features are: as many parts of HIDDEN_ROWS halves before the matrix.
HIDDEN_OF = (
    "unsigned short* const {name} = slice - (1 + team.broadcast(threadIdx.x / 128, 0)) * ({parts} * HIDDEN_ROWS);"
)
HIDDEN = HIDDEN_OF.format(name="hidden", parts=1)


def warpgroup_calls(of_weights: Iterable[int], of_hidden: int) -> str:
    """The functions for some widths; of_hidden: 0 without gradients of hidden features."""
    widths = sorted(set(of_weights))
    lines = ["#ifdef __CUDA_ARCH__"]
    for tiles in widths:
        lines += _multiply(tiles, "const unsigned long long a", ['"l"(a)'], "0, 0")
    if of_hidden:
        operand = [f'"r"(a[{k}])' for k in range(4)]
        lines += _multiply(of_hidden, "const unsigned (&a)[4]", operand, "1")
    for tiles in sorted({*widths, *([of_hidden] if of_hidden else [])}):
        lines += _wait(tiles)
    return "\n".join([*lines, "#endif", ""])


def _sums(tiles: int, kind: str) -> str:
    return ", ".join(f'"{kind}"(d[{k // 4}][{k % 4}])' for k in range(4 * tiles))


def _multiply(tiles: int, left: str, operand: list[str], majors: str) -> list[str]:
    """``d += a b`` or ``d = a b``. majors: which operands in shared memory have rows of neighbours, not columns."""
    count = 4 * tiles
    sums = ", ".join(f"%{k}" for k in range(count))
    names = [f"%{count + k}" for k in range(len(operand))]
    a = names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"
    b = f"%{count + len(names)}"
    shape = f"wgmma.mma_async.sync.aligned.m64n{8 * tiles}k16.f32.f16.f16"

    def statement(adds: int, kind: str) -> list[str]:
        return [
            f'asm volatile("{{.reg .pred adds; setp.ne.b32 adds, {adds}, 0; {shape} "',
            f'             "{{{sums}}}, {a}, {b}, adds, 1, 1, {majors};}}"',
            f"             : {_sums(tiles, kind)}",
            f'             : {", ".join(operand)}, "l"(b));',
        ]

    return [
        "template <bool ADDS>",
        f"DEVICE void multiply_async(Real (&d)[{tiles}][4], {left}, const unsigned long long b) {{",
        "    if (ADDS)",
        *("        " + line for line in statement(1, "+f")),
        "    else",
        *("        " + line for line in statement(0, "=f")),
        "}",
    ]


def _wait(tiles: int) -> list[str]:
    """Until all but the last LEFT groups of products are done; sums are there then."""
    return [
        "template <int LEFT>",
        f"DEVICE void wait_for(Real (&d)[{tiles}][4]) {{",
        f'    asm volatile("wgmma.wait_group.sync.aligned %{4 * tiles};"',
        f'                 : {_sums(tiles, "+f")} : "n"(LEFT));',
        "}",
    ]


class ProductsInFlight(RadialGroup):
    """What values and gradients share: their operands, and products that run while lanes go on.

    Groups of products end in the order in which they begin.
    """

    packs, leaves = "pack_blocks", "leave_blocks"
    shows_matrix = ("show_to_tensor_cores();", "__syncthreads();")

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        self.at_once = plan.spec.schedule.paths_at_once
        # Groups of products that nobody has waited for, in the order in which they begin.
        self.begun: list[str] = []

    @property
    def widths(self) -> set[int]:
        """Of weights formed at once, the numbers of tiles of 8 columns."""
        raise NotImplementedError

    def _wait_for(self, products: str, sums: str = "") -> None:
        """Wait for a group of products, in whose ``sums`` values are there then."""
        later = len(self.begun) - 1 - self.begun.index(products) if products in self.begun else len(self.begun)
        self.put(f"wait_for<{later}>({sums});" if sums else f"wait_for_products<{later}>();")
        self.begun = self.begun[len(self.begun) - later :]


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
    # So all four warps stage edges in the same steps: while one waits for memory, the others wait for it.
    most_staged = "(!is_there ? 0 : round % 2 ? 16 : STAGE)"
    _of_block = _taken_count = ""
    node_back = "walk.node_back"

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        self.lay = WarpgroupRows()
        self.keeps_edges = False
        self.walk_place = self.attribute_place + plan.attribute_reals(group)
        self.prelude = (HIDDEN, self.clears)
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
    def cost(self) -> int:
        """By times of blocks on an H200 (to 7%), not by instructions: warps wait for each other at products."""
        statements = {p: len(self.kernel.bodies[p].statements) for p in self.paths}
        features = sum(self.problem.in1[block].dim for block in self.group.in1)
        of_slice = 2 * (sum(statements.values()) + 4 * len(self.paths) + 15 * features + 70)
        return self.slices * of_slice + 3 * sum(statements[p] for p in self.lane_paths) + 1000

    # ---- the loop --------------------------------------------------------------------------------------------------

    def _group(self) -> list[str]:
        self._begin_group()
        self.put(
            "const int run_of_first = run_of(team, b.spans, num_out, first_edge);",
            "const Steps share = steps_of_warp(team, b.spans, num_out, run_of_first, first_edge, end_edge);",
        )
        self._show_matrix()
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
        chains = -(-len(self.paths) // HIDDEN_CHAIN)
        # Paths of a chain of sums: an even number.
        at, chain = position // 2 * 2, -(-len(self.paths) // (2 * chains)) * 2
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


# The functions of a path group of a value whose weights four warps form together, by ``wgmma``.
#
# Rows of products are 64 channels of a path, from the block's part of the matrix, 16 of each warp; columns are edges.
# So the four warps have the same edges of one receiver, whose hidden features and values they stage together: each has
# 8 of the 32 edges. A lane has channels and edges as by ``mma`` (see ``ChannelRows``). Weights of some paths
# are formed while lanes multiply those of the paths before. What undoes scales of hidden features and of the matrix
# goes into attributes.


@dataclass(frozen=True)
class WarpgroupChannelRows(ChannelRows):
    """As rows of channels, of which a warpgroup has 64.

    copies: how often it has the same ones, if a group has at most 32; then each copy takes tiles of its own.
    """

    copies: int = 1
    channels = 64

    @property
    def copy(self) -> str:
        return f"(threadIdx.x / {128 // self.copies} % {self.copies})"

    @property
    def first_channel(self) -> str:  # type: ignore[override]
        return f"16 * (threadIdx.x / 32 % {4 // self.copies}) + 2 * team.group"

    @property
    def edges(self) -> str:  # type: ignore[override]
        return f"2 * T / {self.copies}"

    @property
    def place(self) -> str:  # type: ignore[override]
        first = f" + {self.copy} * (8 * T / {self.copies})" if self.copies > 1 else ""
        return super().place + first

    @property
    def widths(self) -> set[int]:
        """Tiles of a step. Which edges a copy has depends on them: then there is one number."""
        return {self.tiles, -(-self.tiles // 2) if self.copies == 1 else self.tiles}

    def steps(self, call: str) -> list[str]:
        least, most = min(self.widths), self.tiles
        if least == most:
            return [f"for (; j < count; j += {8 * most}) {call.format(most)};"]
        if most < 4:
            return super().steps(call)
        return [f"if (count > 16) {call.format(4)};", f"else {call.format(2)};"]


class WarpgroupValues(ProductsInFlight):
    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        self.lay = WarpgroupChannelRows(plan.spec.schedule.tiles, copies=plan.copies(group))
        self.copies = plan.copies(group)
        if self.copies > 1:  # which all have sums of each row
            self.fetches, self.is_cut = f"fetch_path<{self.channels // self.copies}>", "true"
        self.is_ahead = plan.spec.schedule.ahead == "hidden"
        # Whether a step has all staged edges; then features are on their way while these are staged.
        self.has_all = plan.spec.schedule.tiles == 4
        self.buffers = plan.buffers
        self.prelude = (
            HIDDEN_OF.format(name="all_hidden", parts=self.buffers),
            "Real* const all_staged = stage;",
            *(["int turn = 0;"] if self.buffers > 1 else []),
            "const int octet = team.broadcast(threadIdx.x / 32, 0) % 4;  // of staged edges, the warp's",
            "int next_edge = edge_at(b, team, first_edge, end_edge), next_far = int(b.sender[next_edge]);",
            *(["const bool is_active = active;"] if self.has_all else []),
            *(["Real features[STEPS][4];", self._fetch("next_edge")] if self.is_ahead else []),
            *(self.operand.load(self._of_values("next_edge")) if self.is_ahead else []),
        )

    @property
    def widths(self) -> set[int]:
        assert isinstance(self.lay, WarpgroupChannelRows)
        return self.lay.widths

    @property
    def cost(self) -> int:
        """The work of an edge, measured in instructions (read from machine code); each group repeats some of it."""
        statements = sum(len(self.kernel.bodies[p].statements) for p in self.paths)
        return 4 * statements // self.copies + (2 * self.radial.spec.steps + 2) * len(self.paths) + 150

    @property
    def of_receiver(self) -> int:  # type: ignore[override]
        """Copies have steps of their own."""
        return 16 * self.copies

    def _load_matrix(self) -> None:
        """In two passes over memory, with the loads of as many paths in flight as registers have room for."""
        each, count = max(self.radial.paths_held, 1), len(self.paths)
        batches = [range(first, min(first + each, count)) for first in range(0, count, each)]
        for leaves in (False, True):
            if leaves:
                self._scale_matrix()
            for batch in batches:
                with self.scope(""):
                    self._fetch_paths(batch)
                    self._take_factors(batch)
                    if leaves:
                        self._leave_paths(batch)

    # ---- the staged edges ------------------------------------------------------------------------------------------

    def _stage_edges(self) -> None:
        """One edge a lane: its indices. Of the warp's 8 edges the hidden features and values, which take their scales.

        Indices of the edges behind these are loaded before they are used, and their rows are asked for or loaded too.
        By turns there are two places for what is staged, if they fit: then no warp waits for others that still read.
        """
        is_one = self.buffers == 1
        self.put(
            *([] if is_one else ["turn ^= 1;"]),
            f"unsigned short* const hidden = all_hidden{'' if is_one else ' + turn * HIDDEN_ROWS'};",
            f"Real* const stage = all_staged{'' if is_one else f' + turn * (STAGE * {self.operand.stride})'};",
            "const int count = min(STAGE, end - base), last = min(team.lane, count - 1);",
            "const int my_edge = team.broadcast(next_edge, last), my_far = team.broadcast(next_far, last);",
            "next_edge = edge_at(b, team, base + count, end_edge);",
            "const int staged = 8 * octet + team.lane % 8;",
            "unsigned hi[STEPS][2], lo[STEPS][2];",
            *([] if self.is_ahead else ["Real features[STEPS][4];", self._fetch("my_edge")]),
            *([] if self.is_ahead else self.operand.load(self._of_values("my_edge"))),
        )
        if self.has_all:
            self.put(f"constexpr int T = 4, EDGES = {self.lay.edges};", f"Row{self.number} rows[EDGES];")
            with self.scope("UNROLL for (int i = 0; i < EDGES; ++i)"):
                self.put("constexpr int j = 0;", f"const int far = team.broadcast(my_far, {self.lay.place});")
                self._load_features("far")
        if self.is_ahead:  # edges behind the last one may be another receiver's
            with self.scope("if (8 * octet + team.group >= count)"):
                self.put(
                    "UNROLL for (int s = 0; s < STEPS; ++s) UNROLL for (int k = 0; k < 4; ++k) features[s][k] = 0;"
                )
        self.put(
            "const Real back = split_hidden(features, hi, lo) * matrix_scale;",
            "const Real back_of_staged = __shfl_sync(0xffffffffu, back, 4 * team.lane, 32);",
            f"UNROLL for (int k = 0; k < {self.problem.dim_in2}; ++k)",
            "    y[k] = staged < count ? y[k] * back_of_staged : Real(0);",
        )
        stride = self.operand.stride
        attributes = self.operand.load(self._of_values("next_edge"))[-1]  # of the edge behind
        self.put(
            *self.operand.stage()[len(self.operand.load("my_edge")) : -1],
            *(["meet();  // all warps have read what was staged before"] if is_one else []),
            f"store<{self.kernel.widest}>(stage + staged * {stride}, values);  // four lanes write the same",
            "leave_octet(team, octet, hi, lo, hidden);",
            "show_to_tensor_cores();",
            "meet();",
            "next_far = int(b.sender[next_edge]);",
            *([self._fetch("next_edge"), attributes] if self.is_ahead else self._ask()),
        )

    def _fetch(self, edges: str) -> str:
        """Load hidden features of the warp's 8 of 32 edges."""
        edge = f"(long long)team.broadcast({edges}, 8 * octet + team.group)"
        return f"fetch_hidden(b.w + {edge} * HIDDEN, team, features);"

    @staticmethod
    def _of_values(edges: str) -> str:
        """The edge, of the warp's 8, whose values a lane stages."""
        return f"team.broadcast({edges}, 8 * octet + team.lane % 8)"

    def _ask(self) -> list[str]:
        """Have the L2 cache load hidden features and attributes of the edges behind."""
        return [
            "const long long edge_behind = team.broadcast(next_edge, 8 * octet + team.group);",
            "ask<1>(b.w + edge_behind * HIDDEN + min(32 * team.quad, HIDDEN - 4));",
            f"ask<1>(b.y + edge_behind * {self.problem.dim_in2});",
        ]

    def _given(self) -> str:
        return ", hidden" + ", rows" * self.has_all

    def _taken(self) -> str:
        return ", const unsigned short* const hidden" + f", Row{self.number} (&rows)[{8 // self.copies}]" * self.has_all

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _take_hidden(self) -> None:
        """Begin to form the first weights; features are loaded meanwhile."""
        self.begun = []
        self.put("const unsigned short* const columns = hidden + 16 * STEPS * j;")
        for position in range(min(self.at_once, len(self.paths))):
            self._begin_weights(position)

    def _find_edges(self) -> None:
        if not self.has_all:
            super()._find_edges()

    def _begin_weights(self, position: int) -> None:
        name = f"weights{position}"
        self.begun.append(name)
        place = f"team.slice + {position * self.radial.path_halves}"
        self.put(f"Real {name}[T][4];", f"begin_channel_weights<T>(columns, {place}, {name});")

    def _path_of_slice(self, position: int, p: int) -> None:
        self._wait_for(f"weights{position}", f"weights{position}")
        if position + self.at_once < len(self.paths):
            self._begin_weights(position + self.at_once)
        super()._path_of_slice(position, p)

    def _form_weights(self, position: int) -> None:
        if self.copies == 1:
            self.put(f"const Real (&w)[T][4] = weights{position};")
            return
        assert isinstance(self.lay, WarpgroupChannelRows)
        chosen = f"choose_tiles<{self.copies}>({self.lay.copy}, weights{position}, w);"
        self.put(f"Real w[T / {self.copies}][4];", chosen)

    @property
    def _weight(self) -> str:
        return self.lay.weight

    @property
    def _scales_features(self) -> bool:
        return False
