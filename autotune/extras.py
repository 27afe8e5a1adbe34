"""The packages of extra ``tune``: commands and searches need them, a model that runs does not."""

from __future__ import annotations

import importlib.util

# Imported by these names, and distributed under them.
TUNE = ("ase", "matplotlib", "optuna", "pandas", "rich", "scipy", "typer")


def missing_packages() -> tuple[str, ...]:
    """Those of extra ``tune`` that cannot be imported; nothing is loaded to find out."""
    return tuple(name for name in TUNE if importlib.util.find_spec(name) is None)


def require_tune(what: str) -> None:
    """Raise ToolMissingError, with the pip command, if ``what`` (a command or function) lacks a package."""
    missing = missing_packages()
    if missing:
        from kernelgen.errors import ToolMissingError  # slow: it imports torch, which ``equitune --help`` must not

        raise ToolMissingError(f"{what} needs {', '.join(missing)}; install with: pip install 'equitune[tune]'")
