"""How many samples each contender of a comparison gets, and in which order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping

OUR_MIN_SAMPLES = 10
PEER_MIN_SAMPLES = 5
# A peer whose call takes longer needs fewer samples. On a GPU it is also sampled alone and then released, because what
# e3nn keeps for a large graph leaves no room for the others.
SLOW_CALL_S, SLOW_MIN_SAMPLES = 0.05, 3
MAX_SAMPLES = 60
# After so many samples each, whoever takes so many times the least median is not sampled further: a ratio that is far
# from one needs few samples. Three say nothing of our own schedules, whose samples are compared in pairs.
ROUNDS = ((3, 5.0), (10, 3.0), (20, 1.5))


def samples_of(seconds: float, seconds_each: float, ours: bool, least_s: float = 0.0) -> int:
    """Samples of a contender whose warm call takes ``seconds``. least_s: of the fastest contender so far."""
    least = OUR_MIN_SAMPLES
    if not ours:
        least = SLOW_MIN_SAMPLES if seconds > SLOW_CALL_S else PEER_MIN_SAMPLES
        if seconds > SLOW_CALL_S and least_s and seconds > ROUNDS[0][1] * least_s:
            return least
    return max(least, min(MAX_SAMPLES, int(seconds_each / max(seconds, 1e-6))))


def take_in_rounds(
    counts: Mapping[str, int],
    samples: Mapping[str, list[float]],
    ours: Collection[str],
    sample: Callable[[Iterable[str]], None],
) -> None:
    """Take up to ``counts`` samples of each contender by ``sample``, which adds to ``samples``; fewer of slow ones.

    Contenders are sampled in turn, so sample i of all that have one is from the same time.
    """
    going, taken = dict(counts), 0
    for upto, ratio in (*ROUNDS, (MAX_SAMPLES, 1.0)):
        sample(interleaved({name: min(count, upto) - min(count, taken) for name, count in going.items()}))
        taken = upto
        medians = {name: statistics.median(samples[name]) for name in going if samples[name]}
        limit = ratio * min(medians.values(), default=0.0)
        spared = ours if upto < OUR_MIN_SAMPLES else ()
        going = {name: going[name] for name in medians if medians[name] <= limit or name in spared}


def interleaved(counts: Mapping[str, int]) -> Iterable[str]:
    """Names in sampling order: as many rounds as the largest count, with each name spread evenly over them."""
    rounds = max(counts.values(), default=0)
    for turn in range(rounds):
        for name, count in counts.items():
            if (turn + 1) * count // rounds > turn * count // rounds:
                yield name
