"""MACE models whose steps are captured: on the CPU the same padded steps, on a GPU one launch each."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

import captured_cases as cases
from ase import Atoms
from mace.calculators import MACECalculator as StockCalculator
from mace.modules.lora import inject_lora
from mace_cases import batch_of, imidazole, model_of

from autotune import CapturedModel, accelerate, capture
from autotune.integrations.mace import MACECalculator
from kernelgen.errors import InputError, UnsupportedError

NUMBERS = [1, 6, 7]


def predict(model: Any, *structures: Atoms, **options: Any) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    batch = batch_of(model, *structures)
    batch = {name: value.to(device) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    out = model(batch, **({"compute_stress": True} | options))
    return {name: value.detach() for name, value in out.items() if value is not None}


def inputs(model: Any, *structures: Atoms) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    batch = batch_of(model, *structures)
    return {name: value.to(device) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def call(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    given = {name: value.clone() for name, value in batch.items()}
    out = model(given, compute_stress=True)
    return {name: out[name].detach() for name in ("energy", "forces", "stress", "node_energy", "node_feats")}


def accelerated(**more: Any) -> torch.nn.Module:
    model = model_of(NUMBERS, **more)
    accelerate(model)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", ["ScaleShiftMACE", "MACE"])
def test_padded_steps_are_equal_to_unpadded_ones(kind: str) -> None:
    molecule = Atoms(imidazole().symbols, imidazole().positions)
    batches = [*cases.steps_of_size(), [molecule], [molecule[:3], molecule]]
    cases.check_padded_equals_unpadded(accelerated(kind=kind), predict, batches)


@pytest.mark.parametrize(
    "block",
    [
        "RealAgnosticDensityResidualInteractionBlock",
        "RealAgnosticAttResidualInteractionBlock",
        "RealAgnosticResidualNonLinearInteractionBlock",
    ],
)
def test_blocks_that_are_not_linear_in_the_edges(block: str) -> None:
    model = model_of(NUMBERS, block=block)
    accelerate(model)
    cases.check_padded_equals_unpadded(model, predict, cases.steps_of_size()[:2])


@pytest.mark.parametrize("more", [{"pair_repulsion": True}, {"distance_transform": "Agnesi"}], ids=str)
def test_radial_parts(more: dict[str, Any]) -> None:
    cases.check_padded_equals_unpadded(model_of(NUMBERS, **more), predict, cases.steps_of_size()[:2])


def test_a_stock_model_is_captured_too_and_gives_all_results() -> None:
    model, atoms = model_of(NUMBERS), cases.in_a_box()
    options = {"compute_virials": True, "compute_displacement": True}
    wanted = predict(model, atoms, atoms[:9], **options)
    found = predict(capture(model), atoms, atoms[:9], **options)
    assert set(found) == set(wanted) and "virials" in wanted
    cases.assert_close(found, wanted)
    assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("device", cases.DEVICES)
def test_failed_and_interrupted_calls_leave_nothing(device: str) -> None:
    cases.check_failed_calls_leave_nothing(accelerated().to(device), inputs, call)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_wrong_inputs_are_as_the_models(device: str) -> None:
    cases.check_wrong_inputs_are_as_the_models(accelerated().to(device), inputs, call)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_models_with_a_forward_of_their_own_are_refused(device: str) -> None:
    cases.check_own_methods_are_refused(accelerated().to(device), inputs, call)
    with pytest.raises(UnsupportedError, match="Own has a forward of its own"):
        stock = model_of(NUMBERS).to(device)
        stock.__class__ = type("Own", (type(stock),), {"forward": lambda self, data: {}})
        capture(stock)


def test_several_heads() -> None:
    energies = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    scales = {"atomic_inter_scale": [1.5, 2.0], "atomic_inter_shift": [0.1, 0.2]}
    model = model_of(NUMBERS, heads=["a", "b"], atomic_energies=energies, **scales)
    batch = batch_of(model, imidazole(), imidazole()[:5]) | {"head": torch.tensor([1, 0])}
    found, wanted = (one(dict(batch), compute_stress=True) for one in (capture(model), model))
    cases.assert_close(*({name: out[name].detach() for name in ("energy", "forces")} for out in (found, wanted)))


def test_inference_mode_leaves_nothing_behind() -> None:
    model = accelerated()
    captured = capture(model)
    with torch.inference_mode():
        found = predict(captured, imidazole())
    cases.assert_close(found, predict(model, imidazole()))
    cases.assert_close(predict(captured, imidazole()[:8]), predict(model, imidazole()[:8]))


def test_changed_graphs_are_never_served_stale() -> None:
    cases.check_no_graph_is_stale(accelerated(), predict)


def test_few_sizes_are_kept() -> None:
    cases.check_few_sizes_are_kept(accelerated(), predict)


def test_outgrown_graphs_can_be_left_to_the_model() -> None:
    cases.check_outgrown_graphs_can_be_eager(accelerated(), predict)


def test_changes_of_the_model_are_seen() -> None:
    cases.check_changes_of_the_model_are_seen(accelerated(), predict)


def test_another_mode_and_another_dtype_are_captured_again() -> None:
    captured = capture(accelerated())
    predict(captured, imidazole())
    captured.eval()
    predict(captured, imidazole())
    assert captured.captures == 2
    captured.float()
    found = predict(captured, imidazole())
    assert found["forces"].dtype is torch.float32 and captured.captures == 3
    cases.assert_close(found, predict(captured.model, imidazole()), 1e-5)


def test_the_example_is_captured_at_once_and_the_inputs_stay_as_they_are() -> None:
    model = accelerated()
    batch = batch_of(model, imidazole())
    before = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    captured = capture(model, batch, compute_stress=True)
    assert captured.captures == 1
    captured(batch, compute_stress=True)
    assert captured.captures == 1
    for name, value in before.items():
        assert torch.equal(batch[name], value) and not batch[name].requires_grad


def test_what_a_captured_step_does_not_give_is_left_to_the_model() -> None:
    model = model_of(NUMBERS)
    captured = capture(model)
    assert predict(captured, imidazole(), compute_hessian=True)["hessian"].shape == (27, 9, 3)
    batch = batch_of(model, imidazole())
    captured(batch, training=True)["forces"].square().sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    assert (captured.eager_calls, captured.captures) == (2, 0)


def test_energies_without_gradients_are_the_models() -> None:
    """MACE's adapters compute in another order then, which the weights of a hook undo."""
    model = accelerated()
    torch.nn.utils.weight_norm(model.interactions[0].linear_up, dim=None)
    inject_lora(model, rank=2)
    captured = capture(model)
    with torch.no_grad():
        found, wanted = (
            predict(one, imidazole(), compute_force=False, compute_stress=False) for one in (captured, model)
        )
    assert torch.equal(found["energy"], wanted["energy"]) and (captured.eager_calls, captured.captures) == (1, 0)
    copy.deepcopy(captured)  # nothing with a graph is left in it


