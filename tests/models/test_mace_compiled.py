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

from autotune.bench.contenders import build
from autotune.bench.session import errors_of, values_of
from autotune.models.accelerate import accelerate
from autotune.models.whole_model import WholeModel, package_of


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


@pytest.mark.slow
def test_stock_compiled_as_maces_calculator_does_it_gives_stocks_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contender of rows of models; without inductor, which takes minutes."""
    in_place = torch.nn.Module.compile
    without = lambda model, mode, fullgraph: in_place(model, backend="aot_eager", fullgraph=fullgraph)  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "compile", without)
    model = model_of([1, 6, 7], max_ell=1, correlation=1, hidden="2x0e+2x1o")
    stock = WholeModel("small", model, package_of(model))
    compiled, _ = build("stock-compiled", stock)
    inputs = stock.inputs([Atoms(imidazole().symbols, imidazole().positions, cell=[9.0, 8.0, 9.0], pbc=True)])
    for which in ("energy_forces_stress", "training"):
        exact = values_of(stock, inputs, which, {}, True)
        errors, compared = errors_of(values_of(compiled, inputs, which, {}, True), exact)
        assert max(errors.values()) < 1e-10
    assert compiled.calculator(compiled.module).use_compile and not stock.calculator(stock.module).use_compile
