"""Tables of TOML files and their values, checked: a ConfigError says what was given and what was expected."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, unknown_name
from kernelgen.json_data import with_fit_texts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def check_table(table: Any, what: str, known: Sequence[str], required: Sequence[str] = ()) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{what} is {table!r}; expected a table with {', '.join(known)}")
    for key in table:
        if key not in known:
            raise ConfigError(f"{what}: " + unknown_name("key", key, known))
    missing = [key for key in required if key not in table]
    if missing:
        raise ConfigError(f"{what}: missing {', '.join(missing)}; expected {', '.join(required)}")


def tables_of(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}; expected tables [{key}.NAME]")
    return value


def count_of(key: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{key} is {value!r}; expected a positive integer")
    return value


def number_of(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{what} is {value!r}; expected a positive number")
    return float(value)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return with_fit_texts(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
