"""Equitune stays in a MACE model through conversions, copies and files, and stock models take its weights."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

import weight_cases
from e3nn import o3
from e3nn.util import jit
from mace.calculators import LAMMPS_MACE
from mace.modules.lora import inject_lora, merge_lora_weights
from mace_cases import (
    REPLACED,
    TOLERANCE,
    assert_same,
    batch_of,
    default_dtype,
    imidazole,
    model_of,
    numbers_in,
    results,
)
from places import ROOT
from torch_ema import ExponentialMovingAverage

from autotune.models.accelerate import accelerate, restore
from autotune.models.stand_ins import StandIn
from kernelgen.errors import UnsupportedError


def stock(dtype: torch.dtype = torch.float64) -> Any:
    return model_of(numbers_in(imidazole()), dtype=dtype)


def replaced_in(model: torch.nn.Module) -> int:
    return sum(isinstance(module, StandIn) for module in model.modules())


def pair() -> tuple[Any, Any]:
    """A stock model and an accelerated one with other weights."""
    plain, fast = stock(), stock()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.1)
    accelerate(fast)
    return plain, fast


def test_checkpoints_go_both_ways() -> None:
    plain, fast = pair()
    batch = batch_of(plain, imidazole())
    wanted = results(plain, batch)
    assert list(fast.state_dict()) == list(plain.state_dict())
    fast.load_state_dict(plain.state_dict())
    assert all(torch.equal(fast.state_dict()[name], value) for name, value in plain.state_dict().items())
    assert_same(results(fast, batch), wanted)
    other = stock()
    other.load_state_dict(fast.state_dict())
    assert_same(results(other, batch), wanted)


def test_accelerating_twice_and_restoring_are_harmless() -> None:
    model = stock()
    before = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    assert accelerate(model).replaced == REPLACED
    fast = dict(model.named_modules())
    again = accelerate(model)
    assert (again.places, again.note) == ((), f"{REPLACED} modules were replaced before")
    assert dict(model.named_modules()) == fast
    assert restore(model) == REPLACED and restore(model) == 0
    assert dict(model.named_modules()) == before
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def batch_on(model: Any) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch_of(model, imidazole()).items() if torch.is_tensor(value)}


def on(device: str) -> tuple[Any, weight_cases.Predict]:
    """A stock model, and what it and its copies predict."""
    model = stock().to(device)
    batch = batch_on(model)

    def predict(model: Any) -> dict[str, torch.Tensor]:
        given = {name: value.clone() for name, value in batch.items()}
        out = model(given, training=model.training, compute_stress=True)
        return {name: out[name] for name in ("energy", "forces", "stress")}

    return model, predict


@pytest.mark.parametrize("device", weight_cases.DEVICES)
def test_weights_that_change_behind_the_model(device: str) -> None:
    model, predict = on(device)
    weight_cases.check_writes_are_seen(model, predict)
    weight_cases.check_modules_may_change(model, predict)


@pytest.mark.parametrize("device", weight_cases.DEVICES)
@pytest.mark.parametrize("dense", [True, False], ids=["all", "equivariant"])
def test_adapters_are_put_into_an_accelerated_model(dense: bool, device: str) -> None:
    """MACE looks for e3nn's linear layers, torch's, and layers of radial networks."""
    plain, predict = on(device)
    fast = copy.deepcopy(plain)
    accelerate(fast)
    for model in (plain, fast):
        inject_lora(model, rank=2, wrap_dense=dense)
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora" in name:
                generator = torch.Generator().manual_seed(number)
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(device)
    trained = [{name for name, p in model.named_parameters() if p.requires_grad} for model in (plain, fast)]
    assert trained[0] == trained[1] and len(trained[0]) > 15
    wanted = weight_cases.losses(plain, predict)
    assert weight_cases.losses(fast, predict) == pytest.approx(wanted, rel=1e-9) and wanted[0] != wanted[1]
    for model in (plain, fast):
        model.eval()
    with torch.no_grad():  # adapters add up weights then
        energies = [model(batch_on(model), compute_force=False)["energy"] for model in (plain, fast)]
    torch.testing.assert_close(energies[1], energies[0], rtol=1e-9, atol=0)
    restore(fast)
    assert not replaced_in(fast)
    weight_cases.agree(predict(fast), predict(plain), "restored")
    accelerate(fast)
    weight_cases.agree(predict(fast), predict(plain), "accelerated with adapters")
    restore(fast)
    weight_cases.agree(predict(merge_lora_weights(fast)), predict(merge_lora_weights(plain)), "merged")


def test_linear_layers_are_e3nns() -> None:
    model = stock()
    places = [name for name, module in model.named_modules() if isinstance(module, o3.Linear)]
    accelerate(model)
    assert [name for name, module in model.named_modules() if isinstance(module, o3.Linear)] == places


def train(model: Any, steps: int, optimizer: torch.optim.Optimizer, ema: ExponentialMovingAverage) -> None:
    batch = batch_of(model, imidazole())
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(batch | {"positions": batch["positions"].clone()}, training=True)
        (out["energy"].square().sum() + out["forces"].square().sum()).backward()
        optimizer.step()
        ema.update()


def test_optimizer_and_moving_average_go_on_when_a_model_in_training_is_accelerated_and_restored() -> None:
    found = {}
    for change in (lambda model: None, accelerate, lambda model: (accelerate(model), restore(model))):
        model = stock()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
        ema = ExponentialMovingAverage(model.parameters(), decay=0.9)
        train(model, 2, optimizer, ema)
        change(model)
        train(model, 2, optimizer, ema)
        with ema.average_parameters():
            found[len(found)] = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "double, float, double": lambda model: model.double().float().double(),
    "to": lambda model: model.to(device="cpu", dtype=torch.float32).to(torch.float64),
    "eval, train": lambda model: model.eval().train(),
    "deepcopy": copy.deepcopy,
    "deepcopy of a used one": lambda model: (results(model, batch_of(model, imidazole())), copy.deepcopy(model))[1],
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=CONVERSIONS)
def test_conversions_and_copies_keep_equitune(conversion: Callable[[Any], Any]) -> None:
    plain, fast = stock(), stock()
    accelerate(fast)
    plain, fast = conversion(plain), conversion(fast)
    assert replaced_in(fast) == REPLACED
    batch = batch_of(plain, imidazole())
    wanted = results(plain, batch)
    # e3nn's constants are rounded with the weights; Equitune's are not.
    assert_same(results(fast, batch), wanted, TOLERANCE[torch.float32])
    assert restore(fast) == REPLACED
    assert_same(results(fast, batch), wanted)


def test_a_float32_model_converted_to_float64_is_accelerated() -> None:
    """e3nn's constants were rounded to float32 then, and stay so: the results are e3nn's to float32's accuracy."""
    model = stock(torch.float32).double()
    batch = batch_of(model, imidazole())
    wanted = results(model, batch)
    table = accelerate(model)
    assert all(place.replaced for place in table.places), str(table)
    found = results(model, batch)
    assert_same(found, wanted, TOLERANCE[torch.float32])
    # They are those of a model that was built in float64 with the same weights.
    exact = stock()
    weights = {name: value for name, value in model.named_parameters()} | {
        name: value for name, value in model.named_buffers() if "conv_tp" not in name and "skip_tp" not in name
    }
    exact.load_state_dict(weights, strict=False)
    # Rounded constants of MACE's contraction are not quite equivariant; the kernel leaves out what is not.
    assert_same(found, results(exact, batch), 1e-6)


