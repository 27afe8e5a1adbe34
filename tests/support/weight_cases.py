"""Weights that change behind a model's back, for every package: an accelerated model follows as stock does.

A test of a package gives a stock model, a function that computes energy, forces and stress, and a device. Each check
does the same to the stock model and to an accelerated one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_cases import Case, Results, imidazole, loss_of
from torch import Tensor
from torch.nn.utils import parametrize, prune

from autotune.models.accelerate import accelerate, restore

Predict = Callable[[Any], Results]
TOLERANCE = 1e-9
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def write_by_data(model: torch.nn.Module) -> None:
    """As torch_ema, and ensembles of perturbed models: torch counts no write."""
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def write_by_numpy(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        view = parameter.detach().cpu().numpy()
        view *= 0.9
        parameter.data.copy_(torch.from_numpy(view))


def write_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def give_new_memory(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.2


WRITES = (write_by_data, write_by_numpy, write_in_place, give_new_memory)


class Halved(torch.nn.Module):
    """A parametrization with a parameter of its own, as adapters have."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        return self.factor * weight


def parametrize_it(module: torch.nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Halved(), unsafe=True)
    module.parametrizations.to(next(module.parameters()).device)  # type: ignore[operator, union-attr]


def prune_it(module: torch.nn.Module, name: str) -> None:
    weight = getattr(module, name)
    mask = (torch.arange(weight.numel()) % 3 > 0).view(weight.shape).to(weight)
    prune.custom_from_mask(module, name, mask)


def norm_it(module: torch.nn.Module, name: str) -> None:
    torch.nn.utils.weight_norm(module, name, dim=None)  # the old form, by a hook


def watch_it(module: torch.nn.Module, name: str) -> None:
    """A hook that changes what the module gives."""
    module.register_forward_hook(lambda module, given, out: out * 1.5 if isinstance(out, Tensor) else out)


CHANGES = (parametrize_it, prune_it, norm_it, watch_it)


def holders(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Modules of a stock model with trained weights: the name of each, and the name of the weight."""
    # A list is never called, so hooks of it do nothing, in stock too.
    called = [
        (name, module) for name, module in model.named_modules() if not isinstance(module, torch.nn.ParameterList)
    ]
    return [
        (name, weight)
        for name, module in called
        for weight, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and parameter.numel() > 1
    ]


def agree(found: Results, wanted: Results, what: str) -> None:
    for name, value in wanted.items():
        size = max(float(value.detach().abs().max()), 1e-30)
        error = float((found[name] - value).detach().abs().max()) / size
        assert error <= TOLERANCE, f"{what}: {name} differs by {error:.1e}"


def check(case: Case, device: str) -> None:
    """Both checks of a package's small model."""
    stock = case.build(imidazole())
    given = case.batch(stock, imidazole())
    batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in given.items()}
    check_writes_are_seen(stock.to(device), lambda model: case.predict(model, batch))
    check_modules_may_change(stock, lambda model: case.predict(model, batch))


def check_writes_are_seen(stock: torch.nn.Module, predict: Predict) -> None:
    """In evaluation, without gradients by weights."""
    models = [copy.deepcopy(stock), copy.deepcopy(stock)]
    accelerate(models[1])
    for model in models:
        model.eval().requires_grad_(False)
    first = predict(models[1])["energy"].detach()
    for write in WRITES:
        for model in models:
            write(model)
        wanted, found = map(predict, models)
        agree(found, wanted, write.__name__)
        assert not torch.equal(found["energy"], first), "else nothing was shown"
    # An average that is put in, evaluated and taken out again.
    kept = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
    wanted = predict(models[0])
    for model in models:
        write_by_data(model)
        predict(model)
    for model, values in zip(models, kept, strict=True):
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.data.copy_(value)
    agree(predict(models[1]), wanted, "an average taken out again")


def losses(model: torch.nn.Module, predict: Predict) -> list[float]:
    """Of two steps of training."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(predict(model))
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def check_modules_may_change(stock: torch.nn.Module, predict: Predict) -> None:
    """Modules with weights are parametrized, pruned, normed or watched, after ``accelerate`` and before it."""
    fast = copy.deepcopy(stock)
    accelerate(fast)
    for change in CHANGES:
        plain, after, before = copy.deepcopy(stock), copy.deepcopy(fast), copy.deepcopy(stock)
        for model in (plain, after, before):
            for name, weight in holders(stock):
                change(model.get_submodule(name), weight)
        accelerate(before)
        wanted = losses(plain, predict)
        for when, model in {"after": after, "before": before}.items():
            what = f"{change.__name__} {when} accelerate"
            for one, other in zip(losses(model, predict), wanted, strict=True):
                assert abs(one - other) <= TOLERANCE * abs(other), f"{what}: a loss is {one} for {other}"
            assert {name for name, _ in model.named_parameters()} == {name for name, _ in plain.named_parameters()}, (
                what
            )
            wanted_now = predict(plain.eval())
            agree(predict(model.eval()), wanted_now, what)
            restore(model)
            agree(predict(model), wanted_now, f"{what}, restored")
            plain.train()
