"""How products lie in a warp, as C++ text: what a lane has of them, and the calls of ``include/radial.cuh``.

A lane has two neighbouring channels of its edges: with rows of channels, of two edges in each tile of 8; with rows of
edges, of two of 16 edges. ``lanes`` of them, ``apart`` from each other, have the same edges. ``i`` is the number of a
lane's edge, ``j`` the first edge of the step, ``c`` 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChannelRows:
    """Rows of products are 16 channels, columns are T tiles of 8 edges."""

    tiles: int
    channels = 16
    edges = "2 * T"
    place = "j + i / 2 * 8 + 2 * team.quad + i % 2"
    first_channel = "2 * team.group"
    weight = "w[i / 2][i % 2 + 2 * c]"
    lanes, apart = 8, 4
    declared = {
        "hidden": "unsigned hi[T][STEPS][2], lo[T][STEPS][2];",
        "of_h": "Real of_h[T][STEPS][4] = {};",
        "w": "Real w[T][4];",
    }

    def load_hidden(self) -> list[str]:
        """Hidden features of the step's edges, and scales of the lane's edges."""
        return [
            "UNROLL for (int n = 0; n < T; ++n) {",
            "    const long long edge = team.broadcast(my_edge, j + 8 * n + team.group);",
            "    const Real back = load_hidden(b.w + edge * HIDDEN, team, hi[n], lo[n]) * matrix_scale;",
            "    UNROLL for (int i = 0; i < 2; ++i)",
            "        scale[2 * n + i] = __shfl_sync(0xffffffffu, back, 8 * team.quad + 4 * i, 32);",
            "}",
        ]

    def form(self, path: int) -> str:
        """Weights of the path whose part of the matrix begins at ``path``."""
        return f"form_weights<T>(here, {path}, hi, lo, w);"

    def begin_gradient(self, position: int) -> list[str]:
        """Statements before a path's gradients of weights, by the path's number in its group."""
        return ["Real gradient[T][4];"]

    def gradient(self, position: int) -> str:
        """The gradient of a lane's weight."""
        return "gradient[i / 2][i % 2 + 2 * c]"

    def to_hidden(self, position: int, count: int, path_halves: int) -> list[str]:
        """Statements after them. count: of the group's paths."""
        return [f"add_to_hidden<T>(here, {position * path_halves}, gradient, of_h);"]

    def put_hidden(self, row: str) -> str:
        """Add the gradient of an edge's hidden features."""
        return f"put_hidden<Add>({row}, team, i % 2, of_h[i / 2], matrix_scale);"

    def steps(self, call: str) -> list[str]:
        """All steps of the staged edges; ``call`` has a place for T."""
        if self.tiles == 1:
            return [f"for (; j < count; j += 8) {call.format(1)};"]
        return [f"for (; j + 8 < count; j += 16) {call.format(2)};", f"if (j < count) {call.format(1)};"]


@dataclass(frozen=True)
class EdgeRows:
    """Rows of products are 16 edges, columns 8 channels; gradients of weights of two paths are multiplied together."""

    channels = 8
    edges = "2"
    place = "j + team.group + 8 * i"
    first_channel = "2 * team.quad"
    weight = "w[2 * i + c]"
    lanes, apart = 4, 1
    declared = {
        "hidden": "unsigned hi[2][STEPS][2], lo[2][STEPS][2];",
        "of_h": "Real of_h[2][STEPS][4] = {}, gradient[2][4];",
        "w": "Real w[4];",
    }

    def load_hidden(self) -> list[str]:
        return [
            "UNROLL for (int i = 0; i < 2; ++i) {",
            f"    const long long edge = team.broadcast(my_edge, {self.place});",
            "    scale[i] = load_hidden(b.w + edge * HIDDEN, team, hi[i], lo[i]) * matrix_scale;",
            "}",
        ]

    def form(self, path: int) -> str:
        return f"form_edge_weights(here, {path}, hi, lo, w);"

    def begin_gradient(self, position: int) -> list[str]:
        return []

    def gradient(self, position: int) -> str:
        return f"gradient[{position % 2}][2 * i + c]"

    def to_hidden(self, position: int, count: int, path_halves: int) -> list[str]:
        if position % 2:
            return [f"add_edges_to_hidden(here, {(position - 1) * path_halves}, {path_halves}, gradient, of_h);"]
        if position + 1 < count:
            return []
        clear = "UNROLL for (int k = 0; k < 4; ++k) gradient[1][k] = Real(0);"
        return [clear, f"add_edges_to_hidden(here, {position * path_halves}, 0, gradient, of_h);"]

    def put_hidden(self, row: str) -> str:
        return f"put_edge_hidden<Add>({row}, team, of_h[i], matrix_scale);"

    def steps(self, call: str) -> list[str]:
        return [f"for (; j < count; j += 16) {call.format(1)};"]
