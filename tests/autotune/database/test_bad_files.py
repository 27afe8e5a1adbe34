"""Files that something has damaged, or that mean harm: each bad line or entry is skipped with a warning."""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from database_samples import HOST, PROBLEM, entry, store
from report_samples import measured_row, write_results, write_suite
from study_cases import CPU, make_study, run
from study_cases import PROBLEM as STUDIED

from autotune.cli import commands
from autotune.database import store as database
from autotune.database import trials as quarantine
from autotune.database import trials as trial_records
from autotune.database.lookup import find_schedule
from autotune.database.maintenance import merge_file, stale_entries
from autotune.database.store import DatabaseWarning, load_table, read_table
from autotune.database.trials import quarantine_path
from autotune.errors import ConfigError
from autotune.measure.space import search_space
from autotune.report import write_comparison, write_reports
from autotune.workload.workload import GraphClass
from kernelgen.compile import compiler as cache
from kernelgen.files import MOST_DEPTH, parse_json
from kernelgen.version import GENERATOR_VERSION

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "1" + "0" * 400
# That the parser manages, but not everything that looks through the data later.
NESTED = "[" * 900 + "]" * 900


@pytest.mark.parametrize("text", [DEEP, NESTED, "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "{", "", b"\xff"])
def test_what_is_no_json_or_too_deep_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_numbers_and_texts_are_such_as_can_be_computed_with_and_written() -> None:
    number = 2**63
    data = parse_json(json.dumps({"small": 10**17, "large": number, "half": "\ud800", "whole": "\U0001f600"}))
    assert data == {"small": 10**17, "large": float(number), "half": "\ufffd", "whole": "\U0001f600"}
    assert parse_json(HUGE) == math.inf and parse_json("-" + "9" * 5000) == -math.inf
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH) and parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert type(parse_json("12")) is int and type(parse_json("true")) is bool


def test_a_text_has_no_control_character_but_line_ends_and_tabs() -> None:
    for code in (*range(0x20), *range(0x7F, 0xA0)):
        text = f"a{chr(code)}b"
        wanted = text if text in ("a\nb", "a\tb") else "a\ufffdb"
        for ascii_only in (True, False):
            assert parse_json(json.dumps({text: [text]}, ensure_ascii=ascii_only)) == {wanted: [wanted]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of databases."""
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path))
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path / "shipped")
    return tmp_path


def find() -> Any:
    return find_schedule(PROBLEM, "conv", "forward", "float32", "mul_ir", HOST, "conv-e14-d5")


def fault(**changes: Any) -> dict[str, Any]:
    kernel = (PROBLEM.key, "conv", "forward", "float32", "mul_ir", False)
    line = dict(zip(quarantine.KERNEL, kernel, strict=True))
    return line | {"generator": GENERATOR_VERSION, "schedule": "none", "state": "wrong", "reason": "made up"} | changes


BAD_LINES = {
    "deep": DEEP,
    "a list for a name": json.dumps(fault(problem=["uvu"])),
    "an object for a schedule": json.dumps(fault(schedule={"path_groups": 2})),
    "a list for the state": json.dumps(fault(state=["wrong"])),
    "half a text": '{"generator": "',
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_of_a_quarantine_list_is_skipped_and_the_others_count(here: Path, case: str) -> None:
    sound = find().schedule
    path = quarantine_path(here, HOST.slug)
    path.parent.mkdir()
    store(here, HOST, entry())
    listed = fault(schedule=entry().tuned_schedule.key)
    path.write_text(f"{BAD_LINES[case]}\n{json.dumps(listed)}\n")
    with pytest.warns(UserWarning, match=f"{path.name}: 1 of 2 lines .* skipped"):
        assert find().schedule == sound
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "made up" in find().reason, "told once"


def _as_folder(path: Path) -> None:
    path.mkdir()


def _as_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [_as_folder, _as_loop])
def test_a_quarantine_list_that_cannot_be_read_is_ignored(here: Path, make: Callable[[Path], None]) -> None:
    path = quarantine_path(here, HOST.slug)
    path.parent.mkdir()
    make(path)
    with pytest.warns(DatabaseWarning, match="cannot be read") as caught:
        assert find().origin == find().origin == "default"
    assert len(caught) == 1


def with_huge_numbers(path: Path) -> Path:
    """A second entry with one in a field, a third with one deep inside; the first stays sound."""
    data = json.loads(path.read_text())
    field, inside = (json.loads(json.dumps(data["entries"][0])) for _ in range(2))
    field |= {"layout": "ir_mul", "bytes": "HUGE"}
    inside |= {"dtype": "float64", "resources": {"registers": ["HUGE"]}}
    data["entries"] += [field, inside]
    path.write_text(json.dumps(data).replace('"HUGE"', HUGE))
    return path


def test_an_entry_with_a_number_of_400_digits_is_skipped_and_the_others_are_used(here: Path) -> None:
    path = with_huge_numbers(store(here, HOST, entry()))
    with pytest.warns(DatabaseWarning, match="entry 1: .*bytes.*and 1 more.*1 other entries are used"):
        table = load_table(path)
    assert [found.layout for found in table.by_identity.values()] == ["mul_ir"]
    assert find().origin == "exact"
    assert stale_entries(read_table(path), {})
    with pytest.raises(database.DatabaseError, match="not merged: entry 1"):
        merge_file(path, here / "other")


def test_a_device_that_could_not_be_written_again_is_a_flaw(here: Path) -> None:
    path = store(here, HOST, entry())
    path.write_text(path.read_text().replace('"units":4', f'"units":{HUGE}'))
    table = read_table(path)
    assert table.device == {} and "units" in table.flaws[0] and len(table.by_identity) == 1


@pytest.mark.parametrize("text", ["conv-e9999999999-d3", "conv-e14-d9999999999", "plain-e9999999999"])
def test_a_graph_class_of_more_edges_than_there_can_be_is_none(text: str) -> None:
    """A factor of two is taken to that power."""
    with pytest.raises(ConfigError, match="is not a graph class"):
        GraphClass.parse(text)


def test_the_report_shows_what_it_can(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", trials=10)
    (path,) = results.glob("*.json")
    data = json.loads(path.read_text())
    data["entries"][0]["time_us"] = "HUGE"
    data["entries"][0]["label"] = "\ud800"
    path.write_text(json.dumps(data).replace('"HUGE"', HUGE))
    trials = next(results.glob("trials/*/*.jsonl"))
    with trials.open("a") as file:
        file.write(
            f"{DEEP}\n{NESTED}\n" + json.dumps({"state": "ok", "time_us": "HUGE"}).replace('"HUGE"', HUGE) + "\n"
        )
    with pytest.warns(UserWarning, match=f"{trials.name}: 2 of"):
        (page,) = write_reports(results, tmp_path / "reports")
    assert "\ufffd" in page.read_text(encoding="utf-8")


def test_a_deep_database_is_one_line_from_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.json").write_text(DEEP)
    with pytest.raises(SystemExit) as ended:
        commands.main(["report", "--results", str(tmp_path)])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.count("\n") == 1 and "deep" in printed


@pytest.mark.parametrize("slug", ["../../../outside", "/outside", "a/b", "..", "x" * 500, ["list"], 7])
def test_the_name_of_a_comparison_cannot_leave_its_folder(tmp_path: Path, slug: Any) -> None:
    path = write_suite(tmp_path / "results", [measured_row("mace", "carbon", "forward")])
    (record,) = (path if path.is_dir() else path.parent).rglob("bench/*.json")
    data = json.loads(record.read_text())
    record.write_text(json.dumps(data | {"device": {"slug": slug}}))
    page = write_comparison(record, record, tmp_path / "reports" / "here")
    assert page == tmp_path / "reports" / "here" / f"compare-{record.stem}.html"


def test_a_kernel_whose_description_is_nested_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    key = cache.digest("a kernel")
    cache.publish(key, "kernel.so", b"binary", "kernel.cpp", "source", {})
    assert cache.find(key, "kernel.so") is not None
    next(tmp_path.rglob("entry.json")).write_text(DEEP)
    assert cache.find(key, "kernel.so") is None


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Path]:
    yield trial_records.study_path(tmp_path, "device", "study")


def test_a_study_goes_on_beside_bad_records(trials: Path) -> None:
    space = search_space(STUDIED, "conv", "forward", "float32", CPU)
    with make_study(space, trials) as study:
        run(study, trials=3)
    good = trial_records.read(trials)
    spoils = ({"time_us": "soon"}, {"time_us": None}, {"state": ["ok"]}, {"resources": 3}, {"schedule": [1]})
    lines = [DEEP, *(json.dumps(good[0] | {"generator": "other"} | spoil) for spoil in spoils)]
    lines += [json.dumps(good[0] | spoil) for spoil in spoils]
    trials.write_text("\n".join([*lines, *map(json.dumps, good)]) + "\n")
    with pytest.warns(UserWarning, match="1 of 14 lines are no records"), make_study(space, trials) as study:
        assert len(study.finished) == 3
        assert run(study, trials=4) == "trials"


def test_a_disk_that_takes_a_part_of_a_record_is_an_error_that_names_the_file(
    trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest may fit (a signal came), or the next write says that the disk is full."""
    import io

    class Nearly(io.FileIO):
        room = 10**6

        def write(self, data: Any) -> int:
            if not Nearly.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = bytes(data)[: min(7, Nearly.room)]
            Nearly.room -= len(taken)
            return super().write(taken)

    monkeypatch.setattr(
        trial_records, "open", lambda path, mode, **_: Nearly(path, mode.replace("b", "")), raising=False
    )
    trial_records.append(trials, {"number": 0})
    assert trial_records.read_from(trials, 0)[0] == [{"number": 0}]
    Nearly.room = 4
    with pytest.raises(OSError, match="No space left") as caught:
        trial_records.append(trials, {"number": 1})
    assert caught.value.filename == str(trials)
    Nearly.room = 10**6
    trial_records.append(trials, {"number": 2})
    with pytest.warns(UserWarning, match="1 of 3 lines"):
        assert trial_records.read(trials) == [{"number": 0}, {"number": 2}], "the half line is closed, and skipped"


def test_a_full_disk_neither_ends_a_study_nor_makes_its_storage_a_corrupt_one(
    tmp_path: Path, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    from sqlalchemy.exc import OperationalError

    file, space = tmp_path / "studies.db", search_space(STUDIED, "conv", "forward", "float32", CPU)
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorname = "SQLITE_FULL"
    told = pytest.warns(UserWarning, match="database or disk is full; the trials are in .*study.jsonl")
    with told, make_study(space, trials, f"sqlite:///{file}") as study:
        run(study, trials=3)

        def create_study(**_: Any) -> Any:
            raise OperationalError("INSERT", {}, full)

        monkeypatch.setattr("optuna.create_study", create_study)
    monkeypatch.undo()
    assert len(trial_records.read(trials)) == 3 and not list(tmp_path.glob("*.corrupt*"))
    with make_study(space, trials, f"sqlite:///{file}"):
        pass
    import optuna

    (stored,) = optuna.get_all_study_summaries(f"sqlite:///{file}")
    assert stored.n_trials == sum(space.values(study.schedule_of(line)) is not None for line in study.finished.values())


def test_a_study_of_the_largest_seed_goes_on(trials: Path) -> None:
    space = search_space(STUDIED, "conv", "forward", "float32", CPU)
    for count in (3, 6):
        with make_study(space, trials, seed=2**32 - 1, sampler="random") as study:
            assert run(study, trials=count) == "trials"


@pytest.mark.parametrize(
    "hostile",
    ["text", [1], json.loads("[" * 200 + "]" * 200), {"schedule": [1], "state": "ok"},
     {"schedule": {}, "state": "ok", "time_us": 10**400},
     {"schedule": {}, "state": "wrong", "reason": [10**400]}, {"schedule": {}, "state": "ok", "time_us": math.nan}],
)  # fmt: skip
def test_what_others_put_into_a_shared_storage_is_no_record_unless_it_is_a_trials(tmp_path: Path, hostile: Any) -> None:
    import optuna
    from optuna.trial import TrialState, create_trial

    space, url = search_space(STUDIED, "conv", "forward", "float32", CPU), f"sqlite:///{tmp_path / 'shared.db'}"
    here = trial_records.study_path(tmp_path / "here", "device", "study")
    with make_study(space, here, url, sharing="storage") as study:
        run(study, trials=2)
    (summary,) = optuna.get_all_study_summaries(url)
    shared = optuna.load_study(study_name=summary.study_name, storage=url)
    attributes = {"schedule": "x", "record": hostile}
    shared.add_trial(create_trial(state=TrialState.COMPLETE, value=1.0, user_attrs=attributes))
    shared.add_trial(create_trial(state=TrialState.RUNNING, user_attrs={"tuner": "somebody"}))
    there = trial_records.study_path(tmp_path / "there", "device", "study")
    with make_study(space, there, url, sharing="storage") as study:
        assert len(study.finished) == 2 and study.others_at_work()
    assert len(trial_records.read(there)) == 2