IN_A_FRESH_PROCESS = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
given, wanted = torch.load(sys.argv[2], weights_only=False)
from autotune.models.stand_ins import StandIn
assert sum(isinstance(module, StandIn) for module in model.modules()) == 22
forces = model(given, compute_force=True)["forces"]
torch.testing.assert_close(forces, wanted, rtol=1e-10, atol=1e-12)
print("the same")
"""


def test_a_saved_model_is_loaded_by_a_process_that_imported_only_torch(tmp_path: Path) -> None:
    model = stock()
    batch = batch_of(model, imidazole())
    accelerate(model)
    wanted = model(dict(batch), compute_force=True)["forces"].detach()
    given = {name: value.detach() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    torch.save(model, tmp_path / "fast.model")
    torch.save((given, wanted), tmp_path / "wanted.pt")
    program = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path / "fast.model"), str(tmp_path / "wanted.pt")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("the same\n"), done.stderr


def test_torchscript_says_what_to_do_and_takes_a_restored_model() -> None:
    """As ``mace_create_lammps_model`` compiles it."""
    model = model_of(numbers_in(imidazole()), num_interactions=1)
    accelerate(model)
    with pytest.raises(UnsupportedError, match=r"TorchScript cannot hold generated kernels; .*autotune\.restore"):
        jit.compile(LAMMPS_MACE(model))
    restore(model)
    with default_dtype(torch.float64):
        jit.compile(LAMMPS_MACE(model))
