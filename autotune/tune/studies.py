"""The studies of a workload's directions: opened with what earlier runs and other directions found, and searched."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autotune.database import trials as trial_records
from autotune.database.lookup import find_schedule
from autotune.database.trials import quarantine_path
from autotune.measure.worker import Worker
from autotune.search.loop import search
from autotune.search.samplers import choose_sampler, proposals_ahead
from autotune.search.space import Space
from autotune.search.spaces.registry import space_of
from autotune.search.starting_points import (
    KIN,
    KIN_STARTS,
    known_entries,
    other_path_groups,
    starting_points,
    storing_rows,
)
from autotune.search.study import Study, study_name
from autotune.search.trial_steps import SAMPLING_S, Measurer, compile_ahead
from autotune.tune.progress import Progress
from autotune.tune.settings import Settings
from autotune.workload.workload import Workload
from kernelgen.errors import TuningMissError
from kernelgen.kernels.knobs import Knobs


def first_schedules(workload: Workload, direction: str, settings: Settings) -> tuple[Space, list[Knobs]]:
    """The first schedules of a search that are known before this run's other directions have been searched."""
    space = space_of(workload, direction, settings.facts)
    return space, list(dict.fromkeys((space.default, *known_starts(space, workload, settings))))


def known_starts(space: Space, workload: Workload, settings: Settings) -> list[Knobs]:
    """What modules run until this search has found something, then winners of similar kernels.

    The first, since a search must not end with a schedule that is slower than having none. Where runs of edges may
    store rows, the first in those forms comes next, and of fused radial kernels those of other counts of path groups.
    """
    spec, graph_class = space.spec, workload.graph_class()
    kernel = (workload.problem, spec.operation, spec.direction.name, workload.dtype, workload.layout, settings.facts)
    starts = starting_points(space, graph_class, known_entries(settings.facts, settings.results_dir))
    try:
        found = find_schedule(*kernel, graph_class, strict=False, deterministic=workload.deterministic)
    except TuningMissError:  # the default is in quarantine
        return starts
    running = space.nearest(found.schedule)
    first = [running, *storing_rows(space, found.schedule), *other_path_groups(space, running)]
    return [*(schedule for schedule in first if space.broken_limit(schedule) is None), *starts]


def open_study(
    workload: Workload,
    direction: str,
    settings: Settings,
    deadline: float | None,
    siblings: Mapping[str, Study] = MappingProxyType({}),
) -> Study:
    """The study of one direction, started from earlier runs, the databases and this run's other directions."""
    space = space_of(workload, direction, settings.facts)
    sampler = settings.sampler
    if sampler == "auto":
        seconds = None if deadline is None else deadline - time.monotonic()
        sampler = choose_sampler(space, settings.trials, seconds)
    name = study_name(workload, direction)
    kin = siblings.get(KIN.get(direction, ""))
    starts = [kin.schedule_of(line) for line in kin.ranking[:KIN_STARTS]] if kin else []
    starts += known_starts(space, workload, settings)
    path = trial_records.study_path(settings.results_dir, settings.facts.slug, name)
    faults = quarantine_path(settings.results_dir, settings.facts.slug)
    options: dict[str, Any] = {"sampler": sampler, "seed": settings.seed, "sharing": settings.sharing}
    return Study(space, name, path, settings.storage, starts=starts, quarantine=faults, **options)


def search_direction(
    study: Study,
    worker: Worker,
    workload: Workload,
    direction: str,
    settings: Settings,
    deadline: float | None,
    progress: Progress,
    fewest: int,
) -> str:
    """Search one direction; returns why it ended. ``deadline``, ``fewest``: as for ``search``."""
    measure = Measurer(worker, direction, SAMPLING_S[settings.facts.backend])
    progress.start(f"{workload.label} {direction}", study, settings.trials, deadline)
    end = search(
        study,
        lambda schedule: compile_ahead(study.space, schedule),
        measure,
        trials=settings.trials,
        deadline=deadline,
        fewest=fewest,
        patience=settings.patience,
        overlap=settings.facts.backend == "cuda",
        workers=proposals_ahead(study.sampler, settings.compilers),
        on_trial=lambda line: progress.update(),
    )
    progress.stop()
    return end
