"""The estimate of a thread's registers, counted by hand: sums, operands and edge rows of the widest group."""

from __future__ import annotations

from typing import Any

import pytest

from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import cuda_facts
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.product.channelwise import registers_of
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem

# Beside what is counted.
OTHERS = 24


@pytest.mark.parametrize(
    ("direction", "options", "counted"),
    [
        # Sums of 1 + 3 components; of an edge a weight of each of 2 paths and x's component; y's 4.
        ("forward", {}, 4 + 2 + 1 + 4),
        ("forward", {"channels_per_thread": 2}, 2 * (4 + 2 + 1) + 4),
        # The next edge's operands too.
        ("forward", {"prefetch": "copy"}, 4 + 2 * (2 + 1) + 4),
        # Weights or y's row in shared memory.
        ("forward", {"prefetch": "ring2"}, 4 + 1 + 4),
        ("forward", {"edge_operand": "shared"}, 4 + 2 + 1),
        # The path to 0e alone, or that to 1o alone.
        ("forward", {"path_groups": 2}, 3 + 1 + 1 + 4),
        # x's sum and component at the edge's far end, g's components at its near end; y's row and its sums.
        ("backward", {}, 1 + 4 + 2 + 1 + 4 + 4),
        ("backward", {"shared_weights": True}, 1 + 4 + 2 + 1 + 4 + 4 + 2),
        # At the sender x is near and g is far.
        ("backward", {"order": "sender", "prefetch": "copy"}, 1 + 1 + 2 * (2 + 4) + 4 + 4),
        # With tangents of x, y and w, and a sum for g.
        ("double_backward", {}, (1 + 4) + 4 + 2 * 2 + 2 * 1 + 4 + 2 * 4),
    ],
)
def test_registers_are_counted_by_hand(direction: str, options: dict[str, Any], counted: int) -> None:
    shared = options.get("shared_weights", False)
    knobs = {name: value for name, value in options.items() if name != "shared_weights"}
    problem = TensorProductProblem.channelwise("64x0e", "0e+1o", "0e+1o", shared_weights=shared)
    schedule = CudaSchedule(**{"path_groups": 1, "prefetch": "none", "edge_operand": "inline", **knobs})
    for dtype, size in (("float32", 1), ("float64", 2)):
        spec = Spec(problem, DIRECTIONS[direction], schedule, "conv", dtype, "ir_mul", "int64", cuda_facts("sm_90"))
        assert registers_of(make_plan(spec)) == size * counted + OTHERS
