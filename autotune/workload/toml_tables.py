"""TOML files, by name, and their values, checked: a ConfigError says what was given and what was expected.

Nothing here needs torch, so that the command line answers a mistake at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune import paths
from autotune.errors import ConfigError, check_known, unknown_name
from kernelgen.files import with_fit_texts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


SAMPLERS = ("auto", "tpe", "climb", "gp", "random", "brute")
# Files beside the configs: what they name, and the whole models of `equitune bench models`.
NO_CONFIGS = ("problems", "graphs", "model-rows")
# Seeds of a search are below this: the samplers' generators take 32 bits.
SEEDS = 2**32
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def check_sampler(name: Any) -> str:
    """One of ``SAMPLERS``, or ``module:Class`` of an Optuna sampler, which is imported when a search begins."""
    if isinstance(name, str) and (name in SAMPLERS or re.fullmatch(r"[\w.]+:\w+", name)):
        return name
    raise ConfigError(f"{unknown_name('sampler', str(name), SAMPLERS)}; or module:Class of an Optuna sampler")


def config_path(name_or_path: str | Path) -> Path:
    """The file of a config, given by path or by name (with or without ``.toml``) in the shipped ``configs``."""
    given = Path(name_or_path)
    folder = paths.configs_dir()
    candidates = [given, folder / given.name, folder / f"{given.name}.toml"]
    if given.parent not in (Path("."), Path("configs")):
        candidates = [given]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(f"no config {str(name_or_path)!r} here; " + unknown_name("name", given.stem, known_configs()))


def known_configs() -> list[str]:
    """Names of the shipped configs."""
    return sorted(path.stem for path in paths.configs_dir().glob("*.toml") if path.stem not in NO_CONFIGS)


def problem_names() -> list[str]:
    """All names of ``problems.toml``, products first."""
    table = read_toml(paths.configs_dir() / "problems.toml")
    # A problem's own values are no tables; the tables of other kinds hold problems alone.
    names = [name for name, value in table.items() if not _holds_tables(value)]
    return names + [name for value in table.values() if _holds_tables(value) for name in value]


def check_problem_name(text: str) -> None:
    """ConfigError with the nearest name for a problem that ``problems.toml`` lacks; a key (with ``|``) is no name."""
    names = problem_names()
    if "|" not in text:
        check_known("problem", text, names)


def _holds_tables(value: Any) -> bool:
    return all(isinstance(inner, Mapping) for inner in value.values())


def parse_duration(value: str | int | float) -> float:
    """Seconds from ``"6m"``, ``"90s"``, ``"1h30m"``, or from a number (not a string) of seconds."""
    text = str(value).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        if isinstance(value, str):
            raise ConfigError(f"{value!r} has no unit; type {text}m for minutes or {text}s for seconds")
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"{value!r} is not a duration; expected a number and its unit, such as 90s, 6m or 1h30m")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed that samplers do not accept."""
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"seed is {seed}; expected an integer from 0 to {SEEDS - 1}")


def check_table(table: Any, what: str, known: Sequence[str], required: Sequence[str] = ()) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{what} is {table!r}; expected a table with {', '.join(known)}")
    for key in table:
        check_known("key", key, known, f"{what}: ")
    missing = [key for key in required if key not in table]
    if missing:
        raise ConfigError(f"{what}: missing {', '.join(missing)}; expected {', '.join(required)}")


def tables_of(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}; expected tables [{key}.NAME]")
    return value


def count_of(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
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
