"""A stored row of a whole model, from ``results/models/DEVICE.json``, with the values that the report needs.

Times are in milliseconds there and in microseconds here, as in bench rows; memory in bytes. A contender without a
figure has a sentence instead. Unknown values are NaN or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.bench.largest import is_largest
from autotune.database.maintenance import hash_of_text
from autotune.report.data.suite_rows import mapping, number
from autotune.text import CAPTURED, DEFAULT, JOINT, STOCK, TUNED, geometric_mean, is_ours

MIB = 2.0**20
# The hash in rows of devices without a tuned entry.
NOTHING_TUNED = hash_of_text("")
PASS_NAMES = {"energy_forces": "energies and forces", "training": "training step"}


@dataclass(frozen=True)
class ModelRow:
    """One model on one structure in one pass."""

    record: dict[str, Any]

    def text(self, key: str) -> str:
        return str(self.record.get(key) or "")

    @property
    def which(self) -> str:
        """The pass in words."""
        return PASS_NAMES.get(self.text("pass"), self.text("pass"))

    @property
    def random(self) -> bool:
        """Whether the weights are random; a model of a file names the file instead."""
        return self.record.get("weights", "random") == "random"

    @property
    def tuned(self) -> bool:
        """Whether anything was tuned on the device before the row was measured there."""
        return self.text("database") != NOTHING_TUNED

    @property
    def atoms(self) -> float:
        return number(self.record.get("atoms"))

    @property
    def edges(self) -> float:
        return number(self.record.get("edges"))

    @property
    def order(self) -> tuple[Any, ...]:
        """By model, then from the smallest structure to the largest, then by pass."""
        known = [*PASS_NAMES]
        place = known.index(self.text("pass")) if self.text("pass") in known else len(known)
        return (self.text("package"), self.text("model"), self.text("dtype"), self.atoms, self.text("structure"), place)

    @cached_property
    def contenders(self) -> dict[str, dict[str, Any]]:
        """Equitune, captured, with cuEquivariance, other paths by time, stock, the untuned default, then the failed."""
        given = {name: mapping(found) for name, found in mapping(self.record.get("contenders")).items()}
        last = {TUNED: -3.0, CAPTURED: -2.0, JOINT: -1.0, STOCK: math.inf, DEFAULT: math.inf}

        def place(name: str) -> tuple[bool, float, str]:
            time = _positive(given[name].get("wall_ms"))
            return math.isnan(time), last.get(name, time), name

        return {name: given[name] for name in sorted(given, key=place)}

    def time_us(self, contender: str | None) -> float:
        """Wall time of one pass; NaN without a figure."""
        return 1e3 * self._figure(contender, "wall_ms")

    def device_us(self, contender: str | None) -> float:
        return 1e3 * self._figure(contender, "device_ms")

    def memory(self, contender: str | None) -> float:
        """Peak memory in bytes."""
        return MIB * self._figure(contender, "peak_mib")

    def per_atom_us(self, contender: str | None) -> float:
        return self._figure(contender, "us_per_atom")

    def launches(self, contender: str | None) -> float:
        return self._figure(contender, "launches")

    def device_parts(self, contender: str | None) -> dict[str, float]:
        """Milliseconds of kernels by what they are for, largest first."""
        return self._parts(contender, "device_parts_ms")

    def held_parts(self, contender: str | None) -> dict[str, float]:
        """Mebibytes that a forward pass keeps for its gradients, by part of the model, largest first."""
        return self._parts(contender, "held_parts_mib")

    def _parts(self, contender: str | None, key: str) -> dict[str, float]:
        found = mapping(self.contenders.get(contender or "", {}).get(key))
        return {str(part): number(size) for part, size in found.items() if number(size) > 0}

    def first_call_s(self, contender: str | None) -> float:
        return self._figure(contender, "first_call_s")

    def _figure(self, contender: str | None, key: str) -> float:
        return _positive(self.contenders.get(contender or "", {}).get(key))

    def reason(self, contender: str) -> str:
        """Why a contender has no time."""
        return str(self.contenders.get(contender, {}).get("error") or "no time was recorded")

    def errors(self, contender: str) -> dict[str, float]:
        """Relative errors by quantity; NaN for one that is not a number."""
        found = mapping(self.contenders.get(contender, {}).get("errors"))
        return {str(name): number(value) for name, value in found.items()}

    @property
    def best_other(self) -> str | None:
        """The fastest of the others' paths, stock not among them."""
        return self._fastest(name for name in self.contenders if name != STOCK)

    @property
    def fastest(self) -> str | None:
        """The fastest of all without Equitune."""
        return self._fastest(self.contenders)

    def _fastest(self, names: Iterable[str]) -> str | None:
        timed = [name for name in names if not is_ours(name) and self.time_us(name) > 0]
        return min(timed, key=self.time_us, default=None)

    def over(self, contender: str | None) -> float:
        """How many times as fast as ``contender`` Equitune is."""
        return self.time_us(contender) / self.time_us(TUNED)

    @property
    def ratio(self) -> float:
        """Speed-up over the fastest other path."""
        return self.over(self.fastest)

    @property
    def memory_ratio(self) -> float:
        """Peak memory over that of the fastest other path."""
        return self.memory(TUNED) / self.memory(self.fastest)


def model_rows(record: dict[str, Any]) -> tuple[ModelRow, ...]:
    """The rows of a record in the order in which pages show them, without those of the largest crystals."""
    return _ordered(row for row in _records(record) if not is_largest(row))


def largest_rows(record: dict[str, Any]) -> tuple[ModelRow, ...]:
    """Those of the largest crystals, which have no times to compare."""
    return _ordered(row for row in _records(record) if is_largest(row))


def _records(record: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (row for row in record.get("rows") or () if isinstance(row, dict))


def _ordered(rows: Iterable[dict[str, Any]]) -> tuple[ModelRow, ...]:
    return tuple(sorted(map(ModelRow, rows), key=lambda row: row.order))


def compared_with(rows: Iterable[ModelRow]) -> str:
    """What the speed-up of rows is over: stock, where nothing else ran."""
    return "the fastest other path" if any(row.best_other for row in rows) else "stock"


def mean_ratio(rows: Iterable[ModelRow]) -> float:
    return geometric_mean(row.ratio for row in rows)


def _positive(value: Any) -> float:
    found = number(value)
    return found if found > 0 else math.nan
