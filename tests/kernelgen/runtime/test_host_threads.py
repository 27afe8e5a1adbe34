"""Number of threads of a host kernel: never more than torch has, and one in a forked process."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from kernelgen import device_facts
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.compile.compiler import compile_source
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.kernels.source import ENTRY, Source
from kernelgen.kernels.spec import BUFFERS, Spec, host_entry
from kernelgen.kernels.spherical_harmonics import HarmonicsHostSchedule
from kernelgen.ops.harmonics import build_harmonics
from kernelgen.ops.product import build
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime import kernel as launch

HOST = dataclasses.replace(device_facts("cpu"), units=8)
PROBLEM = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o", "0e+1o")
EDGES, NODES = 1000, 20


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_used(fixed: int, edges: int = EDGES) -> int:
    """The number of threads that a kernel receives, recorded by the kernel."""
    schedule = HostSchedule(threads=fixed)
    plan = make_plan(Spec(PROBLEM, DIRECTIONS["forward"], schedule, "conv", "float32", "mul_ir", "int64", HOST))
    source = Source("\n".join([*host_entry(), "    *static_cast<int*>(out_g) = threads;", "}"]) + "\n", "c++")
    told = ctypes.c_int()
    pointers = [ctypes.addressof(told) if name == "out_g" else 0 for name in BUFFERS]
    launch._load_host(plan, compile_source(source, HOST), ENTRY)(pointers, edges, NODES, NODES, -1)
    return told.value


@pytest.mark.parametrize(
    ("fixed", "torch_threads", "edges", "used"),
    [
        (0, 2, EDGES, 2),
        (0, 1, EDGES, 1),
        (0, 2, 1, 1),
        (1, 2, EDGES, 1),
        (2, 2, 1, 2),
        (8, 2, EDGES, 2),
        (8, 1, EDGES, 1),
    ],
)
def test_the_smaller_of_the_schedules_and_torchs_threads(fixed: int, torch_threads: int, edges: int, used: int) -> None:
    torch.set_num_threads(torch_threads)
    assert threads_used(fixed, edges) == used


def test_one_thread_after_a_fork_and_a_warning_where_there_would_be_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_forked", True)
    launch._one_thread.cache_clear()
    assert threads_used(1) == 1
    with pytest.warns(UserWarning, match="one thread in a forked process") as caught:
        assert [threads_used(fixed) for fixed in (0, 2, 8)] == [1, 1, 1]
    assert len(caught) == 1
    launch._one_thread.cache_clear()


def product(threads: int) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    operator = build(PROBLEM, HostSchedule(threads=threads))
    x, y = torch.randn(NODES, PROBLEM.dim_in1), torch.randn(EDGES, PROBLEM.dim_in2)
    w, receiver = torch.randn(EDGES, PROBLEM.weight_numel), torch.arange(EDGES) * NODES // EDGES
    return lambda: operator(x, y, w, torch.arange(EDGES) % NODES, receiver, num_out=NODES)


def harmonics(threads: int) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    operator = build_harmonics(HarmonicsProblem((0, 1, 2), "component", True), HarmonicsHostSchedule(threads=threads))
    vectors = torch.randn(EDGES, 3)
    return lambda: operator(vectors)


@pytest.mark.skipif(device_facts("cpu").units < 2, reason="a schedule has no more threads than there are cores")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("kernel", [product, harmonics])
@pytest.mark.parametrize("in_child", [2, 1])
def test_a_forked_child_gives_the_same_values(
    kernel: Callable[[int], Callable[[], torch.Tensor]], threads: int, in_child: int
) -> None:
    call = kernel(threads)
    expected = call()  # from here on this process has threads that its child lacks

    def child() -> None:
        torch.set_num_threads(in_child)
        torch.testing.assert_close(call(), expected)
        os._exit(7)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    process.kill()
    process.join()
    assert process.exitcode == 7, "hung or failed"
