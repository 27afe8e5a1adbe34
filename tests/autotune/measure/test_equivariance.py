"""The equivariance error: small for sound kernels of every kind and layout, large for what breaks it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from e3nn import o3

from autotune.measure.kinds import measured_kind, order_of
from autotune.measure.trial import equivariance_error, random_rotation, turned
from autotune.workload.config import load_graphs
from autotune.workload.workload import Workload, relayout
from kernelgen.problem.other_kinds import HarmonicsProblem, VectorProblem
from kernelgen.problem.product import TensorProductProblem

PRODUCT = TensorProductProblem.channelwise("4x0e+4x1o+4x1e", "0e+1o+2e", "0e+1o+1e+2e")
# As published problems are that count degrees and no parities.
EVEN = TensorProductProblem.channelwise("4x0e+4x1e", "0e+1e+2e", "0e+1e+2e")
HARMONICS = HarmonicsProblem((0, 1, 2), "component", True)
GRAPH = load_graphs()["carbon-small"]
CASES = [
    ("conv", PRODUCT, "mul_ir", ("forward", "backward", "double_backward")),
    ("plain", PRODUCT, "ir_mul", ("forward", "joint_backward")),
    ("harmonics", HARMONICS, "mul_ir", ("forward", "backward", "double_backward")),
    ("vectors", VectorProblem(PRODUCT, HARMONICS), "ir_mul", ("forward", "backward", "edge_backward")),
    ("vectors", VectorProblem(EVEN, HARMONICS), "mul_ir", ("forward", "backward", "edge_backward")),
]


def error_of(operation: str, problem: Any, layout: str, direction: str, spoil: bool = False) -> float:
    workload = Workload("tiny", problem, operation, GRAPH, dtype="float64", layout=layout)
    kind = measured_kind(operation)
    tensors = kind.tensors(workload, "cpu")
    operator, order = kind.build(workload, {}, "cpu"), order_of(tensors)

    def run(given: Any) -> dict[str, torch.Tensor]:
        outputs = kind.run(operator, direction, given, order, poison=False)()
        if spoil:
            next(iter(outputs.values()))[:, -1] *= 1.5
        return outputs

    return equivariance_error(workload, tensors, run)


@pytest.mark.parametrize(("operation", "problem", "layout", "directions"), CASES)
def test_kernels_are_equivariant(operation: str, problem: Any, layout: str, directions: tuple[str, ...]) -> None:
    for direction in directions:
        assert error_of(operation, problem, layout, direction) < 1e-12, direction
    assert error_of(operation, problem, layout, directions[0], spoil=True) > 1e-2


def test_the_rotation_inverts() -> None:
    rotation = random_rotation(3)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.tensor(-1.0, dtype=torch.float64))


def test_rows_turn_as_e3nn_turns_them() -> None:
    irreps, rotation = "3x0o+2x1o+4x2e", random_rotation()
    rows = torch.randn(5, o3.Irreps(irreps).dim, dtype=torch.float64)
    expected = rows @ o3.Irreps(irreps).D_from_matrix(rotation).T  # through float32
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(turned(rows, irreps, "mul_ir", rotation), expected)
    rows, expected = (relayout(each, irreps, "mul_ir", "ir_mul") for each in (rows, expected))
    close(turned(rows, irreps, "ir_mul", rotation), expected)
