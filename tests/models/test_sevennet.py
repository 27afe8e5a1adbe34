"""An accelerated SevenNet model is the stock one: values, weights, copies, conversions, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="SevenNet is not installed")

import model_cases
import model_checks
import sevenn._keys as KEY
import weight_cases
from ase import Atoms
from model_cases import DTYPES, gradients, imidazole, mof, protein
from sevennet_cases import CASE
from torch._dynamo.utils import counters

from autotune.models.accelerate import restore

TINY = {
    KEY.NUM_CONVOLUTION: 2,
    KEY.LMAX: 1,
    KEY.NODE_FEATURE_MULTIPLICITY: 2,
    KEY.IRREPS_MANUAL: False,
    KEY.CONVOLUTION_WEIGHT_NN_HIDDEN_NEURONS: [4],
}
BOTH_PARITIES = {KEY.IS_PARITY: True, KEY.IRREPS_MANUAL: False, KEY.NODE_FEATURE_MULTIPLICITY: 4}
UP_TO_THREE = {KEY.LMAX: 3, KEY.IRREPS_MANUAL: ["4x0e", "4x0e+3x1e+2x2e+2x3e", "4x0e+3x1e+2x2e+2x3e", "4x0e"]}


def bent() -> Atoms:
    """Where the stress is no small difference of large terms: in float32 its rounding is in every gradient."""
    atoms = imidazole()
    atoms.rattle(0.05, seed=4)
    return atoms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("structure", "more"),
    [
        (imidazole, {}),
        (imidazole, BOTH_PARITIES),
        (bent, UP_TO_THREE),
        (imidazole, {KEY.SELF_CONNECTION_TYPE: "linear"}),
        (mof, {KEY.LMAX: 1, KEY.IRREPS_MANUAL: False, KEY.NODE_FEATURE_MULTIPLICITY: 4}),
        (protein, TINY),
    ],
    ids=["molecule", "both parities", "l up to 3", "linear connection", "mof", "protein"],
)
def test_values_and_gradients_are_those_of_stock(structure: Any, more: dict[str, Any], dtype: torch.dtype) -> None:
    options = {**CASE.options, **more}
    model_checks.check_values(CASE, structure(), dtype, options[KEY.NUM_CONVOLUTION], **more)


def test_several_structures_in_a_batch() -> None:
    stock = CASE.build(imidazole())
    batch = CASE.batch(stock, imidazole(), imidazole()[:7], imidazole())
    model = model_cases.accelerated(stock, 3)
    model_cases.assert_same(CASE.results(model, batch), CASE.results(stock, batch))


def test_checkpoints_go_both_ways() -> None:
    model_checks.check_checkpoints(CASE, 3)


@pytest.mark.parametrize("device", weight_cases.DEVICES)
def test_weights_that_change_behind_the_model(device: str) -> None:
    weight_cases.check(CASE, device)


def test_copies_keep_equitune(tmp_path: Path) -> None:
    model_checks.check_copies(CASE, 3, tmp_path)


def test_a_fresh_process_loads_a_saved_model(tmp_path: Path) -> None:
    model_checks.check_a_fresh_process(CASE, "sevennet_cases", tmp_path)


def test_weights_of_edges_are_formed_inside_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    model_checks.check_streamed(CASE, 3, monkeypatch)


def test_weights_of_edges_are_formed_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    model_checks.check_fused(CASE, 3, monkeypatch)


def test_hidden_layers_of_radial_networks_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: dict[str, Any] = {KEY.CONVOLUTION_WEIGHT_NN_HIDDEN_NEURONS: [32, 32]}
    model_checks.check_network_in_one_kernel(CASE, 3, monkeypatch, **hidden)


@pytest.mark.gpu
def test_weights_of_edges_are_formed_in_registers_of_a_gpu() -> None:
    model_checks.check_fused_on_a_gpu(CASE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_precision_is_a_users_choice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_checks.check_tf32(CASE, device, monkeypatch)


def test_conversions() -> None:
    model_checks.check_conversions(CASE)


def test_training_with_an_average_of_weights() -> None:
    model_checks.check_training(CASE)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["energies and forces", "training"])
def test_two_compilations_serve_all_sizes(training: bool) -> None:
    """The first for the sizes at hand, the second for any: as MACE's and NequIP's."""
    options = {KEY.NUM_CONVOLUTION: 2, KEY.IRREPS_MANUAL: ["4x0e", "4x0e+2x1e", "4x0e"]}
    stock = CASE.build(imidazole(), **options, **{KEY.NODE_FEATURE_MULTIPLICITY: 4, KEY.LMAX: 1}).train(training)
    model = model_cases.accelerated(stock, 2)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    for atoms in (imidazole(), imidazole().repeat((2, 1, 1)), imidazole()[:7], imidazole().repeat((1, 3, 1))):
        batch = CASE.batch(stock, atoms)
        found, wanted = CASE.predict(compiled, batch), CASE.predict(stock, batch)
        for one, whole in ((found, model), (wanted, stock)) if training else ():
            one |= gradients(one["energy"].square().sum() + one["forces"].square().sum() + one["stress"].sum(), whole)
        model_cases.assert_same(*({name: value.detach() for name, value in one.items()} for one in (found, wanted)))
        assert found["forces"].requires_grad is training
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
def test_a_compiled_model_takes_a_calculators_graphs_and_is_stock_after_restore() -> None:
    options = {KEY.NUM_CONVOLUTION: 2, KEY.IRREPS_MANUAL: ["4x0e", "4x0e+2x1e", "4x0e"]}
    stock = CASE.build(imidazole(), **options, **{KEY.NODE_FEATURE_MULTIPLICITY: 4, KEY.LMAX: 1}).eval()
    stock.set_is_batch_data(False)
    model = model_cases.accelerated(stock, 2)
    torch._dynamo.reset()
    batch = CASE.batch(stock, imidazole())
    batch = {name: value for name, value in batch.items() if name != "batch"} | {"num_atoms": batch["num_atoms"][0]}
    found = CASE.predict(torch.compile(model, backend="aot_eager"), batch)
    wanted = CASE.predict(stock, batch)
    model_cases.assert_same(*({name: value.detach() for name, value in one.items()} for one in (found, wanted)))
    restore(model)
    assert type(model) is type(stock)
