"""Two tuners of one study: neither measures what the other has, each learns what the other found, claims can die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, SUPPORT

from autotune.database import trials as trial_records
from autotune.errors import StudyError
from autotune.measure.space import Space, search_space
from autotune.measure.trial import Outcome
from autotune.search import shared as optuna_storage
from autotune.search import shared as storage_access
from autotune.search.loop import Compiled, search
from autotune.search.shared import Locks
from autotune.search.study import Proposal, Study
from kernelgen.device import DeviceFacts
from kernelgen.problem.product import TensorProductProblem

optuna = pytest.importorskip("optuna")

PROBLEM = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
CPU = DeviceFacts("cpu", "test cpu 2 cores", "x86_64", 2, vector_bytes=32)


@pytest.fixture
def space() -> Space:
    return search_space(PROBLEM, "conv", "forward", "float32", CPU)


class Meeting:
    """Opens tuners of one study, in one results folder or a folder each."""

    def __init__(self, space: Space, folder: Path, sharing: str, storage: Any, folders: bool) -> None:
        self.space, self.folder, self.sharing, self.storage, self.folders = space, folder, sharing, storage, folders

    def path(self, name: str) -> Path:
        return trial_records.study_path(self.folder / (name if self.folders else "one"), "device", "study")

    def join(self, name: str, **options: Any) -> Study:
        options = {"sampler": "random", "generator": "test", "sharing": self.sharing, **options}
        storage_access._opened.clear()  # as another process, which has an access of its own
        return Study(self.space, "study", self.path(name), self.storage, **options)


@pytest.fixture(params=["folder", "memory", "sqlite", "sqlite of two folders"])
def meeting(request: pytest.FixtureRequest, space: Space, tmp_path: Path) -> Meeting:
    if request.param == "folder":
        return Meeting(space, tmp_path, "folder", None, False)
    storage = optuna.storages.InMemoryStorage() if request.param == "memory" else f"sqlite:///{tmp_path / 'shared.db'}"
    return Meeting(space, tmp_path, "storage", storage, request.param == "sqlite of two folders")


def ok(time_us: float) -> Outcome:
    return Outcome("ok", time_us=time_us, q1_us=time_us, q3_us=time_us, samples_us=(time_us,) * 10)


def proposed(study: Study) -> Proposal:
    proposal = study.propose()
    assert proposal is not None
    return proposal


def keys(path: Path) -> list[str]:
    return [json.dumps(line["schedule"], sort_keys=True) for line in trial_records.read(path)]


def test_what_one_has_the_other_does_not_get(meeting: Meeting, space: Space) -> None:
    with meeting.join("a") as one, meeting.join("b") as other:
        first, second = proposed(one), proposed(other)
        assert first.schedule == space.default != second.schedule
        one.finish(first, ok(5.0))
        other.finish(second, Outcome("wrong", "every second"))
        for study in (one, other):
            study.refresh()
            assert study.finished[first.schedule.key]["time_us"] == 5.0
            assert study.finished[second.schedule.key]["state"] == "wrong"
            assert study.default_us == 5.0 and study.failures == 1
    for name in ("a", "b"):
        assert sorted(keys(meeting.path(name))) == sorted(
            json.dumps(schedule.to_dict(), sort_keys=True) for schedule in (first.schedule, second.schedule)
        )
        assert [line["number"] for line in trial_records.read(meeting.path(name))] == [0, 1]


def test_two_measure_the_whole_space_once(meeting: Meeting, space: Space) -> None:
    with meeting.join("a", sampler="brute") as one, meeting.join("b", sampler="brute") as other:
        measured = []
        for study in (one, other) * 200:
            if proposal := study.propose():
                measured.append(proposal.schedule)
                study.finish(proposal, ok(1.0 + len(measured)))
        assert one.propose() is other.propose() is None
        assert len(measured) == len(set(measured)) == space.count_legal(1000)
        assert one.finished.keys() == other.finished.keys() and one.best_us == other.best_us == 2.0
    assert len(set(keys(meeting.path("b")))) == len(keys(meeting.path("b"))) == len(measured)


def test_what_was_given_up_is_free_for_the_other(meeting: Meeting, space: Space) -> None:
    with meeting.join("a") as one, meeting.join("b") as other:
        mine = proposed(one)
        seen = proposed(other)
        assert seen.schedule != mine.schedule
        one.drop(mine)
        assert proposed(other).schedule == mine.schedule, "kept in mind"


def test_who_leaves_gives_up_everything(meeting: Meeting, space: Space) -> None:
    with meeting.join("b") as other:
        with meeting.join("a") as one:
            mine = [proposed(one).schedule for _ in range(2)]
            assert mine == [space.default, *space.probes]
            assert proposed(other).schedule not in mine
        assert not other.others_at_work()
        assert [proposed(other).schedule for _ in range(2)] == mine


def test_one_compares(meeting: Meeting) -> None:
    with meeting.join("a") as one, meeting.join("b") as other:
        assert not one.others_at_work() and not other.others_at_work()
        assert one.claim_comparison()
        assert other.others_at_work() and not other.claim_comparison()
        assert not one.others_at_work(), "its own work is no other's"


def test_a_comparison_may_be_waited_for(space: Space, tmp_path: Path) -> None:
    """Who compares is believed at first; in the end it may have been killed, and is waited for until that shows."""
    meeting = Meeting(space, tmp_path, "storage", optuna.storages.InMemoryStorage(), True)
    with meeting.join("b") as other:
        with meeting.join("a") as one:
            assert one.claim_comparison()
            assert other.others_at_work(wait=True), "at once, not after minutes"
            leaves = threading.Timer(0.3, one.close)
            leaves.start()
            assert not other.others_at_work(wait=True, comparing=True)
            leaves.join()
        assert other.claim_comparison()


def test_samplers_hear_of_what_others_found(meeting: Meeting, space: Space) -> None:
    with meeting.join("a") as one, meeting.join("b", sampler="tpe") as other:
        end = search(one, lambda schedule: Compiled(0.0), lambda schedule, best: ok(1.0), trials=6)
        assert end == "trials"
        other.refresh()
        told = other._study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
        assert len(told) == 6 - len(space.probes)
        assert search(other, lambda schedule: Compiled(0.0), lambda schedule, best: ok(1.0), trials=6) == "trials"
    assert len(keys(meeting.path("a"))) == 6


def test_earlier_records_are_brought_along(space: Space, tmp_path: Path) -> None:
    """Each of two hosts searched alone before they share: both end up with all, and nothing is measured again."""
    meeting = Meeting(space, tmp_path, "storage", f"sqlite:///{tmp_path / 'shared.db'}", True)
    for name, time_us in (("a", 1.0), ("b", 2.0)):
        alone = Study(space, "study", meeting.path(name), sampler="random", generator="test", seed=int(time_us))
        with alone as study:
            for _ in range(5):
                study.finish(proposed(study), ok(time_us))
    with meeting.join("a") as one, meeting.join("b") as other:
        one.refresh()
        assert one.finished.keys() == other.finished.keys()
        assert 5 < len(one.finished) < 10, "both began with the default schedule"


def test_a_tuner_alone_keeps_others_out_and_they_it(space: Space, tmp_path: Path) -> None:
    meeting = Meeting(space, tmp_path, "folder", None, False)
    with meeting.join("a", sharing="alone"), pytest.raises(StudyError, match="a tuner without --shared"):
        meeting.join("b")
    with meeting.join("a"), pytest.raises(StudyError, match="another process.*--shared"):
        meeting.join("b", sharing="alone")
    with pytest.raises(StudyError, match="none was given"):
        meeting.join("a", sharing="storage")
    meeting.join("a", sharing="alone").close()


KILLED = """
import os, signal, sys
from pathlib import Path
from autotune.measure.space import search_space
from kernelgen import TensorProductProblem
from kernelgen.device import DeviceFacts
PROBLEM = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
CPU = DeviceFacts("cpu", "test cpu 2 cores", "x86_64", 2, vector_bytes=32)
from autotune.search.study import Study
from autotune.search import shared
shared.HEARTBEAT_S, shared.GRACE_S = 1, 2
space = search_space(PROBLEM, "conv", "forward", "float32", CPU)
study = Study(space, "study", Path(sys.argv[1]), sys.argv[2] or None, generator="test", sharing=sys.argv[3])
assert [study.propose().schedule for _ in range(2)] == [space.default, *space.probes]
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["folder", "storage"])
def test_claims_of_the_dead_are_free_again(
    space: Space, tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_storage, "HEARTBEAT_S", 1)
    monkeypatch.setattr(optuna_storage, "GRACE_S", 2)
    storage = f"sqlite:///{tmp_path / 'shared.db'}" if sharing == "storage" else None
    meeting = Meeting(space, tmp_path, sharing, storage, False)
    path = [str(SUPPORT), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", KILLED, str(meeting.path("a")), storage or "", sharing]
    assert subprocess.run(command, env=environment).returncode == -9
    with meeting.join("b") as study:
        assert not study.others_at_work(wait=True), "waits until the storage has found out"
        assert [proposed(study).schedule for _ in range(2)] == [space.default, *space.probes]


def test_a_claim_given_up_for_dead_is_taken_again_or_lost(space: Space, tmp_path: Path) -> None:
    """A tuner stood still until its claims were failed: what it measured counts if nobody else took the schedule."""
    storage = optuna.storages.InMemoryStorage()
    meeting = Meeting(space, tmp_path, "storage", storage, True)
    with meeting.join("a") as one, meeting.join("b") as other:
        kept, lost = proposed(one), proposed(one)
        for trial in storage.get_all_trials(0):
            storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)
        taken = proposed(other)
        assert taken.schedule == kept.schedule
        one.finish(lost, ok(3.0))
        one.finish(kept, ok(4.0))
        other.finish(taken, ok(5.0))
        one.refresh()
        other.refresh()
        assert {line["time_us"] for line in other.finished.values()} == {3.0, 5.0}
    for name in ("a", "b"):
        assert sorted(line["time_us"] for line in trial_records.read(meeting.path(name))) == [3.0, 5.0]


