"""Studies of a small space without a device: an artificial cost, a search with it, and its records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.database import trials as trial_records
from autotune.measure.space import Space
from autotune.measure.trial import Outcome
from autotune.search.loop import Compiled, search
from autotune.search.study import Study
from kernelgen.device import DeviceFacts
from kernelgen.kernels.product.schedule import HostSchedule, Schedule
from kernelgen.problem.product import TensorProductProblem

optuna = pytest.importorskip("optuna")

PROBLEM = TensorProductProblem.channelwise("16x0e+16x1o", "0e+1o", "0e+1o")
CPU = DeviceFacts("cpu", "test cpu 8 cores", "x86_64", 8, vector_bytes=32)


def make_study(space: Space, path: Path, storage: object | None = None, **options: object) -> Study:
    options = {"generator": "test", **options}
    return Study(space, "study", path, storage or optuna.storages.InMemoryStorage(), **options)  # type: ignore[arg-type]


def cost(schedule: Schedule) -> float:
    """A smooth artificial time in microseconds; registers, wide blocks and two path groups are best."""
    assert isinstance(schedule, HostSchedule)
    penalty = (
        40.0 * (not schedule.fuse)
        + 3.0 * (schedule.order == "sender")
        + 20.0 * (schedule.accumulate == "atomics")
        + 5.0 * (schedule.threads != 0)
    )
    return 10.0 + penalty + 3.0 * abs(schedule.path_groups - 2) + 8.0 / schedule.channel_block


def ok(time_us: float) -> Outcome:
    return Outcome("ok", time_us=time_us, q1_us=time_us, q3_us=time_us, samples_us=(time_us,) * 10)


def run(study: Study, measure: Callable[[Schedule], Outcome] = lambda s: ok(cost(s)), **options: object) -> str:
    return search(study, lambda schedule: Compiled(0.0), lambda schedule, best: measure(schedule), **options)  # type: ignore[arg-type]


def keys(path: Path) -> list[str]:
    return [json.dumps(line["schedule"], sort_keys=True) for line in trial_records.read(path)]


def assert_no_repeats(path: Path) -> None:
    assert len(keys(path)) == len(set(keys(path)))
