"""A stranger's entries: whatever their knobs say, a lookup gives a schedule that a plan allows, and a merge writes no
file but the database and its device's trials."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from database_samples import GPU, HOST, PROBLEM, entry, store

from autotune.database import trials as trial_archive
from autotune.database.entry import Entry
from autotune.database.lookup import find_schedule
from autotune.database.maintenance import merge_file
from autotune.database.nearest import Query, why_illegal
from autotune.database.store import read_table
from autotune.database.trials import from_storage
from autotune.errors import DatabaseError
from autotune.workload.config import load_all
from autotune.workload.known_kinds import kernel_kind, operations_of
from kernelgen.device import cuda_facts
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.kernels.spherical_harmonics import VectorCudaSchedule, VectorHostSchedule
from kernelgen.problem.product import RadialProblem

# A problem of each kind with an operation.
PROBLEMS = {type(problem): problem for problem in load_all().values()} | {type(PROBLEM): PROBLEM}
KINDS = [(operation, problem) for problem in PROBLEMS.values() for operation in operations_of(problem)]
HOSTILE: tuple[Any, ...] = (
    -1,
    0,
    3,
    2**31,
    2**62,
    10**30,
    1.0,
    0.5,
    float("nan"),
    True,
    None,
    "",
    "x; asm",
    [],
    [1],
    {},
)


@pytest.mark.parametrize("schedule", [HostSchedule(), CudaSchedule()], ids=lambda one: one.backend)
def test_a_knob_has_no_value_that_is_not_one_of_its_choices(schedule: Knobs) -> None:
    sound = entry().to_dict()
    for knob, allowed in schedule.choices.items():
        for value in HOSTILE:
            if not any(type(value) is type(one) and value == one for one in allowed):
                with pytest.raises(DatabaseError):
                    Entry.from_dict(sound | {"schedule": schedule.to_dict() | {knob: value}})


def test_every_knob_has_choices() -> None:
    def classes(base: type[Knobs]) -> list[type[Knobs]]:
        return [base, *(inner for one in base.__subclasses__() for inner in classes(one))]

    for one in classes(Knobs):
        assert not one.backend or set(one.choices) == {field.name for field in dataclasses.fields(one)}, one


@pytest.mark.parametrize("operation, problem", KINDS, ids=[operation for operation, _ in KINDS])
def test_any_schedule_is_legal_or_has_a_reason(operation: str, problem: Any) -> None:
    """Legality is decided by the plan, and a plan raises no other error: a lookup would fail with it."""
    draw, kind, legal = random.Random(operation), kernel_kind(operation), 0
    for facts in (HOST, GPU, cuda_facts("sm_120")):
        if isinstance(problem, RadialProblem) and facts is HOST:
            continue
        for direction in kind.directions:
            try:
                spec = kind.spec(problem, operation, direction, "float32", "mul_ir", facts)
                query, known = Query(spec, find_schedule), kind.default(spec, None)
            except (ScheduleError, UnsupportedError):
                continue
            for _ in range(25):
                changes = draw.sample(sorted(known.choices), min(len(known.choices), draw.randint(0, 4)))
                data = known.to_dict() | {knob: draw.choice(known.choices[knob]) for knob in changes}
                try:
                    legal += not why_illegal(query, kind.read(data))
                except ScheduleError:
                    continue
    assert legal


def test_a_schedule_of_another_backend_is_illegal_for_every_kind() -> None:
    for operation, problem in KINDS:
        kind = kernel_kind(operation)
        spec = kind.spec(problem, operation, "forward", "float32", "mul_ir", GPU)
        other = VectorHostSchedule() if operation == "vectors" else HostSchedule()
        assert "cpu schedule cannot run on" in why_illegal(Query(spec, find_schedule), other)
    assert VectorCudaSchedule().backend == "cuda"


def test_resources_that_are_no_numbers_are_refused(shipped: Path) -> None:
    """A lookup on a later GPU compares registers with a limit."""
    bound = entry(CudaSchedule(block_size=64, min_blocks=16))
    with pytest.raises(DatabaseError, match="resources"):
        Entry.from_dict(bound.to_dict() | {"resources": {"registers": "many"}})
    path = store(shipped, GPU, bound)
    data = json.loads(path.read_text())
    data["entries"][0]["resources"] = {"registers": "96"}
    path.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match="resources"):
        found = find_schedule(PROBLEM, "conv", "forward", "float32", "mul_ir", cuda_facts("sm_100"), "conv-e14-d5")
    assert found.entry is None
    assert from_storage({"schedule": {}, "state": "ok", "time_us": 1.0, "resources": {"spill_bytes": "0"}}) is None


@pytest.mark.parametrize(
    "name",
    [
        f"{HOST.slug}.json",
        "nvidia-h200.json",
        "trials/theirs.jsonl",
        f"trials/{HOST.slug}/x.json",
        f"trials/{HOST.slug}/../../x.jsonl",
        f"trials/{HOST.slug}/{'x' * 300}.jsonl",
        f"quarantine/{HOST.slug}/x.jsonl",
        f"./trials/{HOST.slug}/x.jsonl",
    ],
)
def test_trials_are_in_their_place(name: str) -> None:
    with pytest.raises(DatabaseError, match="inside the results directory"):
        entry(trials={"file": name})


def test_a_merge_leaves_the_trials_of_other_devices_and_the_database_alone(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ours = entry(direction="backward")
    target = store(here, HOST, ours)
    kept = here / "trials" / "other-device" / "study.jsonl"
    for side in (here, there):
        (side / "trials" / "other-device").mkdir(parents=True)
        (side / "trials" / "other-device" / "study.jsonl").write_text(json.dumps({"of": side.name}) + "\n")
    merge_file(store(there, HOST, entry(trials={"file": "trials/other-device/study.jsonl"})), here)
    assert "here" in kept.read_text() and ours in read_table(target).by_identity.values()
    assert len(read_table(target).by_identity) == 2


def test_an_archive_of_trials_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_archive, "MOST_BYTES", 1 << 16)
    monkeypatch.setattr(trial_archive, "MOST_LINE", 1 << 12)
    for text in (b"{}\n" * 30_000, b" " * 5_000):
        (tmp_path / "device.jsonl.gz").write_bytes(gzip.compress(text))
        with pytest.raises(DatabaseError, match="unpacks to more"):
            trial_archive.read_device(tmp_path / "device")
