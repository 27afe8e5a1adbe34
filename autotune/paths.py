"""Where configs and results are: in the checkout, or in the installed package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
