"""A search without a device: no schedule is proposed twice, outcomes survive, a second run goes on where one ended."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from autotune import records
from autotune.errors import ConfigError, StudyError
from autotune.jobs import Outcome
from autotune.sampling import choose_sampler, make_sampler, proposals_ahead
from autotune.search import Compiled, search
from autotune.space import Space, search_space
from autotune.study import Study
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import CompileError
from kernelgen.problem import TensorProductProblem
from kernelgen.schedule import CudaSchedule, HostSchedule, Schedule

optuna = pytest.importorskip("optuna")

PROBLEM = TensorProductProblem.channelwise("16x0e+16x1o", "0e+1o", "0e+1o")
CPU = DeviceFacts("cpu", "test cpu 8 cores", "x86_64", 8, vector_bytes=32)


@pytest.fixture
def space() -> Space:
    return search_space(PROBLEM, "conv", "forward", "float32", CPU)


@pytest.fixture
def cuda_space() -> Space:
    return search_space(PROBLEM, "conv", "forward", "float32", cuda_facts("sm_90"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return records.study_path(tmp_path, "device", "study")


def make_study(space: Space, path: Path, storage: object | None = None, **options: object) -> Study:
    options = {"generator": "test", **options}
    return Study(space, "study", path, storage or optuna.storages.InMemoryStorage(), **options)  # type: ignore[arg-type]


def cost(schedule: Schedule) -> float:
    """A smooth stand-in for a time in microseconds; the best is a registers, wide-block, two-group schedule."""
    assert isinstance(schedule, HostSchedule)
    penalty = (
        40.0 * (not schedule.fuse)
        + 3.0 * (schedule.order == "sender")
        + 20.0 * (schedule.accumulate == "atomics")
        + 5.0 * (schedule.threads != 0)
    )
    return 10.0 + penalty + 3.0 * abs(schedule.path_groups - 2) + 8.0 / schedule.channel_block


def ok(time_us: float) -> Outcome:
    return Outcome("ok", time_us=time_us, q1_us=time_us, q3_us=time_us, samples_us=(time_us,) * 10)


def run(study: Study, measure: Callable[[Schedule], Outcome] = lambda s: ok(cost(s)), **options: object) -> str:
    return search(study, lambda schedule: Compiled(0.0), lambda schedule, best: measure(schedule), **options)  # type: ignore[arg-type]


def keys(path: Path) -> list[str]:
    return [json.dumps(line["schedule"], sort_keys=True) for line in records.read(path)]


def assert_no_repeats(path: Path) -> None:
    assert len(keys(path)) == len(set(keys(path)))


def test_brute_measures_every_legal_schedule_once(space: Space, path: Path) -> None:
    study = make_study(space, path, sampler="brute")
    assert run(study) == "exhausted"
    assert len(study.finished) == space.count_legal(10_000)
    assert_no_repeats(path)
    legal = {schedule for schedule in space.shuffled(0) if space.broken_limit(schedule) is None}
    assert study.best_us == min(cost(schedule) for schedule in legal)


@pytest.mark.parametrize("sampler", ["tpe", "climb", "gp", "random"])
def test_samplers_never_repeat_nor_break_a_limit(space: Space, path: Path, sampler: str) -> None:
    measured: list[Schedule] = []

    def measure(schedule: Schedule) -> Outcome:
        measured.append(schedule)
        return ok(cost(schedule)) if len(measured) % 5 else Outcome("wrong", "every fifth")

    study = make_study(space, path, sampler=sampler)
    trials = 15 if sampler == "gp" else 30
    assert run(study, measure, trials=trials, workers=3) == "trials"
    assert len(measured) == len(set(measured)) == trials
    assert all(space.broken_limit(schedule) is None for schedule in measured)
    assert_no_repeats(path)
    assert study.failures == trials // 5


def test_samplers_reach_the_end_of_the_space(space: Space, path: Path) -> None:
    study = make_study(space, path, sampler="random")
    assert run(study) == "exhausted"
    assert len(study.finished) == space.count_legal(10_000)


def test_illegal_suggestions_are_constraints_not_trials(cuda_space: Space, path: Path) -> None:
    study = make_study(cuda_space, path, sampler="random")
    run(study, lambda schedule: ok(1.0), trials=60)
    told = study._study.get_trials(states=(optuna.trial.TrialState.PRUNED,))
    assert told, "random suggestions in the CUDA space break limits"
    assert all(trial.constraints == {"runs": 1.0} for trial in told)
    assert all(line["state"] == "ok" for line in records.read(path))


def test_default_comes_first_then_the_starts(cuda_space: Space, path: Path) -> None:
    starts = [CudaSchedule(block_size=256), CudaSchedule(block_size=512, min_blocks=8), CudaSchedule(block_size=64)]
    assert cuda_space.broken_limit(starts[1]) is not None
    study = make_study(cuda_space, path, starts=starts)
    proposed = [study.propose() for _ in range(3)]
    expected = [cuda_space.default, cuda_space.nearest(starts[0]), cuda_space.nearest(starts[2])]
    assert [p.schedule for p in proposed if p] == expected


def test_failures_are_recorded_and_told_as_violations(space: Space, path: Path) -> None:
    def measure(schedule: Schedule) -> Outcome:
        return Outcome("crashed", "SIGSEGV") if schedule.accumulate == "atomics" else ok(cost(schedule))

    def prepare(schedule: Schedule) -> Compiled:
        if schedule.path_groups == 4:
            raise CompileError("no")
        return Compiled(1.5)

    study = make_study(space, path, sampler="brute")
    assert search(study, prepare, lambda schedule, best: measure(schedule)) == "exhausted"
    states = {line["state"] for line in records.read(path)}
    assert states == {"ok", "crashed", "compile"}
    failed = {line["schedule"]["accumulate"] for line in records.read(path) if line["state"] == "crashed"}
    assert failed == {"atomics"}
    assert all(line["compile_s"] == 1.5 for line in records.read(path) if line["state"] == "ok")
    trials = study._study.get_trials()
    violations = [t for t in trials if t.state == optuna.trial.TrialState.PRUNED]
    unfused = [s for s in space.probes if study.finished[s.key]["state"] != "ok"]
    assert len(violations) == study.failures - len(unfused) > 0
    assert all(trial.constraints == {"runs": 1.0} for trial in violations)
    assert not [trial for trial in trials if trial.state == optuna.trial.TrialState.FAIL]


def test_cut_trials_never_win(space: Space, path: Path) -> None:
    study = make_study(space, path, sampler="brute")
    run(study, lambda s: Outcome("ok", time_us=0.1, q1_us=0.1, q3_us=0.1, cut=s != space.default), trials=5)
    assert [line["schedule"] for line in study.ranking] == [space.default.to_dict()]


def test_second_run_goes_on(space: Space, path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    with make_study(space, path, storage, sampler="tpe") as study:
        assert run(study, trials=10) == "trials"
    with make_study(space, path, storage, sampler="tpe") as study:
        assert len(study.finished) == 10
        assert study.default_us == cost(space.default)
        assert run(study, trials=10) == "trials"
        assert len(records.read(path)) == 10, "nothing to do"
        assert run(study, trials=25) == "trials"
    assert_no_repeats(path)
    assert [line["number"] for line in records.read(path)] == list(range(25))


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
        monkeypatch.setattr(Study, "_tell", lambda self, trial, line: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            run(study, trials=5)
    monkeypatch.undo()
    assert len(records.read(path)) == 1
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
    assert len(records.read(path)) == 3
    with make_study(space, path, storage, sampler="brute") as study:
        assert run(study) == "exhausted"
        assert len(study.finished) == space.count_legal(10_000), "what was under way is proposed again"


def test_interrupt_while_a_record_is_written(space: Space, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the record and what follows it must not split them."""
    write = records.append

    def append(path: Path, line: dict) -> None:
        write(path, line)
        if line["number"] == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(records, "append", append)
    study = make_study(space, path)
    assert run(study, trials=10) == "interrupted"
    assert len(records.read(path)) == len(study.finished) == 3
    told = study._study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert len(told) == 3 - len(space.probes)


def test_deadline_still_measures_the_default(space: Space, path: Path) -> None:
    study = make_study(space, path)
    assert run(study, deadline=0.0) == "time"
    assert [line["schedule"] for line in records.read(path)] == [space.default.to_dict()]


def test_other_generators_trials_are_only_starting_points(space: Space, path: Path) -> None:
    with make_study(space, path, generator="old", sampler="brute") as study:
        run(study)
        best = [line["schedule"] for line in study.ranking[:3]]
    with make_study(space, path, generator="new", sampler="tpe") as study:
        assert not study.finished and study.best_us is None
        run(study, trials=4)
    new = [line for line in records.read(path) if line["generator"] == "new"]
    assert [line["schedule"] for line in new[1:4]] == best


def test_torn_line_costs_that_line_only(path: Path) -> None:
    records.append(path, {"number": 0})
    with open(path, "a") as file:
        file.write('{"number": 1, "sta')
    assert records.read(path) == [{"number": 0}]
    records.append(path, {"number": 2})
    assert records.read(path) == [{"number": 0}, {"number": 2}]
    assert records.read(path.with_name("absent.jsonl")) == []


def test_study_file_name_is_safe(tmp_path: Path) -> None:
    found = records.study_path(tmp_path, "device", "a/b c-conv")
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


