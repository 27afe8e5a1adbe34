"""MACE's training command with Equitune in the model: ``python -m autotune.models.mace.train ARGUMENTS``.

The arguments are those of ``mace_run_train``, and ``--equitune-precision`` and ``--equitune-memory``: what
``accelerate`` calls so. What it saves are stock models and checkpoints, which need no Equitune.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from mace.cli import run_train

from autotune.models.accelerate import accelerate, restore, take_options


def _accelerating(options_of: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """The function that lists the parameters for the optimizer: it is called when the model is complete."""

    def accelerated(arguments: Any, model: torch.nn.Module) -> Any:
        accelerate(model, **how).warn_without_convolutions()
        return options_of(arguments, model)

    return accelerated


def _stock_copy(given: Any) -> Any:
    """A deep copy with e3nn's modules back in their places: MACE copies a model before it saves it."""
    copied = copy.deepcopy(given)
    if isinstance(copied, torch.nn.Module):
        restore(copied)
    return copied


def main() -> None:
    """Train as ``mace_run_train`` does; two names of its module are replaced for the process."""
    run_train.get_params_options = _accelerating(run_train.get_params_options, **take_options(sys.argv))
    run_train.deepcopy = _stock_copy
    run_train.main()


if __name__ == "__main__":
    main()
