"""The packages of extra ``tune``: commands and searches need them, a model that runs does not."""

from __future__ import annotations

import importlib.util

# Imported by these names, and distributed under them.
TUNE = ("ase", "jinja2", "matplotlib", "optuna", "pandas", "rich", "scipy", "typer")


def missing_packages() -> tuple[str, ...]:
    """Those of extra ``tune`` that cannot be imported; nothing is loaded to find out."""
    return tuple(name for name in TUNE if importlib.util.find_spec(name) is None)


def lacking(what: str) -> str:
    """What a command or function lacks, with the pip command; empty if nothing."""
    missing = ", ".join(missing_packages())
    return f"{what} needs {missing}; install with: pip install 'equitune[tune]'" if missing else ""


def require_tune(what: str) -> None:
    """Raise ToolMissingError if ``what`` lacks a package."""
    reason = lacking(what)
    if reason:
        from kernelgen.errors import ToolMissingError  # slow: it imports torch, and this file answers at once

        raise ToolMissingError(reason)
