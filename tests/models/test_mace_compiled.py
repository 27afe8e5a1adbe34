"""``torch.compile`` of accelerated MACE models: energies, forces, stress and training, for graphs of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from ase import Atoms
from mace.tools.compile import prepare
from mace.tools.scripts_utils import extract_model
from mace_cases import assert_same, batch_of, default_dtype, gradients, imidazole, model_of
from model_cases import Results
from torch._dynamo.utils import counters

from autotune.models.accelerate import accelerate


def step(model: Any, batch: dict[str, torch.Tensor], given: torch.nn.Module) -> Results:
    """As MACE compiles models: it takes tensors that need gradients, and ``training`` to keep autograd's graph."""
    batch = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    for name in ("positions", "node_attrs"):
        batch[name] = batch[name].detach().requires_grad_()
    out = model(batch, training=True, compute_stress=True)
    found = {name: out[name] for name in ("energy", "forces", "stress", "node_feats")}
    loss = found["energy"].square().sum() + found["forces"].square().sum() + found["stress"].square().sum()
    return {name: value.detach() for name, value in (found | gradients(loss, given)).items()}


@pytest.mark.slow
def test_two_compilations_serve_all_sizes() -> None:
    """The first for the sizes at hand, as is torch's way, the second for any."""
    stock = model_of([1, 6, 7], max_ell=1, correlation=1, hidden="2x0e+2x1o")
    with default_dtype(torch.float64):
        fast = prepare(extract_model)(model=stock, map_location="cpu")
    assert str(accelerate(fast)).startswith("2 of 2 convolutions")
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    atoms = imidazole()
    slanted = Atoms(atoms.symbols, atoms.positions, cell=[[6.0, 0, 0], [2.0, 5.5, 0], [0.5, 1.0, 9.0]], pbc=True)
    for structure in (atoms, slanted.repeat(2), atoms[:7], slanted, atoms.repeat((1, 1, 3))):
        batch = batch_of(stock, structure)
        assert_same(step(compiled, batch, fast), step(stock, batch, stock))
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
