"""Captured training steps of every package: padded, with the loss and gradients of unpadded ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captured_cases import PACKAGES, Package, on_devices, steps_of_size
from model_cases import gradients, imidazole, needs, small_model

from autotune import accelerate, capture_training
from autotune.bench.contenders import RESULTS, captured_form
from autotune.models.capture import Real
from autotune.models.whole_model import open_made
from kernelgen.errors import InputError, UnsupportedError

of_all = pytest.mark.parametrize("package", [pytest.param(one, id=n, marks=needs(n)) for n, one in PACKAGES.items()])


def losses(package: Package) -> Any:
    energy, forces = RESULTS[package.name]

    def loss(out: dict[str, Any], labels: dict[str, Any], real: Real) -> torch.Tensor:
        by_atom = (out[energy].view(-1) - labels["energy"]) / labels["atoms"]
        return real.mean(by_atom.square(), "graphs") + 10 * real.mean(
            (out[forces] - labels["forces"]).square(), "atoms"
        )

    return loss


def labels_of(batch: list[Any], dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    draw, counts = torch.Generator().manual_seed(len(batch)), [len(atoms) for atoms in batch]
    found = {"energy": torch.randn(len(batch), generator=draw), "forces": torch.randn(sum(counts), 3, generator=draw)}
    return {name: one.to(device, dtype) for name, one in (found | {"atoms": torch.tensor(counts)}).items()}


def unpadded(package: Package, model: Any, inputs: dict[str, Any], labels: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """By autograd through the package's own step."""
    given = {name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()}
    out = model(given, training=True) if package.name == "mace" else model(given)
    rows = len(labels["forces"])
    real = Real(torch.ones(rows, device=labels["forces"].device), len(labels["energy"]))
    loss = losses(package)(out, labels, real)
    return loss.detach(), gradients(loss, model)


@of_all
@on_devices
def test_losses_and_gradients_are_those_of_unpadded_batches(package: Package, device: str) -> None:
    model = package.model().to(device).train()
    step, batches = capture_training(model, losses(package)), steps_of_size()
    for batch in batches:
        inputs, labels = package.inputs(model, *batch), labels_of(batch, torch.float64, device)
        wanted, of_weights = unpadded(package, model, inputs, labels)
        found = step(inputs, labels)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        given = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        assert given.keys() == of_weights.keys()
        largest = max(float(one.abs().max()) for one in of_weights.values())
        for name, one in of_weights.items():
            torch.testing.assert_close(given[name], one, rtol=1e-8, atol=1e-10 * largest, msg=name)
    assert step.replays == len(batches) and 1 < step.captures <= len(batches)


@of_all
@on_devices
def test_a_model_learns_as_it_does_uncaptured(package: Package, device: str) -> None:
    """Weights change between the steps, and those of an optimizer, which is not told anything."""
    models = [package.model().to(device).train() for _ in range(2)]
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    step = capture_training(models[0], losses(package))
    batch = [imidazole(), imidazole()[:5]]
    inputs, labels = package.inputs(models[0], *batch), labels_of(batch, torch.float64, device)
    for _ in range(4):
        found = step(inputs, labels)
        optimizers[1].zero_grad()
        wanted, of_weights = unpadded(package, models[1], inputs, labels)
        for name, weight in models[1].named_parameters():
            weight.grad = of_weights.get(name)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
    assert step.captures == 1 and step.replays == 4


@pytest.mark.parametrize("package", [pytest.param(PACKAGES["mace"], marks=needs("mace"))])
def test_what_is_frozen_gets_no_gradient_and_mistakes_say_so(package: Package) -> None:
    model = package.model().train()
    step, batch = capture_training(model, losses(package)), [imidazole()]
    inputs, labels = package.inputs(model, *batch), labels_of(batch, torch.float64, "cpu")
    step(inputs, labels)
    frozen = model.products[0].linear.weight
    frozen.requires_grad_(False)
    frozen.grad = None
    step(inputs, labels)
    assert frozen.grad is None and step.captures == 2
    with pytest.raises(InputError, match="8 rows|9 rows"):
        step(inputs, labels | {"forces": labels["forces"][:4]})
    with pytest.raises(UnsupportedError, match="compute_hessian"):
        step(inputs, labels, compute_hessian=True)
    with pytest.raises(InputError, match="without dimensions"):
        capture_training(model, lambda out, labels, real: out["forces"])(inputs, labels)
    with pytest.raises(InputError, match="evaluation mode"):
        capture_training(model.eval(), losses(package))(inputs, labels)


@of_all
def test_the_bench_measures_the_same_step(package: Package) -> None:
    """Loss and gradients of the contender whose steps are captured are those of other contenders."""
    model = open_made(package.name, small_model(package.name, package.dtype))
    accelerate(model.module)
    captured, inputs = captured_form(model), package.inputs(model.module, imidazole(), imidazole()[:5])
    losses = []
    for one in (model, captured, captured):
        losses.append(one.training_step(inputs))
        found = {name: weight.grad for name, weight in model.module.named_parameters() if weight.grad is not None}
        if one is model:
            wanted = {name: gradient.clone() for name, gradient in found.items()}
    assert found.keys() == wanted.keys() and captured.training.replays == 2
    torch.testing.assert_close(losses[1:], losses[:1] * 2, rtol=1e-5, atol=0)
    largest = max(float(one.abs().max()) for one in wanted.values())
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-5 * largest, msg=name)
    captured.forget()
    assert not captured.training.sizes
