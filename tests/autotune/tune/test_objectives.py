"""Objectives: what each orders, that trials and entries of several never mix, and which device is refused."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from database_samples import HOST, entry, store
from report_samples import page_of, write_results
from study_cases import CPU, PROBLEM, cost, run

from autotune.cli import show
from autotune.compare.comparison import ComparisonResult, ComparisonSession, Result, _Comparison
from autotune.database import trials as trial_records
from autotune.database.entry import Entry
from autotune.database.maintenance import preferred
from autotune.database.store import Database, database_path
from autotune.errors import ConfigError, DatabaseError
from autotune.measure import timing
from autotune.measure.space import Space, search_space
from autotune.measure.timing import require_figures
from autotune.measure.trial import ENERGY_WITHIN, Outcome, TrialJob, TrialSetting
from autotune.report import summary_table
from autotune.search.loop import Compiled, search
from autotune.search.samplers import KEY
from autotune.search.study import Study, study_name
from autotune.tune.publish import _peer, entry_of, gained, why_kept, winner_of
from autotune.tune.run import tune
from autotune.workload.config import TuneConfig, load_graphs
from autotune.workload.objective import TIME, Objective
from autotune.workload.workload import Workload
from kernelgen.device import device_facts
from kernelgen.errors import ToolMissingError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.version import GENERATOR_VERSION

optuna = pytest.importorskip("optuna")
WORK = Workload("small", PROBLEM, "conv", load_graphs()["carbon-small"])
FRONT = Objective.parse("pareto:time,memory")


def record(name: str, *figures: float) -> dict[str, Any]:
    return {"name": name} | dict(zip(("time_us", "joules", "memory_bytes"), figures, strict=False))


RECORDS = [record("fast", 10.0, 0.9, 700), record("frugal", 12.0, 0.5, 600), record("small", 40.0, 0.8, 100)]


def test_an_objective_is_read_from_its_text_and_prints_as_it() -> None:
    texts = ("time", "energy", "memory", "time=1,energy=0.5", "time=0.333333,memory=1", "pareto:time,memory")
    assert [str(Objective.parse(text)) for text in texts] == list(texts) and Objective.parse("time") == TIME
    others = {"energy=0.5, time=1": texts[3], "time=2,energy=1": texts[3], "energy=3": "energy"}
    others |= {"memory,time": "time=1,memory=1", "pareto:memory,time": texts[5]}
    assert {text: str(Objective.parse(text)) for text in others} == others
    for text in (
        "",
        "speed",
        "time=0",
        "time=-1",
        "time=x",
        "time=inf",
        "time,time",
        "pareto:time",
        "pareto:time=1,energy",
    ):
        with pytest.raises(ConfigError, match=r"expected time, energy or memory, weights such as"):
            Objective.parse(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("time", "fast frugal small"),
        ("energy", "frugal small fast"),
        ("memory", "small frugal fast"),
        ("time=1,energy=0.1", "fast frugal small"),
        ("time=0.5,energy=1", "frugal fast small"),
        ("time=0.5,memory=1", "small frugal fast"),
        ("time=1,memory=0.1", "fast frugal small"),
    ],
)
def test_the_winner_differs_by_the_objective_and_weights_matter(text: str, names: str) -> None:
    objective = Objective.parse(text)
    assert [line["name"] for line in objective.ranked(RECORDS)] == names.split()
    slower = record("slower", 11.0, 0.9, 100)
    assert Objective.parse("memory").ranked([RECORDS[2], slower])[0] == slower, "of equal memory, the fastest"
    lacking = [record(*line) for line in (("a", 1.0), ("b", 1.0, None, None), ("c", 1.0, "1", "1"))]  # type: ignore[arg-type]
    if text != "time":
        assert [line["name"] for line in objective.ranked([*lacking, *RECORDS])] == names.split()


def test_a_front_keeps_what_no_other_beats_and_its_ends_come_first() -> None:
    beaten, twin = record("beaten", 41.0, 0.1, 101), record("twin", 10.0, 0.9, 700)
    front = FRONT.front([beaten, *RECORDS, twin])
    assert [line["name"] for line in front] == ["fast", "frugal", "small"]
    ranked = [line["name"] for line in FRONT.ranked([beaten, *RECORDS[::-1]])]
    assert ranked == ["small", "fast", "frugal", "beaten"]
    assert FRONT.values(RECORDS[0]) == [10.0, 700.0] and FRONT.values(record("free", 3.0, 0.0, 0)) == [3.0, 1.0]


# A study: its trials, its end, and that a second one of another objective has its own.


@pytest.fixture
def space() -> Space:
    return search_space(PROBLEM, "conv", "forward", "float32", CPU)


def joules(schedule: Knobs) -> float:
    """Least where the time is not: with atomics."""
    assert isinstance(schedule, HostSchedule)
    return 0.5 + 5.0 * (schedule.accumulate == "registers") + 0.01 * cost(schedule)


def outcome(schedule: Knobs, keys: tuple[str, ...] = ("joules", "memory_bytes")) -> Outcome:
    assert isinstance(schedule, HostSchedule)
    figures = {"joules": joules(schedule), "memory_bytes": 1000 * schedule.channel_block + schedule.path_groups}
    time_us = cost(schedule)
    samples = {"time_us": time_us, "q1_us": time_us, "q3_us": time_us, "samples_us": (time_us,) * 10}
    return Outcome("ok", **samples, figures={key: figures[key] for key in keys})  # type: ignore[arg-type]


def opened(space: Space, folder: Path, text: str, **options: Any) -> Study:
    objective = Objective.parse(text)
    path = trial_records.study_path(folder, "device", study_name(WORK, "forward", objective))
    options = {"sampler": "brute", "generator": "test"} | options
    return Study(space, study_name(WORK, "forward", objective), path, objective=objective, **options)


def test_studies_of_other_objectives_have_other_trials_and_best_schedules(space: Space, tmp_path: Path) -> None:
    best, files = {}, set()
    for text in ("time", "energy", "time=1,energy=0.5", "pareto:time,memory"):
        with opened(space, tmp_path, text) as study:
            run(study, outcome)
            best[text] = study.schedule_of(study.ranking[0])
            front = study.objective.front(study.ranking)
            assert study.ranking[: len(front)] != [] and (not study.objective.is_front or len(front) > 2)
        with opened(space, tmp_path, text) as again:
            assert again.finished == study.finished and run(again, outcome) == "exhausted", "it goes on"
        files.add(study.path)
        lines = trial_records.read(study.path)
        assert {line.get("objective", "time") for line in lines} == {text} and len(lines) == len(study.finished)
    assert len(files) == 4
    assert cost(best["time"]) < cost(best["energy"]) and joules(best["energy"]) < joules(best["time"])  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["tpe", "climb", "gp", "random"])
def test_every_sampler_searches_a_front_whose_trials_a_storage_gets(space: Space, tmp_path: Path, sampler: str) -> None:
    storage = optuna.storages.InMemoryStorage()
    done = iter(range(100))

    def measure(schedule: Knobs) -> Outcome:
        number = next(done)
        return Outcome("wrong") if number % 5 == 4 else outcome(schedule, () if number % 5 == 3 else ("memory_bytes",))

    with opened(space, tmp_path, str(FRONT), sampler=sampler, storage=storage) as study:
        assert run(study, measure, trials=15) == "trials"
        assert len(study.ranking) == 9, "three were wrong, and of three the memory was not measured"
        told = {trial.user_attrs.get(KEY): trial for trial in study._study.trials}
        for key in study.finished.keys() & told.keys():
            assert bool(told[key].constraints) == (study.finished[key]["state"] == "wrong"), "worse, but it runs"
    (name,) = optuna.get_all_study_names(storage)
    stored = optuna.load_study(study_name=name, storage=storage)
    assert "by-pareto-time-memory" in name and len(stored.directions) == 2
    states = [trial.state.name for trial in stored.trials]
    assert states.count("COMPLETE") <= 9 and states.count("COMPLETE") > 4 and len(stored.best_trials) >= 1


def test_a_search_of_memory_gives_no_slow_schedule_up_and_of_energy_it_does(space: Space, tmp_path: Path) -> None:
    def told(text: str) -> list[float | None]:
        given: list[float | None] = []

        def measure(schedule: Knobs, best_us: float | None) -> Outcome:
            given.append(best_us)
            return outcome(schedule)

        with opened(space, tmp_path, text) as study:
            search(study, lambda schedule: Compiled(0.0), measure, trials=8)
            least = min(line["time_us"] for line in study.finished.values())
        return [given[-1], least]

    assert told("memory")[0] is None and told("pareto:time,memory")[0] is None
    given, least = told("energy")
    assert given is not None and given >= least  # type: ignore[operator]


def test_trials_without_a_gain_are_counted_by_the_objective(space: Space, tmp_path: Path) -> None:
    figures = iter([(9.0, 5.0), (8.0, 5.0), (7.95, 5.0), (10.0, 4.0), (10.0, 4.5), (8.5, 4.98)])

    def measure(schedule: Knobs) -> Outcome:
        time_us, energy = next(figures)
        return Outcome("ok", time_us=time_us, samples_us=(time_us,), figures={"joules": energy})

    with opened(space, tmp_path, "energy") as study:
        run(study, measure, trials=6)
        counted = [study.stale]
        for text in ("time", "pareto:time,energy"):
            study.objective = Objective.parse(text)
            counted.append(study.stale)
    assert counted == [2, 4, 2]


# What a trial and a comparison measure.


def test_a_trial_measures_what_is_asked_and_the_energy_of_near_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "joules_a_call", lambda call, device, seconds: 0.25 if call() is not None else None)
    monkeypatch.setattr(timing.Sampler, "peak_bytes", lambda sampler: 4096)
    monkeypatch.setattr(timing, "time_callable", lambda *_, **__: timing.timing_of([100.0] * 12))
    session = TrialSetting(WORK, "cpu").open()

    def figures(best_us: float | None, *names: str) -> dict[str, float]:
        found = session.measure(TrialJob("forward", HostSchedule(), best_us, figures=names))
        assert found.state == "ok", found.reason
        return dict(found.figures)

    assert figures(None, "time") == {}
    assert figures(None, "energy") == {"joules": 0.25} and figures(None, "time", "memory") == {"memory_bytes": 4096}
    near = 100.0 / ENERGY_WITHIN
    assert figures(near + 1, "energy", "memory") == {"joules": 0.25, "memory_bytes": 4096}
    assert figures(near - 1, "energy", "memory") == {"memory_bytes": 4096}


@pytest.mark.parametrize(
    ("rounds", "late", "asked"), [(0, False, ""), (1, False, "ap"), (3, False, "apaa"), (3, True, "ap")]
)
def test_energy_is_measured_in_rounds_of_ours_and_once_of_a_peer(rounds: int, late: bool, asked: str) -> None:
    names: list[str] = []

    def ask(limit_s: float, method: Callable, name: str, seconds: float) -> Any:
        assert method is ComparisonSession.energy
        names.append(name)
        return types.SimpleNamespace(joules=float(len(names)), device_lost=False)

    worker: Any = types.SimpleNamespace(ask=ask)
    held = _Comparison(worker, None, ("forward",), {"a": {}}, 1.0, lambda text: None, energy=rounds)  # type: ignore[arg-type]
    found = held._joules("forward", ["a", "p"], 0.0 if late else None)
    assert "".join(names) == asked and sum(map(len, found.values())) == len(asked)


# What is published.


def result(time_us: float, energy: float | None = None, memory: int | None = None, rounds: int = 10) -> Result:
    """Samples around these, of rounds with a common drift."""
    drift = [1 + 0.03 * (number % 4) for number in range(rounds)]
    each = () if energy is None else tuple(energy * factor for factor in drift)
    return Result(timing.timing_of([time_us * factor for factor in drift]), memory_bytes=memory, joules_each=each)


def test_a_contender_without_times_is_published_with_its_reason() -> None:
    ours, failed, objective = result(100.0), Result(None, error="out of memory"), Objective.parse("time")
    assert _peer(failed, ours, objective) == failed.summary()
    assert _peer(ours, failed, objective) == ours.summary()


COMPARED = {
    "default": result(100.0, 1.0, 1000),
    "candidate 1": result(80.0, 1.2, 1000),
    "candidate 2": result(95.0, 0.7, 900),
    "candidate 3": result(300.0, 2.0, 100),
}


@pytest.mark.parametrize(
    ("text", "name", "ratio"),
    [
        ("time", "candidate 1", 100 / 80),
        ("energy", "candidate 2", 1 / 0.7),
        ("memory", "candidate 3", 10.0),
        ("time=1,energy=0.01", "candidate 1", None),
        ("time=1,energy=1", "candidate 2", (100 / 95 / 0.7) ** 0.5),
        ("pareto:time,memory", "candidate 1", 1.25**0.5),
        ("pareto:energy,memory", "candidate 2", (1 / 0.7 / 0.9) ** 0.5),
    ],
)
def test_the_published_one_is_the_best_by_the_objective(text: str, name: str, ratio: float | None) -> None:
    won, gain, _ = winner_of(COMPARED, COMPARED, Objective.parse(text))
    assert won == name and 1 < gain["low"] <= gain["ratio"] * (1 + 1e-9) and gain["ratio"] <= gain["high"] * (1 + 1e-9)
    if ratio is not None:
        assert gain["ratio"] == pytest.approx(ratio)


def test_the_default_is_confirmed_where_no_interval_of_the_objective_is_above_it() -> None:
    noise = (1.3, 0.7, 1.0, 1.4, 0.6, 1.1, 0.9, 1.2, 0.8, 1.0)
    unclear = Result(timing.timing_of([90.0] * 10), joules_each=noise)
    named = {"default": result(100.0, 1.0), "candidate 1": unclear}
    assert winner_of(named, named)[0] == "candidate 1", "by time it wins"
    name, gain, second = winner_of(named, named, Objective.parse("energy"))
    assert (name, gain) == ("default", {}) and second["low"] < 1 < second["high"]
    few = {"default": result(100.0, 1.0, rounds=4), "candidate 1": result(50.0, 0.5, rounds=4)}
    assert winner_of(few, few, Objective.parse("energy")) == ("default", {}, {}), "four rounds say nothing"
    both = {"default": result(100.0, 1.0), "candidate 1": result(99.0, 0.99)}
    assert winner_of(both, both, Objective.parse("time=1,energy=1"))[0] == "candidate 1"


def test_equal_memory_is_decided_by_time_and_a_text_says_so() -> None:
    named = {"default": result(100.0, None, 64), "candidate 1": result(80.0, None, 64), "large": result(1.0, None, 65)}
    name, gain, _ = winner_of(named, named, Objective.parse("memory"))
    assert name == "candidate 1" and gain["ratio"] == pytest.approx(1.25)
    given: dict[str, Any] = {"gain": gain, "objective": "memory", "memory_bytes": 64}
    given["default"] = entry().to_dict()["default"] | {"memory_bytes": 64}
    assert gained([entry(**given)]) == "faster than the default in as much memory: forward 1.25x (1.25 to 1.25)"
    assert gained([entry(**given | {"memory_bytes": 32})]).startswith("better than the default by memory: forward")


def made(objective: Objective) -> Entry:
    schedules = {name: {"forward": HostSchedule(path_groups=count)} for count, name in enumerate(COMPARED, 1)}
    results = {name: {"forward": one} for name, one in (COMPARED | {"e3nn": result(900.0, 3.0)}).items()}
    comparison = ComparisonResult(
        results,
        errors={name: {"forward": {"g": 1e-7}} for name in results},
        resources={name: {"forward": {}} for name in results},
        certificates={name: {"forward": {"edges": 9}} for name in results},
        copy_bandwidth=1e9,
    )
    trials = {"file": "trials/device/small.jsonl", "count": 9, "ok": 9}
    rest: tuple[Any, ...] = (schedules, comparison, trials, {"torch": "2.13"}, "hash", objective)
    found = entry_of(WORK, "forward", device_facts("cpu"), *rest)
    assert found is not None
    return found


def test_an_entry_says_its_objective_with_the_figures_and_one_of_time_is_as_before() -> None:
    by_time, by_energy, front = (made(Objective.parse(text)) for text in ("time", "energy", str(FRONT)))
    assert not {"objective", "joules", "memory_bytes", "front"} & set(by_time.to_dict())
    assert "joules" not in by_time.default and Entry.from_dict(by_time.to_dict()).objective == "time"
    assert (by_energy.objective, by_energy.time_us) == ("energy", pytest.approx(95.0 * 1.03, rel=0.02))
    assert by_energy.joules == pytest.approx(0.7, rel=0.05) and by_energy.default["joules"] > 1.0
    assert by_energy.peers["e3nn"]["joules"] > 3.0 and by_energy.memory_bytes == 0
    assert set(front.front) == {"candidate 1", "candidate 2", "candidate 3"}, "the default is beaten by the first"
    assert front.front["candidate 3"]["memory_bytes"] == 100
    rows = show._figures(front, device_facts("cpu"))
    shown = "\n".join(value for _, value in rows).replace("\N{NO-BREAK SPACE}", " ")
    assert "pareto:time,memory: 82.4 µs and 1.00 kB; the default 103 µs and 1.00 kB" in shown
    assert "candidate 3: 309 µs and 100 B; its knobs: path_groups=4" in shown
    for each in (by_energy, front):
        assert Entry.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    for changes in ({"objective": "speed"}, {"front": {"a": {}}}, {"joules": "many"}):
        with pytest.raises(DatabaseError, match=next(iter(changes))):
            entry(**changes)


def test_asking_for_another_objective_replaces_an_entry_and_merging_does_not(tmp_path: Path) -> None:
    same = {"generator": GENERATOR_VERSION, "software": {}}
    by_time = entry(**same, trials={"file": "", "count": 90, "ok": 90})
    few = {"trials": {"file": "", "count": 9, "ok": 9}}
    by_energy = entry(**same, **few, objective="energy", joules=0.1)
    store(tmp_path, HOST, by_time)
    database = Database.load(database_path(tmp_path, HOST.slug))
    assert why_kept(database, by_energy, {}, None) == "" != why_kept(database, entry(**same, **few), {}, None)
    reason = (False, "ours was tuned by energy, theirs by time")
    assert preferred(by_energy, by_time) == reason and preferred(by_time, by_energy)[0] is False


def test_a_cpu_is_refused_at_once_where_it_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_figures(TIME, "cpu")
    for text, words in (("energy", "energy of device 'cpu' is not counted"), ("pareto:time,memory", "times alone")):
        with pytest.raises(ToolMissingError, match=f"^objective {text}: .*{words}.*leave"):
            tune(TuneConfig(tmp_path, (WORK,)), "cpu", budget=1.0, objective=text, results_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ToolMissingError):
        require_figures(Objective.parse("time=1,energy=0.5"), "cpu")
    monkeypatch.setattr("autotune.measure.timing.energy_j", lambda device: 1.0)
    require_figures(Objective.parse("time=1,energy=0.5"), "cpu")


def test_a_page_says_what_was_not_tuned_by_time_and_has_the_figures(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", ("mace-made-up",), trials=3)
    (path,) = results.glob("*.json")
    before = page_of(results, tmp_path / "before").text, summary_table(results)
    data = json.loads(path.read_text())
    first = data["entries"][0]
    first |= {"objective": "pareto:time,energy", "joules": 0.00123}
    first["default"]["joules"] = 0.00246
    first["front"] = {"candidate 1": {"schedule": first["schedule"], "time_us": 5.0, "joules": 0.00123}}
    path.write_text(json.dumps(data))
    after = page_of(results, tmp_path / "after").text, summary_table(results)
    note = "The schedules of 1 of 4 rows were tuned by pareto:time,energy, not by time."
    assert note in after[0] and note not in before[0]
    for told in ("pareto:time,energy", "1.23\N{NO-BREAK SPACE}mJ"):
        assert told in after[1] and told not in before[1]
    assert "1.41× (1.39" in before[1] and "1.41× (1.39" not in after[1], "that interval is of another figure than time"
