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


def inputs(model: Any, *structures: Atoms) -> dict[str, Any]:
    device = next(model.parameters()).device
    batch = CASE.batch(model, *structures)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def call(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in CASE.predict(model, batch).items()}


def predict(model: Any, *structures: Atoms) -> dict[str, torch.Tensor]:
    return call(model, inputs(model, *structures))


SMALL = {KEY.NUM_CONVOLUTION: 2, KEY.IRREPS_MANUAL: ["8x0e", "8x0e+4x1e", "8x0e"], KEY.LMAX: 1}


def accelerated(dtype: torch.dtype = torch.float64) -> Any:
    model = CASE.build(imidazole(), dtype, **SMALL).eval()
    accelerate(model)
    return model


def test_padded_steps_are_equal_to_unpadded_ones() -> None:
    cases.check_padded_equals_unpadded(accelerated(), predict, cases.steps_of_size())


@pytest.mark.parametrize("device", cases.DEVICES)
def test_failed_and_interrupted_calls_leave_nothing(device: str) -> None:
    cases.check_failed_calls_leave_nothing(accelerated().to(device), inputs, call, may_be_short="x")


@pytest.mark.parametrize("device", cases.DEVICES)
def test_wrong_inputs_are_as_the_models(device: str) -> None:
    cases.check_wrong_inputs_are_as_the_models(accelerated().to(device), inputs, call)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_models_with_a_forward_of_their_own_are_refused(device: str) -> None:
    model = accelerated().to(device)
    cases.check_own_methods_are_refused(model, inputs, call)
    model.__class__ = type("Prepared", (type(model),), {"_preprocess": lambda self, data: data})
    with pytest.raises(UnsupportedError, match="Prepared has a _preprocess of its own"):
        capture(model)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_inputs_and_results_that_a_step_would_lose(device: str) -> None:
    model = accelerated().to(device)
    cases.check_lost_inputs_and_results_are_refused(model, model[-3], inputs, call)


def test_features_and_options() -> None:
    """The model's ``x`` is not what was given as ``x``; an option that the model does not have is its error."""
    model = accelerated()
    captured, batch = capture(model), CASE.batch(model, imidazole())
    found = captured(dict(batch))
    assert "x" in batch and not {"x", "node_attr"} & found.keys()
    with pytest.raises(TypeError):
        captured(dict(batch), compute_stress=True)


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
