"""SevenNet models whose steps are captured: on the CPU the same padded steps, on a GPU one launch each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="SevenNet is not installed")

import captured_cases as cases
import sevenn._keys as KEY
from ase import Atoms
from model_cases import imidazole
from sevenn.calculator import SevenNetCalculator as Stock
from sevennet_cases import CASE

from autotune import accelerate, capture
from autotune.integrations.sevennet import SevenNetCalculator
from kernelgen.errors import UnsupportedError


def predict(model: Any, *structures: Atoms) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    batch = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in CASE.batch(model, *structures).items()
    }
    return {name: value.detach() for name, value in CASE.predict(model, batch).items()}


SMALL = {KEY.NUM_CONVOLUTION: 2, KEY.IRREPS_MANUAL: ["8x0e", "8x0e+4x1e", "8x0e"], KEY.LMAX: 1}


def accelerated(dtype: torch.dtype = torch.float64) -> Any:
    model = CASE.build(imidazole(), dtype, **SMALL).eval()
    accelerate(model)
    return model


def test_padded_steps_are_equal_to_unpadded_ones() -> None:
    cases.check_padded_equals_unpadded(accelerated(), predict, cases.steps_of_size())


def test_structures_without_batches_and_atomic_virials() -> None:
    model = accelerated()
    model.set_is_batch_data(False)
    model.force_output.use_atomic_virial = True
    captured = capture(model)
    for atoms in (imidazole(), cases.slanted(), Atoms(imidazole().symbols, imidazole().positions)):
        batch = CASE.batch(model, atoms)
        batch["cell_volume"] = batch["cell_volume"][0]
        wanted, found = model(dict(batch)), captured(dict(batch))
        names = (
            "inferred_total_energy",
            "inferred_force",
            "inferred_stress",
            "inferred_atomic_virial",
            "atomic_energy",
        )
        cases.assert_close({name: found[name] for name in names}, {name: wanted[name].detach() for name in names})
    assert captured.replays == 3


def test_changed_graphs_are_never_served_stale() -> None:
    cases.check_no_graph_is_stale(accelerated(), predict)


def test_few_sizes_are_kept() -> None:
    cases.check_few_sizes_are_kept(accelerated(), predict)


def test_changes_of_the_model_are_seen() -> None:
    cases.check_changes_of_the_model_are_seen(accelerated(), predict)


def test_what_is_not_captured() -> None:
    model = accelerated().train()
    captured = capture(model)
    assert predict(captured, imidazole())["forces"].shape == (9, 3)
    assert (captured.eager_calls, captured.captures) == (1, 0)
    model.modal_map = {"mpa": 0}
    with pytest.raises(UnsupportedError, match="modal_map"):
        capture(model)
    model.modal_map = None
    model.delete_module_by_key("force_output")
    with pytest.raises(UnsupportedError, match="ends in Rescale and AtomReduce"):
        capture(model)


def test_the_calculators_dynamics_are_stocks() -> None:
    model = CASE.build(imidazole(), torch.float32, **SMALL)
    eager = Stock(copy.deepcopy(model), file_type="model_instance", device="cpu")
    fast = SevenNetCalculator(model, file_type="model_instance", device="cpu", capture=True)
    assert fast.acceleration.replaced > 0
    cases.check_dynamics(fast, eager, [fast.model], steps=50, tolerance=1e-3)
    assert "energies" in fast.results


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_replays_on_the_gpu(dtype: torch.dtype) -> None:
    cases.check_on_the_gpu(accelerated(dtype), predict, 1e-12 if dtype is torch.float64 else 1e-5)
