"""What is installed here: the packages of extra ``tune``, and how the command ``equitune`` is typed."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

# Imported by these names, and distributed under them. Commands and searches need them, a model that runs does not.
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


def typed(words: str) -> str:
    """``equitune WORDS`` as it works here: by the command's path if that of this Python is not on the PATH."""
    own = Path(sysconfig.get_path("scripts"), "equitune")
    if not own.is_file():
        return f"{shlex.quote(sys.executable)} -m autotune {words}"
    found = shutil.which("equitune")
    if found is not None and os.path.samefile(found, own):
        return f"equitune {words}"
    path = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own
    return f"{shlex.quote(str(path))} {words}"
