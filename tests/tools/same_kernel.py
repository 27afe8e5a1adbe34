"""How often a comparison of a kernel with itself claims a difference, beside processes that keep all cores busy.

    python tests/tools/same_kernel.py --comparisons 200 --spinning 2

Three rules judge the same samples: medians that differ by more than 2%, an interval above 1 for any of the candidates,
and what is published (``winner_of``). One line each says how often the kernel beat itself.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


def judged(count: int, candidates: int, seconds: float, config: str) -> list[dict[str, bool]]:
    """By rule, whether a kernel beat itself, for each of ``count`` comparisons with ``candidates`` others."""
    (workload,) = [w for w in load_config(config, "cpu").workloads if DIRECTION in w.directions][:1]
    setting = ComparisonSetting(workload, "cpu", peers=())
    session = setting.open()
    schedule = session.kind.space(workload, DIRECTION, device_facts("cpu")).default
    ours = {name: {DIRECTION: schedule} for name in ("default", *(f"candidate {n}" for n in range(1, candidates + 1)))}
    found = []
    worker: Any = InThisProcess(session)
    compared = _Comparison(worker, setting, (DIRECTION,), ours, seconds, lambda text: None)
    prepared = {name: compared._prepare(name, 0.0) for name in ours}
    for _ in range(count):
        results = compared._compare(DIRECTION, prepared)
        session.release()
        times = {name: result.timing for name, result in results.items() if result.timing is not None}
        samples, medians = ({name: getattr(t, key) for name, t in times.items()} for key in ("samples_us", "median_us"))
        default = samples.pop("default")
        intervals = [ratio_interval(sample, default, paired=True) for sample in samples.values()]
        ratios = [medians["default"] / medians[name] for name in samples]
        found.append(
            {
                "medians apart by 2%": any(not 1 / 1.02 <= ratio <= 1.02 for ratio in ratios),
                "an interval above 1": any(low > 1 for low, _ in intervals),
                "verdict faster or slower": verdict(intervals[0]) in (FASTER, SLOWER),
                "published as a gain": winner_of(results, medians)[0] != "default",
                "noise noted": any("noise" in t.conditions for t in times.values()),
            }
        )
    return found


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
        found = judged(given.comparisons, given.candidates, given.seconds, given.config)
    for rule in found[0]:
        count = sum(one[rule] for one in found)
        print(f"{rule}: {count} of {len(found)} ({count / len(found):.1%})")


if __name__ == "__main__":
    main()
