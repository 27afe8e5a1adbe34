"""``configs/models.toml`` names every convolution of the published models, each shape once a graph."""

from __future__ import annotations

import pytest

from autotune.workload.config import load_config
from kernelgen.problem.product import TensorProductProblem, shape_of

L2, L2_EVEN = "1x0e+1x1o+1x2e", "1x0e+1x1e+1x2e"
L3, L3_EVEN = f"{L2}+1x3o", f"{L2_EVEN}+1x3e"
OAM, SEVEN = "128x0e+64x1o+32x2e+32x3o", "128x0e+64x1e+32x2e+32x3e"
BOTH = "64x0e+64x0o+64x1e+64x1o+64x2e+64x2o"
# Inputs and kept irreps of each layer, as the packages print them.
LAYERS = {
    "mace-mp-0-small": [("128x0e", L3, L3)],
    "mace-mp-0-medium": [("128x0e", L3, L3), ("128x0e+128x1o", L3, L3)],
    "mace-mp-0-large": [("128x0e", L3, L3), ("128x0e+128x1o+128x2e", L3, L3)],
    "mace-off23-small": [("96x0e", L3, L3)],
    "mace-off23-large": [("192x0e", L3, L3), ("192x0e+192x1o+192x2e", L3, L3)],
    "nequip-oam-l": [("48x0e", L3, L3), (OAM, L3, L3), (OAM, L3, "0e")],
    "nequip-small": [
        ("64x0e", L2, L2),
        ("64x0e+64x1o+64x2e", L2, "0e+1o+1e+2o+2e"),
        ("64x0e+64x1e+64x1o+64x2e+64x2o", L2, "0o+0e+1o+1e+2o+2e"),
        (BOTH, L2, "0e"),
    ],
    "sevennet-0": [
        ("128x0e", L2_EVEN, L2_EVEN),
        ("128x0e+64x1e+32x2e", L2_EVEN, L2_EVEN),
        ("128x0e+64x1e+32x2e", L2_EVEN, "0e"),
    ],
    "sevennet-l3i5": [("128x0e", L3_EVEN, L3_EVEN), (SEVEN, L3_EVEN, L3_EVEN), (SEVEN, L3_EVEN, "0e")],
}


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("graph", ["water", "aspirin"])
def test_every_layer_of_a_model_is_tuned_for_a_liquid_and_a_molecule(model: str, graph: str) -> None:
    workloads = load_config("models", "cuda").workloads
    assert {workload.layout for workload in workloads} == {"mul_ir"}
    tuned = {shape_of(workload.problem.key) for workload in workloads if workload.graph.name == graph}
    for layer in LAYERS[model]:
        assert shape_of(TensorProductProblem.channelwise(*layer).key) in tuned, layer


def test_no_shape_is_tuned_twice_on_one_graph() -> None:
    workloads = load_config("models", "cuda").workloads
    pairs = [(shape_of(workload.problem.key), workload.graph.name) for workload in workloads]
    assert len(set(pairs)) == len(pairs)
