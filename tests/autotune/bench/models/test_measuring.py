"""One step of a model, measured: samples of its wall time, its kernels, its memory."""

from __future__ import annotations

import pytest
import torch

from autotune.bench import session as measuring
from autotune.bench.session import Effort, kept_by_graphs, peak_mib, profile, wall_samples_ms


def test_slow_steps_get_fewer_samples() -> None:
    effort = Effort(seconds=0.0, most=9, least=5, slow_s=0.0, slow_samples=2)
    assert len(wall_samples_ms(lambda: None, "cpu", effort)) == 2
    assert len(wall_samples_ms(lambda: None, "cpu", Effort(seconds=0.0, most=9, least=5))) == 5


def test_warm_up_calls_as_often_as_asked_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []

    def step() -> None:
        calls.append(1)
        now[0] += 1.0

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    for asked, limit_s, made in ((5, 100.0, 5), (60, 2.5, 3), (1, 0.0, 1), (3, 2.0, 3)):
        calls.clear()
        measuring.warm_up(step, "cpu", asked, limit_s)
        assert len(calls) == made
    assert measuring.timed(step, "cpu") == 1.0


def test_a_profile_of_the_cpu_runs_nothing() -> None:
    assert profile(lambda: pytest.fail("it ran"), "cpu") == {}


@pytest.mark.gpu
def test_a_profile_counts_the_kernels_of_one_step_and_detaches() -> None:
    left, right = torch.rand(2, 256, 256, device="cuda")
    steps: list[torch.Tensor] = []
    for _ in range(3):  # a second profile must work after the first has detached
        found = profile(lambda: steps.append(left + right), "cuda")
        assert found["launches"] == 1 and 0 < found["device_ms"] < 10
    assert len(steps) == 3


def test_memory_of_captured_graphs_is_theirs_between_steps() -> None:
    segment = {"device": 0, "total_size": 100, "allocated_size": 30}
    segments = [
        segment | {"segment_pool_id": (0, 0)},
        segment | {"segment_pool_id": (0, 1)},
        segment | {"segment_pool_id": (3, 0), "allocated_size": 0},
        segment | {"segment_pool_id": (0, 1), "device": 1},
        segment,
    ]
    assert (kept_by_graphs(segments, 0), kept_by_graphs(segments, 1), kept_by_graphs([], 0)) == (170, 70, 0)


@pytest.mark.gpu
def test_a_captured_step_takes_the_memory_of_its_graph() -> None:
    given = torch.rand(1 << 20, device="cuda")
    before = peak_mib(lambda: None, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (given + 1).exp().sum()
    found = peak_mib(graph.replay, "cuda")
    assert before is not None and found is not None and found >= before + 4 and result.isfinite()
