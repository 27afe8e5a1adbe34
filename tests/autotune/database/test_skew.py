"""Schedules for graphs one node of which has far more edges than others: runs of equal length, where a GPU waits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from cuda_emulator import run_direction
from database_samples import GPU, PROBLEM, entry, store
from reference import expected, make_case, relative_error

from autotune.database.lookup import Tuning, find_schedule
from autotune.database.predicted import TRIED, predict
from autotune.modules.base import class_of_call
from autotune.workload.workload import GraphClass
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import cuda_facts
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem

EVEN, SKEWED = "conv-e17-d5", "conv-e17-d5-s6"
OWNED = CudaSchedule(path_groups=2, teams_per_node=4, finish="unrolled", edge_operand="shared", stage_edges=8)
RUNS = dataclasses.replace(OWNED, accumulate="atomics", teams_per_node=1, finish="blocks", runs="waves")
NEW = TensorProductProblem.channelwise("89x0e+37x1o+11x2e", "0e+1o+2e", "0e+1o+2e")


def find(graph_class: str, **options: bool) -> Tuning:
    return find_schedule(PROBLEM, "conv", "forward", "float32", "ir_mul", GPU, graph_class, **options)


def test_a_tuned_schedule_of_an_even_graph_takes_runs_of_equal_length(shipped: Path) -> None:
    store(shipped, GPU, entry(OWNED, layout="ir_mul", graph_class=EVEN))
    assert find(EVEN).schedule == OWNED
    found = find(SKEWED)
    assert (found.origin, found.schedule) == ("nearest", RUNS)
    assert "in runs of equal length for its longest node" in found.reason
    # Eight times the mean is less than twice a share of 2^19 edges.
    assert find("conv-e19-d5-s3").schedule.accumulate == "registers"


def test_a_first_run_tries_the_other_forms_of_a_schedule_on_a_skewed_graph(shipped: Path) -> None:
    store(shipped, GPU, entry(OWNED, layout="ir_mul", graph_class=EVEN))
    cut = dataclasses.replace(RUNS, zeros="cut")
    forms = (OWNED, cut, dataclasses.replace(cut, runs="fixed"))
    assert find(EVEN).others == () and find(SKEWED).others == forms
    assert find(SKEWED, deterministic=True).others == ()
    found = find_schedule(PROBLEM, "conv", "forward", "float32", "ir_mul", GPU, SKEWED, tolerance=1.0)
    assert found.others == (), "an error is proven of one schedule"
    store(shipped, GPU, entry(OWNED, layout="ir_mul", graph_class=SKEWED))
    assert find(SKEWED).others == (), "searched there"
    near = find("conv-e17-d5-s7")
    assert (near.schedule, near.others) == (OWNED, (RUNS, *forms[1:]))


def test_a_first_run_of_a_predicted_schedule_tries_its_forms_on_a_skewed_graph() -> None:
    spec = Spec(NEW, DIRECTIONS["forward"], CudaSchedule(), "conv", "float32", "ir_mul", "int64", GPU)
    found = predict(spec, GraphClass.parse(SKEWED))
    assert found is not None and isinstance(found.schedule, CudaSchedule)
    assert found.others[0] == dataclasses.replace(found.schedule, zeros="cut")
    assert found.others[1] == dataclasses.replace(found.schedule, zeros="cut", runs="fixed")
    rules = make_plan(dataclasses.replace(spec, schedule=default_schedule(spec).for_skew())).spec.schedule
    assert len(found.others) == TRIED - 1 and rules in (found.schedule, *found.others), "the rules need no model"
    backward = predict(dataclasses.replace(spec, direction=DIRECTIONS["backward"]), GraphClass.parse(SKEWED))
    assert backward is not None and all(form.zeros != "cut" for form in backward.others), "it sums no values"


def test_what_was_tuned_on_such_a_graph_stays_as_it_is(shipped: Path) -> None:
    own = entry(OWNED, layout="ir_mul", graph_class=SKEWED)
    store(shipped, GPU, own, entry(CudaSchedule(), layout="ir_mul", graph_class=EVEN))
    assert (find(SKEWED).origin, find(SKEWED).schedule) == ("exact", OWNED)
    assert find("conv-e17-d5-s7").schedule == OWNED and find(EVEN).schedule == CudaSchedule()


def test_the_default_takes_such_runs_and_a_deterministic_kernel_does_not(shipped: Path) -> None:
    even, skewed = find(EVEN), find(SKEWED)
    assert (even.origin, skewed.origin) == ("default", "default")
    assert (even.schedule.accumulate, skewed.schedule.accumulate) == ("registers", "atomics")
    assert skewed.schedule == even.schedule.for_skew() and "runs of equal length" in skewed.reason
    assert find(SKEWED, deterministic=True).schedule == find(EVEN, deterministic=True).schedule


def test_predicted_schedules_of_a_skewed_graph_own_no_nodes() -> None:
    facts = cuda_facts("sm_90", "NVIDIA H200", 132)
    for direction in ("forward", "backward", "joint_backward", "double_backward"):
        spec = Spec(NEW, DIRECTIONS[direction], CudaSchedule(), "conv", "float32", "ir_mul", "int64", facts)
        found = predict(spec, GraphClass.parse(SKEWED))
        assert found is not None and found.schedule.accumulate == "atomics"  # type: ignore[attr-defined]


def test_other_schedules_have_no_form_for_skew() -> None:
    fixed = dataclasses.replace(RUNS, runs="fixed")
    short = dataclasses.replace(fixed, edges_per_chunk=2)
    for schedule in (RUNS, short, CudaSchedule(fuse=False), HostSchedule()):
        assert schedule.for_skew() == schedule
    assert fixed.for_skew() == RUNS


def test_a_call_sees_the_skew_of_its_graph() -> None:
    receiver = torch.cat((torch.arange(4000).repeat_interleave(16), torch.zeros(9000, dtype=torch.int64)))
    size = GraphClass.of("conv", len(receiver), 4000)
    given = (size.log2_edges, size.log2_degree)
    assert class_of_call("conv", given, receiver, 4000).text == f"{size.text}-s8"
    for unseen in (None, receiver[:0], receiver[None], receiver.to("meta")):
        assert class_of_call("conv", given, unseen, 4000) == size

    def traced(each: torch.Tensor) -> torch.Tensor:
        assert class_of_call("conv", given, receiver, 4000) == size
        return each

    torch.func.vmap(traced)(torch.zeros(2))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("form", "held"), [("default", 0), ("copy", 0), ("copy", 1), ("copy", 3)])
def test_runs_of_a_long_node_add_up(form: str, held: int, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node with 70 of 90 edges, which several runs share, lane by lane against e3nn.

    held: blocks that each of two multiprocessors holds at a time, 0 if unknown.
    """
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    problem = TensorProductProblem.channelwise("16x0e+16x1o", "0e+1o", "0e+1o")
    case = make_case(problem, "conv", edges=90)
    assert case.receiver is not None
    receiver = torch.where(torch.arange(90) < 70, torch.tensor(1), case.receiver).sort().values
    case = dataclasses.replace(case, receiver=receiver)
    spec = Spec(problem, DIRECTIONS[direction], CudaSchedule(), "conv", "float64", "ir_mul", "int64", GPU)
    schedule = default_schedule(spec)
    if form == "copy":
        schedule = dataclasses.replace(OWNED, prefetch="copy", edges_per_warp=2)
    even = schedule.for_skew()
    assert even.accumulate == "atomics" != schedule.accumulate
    few = dataclasses.replace(GPU, units=2)
    results = run_direction(case, DIRECTIONS[direction], "conv", "ir_mul", "float64", even, facts=few, held=held)  # type: ignore[arg-type]
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors
