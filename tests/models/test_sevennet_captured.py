"""What only captured SevenNet models have: lost inputs, features, atomic virials. See ``test_captured.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="SevenNet is not installed")

import captured_cases as cases
from ase import Atoms
from model_cases import imidazole
from sevennet_cases import CASE, MODALITIES

from autotune.models.capture import capture
from kernelgen.errors import InputError, UnsupportedError

SEVENNET = cases.PACKAGES["sevennet"]


@cases.on_devices
def test_inputs_that_a_step_would_lose(device: str) -> None:
    """A module of the model reads one more input."""
    model = SEVENNET.model().to(device)
    good = SEVENNET.inputs(model, imidazole())
    with_field = {**good, "field": good["edge_index"].new_ones(3)}
    for read in (lambda data: data.get("field"), lambda data: "field" in data):
        handle = model[-3].register_forward_pre_hook(lambda _, given, read=read: (read(given[0]), None)[1])
        captured = capture(model)
        cases.assert_close(SEVENNET.call(captured, good), SEVENNET.call(model, good))
        with pytest.raises(UnsupportedError, match="the model reads field"):
            SEVENNET.call(captured, with_field)
        cases.assert_close(SEVENNET.call(captured, good), SEVENNET.call(model, good))
        handle.remove()
    handle = model[-3].register_forward_pre_hook(lambda _, given: given[0]["field"] and None)
    with pytest.raises(UnsupportedError, match="the model reads field"):
        SEVENNET.call(capture(model), with_field)
    handle.remove()


def test_features_and_options() -> None:
    """The model's ``x`` is not what was given as ``x``; an option that the model does not have is its error."""
    model = SEVENNET.model()
    captured, batch = capture(model), CASE.batch(model, imidazole())
    found = captured(dict(batch))
    assert "x" in batch and not {"x", "node_attr"} & found.keys()
    with pytest.raises(TypeError):
        captured(dict(batch), compute_stress=True)


def test_structures_without_batches_and_atomic_virials() -> None:
    model = SEVENNET.model()
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


def test_what_is_refused() -> None:
    model = SEVENNET.model()
    kind = type(model)
    model.__class__ = type("Prepared", (kind,), {"_preprocess": lambda self, data: data})
    with pytest.raises(UnsupportedError, match="Prepared has a _preprocess of its own"):
        capture(model)
    model.__class__ = kind
    model.delete_module_by_key("force_output")
    with pytest.raises(UnsupportedError, match="ends in Rescale and AtomReduce"):
        capture(model)


@pytest.mark.parametrize("is_batch", [True, False])
def test_modalities(is_batch: bool) -> None:
    """One after the other, and those of two structures beside each other; by number, as layers do, or by name."""
    model: Any = CASE.build(imidazole(), **MODALITIES).eval()
    model.set_is_batch_data(is_batch)
    model.eval_modal_map = False
    batch = CASE.batch(model, *[imidazole()] * (2 if is_batch else 1))
    if not is_batch:
        batch["cell_volume"] = batch["cell_volume"][0]
    captured = capture(model)
    energies = set()
    for types in ([0, 1], [1, 1], [0, 0]) if is_batch else (0, 1):
        given = batch | {"modal_type": torch.tensor(types)}
        wanted = model(given.copy())
        energies |= set(wanted["inferred_total_energy"].flatten().tolist())
        known = tuple(MODALITIES["_modal_map"])
        names = [known[one] for one in types] if isinstance(types, list) else known[types]
        for by_name in (False, True):
            model.eval_modal_map = by_name
            with cases.nothing_waits():
                found = captured(batch | {"data_modality": names} if by_name else given)
            model.eval_modal_map = False
            for name in ("inferred_total_energy", "inferred_force", "atomic_energy"):
                assert torch.allclose(found[name].detach(), wanted[name].detach(), rtol=1e-10, atol=1e-10)
    assert len(energies) > 1
    model.eval_modal_map = True
    with pytest.raises(InputError, match="data_modality is None; expected"):
        captured(dict(batch))
