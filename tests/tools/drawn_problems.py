"""What untuned schedules cost on problems that nobody tuned, measured: draw some, search each, compare in one run.

    python tests/tools/drawn_problems.py --out FOLDER --budget 4m

Draws products and graphs by a seed, none of a shape that the repository's databases know, and calls a module of each
once, forward and backward. Then runs ``equitune tune`` on them into FOLDER, which tells the runtime nothing, and
samples in turn what the module runs since its first call (untuned), what was predicted before it, what the rules alone
would choose, and what the search found (tuned). Prints each ratio to tuned, the mean and the worst. Exits with 1 beyond
the limits, or if nothing was searched.

With --search-only it ends after the search, whose trials may teach the model of time other shapes (CONTRIBUTING.md
says how); then draw the next ones with another seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from autotune.compare.comparison import ComparisonSetting, run_comparison
from autotune.database.maintenance import now_text, software_versions
from autotune.database.store import Database, database_path
from autotune.measure.kinds import space_of
from autotune.measure.worker import Worker
from autotune.modules.convolution import TensorProductConv
from autotune.tune.run import WorkerPairs
from autotune.workload.config import load_config, problems_from
from autotune.workload.workload import Workload, make_tensors
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.problem.product import shape_of

ROOT = Path(__file__).resolve().parents[2]
DIRECTIONS = ("forward", "backward")
# Channels a block: common ones, and ones that fill no warp; features have at most so many components.
MULTIPLICITIES = (16, 32, 48, 64, 96, 128, 11, 37, 50, 75, 89, 100)
MOST_COMPONENTS = 1200
GRAPHS = ("aspirin", "protein", "carbon", "water-box")


def draw(random_: random.Random, of_both: float) -> dict[str, str]:
    """Irreps of a convolution: features to l = 0..3, of one or both parities, by harmonics to l = 1..3.

    of_both: how often features have both parities.
    """
    degree, edges = random_.randint(0, 3), random_.randint(1, 3)
    same, both = random_.choice(MULTIPLICITIES), random_.random() < of_both
    equal = random_.random() < 0.6
    blocks = [
        f"{same if equal else random_.choice(MULTIPLICITIES)}x{order}{parity}"
        for order in range(degree + 1)
        for parity in ("eo" if both else "eo"[order % 2])
    ]
    outputs = [f"{order}{parity}" for order in range(random_.randint(0, 3) + 1) for parity in "eo"]
    harmonics = [f"{order}{'eo'[order % 2]}" for order in range(edges + 1)]
    return {"in1": "+".join(blocks), "in2": "+".join(harmonics), "filter": "+".join(outputs)}


def components(irreps: str) -> int:
    return sum(int(block.split("x")[0]) * (2 * int(block.split("x")[1][0]) + 1) for block in irreps.split("+"))


def draw_problems(given: argparse.Namespace) -> list[dict[str, str]]:
    """As many as wanted, of shapes that no database of the repository knows."""
    known = {
        shape_of(entry.problem)
        for path in (*ROOT.glob("results/*.json"), *ROOT.glob("results/drawn/*.json"))
        for entry in Database.load(path).entries
    }
    random_ = random.Random(given.seed)
    drawn: list[dict[str, str]] = []
    while len(drawn) < given.count:
        one = draw(random_, given.of_both)
        if components(one["in1"]) > MOST_COMPONENTS:
            continue
        shape = shape_of(problems_from({"problems": {"one": one}})["one"].key)
        if shape not in known:
            known.add(shape)
            drawn.append(one)
    return drawn


def config_text(given: argparse.Namespace) -> str:
    names = [f"drawn-{given.seed}-{index}" for index in range(given.count)]
    graphs = itertools.cycle(given.graphs.split(","))
    lines = [f"# {given.count} problems drawn with seed {given.seed}", f'layout = "ir_mul"\ntrials = {given.trials}']
    lines.append(f"directions = {json.dumps(DIRECTIONS)}")
    for name, graph in zip(names, graphs, strict=False):
        lines.append(f'\n[[workload]]\nproblem = "{name}"\ngraph = "{graph}"')
    for name, one in zip(names, draw_problems(given), strict=True):
        lines.append(f"\n[problems.{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in one.items()]
    return "\n".join(lines) + "\n"


def call_once(workload: Workload, device: str) -> dict[str, Any]:
    """The schedules that a module runs after its first call, those predicted before, and the seconds of that call."""
    problem, tensors = workload.product, make_tensors(workload, device)
    irreps = (problem.irreps_in1, problem.irreps_in2, problem.irreps_out, problem.e3nn_instructions)
    conv = TensorProductConv(*irreps, layout=workload.layout)
    inputs = [tensor.requires_grad_() for tensor in (tensors.x, tensors.y, tensors.w)]
    seconds = {}
    for which in DIRECTIONS:
        begin = monotonic()
        if which == "forward":
            out = conv(*inputs, tensors.sender, tensors.receiver)
        else:
            torch.autograd.grad(out, inputs, tensors.g)
        if out.is_cuda:
            torch.cuda.synchronize()
        seconds[which] = round(monotonic() - begin, 2)
    (met,) = conv._operators.values()
    (built,) = met.values()
    before = {which: built.tuning[which] for which in DIRECTIONS}
    for found in before.values():
        expected = ("predicted", "tried", "default")
        assert found.origin in expected, f"{workload.label} was tuned before: {found.reason}"
    return {
        "untuned": {which: conv.tuning[which].schedule for which in DIRECTIONS},
        "predicted": {which: found.schedule for which, found in before.items()},
        "seconds": seconds,
    }


def schedules_of(
    workload: Workload, called: dict[str, Any], facts: DeviceFacts, database: Database
) -> dict[str, dict[str, Any]]:
    """By contender and direction; a direction without a search is left out."""
    found: dict[str, dict[str, Any]] = {"tuned": {}, "untuned": {}, "predicted": {}, "rules": {}}
    for direction in DIRECTIONS:
        entry = database.get(workload.identity(direction))
        if entry is None:
            continue
        found["tuned"][direction] = entry.tuned_schedule
        for name in ("untuned", "predicted"):
            found[name][direction] = called[name][direction]
        found["rules"][direction] = space_of(workload, direction, facts).default
    return found


def ratios_of(
    workload: Workload, ours: dict[str, dict[str, Any]], device: str, seconds: float, worker: Worker
) -> list[dict[str, Any]]:
    """A row for each direction: microseconds by contender."""
    passes = tuple(ours["tuned"])
    if not passes:
        return []
    compared = run_comparison(
        ComparisonSetting(workload, device, ()), passes, ours, seconds_each=seconds, worker=worker
    )
    rows = []
    for which in passes:
        timings = {name: compared.results[name][which] for name in ours}
        assert all(one.timing for one in timings.values()), {name: one.error for name, one in timings.items()}
        times = {name: one.timing.time_us for name, one in timings.items() if one.timing}
        kernel = {"problem": workload.problem.key, "graph": workload.graph.name, "pass": which}
        ratios = {name: time_us / times["tuned"] for name, time_us in times.items() if name != "tuned"}
        rows.append(kernel | times | {"ratio": ratios["untuned"], "predicted_ratio": ratios["predicted"]})
        shown = "  ".join(f"{name} {time:8.1f} us" for name, time in times.items())
        print(
            f"{workload.label:13s} {workload.graph.name:9s} {which:8s} {shown}  "
            f"{ratios['predicted']:.3f} {ratios['untuned']:.3f}",
            flush=True,
        )
    return rows


def summary(name: str, ratios: list[float]) -> str:
    return f"{name} / tuned, {len(ratios)} kernels: mean {statistics.fmean(ratios):.3f}, worst {max(ratios):.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument("--of-both", type=float, default=0.3, help="How often features have both parities.")
    parser.add_argument("--seconds", type=float, default=0.5, help="Of each schedule in the final comparison.")
    parser.add_argument("--search-only", action="store_true")
    parser.add_argument("--mean", type=float, default=1.10)
    parser.add_argument("--worst", type=float, default=1.35)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    config = given.out / "drawn.toml"
    config.write_text(config_text(given))
    results = given.out / "results"
    workloads = load_config(config, torch.device(given.device).type).workloads
    called = {} if given.search_only else {each.label: call_once(each, given.device) for each in workloads}
    for label, found in called.items():
        print(f"{label:13s} first calls {found['seconds']} s", flush=True)
    tune = ["tune", config, "--device", given.device, "--no-peers", "--budget", given.budget]
    folders = ["--results", results, "--reports", given.out / "reports"]
    subprocess.run([sys.executable, "-m", "autotune", *map(str, (*tune, *folders))], check=True)
    if given.search_only:
        return 0
    facts = device_facts(given.device)
    database = Database.load(database_path(results, facts.slug))
    seconds = {label: found["seconds"] for label, found in called.items()}
    told = {"seed": given.seed, "device": facts.name, "date": now_text(), "software": software_versions(facts)}
    rows: list[dict[str, Any]] = []
    with WorkerPairs(given.device) as pairs:
        for number, workload in enumerate(workloads):
            worker = pairs.of(workload.problem).comparing
            pairs.launch(*(each.problem for each in workloads[number : number + 2]))
            ours = schedules_of(workload, called[workload.label], facts, database)
            rows += ratios_of(workload, ours, given.device, given.seconds, worker)
            (given.out / "untuned.json").write_text(
                json.dumps(told | {"first_calls_s": seconds, "rows": rows}, indent=1) + "\n"
            )
    if not rows:
        print("nothing was searched; give a larger --budget")
        return 1
    ratios = [row["ratio"] for row in rows]
    print(summary("predicted", [row["predicted_ratio"] for row in rows]))
    print(summary("untuned", ratios), f"(limits {given.mean} and {given.worst})")
    return int(statistics.fmean(ratios) > given.mean or max(ratios) > given.worst)


if __name__ == "__main__":
    sys.exit(main())
