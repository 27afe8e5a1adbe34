"""What only captured MACE models have: blocks, options, heads, ensembles. See ``test_captured.py``."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

import captured_cases as cases
from ase import Atoms
from mace.calculators import MACECalculator as StockCalculator
from mace.modules.irreps_tools import mask_head
from mace.modules.lora import inject_lora
from mace_cases import batch_of, imidazole, model_of

from autotune.models.accelerate import accelerate
from autotune.models.capture import CapturedModel, capture
from autotune.models.mace.patched import masked_by_head
from autotune.models.mace.use import MACECalculator
from kernelgen.errors import InputError, UnsupportedError

NUMBERS = [1, 6, 7]
MACE = cases.PACKAGES["mace"]


def accelerated(**more: Any) -> torch.nn.Module:
    model = model_of(NUMBERS, **more)
    accelerate(model)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", ["ScaleShiftMACE", "MACE"])
def test_molecules_without_a_cell(kind: str) -> None:
    molecule = Atoms(imidazole().symbols, imidazole().positions)
    batches = [*cases.steps_of_size(), [molecule], [molecule[:3], molecule]]
    cases.check_padded_equals_unpadded(MACE, accelerated(kind=kind), batches)


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
    cases.check_padded_equals_unpadded(MACE, model, cases.steps_of_size()[:2])


@pytest.mark.parametrize("more", [{"pair_repulsion": True}, {"distance_transform": "Agnesi"}], ids=str)
def test_radial_parts(more: dict[str, Any]) -> None:
    cases.check_padded_equals_unpadded(MACE, model_of(NUMBERS, **more), cases.steps_of_size()[:2])


def test_all_results_are_given() -> None:
    model, atoms = model_of(NUMBERS), cases.in_a_box()
    options = {"compute_virials": True, "compute_displacement": True}
    wanted = MACE.predict(model, atoms, atoms[:9], **options)
    found = MACE.predict(capture(model), atoms, atoms[:9], **options)
    assert set(found) == set(wanted) and "virials" in wanted
    cases.assert_close(found, wanted)
    assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_heads(device: str) -> None:
    energies = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    scales = {"atomic_inter_scale": [1.5, 2.0], "atomic_inter_shift": [0.1, 0.2]}
    stock = model_of(NUMBERS, heads=["a", "b"], atomic_energies=energies, **scales).to(device)
    batch = batch_of(stock, imidazole(), imidazole()[:5]) | {"head": torch.tensor([1, 0])}
    batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    model = copy.deepcopy(stock)
    accelerate(model)
    assert type(model.readouts[-1]).__module__ == "autotune.models.mace.patched"
    # Accelerating again finds nothing to do, and refuses nothing.
    assert not accelerate(model).replaced
    found, wanted = (one(dict(batch), compute_stress=True) for one in (capture(model), stock))
    cases.assert_close(*({name: out[name].detach() for name in ("energy", "forces")} for out in (found, wanted)))


def test_masks_of_heads_are_maces() -> None:
    x, heads = torch.randn(5, 12), torch.tensor([0, 2, 1, 2, 0])
    assert torch.equal(masked_by_head(x, heads, 3), mask_head(x, heads, 3))


def test_another_mode_and_another_dtype_are_captured_again() -> None:
    captured = capture(accelerated())
    MACE.predict(captured, imidazole())
    captured.eval()
    MACE.predict(captured, imidazole())
    assert captured.captures == 2
    captured.float()
    found = MACE.predict(captured, imidazole())
    assert found["forces"].dtype is torch.float32 and captured.captures == 3
    cases.assert_close(found, MACE.predict(captured.model, imidazole()), 1e-5)


def test_what_a_captured_step_does_not_give_is_left_to_the_model() -> None:
    model = model_of(NUMBERS)
    captured = capture(model)
    assert MACE.predict(captured, imidazole(), compute_hessian=True)["hessian"].shape == (27, 9, 3)
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
            MACE.predict(one, imidazole(), compute_force=False, compute_stress=False) for one in (captured, model)
        )
    assert torch.equal(found["energy"], wanted["energy"]) and (captured.eager_calls, captured.captures) == (1, 0)
    copy.deepcopy(captured)  # nothing with a graph is left in it


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
    accelerate(model, memory="low")
    with pytest.raises(UnsupportedError, match="memory='auto'"):
        capture(model)


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
def test_dynamics_on_the_gpu() -> None:
    calculators = cases.mace_calculators("cuda")
    before = torch.cuda.memory_reserved()
    cases.check_dynamics(calculators, steps=200, tolerance=1e-6)
    assert torch.cuda.memory_reserved() - before < 1 << 30
