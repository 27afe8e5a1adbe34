"""What is published: the fastest that beats the default beyond the noise, with the interval, and its certificate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from database_samples import entry

from autotune.compare.comparison import Result
from autotune.database.entry import Entry
from autotune.errors import DatabaseError
from autotune.measure.intervals import ratio_interval
from autotune.measure.timing import timing_of
from autotune.tune.publish import winner_of

ROUNDS = 60


def rounds(*factors: float, noise: float = 0.05, drift: float = 0.0, seed: int = 0) -> list[list[float]]:
    """Samples of contenders of these true times: noise of each sample, drift of whole rounds."""
    random = np.random.default_rng(seed)
    common = 1 + drift * random.random(ROUNDS)
    return [list(100 * factor * common * (1 + noise * random.standard_normal(ROUNDS))) for factor in factors]


def winner(default: list[float], *others: list[float]) -> tuple[str, dict[str, float]]:
    named = {"default": default} | {f"candidate {rank}": samples for rank, samples in enumerate(others, 1)}
    results = {name: Result(timing_of(samples)) for name, samples in named.items()}
    return winner_of(results, {name: r.timing.median_us for name, r in results.items() if r.timing is not None})


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


def test_a_slower_one_is_never_published() -> None:
    assert winner(*rounds(1.0, 1.01, 1.3)) == ("default", {})


def test_what_slows_a_whole_round_cancels() -> None:
    default, other = rounds(1.0, 0.97, noise=0.005, drift=1.0)
    low, high = ratio_interval(other, default, paired=True)
    assert 1.02 < low < 1 / 0.97 < high < 1.05
    shuffled = list(np.random.default_rng(1).permutation(default))
    wide = ratio_interval(other, shuffled, paired=True)
    assert wide[1] - wide[0] > 3 * (high - low), "unpaired, the drift would hide it"
    assert ratio_interval(other[:4], default, paired=True) == (0.0, math.inf), "four rounds say nothing at 95%"
    assert ratio_interval(other, [2 * sample for sample in other[:20]], paired=True) == (2.0, 2.0)


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


def test_a_certificate_survives_the_file_and_counts_as_error() -> None:
    certificate = {"bitwise": True, "equivariance": 4e-7, "edges": 768, "environment": "0123456789abcdef"}
    gain = {"ratio": 2.0, "low": 1.9, "high": 2.1, "level": 0.95}
    made = entry(certificate=certificate, gain=gain)
    assert Entry.from_dict(made.to_dict()) == made
    assert (made.worst_error, entry().worst_error) == (4e-7, 3e-7)
    assert not {"gain", "certificate"} & set(entry().to_dict())
