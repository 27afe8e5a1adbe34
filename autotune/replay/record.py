"""Measure every legal schedule of a restricted space, to replay samplers later without a device.

A config with a ``[record.BACKEND]`` table gives ``results/record/DEVICE/STUDY.jsonl``, one file per direction of every
workload: a header line that says what was measured, then trial records as in a search, without raw samples. Nothing is
pruned or published. Records on the disk are not measured again.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from autotune.database import trials as trial_archive
from autotune.database import trials as trial_records
from autotune.errors import ConfigError, StudyError
from autotune.measure.trial import Outcome, TrialSetting
from autotune.measure.worker import Worker
from autotune.search.loop import search
from autotune.search.space import Space
from autotune.search.spaces.registry import space_of
from autotune.search.study import Study, study_name
from autotune.search.trial_steps import SAMPLING_S, Measurer, compile_ahead
from autotune.tune.progress import Progress
from autotune.workload.config import TuneConfig
from autotune.workload.graphs import build_graph
from autotune.workload.workload import Workload
from kernelgen.device import device_facts
from kernelgen.version import GENERATOR_VERSION

# Fields of the header that must agree for a run to continue a record.
SAME = ("generator", "knobs", "default")


def record(config: TuneConfig, device: str, results_dir: Path, progress: Progress) -> list[Path]:
    """Measure what the config requests; returns the complete files. A rerun continues after Ctrl-C."""
    facts = device_facts(device)
    restriction = config.record.get(facts.backend)
    if restriction is None:
        raise ConfigError(
            f"{config.path} has no table [record.{facts.backend}]: choices by knob, such as path_groups = [1, 2]"
        )
    if harmonics := [workload.label for workload in config.workloads if workload.operation == "harmonics"]:
        raise ConfigError(f"a search times all schedules of harmonics already; leave out {', '.join(harmonics)}")
    complete: list[Path] = []
    for workload in config.workloads:
        with Worker(TrialSetting(workload, device)) as worker:
            worker.launch()
            for direction in workload.directions:
                space = space_of(workload, direction, facts).restricted(restriction.choices(direction))
                path = trial_records.study_path(results_dir, facts.slug, study_name(workload, direction), "record")
                if _record(workload, direction, space, path, worker, progress) == "interrupted":
                    progress.note("interrupted; to continue, run the same command again")
                    return complete
                complete.append(path)
    return complete


def _record(workload: Workload, direction: str, space: Space, path: Path, worker: Worker, progress: Progress) -> str:
    """Fill one file; returns why it ended."""
    facts, name = space.spec.facts, study_name(workload, direction)
    workers = len(os.sched_getaffinity(0))
    measurer = Measurer(worker, direction, SAMPLING_S[facts.backend])
    _write_header(path, header(workload, direction, space, workers))
    with Study(space, name, path, sampler="brute") as study:
        progress.start(f"record {workload.label} {direction}", study, space.count_legal(space.size + 1), None)
        end = search(
            study,
            lambda schedule: compile_ahead(space, schedule),
            lambda schedule, best_us: without_samples(measurer(schedule, best_us)),
            overlap=facts.backend == "cuda",
            workers=workers,
            prune=False,
            on_trial=lambda line: progress.update(),
        )
        progress.stop()
    return end


def without_samples(outcome: Outcome) -> Outcome:
    """The outcome without raw samples: medians and quartiles suffice for thousands of schedules."""
    return dataclasses.replace(outcome, samples_us=(), clocks=None)


def header(workload: Workload, direction: str, space: Space, workers: int) -> dict[str, Any]:
    """Everything needed to rebuild the space; ``workers``: parallel compilers, and so pending proposals."""
    graph, facts = build_graph(workload.graph), space.spec.facts
    return {
        "record": 1,
        "study": study_name(workload, direction),
        "label": workload.label,
        "problem": workload.problem.key,
        "operation": workload.operation,
        "direction": direction,
        "dtype": workload.dtype,
        "layout": workload.layout,
        "deterministic": workload.deterministic,
        "graph": {"name": workload.graph.name, "edges": graph.num_edges, "nodes": graph.num_nodes},
        "graph_class": workload.graph_class().text,
        "device": dataclasses.asdict(facts) | {"slug": facts.slug},
        "generator": GENERATOR_VERSION,
        "knobs": {knob: list(choices) for knob, choices in space.knobs.items()},
        "default": space.default.to_dict(),
        "probes": [schedule.to_dict() for schedule in space.probes],
        "workers": workers,
    }


def _write_header(path: Path, wanted: dict[str, Any]) -> None:
    """Start the file, or check that it was started for the same space and generator."""
    lines = trial_archive.read_study(path)
    if not lines:
        trial_records.append(path, wanted)
        return
    differing = [key for key in SAME if lines[0].get(key) != wanted[key]]
    if differing:
        raise StudyError(
            f"{path} was recorded with another {' and '.join(differing)}; move it away to record anew, or go on with "
            "the version and config that it was begun with"
        )
