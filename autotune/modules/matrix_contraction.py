"""Contract shared weights by torch's matrix product.

If every path is of mode ``uvw`` and all edges share one row of weights, the weights are matrices common to all edges.
An edge-by-edge kernel reads all of them for each edge. Here a kernel forms only the *pairs* of copies (the product of
mode ``uvuv``), and torch multiplies them by the weights:

    z[e, m, (u, v)] = sum over m1, m2 of C[m1, m2, m] x[e, u, m1] y[e, v, m2]
    out[e, m, w]    = sum over paths and (u, v) of z[e, m, (u, v)] W[(u, v), w]

The matrix product runs on tensor cores if torch allows it, with torch's accuracy
(``torch.backends.cuda.matmul.fp32_precision``). It needs memory for z, as e3nn does. The kernel writes each pair at
once and keeps none.
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.modules.base import TunedModule
from autotune.workload.tensors import relayout
from autotune.workload.workload import LAYOUTS
from kernelgen.compat import o3
from kernelgen.errors import InputError, ProblemError, ScheduleError
from kernelgen.ops.edge_networks import full_product
from kernelgen.problem.product import TensorProductProblem

CONTRACTIONS = ("auto", "edge", "matrix")
# From this number of weights "auto" uses the matrix product. On two cores of a Xeon (float32, forward and backward) it
# is as fast as edge by edge at 8192 weights, 2.3 times as fast at 327680. On a GPU: an estimate, each row reads 128 kB
# from L2.
MATRIX_WEIGHTS = 1 << 15


def by_matrix(problem: TensorProductProblem, contraction: str) -> bool:
    """Whether to use the matrix product; ProblemError for a contraction unknown or undefined for the problem."""
    if contraction not in CONTRACTIONS:
        raise ProblemError(f"contraction is {contraction!r}; expected one of {CONTRACTIONS}")
    able = _is_matrices(problem)
    if contraction == "matrix" and not able:
        raise ProblemError("contraction='matrix' needs shared weights and mode uvw alone; take 'auto' or 'edge'")
    if contraction != "auto":
        return contraction == "matrix"
    return able and problem.weight_numel >= MATRIX_WEIGHTS


def _is_matrices(problem: TensorProductProblem) -> bool:
    paths = problem.paths
    return problem.shared_weights and bool(paths) and all(path.mode == "uvw" and path.has_weight for path in paths)


def pairs_of(problem: TensorProductProblem) -> TensorProductProblem:
    """The unweighted product that forms the pairs of every path, one block per path, with the path's coefficient."""
    blocks, instructions = [], []
    for number, path in enumerate(problem.paths):
        mul1, mul2, _ = problem.muls(path)
        blocks.append((mul1 * mul2, o3.Irreps(problem.irreps_out)[path.out].ir))
        # Without normalisation a path's coefficient is the square root of e3nn's path weight.
        instructions.append((path.in1, path.in2, number, "uvuv", False, path.coefficient**2))
    return TensorProductProblem.from_instructions(
        *(problem.irreps_in1, problem.irreps_in2, o3.Irreps(blocks), instructions),
        shared_weights=True,
        irrep_normalization="none",
        path_normalization="none",
    )


class MatrixContraction(TunedModule):
    """Called like an operator: x [edges, dim_in1], y [edges, dim_in2], w [weight_numel] -> [edges, dim_out].

    Its ``problem`` is that of the pairs. layout: of x and of the result.
    """

    operation = "plain"

    def __init__(self, whole: TensorProductProblem, *, layout: str, **options: Any) -> None:
        if layout not in LAYOUTS:
            raise ScheduleError(f"layout is {layout!r}; expected one of {LAYOUTS}")
        super().__init__(pairs_of(whole), layout="ir_mul", **options)
        self._outer_layout = layout
        self._irreps = whole.irreps_in1, whole.irreps_out
        # For each path: its output block, the shape of its matrix (pairs, copies), and its components.
        self._paths = [
            (path.out, (mul1 * mul2, mul3), whole.out[path.out].dim)
            for path in whole.paths
            for mul1, mul2, mul3 in [whole.muls(path)]
        ]
        self._out_dims = [block.mul * block.dim for block in whole.out]

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if w.dtype != x.dtype or w.device != x.device:
            raise InputError(f"weights are {w.dtype} on {w.device} and x is {x.dtype} on {x.device}; expected the same")
        irreps_in1, irreps_out = self._irreps
        x = relayout(x, irreps_in1, self._outer_layout, "ir_mul")
        z = self._operator_of(x, x.shape[0], x.shape[0])(x, y, w[:0])
        found: list[torch.Tensor | None] = [None] * len(self._out_dims)
        parts = z.split([dim * pairs for _, (pairs, _), dim in self._paths], 1)
        matrices = w.split([pairs * copies for _, (pairs, copies), _ in self._paths])
        for part, matrix, (out, shape, dim) in zip(parts, matrices, self._paths, strict=True):
            values = full_product(part.reshape(z.shape[0], dim, shape[0]), matrix.reshape(shape))
            before = found[out]
            found[out] = values if before is None else before + values
        rows = [
            z.new_zeros(z.shape[0], dim) if values is None else values.reshape(z.shape[0], dim)
            for dim, values in zip(self._out_dims, found, strict=True)
        ]
        return relayout(torch.cat(rows, 1), irreps_out, "ir_mul", self._outer_layout)
