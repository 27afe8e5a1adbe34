"""How products lie in a warp, as C++ text: what a lane has of them, and the calls of ``include/radial.cuh``.

A lane has two neighbouring channels of its edges: for a value of two edges in each tile of 8, for gradients of two of
16 edges. ``i`` is the number of a lane's edge, ``j`` the first edge of the step, ``c`` 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChannelRows:
    """Of a value: rows of products are 16 channels, columns are T tiles of 8 edges."""

    tiles: int
    # Whether hidden features of a step are loaded during the one before, to ``ahead``.
    is_ahead: bool = False
    channels = 16
    edges = "2 * T"
    far = "team.broadcast(my_far, place)"
    place = "j + i / 2 * 8 + 2 * team.quad + i % 2"
    first_channel = "2 * team.group"
    weight = "w[i / 2][i % 2 + 2 * c]"
    hidden = "unsigned hi[T][STEPS][2], lo[T][STEPS][2];"
    weights = "Real w[T][4];"

    def load_hidden(self) -> list[str]:
        """Hidden features of the step's edges, and scales of the lane's edges."""
        load = "load_hidden(b.w + edge * HIDDEN, team, hi[n], lo[n])"
        fetch: list[str] = []
        if self.is_ahead:
            load, fetch = "split_hidden(ahead, hi[n], lo[n])", [self._fetch("min(j + 8, STAGE - 8)")]
        return [
            "UNROLL for (int n = 0; n < T; ++n) {",
            *([] if self.is_ahead else ["    const long long edge = team.broadcast(my_edge, j + 8 * n + team.group);"]),
            f"    const Real back = {load} * matrix_scale;",
            "    UNROLL for (int i = 0; i < 2; ++i)",
            "        scale[2 * n + i] = __shfl_sync(0xffffffffu, back, 8 * team.quad + 4 * i, 32);",
            "}",
            *fetch,
        ]

    @staticmethod
    def _fetch(first: str) -> str:
        """Load to ``ahead`` from the staged edge ``first`` on."""
        edge = f"(long long)team.broadcast(my_edge, {first} + team.group)"
        return f"fetch_hidden(b.w + {edge} * HIDDEN, team, ahead);"

    def form(self, path: int) -> str:
        """Weights of the path whose part of the matrix begins at ``path``."""
        return f"form_weights<T>(here, {path}, hi, lo, w);"

    def steps(self, call: str) -> list[str]:
        """All steps of the staged edges; ``call`` has a place for T."""
        if self.is_ahead:
            return ["Real ahead[STEPS][4];", self._fetch("0"), f"for (; j < count; j += 8) {call.format(1)};"]
        if self.tiles == 1:
            return [f"for (; j < count; j += 8) {call.format(1)};"]
        return [f"for (; j + 8 < count; j += 16) {call.format(2)};", f"if (j < count) {call.format(1)};"]


@dataclass(frozen=True)
class EdgeRows:
    """Of gradients: rows of products are 16 edges, columns 8 channels; four lanes, a quad, have the same edges.

    Gradients of weights of two paths are the left operand of a product, those of four are summed in tensor cores.
    """

    channels = 8
    edges = "2"
    place = "j + team.group + 8 * i"
    edge, far = "team.broadcast(my_edge, {})", "team.broadcast(my_far, place)"
    matrix_scale = "matrix_scale"
    first_channel = "2 * team.quad"
    weight = "w[2 * i + c]"
    hidden = "unsigned hi[2][STEPS][2], lo[2][STEPS][2];"
    weights = "Real w[4];"
    halve = "split_gradients(gradient, gradient_scale"
    scale = "gradient_scale"

    def load_hidden(self) -> list[str]:
        return [
            "UNROLL for (int i = 0; i < 2; ++i) {",
            f"    const long long edge = {self.edge.format(self.place)};",
            f"    scale[i] = load_hidden(b.w + edge * HIDDEN, team, hi[i], lo[i]) * {self.matrix_scale};",
            "}",
        ]

    def form(self, path: int) -> str:
        return f"form_edge_weights(here, {path}, hi, lo, w);"

    def gradient(self, position: int) -> str:
        """The gradient of a lane's weight of a path, by the path's number in its group."""
        return f"gradient[{position % 2}][2 * i + c]"

    def to_hidden(self, position: int, count: int, path_halves: int) -> list[str]:
        """Statements after a path's gradients of weights. count: of the group's paths."""
        lines, is_last, pair = [], position + 1 == count, position // 2 % 2
        if position % 2 == 0 and is_last:
            lines.append("UNROLL for (int k = 0; k < 4; ++k) gradient[1][k] = Real(0);")
        if position % 2 or is_last:
            lines.append(f"{self.halve}, gradient_hi[{pair}], gradient_lo[{pair}]);")
        if position % 4 == 3 or is_last:
            how, first = f"{pair + 1}, {'true' if position % 2 else 'false'}", position // 4 * 4 * path_halves
            lines.append(f"add_to_hidden<{how}>(here, {first}, gradient_hi, gradient_lo, {self.scale}, of_h);")
        return lines

    def steps(self, call: str) -> list[str]:
        return [f"for (; j < count; j += 16) {call.format(1)};"]


@dataclass(frozen=True)
class ScaledEdgeRows(EdgeRows):
    """Of gradients with coupled cotangents: gradients of weights are small enough for halves as they are."""

    halve = "halve_gradients(gradient"
    scale = "hidden_scale"
