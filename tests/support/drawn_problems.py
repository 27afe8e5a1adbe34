"""What untuned schedules cost on problems that nobody tuned, measured: draw some, search each, compare in one run.

    python tests/support/drawn_problems.py --out FOLDER --budget 4m

Draws products and graphs by a seed, runs ``equitune tune`` on them into FOLDER, which tells the runtime nothing, then
samples in turn what the runtime chooses (untuned), what its rules alone would choose, and what the search found
(tuned). Prints each ratio to tuned, the mean and the worst. Exits with 1 beyond the limits, or if nothing was searched.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from autotune.compare.comparison import run_comparison
from autotune.compare.comparison_worker import ComparisonSetting
from autotune.database.lookup import find_schedule
from autotune.database.store import Database, database_path
from autotune.search.spaces.registry import space_of
from autotune.workload.config import load_config
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts, device_facts

DIRECTIONS = ("forward", "backward")
# Channels a block: common ones, and ones that fill no warp; features have at most so many components.
MULTIPLICITIES = (16, 32, 48, 64, 96, 128, 11, 37, 50, 75, 89, 100)
MOST_COMPONENTS = 1200
GRAPHS = ("aspirin", "protein", "carbon", "water-box")


def draw(random_: random.Random) -> dict[str, str]:
    """Irreps of a convolution: features to l = 0..3, of one or both parities, by harmonics to l = 1..3."""
    degree, edges = random_.randint(0, 3), random_.randint(1, 3)
    same, both = random_.choice(MULTIPLICITIES), random_.random() < 0.3
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


def config_text(count: int, seed: int, graphs: tuple[str, ...], trials: int) -> str:
    random_ = random.Random(seed)
    drawn: list[dict[str, str]] = []
    while len(drawn) < count:
        one = draw(random_)
        if components(one["in1"]) <= MOST_COMPONENTS and one not in drawn:
            drawn.append(one)
    lines = [f"# {count} problems drawn with seed {seed}", f'layout = "ir_mul"\ntrials = {trials}']
    lines.append(f"directions = {json.dumps(DIRECTIONS)}")
    for index in range(count):
        lines.append(f'\n[[workload]]\nproblem = "drawn-{index}"\ngraph = "{graphs[index % len(graphs)]}"')
    for index, one in enumerate(drawn):
        lines.append(f"\n[problems.drawn-{index}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in one.items()]
    return "\n".join(lines) + "\n"


def schedules_of(workload: Workload, facts: DeviceFacts, database: Database) -> dict[str, dict[str, Any]]:
    """By contender and direction; a direction without a search is left out."""
    found: dict[str, dict[str, Any]] = {"tuned": {}, "untuned": {}, "rules": {}}
    for direction in DIRECTIONS:
        entry = database.get(workload.identity(direction))
        if entry is None:
            continue
        kernel = (workload.problem, workload.operation, direction, workload.dtype, workload.layout, facts)
        choice = find_schedule(*kernel, workload.graph_class(), strict=False)
        assert choice.origin in ("predicted", "default"), f"{workload.label} was tuned before: {choice.reason}"
        found["tuned"][direction] = entry.tuned_schedule
        found["untuned"][direction] = choice.schedule
        found["rules"][direction] = space_of(workload, direction, facts).default
    return found


def ratios_of(workload: Workload, facts: DeviceFacts, database: Database, device: str) -> list[dict[str, Any]]:
    """A row for each direction: microseconds by contender."""
    ours = schedules_of(workload, facts, database)
    passes = tuple(ours["tuned"])
    if not passes:
        return []
    compared = run_comparison(ComparisonSetting(workload, device, ()), passes, ours, seconds_each=0.5)
    rows = []
    for which in passes:
        timings = {name: compared.results[name][which] for name in ours}
        assert all(one.timing for one in timings.values()), {name: one.error for name, one in timings.items()}
        times = {name: one.timing.median_us for name, one in timings.items() if one.timing}
        kernel = {"problem": workload.problem.key, "graph": workload.graph.name, "pass": which}
        rows.append(kernel | times | {"ratio": times["untuned"] / times["tuned"]})
        shown = "  ".join(f"{name} {time:9.1f} us" for name, time in times.items())
        print(f"{workload.label:10s} {workload.graph.name:10s} {which:9s} {shown}  {rows[-1]['ratio']:.3f}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument("--mean", type=float, default=1.10)
    parser.add_argument("--worst", type=float, default=1.35)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    config = given.out / "drawn.toml"
    config.write_text(config_text(given.count, given.seed, tuple(given.graphs.split(",")), given.trials))
    results = given.out / "results"
    tune = ["tune", config, "--device", given.device, "--no-peers", "--budget", given.budget]
    folders = ["--results", results, "--reports", given.out / "reports"]
    subprocess.run([sys.executable, "-m", "autotune", *map(str, (*tune, *folders))], check=True)
    facts = device_facts(given.device)
    database = Database.load(database_path(results, facts.slug))
    workloads = load_config(config, torch.device(given.device).type).workloads
    rows = [row for workload in workloads for row in ratios_of(workload, facts, database, given.device)]
    (given.out / "untuned.json").write_text(json.dumps(rows, indent=1) + "\n")
    if not rows:
        print("nothing was searched; give a larger --budget")
        return 1
    ratios = [row["ratio"] for row in rows]
    mean, worst = statistics.fmean(ratios), max(ratios)
    print(
        f"untuned / tuned, {len(rows)} kernels: mean {mean:.3f} (limit {given.mean}), worst {worst:.3f} ({given.worst})"
    )
    return int(mean > given.mean or worst > given.worst)


if __name__ == "__main__":
    sys.exit(main())
