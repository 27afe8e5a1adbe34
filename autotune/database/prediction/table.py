"""The file of a fitted model: ``results/predicted/DEVICE.json``, shipped with the package.

``equitune replay --defaults`` writes it, with the record of its cross-validation in ``results/replay``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import paths
from autotune.database.candidates.other_devices import device_distance
from autotune.database.prediction.features import NAMES
from autotune.database.prediction.trees import Trees
from autotune.database.store import DatabaseWarning
from autotune.workload.graph_class import GraphClass
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.product.schedule import CudaSchedule, schedule_from_dict

FORM = 3


@dataclass(frozen=True, eq=False)
class Winner:
    """A schedule that won a search, with the layout and the size of graph that it won on."""

    schedule: CudaSchedule
    layout: str
    small: bool


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """device: as in a database. winners: by ``operation direction``. classes: recorded graph classes, by operation.

    expected: by ``operation size`` (``conv small``) the time over the tuned time in the cross-validation; ``tried`` is
    the mean of choices among a problem's own trials, which are all measured; ``first_mean`` and ``first_worst`` are of
    what a first run keeps. transfer: by architecture, what schedules are estimated to cost there, over the fastest
    trial that is legal there (``replay.defaults.transfer``).
    """

    device: Mapping[str, Any]
    trials: int
    problems: int
    trees: Trees
    winners: Mapping[str, tuple[Winner, ...]]
    classes: Mapping[str, tuple[GraphClass, ...]]
    expected: Mapping[str, Mapping[str, float]]
    transfer: Mapping[str, Mapping[str, float]]


def table_path(results: Path, slug: str) -> Path:
    """The file of the model that was fitted to a device's trials."""
    return results / "predicted" / f"{slug}.json"


def table_from(data: Mapping[str, Any]) -> PredictionTable:
    """The table written as JSON; ValueError, KeyError, TypeError or EquituneError if it is none of this version."""
    if data["form"] != FORM or tuple(data["names"]) != NAMES:
        raise ValueError(f"form {data['form']!r} with {len(data['names'])} features; expected form {FORM} with {NAMES}")
    winners = {kernel: tuple(_winner(line) for line in lines) for kernel, lines in dict(data["winners"]).items()}
    classes = {operation: tuple(map(GraphClass.parse, texts)) for operation, texts in dict(data["classes"]).items()}
    expected = {group: dict(found) for group, found in dict(data["expected"]).items()}
    transfer = {arch: dict(found) for arch, found in dict(data["transfer"]).items()}
    trees = Trees.from_dict(data["trees"])
    return PredictionTable(
        data["device"], data["trials"], data["problems"], trees, winners, classes, expected, transfer
    )


def _winner(line: Mapping[str, Any]) -> Winner:
    return Winner(schedule_of(line["schedule"]), str(line["layout"]), bool(line["small"]))


def knobs_of(schedule: CudaSchedule) -> dict[str, Any]:
    """What files keep of a schedule: the knobs that differ from the default of their field."""
    plain = CudaSchedule().to_dict()
    return {name: value for name, value in schedule.to_dict().items() if value != plain.get(name)}


def schedule_of(knobs: Mapping[str, Any]) -> CudaSchedule:
    """The schedule of :func:`knobs_of`; ScheduleError for an unknown knob, ValueError for another backend."""
    schedule = schedule_from_dict({"backend": "cuda", **knobs})
    if not isinstance(schedule, CudaSchedule):
        raise ValueError(f"a schedule's backend is {schedule.backend!r}; expected 'cuda'")
    return schedule


def table_for(facts: DeviceFacts) -> PredictionTable | None:
    """The shipped table fitted on this device, or else on the nearest of its backend; None without one."""
    return _nearest(paths.results_dir() / "predicted", facts)


@functools.lru_cache(maxsize=16)
def _nearest(folder: Path, facts: DeviceFacts) -> PredictionTable | None:
    tables = [table for path in sorted(folder.glob("*.json")) if (table := _read(path)) is not None]
    alike = [table for table in tables if table.device.get("backend") == facts.backend]
    return min(
        alike,
        key=lambda table: (table.device.get("slug") != facts.slug, device_distance(table.device, facts)),
        default=None,
    )


@functools.lru_cache(maxsize=16)
def _read(path: Path) -> PredictionTable | None:
    try:
        return table_from(parse_json(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, EquituneError) as error:
        warnings.warn(f"{path} is ignored, defaults come from rules: {cause_of(error)}", DatabaseWarning, stacklevel=2)
        return None
