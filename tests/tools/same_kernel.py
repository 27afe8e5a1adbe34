"""How often a comparison of a kernel with itself claims a difference, beside processes that keep all cores busy.

    python tests/tools/same_kernel.py --comparisons 200 --spinning 2

Several rules judge the same samples, for one the bootstrap of the ratio of medians that was published until the
interval of the rounds' ratios. One line each says in how many comparisons it claimed a difference.

Measured on two cores of an AMD EPYC with a load of 9 to 20, 200 comparisons of the kernel of ``quick`` with itself:
faster or slower 4 (2.0%), published as a gain 3 (1.5%), noise noted in all. With the same order in every round the
bootstrap claimed 83 (41.5%) and would have published 44 (22%); in rounds of alternating order 2 and 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from autotune.compare.comparison import ComparisonSetting, _Comparison
from autotune.measure.timing import FASTER, SLOWER, ratio_interval, verdict
from autotune.tune.publish import winner_of
from autotune.workload.config import load_config
from kernelgen.device import device_facts

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from busy import spinning  # noqa: E402

DIRECTION = "forward"


class InThisProcess:
    """What a worker answers, without another process."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def ask(self, limit_s: float, method: Any, *given: Any) -> Any:
        return method(self.session, *given)


def judge(count: int, candidates: int, seconds: float, config: str) -> None:
    """Print by rule how often a kernel differed from itself, in ``count`` comparisons with ``candidates`` others."""
    (workload,) = [w for w in load_config(config, "cpu").workloads if DIRECTION in w.directions][:1]
    setting = ComparisonSetting(workload, "cpu", peers=())
    session = setting.open()
    schedule = session.kind.space(workload, DIRECTION, device_facts("cpu")).default
    ours = {name: {DIRECTION: schedule} for name in ("default", *(f"candidate {n}" for n in range(1, candidates + 1)))}
    found: list[dict[str, bool]] = []
    worker: Any = InThisProcess(session)
    compared = _Comparison(worker, setting, (DIRECTION,), ours, seconds, lambda text: None)
    prepared = {name: compared._prepare(name, 0.0, 0) for name in ours}
    for number in range(1, count + 1):
        results = compared._compare(DIRECTION, prepared)
        session.release()
        times = {name: result.timing for name, result in results.items() if result.timing is not None}
        samples, medians = ({name: getattr(t, key) for name, t in times.items()} for key in ("samples_us", "time_us"))
        default = samples.pop("default")
        intervals = [ratio_interval(sample, default, paired=True) for sample in samples.values()]
        former = [bootstrap(sample, default) for sample in samples.values()]
        ratios = [medians["default"] / medians[name] for name in samples]
        found.append(
            {
                "medians apart by 2%": any(not 1 / 1.02 <= ratio <= 1.02 for ratio in ratios),
                "bootstrap: faster or slower": verdict(former[0]) in (FASTER, SLOWER),
                "bootstrap: published as a gain": any(low > 1 for low, _ in former),
                "faster or slower": verdict(intervals[0]) in (FASTER, SLOWER),
                "published as a gain": winner_of(results, medians)[0] != "default",
                "noise noted": any("noise" in t.conditions for t in times.values()),
            }
        )
        if number % 25 == 0 or number == count:
            tell(found)


def bootstrap(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the ratio of medians by resampled rounds."""
    rounds = min(len(ours), len(theirs))
    drawn = np.random.default_rng(0).integers(0, rounds, (2000, rounds))
    below, above = (np.median(np.asarray(side[:rounds])[drawn], axis=1) for side in (ours, theirs))
    low, high = np.quantile(above / below, [0.025, 0.975])
    return float(low), float(high)


def tell(found: list[dict[str, bool]]) -> None:
    for rule in found[0]:
        count = sum(one[rule] for one in found)
        print(f"{rule}: {count} of {len(found)} ({count / len(found):.1%})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--spinning", type=int, default=2)
    parser.add_argument("--candidates", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--config", default="quick")
    given = parser.parse_args()
    with ExitStack() as stack:
        if given.spinning:
            stack.enter_context(spinning(given.spinning))
        judge(given.comparisons, given.candidates, given.seconds, given.config)


if __name__ == "__main__":
    main()
