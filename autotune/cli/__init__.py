"""The command ``equitune``.

Read ``commands`` (``report``, ``replay`` and others), ``options``, ``tune``, ``bench``, ``database`` (``equitune db``),
``show``, ``doctor`` and ``pack`` with ``packing``. Without the packages of extra ``tune``, typer among
them, ``doctor`` answers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; deliberate errors become one line on standard error and exit code 2."""
    from autotune.paths import missing_packages

    words = list(sys.argv[1:] if arguments is None else arguments)
    if missing_packages():
        from autotune.cli.doctor import answer_without_tune

        answer_without_tune(words)
    from autotune.cli.commands import main as run

    run(words)


__all__ = ["main"]
