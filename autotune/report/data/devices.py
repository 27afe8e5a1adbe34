"""The rows of all devices in a results folder, for pages that compare devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.report.data.device_data import device_slugs, read_record
from autotune.report.data.model_rows import ModelRow, model_rows
from autotune.report.data.suite_rows import SuiteRow, mapping


@dataclass(frozen=True)
class DeviceRows:
    """The measured rows of one device."""

    slug: str
    device: dict[str, Any]
    suite: tuple[SuiteRow, ...]
    models: tuple[ModelRow, ...]

    @property
    def name(self) -> str:
        return str(self.device.get("name") or self.slug)


def all_rows(results_dir: Path) -> tuple[DeviceRows, ...]:
    """Every device with rows of kernels or models, by slug."""
    found = (_rows(results_dir, slug) for slug in device_slugs(results_dir))
    return tuple(rows for rows in found if rows.suite or rows.models)


def _rows(results_dir: Path, slug: str) -> DeviceRows:
    bench, models = (read_record(results_dir / folder / f"{slug}.json") for folder in ("bench", "models"))
    device = mapping(models.get("device")) | mapping(bench.get("device"))
    suite = tuple(SuiteRow(row) for row in bench.get("rows") or () if isinstance(row, dict))
    return DeviceRows(slug, device, suite, model_rows(models))
