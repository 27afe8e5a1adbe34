"""Bootstrap intervals: made-up samples of known medians enter; coverage, symmetry and verdicts are checked."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autotune.measure.timing import ratio_interval, verdict
from kernelgen.errors import InputError


def samples(median: float, count: int, seed: int, spread: float = 0.02) -> list[float]:
    """Skewed, as times are, with a true median of ``median``."""
    return list(median * np.exp(spread * np.abs(np.random.default_rng(seed).normal(size=count)) - spread * 0.67449))


def test_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        low, high = ratio_interval(samples(100, 40, 2 * seed), samples(150, 25, 2 * seed + 1))
        assert 1.4 < low < high < 1.6
        held += low <= 1.5 <= high
    # 200 trials of 95% lie within 180 and 200 but once in thousands; a bootstrap of medians is a little wide.
    assert 180 <= held <= 200


def test_a_higher_level_is_wider_and_more_samples_are_narrower() -> None:
    ours, theirs = samples(100, 200, 1), samples(100, 200, 2)

    def width(level: float, count: int) -> float:
        low, high = ratio_interval(ours[:count], theirs[:count], level)
        return high - low

    assert width(0.5, 200) < width(0.95, 200) < width(0.99, 200)
    assert width(0.95, 200) < 0.7 * width(0.95, 20)


def test_the_unit_and_the_order_of_samples_do_not_matter_and_equal_input_gives_equal_output() -> None:
    ours, theirs = samples(100, 30, 3), samples(90, 30, 4)
    first = ratio_interval(ours, theirs)
    assert first == ratio_interval(ours, theirs)
    assert ratio_interval([t * 1000 for t in ours], [t * 1000 for t in theirs]) == pytest.approx(first)
    assert ratio_interval(ours[::-1], theirs) == pytest.approx(first, rel=0.01)


def test_exchanging_the_sides_inverts_the_interval() -> None:
    ours, theirs = samples(100, 50, 5), samples(130, 50, 6)
    (low, high), (back_low, back_high) = ratio_interval(ours, theirs), ratio_interval(theirs, ours)
    assert (1 / back_high, 1 / back_low) == pytest.approx((low, high), rel=0.005)


@pytest.mark.parametrize(("level", "enough"), [(0.95, 6), (0.99, 8), (0.5, 2)])
def test_too_few_samples_say_nothing(level: float, enough: int) -> None:
    many = samples(100, 50, 7)
    assert ratio_interval(many[: enough - 1], many, level) == (0.0, math.inf)
    assert ratio_interval(many, many[: enough - 1], level) == (0.0, math.inf)
    assert verdict((0.0, math.inf)) == "unclear"
    low, high = ratio_interval(many[:enough], many[:enough], level)
    assert 0.9 < low <= 1 <= high < 1.1


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((1.03, 1.2), "faster"), ((0.5, 0.97), "slower"), ((0.99, 1.01), "level"), ((1.0, 1.0), "level"),
        ((1.01, 1.03), "unclear"), ((0.97, 0.99), "unclear"), ((0.9, 1.1), "unclear"), ((1.02, 1.03), "unclear"),
    ],
)  # fmt: skip
def test_verdicts(interval: tuple[float, float], said: str) -> None:
    assert verdict(interval) == said
    exchanged = {"faster": "slower", "slower": "faster"}.get(said, said)
    assert verdict((1 / interval[1], 1 / interval[0])) == exchanged


def test_a_kernel_is_not_faster_than_itself_however_noisy_the_machine() -> None:
    """Ten rounds of heavy tails, in bursts that last for several rounds: 5% of the intervals may leave out 1."""
    random = np.random.default_rng(7)
    claims = 0
    for _ in range(1000):
        burst = np.repeat(random.pareto(0.8, 4) + 1, 3)[:10]
        ours, theirs = burst * (random.pareto(1.0, (2, 10)) + 1)
        low, high = ratio_interval(ours, theirs, paired=True)
        claims += not low <= 1 <= high
    assert 0 < claims <= 50
    assert ratio_interval([1.0] * 6, [2.0] * 6, paired=True) == (2.0, 2.0)


def test_a_wider_tolerance_calls_more_the_same() -> None:
    assert verdict((1.03, 1.04)) == "faster" and verdict((1.03, 1.04), 0.05) == "level"


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [1.0, math.inf], [1.0, 0.0], [-1.0], [[1.0, 2.0]]])
def test_what_are_no_times_is_refused(bad: list) -> None:
    with pytest.raises(InputError, match="ours are .* expected a list of times"):
        ratio_interval(bad, [1.0] * 10)
    with pytest.raises(InputError, match="theirs are"):
        ratio_interval([1.0] * 10, bad)


@pytest.mark.parametrize("level", [0, 1, -0.5, 95, math.nan])
def test_a_level_that_is_none_is_refused(level: float) -> None:
    with pytest.raises(InputError, match="level is .* between 0 and 1"):
        ratio_interval([1.0] * 10, [1.0] * 10, level)


@pytest.mark.parametrize("tolerance", [-0.1, math.nan])
def test_a_tolerance_that_is_none_is_refused(tolerance: float) -> None:
    with pytest.raises(InputError, match="tolerance is"):
        verdict((1.0, 1.0), tolerance)
