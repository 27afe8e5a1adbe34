"""Choices that were compared with the tuned schedule on their device: ``results/replay/measured-DEVICE.json``.

A comparison counts for a choice as long as study, chosen and tuned schedule are the same; for any other choice there is
an estimate again. It also is one more trial, from which the model learns for other problems. Each run of
``equitune replay --defaults --measure`` has its date and software, and a row a choice.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.database.entry import Entry
from autotune.database.maintenance import hash_of_text
from autotune.database.model_of_time import Features, knobs_of, schedule_of
from autotune.database.store import is_slug, replace_file
from autotune.errors import ConfigError
from autotune.replay.defaults.studies import Name, Trials, name_of
from kernelgen.errors import EquituneError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import CudaSchedule

RECORD = "measured"
NAMES = ("label", "operation", "direction", "dtype", "layout", "graph_class")
COLUMNS = (*NAMES, "schedule", "tuned", "ratio", "chosen_us", "tuned_us", "rules_us")
# Study, chosen schedule, hash of the tuned one.
Key = tuple[Name, CudaSchedule, str]


@dataclass(frozen=True)
class Compared:
    """Medians in microseconds of a chosen schedule, of the tuned one and of the rules' default, sampled in turn.

    study: see :func:`~autotune.replay.defaults.studies.name_of`. tuned: see :func:`hash_of_schedule`. rules_us: None if
    that kernel failed.
    """

    study: Name
    schedule: CudaSchedule
    tuned: str
    chosen_us: float
    tuned_us: float
    rules_us: float | None = None

    @property
    def key(self) -> Key:
        return self.study, self.schedule, self.tuned

    @property
    def ratio(self) -> float:
        return self.chosen_us / self.tuned_us

    def to_row(self) -> list[Any]:
        """Plain data in the order of ``COLUMNS``; the ratio is there to be read."""
        times = (self.chosen_us, self.tuned_us, self.rules_us)
        return [*self.study, knobs_of(self.schedule), self.tuned, round(self.ratio, 4), *times]


def key_of(entry: Entry, schedule: CudaSchedule) -> Key:
    """What a comparison of a schedule with an entry's is found by."""
    return name_of(entry), schedule, hash_of_schedule(entry.tuned_schedule)


def hash_of_schedule(schedule: Knobs) -> str:
    """Equal for equal schedules."""
    return hash_of_text(schedule.key)


def comparisons_path(results: Path, slug: str) -> Path:
    """The file of a device."""
    assert is_slug(slug), slug
    return results / "replay" / f"measured-{slug}.json"


def read_comparisons(path: Path) -> dict[Key, Compared]:
    """The comparisons of all runs; none if there is no file. ConfigError for a file of another form."""
    return {compared.key: compared for run in _runs(path) for compared in map(_compared, run["rows"])}


def with_compared(study: Trials, compared: Iterable[Compared]) -> Trials:
    """A study with its compared choices among the trials: their ratio times its tuned time."""
    tuned = hash_of_schedule(study.entry.tuned_schedule)
    times_us, rows = dict(study.times_us), dict(zip(study.times_us, study.rows, strict=True))
    features = Features(study.spec, study.graph_class)
    found = {one.schedule: one for one in compared if (one.study, one.tuned) == (name_of(study.entry), tuned)}
    for schedule, one in found.items():
        times_us[schedule] = one.ratio * study.tuned_us
        rows[schedule] = np.array(features.of(study.plan(schedule)))
    ordered = np.array([rows[schedule] for schedule in times_us])
    return dataclasses.replace(study, times_us=times_us, rows=ordered, compared=frozenset(found))


def store_comparisons(path: Path, slug: str, run: Mapping[str, Any], found: Iterable[Compared]) -> None:
    """Add comparisons to a run, replacing earlier ones of the same choices; the file is replaced as a whole.

    run: what describes it (``date``, ``software``, ...), equal for all calls of one run.
    """
    new = {compared.key: compared for compared in found}
    runs = _runs(path)
    kept = [known | {"rows": [row for row in known["rows"] if _compared(row).key not in new]} for known in runs]
    same = next((known for known in kept if {**known, "rows": 0} == {**run, "rows": 0}), None)
    if same is None:
        same = {**run, "rows": []}
        kept.append(same)
    same["rows"] = [*same["rows"], *(compared.to_row() for compared in new.values())]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, _text(slug, [known for known in kept if known["rows"]]))


def _runs(path: Path) -> list[dict[str, Any]]:
    try:
        data = parse_json(path.read_bytes())
        if data["record"] != RECORD or tuple(data["columns"]) != COLUMNS:
            raise ValueError(f"record {data['record']!r} with columns {data['columns']}; expected {COLUMNS}")
        runs = [dict(run) for run in data["runs"]]
        for run in runs:
            for row in run["rows"]:
                _compared(row)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, EquituneError) as error:
        raise ConfigError(f"{path} is no file of measured choices ({cause_of(error)}); move it away") from error
    return runs


def _compared(row: list[Any]) -> Compared:
    study, (knobs, tuned, _, chosen_us, tuned_us, rules_us) = row[: len(NAMES)], row[len(NAMES) :]
    if min(chosen_us, tuned_us) <= 0:
        raise ValueError(f"times are {chosen_us!r} and {tuned_us!r}; expected positive microseconds")
    return Compared(tuple(study), schedule_of(knobs), tuned, chosen_us, tuned_us, rules_us)


def _text(slug: str, runs: list[dict[str, Any]]) -> str:
    """A line for each row."""
    head = f'"record": {json.dumps(RECORD)},\n"device": {json.dumps(slug)},\n"columns": {json.dumps(COLUMNS)}'
    return f'{{\n{head},\n"runs": [\n{",".join(map(_run_text, runs))}]\n}}\n'


def _run_text(run: dict[str, Any]) -> str:
    rows = ",\n".join(json.dumps(row, separators=(",", ":"), allow_nan=False) for row in run["rows"])
    told = json.dumps({name: value for name, value in run.items() if name != "rows"})
    return f'{told[:-1]}, "rows": [\n{rows}\n]}}\n'
