"""What is installed, how the command is typed, and where configs and results are: in the checkout or the package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelgen.errors import ToolMissingError

PACKAGE = Path(__file__).resolve().parent


def checkout_dir() -> Path | None:
    """The root of the checkout that this package runs from; None if it is installed."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "kernelgen").is_dir() else None


def _data_dir(name: str) -> Path:
    root = checkout_dir()
    return root / name if root else PACKAGE / "_data" / name


def configs_dir() -> Path:
    """The folder with ``problems.toml``, ``graphs.toml`` and the tuning configs."""
    return _data_dir("configs")


def structures_dir() -> Path:
    """The folder of the structures that come with the package, as ``NAME.gz``, with their origins and licences."""
    return PACKAGE / "models" / "structures"


def results_dir() -> Path:
    """The folder with the shipped tuned database (read-only if the package is installed)."""
    return _data_dir("results")


def reports_dir(results: Path) -> Path:
    """Where report pages go: the checkout's ``reports``, or a folder beside other ``results``."""
    root = checkout_dir()
    return root / "reports" if root and results.resolve() == root / "results" else results / "reports"


def user_data_dir() -> Path:
    """The folder of the user's own database: ``$EQUITUNE_DATABASE``, else the platform's data directory."""
    given = os.environ.get("EQUITUNE_DATABASE")
    if given:
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_data_dir("equitune"))


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Add the file to OSErrors raised in the block: some, such as a full disk, do not name it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


# The packages of extra ``tune``, and how the command ``equitune`` is typed.

# Imported by these names, and distributed under them. Commands and searches need them, a model that runs does not.
TUNE = ("ase", "jinja2", "matplotlib", "optuna", "pandas", "rich", "scipy", "typer")


def installed_version(distribution: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
