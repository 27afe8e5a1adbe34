"""Eight tuners of one results folder under fire: nothing is lost or measured twice, the database stays whole."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, SUPPORT
from postgres import Postgres, server_programs
from tiny_config import CONFIG

from autotune.database import trials as trial_records
from autotune.database.store import read_table
from autotune.measure.kinds import space_of
from autotune.search.study import Study, study_name
from autotune.workload.config import load_config
from kernelgen.device import device_facts

TESTS = SUPPORT
KILLS, TRIALS = 8, 6
# Four problems instead of one.
PROBLEMS = """
[problems.scalars]
in1 = "4x0e"
in2 = "0e+1o"
filter = "0e+1o"
[problems.vectors]
in1 = "4x1o"
in2 = "0e+1o"
filter = "0e"
[problems.odd]
in1 = "4x0o+4x1e"
in2 = "0e+1o"
filter = "1o+1e"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(trials=TRIALS) + PROBLEMS)
    return path


class Fire:
    """The tuners of ``many_tuners`` and what they leave."""

    def __init__(self, config: Path, storage: str = "") -> None:
        self.results, self._config, self._storage = config.parent / "results", config, storage
        self.database = self.results / f"{device_facts('cpu').slug}.json"
        self.reads = 0

    def start(self) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)])}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, str(TESTS / "many_tuners.py"), str(self._config), str(self.results)]
        return subprocess.Popen(
            [*command, self._storage, str(KILLS)], env=environment, stderr=subprocess.PIPE, text=True
        )

    def read_until(self, end: threading.Event, flaws: list[str]) -> None:
        """Parse the database again and again; a reader must never meet half a file."""
        while not end.is_set():
            if self.database.exists():
                flaws += read_table(self.database).flaws
                self.reads += 1
            time.sleep(0.005)

    def lines(self) -> dict[str, list[dict[str, Any]]]:
        """Records by study."""
        return {path.stem: trial_records.read(path) for path in self.results.glob("trials/*/*.jsonl")}

    def events(self) -> list[list[str]]:
        return [line.split() for line in self.results.with_name("journal").read_text().splitlines()]

    def log(self) -> str:
        path = self.results.with_name("log")
        return path.read_text()[-4000:] if path.exists() else ""


@pytest.fixture
def watched(config: Path, request: pytest.FixtureRequest) -> Iterator[Fire]:
    """With a reader beside the tuners, who must be done at the end."""
    fire = Fire(config, request.getfixturevalue("server").url if "server" in request.fixturenames else "")
    end, flaws = threading.Event(), list[str]()
    reader = threading.Thread(target=fire.read_until, args=(end, flaws))
    reader.start()
    try:
        yield fire
    finally:
        end.set()
        reader.join()
    assert flaws == [] and fire.reads > 0


@pytest.fixture
def server() -> Iterator[Postgres]:
    pytest.importorskip("psycopg", reason="psycopg is not installed (the extra 'postgres')")
    if (programs := server_programs()) is None:
        pytest.skip("there is no PostgreSQL server on this machine (Debian: apt-get install postgresql)")
    with Postgres(programs) as postgres:
        yield postgres


def check(fire: Fire, process: subprocess.Popen) -> None:
    """After the tuners have ended."""
    _, printed = process.communicate()
    assert process.returncode == 0, printed + fire.log()
    found, events = fire.lines(), fire.events()
    assert len(found) == 4 and sum(event[0] == "kill" for event in events) == KILLS
    for lines in found.values():
        assert len({trial_records.identity(line) for line in lines}) == len(lines) >= TRIALS, "no record is there twice"
        assert [line["number"] for line in lines] == list(range(len(lines)))
        assert all(line["state"] == "ok" for line in lines), [line["reason"] for line in lines]
    count = sum(map(len, found.values()))
    ends = Counter((event[2].split("-")[0], event[3]) for event in events if event[0] == "end")
    assert set(ends.values()) == {1}, "no trial was finished twice"
    assert count - KILLS <= len(ends) <= count, "who is killed after the record says no more than that"
    per_study = {stem.split("-")[0]: len(lines) for stem, lines in found.items()}
    assert all(sum(name == study for study, _ in ends) <= number for name, number in per_study.items())
    table = read_table(fire.database)
    assert table.flaws == () and len(table.by_identity) == 4, "every problem was published"
    for entry in table.by_identity.values():
        lines = trial_records.read(fire.results / entry.trials["file"])
        assert TRIALS <= entry.trials["count"] <= len(lines)
        assert entry.errors["g"] < entry.tolerance


def measured_by(events: list[list[str]]) -> Iterator[tuple[str, set[str], bool]]:
    """Each begin of a trial: who, who had begun it before and was not killed by then, and whether it had ended."""
    killed: set[str] = set()
    begun: dict[tuple[str, str], set[str]] = {}
    ended: set[tuple[str, str]] = set()
    for kind, process, *what in events:
        if kind == "kill":
            killed.add(process)
            continue
        trial = (what[0].split("-")[0], what[1])
        if kind == "end":
            ended.add(trial)
        else:
            yield process, begun.get(trial, set()) - killed, trial in ended
            begun.setdefault(trial, set()).add(process)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_eight_tuners_of_one_folder_under_fire(watched: Fire) -> None:
    process = watched.start()
    check(watched, process)
    begins = list(measured_by(watched.events()))
    assert len(begins) >= 4 * TRIALS
    assert all(not others and not ended for _, others, ended in begins), "no schedule is measured by two, or again"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_eight_tuners_under_fire_while_their_server_is_killed_too(
    watched: Fire, server: Postgres, tmp_path: Path
) -> None:
    process = watched.start()
    while sum(map(len, watched.lines().values())) < 2 * TRIALS and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None, watched.log()
    server.kill()
    before = sum(map(len, watched.lines().values()))
    time.sleep(2.0)
    server.start()
    check(watched, process)
    assert sum(map(len, watched.lines().values())) > before, "they went on"
    assert all(not ended for _, _, ended in measured_by(watched.events())), "nothing finished is measured again"
    facts = device_facts("cpu")
    for workload in load_config(tmp_path / "config.toml", "cpu").workloads:
        name, space = study_name(workload, "forward"), space_of(workload, "forward", facts)
        path = trial_records.study_path(tmp_path / "elsewhere", facts.slug, name)
        with Study(space, name, path, server.url, sharing="storage"):
            here = trial_records.read(trial_records.study_path(watched.results, facts.slug, name))
            assert {trial_records.identity(line) for line in trial_records.read(path)} == {
                trial_records.identity(line) for line in here
            }, "the folder of another host gets all of them"
