"""MACE models whose convolutions form their edges' weights part by part."""

from __future__ import annotations

import copy
import io

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from mace_cases import TOLERANCE, assert_same, batch_of, imidazole, model_of, results

from autotune import accelerate, restore
from autotune.modules.radial import convolution
from kernelgen.errors import InputError

NUMBERS = [1, 6, 7]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few edges."""
    monkeypatch.setattr(convolution, "PART_BYTES", {"cpu": 4096, "cuda": 4096})


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "block",
    [
        "RealAgnosticResidualInteractionBlock",
        "RealAgnosticDensityInteractionBlock",
        "RealAgnosticAttResidualInteractionBlock",
        "RealAgnosticResidualNonLinearInteractionBlock",
    ],
)
def test_results_and_training_gradients_are_stocks(block: str, dtype: torch.dtype) -> None:
    model = model_of(NUMBERS, block=block, dtype=dtype)
    batch = batch_of(model, imidazole().repeat(2), imidazole())
    wanted, names = results(model, batch), list(model.state_dict())
    assert accelerate(model, edge_weights="streamed").note == ""
    assert all("radial" in interaction.conv_tp.__dict__ for interaction in model.interactions)
    assert_same(results(model, batch), wanted)
    assert list(model.state_dict()) == names
    restore(model)
    assert_same(results(model, batch), wanted)
    accelerate(model, edge_weights="whole")
    assert not any("radial" in interaction.conv_tp.__dict__ for interaction in model.interactions)
    assert_same(results(model, batch), wanted)


def test_the_weights_are_never_whole() -> None:
    model = model_of(NUMBERS)
    batch = batch_of(model, imidazole().repeat(2))
    edges, kept = batch["edge_index"].shape[1], []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    sizes = [interaction.conv_tp.weight_numel for interaction in model.interactions]
    for option in ("whole", "streamed", "auto"):
        accelerate(model, edge_weights=option)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results(model, batch, training=False)
        assert any((edges, size) in kept for size in sizes) is (option == "whole")
        restore(model)


def test_copies_and_files_stream_too() -> None:
    model = model_of(NUMBERS)
    batch = batch_of(model, imidazole().repeat(2))
    accelerate(model, edge_weights="streamed")
    wanted = results(model, batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        for interaction in other.interactions:
            assert interaction.conv_tp.__dict__["radial"] is interaction.conv_tp_weights
        assert_same(results(other, batch), wanted)
        other.double()
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(1.5)
        assert (results(other, batch)["energy"] != wanted["energy"]).all()


def test_what_cannot_stream_says_so() -> None:
    note = accelerate(torch.nn.Sequential(torch.nn.Linear(2, 2)), edge_weights="streamed").note
    assert "no module of e3nn" in note
    with pytest.raises(InputError, match="edge_weights is 'none'; expected one of auto, streamed, whole"):
        accelerate(model_of(NUMBERS), edge_weights="none")
