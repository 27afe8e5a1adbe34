"""A search without a device: no schedule is proposed twice, the best is found, and every end of a search is told."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from study_cases import CPU, PROBLEM, assert_no_repeats, cost, keys, make_study, ok, run

from autotune.database import trials as trial_records
from autotune.errors import ConfigError
from autotune.measure.space import Space, search_space
from autotune.measure.trial import Outcome
from autotune.search.loop import Compiled, search
from autotune.search.samplers import choose_sampler, make_sampler, proposals_ahead
from kernelgen.device import cuda_facts
from kernelgen.errors import CompileError
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule

optuna = pytest.importorskip("optuna")


@pytest.fixture
def space() -> Space:
    return search_space(PROBLEM, "conv", "forward", "float32", CPU)


@pytest.fixture
def cuda_space() -> Space:
    return search_space(PROBLEM, "conv", "forward", "float32", cuda_facts("sm_90"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return trial_records.study_path(tmp_path, "device", "study")


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
    assert all(line["state"] == "ok" for line in trial_records.read(path))


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
    states = {line["state"] for line in trial_records.read(path)}
    assert states == {"ok", "crashed", "compile"}
    failed = {line["schedule"]["accumulate"] for line in trial_records.read(path) if line["state"] == "crashed"}
    assert failed == {"atomics"}
    assert all(line["compile_s"] == 1.5 for line in trial_records.read(path) if line["state"] == "ok")
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


def test_deadline_still_measures_the_default(space: Space, path: Path) -> None:
    study = make_study(space, path)
    assert run(study, deadline=0.0) == "time"
    assert [line["schedule"] for line in trial_records.read(path)] == [space.default.to_dict()]


def test_a_deadline_does_not_wait_for_compilers(cuda_space: Space, path: Path) -> None:
    """All schedules but the default compile until the search is over."""
    over = threading.Event()

    def prepare(schedule: Schedule) -> Compiled:
        assert schedule == cuda_space.default or over.wait(60), "the search waited"
        return Compiled(0.0)

    study = make_study(cuda_space, path)
    deadline = time.monotonic() + 0.3
    try:
        end = search(study, prepare, lambda schedule, best: ok(1.0), deadline=deadline, overlap=True, workers=2)
    finally:
        over.set()
    assert end == "time" and len(study.finished) == 1


def test_the_fewest_trials_do_not_wait_for_the_deadline(space: Space, path: Path) -> None:
    with make_study(space, path) as study:
        assert run(study, deadline=0.0, fewest=5) == "time"
        assert len(study.finished) == 5
    with make_study(space, path) as again:
        assert run(again, deadline=0.0, fewest=5) == "time"
        assert len(again.finished) == 5, "trials of earlier runs count"
        assert run(again, deadline=0.0, fewest=9, latest=0.0) == "time"
        assert len(again.finished) == 5, "the latest end holds for the fewest too"


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
    with pytest.raises(ConfigError, match="expected module:Class"):
        make_sampler("auto", 0)
    assert [proposals_ahead("tpe", 4), proposals_ahead("tpe", 64), proposals_ahead("random", 64)] == [4, 8, 64]


def test_same_seed_same_search(space: Space, tmp_path: Path) -> None:
    def searched(seed: int, name: str) -> Iterable[str]:
        path = trial_records.study_path(tmp_path, "device", name)
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
    pruned = [line for line in trial_records.read(path) if line["state"] == "pruned"]
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
