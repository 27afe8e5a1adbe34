"""What only captured models of NequIP and Allegro have: inputs of other names, no cell. See ``test_captured.py``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("nequip", reason="NequIP is not installed")

import captured_cases as cases
from ase import Atoms
from model_cases import imidazole, needs

from autotune.models.capture import capture
from autotune.models.package import default_dtype
from kernelgen.errors import UnsupportedError

NEQUIP = cases.PACKAGES["nequip"]


@pytest.mark.parametrize("name", ["nequip", pytest.param("allegro", marks=needs("allegro"))])
def test_inputs_of_other_names_are_left_to_the_model(name: str) -> None:
    """A model takes the vectors of edges, or inputs that it declares, and a captured step passes on neither."""
    package = cases.PACKAGES[name]
    model = package.model()
    captured, batch = capture(model), package.inputs(model, imidazole())
    model.model_input_fields.append("field")
    package.call(captured, {**batch, "field": torch.ones(1)})
    assert (captured.eager_calls, captured.captures) == (1, 0)
    vectors = batch["pos"].new_ones(batch["edge_index"].shape[1], 3)
    molecule = {name: value for name, value in batch.items() if name not in ("cell", "edge_cell_shift", "pbc")}
    with default_dtype(torch.float64):
        assert "edge_forces" in captured({**molecule, "edge_vectors": vectors})
    assert captured.eager_calls == 2


def test_molecules_without_a_cell() -> None:
    model = NEQUIP.model()
    captured = capture(model)
    batch = NEQUIP.inputs(model, Atoms(imidazole().symbols, imidazole().positions))
    for name in ("cell", "edge_cell_shift", "pbc"):
        batch.pop(name, None)
    with default_dtype(torch.float64):
        wanted, found = model(dict(batch)), captured(dict(batch))
    assert captured.replays == 1
    assert wanted["stress"].numel() == found["stress"].numel() == 0
    names = ("total_energy", "forces", "atomic_energy", "virial")
    cases.assert_close({name: found[name] for name in names}, {name: wanted[name].detach() for name in names})
    assert torch.equal(found["edge_index"], wanted["edge_index"])


def test_a_model_that_compiles_itself_is_refused() -> None:
    model = NEQUIP.model()
    model.is_compile_graph_model = True
    with pytest.raises(UnsupportedError, match="compiles itself"):
        capture(model)