def test_a_storage_that_stays_away_is_an_error_and_loses_nothing(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_access, "WAIT_S", 0.0)

    class Away(optuna.storages.InMemoryStorage):
        away = False

        def set_trial_user_attr(self, *given: Any) -> None:
            if self.away:
                raise optuna.exceptions.StorageInternalError("the server closed the connection")
            super().set_trial_user_attr(*given)

    storage = Away()
    meeting = Meeting(space, tmp_path, "storage", storage, False)
    with meeting.join("a") as study:
        proposal = proposed(study)
        storage.away = True
        with pytest.raises(StudyError, match="closed the connection.*Check that the storage runs, then run"):
            study.finish(proposal, ok(7.0))
        assert [line["time_us"] for line in trial_records.read(meeting.path("a"))] == [7.0]
    storage.away = False
    with meeting.join("a") as study:
        assert study.default_us == 7.0
    (trial,) = storage.get_all_trials(0, states=(optuna.trial.TrialState.COMPLETE,))
    assert trial.value == 7.0, "the next run told the storage"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense://nowhere", "cannot be used"),
        ("not a url", "cannot be used"),
        ("mysql+nodriver://me:secret@host/name", "cannot be used"),
        ("oracle+oracledb://me:secret@host/name", r"not installed.*equitune\[postgres\]"),
    ],
)
def test_an_unusable_url_is_one_error_without_its_password(space: Space, tmp_path: Path, url: str, told: str) -> None:
    meeting = Meeting(space, tmp_path, "storage", url, False)
    with pytest.raises(StudyError, match=told) as caught:
        meeting.join("a")
    assert "secret" not in str(caught.value)
    Study(space, "study", meeting.path("a"), generator="test").close()


def test_locks_exclude_within_a_process_and_end_with_their_file(tmp_path: Path) -> None:
    one, other = Locks(tmp_path / "x.lock"), Locks(tmp_path / "x.lock")
    assert one.take(0, shared=True) and other.take(0, shared=True) and not one.take(0)
    assert one.take(7) and not other.take(7) and not other.take(7, shared=True) and other.take(8)
    assert other.taken_elsewhere(7) and not other.taken_elsewhere(8) and one.taken_elsewhere(8)
    one.close()
    assert other.take(7) and other.take(0)
    assert not other.taken_elsewhere(0), "its own are not another's"
    other.close()


def test_reading_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert trial_records.read_from(path, 0) == ([], 0)
    path.write_bytes(b'{"number": 0}\n{"number": 1}\nno json\n{"numb')
    found, offset = trial_records.read_from(path, 0)
    assert found == [{"number": 0}, {"number": 1}]
    assert trial_records.read_from(path, offset) == ([], offset)
    with open(path, "ab") as file:
        file.write(b'er": 2}')
    found, offset = trial_records.read_from(path, offset)
    assert found == [{"number": 2}]
    trial_records.append(path, {"number": 3})
    assert trial_records.read_from(path, offset)[0] == [{"number": 3}]
