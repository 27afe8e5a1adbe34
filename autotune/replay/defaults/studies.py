"""The trials of a device as data for a model: schedules of one kernel on one graph, with features and times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.database import trials as trial_archive
from autotune.database.entry import Entry
from autotune.database.model_of_time import Features
from autotune.database.nearest import canonical_product
from autotune.database.predicted import edges_for_rules, plan_of, planned, serves
from autotune.errors import ConfigError
from autotune.workload.kinds.registry import kernel_kind
from autotune.workload.workload import GraphClass
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.product.channelwise import Plan
from kernelgen.kernels.product.defaults import default_schedule
from kernelgen.kernels.product.plan import OwnersPlan
from kernelgen.kernels.product.schedule import CudaSchedule, schedule_from_dict
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem
from kernelgen.problem.sizes import shape_of

# Label, operation, direction, dtype, layout, graph class: what names a study in records.
Name = tuple[str, str, str, str, str, str]


def name_of(entry: Entry) -> Name:
    """The name of the study that an entry cites; no two of a database's entries that the model serves share one."""
    return entry.label, entry.operation, entry.direction, entry.dtype, entry.layout, entry.graph_class


@dataclass(frozen=True, eq=False)
class Trials:
    """The trials of one study that the present generator can still make.

    times_us: medians by schedule; of a measurement that was cut short, the median until then. tuned_us: the least that
    was fully measured, which is what choices are compared with: as trials on the same graph, not as published.
    rows: features, [schedules, features], in the order of ``times_us``.
    compared: schedules that were measured in turn with the tuned one, see ``comparisons``.
    """

    entry: Entry
    spec: Spec
    graph_class: GraphClass
    shape: str
    times_us: Mapping[CudaSchedule, float]
    tuned_us: float
    rows: np.ndarray
    compared: frozenset[CudaSchedule] = frozenset()

    def plan(self, schedule: CudaSchedule) -> Plan | OwnersPlan:
        """The plan of a legal schedule."""
        plan = plan_of(self.spec, schedule)
        assert plan is not None
        return plan

    def slowdowns(self) -> np.ndarray:
        """Logarithms of times over the tuned time, [schedules]."""
        return np.log(np.array(list(self.times_us.values())) / self.tuned_us)


def facts_of(device: Mapping[str, Any]) -> DeviceFacts:
    """Facts of a database's CUDA device; ConfigError for another backend."""
    if device.get("backend") != "cuda":
        raise ConfigError(
            f"the model of time is for trials of CUDA devices, and these are of {device.get('name')!r}; "
            "expected for example results/trials/nvidia-h200.jsonl.gz"
        )
    return cuda_facts(str(device["arch"]), str(device["name"]), int(device["units"]))


def spec_of(entry: Entry, facts: DeviceFacts) -> Spec | None:
    """The spec of an entry's kernel, if the model serves it."""
    kind = kernel_kind(entry.operation)
    if entry.operation not in ("conv", "plain"):
        return None
    problem = TensorProductProblem.from_key(entry.problem)
    kernel = (problem, entry.operation, entry.direction, entry.dtype, entry.layout)
    spec = kind.spec(*kernel, facts, entry.deterministic)
    return spec if serves(spec) else None


def read_studies(folder: Path, entries: Iterable[Entry], facts: DeviceFacts) -> list[Trials]:
    """The studies that entries cite, in the order of the entries. folder: ``results/trials/DEVICE``."""
    found, _ = trial_archive.read_device(folder)
    return [
        trials
        for entry in entries
        if (spec := spec_of(entry, facts)) is not None
        and (lines := found.get(Path(str(entry.trials.get("file", ""))).stem))
        and (trials := _trials(entry, spec, lines)) is not None
    ]


def _trials(entry: Entry, spec: Spec, lines: trial_archive.Lines) -> Trials | None:
    """Later lines replace earlier ones of the same kernel: the newest generator's are last."""
    graph_class = entry.parsed_graph_class
    spec = dataclasses.replace(spec, schedule=default_schedule(spec, edges_for_rules(spec.facts, graph_class)))
    timed = {schedule: (time_us, cut) for schedule, time_us, cut in _timed(spec, lines)}
    whole = [time_us for time_us, cut in timed.values() if not cut]
    if not whole:
        return None
    times_us = {schedule: time_us for schedule, (time_us, _) in timed.items()}
    features = Features(spec, graph_class)
    rows = np.array([features.of(plan) for plan in planned(spec, times_us).values()])
    return Trials(entry, spec, graph_class, shape_of(entry.problem), times_us, min(whole), rows)


def _timed(spec: Spec, lines: trial_archive.Lines) -> Iterator[tuple[CudaSchedule, float, bool]]:
    for line in lines:
        if line["state"] != "ok":
            continue
        try:
            schedule = canonical_product(spec, schedule_from_dict(line["schedule"]))
        except ScheduleError:  # a knob or value that was taken out
            continue
        plan = plan_of(spec, schedule) if schedule.fuse else None
        if plan is not None and isinstance(plan.spec.schedule, CudaSchedule) and math.isfinite(line["time_us"]):
            yield plan.spec.schedule, float(line["time_us"]), bool(line.get("cut"))
