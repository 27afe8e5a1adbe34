"""Compare a contender's values with those of stock in float64, as relative errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autotune.models.packages.base import Outputs
from autotune.models.whole_model import WholeModel

Values = dict[str, Any]
# A contender that differs more from stock in float64 computes something else. Random weights make energies small and
# sums of many signs, so float32 itself is some 1e-5 off.
MOST_WRONG = {"float32": 1e-3, "float64": 1e-8}
# Gradients of single parameters are sums over all edges, and each counts.
_GRADIENTS_TIMES = 30


def values_of(model: WholeModel, inputs: dict[str, Any], which: str, names: Mapping[int, str], stress: bool) -> Values:
    """Energy, forces and stress of a batch, or the loss's gradients by the names of the stock model's parameters."""
    if which == "energy_forces":
        out = model.energies_and_forces(inputs, stress=stress)
        return {name: value.detach().double() for name, value in _outputs(out).items()}
    model.training_step(inputs)
    weights = model.module.named_parameters()
    gradients = {names.get(id(weight), name): weight.grad for name, weight in weights if weight.grad is not None}
    return {"gradients": {name: gradient.double() for name, gradient in gradients.items()}}


def _outputs(out: Outputs) -> dict[str, torch.Tensor]:
    found = {"energy": out.energy, "forces": out.forces}
    return found if out.stress is None else found | {"stress": out.stress}


def errors_of(found: Values, exact: Values) -> tuple[dict[str, float], str]:
    """Relative errors by output, and of how many parameters gradients could be compared.

    Energy, forces, stress: largest difference over the largest exact value; infinite if it was not computed. Gradients:
    over the parameters of the same name and size, the largest ratio of norms, |difference| / |exact|.
    """
    errors = {}
    for name, value in exact.items():
        if name != "gradients" and name not in found:
            errors[name] = math.inf
        elif name != "gradients":
            difference = (found[name].cpu() - value.cpu()).abs().max()
            errors[name] = float(difference / value.abs().max().cpu().clamp_min(1e-300))
    if "gradients" not in exact:
        return errors, ""
    shared = {
        name: (found["gradients"][name].cpu().reshape(-1), value.cpu().reshape(-1))
        for name, value in exact["gradients"].items()
        if name in found["gradients"] and found["gradients"][name].numel() == value.numel()
    }
    total = sum(float(value.norm()) ** 2 for _, value in shared.values()) ** 0.5
    # A gradient that is zero but for rounding has no relative error.
    ratios = [
        float((given - value).norm() / value.norm())
        for given, value in shared.values()
        if float(value.norm()) > 1e-12 * total
    ]
    if ratios:
        errors["gradients"] = max(ratios)
    return errors, f"{len(shared)} of {len(exact['gradients'])} parameters"


def wrong_values(errors: Mapping[str, float], dtype: str) -> str:
    """What is wrong about the values with these errors; empty if nothing is."""
    for name, error in errors.items():
        most = MOST_WRONG[dtype] * (_GRADIENTS_TIMES if name == "gradients" else 1)
        if not error <= most:
            return f"wrong values: {name} differ by {error:.1e} from stock in float64, more than {most:.0e}"
    return ""


def save(values: Values, path: Path) -> None:
    moved = {
        name: {key: one.cpu() for key, one in value.items()} if isinstance(value, dict) else value.cpu()
        for name, value in values.items()
    }
    torch.save(moved, path)


def load(path: Path) -> Values:
    return torch.load(path, weights_only=True)
