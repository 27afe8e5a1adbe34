"""How a module without ``graph_class`` compares with one that was told it, on several graphs in one process.

    python tests/tools/graph_choice.py --device cuda

Prints, for each problem, graph and pass, both times and their ratio, then the largest ratio; and for each graph a call
with new views of one ``edge_index`` (as in model packages) over a call with the same tensors, and the time of ordering
it. Exits with 1 if a ratio exceeds the limit. All modules are built and called on all graphs before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autotune.measure.kinds import AutogradPasses, new_graph, unordered
from autotune.measure.timing import Sampler
from autotune.modules.convolution import TensorProductConv
from autotune.workload.config import load_config
from autotune.workload.workload import Workload, make_tensors
from kernelgen.problem.product import TensorProductProblem

PASSES = ("forward", "forward_backward", "force_step")


def workloads(problems: list[str], graphs: list[str], layout: str, device: str) -> list[Workload]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "choice.toml")
        path.write_text(f'problem = {problems}\ngraph = {graphs}\nlayout = "{layout}"\ndirections = ["forward"]\n')
        return list(load_config(path, torch.device(device).type).workloads)


def module(problem: TensorProductProblem, layout: str, graph_class: str | None = None) -> TensorProductConv:
    given = (problem.irreps_in1, problem.irreps_in2, problem.irreps_out, problem.e3nn_instructions)
    norms = {"irrep_normalization": problem.irrep_normalization, "path_normalization": problem.path_normalization}
    shared: dict[str, Any] = {"shared_weights": problem.shared_weights}
    return TensorProductConv(*given, **shared, **norms, layout=layout, graph_class=graph_class)


def medians(calls: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Median microseconds of each call, sampled in turn."""
    samplers = {name: Sampler(call, device) for name, call in calls.items()}
    for sampler in samplers.values():
        sampler.warm_up(5)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, sampler in samplers.items():
            samples[name] += sampler.take(1)
    return {name: statistics.median(times) for name, times in samples.items()}


class Case:
    """One problem on one graph: the same calls by both modules."""

    def __init__(self, workload: Workload, free: TensorProductConv, device: str) -> None:
        self.workload, self.device = workload, device
        self.tensors = make_tensors(workload, device)
        assert self.tensors.sender is not None and self.tensors.receiver is not None
        self.index = torch.stack(unordered(self.tensors.sender, self.tensors.receiver))
        rows = self.index[0].clone(), self.index[1].clone()
        told = module(workload.product, workload.layout, workload.graph_class().text)
        self.modules = {"free": free, "told": told}
        self.passes = {
            name: AutogradPasses(lambda x, y, w, conv=conv: conv(x, y, w, *rows), self.tensors)
            for name, conv in self.modules.items()
        }

    def run(self) -> None:
        for passes in self.passes.values():
            for which in PASSES:
                getattr(passes, which)()
            passes.release()

    def ratios(self, rounds: int) -> dict[str, float]:
        found = {}
        for which in PASSES:
            times = medians({name: getattr(p, which) for name, p in self.passes.items()}, self.device, rounds)
            found[which] = times["free"] / times["told"]
            label = f"{self.workload.label} on {self.workload.graph_class().text} {which}"
            print(f"{label:64s} free {times['free']:10.1f} us  told {times['told']:10.1f} us  {found[which]:.3f}")
        same = {which: self.modules["told"].tuning[which] for which in ("forward", "backward", "joint_backward")}
        differing = [which for which in same if self.modules["free"].tuning[which].schedule != same[which].schedule]
        if differing:
            print(f"  schedules differ in {differing}")
        return found

    def views(self, rounds: int) -> None:
        conv, t, index = self.modules["free"], self.tensors, self.index
        sender, receiver = index[0], index[1]
        order = new_graph(conv._operator, t.num_nodes)
        with torch.no_grad():
            calls: dict[str, Callable[[], object]] = {
                "same": lambda: conv(t.x, t.y, t.w, sender, receiver),
                "views": lambda: conv(t.x, t.y, t.w, index[0], index[1]),
                "order": lambda: order(sender, receiver),
            }
            times = medians(calls, self.device, rounds)
        shown = "  ".join(f"{name} {time:.1f} us" for name, time in times.items())
        print(f"{self.workload.label} on {self.workload.graph_class().text}, index tensors: {shown}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--problems", default="mace-mp-first,mace-mp-medium,nequip-water,sevennet-0")
    parser.add_argument("--graphs", default="aspirin,protein,carbon,water")
    parser.add_argument("--layout", default="ir_mul")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--limit", type=float, default=1.05)
    given = parser.parse_args()
    worst = 0.0
    for problem in given.problems.split(","):
        asked = workloads([problem], given.graphs.split(","), given.layout, given.device)
        free = module(asked[0].product, given.layout)
        cases = [Case(workload, free, given.device) for workload in asked]
        for _ in range(2):
            for case in cases:
                case.run()
        for case in cases:
            worst = max(worst, *case.ratios(given.rounds).values())
            case.views(given.rounds)
        del cases
    print(f"largest ratio {worst:.3f}; limit {given.limit}")
    return int(worst > given.limit)


if __name__ == "__main__":
    sys.exit(main())
