"""Where our rule of stopping and those of nvbench end a measurement, replayed on stored samples.

    python tests/tools/stopping_rules.py results/bench/nvidia-h200.json --out results/replay/stopping-rules.json

Each list of 60 raw samples of our tuned kernels stands for a distribution; streams are drawn from it with replacement,
so what a machine does over seconds is not in them. By rule: the samples that it takes, the seconds that these kernels
compute meanwhile, and how far its figure is from that of the whole list (ours: the median; nvbench's: the mean).

- ours (:func:`autotune.measure.timing.time_callable`): from 10 samples on, every 5, until the 95% interval of the
  median is within 2%, at most 200 samples or one second.
- ``stdrel``, nvbench's default: from half a second of kernel time on, until the standard deviation is below 0.5% of the
  mean, or, every 16 samples, the last 512 values of that ratio vary by less than 5%.
- ``entropy`` of nvbench: every 2 samples, until the line through the last 299 entropies of the distribution rises by
  less than 0.048 degrees and explains 36% of their variance.

nvbench's are written after ``nvbench/detail/stdrel_criterion.cxx`` and ``entropy_criterion.cxx`` (commit 182c77e), each
ended after 15 s.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autotune.measure.timing import MAX_SAMPLES, MIN_SAMPLES, PRECISION, relative_half_width
from autotune.text import TUNED

LIST, LIMIT_S = 60, 15.0


def ours(draw: Iterator[float]) -> tuple[list[float], float]:
    samples = [next(draw) for _ in range(MIN_SAMPLES)]
    while len(samples) < MAX_SAMPLES and sum(samples) < 1e6 and relative_half_width(samples) >= PRECISION:
        samples += [next(draw) for _ in range(5)]
    return samples, float(np.median(samples))


def stdrel(draw: Iterator[float]) -> tuple[list[float], float]:
    samples, total, squares, noise = list[float](), 0.0, 0.0, deque[float](maxlen=512)
    while total < LIMIT_S * 1e6:
        samples.append(one := next(draw))
        total, squares, count = total + one, squares + one * one, len(samples)
        if count > 1:
            spread = max(0.0, squares - total * total / count) / (count - 1)
            noise.append(math.sqrt(spread) * count / total)
        if total <= 0.5e6 or not noise:
            continue
        if noise[-1] < 0.005:
            break
        if len(noise) > 64 and count % 16 == 0:
            last = np.asarray(noise)
            if math.sqrt(np.sum((last - last[-1]) ** 2) / (len(last) - 1)) / last[-1] < 0.05:
                break
    return samples, total / len(samples)


def entropy(draw: Iterator[float]) -> tuple[list[float], float]:
    samples, counts, entropies, total = list[float](), Counter[float](), deque[float](maxlen=299), 0.0
    weighted = 0.0  # sum of n log2 n over distinct values, from which the entropy follows
    while total < LIMIT_S * 1e6:
        samples.append(one := next(draw))
        before, total = counts[one], total + one
        counts[one] += 1
        weighted += (before + 1) * math.log2(before + 1) - (before * math.log2(before) if before else 0.0)
        entropies.append(math.log2(len(samples)) - weighted / len(samples))
        if len(samples) % 2 == 0:
            y = np.asarray(entropies)
            x = np.arange(len(y)) - (len(y) - 1) / 2
            slope = float(x @ y / (x @ x))
            spread = float(np.sum((y - y.mean()) ** 2))
            explained = slope * slope * float(x @ x) / spread if spread else 0.0
            if math.degrees(math.atan(slope)) <= 0.048 and explained >= 0.36:
                break
    return samples, total / len(samples)


RULES = {"ours": ours, "stdrel": stdrel, "entropy": entropy}


def lists_of(path: Path) -> list[list[float]]:
    rows = json.loads(path.read_text())["rows"]
    found = [row["times"].get(TUNED, {}).get("samples_us", []) for row in rows]
    return [samples for samples in found if len(samples) == LIST]


def drawn(samples: list[float], seed: tuple[int, int]) -> Iterator[float]:
    random = np.random.default_rng(seed)
    while True:
        yield from (samples[index] for index in random.integers(0, len(samples), 1000))


def replay(lists: list[list[float]], seed: int) -> dict[str, dict[str, float]]:
    """By rule, medians over the lists; of the errors also the value that 5% exceed."""
    told = {}
    for name, rule in RULES.items():
        taken, seconds, errors = [], [], []
        for number, samples in enumerate(lists):
            used, figure = rule(drawn(samples, (seed, number)))
            true = float(np.median(samples) if rule is ours else np.mean(samples))
            taken.append(len(used))
            seconds.append(sum(used) * 1e-6)
            errors.append(abs(figure / true - 1))
        told[name] = {
            "samples": float(np.median(taken)),
            "seconds": float(f"{np.median(seconds):.3g}"),
            "error": float(f"{np.median(errors):.2g}"),
            "error_95": float(f"{np.quantile(errors, 0.95):.2g}"),
        }
        print(name, told[name], flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--lists", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lists = lists_of(given.record)
    chosen = np.random.default_rng(given.seed).permutation(len(lists))[: given.lists]
    told = replay([lists[index] for index in chosen], given.seed)
    if given.out:
        known = {"record": str(given.record), "lists": len(chosen), "seed": given.seed, "rules": told}
        given.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
