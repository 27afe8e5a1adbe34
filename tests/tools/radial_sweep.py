"""Times schedules of fused radial convolutions on a GPU, beside torch's product and our convolution.

    python tests/tools/radial_sweep.py --out sweep.json --budget 170

Kernels compile in processes, and each is checked against e3nn in float64 (every output on its own) and timed as soon as
it is there: device time, cold L2, medians, on 158,000 edges of 1000 nodes (diamond). A schedule that does not compile,
or fails, is a row with the reason. The record is written after each measurement, so nothing is lost when time is up.
--only medium-backward,large: names that contain one of these. --schedules "slices=2,warps=12 default": others than
SCHEDULES, for all that are left. --graph aspirin: another graph of ``configs/graphs.toml``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from autotune.compare.peers import peers_for
from autotune.database.lookup import find_schedule
from autotune.measure.references import radial_problem
from autotune.measure.timing import time_callable
from autotune.measure.trial import TrialJob, TrialSession, TrialSetting
from autotune.workload.config import find_problem, load_graphs
from autotune.workload.graphs import build_graph
from autotune.workload.workload import GraphClass, Workload
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import EquituneError
from kernelgen.kernels.radial.plan import RadialSchedule, default_radial_schedule
from kernelgen.ops.product import build
from kernelgen.runtime.kernel import load_kernel

PROBLEMS = {
    "medium": "mace-mp-medium-radial",
    "large": "mace-mp-large-radial",
    "l3i5": "sevennet-l3i5-radial",
    "mediumtf32": "mace-mp-medium-radial-tf32",
    "largetf32": "mace-mp-large-radial-tf32",
}
FOUR = "products=wgmma"  # warps that multiply together
VALUE = f"{FOUR},tiles=4,ahead=hidden,paths_at_once=1"
COUPLED = "order=in2,slices=4,coupled=4"
COUPLED_TF32 = "order=in2,slices=4,coupled=2"
# By problem and direction; the first ones are measured first.
SCHEDULES = {
    "large-forward": ["default", f"path_groups=3,{VALUE}", "path_groups=2,tiles=2,edge_values=four"],
    "large-backward": [
        "default",
        f"path_groups=2,{COUPLED},{FOUR},paths_at_once=5",
        f"path_groups=2,{COUPLED}",
    ],
    "l3i5-forward": [
        "default",
        f"path_groups=4,{VALUE}",
        f"path_groups=5,{VALUE}",
        "path_groups=6,warps=12,ahead=hidden",
    ],
    "l3i5-backward": [
        "default",
        f"path_groups=6,{COUPLED},{FOUR},paths_at_once=5",
        f"path_groups=4,{COUPLED},{FOUR},paths_at_once=10",
        f"path_groups=6,{COUPLED}",
    ],
    "mediumtf32-forward": ["default", VALUE, f"{FOUR},tiles=4,paths_at_once=2"],
    "mediumtf32-backward": ["default", f"{COUPLED_TF32},{FOUR},paths_at_once=10"],
    "largetf32-forward": ["default", f"path_groups=2,{VALUE}", f"{FOUR},tiles=2,paths_at_once=1"],
    "largetf32-backward": [
        "default",
        f"path_groups=2,{COUPLED_TF32},{FOUR},paths_at_once=10",
        f"path_groups=2,{COUPLED_TF32},{FOUR},paths_at_once=5",
    ],
    "medium-backward": ["default", f"{COUPLED},{FOUR},paths_at_once=5", COUPLED],
    "medium-forward": ["default", "tiles=2,edge_values=four"],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule of one direction of one problem. name: ``medium-backward``; text: as in SCHEDULES."""

    name: str
    text: str
    graph: str

    @property
    def direction(self) -> str:
        return self.name.partition("-")[2]

    def workload(self) -> Workload:
        return workload_of(self.name, self.graph)

    def spec(self, facts: DeviceFacts) -> Any:
        """The spec; ScheduleError for a schedule that breaks a limit."""
        spec = self.workload().spec(self.direction, facts).of_kernel
        if self.text == "default":
            return default_radial_schedule(spec)
        pairs = (pair.split("=") for pair in self.text.split(","))
        knobs: dict[str, Any] = {knob: int(value) if value.isdigit() else value for knob, value in pairs}
        return dataclasses.replace(spec, schedule=RadialSchedule(**knobs))


def workload_of(name: str, graph: str) -> Workload:
    problem = PROBLEMS[name.partition("-")[0]]
    return Workload(problem, find_problem(problem), "radial", load_graphs()[graph], layout="ir_mul")


