"""A part of the search space, small enough to measure completely: the ``[record.BACKEND]`` tables of a config.

    [record.cuda]
    path_groups = [1, 2, 3]
    block_size = [64, 128]
    [record.cuda.forward]        # replaces or adds choices in this direction
    path_groups = [2, 4]

They become checked :class:`Restriction` values. Knobs that are not named keep all their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import ConfigError, unknown_name
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.kernels.product.schedule import SCHEDULES, Schedule

Choices = Mapping[str, tuple]


@dataclass(frozen=True)
class Restriction:
    """``common`` choices by knob, and by direction those that replace them."""

    common: Choices
    by_direction: Mapping[str, Choices] = field(default_factory=dict)

    def choices(self, direction: str) -> dict[str, tuple]:
        return {**self.common, **self.by_direction.get(direction, {})}


def restrictions_from(tables: Any) -> dict[str, Restriction]:
    """The restrictions by backend, from the config's ``record`` table; ConfigError if it is invalid."""
    if not isinstance(tables, Mapping):
        raise ConfigError(f"record is {tables!r}; expected tables [record.BACKEND]")
    found = {}
    for backend, table in tables.items():
        if backend not in SCHEDULES:
            raise ConfigError("record: " + unknown_name("backend", backend, SCHEDULES))
        what, kind = f"record.{backend}", SCHEDULES[backend]
        if not isinstance(table, Mapping):
            raise ConfigError(f"{what} is {table!r}; expected a table of knobs and their choices")
        by_direction = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        for direction in by_direction:
            if direction not in DIRECTIONS:
                raise ConfigError(f"{what}: " + unknown_name("direction", direction, DIRECTIONS))
        found[backend] = Restriction(
            _choices(what, kind, {knob: value for knob, value in table.items() if knob not in by_direction}),
            {name: _choices(f"{what}.{name}", kind, value) for name, value in by_direction.items()},
        )
    return found


def _choices(what: str, kind: type[Schedule], table: Mapping[str, Any]) -> dict[str, tuple]:
    known = [knob for knob in kind.choices if knob != "fuse"]
    for knob, values in table.items():
        if knob not in known:
            raise ConfigError(f"{what}: " + unknown_name("knob", knob, known))
        allowed = kind.choices[knob]
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{what}.{knob} is {values!r}; expected a list of values")
        for value in values:
            if not any(value == a and type(value) is type(a) for a in allowed):
                raise ConfigError(f"{what}.{knob} has {value!r}; expected values of {allowed[:12]}")
    return {knob: tuple(values) for knob, values in table.items()}
