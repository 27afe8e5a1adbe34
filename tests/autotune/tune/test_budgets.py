"""A budget bounds a whole command: what it is shared among, and what is left out where it is too short."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.compare import comparison as comparing
from autotune.compare.comparison import LEFT_OUT, Answer, ComparisonSession, ComparisonSetting, run_comparison
from autotune.errors import ConfigError
from autotune.measure.worker import Worker
from autotune.tune import run as tuner
from autotune.tune.publish import seconds_by_peer
from autotune.tune.run import TimeBudget
from autotune.tune.settings import resolve
from autotune.workload.config import TuneConfig, load_config

(WORK,) = load_config("quick", "cpu").workloads[:1]
NO_TIME = LEFT_OUT.format("the time for comparisons was over")


def test_budget_is_shared() -> None:
    time_budget = TimeBudget(100.0, 2, begin=time.monotonic())
    first = [end - time_budget.begin for end in time_budget.next_ends() if end is not None]
    assert first == pytest.approx([50.0 * 2 / 3, 50.0], abs=1.0), "half the time, of which a third compares"
    time_budget.comparison_s = 10.0
    second = [end - time_budget.begin for end in time_budget.next_ends() if end is not None]
    assert second == pytest.approx([90.0, 100.0], abs=1.0), "what is left, less a comparison like the last"
    assert TimeBudget(None, 1).next_ends() == (None, None)
    late = TimeBudget(1.0, 1, begin=time.monotonic() - 50.0)
    assert late.next_ends() == pytest.approx((time.monotonic(),) * 2, abs=1.0), "a spent budget searches no more"


def test_too_few_trials_are_called_so_with_the_budget_that_gives_more() -> None:
    time_budget = TimeBudget(60.0, 1)
    assert time_budget.advice(1, 190.0) == "1 trial is too few to tune; --budget 5m gives about 40"
    assert time_budget.advice(5, 10.0).endswith(
        "5 trials of a direction are too few to tune; --budget 2m gives about 40"
    )
    assert time_budget.advice(12, 190.0) == TimeBudget(None, 1).advice(1, 190.0) == ""
    assert "--budget 20m" in TimeBudget(60.0, 4).advice(1, 190.0), "each workload gets its share"


@dataclass
class SlowWorker:
    """Stands for a worker: preparing a contender takes 4 s of a clock, warming up 1 s, the rest nothing."""

    now: float = 0.0
    build_s: dict[str, float] = field(default_factory=lambda: {"e3nn": 0.0, "e3nn-compiled": 90.0})
    # Contenders of which one method fails, and what was asked of each.
    broken: tuple[str, ...] = ()
    failing: Any = None
    asked: list[tuple[str, str]] = field(default_factory=list)

    def reopen(self, setting: Any) -> None:
        pass

    def ask(self, limit_s: float, method: Any, *given: Any) -> Any:
        if method is ComparisonSession.build_seconds:
            return self.build_s
        self.now += {"prepare_ours": 4.0, "prepare_peer": 4.0, "warm_up": 1.0}.get(method.__name__, 0.0)
        self.asked.append((method.__name__, given[0] if given else ""))
        if method is self.failing and given[0] in self.broken:
            return Answer(error="its numbers are gone")
        return Answer(seconds=1e-3, sample_us=1e3)


def left_out(
    deadline: float | None, monkeypatch: pytest.MonkeyPatch, stand_in: SlowWorker | None = None, **options: Any
) -> dict[str, str]:
    """Why contenders have no time, by name, of a comparison until ``deadline``."""
    worker = stand_in or SlowWorker()
    monkeypatch.setattr(comparing, "monotonic", lambda: worker.now)
    monkeypatch.setattr("autotune.measure.timing.timing_of", lambda samples, conditions: samples)
    ours: Any = {name: {"forward": None} for name in ("default", "candidate 1", "candidate 2")}
    options |= {"worker": worker, "deadline": deadline, "optional": ("candidate 1", "candidate 2")}
    found = run_comparison(ComparisonSetting(WORK, "cpu"), ("forward",), ours, **options)
    if options.get("asked"):
        assert seconds_by_peer(found, ours) == {"e3nn": 5.0, "e3nn-compiled": 5.0}
    rows = {name: row["forward"] for name, row in found.results.items()}
    assert all(row.timing or row.error for row in rows.values())
    return {name: row.error for name, row in rows.items() if row.error}


def test_a_comparison_leaves_out_what_does_not_fit_and_never_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = LEFT_OUT.format("it takes up to 90 s to compile")
    assert left_out(None, monkeypatch) == {}
    assert left_out(200.0, monkeypatch) == {}
    assert left_out(60.0, monkeypatch) == {"e3nn-compiled": compiles}
    assert left_out(28.0, monkeypatch) == {"e3nn": NO_TIME, "e3nn-compiled": compiles}
    second = {"candidate 2": NO_TIME, "e3nn": NO_TIME, "e3nn-compiled": compiles}
    assert left_out(13.0, monkeypatch) == second, "a candidate takes as long again as the default, and its own passes"
    assert left_out(0.0, monkeypatch) == {"candidate 1": NO_TIME, **second}


def test_peers_that_are_asked_for_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(left_out(13.0, monkeypatch, asked=True)) == {"candidate 2"}


def test_what_is_known_to_fail_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, known = SlowWorker(), {"e3nn": "it crashed before"}
    assert left_out(None, monkeypatch, worker, known_failures=known) == known
    assert "e3nn-compiled" in {name for _, name in worker.asked} and "e3nn" not in {name for _, name in worker.asked}


@pytest.mark.parametrize(("failing", "samples"), [(ComparisonSession.sample, 1), (ComparisonSession.warm_up, 0)])
def test_a_contender_that_fails_has_that_error_and_is_sampled_no_more(
    failing: Any, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = SlowWorker(broken=("e3nn", "candidate 1"), failing=failing)
    failed = left_out(None, monkeypatch, worker)
    assert failed == dict.fromkeys(worker.broken, "its numbers are gone")
    assert [worker.asked.count(("sample", name)) for name in worker.broken] == [samples] * 2


@pytest.mark.parametrize(("slow_us", "rows"), [(29.0, comparing.HOST_ROWS), (31.0, comparing.HOST_ROWS_OF_SLOW)])
def test_a_host_three_times_slower_than_the_fastest_is_timed_in_fewer_rows(slow_us: float, rows: int) -> None:
    times = {"fast": 10.0, "slow": slow_us}
    asked: list[str] = []

    def ask(limit_s: float, method: Any, name: str, seconds: float) -> Answer:
        assert method is ComparisonSession.host_row
        asked.append(name)
        return Answer(host_us=times[name] + 1)

    held = comparing._Comparison(SimpleNamespace(ask=ask), None, ("forward",), {}, 1.0, lambda text: None)  # type: ignore[arg-type]
    found = held._host_times("forward", {name: Answer(host_us=time_us) for name, time_us in times.items()})
    assert found == times, "the least of all rows"
    assert (asked.count("fast"), asked.count("slow")) == (comparing.HOST_ROWS, rows)


def test_unknown_peers_are_an_error_with_the_known_ones(tmp_path: Path) -> None:
    def peers(*names: str) -> Any:
        config = TuneConfig(tmp_path / "own", (WORK,))
        return resolve(config, "cpu", 1.0, None, None, None, 0, tmp_path, names)[0].with_peers

    assert peers("e3nn-compiled", "e3nn") == ("e3nn", "e3nn-compiled")
    with pytest.raises(ConfigError, match="unknown peer 'e3n'; did you mean 'e3nn'"):
        peers("e3n")
    with pytest.raises(ConfigError, match="unknown peer 'quantum'; expected .*e3nn-compiled"):
        peers("quantum")


def searched(
    monkeypatch: pytest.MonkeyPatch, left_s: float, measure_s: float, first: bool = True
) -> list[tuple[str, float | None, float | None]]:
    """Each direction's search with the seconds until its deadline and until its first trial has to begin."""
    found: list[tuple[str, float | None, float | None]] = []
    now = time.monotonic()

    def search(job: Any, study: Any, worker: Any, direction: str, *ends: float | None) -> str:
        found.append((direction, *(each and each - now for each in ends)))
        study.finished["trial"] = {"measure_s": measure_s}
        return "time"

    def study(*_: Any) -> Any:
        return nullcontext(SimpleNamespace(finished={}, ended="", stale=0))

    monkeypatch.setattr(tuner, "open_study", study)
    monkeypatch.setattr(tuner._Job, "_search_direction", search)
    settings: Any = SimpleNamespace(
        workload_trials={}, trials=None, patience=None, facts=SimpleNamespace(backend="cpu"), compilers=1
    )
    monkeypatch.setattr(tuner, "replace", lambda given, **_: given)
    pairs: Any = SimpleNamespace(of=lambda _: SimpleNamespace(search=lambda _: None), launch=lambda *problems: None)
    progress: Any = SimpleNamespace(start=lambda text: None, end=now + left_s)
    job = tuner._Job(WORK, settings, pairs, (WORK.problem,), progress, None)
    job.comes_first, job.end = first, now + left_s
    with ExitStack() as stack:
        assert not job._search_directions(now + left_s * 2 / 3, stack)
    return found


def test_a_search_ends_early_enough_to_compare_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = WORK.directions
    found: Sequence[Any] = searched(monkeypatch, 60.0, 1.0)
    assert found == [
        (one, pytest.approx(20.0, abs=1.0), None),
        (two, pytest.approx(40.0, abs=1.0), pytest.approx(55.0, abs=1.0)),
    ]
    found = searched(monkeypatch, 60.0, 20.0)
    assert found[1][1:] == pytest.approx((20.0, -40.0), abs=1.0), "a slow machine compares for longer than a third"
    found = searched(monkeypatch, 60.0, 20.0, first=False)
    assert found[0][2] == pytest.approx(60.0, abs=1.0), "in a later workload nothing is tried in any case"


def test_workers_are_imported_for_while_the_command_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own imports change variables; the server that is there serves nevertheless."""
    from autotune.measure import worker as processes

    processes.launch_server()
    server = processes._servers.present()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert processes._servers.present() is server
    with Worker(ComparisonSetting(WORK, "cpu", ())) as worker:
        worker.launch()
        assert processes._servers.present() is server
