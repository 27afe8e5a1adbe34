"""Converts an ``e3nn.o3.TensorProduct`` to the TensorProductProblem that it solves."""

from __future__ import annotations

import itertools

from kernelgen.e3nn_import import o3
from kernelgen.problem.tensor_product import NORMALIZATIONS, TensorProductProblem

# Path weights within this relative difference are equal.
_SAME = 1e-9


def problem_of(module: o3.TensorProduct) -> TensorProductProblem:
    """The problem that an e3nn product solves; UnsupportedError if no kernel can be generated for it.

    e3nn keeps only the normalised coefficients. Because tuned schedules are stored by normalisation, this tries which
    one gives these coefficients. If none does (variances, path weights), the problem has no normalisation, and the
    squared coefficients as path weights.
    """
    irreps = (str(module.irreps_in1), str(module.irreps_in2), str(module.irreps_out))
    coefficients = [i.path_weight for i in module.instructions]

    def problem(weights: list[float], irrep: str, path: str) -> TensorProductProblem:
        paths = [
            (i.i_in1, i.i_in2, i.i_out, i.connection_mode, i.has_weight, weight)
            for i, weight in zip(module.instructions, weights, strict=True)
        ]
        return TensorProductProblem.from_instructions(
            *(*irreps, paths),
            shared_weights=module.shared_weights,
            irrep_normalization=irrep,
            path_normalization=path,
        )

    for normalization in itertools.product(NORMALIZATIONS["irrep"], NORMALIZATIONS["path"]):
        candidate = problem([1.0] * len(coefficients), *normalization)
        found = [i.path_weight for i in candidate.reference(compile_left_right=False, compile_right=False).instructions]
        if all(abs(a - b) <= _SAME * abs(b) for a, b in zip(found, coefficients, strict=True)):
            return candidate
    return problem([c * c for c in coefficients], "none", "none")
