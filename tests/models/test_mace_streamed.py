"""MACE models whose convolutions form their edges' weights part by part."""

from __future__ import annotations

import copy
import io

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from emulated_radial import EmulatedKernel, emulate_modules
from fixed_kernels import take_few_edges, watched_launches
from mace_cases import CASE, TOLERANCE, assert_same, batch_of, imidazole, model_of, results
from model_checks import check_tf32

from autotune.bench.contenders import build
from autotune.models.accelerate import accelerate, restore
from autotune.models.whole_model import WholeModel, package_named
from autotune.modules import convolution
from kernelgen.errors import InputError

NUMBERS = [1, 6, 7]
pytestmark = pytest.mark.filterwarnings("ignore:edge_:FutureWarning")


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
    assert accelerate(model, memory="low").note == ""
    assert all("radial" in interaction.conv_tp.__dict__ for interaction in model.interactions)
    assert_same(results(model, batch), wanted)
    assert list(model.state_dict()) == names
    restore(model)
    assert_same(results(model, batch), wanted)
    accelerate(model, edge_weights="whole")
    assert not any("radial" in interaction.conv_tp.__dict__ for interaction in model.interactions)
    assert_same(results(model, batch), wanted)


def test_the_contender_of_the_largest_crystal_streams() -> None:
    model = WholeModel("small", model_of([6]), package_named("mace"))
    built, said = build("equitune-streamed", model)
    assert "2 of 2 convolutions" in said and all(block.conv_tp.always_streamed for block in built.module.interactions)
    restore(model.module)
    assert not any(getattr(block.conv_tp, "always_streamed", False) for block in model.module.interactions)


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
        model.requires_grad_(False)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results(model, batch, training=False)
        assert any((edges, size) in kept for size in sizes) is (option == "whole")
        kept.clear()
        model.requires_grad_(True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results(model, batch)
        # A training step is faster with whole weights.
        assert any((edges, size) in kept for size in sizes) is (option != "streamed")
        restore(model)


def test_copies_and_files_stream_too() -> None:
    model = model_of(NUMBERS)
    batch = batch_of(model, imidazole().repeat(2))
    accelerate(model, memory="low")
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


@pytest.mark.parametrize("edge_weights", ["auto", "streamed"])
def test_products_in_half_precision_have_float32s_accuracy(edge_weights: str) -> None:
    exact, model = (model_of(NUMBERS, dtype=dtype) for dtype in (torch.float64, torch.float32))
    model.load_state_dict(exact.state_dict())
    structures = (imidazole().repeat(2), imidazole())
    wanted = results(exact, batch_of(exact, *structures))
    accelerate(model, edge_weights=edge_weights, edge_product="fp16x3")
    assert all(block.conv_tp.__dict__["how"]["product"] == "fp16x3" for block in model.interactions)
    found = results(model, batch_of(model, *structures))
    assert_same({name: value.double() for name, value in found.items()}, wanted, 1e-5)


@pytest.mark.parametrize(("product", "tolerance"), [("float32", 2e-5), ("tf32", 1e-2)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_in_registers(device: str, product: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the kernels are emulated. With gradients of parameters, and for energies and forces alone."""
    exact, model = (model_of(NUMBERS, dtype=dtype) for dtype in (torch.float64, torch.float32))
    model.load_state_dict(exact.state_dict())
    wanted = results(exact, batch_of(exact, imidazole()))
    model.to(device)
    batch = {name: value.to(device) for name, value in batch_of(model, imidazole()).items()}
    if device == "cpu":
        emulate_modules(monkeypatch)
    assert accelerate(model, edge_weights="fused", edge_product=product, check=False).note == ""
    found = results(model, batch)
    assert_same({name: value.cpu().double() for name, value in found.items()}, wanted, tolerance)
    forces = model.requires_grad_(False)(batch, compute_stress=True)["forces"].detach().cpu().double()
    assert_same({"forces": forces}, {"forces": wanted["forces"]}, tolerance)
    if device == "cpu":
        assert sum(direction == "forward:->g" for direction in EmulatedKernel.ran) == 2 * len(model.interactions)
        assert sum("backward" in direction for direction in EmulatedKernel.ran) == 2 * len(model.interactions)


@pytest.mark.parametrize("edge_weights", ["auto", "whole"])
def test_hidden_layers_in_one_kernel(edge_weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of energies and forces, emulated; gradients of parameters need what the kernel does not keep."""
    exact, model = (model_of(NUMBERS, dtype=dtype, radial_MLP=[16] * 3) for dtype in (torch.float64, torch.float32))
    model.load_state_dict(exact.state_dict())
    wanted = results(exact, batch_of(exact, imidazole()))
    take_few_edges(monkeypatch, "cpu")
    launches, batch = watched_launches(monkeypatch), batch_of(model, imidazole())
    accelerate(model, edge_weights=edge_weights, check=False)
    found = results(model, batch)
    assert_same({name: value.double() for name, value in found.items()}, wanted, 2e-5)
    assert "edge_network_value" not in launches
    forces = model.requires_grad_(False)(batch, compute_stress=True)["forces"].detach().double()
    assert_same({"forces": forces}, {"forces": wanted["forces"]}, 2e-5)
    for kernel in ("value", "gradient"):
        assert launches.count(f"edge_network_{kernel}") == len(model.interactions)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_precision_is_a_users_choice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tf32(CASE, device, monkeypatch)


def test_what_cannot_stream_says_so() -> None:
    note = accelerate(torch.nn.Sequential(torch.nn.Linear(2, 2)), memory="low").note
    assert "no module of e3nn" in note
    with pytest.raises(InputError, match="edge_weights is 'none'; expected one of auto, streamed, whole, fused"):
        accelerate(model_of(NUMBERS), edge_weights="none")
    with pytest.raises(InputError, match="edge_product is 'half'; expected one of fp16x3, float32"):
        accelerate(model_of(NUMBERS), edge_product="half")
    with pytest.raises(InputError, match="edge_network is 'all'; expected one of fused, layers"):
        accelerate(model_of(NUMBERS), edge_network="all")
