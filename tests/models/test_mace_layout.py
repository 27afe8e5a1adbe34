"""A MACE model changes to layout ir_mul as a whole; users see e3nn's layout, or a note why the model did not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from mace.calculators import MACECalculator
from mace.tools.scripts_utils import extract_model
from mace_cases import (
    REPLACED,
    TOLERANCE,
    assert_same,
    batch_of,
    default_dtype,
    gradients,
    imidazole,
    model_of,
    results,
)

from autotune.models.accelerate import accelerate, restore
from autotune.models.linear import AcceleratedLinear
from autotune.models.species import SpeciesProduct
from autotune.models.stand_ins import NodeStandIn
from kernelgen.errors import InputError

# Of imidazole, whose atoms are not sorted by element, and oxygen, which it has none of.
NUMBERS = [1, 6, 7, 8]
HIDDEN = {"128x0e": {}, "128x0e+128x1o": {}, "4x0e+4x1o+4x2e": {"max_ell": 3, "correlation": 3}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_energies_forces_and_training_gradients_are_stocks(hidden: str, dtype: torch.dtype) -> None:
    model = model_of(NUMBERS, hidden=hidden, dtype=dtype, **HIDDEN[hidden])
    batch = batch_of(model, imidazole())
    wanted, names = results(model, batch), list(model.state_dict())
    table = accelerate(model)
    assert (table.replaced, table.note) == (REPLACED, "")
    assert all(block.conv_tp.layout == "ir_mul" for block in model.interactions)
    assert all(block.symmetric_contractions.layout == "ir_mul" for block in model.products)
    assert isinstance(model.interactions[1].skip_tp, SpeciesProduct)
    assert_same(results(model, batch), wanted)
    assert list(model.state_dict()) == names
    assert restore(model) == REPLACED
    assert_same(results(model, batch), wanted)


def mixed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every atom half of its element, half of the next one."""
    attrs = batch["node_attrs"]
    return batch | {"node_attrs": (attrs + attrs.roll(1, 1)) / 2}


@pytest.mark.parametrize("change", [mixed, lambda batch: batch], ids=["mixed", "one-hot"])
def test_any_node_attributes_and_their_gradients_are_right(change: Callable[[Any], Any]) -> None:
    plain = model_of(NUMBERS)
    fast = copy.deepcopy(plain)
    accelerate(fast)
    batch = change(batch_of(plain, imidazole()))
    assert_same(results(fast, batch), results(plain, batch))
    found = []
    for model in (plain, fast):
        attrs = batch["node_attrs"].clone().requires_grad_()
        given = {name: value.detach().clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
        out = model(given | {"node_attrs": attrs}, training=True)
        loss = out["energy"].sum() + out["forces"].square().sum()
        (by_attrs,) = torch.autograd.grad(loss, attrs, retain_graph=True)
        found.append({"attrs": by_attrs, **gradients(loss, model)})
    assert_same(found[1], found[0])


@pytest.mark.parametrize("hidden", ["4x0e", "4x0e+4x1o+4x2e"])
def test_descriptors_are_in_e3nns_layout(hidden: str) -> None:
    model = model_of(NUMBERS, hidden=hidden, kind="MACE")
    batch = batch_of(model, imidazole())
    wanted = model(dict(batch))["node_feats"]
    atoms = imidazole()
    descriptors = MACECalculator(models=model, device="cpu").get_descriptors(atoms)
    accelerate(model)
    assert (model(dict(batch))["node_feats"] - wanted).abs().max() <= TOLERANCE[torch.float64] * wanted.abs().max()
    found = MACECalculator(models=model, device="cpu").get_descriptors(atoms)
    assert abs(found - descriptors).max() <= TOLERANCE[torch.float64] * abs(descriptors).max()
    restore(model)
    assert not model._forward_hooks
    assert torch.equal(model(dict(batch))["node_feats"], wanted)


def test_mace_rebuilds_a_stock_model_from_one_in_ir_mul() -> None:
    model = model_of(NUMBERS)
    batch = batch_of(model, imidazole())
    wanted = results(model, batch)
    accelerate(model)
    with default_dtype(torch.float64):
        rebuilt = extract_model(model)
    assert not any(isinstance(part, NodeStandIn) for part in rebuilt.modules())
    assert_same(results(rebuilt, batch), wanted)


def of_its_own(model: Any) -> None:
    linear = model.interactions[1].linear
    linear.forward = lambda features: 2 * type(linear).forward(linear, features)


def hooked(model: Any) -> None:
    model.products[0].register_forward_hook(lambda *_: None)


def unknown_gate(model: Any) -> None:
    model.readouts[1].gate = torch.nn.ReLU()


REASONS = {
    "a forward of its own": (of_its_own, "Linear has a forward of its own"),
    "a hook": (hooked, "EquivariantProductBasisBlock has hooks"),
    "an unknown module": (unknown_gate, "readouts.1.gate is a ReLU"),
}


@pytest.mark.parametrize("case", REASONS.values(), ids=REASONS)
def test_a_model_with_one_unknown_part_stays_in_mul_ir_and_says_why(case: tuple[Callable[[Any], None], str]) -> None:
    change, reason = case
    model = model_of(NUMBERS)
    change(model)
    batch = batch_of(model, imidazole())
    wanted = results(model, batch)
    table = accelerate(model)
    assert table.note.startswith("node features stay in layout mul_ir: ") and reason in table.note
    assert all(block.conv_tp.layout == "mul_ir" for block in model.interactions)
    assert not any(isinstance(part, NodeStandIn) for part in model.modules())
    assert_same(results(model, batch), wanted)


def test_a_wrong_stand_in_keeps_the_whole_model_in_mul_ir(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AcceleratedLinear.forward
    monkeypatch.setattr(AcceleratedLinear, "forward", lambda self, features: 1.001 * right(self, features))
    model = model_of(NUMBERS)
    table = accelerate(model)
    assert "node_embedding.linear: differs from e3nn by 1.0e-03" in table.note
    assert not any(isinstance(part, NodeStandIn) for part in model.modules())


def test_a_part_of_a_changed_model_is_not_restored_alone() -> None:
    model = model_of(NUMBERS)
    accelerate(model)
    with pytest.raises(InputError, match="restore the whole model"):
        restore(model.interactions)
    assert restore(model) == REPLACED


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_on_a_gpu_results_are_stocks(dtype: torch.dtype) -> None:
    model = model_of(NUMBERS, hidden="32x0e+32x1o", max_ell=3, correlation=3, dtype=dtype).cuda()
    batch = {name: value.cuda() for name, value in batch_of(model, imidazole()).items()}
    wanted = results(model, batch)
    assert accelerate(model).note == ""
    assert_same(results(model, batch), wanted)
    assert_same(results(model, batch), wanted)
