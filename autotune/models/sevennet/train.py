"""SevenNet's training command with Equitune inside: ``python -m autotune.models.sevennet.train ARGUMENTS``.

The arguments are those of ``sevenn`` (``train input.yaml``), and ``--equitune-precision`` and ``--equitune-memory``:
what ``accelerate`` calls so. Its checkpoints are stock ones, which need no Equitune: SevenNet saves weights by name,
and the configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sevenn.logger import Logger
from sevenn.main import sevenn
from sevenn.scripts import train

from autotune.models.accelerate import accelerate, take_options


def _accelerating(build: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """The function that builds the model to train."""

    def accelerated(*arguments: Any, **options: Any) -> Any:
        model = build(*arguments, **options)
        done = accelerate(model, **how)
        done.warn_without_convolutions()
        Logger().writeline(f"Equitune: {done.line}")  # SevenNet's log is no logger of Python's
        return model

    return accelerated


def main() -> None:
    """Train as ``sevenn`` does; one name of its module is replaced for the process."""
    train.build_E3_equivariant_model = _accelerating(train.build_E3_equivariant_model, **take_options(sys.argv))
    sevenn.main()


if __name__ == "__main__":
    main()