def compile_case(case: Case, facts: DeviceFacts) -> str:
    """Fill the cache on the disk; returns why it cannot."""
    try:
        load_kernel(case.spec(facts))
    except (EquituneError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def compile_unfused(case: Case, facts: DeviceFacts) -> str:
    """The same for a problem's convolution with weights in memory."""
    workload, direction = case.workload(), case.direction
    problem, rest = radial_problem(workload).product, (workload.dtype, workload.layout, facts)
    graph = build_graph(workload.graph)
    where = GraphClass.of("conv", graph.num_edges, graph.num_nodes)
    known: Any = {direction: find_schedule(problem, "conv", direction, *rest, where, False).schedule}
    operator = build(problem, known, operation="conv", dtype=torch.float32, layout=workload.layout, device="cuda")
    for spec in operator.specs(direction):
        load_kernel(spec)
    return ""


class Sweep:
    """Measures in this process what others have compiled."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.seconds, self.lost = out, seconds, ""
        self.rows: list[dict[str, Any]] = []
        self.sessions: dict[str, TrialSession] = {}

    def take(self, case: Case, compiled: Future[str], facts: DeviceFacts) -> None:
        """A row for a case whose compilation has ended."""
        try:
            if reason := compiled.result():
                self.add(case, {"state": "failed", "reason": reason})
            elif case.text == "unfused":
                self.measure_unfused(case)
            else:
                self.measure(case, facts)
        except Exception as error:  # of a worker, a peer or the device: the next case may pass
            self.add(case, {"state": "failed", "reason": f"{type(error).__name__}: {error}"[:300]})

    def session(self, case: Case) -> TrialSession:
        """The tensors and the reference of a problem, for both directions."""
        problem = case.name.partition("-")[0]
        if problem not in self.sessions:
            self.sessions[problem] = TrialSession(TrialSetting(case.workload(), "cuda"))
        return self.sessions[problem]

    def measure(self, case: Case, facts: DeviceFacts) -> None:
        schedule = case.spec(facts).schedule
        found = self.session(case).measure(TrialJob(case.direction, schedule, max_seconds=self.seconds))
        row: dict[str, Any] = {
            "state": found.state,
            "time_us": found.time_us,
            "errors": dict(found.errors),
            "reason": found.reason,
        }
        row |= {"resources": dict(found.resources), "clocks": found.clocks, "schedule": schedule.to_dict()}
        self.add(case, row)
        self.lost = f"the device was lost by {case.name} {case.text}" if found.device_lost else ""

    def measure_unfused(self, case: Case) -> None:
        """torch's product in the accuracy of the problem and our convolution, through autograd."""
        session, direction = self.session(case), case.direction
        peers = peers_for(session.workload, "cuda", session.tensors, session.reference)
        product = f"product-{radial_problem(session.workload).accuracy}"
        passes = next(peer for peer in peers if peer.name == product).prepare()
        run = getattr(passes, direction)
        run()
        timing = time_callable(run, "cuda", max_seconds=self.seconds)
        errors = passes.errors.get(direction, {})
        self.add(case, {"state": "ok", "time_us": timing.time_us, "errors": errors, "clocks": timing.clocks})
        passes.release()

    def add(self, case: Case, row: dict[str, Any]) -> None:
        self.rows.append({"name": case.name, "text": case.text} | row)
        device = torch.cuda.get_device_name()
        self.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": self.rows}, indent=1))
        print(self.line(self.rows[-1]), file=sys.stderr, flush=True)

    def line(self, row: dict[str, Any]) -> str:
        unfused = {other["name"]: other.get("time_us") for other in self.rows if other["text"] == "unfused"}
        time_us, resources = row.get("time_us"), row.get("resources") or {}
        shown = f"{time_us / 1e3:8.3f}" if time_us else f"{row['state']:>8}"
        whole = unfused.get(row["name"])
        gain = f"{whole / time_us:5.2f}" if whole and time_us else " " * 5
        needs = f"{resources.get('registers', ''):>4} {resources.get('spill_bytes', ''):>5}"
        errors = " ".join(f"{slot} {error:.1e}" for slot, error in row.get("errors", {}).items())
        return f"{row['name']:16} {shown} {gain} {needs}  {row['text']:64} {errors}{row.get('reason', '')[:160]}"

    def table(self) -> str:
        order = sorted(self.rows, key=lambda row: (row["name"], row.get("time_us") or 1e9))
        head = f"{'':16} {'ms':>8} {'gain':>5} regs spill  schedule; relative errors"
        return "\n".join([head, *map(self.line, order)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("radial_sweep.json"))
    parser.add_argument("--graph", default="carbon", help="a name of configs/graphs.toml")
    parser.add_argument("--budget", type=float, default=170, help="seconds, compilation included")
    parser.add_argument("--seconds", type=float, default=0.3, help="most seconds of samples for a schedule")
    parser.add_argument("--only", default="", help="names that contain one of these, with commas")
    parser.add_argument("--schedules", default="", help="in the place of SCHEDULES, with spaces")
    given = parser.parse_args()
    deadline = time.monotonic() + given.budget
    names = [name for name in SCHEDULES if any(part in name for part in given.only.split(","))]
    cases = [Case(name, text, given.graph) for name in names for text in given.schedules.split() or SCHEDULES[name]]
    facts = device_facts(torch.device("cuda"))
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn"))
    unfused = [Case(name, "unfused", given.graph) for name in names]
    jobs: dict[Future[str], Case] = {pool.submit(compile_unfused, case, facts): case for case in unfused}
    jobs |= {pool.submit(compile_case, case, facts): case for case in cases}
    sweep = Sweep(given.out, given.seconds)
    waiting = set(jobs)
    while waiting and time.monotonic() < deadline and not sweep.lost:
        ready, waiting = wait(waiting, max(0, deadline - time.monotonic()), "FIRST_COMPLETED")
        for job in sorted(ready, key=list(jobs).index):
            if time.monotonic() > deadline or sweep.lost:
                waiting.add(job)
            else:
                sweep.take(jobs[job], job, facts)
    for job in waiting:
        sweep.add(jobs[job], {"state": "late", "reason": sweep.lost or f"not measured within {given.budget:g} s"})
    print(sweep.table(), flush=True)
    for process in multiprocessing.active_children():  # what still compiles
        process.terminate()
    os._exit(0)


if __name__ == "__main__":
    main()
