"""Care of databases: stale entries, files joined with a reason for each conflict, files handed on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from database_samples import GPU, HOST, entry, store
from typer.testing import CliRunner

from autotune.cli.commands import app
from autotune.database.entry import Entry
from autotune.database.maintenance import (
    counts,
    export_file,
    facts_of_record,
    hash_of_entry,
    merge_file,
    preferred,
    stale_entries,
)
from autotune.database.store import Table, read_table
from autotune.errors import DatabaseError
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule

NOW = "0.1.0+0123456789"
DATES = ("2026-11-20T12:00:00+00:00", "2026-11-21T12:00:00+00:00")


def trials(ok: int, **changes: Any) -> dict[str, Any]:
    return entry().to_dict()["trials"] | {"ok": ok} | changes


def test_stale_entries_say_why() -> None:
    fresh = entry(software={"torch": "2.13", "compiler": "g++ 12"})
    old = entry(direction="backward", generator="0.1.0+old")
    rebuilt = entry(dtype="float64", software={"compiler": "g++ 11"})
    table = Table.of({"driver": "580.1"}, (fresh, old, rebuilt))
    software = {"torch": "2.14", "compiler": "g++ 12"}
    assert [(item.entry, item.reasons) for item in stale_entries(table, software, generator=NOW)] == [
        (old, (f"the generator was 0.1.0+old and is {NOW}",)),
        (rebuilt, ("the compiler was g++ 11 and is g++ 12",)),
    ]
    moved = stale_entries(table, software, "590.2", NOW)
    assert len(moved) == 3 and all("the driver was 580.1 and is 590.2" in item.reasons for item in moved)
    assert not stale_entries(Table.of({}, (fresh,)), software, "590.2", NOW), "an unknown driver is no change"


def test_an_entry_whose_source_did_not_change_is_not_stale() -> None:
    device, kept = (
        {"backend": "cuda", "name": "NVIDIA Test", "arch": "sm_90", "units": 132, "vector_bytes": 0},
        CudaSchedule(path_groups=2),
    )
    known = entry(kept, generator="0.1.0+old")  # type: ignore[arg-type]
    known = dataclasses.replace(known, source=hash_of_entry(known, facts_of_record(device)))
    other = dataclasses.replace(known, dtype="float64")
    lost = dataclasses.replace(known, layout="ir_mul", schedule=CudaSchedule(path_groups=50).to_dict())
    found = stale_entries(Table.of(device, (known, other, lost)), {}, generator=NOW)
    reasons = {item.entry.identity: item.reasons for item in found}
    assert known.identity not in reasons and len(reasons) == 2
    assert reasons[other.identity][0].startswith(f"its source was {known.source} and is ")
    assert "its kernel can no longer be generated (path_groups=50" in reasons[lost.identity][0]
    assert Entry.from_dict(known.to_dict()) == known and "source" not in entry().to_dict()


# A time beyond the middle half of the sample entry's, which ends at 1700; a graph of the same class.
SLOWER = {"time_us": 1800.0, "q1_us": 1750.0, "q3_us": 1900.0}
ELSEWHERE = {"name": "mof", "edges": 11873, "nodes": 424}


@pytest.mark.parametrize(
    "theirs, taken, reason",
    [
        ({"generator": "0.1.0+old", "date": DATES[1]}, False, "ours has the current generator"),
        ({"trials": trials(18)}, True, "theirs has more finished trials (18, not 9)"),
        ({"trials": trials(4), "date": DATES[1]}, False, "ours has more finished trials (9, not 4)"),
        ({"trials": trials(17), "date": "2026-11-19T12:00:00+00:00"}, False, f"ours is newer ({DATES[0]})"),
        ({"date": DATES[1], "time_us": 9000.0}, True, f"theirs is newer ({DATES[1]})"),
        (
            {"date": DATES[1], **SLOWER},
            False,
            "ours is faster (1.50\N{NO-BREAK SPACE}ms, not 1.80\N{NO-BREAK SPACE}ms)",
        ),
        ({"date": DATES[1], "trials": trials(18), **SLOWER}, True, "theirs has more finished trials (18, not 9)"),
        ({"date": DATES[1], "graph": ELSEWHERE, **SLOWER}, True, f"theirs is newer ({DATES[1]})"),
    ],
)
def test_the_better_measured_of_two_entries(theirs: dict[str, Any], taken: bool, reason: str) -> None:
    assert preferred(entry(), entry(**theirs), NOW) == (taken, reason)


def test_files_are_joined(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    same, worse = entry(), entry(direction="backward", date=DATES[1])
    store(here, HOST, same, worse)
    better = entry(direction="backward", date=DATES[0], trials=trials(900, file=f"trials/{HOST.slug}/theirs.jsonl"))
    new = entry(dtype="float64")
    file = store(there, HOST, same, better, new)
    for side, lines in ((there, "{}\n"), (here, "")):
        (side / "trials" / HOST.slug).mkdir(parents=True)
        (side / "trials" / HOST.slug / "theirs.jsonl").write_text(lines)
    target, merged = merge_file(file, here, NOW)
    assert [(item.entry, item.taken) for item in merged] == [(better, True), (same, False), (new, True)]
    assert counts(merged) == {"taken": 2, "kept out": 0, "the same": 1}
    assert target.parent == here and list(read_table(target).by_identity.values()) == [better, same, new]
    assert (here / "trials" / HOST.slug / "theirs.jsonl").read_text() == "{}\n"
    assert counts(merge_file(file, here, NOW)[1]) == {"taken": 0, "kept out": 0, "the same": 3}


def test_a_device_without_a_file_gets_one(tmp_path: Path) -> None:
    target, merged = merge_file(store(tmp_path / "there", GPU, entry()), tmp_path / "here", NOW)
    assert target.stem == GPU.slug and read_table(target).device["arch"] == "sm_90" and merged[0].reason == "new here"


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda data: data | {"schema": 2}, "its schema is 2, and this version reads 1"),
        (lambda data: data | {"device": data["device"] | {"slug": "../outside"}}, "is not a plain name"),
        (lambda data: data | {"entries": [{"label": "torn"}, *data["entries"]]}, "entry 0: .*merge what the same"),
    ],
)
def test_a_file_that_is_not_understood_changes_nothing(tmp_path: Path, spoil: Any, message: str) -> None:
    kept = store(tmp_path / "here", HOST, entry(direction="backward"))
    before = kept.read_bytes()
    file = store(tmp_path / "there", HOST, entry())
    file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
    with pytest.raises(DatabaseError, match=message):
        merge_file(file, tmp_path / "here", NOW)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DatabaseError, match="not valid JSON"):
        merge_file(file, tmp_path / "here", NOW)
    with pytest.raises(DatabaseError, match="nowhere.json is not a file"):
        merge_file(tmp_path / "nowhere.json", tmp_path / "here", NOW)
    assert kept.read_bytes() == before and [path.name for path in (tmp_path / "here").glob("*.json")] == [kept.name]


def test_what_is_exported_can_be_joined(tmp_path: Path) -> None:
    table = read_table(store(tmp_path / "here", HOST, entry(), entry(label="other", dtype="float64")))
    file = tmp_path / "hand-on.json"
    assert export_file(table, file, ["other"]) == 1
    with pytest.raises(DatabaseError, match="hand-on.json exists"):
        export_file(table, file)
    with pytest.raises(
        DatabaseError, match=r"no entry matches \['mine'\]; the database has entries of \['other', 'small'\]"
    ):
        export_file(table, tmp_path / "none.json", ["mine"])
    target, _ = merge_file(file, tmp_path / "there", NOW)
    assert [found.label for found in read_table(target).by_identity.values()] == ["other"]


def test_on_the_command_line(tmp_path: Path) -> None:
    from kernelgen.device import device_facts

    def run(*arguments: object) -> str:
        done = CliRunner().invoke(app, ["db", *map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    facts = device_facts("cpu")
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    store(mine, facts, entry())
    newer: Entry = entry(HostSchedule(path_groups=1), date=DATES[1])
    file = store(theirs, facts, newer, entry(dtype="float64"))
    assert "1 of 1 entries" in run("stale", "--device", "cpu", "--results", mine)
    assert json.loads(run("stale", "--device", "cpu", "--results", mine, "--json"))[0]["reasons"]
    said = run("merge", file, "--results", mine)
    assert f"small conv forward float32 mul_ir conv-e14-d5: taken, theirs is newer ({DATES[1]})" in said
    assert "2 taken, 0 kept out, 0 the same" in said.replace("\n", " ")
    assert "2 entries" in run("export", tmp_path / "out.json", "--device", "cpu", "--results", mine)
