"""A device's entries as one file: written here, merged there, and refused if it is anything else."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import random
import re
import tarfile
from pathlib import Path

import pytest
from database_samples import GPU, entry, store

from autotune.cli import commands
from autotune.database.store import database_path, read_table
from autotune.errors import DatabaseError
from autotune.report import summary_table, write_reports
from autotune.tune.contribution import CONFIGS, database_in, whole_config, write_contribution
from autotune.workload.config import load_config
from kernelgen.kernels.product.schedule import CudaSchedule


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    store(tmp_path / "theirs", GPU, entry(CudaSchedule(block_size=64)), entry(CudaSchedule(), direction="backward"))
    path = tmp_path / "gpu.tar.gz"
    assert write_contribution(tmp_path / "theirs", GPU.slug, path) == 2
    return path


def test_what_one_wrote_the_other_merges(sent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ours").mkdir()
    with pytest.raises(SystemExit) as ended:
        commands.main(["db", "merge", str(sent), "--results", str(tmp_path / "ours")])
    assert ended.value.code == 0 and "2 taken" in capsys.readouterr().out
    ours, theirs = (read_table(database_path(tmp_path / side, GPU.slug)) for side in ("ours", "theirs"))
    assert ours.by_identity == theirs.by_identity and ours.device["arch"] == "sm_90"


@pytest.mark.parametrize("name", ["../evil.json", "trials/other.jsonl.gz", "second.json"])
def test_an_archive_with_anything_else_is_refused(sent: Path, tmp_path: Path, name: str) -> None:
    forged = tmp_path / "forged.tar.gz"
    with tarfile.open(sent) as before, tarfile.open(forged, "w:gz") as after:
        for member in before.getmembers():
            after.addfile(member, before.extractfile(member))
        more = tarfile.TarInfo(name)
        more.size = 2
        after.addfile(more, io.BytesIO(b"{}"))
    with pytest.raises(DatabaseError, match="is no contribution"), database_in(forged):
        pass
    assert not (tmp_path / "evil.json").exists()


def test_a_damaged_archive_is_a_typed_error(sent: Path) -> None:
    data, draw = sent.read_bytes(), random.Random(0)
    for _ in range(60):
        at = draw.randrange(10, len(data))
        sent.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
        with contextlib.suppress(DatabaseError), database_in(sent):
            pass
    sent.write_bytes(data[:40])
    with pytest.raises(DatabaseError, match="cannot be read"), database_in(sent):
        pass


def forged(path: Path, *members: tuple[str, bytes, int]) -> Path:
    """An archive of members with a name, a type of tar and a size that may be larger than the archive."""
    with gzip.open(path, "wb") as out:
        for name, kind, size in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, size, "/etc/passwd"
            out.write(info.tobuf(tarfile.GNU_FORMAT) + bytes(-(-min(size, 1024) // 512) * 512))
        out.write(bytes(1024))
    return path


@pytest.mark.parametrize(
    "members, said",
    [
        ([("gpu.json", tarfile.REGTYPE, 1 << 50)], "more than a database has"),
        ([("gpu.json", tarfile.REGTYPE, 2), ("trials/gpu.jsonl.gz", tarfile.SYMTYPE, 0)], "is no contribution"),
        ([("gpu.json", tarfile.REGTYPE, 2), ("trials", tarfile.SYMTYPE, 0)], "is no contribution"),
        ([("gpu.json", tarfile.SYMTYPE, 0)], "is no contribution"),
        ([("gpu.json", tarfile.LNKTYPE, 0)], "is no contribution"),
        ([("/gpu.json", tarfile.REGTYPE, 2)], "is no contribution"),
        ([("gpu.json", tarfile.REGTYPE, 2)] + [("trials/gpu.jsonl.gz", tarfile.REGTYPE, 2)] * 2, "is no contribution"),
    ],
)
def test_links_and_any_number_of_bytes_are_refused(
    tmp_path: Path, members: list[tuple[str, bytes, int]], said: str
) -> None:
    with pytest.raises(DatabaseError, match=said), database_in(forged(tmp_path / "forged.tar.gz", *members)):
        pass


def test_texts_of_strangers_reach_neither_terminal_nor_page_as_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A title for the window, a colour, NUL, markup of the page and of rich."""
    evil = "small\x1b]0;owned\x07\x1b[31m\x00\x9b1m<img src=x onerror=alert(1)>[/red] :smile:"
    name = {"name": evil, "edges": 11872, "nodes": 424}
    reasons = {"state": "drifted", "reason": evil, "date": evil}
    peers = {"e3nn": {"error": evil}, evil: {"time_us": 1.0, "q1_us": 1.0, "q3_us": 1.0}}
    bad = entry(CudaSchedule(), label=evil, graph=name, checked=reasons, peers=peers, software={evil: evil})
    facts = dataclasses.replace(GPU, name=evil)
    path, ours = store(tmp_path / "theirs", facts, bad), tmp_path / "ours"
    ours.mkdir()
    for _ in range(2):  # the second time after a change, whose entry is named
        path.write_text(path.read_text().replace("2026-11-20", "2026-11-21"))
        with pytest.raises(SystemExit) as ended:
            commands.main(["db", "merge", str(path), "--results", str(ours)])
        assert ended.value.code == 0
    shown = capsys.readouterr().out + summary_table(ours)
    assert "small" in shown and "[/red] :smile:" in shown
    (page, *_) = write_reports(ours, tmp_path / "pages")
    for text in (shown, page.read_text(), database_path(ours, facts.slug).read_text()):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text) and "\\u001b" not in text
    assert "<img" not in page.read_text() and "&lt;img" in page.read_text()


def test_there_must_be_something_to_send(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no entries to send"):
        write_contribution(tmp_path, "nvidia-none", tmp_path / "none.tar.gz")


def test_the_command_tunes_every_shipped_config_once_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def tuned(config, device, *options):
        from kernelgen.device import device_facts

        asked.extend(config.workloads)
        store(tmp_path, device_facts(device), entry())

    monkeypatch.setattr("autotune.tune.run.tune", tuned)
    with pytest.raises(SystemExit) as ended:
        commands.main(["db", "contribute", str(tmp_path / "cpu.tar.gz"), "--device", "cpu", "--results", str(tmp_path)])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "cpu.tar.gz: 1 entries of " in out and "attach cpu.tar.gz to an issue" in out
    whole = whole_config("cpu")
    assert asked == list(whole.workloads) and whole.budget_s is None
    assert set(whole.workload_trials) == set(asked), "no hidden limit of ten minutes for all of them"
    assert max(load_config("harmonics", "cpu").workload_trials.values(), default=128) in whole.workload_trials.values()
    assert set(asked) == {workload for name in CONFIGS for workload in load_config(name, "cpu").workloads}
    with pytest.raises(SystemExit) as ended:
        commands.main(["db", "contribute", str(tmp_path / "cpu.zip"), "--device", "cpu"])
    assert ended.value.code == 2 and "ends with .tar.gz" in capsys.readouterr().err
