"""Where configs and results live: the checkout's own folders, or the copies that an installed package carries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def checkout_dir() -> Path | None:
    """The root of the checkout that this package is run from; None where it is installed."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "kernelgen").is_dir() else None


def _data_dir(name: str) -> Path:
    root = checkout_dir()
    return root / name if root else PACKAGE / "_data" / name


def configs_dir() -> Path:
    """The folder with ``problems.toml``, ``graphs.toml`` and what to tune."""
    return _data_dir("configs")


def results_dir() -> Path:
    """The folder with the tuned database that was shipped (read-only where the package is installed)."""
    return _data_dir("results")


def reports_dir(results: Path) -> Path:
    """Where the pages drawn from ``results`` go: the checkout's ``reports``, or beside results from elsewhere."""
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
    """Have the system's errors in the block say which file they are about: of a full disk they do not by themselves."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
