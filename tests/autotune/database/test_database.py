"""The database file: schema, order, atomic and concurrent writes, and files that cannot be understood or written."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from database_samples import HOST, entry, store
from places import ROOT

from autotune.database import store as database
from autotune.database.entry import Entry
from autotune.database.store import Database, DatabaseWarning, device_record, load_table, read_table
from autotune.errors import DatabaseError
from kernelgen.kernels.product.schedule import HostSchedule


def test_an_entry_survives_the_file_unchanged(tmp_path: Path) -> None:
    written = entry()
    path = store(tmp_path, HOST, written)
    [read] = Database.load(path).entries
    assert read == written
    assert read.to_dict() == written.to_dict()
    assert read.tuned_schedule == HostSchedule(path_groups=2)
    assert read.default["schedule"] == HostSchedule().to_dict()
    assert Database.load(path).device == device_record(HOST)


def test_a_default_in_a_form_that_is_gone_costs_no_entry(tmp_path: Path) -> None:
    written = dataclasses.replace(entry(), default={**entry().default, "schedule": {"backend": "cpu", "gone": "words"}})
    table = read_table(store(tmp_path, HOST, written))
    assert not table.flaws and [read.default for read in table.by_identity.values()] == [written.default]


def test_the_file_is_sorted_has_a_line_an_entry_and_does_not_depend_on_the_order_of_writing(tmp_path: Path) -> None:
    entries = [entry(graph_class=name) for name in ("conv-e20-d5", "conv-e14-d5", "conv-e17-d6")]
    first = store(tmp_path / "a", HOST, *entries).read_text()
    second = store(tmp_path / "b", HOST, *reversed(entries)).read_text()
    assert first == second
    head, *lines, last = first.splitlines()
    assert first.endswith("]}\n") and head.startswith('{"schema":1,"device":{"name":') and head.endswith('"entries":[')
    assert [json.loads(line.rstrip(","))["graph_class"] for line in lines] == [
        "conv-e14-d5",
        "conv-e17-d6",
        "conv-e20-d5",
    ]
    identities = [Entry.from_dict(item).identity for item in json.loads(first)["entries"]]
    assert identities == sorted(identities)


def test_a_file_with_indentation_is_read_as_before(tmp_path: Path) -> None:
    path = store(tmp_path, HOST, entry(), entry(layout="ir_mul"))
    before, text = Database.load(path).entries, json.dumps(json.loads(path.read_text()), indent=1)
    assert text.count("\n") > 50
    path.write_text(text)
    assert not read_table(path).flaws and Database.load(path).entries == before


def test_putting_an_identity_again_replaces_it(tmp_path: Path) -> None:
    store(tmp_path, HOST, entry(), entry(layout="ir_mul"))
    path = store(tmp_path, HOST, entry(time_us=700.0))
    times = {item.layout: item.time_us for item in Database.load(path).entries}
    assert times == {"mul_ir": 700.0, "ir_mul": 1500.0}


def test_a_schedule_object_is_stored_as_data() -> None:
    made = dataclasses.replace(entry(), schedule=HostSchedule(path_groups=3))
    assert made.to_dict()["schedule"] == HostSchedule(path_groups=3).to_dict()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"time_us": "fast"}, "time_us"),
        ({"time_us": float("nan")}, "finite"),
        ({"time_us": True}, "time_us"),
        ({"bytes": 1.5}, "bytes"),
        ({"label": None}, "label"),
        ({"operation": "fft"}, "operation"),
        ({"direction": "sideways"}, "direction"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"graph_class": "huge"}, "graph_class"),
        ({"graph": {"name": "mof", "edges": "many", "nodes": 3}}, "edges"),
        ({"schedule": {"backend": "cpu", "path_group": 2}}, "path_group"),
        ({"schedule": {"backend": "cpu", "path_groups": [2]}}, "schedule"),
        ({"schedule": {"backend": "cpu", "path_groups": "__import__('os')"}}, "path_groups"),
        ({"default": {"schedule": {"backend": "cpu"}}}, "default"),
        ({"peers": {"e3nn": {"time_us": "slow"}}}, "peers"),
        ({"errors": {"g": None}}, "errors"),
        ({"resources": {"registers": {1, 2}}}, "JSON"),
        ({"trials": {"file": "../../etc/passwd"}}, "inside"),
        ({"trials": {"file": "/etc/passwd"}}, "inside"),
        ({"trials": {"file": "C:\\trials"}}, "inside"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_an_entry_checks_its_data(changes: dict, told: str) -> None:
    with pytest.raises(DatabaseError, match=told):
        Entry.from_dict(entry().to_dict() | changes)


def test_an_entry_needs_every_field() -> None:
    data = entry().to_dict()
    del data["errors"]
    with pytest.raises(DatabaseError, match="missing.*errors"):
        Entry.from_dict(data)


@pytest.mark.parametrize("slug", ["../outside", "a/b", "", ".hidden", "a.json"])
def test_a_slug_cannot_leave_the_directory(tmp_path: Path, slug: str) -> None:
    with pytest.raises(DatabaseError, match="slug"):
        database.database_path(tmp_path, slug)


def test_a_new_file_needs_its_device(tmp_path: Path) -> None:
    new = Database.load(tmp_path / "x.json")
    new.put(entry())
    with pytest.raises(DatabaseError, match="device record"):
        new.save()


def _damaged(text: str) -> Iterator[tuple[str, str]]:
    yield "truncated", text[: len(text) // 2]
    yield "empty", ""
    yield "binary", "\x00\x01\x02"
    yield "list", "[]"
    yield "deep", "[" * 100000
    yield "future", text.replace('"schema":1', '"schema":99')
    yield "nan", text.replace("1500.0", "NaN")


@pytest.mark.parametrize("case", ["truncated", "empty", "binary", "list", "deep", "future", "nan"])
def test_a_damaged_file_is_ignored_with_one_warning_and_kept_aside_when_writing(tmp_path: Path, case: str) -> None:
    path = store(tmp_path, HOST, entry())
    damaged = dict(_damaged(path.read_text()))[case]
    path.write_text(damaged)
    with pytest.warns(DatabaseWarning, match=path.name) as caught:
        assert load_table(path).by_identity == {}
        assert load_table(path).by_identity == {}
        assert Database.load(path).entries == ()
    assert len(caught) == 1
    assert path.read_text() == damaged, "reading must not touch the file"

    with pytest.warns(DatabaseWarning, match="kept as"):
        store(tmp_path, HOST, entry(layout="ir_mul"))
    [aside] = tmp_path.glob("*.corrupt-*.json")
    assert aside.name.startswith(f"{path.stem}.corrupt-")
    assert aside.read_text() == damaged
    assert [item.layout for item in Database.load(path).entries] == ["ir_mul"]


def test_two_damaged_files_of_one_second_are_both_kept(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / f"{HOST.slug}.json").write_text(text)
        with pytest.warns(DatabaseWarning):
            store(tmp_path, HOST, entry())
    assert {aside.read_text() for aside in tmp_path.glob("*.corrupt-*.json")} == {"first", "second"}


def test_one_bad_entry_does_not_cost_the_others(tmp_path: Path) -> None:
    path = store(tmp_path, HOST, entry(), entry(layout="ir_mul"))
    data = json.loads(path.read_text())
    data["entries"][0]["schedule"]["unknown_knob"] = 7
    path.write_text(json.dumps(data))
    with pytest.warns(DatabaseWarning, match="unknown_knob.*1 other entries are used"):
        assert [item.layout for item in load_table(path).by_identity.values()] == ["mul_ir"]
    with pytest.warns(DatabaseWarning, match="kept as"):
        store(tmp_path, HOST, entry(graph_class="conv-e20-d5"))
    assert len(read_table(path).by_identity) == 2
    [aside] = tmp_path.glob("*.corrupt-*.json")
    assert "unknown_knob" in aside.read_text()


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, HOST, entry())
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(DatabaseError, match="no space left"):
        patch.setattr(os, "replace", fail)
        store(tmp_path, HOST, entry(layout="ir_mul"))
    assert path.read_text() == before
    assert list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp")) == []


def test_what_could_not_be_saved_is_saved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "results"
    blocker.write_text("a file where the directory should be")
    mine = Database.load(blocker / "x.json", device_record(HOST))
    mine.put(entry())
    with pytest.raises(DatabaseError, match="cannot write.*EQUITUNE_DATABASE"):
        mine.save()
    blocker.unlink()
    mine.save()
    assert read_table(blocker / "x.json").by_identity.keys() == {entry().identity}


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Permissions bind root only when it is not root; other users are bound already."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_directory_is_read_but_not_written(request: pytest.FixtureRequest) -> None:
    # Not under tmp_path, whose parents only their owner may enter.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = store(directory, HOST, entry())
        (directory / f".{path.name}.lock").unlink(missing_ok=True)
        before = path.read_text()
        directory.chmod(0o555)
        try:
            request.getfixturevalue("as_nobody")
            assert Database.load(path).entries == (entry(),)
            with pytest.raises(DatabaseError, match="cannot write"):
                store(directory, HOST, entry(layout="ir_mul"))
            assert path.read_text() == before
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            directory.chmod(0o755)


def _write_three(directory: Path, number: int) -> None:
    for step in range(3):
        store(directory, HOST, entry(graph_class=f"conv-e{number}-d{step}"))


def test_ten_processes_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    # Forked, not spawned: they write at the same time instead of importing torch one after the other.
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_three, args=(tmp_path, number)) for number in range(10)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 10
    [path] = tmp_path.glob("*.json")
    table = read_table(path)
    assert table.flaws == ()
    found = {item.graph_class for item in table.by_identity.values()}
    assert found == {f"conv-e{number}-d{step}" for number in range(10) for step in range(3)}


def test_two_databases_of_one_process_merge(tmp_path: Path) -> None:
    path = store(tmp_path, HOST)
    first, second = Database.load(path), Database.load(path)
    first.put(entry())
    second.put(entry(layout="ir_mul"))
    first.save()
    second.save()
    assert len(read_table(path).by_identity) == len(second.entries) == 2


def test_a_file_is_parsed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, HOST, entry())
    parsed: list[Path] = []

    def counting(file: Path) -> database.Table:
        parsed.append(file)
        return read_table(file)

    monkeypatch.setattr(database, "read_table", counting)
    load_table(path)
    for _ in range(5):
        assert len(load_table(path).by_identity) == 1
    assert len(parsed) == 1
    monkeypatch.setattr(database, "read_table", read_table)
    store(tmp_path, HOST, entry(layout="ir_mul"))
    assert len(load_table(path).by_identity) == 2


def test_later_files_are_laid_over_earlier_ones(tmp_path: Path) -> None:
    shipped = store(tmp_path / "shipped", HOST, entry(), entry(layout="ir_mul"))
    user = store(tmp_path / "user", HOST, entry(time_us=900.0))
    table = load_table(shipped, user)
    assert {item.layout: item.time_us for item in table.by_identity.values()} == {"mul_ir": 900.0, "ir_mul": 1500.0}
    assert load_table(shipped, user) is table
    user.unlink()
    assert load_table(shipped, user).by_identity[entry().identity].time_us == 1500.0


def test_a_sound_database_warns_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = store(tmp_path, HOST, entry())
        load_table(path, tmp_path / "missing.json", tmp_path / path.name / "below-a-file.json")


def test_a_checkout_writes_to_its_results_and_an_installation_to_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path / "mine"))
    monkeypatch.setattr(database.paths, "checkout_dir", lambda: tmp_path)
    assert database.writable_results_dir() == tmp_path / "results"
    monkeypatch.setattr(database.paths, "checkout_dir", lambda: None)
    assert database.writable_results_dir() == tmp_path / "mine"
    assert database.database_dirs()[-1] == tmp_path / "mine"


def test_entries_older_than_a_field_with_a_default_load() -> None:
    data = entry().to_dict()
    del data["deterministic"]
    assert Entry.from_dict(data) == entry() and not Entry.from_dict(data).deterministic
    del data["label"]
    with pytest.raises(DatabaseError, match=r"missing: \['label'\]"):
        Entry.from_dict(data)


def test_deterministic_entries_stand_beside_the_others(tmp_path: Path) -> None:
    path = store(tmp_path, HOST, entry(), entry(deterministic=True))
    assert sorted(found.deterministic for found in Database.load(path).entries) == [False, True]
    with pytest.raises(DatabaseError, match="deterministic is 'yes'; expected true or false"):
        entry(deterministic="yes")


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=str)
def test_published_databases_load_whole(path: Path) -> None:
    table = read_table(path)
    assert table.flaws == () and len(table.by_identity) > 0
