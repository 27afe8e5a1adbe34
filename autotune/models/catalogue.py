"""Models with published hyperparameters, by name: ``configs/model-rows.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import paths
from autotune.errors import ConfigError, unknown_name
from autotune.workload.toml_tables import read_toml


@dataclass(frozen=True)
class PublishedModel:
    """Hyperparameters in the package's own terms, and where they were published."""

    name: str
    package: str
    source: str
    parameters: dict[str, Any]


def published_models(path: Path | None = None) -> dict[str, PublishedModel]:
    """All models of the file; a model takes what it does not say from the one that it is ``like``."""
    tables = read_toml(path or paths.configs_dir() / "model-rows.toml")
    return {name: _model(name, tables) for name in tables}


def find_published(name: str) -> PublishedModel:
    """ConfigError with the nearest name if there is none."""
    known = published_models()
    if name not in known:
        raise ConfigError(unknown_name("model", name, known))
    return known[name]


def _model(name: str, tables: dict[str, Any]) -> PublishedModel:
    given = _inherited(name, tables, ())
    for key in ("package", "source"):
        if not isinstance(given.get(key), str):
            raise ConfigError(f"model {name!r} has no {key}; expected a text")
    package, source = given.pop("package"), given.pop("source")
    return PublishedModel(name, package, source, given)


def _inherited(name: str, tables: dict[str, Any], seen: tuple[str, ...]) -> dict[str, Any]:
    table = tables.get(name)
    if not isinstance(table, dict) or name in seen:
        raise ConfigError(f"model {name!r}, which {seen[-1:] or 'a model'} is like, is no table of its own")
    own = dict(table)
    parent = own.pop("like", None)
    return own if parent is None else _inherited(parent, tables, (*seen, name)) | own
