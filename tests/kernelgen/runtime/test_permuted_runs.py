"""Runs of edges of a graph that is not ordered by receiver: the kernel that takes them in order is chosen and fed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from reference import make_case

from kernelgen.arithmetic.directions import backward
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.product.schedule import LONG_RUN, CudaSchedule, HostSchedule
from kernelgen.kernels.spec import BUFFERS, Spec
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime import call as runner
from kernelgen.runtime.call import Checks
from kernelgen.runtime.graph import EdgeOrder, edge_order

PROBLEM = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o", "0e+1o")
RUNS = CudaSchedule(accumulate="atomics", edges_per_chunk=LONG_RUN, path_groups=2)
PERM = BUFFERS.index("perm")


def spec_of(schedule: CudaSchedule | HostSchedule, **more: object) -> Spec:
    host = DeviceFacts("cpu", "a host", "x86_64", 8, vector_bytes=64)
    facts = cuda_facts("sm_90") if schedule.backend == "cuda" else host
    return dataclasses.replace(Spec(PROBLEM, backward(), schedule, "conv", "float32", "mul_ir", "int64", facts), **more)


def launches(schedule: CudaSchedule, order: EdgeOrder | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """(whether the spec is permuted, the address of the permutation) of what a backward pass launches."""
    seen: list[tuple] = []

    def load(spec: Spec) -> SimpleNamespace:
        return SimpleNamespace(
            plan=make_plan(spec), run=lambda pointers, *_: seen.append((spec.permuted, pointers[PERM]))
        )

    monkeypatch.setattr(runner, "load_kernel", load)
    case = make_case(PROBLEM, "conv", edges=40, nodes=8, num_out=8)
    checks = Checks(PROBLEM, "conv", torch.float32, "cpu")
    x, y, w, g = (case.tensors[name].float() for name in "xywg")
    graph = checks.graph(x, y, case.sender, case.receiver, 8, order)
    runner.Runner(spec_of(schedule), checks)((x, None, y, None, w, None, g, None), graph)
    return seen


def test_an_order_by_receiver_selects_the_permuted_kernel_of_long_runs(monkeypatch) -> None:
    receiver = make_case(PROBLEM, "conv", edges=40, nodes=8, num_out=8).receiver
    ordered = edge_order(receiver, 8)
    assert launches(RUNS, ordered, monkeypatch) == [(True, ordered.perm.data_ptr())]
    short = dataclasses.replace(RUNS, edges_per_chunk=2)
    assert launches(short, ordered, monkeypatch) == [(False, 0)], "short runs gain nothing"
    sorted_already = EdgeOrder(ordered.spans, None)
    assert launches(RUNS, sorted_already, monkeypatch) == [(False, 0)]
    assert launches(RUNS, None, monkeypatch) == [(False, 0)]
    owned = dataclasses.replace(RUNS, accumulate="registers")
    assert launches(owned, ordered, monkeypatch) == [(False, ordered.perm.data_ptr())]


@pytest.mark.parametrize(
    "wrong",
    [
        spec_of(dataclasses.replace(RUNS, accumulate="registers")),
        spec_of(RUNS, operation="plain"),
        spec_of(HostSchedule(accumulate="atomics")),
    ],
)
def test_only_runs_of_a_convolution_on_a_gpu_are_permuted(wrong: Spec) -> None:
    with pytest.raises(ScheduleError, match="runs of edges of a weighted uvu convolution on a GPU"):
        dataclasses.replace(wrong, permuted=True)
