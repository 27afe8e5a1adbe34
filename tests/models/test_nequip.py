"""An accelerated NequIP model is the stock one: values, weights, copies, conversions, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nequip", reason="NequIP is not installed")

import model_cases
import model_checks
import weight_cases
from captured_cases import in_a_box, slanted
from edge_products import EdgeProducts
from model_cases import DTYPES, imidazole, mof, protein
from nequip.model import FullNequIPGNNModel, PresetNequIPGNNModel
from nequip_cases import CASE, NequIPCase
from torch._dynamo.utils import counters

from autotune.models.accelerate import accelerate, restore

TINY = {"num_layers": 2, "l_max": 1, "num_features": 2, "radial_mlp_width": 4, "parity": False}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("structure", "more"),
    [
        (imidazole, {}),
        (imidazole, {"num_features": [5, 2, 3], "parity": False, "l_max": 2}),
        (imidazole, {"l_max": 3, "num_layers": 2}),
        (imidazole, {"type_embed_num_features": 3, "convnet_resnet": True}),
        (mof, {"num_layers": 2}),
        (protein, TINY),
    ],
    ids=["molecule", "other multiplicities", "l up to 3", "resnet", "mof", "protein"],
)
def test_values_and_gradients_are_those_of_stock(structure: Any, more: dict[str, Any], dtype: torch.dtype) -> None:
    options = {**CASE.options, **more}
    model_checks.check_values(CASE, structure(), dtype, options["num_layers"], **more)


def test_a_preset_and_the_full_builder_agree_too() -> None:
    class Preset(NequIPCase):
        options = {
            "preset": "S",
            "avg_num_neighbors": 12.0,
            "num_features": [6, 4],
            "radial_mlp_width": 8,
            "type_embed_num_features": 4,
        }
        builder = staticmethod(PresetNequIPGNNModel)

    class Full(NequIPCase):
        options = {
            "radial_mlp_depth": [1, 1],
            "radial_mlp_width": [8, 8],
            "feature_irreps_hidden": ["4x0e+2x1o+3x1e", "5x0e"],
            "irreps_edge_sh": "0e+1o+2e",
            "avg_num_neighbors": 12.0,
            "type_embed_num_features": 3,
        }
        builder = staticmethod(FullNequIPGNNModel)

    for case in (Preset(), Full()):
        model_checks.check_values(case, imidazole(), torch.float64, 2)


def test_several_structures_in_a_batch() -> None:
    stock = CASE.build(imidazole())
    batch = CASE.batch(stock, imidazole(), imidazole()[:7], imidazole())
    model = model_cases.accelerated(stock, 3)
    model_cases.assert_same(CASE.results(model, batch), CASE.results(stock, batch))


def test_cells_of_a_batch_are_not_multiplied_and_summed_edge_by_edge() -> None:
    structures = [in_a_box().repeat(2), slanted()]
    stock = CASE.build(structures[0])
    batch = CASE.batch(stock, *structures)
    with EdgeProducts() as seen:
        wanted = CASE.results(stock, batch)
    edges = batch["edge_index"].shape[1]
    assert seen.most == edges / 2 > 256 and seen.batch == edges, "NequIP does so"
    model = model_cases.accelerated(stock, 3)
    with EdgeProducts() as seen:
        found = CASE.results(model, batch)
    assert wanted["stress"].any()
    model_cases.assert_same(found, wanted)
    atoms = sum(len(one) for one in structures)
    assert max(seen.most, seen.batch) <= atoms < edges / 2, "positions are strained as NequIP does"
    changed = [module for module in model.modules() if type(module).__name__.startswith("Batched")]
    assert len(changed) == 2
    restore(model)
    assert not [module for module in model.modules() if type(module).__name__.startswith("Batched")]


def test_checkpoints_go_both_ways() -> None:
    model_checks.check_checkpoints(CASE, 3)


@pytest.mark.parametrize("device", weight_cases.DEVICES)
def test_weights_that_change_behind_the_model(device: str) -> None:
    weight_cases.check(CASE, device)


def test_copies_keep_equitune(tmp_path: Path) -> None:
    model_checks.check_copies(CASE, 3, tmp_path)


def test_a_fresh_process_loads_a_saved_model(tmp_path: Path) -> None:
    model_checks.check_a_fresh_process(CASE, "nequip_cases", tmp_path)


def test_weights_of_edges_are_formed_inside_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    model_checks.check_streamed(CASE, 3, monkeypatch)


def test_weights_of_edges_are_formed_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    model_checks.check_fused(CASE, 3, monkeypatch)


def test_hidden_layers_of_radial_networks_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model_checks.check_network_in_one_kernel(CASE, 3, monkeypatch, radial_mlp_width=32)


@pytest.mark.gpu
def test_weights_of_edges_are_formed_in_registers_of_a_gpu() -> None:
    model_checks.check_fused_on_a_gpu(CASE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_precision_is_a_users_choice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_checks.check_tf32(CASE, device, monkeypatch)


def test_training_with_an_average_of_weights() -> None:
    model_checks.check_training(CASE)


def test_nequips_own_tracing_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """``compile_mode: compile`` traces forces too, with weights as inputs. What it traced runs here uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    small = {"num_layers": 2, "l_max": 1}
    stock = CASE.build(imidazole(), **small)
    model = CASE.build(imidazole(), compile_mode="compile", **small)
    accelerate(model)
    batch = CASE.batch(stock, imidazole(), imidazole()[:7])
    model_cases.assert_same(CASE.results(model, batch), CASE.results(stock, batch))
    assert len(model._compiled_cache[0]) == 1


@pytest.mark.slow
def test_compiled_training_serves_all_sizes_with_two_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """NequIP's own way. The second is for other numbers of structures in a batch."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda traced, **options: compile_(traced, backend="aot_eager", **options))
    torch._dynamo.reset()
    counters.clear()
    small = {"num_layers": 2, "l_max": 1}
    stock = CASE.build(imidazole(), **small)
    model = CASE.build(imidazole(), compile_mode="compile", **small)
    accelerate(model)
    atoms = imidazole()
    batches = ([atoms, atoms[:7]], [atoms.repeat((2, 1, 1)), atoms], [atoms, atoms[:5], atoms[:8]], [atoms[:4]] * 5)
    for structures in batches:
        batch = CASE.batch(stock, *structures)
        model_cases.assert_same(CASE.results(model, batch), CASE.results(stock, batch))
    assert counters["stats"]["unique_graphs"] <= 2


def test_edges_are_read_as_nequip_reads_them() -> None:
    """A third row of edges is not looked at; shifts are rows of three whatever their shape."""
    atoms = imidazole()
    model = CASE.build(atoms, num_layers=2)
    batch = CASE.batch(model, atoms, atoms)
    edges = batch["edge_index"]
    batch |= {"edge_index": torch.cat((edges, edges[:1])), "edge_cell_shift": batch["edge_cell_shift"].reshape(3, -1)}
    wanted = CASE.results(model, batch)
    accelerate(model)
    model_cases.assert_same(CASE.results(model, batch), wanted)
