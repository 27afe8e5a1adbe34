"""NequIP and Allegro models whose steps are captured: on the CPU the same padded steps, on a GPU one launch each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("nequip", reason="NequIP is not installed")

import captured_cases as cases
from ase import Atoms
from model_cases import imidazole, symbols_in
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.integrations.ase import NequIPCalculator
from nequip_cases import CASE, CUTOFF

from autotune import accelerate, capture
from autotune.models.packages.base import default_dtype
from kernelgen.errors import UnsupportedError


def predict(model: Any, *structures: Atoms) -> dict[str, torch.Tensor]:
    return call(model, batch_of(model, *structures))


def call(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    given = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
    return {name: value.detach() for name, value in CASE.predict(model, given).items()}


def batch_of(model: Any, *structures: Atoms) -> dict[str, Any]:
    symbols = symbols_in(imidazole())
    steps = (ChemicalSpeciesToAtomTypeMapper(symbols), NeighborListTransform(r_max=CUTOFF))
    device = next(model.parameters()).device
    with default_dtype(torch.float64):
        from nequip.data import AtomicDataDict, from_ase

        frames = [from_ase(atoms) for atoms in structures]
        for step in steps:
            frames = [step(frame) for frame in frames]
        batch = frames[0] if len(frames) == 1 else AtomicDataDict.batched_from_list(frames)
        return AtomicDataDict.to_(batch, device)


def accelerated(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    model = CASE.build(imidazole(), dtype, num_layers=2).eval()
    accelerate(model)
    return model


def of_package(name: str) -> torch.nn.Module:
    """NequIP's or Allegro's."""
    if name == "nequip":
        return accelerated()
    pytest.importorskip("allegro", reason="Allegro is not installed")
    import allegro_cases

    model = allegro_cases.CASE.build(imidazole()).eval()
    accelerate(model)
    return model


of_both = pytest.mark.parametrize("name", ["nequip", "allegro"])


@of_both
@pytest.mark.parametrize("device", cases.DEVICES)
def test_failed_and_interrupted_calls_leave_nothing(name: str, device: str) -> None:
    cases.check_failed_calls_leave_nothing(of_package(name).to(device), batch_of, call, may_be_short="cell")


@of_both
@pytest.mark.parametrize("device", cases.DEVICES)
def test_wrong_inputs_are_as_the_models(name: str, device: str) -> None:
    cases.check_wrong_inputs_are_as_the_models(of_package(name).to(device), batch_of, call)


@of_both
@pytest.mark.parametrize("device", cases.DEVICES)
def test_models_with_a_forward_of_their_own_are_refused(name: str, device: str) -> None:
    cases.check_own_methods_are_refused(of_package(name).to(device), batch_of, call)


@of_both
@pytest.mark.parametrize("device", cases.DEVICES)
def test_results_that_a_step_would_lose(name: str, device: str) -> None:
    model: Any = of_package(name).to(device)
    model.model.register_forward_hook(lambda _, given, out: {**out, "dipole": out["forces"].sum(0)})
    with pytest.raises(UnsupportedError, match="the model gives dipole"):
        call(capture(model), batch_of(model, imidazole()))


@of_both
def test_inputs_of_other_names_are_left_to_the_model(name: str) -> None:
    """A model takes the vectors of edges, or inputs that it declares, and a captured step passes on neither."""
    model: Any = of_package(name)
    captured, batch = capture(model), batch_of(model, imidazole())
    model.model_input_fields.append("field")
    call(captured, {**batch, "field": torch.ones(1)})
    assert (captured.eager_calls, captured.captures) == (1, 0)
    vectors = batch["pos"].new_ones(batch["edge_index"].shape[1], 3)
    molecule = {name: value for name, value in batch.items() if name not in ("cell", "edge_cell_shift", "pbc")}
    with default_dtype(torch.float64):
        assert "edge_forces" in captured({**molecule, "edge_vectors": vectors})
    assert captured.eager_calls == 2


def test_padded_steps_are_equal_to_unpadded_ones() -> None:
    cases.check_padded_equals_unpadded(accelerated(), predict, cases.steps_of_size())


def test_allegro() -> None:
    cases.check_padded_equals_unpadded(of_package("allegro"), predict, cases.steps_of_size())


def test_molecules_without_a_cell() -> None:
    model = accelerated()
    captured = capture(model)
    batch = batch_of(model, Atoms(imidazole().symbols, imidazole().positions))
    for name in ("cell", "edge_cell_shift", "pbc"):
        batch.pop(name, None)
    with default_dtype(torch.float64):
        wanted, found = model(dict(batch)), captured(dict(batch))
    assert captured.replays == 1
    assert wanted["stress"].numel() == found["stress"].numel() == 0
    names = ("total_energy", "forces", "atomic_energy", "virial")
    cases.assert_close({name: found[name] for name in names}, {name: wanted[name].detach() for name in names})
    assert torch.equal(found["edge_index"], wanted["edge_index"])


def test_changed_graphs_are_never_served_stale() -> None:
    cases.check_no_graph_is_stale(accelerated(), predict)


def test_few_sizes_are_kept() -> None:
    cases.check_few_sizes_are_kept(accelerated(), predict)


def test_changes_of_the_model_are_seen() -> None:
    cases.check_changes_of_the_model_are_seen(accelerated(), predict)


def test_training_is_left_to_the_model_and_other_models_are_refused() -> None:
    model = accelerated().train()
    captured = capture(model)
    assert predict(captured, imidazole())["forces"].shape == (9, 3)
    assert (captured.eager_calls, captured.captures) == (1, 0)
    model.is_compile_graph_model = True
    with pytest.raises(UnsupportedError, match="compiles itself"):
        capture(model)


def test_the_calculators_dynamics_are_stocks() -> None:
    symbols = symbols_in(imidazole())
    steps = [ChemicalSpeciesToAtomTypeMapper(symbols), NeighborListTransform(r_max=CUTOFF)]
    eager, fast = (
        NequIPCalculator(CASE.build(imidazole(), num_layers=2).eval(), "cpu", transforms=steps) for _ in range(2)
    )
    accelerate(fast)
    fast.model = capture(fast.model)
    with default_dtype(torch.float64):
        cases.check_dynamics(fast, eager, [fast.model], steps=50, tolerance=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_replays_on_the_gpu(dtype: torch.dtype) -> None:
    cases.check_on_the_gpu(accelerated(dtype), predict, 1e-12 if dtype is torch.float64 else 1e-5)
