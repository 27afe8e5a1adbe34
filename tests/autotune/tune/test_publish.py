"""What is published: the fastest that beats the default beyond the noise, with the interval, and its certificate."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from database_samples import HOST, PROBLEM, entry, store
from places import ROOT, shipped

from autotune.compare.comparison import ComparisonResult, ComparisonSession, ComparisonSetting, Result
from autotune.database.entry import Entry
from autotune.database.maintenance import hash_of_entry, merge_file
from autotune.database.store import Database, database_path, device_record, read_table, to_text
from autotune.errors import DatabaseError
from autotune.measure import trial as certificate
from autotune.measure.timing import ratio_interval, timing_of
from autotune.measure.trial import Outcome
from autotune.tune import publish as publishing
from autotune.tune.publish import contenders, gained, publish, verdict_of, why_kept, why_unfinished, winner_of
from autotune.tune.run import open_study
from autotune.tune.settings import SECONDS_EACH, Settings, resolve
from autotune.workload.config import TuneConfig, load_graphs
from autotune.workload.objective import TIME
from autotune.workload.workload import Workload, moved_bytes
from kernelgen.device import device_facts
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.version import GENERATOR_VERSION

ROUNDS = 60


def rounds(*factors: float, noise: float = 0.05, drift: float = 0.0, seed: int = 0) -> list[list[float]]:
    """Samples of contenders of these true times: noise of each sample, drift of whole rounds."""
    random = np.random.default_rng(seed)
    common = 1 + drift * random.random(ROUNDS)
    return [list(100 * factor * common * (1 + noise * random.standard_normal(ROUNDS))) for factor in factors]


def judged(default: list[float], *others: list[float]) -> tuple[str, dict[str, float], dict[str, float]]:
    named = {"default": default} | {f"candidate {rank}": samples for rank, samples in enumerate(others, 1)}
    results = {name: Result(timing_of(samples)) for name, samples in named.items()}
    return winner_of(results, {name: r.timing.time_us for name, r in results.items() if r.timing is not None})


def winner(default: list[float], *others: list[float]) -> tuple[str, dict[str, float]]:
    return judged(default, *others)[:2]


def test_a_clear_winner_is_published_with_its_interval() -> None:
    name, gain = winner(*rounds(1.0, 0.8, 0.7))
    assert name == "candidate 2"
    assert 1.2 < gain["low"] < gain["ratio"] < gain["high"] < 1.7 and gain["level"] == 0.95
    assert gain["low"] < 1 / 0.7 < gain["high"]


def test_within_the_noise_the_default_is() -> None:
    flattered = 0
    for seed in range(20):
        samples = rounds(1.0, 1.0, 1.0, 1.0, seed=seed)
        medians = [np.median(values) for values in samples]
        flattered += min(medians) < medians[0]
        name, gain = winner(*samples)
        assert (name, gain) == ("default", {}) or gain["low"] > 1
    assert flattered > 10, "by the medians alone, mostly another would have won"
    names = [winner(*rounds(1.0, 1.0, seed=seed))[0] for seed in range(40)]
    assert names.count("default") >= 36


def test_more_candidates_do_not_make_noise_a_gain() -> None:
    names = [winner(*rounds(1.0, 1.0, 1.0, 1.0, seed=seed))[0] for seed in range(200)]
    assert names.count("default") >= 192


def test_a_default_that_wins_is_confirmed_or_unclear_by_the_interval_of_the_second() -> None:
    fields = entry().to_dict() | {"gain": {}}
    fields["trials"] = {"file": "", "count": 3, "ok": 3}
    fields["schedule"] = fields["default"]["schedule"]

    def text(*samples: list[float]) -> str:
        _, gain, runner_up = judged(*samples)
        return verdict_of(Entry.from_dict(fields | {"gain": gain, "runner_up": runner_up}))

    assert text(*rounds(1.0, 1.1, noise=0.01)) == text(*rounds(1.0, 1.0, noise=0.01)) == "default confirmed"
    assert text(*rounds(1.0, 1.0, noise=0.2)) == "unclear, so the default stays"
    assert text(*rounds(1.0, 0.8, noise=0.01)) == "faster than the default"
    assert text([1.0], [1.1]) == "unclear, so the default stays", "one round has no interval"
    assert verdict_of(Entry.from_dict(fields | {"trials": {"count": 1, "ok": 1}})) == "only the default was tried"
    faster = Entry.from_dict(fields | {"gain": {"ratio": 1.25, "low": 1.2, "high": 1.3, "level": 0.95}})
    slower = {"ratio": 0.9, "low": 0.88, "high": 0.92, "level": 0.95}
    told = gained([faster, Entry.from_dict(fields | {"direction": "double_backward", "runner_up": slower})])
    assert told == "faster than the default: forward 1.25x (1.20 to 1.30); default confirmed: double backward"


def test_a_slower_one_is_never_published() -> None:
    assert winner(*rounds(1.0, 1.01, 1.3)) == ("default", {})


def test_what_slows_a_whole_round_cancels() -> None:
    default, other = rounds(1.0, 0.97, noise=0.005, drift=1.0)
    low, high = ratio_interval(other, default, paired=True)
    assert 1.02 < low < 1 / 0.97 < high < 1.05
    assert ratio_interval(other, default) == ratio_interval(other, default, paired=False) != (low, high)
    shuffled = list(np.random.default_rng(1).permutation(default))
    wide = ratio_interval(other, shuffled, paired=True)
    assert wide[1] - wide[0] > 3 * (high - low), "unpaired, the drift would hide it"
    assert winner(default, other)[0] == "candidate 1" and winner(shuffled, other)[0] == "default"
    assert ratio_interval(other[:4], default, paired=True) == (0.0, math.inf), "four rounds say nothing at 95%"
    assert ratio_interval(other, [2 * sample for sample in other[:20]], paired=True) == (2.0, 2.0)


FACTS = device_facts("cpu")
WORK = Workload("small", PROBLEM, "conv", load_graphs()["carbon-small"])
DEFAULT, SECOND, BEST = HostSchedule(), HostSchedule(path_groups=2), HostSchedule(accumulate="atomics")


def study(path: Path, *ranked: HostSchedule) -> Any:
    """What publishing reads of a study: three trials, of which two passed."""
    finished = {number: {"state": state} for number, state in enumerate(("ok", "crashed", "ok"))}
    space = types.SimpleNamespace(default=DEFAULT)
    given = {
        "ranking": ranked,
        "schedule_of": lambda line: line,
        "finished": finished,
        "sampler": "tpe",
        "ended": "",
        "objective": TIME,
    }
    return types.SimpleNamespace(space=space, path=path, **given)


def compared(*names: str, slow: str = "") -> ComparisonResult:
    """A comparison of contenders in two passes, each faster than those before; ``slow`` failed in forward."""
    times = dict(zip(names, (300.0, 200.0, 100.0), strict=False)) | {"e3nn": 900.0}
    results = {
        name: {
            which: Result(timing_of([time_us * (1 + 0.001 * k) for k in range(20)]))
            for which in ("forward", "backward")
        }
        for name, time_us in times.items()
    }
    if slow:
        results[slow]["forward"] = Result(error="too slow")
    by_direction = {name: {"forward": name, "backward": name} for name in names}
    return ComparisonResult(
        results,
        errors={name: {which: {"g": 1e-7 * len(name)} for which in each} for name, each in by_direction.items()},
        resources={name: {which: {"registers": len(name)} for which in each} for name, each in by_direction.items()},
        certificates={name: {which: {"edges": len(name)} for which in each} for name, each in by_direction.items()},
        copy_bandwidth=1e9,
    )


def gains(ratio: float) -> dict[str, float]:
    return {"ratio": ratio, "low": ratio - 0.05, "high": ratio + 0.05, "level": 0.95}


@pytest.mark.parametrize(
    ("changes", "trials", "why"),
    [
        ({}, None, "too few trials (8)"),
        ({"runner_up": gains(1.02)}, None, "unclear (8)"),
        ({"count": 39, "runner_up": gains(1.02)}, None, "unclear (39)"),
        ({"count": 40, "runner_up": gains(1.02)}, None, ""),
        ({"count": 40, "runner_up": gains(1.02), "conditions": {"noise": "busy"}}, None, "unclear, not at rest"),
        ({"count": 12}, None, ""),
        ({"count": 12}, 20, "too few trials (12)"),
        ({"count": 12, "ended": "exhausted"}, 20, ""),
        ({"count": 1, "ended": "trials"}, None, ""),
        ({"generator": "0.1.0+0123456789"}, None, ""),
    ],
)
def test_a_search_of_few_trials_or_without_a_verdict_is_not_finished(
    changes: dict[str, Any], trials: int | None, why: str
) -> None:
    given = {"count": 8, "ended": "time"} | {key: changes[key] for key in ("count", "ended") if key in changes}
    rest = {key: value for key, value in changes.items() if key not in given}
    default = {"schedule": DEFAULT, "generator": GENERATOR_VERSION, "trials": {"ok": given["count"]} | given}
    assert why_unfinished(entry(**(default | rest)), trials) == why


def test_a_published_entry_of_more_trials_stays_unless_the_new_one_is_faster_by_its_interval(tmp_path: Path) -> None:
    def why(old: dict[str, Any], new: dict[str, Any]) -> str:
        both = {"generator": GENERATOR_VERSION, "software": {}}
        store(tmp_path, FACTS, entry(**(both | old), label="first"))
        database = Database.load(database_path(tmp_path, FACTS.slug))
        return why_kept(database, entry(**(both | new), label="l2"), {}, None)

    eight, one = {"trials": {"count": 8}}, {"trials": {"count": 1}}
    told = why(eight | {"gain": gains(1.3)}, one | {"gain": gains(1.35)})
    assert told.startswith("the published entry of 8 trials (first) stays: the new one rests on 1")
    assert why(eight | {"gain": gains(1.3)}, one), "the default"
    assert not why(eight | {"gain": gains(1.3)}, one | {"gain": gains(1.45)})
    assert not why(eight | {"schedule": DEFAULT}, one | {"gain": gains(1.1)}), "the default was published"
    assert not why(one, eight) and not why(eight, eight)
    assert not why(eight | {"generator": "0.1.0+0", "gain": gains(1.3)}, one), "a stale one"


def test_a_study_goes_on_with_the_trials_of_the_same_kernel_under_another_label(tmp_path: Path) -> None:
    settings, _ = resolve(TuneConfig(tmp_path, (WORK,)), "cpu", 9.0, 3, "random", None, 0, tmp_path, False)
    with open_study(WORK, "forward", settings, None) as first:
        assert first.finished == {}
        proposal = first.propose()
        assert proposal is not None
        first.finish(proposal, Outcome("ok", time_us=5.0, samples_us=(5.0,)))
        cited = first.path.relative_to(tmp_path).as_posix()
    identity = dict(
        zip(
            ("problem", "operation", "direction", "dtype", "layout", "graph_class"),
            WORK.identity("forward"),
            strict=False,
        )
    )
    store(tmp_path, FACTS, entry(**identity, trials={"file": cited, "count": 1, "ok": 1}))
    with open_study(dataclasses.replace(WORK, label="other"), "forward", settings, None) as second:
        assert len(second.finished) == 1 and second.path == first.path


def test_contenders_are_the_default_and_the_best_three_others(tmp_path: Path) -> None:
    many = [HostSchedule(path_groups=count) for count in (4, 1, 3, 2, 5)]
    found = contenders({"forward": study(tmp_path, *many), "backward": study(tmp_path, BEST)})
    assert many[1] == DEFAULT, "it is none of the others"
    assert found == {
        "default": {"forward": DEFAULT, "backward": DEFAULT},
        "candidate 1": {"forward": many[0], "backward": BEST},
        "candidate 2": {"forward": many[2]},
        "candidate 3": {"forward": many[3]},
    }


def settings(results: Path) -> Settings:
    return Settings("cpu", FACTS, None, None, "auto", "sqlite://", 5, results, with_peers=False)


def publish_of(result: ComparisonResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Any:
    """Publish two searches and one in which nothing passed; returns the entries stored, by direction."""
    asked: list[Any] = []

    def run(setting: Any, passes: Any, ours: Any, **options: Any) -> ComparisonResult:
        asked.append((setting, passes, ours, options["seconds_each"]))
        return result

    monkeypatch.setattr(publishing, "run_comparison", run)
    path = database_path(tmp_path, FACTS.slug)
    folder = tmp_path / "trials" / "device"
    studies = {name: study(folder / f"{name}.jsonl", SECOND, BEST) for name in ("forward", "backward")}
    studies["double_backward"] = study(tmp_path / "trials" / "none")
    database = Database.load(path, device_record(FACTS))
    made = publish(WORK, studies, settings(tmp_path), database, on_failure=said.append)
    stored = {each.direction: each for each in read_table(path).by_identity.values()}
    assert stored == {each.direction: each for each in made}
    ((setting, passes, ours, seconds_each),) = asked
    assert (setting, seconds_each) == (ComparisonSetting(WORK, "cpu", ()), SECONDS_EACH["cpu"])
    assert passes == ("forward", "backward") and set(ours) == {"default", "candidate 1", "candidate 2"}
    return stored


def test_an_entry_holds_the_winners_times_errors_and_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    stored = publish_of(compared("default", "candidate 1", "candidate 2"), tmp_path, monkeypatch, said)
    forward = stored["forward"]
    assert set(stored) == {"forward", "backward"} and said == []
    assert forward.tuned_schedule == BEST and forward.time_us == pytest.approx(100.95)
    assert (forward.q1_us, forward.q3_us) == (pytest.approx(100.475), pytest.approx(101.425))
    assert forward.default["time_us"] == pytest.approx(302.85) and forward.default["schedule"] == DEFAULT.to_dict()
    assert forward.gain["ratio"] == pytest.approx(3.0) and list(forward.peers) == ["e3nn"]
    assert forward.peers["e3nn"]["time_us"] == pytest.approx(908.55)
    assert forward.errors == {"g": pytest.approx(1.1e-6)} and forward.resources == {"registers": 11}
    assert forward.certificate["edges"] == 11 and len(forward.certificate["environment"]) == 16
    assert forward.bytes == moved_bytes(WORK, "forward") and forward.floor_us == pytest.approx(forward.bytes / 1e3)
    assert forward.trials == {"file": "trials/device/forward.jsonl", "count": 3, "ok": 2, "sampler": "tpe", "seed": 5}
    assert forward.graph == {"name": "carbon-small", "edges": WORK.num_edges, "nodes": 64}
    assert forward.source == hash_of_entry(forward, FACTS)


def test_a_direction_whose_default_failed_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    stored = publish_of(compared("default", "candidate 1", slow="default"), tmp_path, monkeypatch, said)
    assert list(stored) == ["backward"] and said == ["small forward: not published, too slow"]


def test_a_candidate_that_failed_is_no_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = compared("default", "candidate 1", "candidate 2", slow="candidate 2")
    stored = publish_of(result, tmp_path, monkeypatch, [])
    assert (stored["forward"].tuned_schedule, stored["backward"].tuned_schedule) == (SECOND, BEST)


def test_where_nothing_passed_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "run_comparison", lambda *_, **__: pytest.fail("it was compared"))
    database = Database.load(database_path(tmp_path, FACTS.slug), device_record(FACTS))
    assert publish(WORK, {"forward": study(tmp_path)}, settings(tmp_path), database) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gain", {"low": "much"}),
        ("gain", {"lower": 1.0}),
        ("certificate", {"bitwise": 1}),
        ("certificate", {"equivariance": float("nan")}),
        ("certificate", {"edges": 1.5}),
        ("certificate", {"signed": "by nobody"}),
    ],
)
def test_an_entry_checks_what_it_certifies(field: str, value: dict[str, Any]) -> None:
    with pytest.raises(DatabaseError, match=field):
        entry(**{field: value})


OVER = {"bitwise": True, "equivariance": 1.5, "edges": 768, "environment": "0123456789abcdef"}


def test_no_shipped_entry_records_that_its_kernel_is_wrong() -> None:
    """Neither an error nor a certificate above the tolerance; else ``tolerance=`` can never be met there."""
    files = [*(ROOT / "results").glob("*.json"), *(ROOT / "results" / "drawn").glob("*.json")]
    tables = [read_table(path) for path in shipped(files)]
    assert len(tables) >= 3 and not any(table.flaws for table in tables)
    entries = [entry for table in tables for entry in table.by_identity.values()]
    assert [one.identity for one in entries if one.wrong_record] == []
    certified = [one.certificate["equivariance"] for one in entries if "equivariance" in one.certificate]
    assert len(certified) > 400 and max(certified) < 1e-3


@pytest.mark.parametrize("record", [{"certificate": OVER}, {"errors": {"g": 2e-5}}])
def test_a_record_above_its_tolerance_is_not_written(record: dict[str, Any], tmp_path: Path) -> None:
    wrong = entry(**record)
    with pytest.raises(DatabaseError, match=r"the entry of small conv forward .* above 1e-05: (1.5e\+00|g 2.0e-05)"):
        store(tmp_path, HOST, wrong)
    # Unless its check says so too: then no lookup loads it.
    store(tmp_path, HOST, entry(**record, checked={"date": "d", "state": "wrong", "reason": "recorded"}))
    theirs = tmp_path / "theirs.json"
    theirs.write_text(to_text(device_record(HOST), [wrong]))
    target, (merged,) = merge_file(theirs, tmp_path / "elsewhere")
    assert not merged.taken and "above 1e-05" in merged.reason and not target.exists()


def test_a_kernel_that_is_not_equivariant_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are those of e3nn where they were compared."""
    workload = Workload("small", PROBLEM, "conv", load_graphs()["molecule"])
    monkeypatch.setattr(certificate, "equivariance_error", lambda *given: 1.5)
    session = ComparisonSession(ComparisonSetting(workload, "cpu", ()))
    answer = session.prepare_ours("default", {"forward": HostSchedule()})
    assert answer.error == "relative error under a rotation above 1e-05: 1.5e+00"


def test_a_certificate_survives_the_file_and_counts_as_error() -> None:
    made_of = {"bitwise": True, "equivariance": 4e-7, "edges": 768, "environment": "0123456789abcdef"}
    gain = {"ratio": 2.0, "low": 1.9, "high": 2.1, "level": 0.95}
    made = entry(certificate=made_of, gain=gain)
    assert Entry.from_dict(made.to_dict()) == made
    assert (made.worst_error, entry().worst_error) == (4e-7, 3e-7)
    assert not {"gain", "certificate"} & set(entry().to_dict())
