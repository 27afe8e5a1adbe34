"""Trials packed for git: nothing that an entry names is lost, both forms are read as one, ``results/`` is small."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from database_samples import HOST, entry, store
from places import ROOT, shipped
from study_cases import CPU, PROBLEM, make_study, run

from autotune.database import trials as trial_archive
from autotune.database import trials as trial_records
from autotune.database.maintenance import merge_file, pack_trials
from autotune.database.store import device_files, read_table
from autotune.errors import DatabaseError
from autotune.measure.space import search_space
from autotune.replay.samplers import load_record
from autotune.report.devices import device_slugs, load_device

RESULTS = ROOT / "results"
MOST_BYTES = 9_100_000


def line(number: int, study: str = "small", time_us: float | None = None, **changes: Any) -> dict[str, Any]:
    time_us = 100.0 + number if time_us is None else time_us
    record = {"study": study, "number": number, "state": "ok", "schedule": {"path_groups": number}}
    return record | {"time_us": time_us, "samples_us": [time_us] * 3, "generator": "now"} | changes


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    """The trial files of a device; returns their folder."""
    for record in lines:
        trial_records.append(trial_records.study_path(folder, "dev", record["study"]), record)
    return folder / "trials" / "dev"


def without_working_files(folder: Path) -> None:
    for path in folder.glob("*.jsonl"):
        path.unlink()


def test_what_is_packed_is_read_back(tmp_path: Path) -> None:
    lines = [line(n, study) for study in ("b", "a") for n in range(3)]
    folder = write(tmp_path, *lines)
    packed = trial_archive.pack(folder)
    assert (packed.path, packed.studies, packed.lines) == (tmp_path / "trials" / "dev.jsonl.gz", 2, 6)
    before = trial_archive.read_device(folder)
    without_working_files(folder)
    assert trial_archive.read_device(folder) == before == ({"a": lines[3:], "b": lines[:3]}, 0)
    assert trial_archive.read_study(folder / "a.jsonl") == lines[3:]
    assert trial_archive.read_study(folder / "c.jsonl") == []
    assert trial_archive.studies_in(packed.path) == [folder / "a.jsonl", folder / "b.jsonl"]
    assert trial_archive.studies_in(folder / "a.jsonl") == [folder / "a.jsonl"]


def test_both_forms_are_one_study_and_no_record_is_there_twice(tmp_path: Path) -> None:
    folder = write(tmp_path, *(line(n) for n in range(20)))
    trial_archive.pack(folder)
    both = trial_archive.read_study(folder / "small.jsonl")
    assert [record["number"] for record in both] == list(range(20))
    assert all(record["samples_us"] for record in both), "the trial file has what the archive leaves out"
    without_working_files(folder)
    write(tmp_path, line(3, time_us=7.0), line(20))
    found = trial_archive.read_study(folder / "small.jsonl")
    assert [record["number"] for record in found] == [*(n for n in range(20) if n != 3), 3, 20]
    assert found[-2]["time_us"] == 7.0
    assert trial_archive.pack(folder).lines == 21
    without_working_files(folder)
    assert [record["number"] for record in trial_archive.read_study(folder / "small.jsonl")][-2:] == [3, 20]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_record_that_amends_another_stands_in_its_place(tmp_path: Path, is_packed: bool) -> None:
    folder = write(tmp_path, *(line(n) for n in range(3)))
    if is_packed:
        trial_archive.pack(folder)
        without_working_files(folder)
    write(tmp_path, line(1, resources={"l2_bytes": 7}, amends=True))
    found = trial_archive.read_study(folder / "small.jsonl")
    assert found == [line(0), line(1, resources={"l2_bytes": 7}), line(2)]
    assert trial_archive.read_device(folder) == ({"small": found}, 0)
    assert trial_archive.pack(folder).lines == 3
    without_working_files(folder)
    assert trial_archive.read_study(folder / "small.jsonl") == found


def test_packing_again_gives_equal_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path, *(line(n, study) for study in ("b", "a/c") for n in range(15)))
    archive = trial_archive.pack(folder).path
    first = archive.read_bytes()
    trial_archive.pack(folder)
    assert archive.read_bytes() == first
    without_working_files(folder)
    trial_archive.pack(folder)
    assert archive.read_bytes() == first
    assert sorted(trial_archive.read_device(folder)[0]) == ["a_c", "b"]


def test_samples_stay_of_the_ten_fastest_and_of_what_an_entry_names(tmp_path: Path) -> None:
    slow = line(30, time_us=900.0)
    failed = line(31, state="wrong", time_us=None) | {"time_us": None, "samples_us": []}
    folder = write(tmp_path, *(line(n) for n in range(30)), slow, failed, line(0, "not cited"))
    packed = trial_archive.pack(folder, {"small": [slow["schedule"]], "never run": []})
    assert (packed.studies, packed.lines, packed.missing) == (1, 32, ("never run",))
    without_working_files(folder)
    found, _ = trial_archive.read_device(folder)
    assert list(found) == ["small"]
    assert [record["number"] for record in found["small"] if record["samples_us"]] == [*range(10), 30]
    assert [record["time_us"] for record in found["small"]] == [*(100.0 + n for n in range(30)), 900.0, None]


def test_a_study_goes_on_from_what_is_packed(tmp_path: Path) -> None:
    space, path = (
        search_space(PROBLEM, "conv", "forward", "float32", CPU),
        trial_records.study_path(tmp_path, "dev", "study"),
    )
    with make_study(space, path) as study:
        run(study, trials=10)
        best, tried = study.best, set(study.finished)
    trial_archive.pack(path.parent)
    without_working_files(path.parent)
    with make_study(space, path) as study:
        assert study.best == best and set(study.finished) == tried
        assert run(study, trials=10) == "trials" and not path.exists(), "nothing to do"
        run(study, trials=13)
    assert [record["number"] for record in trial_records.read(path)] == [10, 11, 12]
    assert len(trial_archive.read_study(path)) == 13
    with make_study(space, path) as study:
        assert len(study.finished) == 13


def test_a_database_and_its_packed_trials_are_joined_elsewhere(tmp_path: Path) -> None:
    named = entry()
    named = dataclasses.replace(named, trials=named.trials | {"file": f"trials/{HOST.slug}/small.jsonl"})
    there, here = tmp_path / "there", tmp_path / "here"
    file = store(there, HOST, named)
    path = trial_records.study_path(there, HOST.slug, "small")
    trial_records.append(path, line(0))
    trial_records.append(path.with_name("other.jsonl"), line(0, "other"))
    trial_records.append(trial_records.study_path(there, HOST.slug, "whole", "record"), line(1, "whole"))
    trials, recorded = pack_trials(there, HOST.slug)
    assert (trials.studies, trials.missing, recorded.studies) == (1, (), 1)
    path.unlink()
    merge_file(file, here)
    assert trial_records.read(here / "trials" / HOST.slug / "small.jsonl") == [line(0)]


def test_a_report_reads_what_is_packed(tmp_path: Path) -> None:
    folder = write(tmp_path, line(0), line(1), line(0, "other"))
    before = load_device(tmp_path, "dev").trials
    trial_archive.pack(folder)
    without_working_files(folder)
    folder.rmdir()
    assert device_slugs(tmp_path) == ["dev"]
    found = load_device(tmp_path, "dev")
    assert found.trials.equals(before) and len(before) == 3 and found.unreadable_lines == 0


def test_a_damaged_archive_is_named_and_not_replaced(tmp_path: Path) -> None:
    folder = write(tmp_path, *(line(n) for n in range(50)))
    archive = trial_archive.pack(folder).path
    torn = archive.read_bytes()[:100]
    for content in (torn, b"not packed", gzip.compress(b"x" * 1000)[:-9] + b"123456789"):
        archive.write_bytes(content)
        for act in (trial_archive.pack, trial_archive.read_device):
            with pytest.raises(DatabaseError, match=r"dev\.jsonl\.gz cannot be read.*restore it"):
                act(folder)
        assert archive.read_bytes() == content
    archive.write_bytes(gzip.compress(b'{"torn": \n[1]\n' + json.dumps(line(77)).encode()))
    assert [record["number"] for record in trial_archive.read_device(folder)[0]["small"]] == [77, *range(50)]


@pytest.mark.parametrize("database", shipped(device_files(RESULTS)), ids=lambda path: path.stem)
def test_every_study_that_a_shipped_entry_names_is_packed(database: Path) -> None:
    archived = trial_archive.read_device(RESULTS / "trials" / database.stem)[0]
    with gzip.open(trial_archive.archive_of(RESULTS / "trials" / database.stem)) as file:
        names = {json.loads(line)["study"] for line in file}
    studies = {trial_records.study_path(Path(), database.stem, name).as_posix() for name in names}
    entries = read_table(database).by_identity.values()
    cited = [found for found in entries if "file" in found.trials]
    assert cited and {found.trials["file"] for found in cited} <= studies
    # The trials of the models' layers in mul_ir were lost; results/NOTES.md says so.
    lost = [found for found in entries if "file" not in found.trials]
    assert len(lost) == (48 if database.stem == "nvidia-h200" else 0)
    assert all(found.layout == "mul_ir" and found.date < "2026-11-23T04" for found in lost)
    for found in cited:
        lines = archived[Path(found.trials["file"]).stem]
        assert len(lines) >= found.trials["count"], found.trials
        assert any(record["samples_us"] for record in lines if record["schedule"] == dict(found.schedule))


def test_every_shipped_record_can_be_replayed() -> None:
    studies = [
        study for archive in (RESULTS / "record").glob("*.jsonl.gz") for study in trial_archive.studies_in(archive)
    ]
    assert len(studies) >= 3
    assert all(load_record(path).measured for path in studies)


def test_what_git_keeps_of_results_is_small() -> None:
    """Working files are ignored; ``equitune db pack`` makes of them what is kept."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    git = ("git", "-C", str(ROOT))
    files = subprocess.run((*git, "ls-files", "-z", "results"), check=True, capture_output=True, text=True).stdout
    kept = [path for name in files.split("\0") if name and (path := ROOT / name).exists()]
    assert len(kept) > 5 and sum(path.stat().st_size for path in kept) < MOST_BYTES
    for folder in ("trials", "record", "drawn/trials"):
        working = f"results/{folder}/some-device/some-study.jsonl"
        assert subprocess.run((*git, "check-ignore", "-q", working)).returncode == 0, working
        packed = f"results/{folder}/some-device.jsonl.gz"
        assert subprocess.run((*git, "check-ignore", "-q", packed)).returncode == 1, packed
