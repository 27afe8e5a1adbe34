"""A model that a command line names, with its passes on a structure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotune.errors import ConfigError
from autotune.integrations.accelerate import accelerate
from autotune.models.atoms import find_atoms
from autotune.models.whole_model import WholeModel, open_made, open_model, returned_by
from autotune.modules.base import TunedModule
from autotune.modules.convolution import TunedRows
from autotune.tune.from_model.needs import every_module
from autotune.tune.from_model.passes import ENERGIES, TRAINING, Passes, passes_of


@dataclass(frozen=True)
class Opened:
    """An accelerated model. graph: a name for the structure's graph. replaced: what was replaced, in a line."""

    name: str
    model: torch.nn.Module
    passes: Passes
    graph: str
    replaced: str


def open_named(text: str, structure: str | None, device: str, dtype: str | None, training: bool) -> Opened:
    """Open a model, accelerate it, and make its inputs.

    text: see ``autotune.models.whole_model.open_model``; a function may also return a model and its inputs (as for
    ``autotune.tune_model``), both on the device that they shall run on. structure: a name or a file of atoms, for
    models of a known package. ConfigError if something is missing or does not fit.
    """
    if ":" in text and not Path(text).is_file():
        made = returned_by(text)
        if isinstance(made, tuple):
            return _with_inputs(text, made, structure, training)
        whole = open_made(text, made, device=device, dtype=dtype)
    else:
        whole = open_model(text, device=device, dtype=dtype)
    if structure is None:
        raise ConfigError("--structure is missing; expected a file of atoms, or a name such as mof")
    inputs = whole.inputs([find_atoms(structure)])
    replaced = _accelerated(whole.module)
    return Opened(whole.name, whole.module, _passes(whole, inputs, training), Path(structure).stem, replaced)


def _passes(whole: WholeModel, inputs: dict[str, Any], training: bool) -> Passes:
    found: Passes = {ENERGIES: lambda: whole.energies_and_forces(inputs)}
    if training:
        found[TRAINING] = lambda: whole.training_step(inputs)
    return found


def _with_inputs(text: str, made: tuple[Any, ...], structure: str | None, training: bool) -> Opened:
    if len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        kinds = ", ".join(type(part).__name__ for part in made)
        raise ConfigError(f"{text} returned ({kinds}); expected a torch.nn.Module, or one and its inputs")
    if structure is not None:
        raise ConfigError(f"{text} returned a model and its inputs; leave --structure {structure} out")
    model, batch = made
    replaced = _accelerated(model)
    return Opened(text, model, passes_of(model, batch, training), text.rpartition(":")[2], replaced)


def _accelerated(model: torch.nn.Module) -> str:
    """Replace what can be replaced, and say what was; empty for a model of Equitune's own modules."""
    found = accelerate(model)
    own = any(isinstance(module, TunedModule | TunedRows) for _, module in every_module(model))
    return "" if own and not found.places else str(found).splitlines()[0]
