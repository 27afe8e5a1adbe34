"""What a warp stages in shared memory for gradients with coupled cotangents: a receiver's, and attributes of edges.

Coupled cotangents (see ``include/coupled.cuh``) are computed once for a receiver, from couplings that are numbers
here. They and the y of an edge are scaled below 2^15 by powers of two, also for paths that lanes multiply.
"""

from __future__ import annotations

import math

from kernelgen.emit.cuda.edge_operand import EdgeOperand
from kernelgen.emit.radial.path_group import RadialGroup
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial_convolution import RadialPlan
from kernelgen.problem.radial_convolution import PRODUCTS
from kernelgen.terms.clebsch_gordan import coupled_rows


class CoupledWalk(RadialGroup):
    """What :class:`kernelgen.emit.radial.coupled.CoupledGroup` finds in shared memory."""

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

    # The back of the scale of a receiver's cotangents.
    node_back = "node_back"

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
        values = ", ".join(_sum_of(terms, f"g{path.out}") for terms in rows)
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


def _sum_of(terms: list[tuple[int, float]], name: str) -> str:
    """``Real(0.5) * g1[0] + Real(-0.2) * g1[2]``."""
    return " + ".join(f"Real({factor!r}) * {name}[{component}]" for component, factor in terms) or "Real(0)"
