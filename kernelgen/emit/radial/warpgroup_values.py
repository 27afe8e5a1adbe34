"""The functions of a path group of a value whose weights four warps form together, by ``wgmma``.

Rows of products are 64 channels of a path, from the block's part of the matrix, 16 of each warp; columns are edges. So
the four warps have the same edges of one receiver, whose hidden features and values they stage together: each has 8 of
the 32 edges. A lane has channels and edges as by ``mma`` (see ``fragments.ChannelRows``). Weights of some paths are
formed while lanes multiply those of the paths before. What undoes scales of hidden features and of the matrix goes into
attributes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.emit.radial.fragments import ChannelRows
from kernelgen.emit.radial.warpgroup_calls import HIDDEN_OF, ProductsInFlight
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial_convolution import RadialPlan


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
    """The functions of one path group."""

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
        self.put("unsigned largest = 0;")
        for batch in batches:
            with self.scope(""):
                self._fetch_paths(batch)
                self._take_factors(batch)
        self._scale_matrix()
        for batch in batches:
            with self.scope(""):
                self._fetch_paths(batch)
                self._take_factors(batch)
                self._leave_paths(batch)
        self.put(*self.shows_matrix)

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
        self.put(
            *self.operand.stage()[len(self.operand.load("my_edge")) : -1],
            *(["meet();  // all warps have read what was staged before"] if is_one else []),
            f"store<{self.kernel.widest}>(stage + staged * {stride}, values);  // four lanes write the same",
            "leave_octet(team, octet, hi, lo, hidden);",
            "show_to_tensor_cores();",
            "meet();",
            "next_far = int(b.sender[next_edge]);",
            *([self._fetch("next_edge"), self._load_attributes()] if self.is_ahead else self._ask()),
        )

    def _fetch(self, edges: str) -> str:
        """Load hidden features of the warp's 8 of 32 edges."""
        edge = f"(long long)team.broadcast({edges}, 8 * octet + team.group)"
        return f"fetch_hidden(b.w + {edge} * HIDDEN, team, features);"

    @staticmethod
    def _of_values(edges: str) -> str:
        """The edge, of the warp's 8, whose values a lane stages."""
        return f"team.broadcast({edges}, 8 * octet + team.lane % 8)"

    def _load_attributes(self) -> str:
        """Attributes of that edge behind the staged ones."""
        return self.operand.load(self._of_values("next_edge"))[-1]

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