def test_choice_of_sampler(space: Space, cuda_space: Space) -> None:
    narrow = Space(space.spec, {knob: space.knobs[knob] for knob in ("accumulate", "edges_per_chunk", "channel_block")})
    legal = narrow.count_legal(10_000)
    assert 1 < legal < space.count_legal(10_000)
    assert choose_sampler(narrow, None, None) == "brute"
    assert choose_sampler(narrow, legal, None) == "brute"
    assert choose_sampler(narrow, legal - 1, None) == "climb"
    assert choose_sampler(narrow, None, 1.0) == "climb"
    assert choose_sampler(cuda_space, None, None) == "climb"
    with pytest.raises(ConfigError, match="tpe"):
        make_sampler("tpee", 0)
    assert [proposals_ahead("tpe", 4), proposals_ahead("tpe", 64), proposals_ahead("random", 64)] == [4, 8, 64]


def test_same_seed_same_search(space: Space, tmp_path: Path) -> None:
    def searched(seed: int, name: str) -> Iterable[str]:
        path = records.study_path(tmp_path, "device", name)
        study = make_study(space, path, sampler="tpe", seed=seed)
        run(study, trials=15)
        return keys(path)

    assert searched(3, "a") == searched(3, "b")
    assert searched(4, "c") != searched(3, "d")


def test_probes_follow_the_starts_and_unfused_is_one_of_them(cuda_space: Space, path: Path) -> None:
    start, moved = (cuda_space.schedule({"block_size": size}) for size in (256, 64))
    study = make_study(
        cuda_space, path, sampler="random", starts=[start, dataclasses.replace(moved, fuse=False, accumulate="atomics")]
    )
    proposed = [p.schedule for p in (study.propose() for _ in range(60)) if p]
    unfused = dataclasses.replace(cuda_space.default, fuse=False)
    assert proposed[:2] == [cuda_space.default, start]
    probes = list(cuda_space.probes)
    assert probes[-1] == unfused and len(probes) > 1 and proposed[3 : 3 + len(probes)] == probes
    assert [schedule for schedule in proposed if not schedule.fuse] == [unfused]
    assert proposed[2] == dataclasses.replace(moved, accumulate="atomics"), (
        "an unfused start is moved to its fused like"
    )


def test_probe_can_win_but_is_not_told_to_the_sampler(space: Space, path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    for _ in range(2):
        with make_study(space, path, storage, sampler="random") as study:
            run(study, lambda s: ok(1.0 if not s.fuse else 2.0), trials=8)
            assert study.best is not None and not study.best["schedule"]["fuse"]
            assert len(study._study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))) == 7


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


def test_patience_ends_a_search_that_gains_nothing(space: Space, path: Path) -> None:
    times = iter([10.0, 8.0, 7.95, 9.0, 7.0, *[6.95] * 100])
    with make_study(space, path, sampler="random") as study:
        assert run(study, lambda schedule: ok(next(times)), patience=4) == "patience"
        assert len(study.finished) == 9, "7.95 and 6.95 are gains of less than 1%"
        assert study.stale == 4
    with make_study(space, path, sampler="random") as study:
        assert run(study, patience=4) == "patience"
        assert len(study.finished) == 9, "a second run has nothing to do"


def test_what_spills_is_not_measured(space: Space, path: Path) -> None:
    measured: list[Schedule] = []

    def measure(schedule: Schedule, best_us: float | None) -> Outcome:
        measured.append(schedule)
        return dataclasses.replace(ok(cost(schedule)), resources=resources(schedule))

    def resources(schedule: Schedule) -> dict[str, int]:
        return {"spill_bytes": 2000 if schedule.accumulate == "atomics" else 100}

    study = make_study(space, path, sampler="tpe")
    assert search(study, lambda schedule: Compiled(0.5, resources(schedule)), measure, trials=40, workers=4) == "trials"
    pruned = [line for line in records.read(path) if line["state"] == "pruned"]
    assert pruned and len(measured) == 40 - len(pruned)
    assert all(line["schedule"]["accumulate"] == "atomics" for line in pruned)
    assert all("2000 bytes" in line["reason"] and line["resources"]["spill_bytes"] == 2000 for line in pruned)
    assert not [schedule for schedule in measured if schedule.accumulate == "atomics"]
    assert study.failures == 0 and study.stale < 40 - len(pruned)
    told = study._study.get_trials(states=(optuna.trial.TrialState.PRUNED,))
    assert len([t for t in told if t.constraints == {"runs": 1.0}]) >= len(pruned)


def test_slow_compilation_does_not_hold_up_the_others(space: Space, path: Path) -> None:
    """While the second kernel compiles, the third and later ones are measured."""
    measured: list[Schedule] = []
    held: list[Schedule] = []
    released = threading.Event()

    def prepare(schedule: Schedule) -> Compiled:
        if schedule != space.default and not held:
            held.append(schedule)
            assert released.wait(60)
        return Compiled(0.0)

    def measure(schedule: Schedule, best_us: float | None) -> Outcome:
        measured.append(schedule)
        if len(measured) == 4:
            released.set()
        return ok(cost(schedule))

    study = make_study(space, path, sampler="random")
    assert search(study, prepare, measure, trials=6, workers=3, overlap=True) == "trials"
    assert measured[0] == space.default
    assert held[0] in measured and measured.index(held[0]) >= 4