def test_copies_capture_for_themselves() -> None:
    captured = capture(accelerated())
    wanted = predict(captured, imidazole())
    for other in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert other.sizes == ()
        cases.assert_close(predict(other, imidazole()), wanted)
        assert other.sizes == captured.sizes


def test_bad_input_is_named() -> None:
    model = model_of(NUMBERS)
    with pytest.raises(InputError, match="growth is 1"):
        capture(model, growth=1)
    with pytest.raises(InputError, match="kept is 0"):
        capture(model, kept=0)
    with pytest.raises(InputError, match="outgrown is 'no'"):
        capture(model, outgrown="no")
    with pytest.raises(InputError, match="captured already"):
        capture(capture(model))
    with pytest.raises(InputError, match="there is no example"):
        capture(model, compute_stress=True)
    with pytest.raises(UnsupportedError, match="torch.nn.modules.linear.Linear"):
        capture(torch.nn.Linear(1, 1))
    with pytest.raises(UnsupportedError, match="AtomicDipolesMACE"):
        capture(model_of(NUMBERS, kind="AtomicDipolesMACE"))
    accelerate(model, edge_weights="streamed")
    with pytest.raises(UnsupportedError, match="edge_weights='whole'"):
        capture(model)


def test_the_calculators_dynamics_are_stocks() -> None:
    eager = StockCalculator(models=model_of(NUMBERS))
    fast = MACECalculator(models=model_of(NUMBERS), capture=True)
    assert fast.acceleration.replaced > 0
    cases.check_dynamics(fast, eager, fast.models, steps=60, tolerance=1e-8)


def test_the_calculators_other_calls() -> None:
    stock = StockCalculator(models=[model_of(NUMBERS), model_of(NUMBERS)])
    with torch.no_grad():
        for parameter in stock.models[1].parameters():
            parameter.mul_(1.1)
    fast = MACECalculator(models=copy.deepcopy(stock.models), capture=True)
    assert all(isinstance(model, CapturedModel) for model in fast.models)
    atoms = imidazole()
    for wanted, found in zip(stock.get_descriptors(atoms), fast.get_descriptors(atoms), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)
    for calculator in (stock, fast):
        atoms.calc = calculator
        atoms.get_forces()
    np.testing.assert_allclose(fast.results["forces_comm"], stock.results["forces_comm"], rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match="compile_mode"):
        MACECalculator(models=model_of(NUMBERS), capture=True, compile_mode="default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_replays_on_the_gpu(dtype: torch.dtype) -> None:
    cases.check_on_the_gpu(accelerated(dtype=dtype), predict, 1e-12 if dtype is torch.float64 else 1e-5)


@pytest.mark.gpu
def test_dynamics_on_the_gpu() -> None:
    eager = StockCalculator(models=model_of(NUMBERS).cuda(), device="cuda")
    fast = MACECalculator(models=model_of(NUMBERS).cuda(), device="cuda", capture=True)
    before = torch.cuda.memory_reserved()
    cases.check_dynamics(fast, eager, fast.models, steps=200, tolerance=1e-6)
    assert torch.cuda.memory_reserved() - before < 1 << 30
