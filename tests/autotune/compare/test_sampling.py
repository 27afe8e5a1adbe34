"""How often each contender of a comparison is sampled: fewer times the farther it is behind, always in turn."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.compare.comparison import (
    MAX_SAMPLES,
    OUR_MIN_SAMPLES,
    PEER_MIN_SAMPLES,
    SLOW_MIN_SAMPLES,
    interleaved,
    samples_of,
    take_in_rounds,
)

OURS = ("tuned", "default")


def taken(times: dict[str, float], counts: dict[str, int] | None = None) -> tuple[dict[str, int], list[str]]:
    """How many samples each contender of a constant time got, and the order of all; one of zero fails at once."""
    samples: dict[str, list[float]] = {name: [] for name in times}
    order: list[str] = []

    def sample(names: Iterable[str]) -> None:
        for name in names:
            order.append(name)
            if times[name]:
                samples[name].append(times[name])

    take_in_rounds(counts or dict.fromkeys(times, MAX_SAMPLES), samples, OURS, sample)
    return {name: len(found) for name, found in samples.items()}, order


def test_rounds_are_interleaved_and_even() -> None:
    order = list(interleaved({"fast": 6, "slow": 2}))
    assert order.count("fast") == 6 and order.count("slow") == 2
    assert [i for i, name in enumerate(order) if name == "slow"] == [3, 6], "spread over the rounds, not bunched"
    assert list(interleaved({})) == []


def test_who_is_far_behind_is_sampled_less() -> None:
    times = {"tuned": 10.0, "near": 14.9, "behind": 15.1, "beaten": 31.0, "far": 51.0, "failed": 0.0}
    found, order = taken(times)
    assert found == {"tuned": 60, "near": 60, "behind": 20, "beaten": 10, "far": 3, "failed": 0}
    assert order[:5] == list(times)[:5] and order[7:12] == list(times)[4::-1], "in turn, then the other way round"
    assert order.count("failed") == 3, "no more than the first look"


def test_our_own_schedules_have_samples_enough_to_be_compared_in_pairs() -> None:
    found, _ = taken({"tuned": 100.0, "default": 900.0, "peer": 10.0})
    assert found == {"tuned": 10, "default": 10, "peer": 60}
    assert OUR_MIN_SAMPLES == 10


def test_rounds_take_no_more_than_was_asked() -> None:
    found, order = taken({"tuned": 10.0, "peer": 11.0}, {"tuned": 60, "peer": 5})
    assert found == {"tuned": 60, "peer": 5}
    assert order[:6] == ["tuned", "peer", "peer", "tuned", "tuned", "peer"]
    assert taken({}) == ({}, [])


def test_the_number_of_samples_fits_the_time_of_a_call() -> None:
    assert samples_of(1e-5, 0.3, True) == samples_of(1e-5, 0.3, False) == MAX_SAMPLES
    assert samples_of(0.02, 0.3, True) == 15
    assert samples_of(0.04, 0.1, True) == OUR_MIN_SAMPLES and samples_of(0.04, 0.1, False) == PEER_MIN_SAMPLES
    assert samples_of(0.06, 0.3, False, least_s=0.05) == 5 and samples_of(0.3, 0.3, False) == SLOW_MIN_SAMPLES
    assert samples_of(0.06, 0.3, False, least_s=0.01) == SLOW_MIN_SAMPLES, "six times behind the fastest"
    assert samples_of(0.25, 3.0, False, least_s=0.05) == 12, "five times is not yet far"
    assert samples_of(0.0, 0.3, True) == MAX_SAMPLES, "less than the clock tells"
    assert (OUR_MIN_SAMPLES, PEER_MIN_SAMPLES, SLOW_MIN_SAMPLES) == (10, 6, 3)
