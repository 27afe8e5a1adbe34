"""What a study has finished survives: a second run, a kill, an interrupt, a torn file, a lost or broken storage."""

from __future__ import annotations

import dataclasses
import signal
import warnings
from pathlib import Path

import pytest
from study_cases import CPU, PROBLEM, assert_no_repeats, cost, make_study, ok, run

from autotune.database import trials as trial_records
from autotune.errors import StudyError
from autotune.measure.space import Space, search_space
from autotune.measure.trial import Outcome
from autotune.search.starting_points import untried_forms
from autotune.search.study import Study
from autotune.workload.config import load_problems
from kernelgen.device import cuda_facts
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule

optuna = pytest.importorskip("optuna")


@pytest.fixture
def space() -> Space:
    return search_space(PROBLEM, "conv", "forward", "float32", CPU)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return trial_records.study_path(tmp_path, "device", "study")


def test_second_run_goes_on(space: Space, path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    with make_study(space, path, storage, sampler="tpe") as study:
        assert run(study, trials=10) == "trials"
    with make_study(space, path, storage, sampler="tpe") as study:
        assert len(study.finished) == 10
        assert study.default_us == cost(space.default)
        assert run(study, trials=10) == "trials"
        assert len(trial_records.read(path)) == 10, "nothing to do"
        assert run(study, trials=25) == "trials"
    assert_no_repeats(path)
    assert [line["number"] for line in trial_records.read(path)] == list(range(25))


def test_lost_storage_is_filled_from_the_records(space: Space, path: Path) -> None:
    def measure(schedule: Schedule) -> Outcome:
        return ok(cost(schedule)) if schedule.accumulate == "registers" else Outcome("timeout", "no answer")

    with make_study(space, path, sampler="random") as study:
        run(study, measure, trials=12)
        failures = study.failures
    assert failures > 0
    with make_study(space, path, sampler="tpe") as study:
        trials = study._study.get_trials()
        expressible = 12 - failures - len(space.probes)
        assert len([t for t in trials if t.state == optuna.trial.TrialState.COMPLETE]) == expressible
        assert len([t for t in trials if t.constraints == {"runs": 1.0}]) == failures
        assert study._study.best_value == study.best_us
        run(study, measure, trials=20)
    assert_no_repeats(path)


def test_kill_between_record_and_tell(space: Space, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = optuna.storages.InMemoryStorage()
    with make_study(space, path, storage) as study:
        monkeypatch.setattr(Study, "_tell", lambda self, *told: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            run(study, trials=5)
    monkeypatch.undo()
    assert len(trial_records.read(path)) == 1
    with make_study(space, path, storage) as study:
        trials = study._study.get_trials()
        assert [t.value for t in trials if t.state == optuna.trial.TrialState.COMPLETE] == [cost(space.default)]
        assert not [t for t in trials if t.state == optuna.trial.TrialState.RUNNING]
        run(study, trials=5)
    assert_no_repeats(path)


def test_interrupt_keeps_what_is_finished(space: Space, path: Path) -> None:
    storage, measured = optuna.storages.InMemoryStorage(), []

    def measure(schedule: Schedule) -> Outcome:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(schedule)
        return ok(cost(schedule))

    with make_study(space, path, storage) as study:
        assert run(study, measure, workers=2) == "interrupted"
    assert len(trial_records.read(path)) == 3
    with make_study(space, path, storage, sampler="brute") as study:
        assert run(study) == "exhausted"
        assert len(study.finished) == space.count_legal(10_000), "what was under way is proposed again"


def test_interrupt_while_a_record_is_written(space: Space, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the record and what follows it must not split them."""
    write = trial_records.append

    def append(path: Path, line: dict) -> None:
        write(path, line)
        if line["number"] == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trial_records, "append", append)
    study = make_study(space, path)
    assert run(study, trials=10) == "interrupted"
    assert len(trial_records.read(path)) == len(study.finished) == 3
    told = study._study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert len(told) == 3 - len(space.probes)


def test_other_generators_trials_are_only_starting_points(space: Space, path: Path) -> None:
    with make_study(space, path, generator="old", sampler="brute") as study:
        run(study)
        best = [line["schedule"] for line in study.ranking[:3]]
    with make_study(space, path, generator="new", sampler="tpe") as study:
        assert not study.finished and study.best_us is None
        run(study, trials=4)
    new = [line for line in trial_records.read(path) if line["generator"] == "new"]
    assert [line["schedule"] for line in new[1:4]] == best


def test_a_form_that_no_earlier_trial_had_is_tried_with_the_earlier_winner(space: Space, path: Path) -> None:
    """Such as one that a new generator brings; before what won elsewhere."""
    receivers = dataclasses.replace(space, knobs={**space.knobs, "order": ("receiver",)}, probes=())
    with make_study(receivers, path, generator="old", sampler="brute") as study:
        run(study)
        best = study.ranking[0]["schedule"]
        elsewhere = [study.schedule_of(line) for line in study.ranking[-3:]]
    with make_study(space, path, generator="new", sampler="tpe", starts=elsewhere) as study:
        run(study, trials=6)
    new = [line["schedule"] for line in trial_records.read(path) if line["generator"] == "new"]
    assert new[4] == {**best, "order": "sender"} and all(schedule["order"] == "receiver" for schedule in new[:4])
    assert new[5] == elsewhere[0].to_dict()


def test_new_forms_of_several_knobs_are_tried_together_too() -> None:
    space = search_space(
        load_problems()["nequip-water"], "conv", "forward", "float32", cuda_facts("sm_90"), num_edges=300
    )
    old = CudaSchedule(teams_per_node=8, block_size=256, ahead="all")
    others = [dataclasses.replace(old, **{knob: value}) for knob, values in space.knobs.items() for value in values
              if isinstance(value, str | bool) and value not in ("copy", "unrolled")]  # fmt: skip
    others.append(dataclasses.replace(old, min_blocks=1))
    found = untried_forms(space, [old, *others])
    wanted = [{"prefetch": "copy"}, {"finish": "unrolled"}, {"prefetch": "copy", "finish": "unrolled"}]
    assert found == [dataclasses.replace(old, **change) for change in wanted]
    assert untried_forms(space, []) == [] == untried_forms(space, [old, *others, *found])
    assert untried_forms(space, [old, *others[:-1], *found]) == others[-1:], "registers without a limit are a form too"


def test_torn_line_costs_that_line_only(path: Path) -> None:
    trial_records.append(path, {"number": 0})
    with open(path, "a") as file:
        file.write('{"number": 1, "sta')
    assert trial_records.read(path) == [{"number": 0}]
    trial_records.append(path, {"number": 2})
    assert trial_records.read(path) == [{"number": 0}, {"number": 2}]
    assert trial_records.read(path.with_name("absent.jsonl")) == []


def test_study_file_name_is_safe(tmp_path: Path) -> None:
    found = trial_records.study_path(tmp_path, "device", "a/b c-conv")
    assert found == tmp_path / "trials" / "device" / "a_b_c-conv.jsonl"


def test_two_tuners_do_not_share_a_study(space: Space, path: Path) -> None:
    with make_study(space, path), pytest.raises(StudyError, match="another process"):
        make_study(space, path)
    make_study(space, path).close()


def test_broken_sqlite_file_is_kept_aside(space: Space, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "studies" / "device.db"
    storage = f"sqlite:///{file}"
    with make_study(space, path, storage, sampler="random") as study:
        run(study, trials=4)
    file.write_bytes(b"not a database" * 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make_study(space, path, storage, sampler="random") as study:
            assert len(study._study.get_trials()) == 4 - len(space.probes), "the sampler learns from the records"
    stored = optuna.load_study(study_name=study._optuna_name(), storage=storage).get_trials()
    assert len(stored) == 4 - len(space.probes), "the records filled the new file"
    assert any("kept as" in str(warning.message) for warning in caught)
    assert [aside.read_bytes()[:14] for aside in file.parent.glob("*.corrupt-*")] == [b"not a database"]


def test_unusable_storage_is_one_clear_error(space: Space, path: Path) -> None:
    with pytest.raises(StudyError, match="Optuna storage"):
        make_study(space, path, "nonsense://nowhere")


def test_storage_is_a_copy_made_at_the_end(space: Space, path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    for trials in (6, 10):
        with make_study(space, path, storage) as study:
            run(study, trials=trials)
        stored = optuna.load_study(study_name=study._optuna_name(), storage=storage).get_trials()
        assert len(stored) == trials - len(space.probes)
        assert {t.user_attrs["schedule"] for t in stored} == set(study.finished) - {s.key for s in space.probes}


def test_study_without_a_path_keeps_nothing(space: Space, tmp_path: Path) -> None:
    with Study(space, "rehearsal", sampler="random") as study:
        assert run(study, trials=5) == "trials"
        assert len(study.finished) == 5
        with pytest.raises(StudyError, match="no records"):
            study.path  # noqa: B018
    assert not list(tmp_path.iterdir())
