"""Timing: when sampling stops, what is reported, and that samples start with a cold cache. No clock decides a test."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
import types
from collections.abc import Callable, Iterator

import pytest
import torch

from autotune.measure import timing as measure
from autotune.measure.trial import TrialJob, TrialSetting
from autotune.workload.graphs import GraphSpec, Points
from autotune.workload.workload import Workload
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.job import section
from kernelgen.device import cuda_facts
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime import kernel as instruction_cache


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[float]], list[int]]:
    """Let samples come from an iterator; returns the list of how many were taken at a time."""

    def use(samples: Iterator[float]) -> list[int]:
        taken: list[int] = []

        def take(self: measure.Sampler, count: int) -> list[float]:
            taken.append(count)
            return list(itertools.islice(samples, count))

        monkeypatch.setattr(measure.Sampler, "take", take)
        monkeypatch.setattr(measure.Sampler, "warm_up", lambda self, **floors: 0.0)
        return taken

    return use


def test_steady_samples_stop_soon(scripted: Callable) -> None:
    scripted(itertools.repeat(5.0))
    timing = measure.time_callable(lambda: None, "cpu", max_seconds=1e9)
    assert (timing.time_us, timing.q1_us, timing.q3_us) == (5.0, 5.0, 5.0)
    assert measure.MIN_SAMPLES <= len(timing.samples_us) < 20
    assert not timing.cut and timing.clocks is None


def test_the_clock_is_read_after_each_row_of_samples(scripted: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(1000, 10)
    monkeypatch.setattr(measure, "sm_clock_mhz", lambda device: next(readings))
    taken = scripted(itertools.repeat(5.0))
    timing = measure.time_callable(lambda: None, "cpu", max_seconds=1e9)
    assert timing.clocks == {"sm_mhz": [1000, 1000 + 5 * (len(taken) - 1), 1000 + 10 * (len(taken) - 1)]}


def test_noisy_samples_go_on_to_the_end(scripted: Callable) -> None:
    generator = random.Random(0)
    scripted(iter(lambda: generator.uniform(1.0, 100.0), None))
    timing = measure.time_callable(lambda: None, "cpu", max_seconds=1e9, max_samples=57)
    assert len(timing.samples_us) == 57


def test_no_time_still_takes_the_least_samples(scripted: Callable) -> None:
    generator = random.Random(0)
    scripted(iter(lambda: generator.uniform(1.0, 100.0), None))
    timing = measure.time_callable(lambda: None, "cpu", max_seconds=0.0)
    assert measure.MIN_SAMPLES <= len(timing.samples_us) < measure.MIN_SAMPLES + 5


def test_hopeless_candidate_is_cut_after_a_look(scripted: Callable) -> None:
    taken = scripted(itertools.repeat(50.0))
    timing = measure.time_callable(lambda: None, "cpu", hopeless_us=20.0)
    assert taken == [measure.FIRST_LOOK]
    assert timing.cut and timing.time_us == 50.0
    for limit_us in (60.0, 50.0):
        assert not measure.time_callable(lambda: None, "cpu", hopeless_us=limit_us).cut


def test_quartiles_of_known_samples() -> None:
    timing = measure.timing_of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (timing.q1_us, timing.time_us, timing.q3_us) == (2.0, 3.0, 4.0)
    assert timing.samples_us == (4.0, 1.0, 3.0, 2.0, 5.0), "raw samples keep their order"
    assert measure.timing_of([7.0]).q3_us == 7.0
    one_was_late = measure.timing_of([1.0, 2.0, 3.0, 4.0, 1000.0])
    assert (one_was_late.q1_us, one_was_late.time_us, one_was_late.q3_us) == (2.0, 3.0, 4.0), "no mean"


def test_interval_of_the_median_covers_it() -> None:
    """About 95% of intervals of 25 draws hold the true median; well under that would be a wrong stop rule."""
    generator, covered, rounds = random.Random(1), 0, 2000
    for _ in range(rounds):
        ordered = sorted(generator.uniform(0.0, 2.0) for _ in range(25))
        reach = 0.98 * math.sqrt(25)
        low, high = ordered[math.floor(12.5 - reach)], ordered[math.ceil(12.5 + reach)]
        width = measure.relative_half_width(ordered)
        assert width == pytest.approx((high - low) / 2 / ordered[12])
        covered += low <= 1.0 <= high
    assert covered / rounds > 0.94
    for few in range(1, 8):
        assert measure.relative_half_width([1.0] * few) == math.inf, "too few for 95%"
    assert measure.relative_half_width([8.0, 6.0, 1.0, 2.0, 7.0, 3.0, 5.0, 4.0]) == pytest.approx((8 - 2) / 2 / 4.5)


def test_every_sample_evicts_the_cache_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    # No other process's work has a sample taken again.
    monkeypatch.setattr(measure, "waited_ns", lambda: 0)

    class Buffer:
        def add_(self, value: float) -> None:
            events.append("evict")

    sampler = measure.Sampler(lambda: events.append("call"), "cpu")
    assert sampler._buffer is not None
    assert sampler._buffer.numel() * 4 > min(500 << 20, measure.last_level_cache_bytes())
    sampler._buffer = Buffer()  # type: ignore[assignment]
    samples = sampler.take(3)
    assert events == ["evict", "call"] * 3
    assert len(samples) == 3 and all(sample > 0 for sample in samples)


def test_what_evicts_the_cache_is_not_in_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: the eviction takes an hour, the call 5 us."""
    now_ns = [0]

    def spend(time_ns: int) -> None:
        now_ns[0] += time_ns

    monkeypatch.setattr(measure.time, "perf_counter_ns", lambda: now_ns[0])
    monkeypatch.setattr(measure, "waited_ns", lambda: 0)
    sampler = measure.Sampler(lambda: spend(5000), "cpu")
    sampler._buffer = types.SimpleNamespace(add_=lambda value: spend(3600 * 10**9))  # type: ignore[assignment]
    assert sampler.take(2) == [5.0, 5.0]
    assert sampler.host_row_us(seconds=1.0) == 5.0


def test_on_a_gpu_the_eviction_and_the_wait_come_before_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def query(self) -> bool:
            return False

        def elapsed_time(self, end: Event) -> float:
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("wait"))
    sampler = measure.Sampler(lambda: done.append("call"), "cuda", cold_cache=False)
    sampler._buffer = types.SimpleNamespace(add_=lambda value: done.append("evict"))  # type: ignore[assignment]
    assert sampler.take(2) == [250.0, 250.0]
    assert done == ["evict", "wait", "event", "call", "event"] * 2


def test_code_is_made_cold_before_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the caches of code cold is itself out of the cache of data by then."""
    events: list[str] = []
    monkeypatch.setattr(instruction_cache, "evict_code", lambda device: events.append(f"code {device}"))
    sampler = measure.Sampler(lambda: None, "cpu", cold_code=True)
    sampler._buffer = types.SimpleNamespace(add_=lambda value: events.append("data"))  # type: ignore[assignment]
    sampler._evict()
    assert events == ["data"], "a CPU is left alone"
    sampler._cold_code = True
    sampler._evict()
    assert events == ["data", "code cpu", "data"]


def test_the_long_code_is_longer_than_the_caches() -> None:
    code = section(
        compile_source(instruction_cache.source(), cuda_facts("sm_90")).path.read_bytes(),
        f".text.{instruction_cache.ENTRY}",
    )
    assert len(code) >= 16 * instruction_cache.STEPS >= 2 * 128 << 10


@pytest.mark.parametrize(("nodes", "cold"), [(30, True), (600, False)])
def test_small_graphs_are_measured_with_cold_code(nodes: int, cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model other kernels run in between; a long kernel fetches its code once."""
    given: list[bool] = []
    timing = measure.timing_of([5.0] * 10)
    monkeypatch.setattr(measure, "time_callable", lambda *_, **options: given.append(options["cold_code"]) or timing)
    problem = TensorProductProblem.channelwise("2x0e", "0e", "0e")
    graph = GraphSpec("made up", Points(nodes, 0.1), 3.0)
    session = TrialSetting(Workload("small", problem, "conv", graph), "cpu").open()
    assert session.measure(TrialJob("forward", HostSchedule())).state == "ok" and given == [cold]


def test_a_copy_reads_and_writes_what_it_is_said_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def timed(call: Callable, *_: object, **__: object) -> measure.Timing:
        copied.append(call().numel() * 4)
        return measure.timing_of([2000.0])

    monkeypatch.setattr(measure, "time_callable", timed)
    assert measure.copy_us("cpu", 8000) == 2000.0 and copied == [4000]
    made, ones = [], torch.ones
    monkeypatch.setattr(torch, "ones", lambda count, **options: made.append(count) or ones(1, **options))
    assert measure.copy_bandwidth.__wrapped__("cpu") == pytest.approx(2 * 4 * made[0] / 2e-3) and made == [1 << 26]


def test_warm_up_calls_at_least_as_often_as_asked() -> None:
    calls: list[int] = []
    measure.Sampler(lambda: calls.append(1), "cpu", cold_cache=False).warm_up(min_calls=7, seconds=0.0)
    assert len(calls) == 7


def test_clocks_are_none_without_nvml() -> None:
    assert measure.sm_clock_mhz("cpu") is None
    assert measure.clock_summary([None, None]) is None
    assert measure.clock_summary([1980, None, 1200, 1500]) == {"sm_mhz": [1200, 1500, 1980]}


def test_memory_where_the_results_of_a_call_go_as_late_as_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"requested_bytes.all.current": 0, "requested_bytes.all.peak": 0}

    def reset(device: torch.device) -> None:
        memory["requested_bytes.all.peak"] = memory["requested_bytes.all.current"]

    late = itertools.cycle((True, False))

    def call() -> None:
        memory["requested_bytes.all.current"] = 100
        memory["requested_bytes.all.peak"] = max(100, memory["requested_bytes.all.peak"])
        memory["requested_bytes.all.current"] = 100 if next(late) else 0

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(memory))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    sampler = measure.Sampler(call, "cuda", cold_cache=False)
    call()
    assert memory["requested_bytes.all.current"] == 100, "of the call before, as the first reading begins"
    assert sampler.peak_bytes() == 100


@pytest.mark.gpu
def test_gpu_samples_measure_the_device() -> None:
    import torch

    big, small = torch.ones(1 << 26, device="cuda"), torch.ones(1 << 10, device="cuda")
    slow = measure.time_callable(lambda: big.mul_(1.0), "cuda")
    fast = measure.time_callable(lambda: small.mul_(1.0), "cuda")
    assert slow.time_us > 5 * fast.time_us > 0
    cold = measure.time_callable(lambda: small.mul_(1.0), "cuda", cold_code=True)
    assert 0 < cold.time_us < slow.time_us, "what makes it cold is not in the sample"


def test_warm_up_ends_when_its_time_is_up() -> None:
    calls: list[int] = []
    measure.Sampler(lambda: calls.append(1), "cpu", cold_cache=False).warm_up(min_calls=60, max_seconds=0.0)
    assert len(calls) == 1
    measure.Sampler(lambda: calls.append(1), "cpu", cold_cache=False).warm_up(min_calls=60, seconds=0.0)
    assert len(calls) == 61


def test_host_time_is_that_of_a_row_of_calls() -> None:
    calls: list[int] = []
    sampler = measure.Sampler(lambda: calls.append(1), "cpu", cold_cache=False)
    assert sampler.host_row_us(seconds=1e-6) > 0
    assert len(calls) == measure.HOST_CALLS
    calls.clear()
    sampler.host_row_us(seconds=10.0)
    assert len(calls) == measure.MIN_HOST_CALLS, "long calls are repeated less often"
    assert sampler.peak_bytes() is None, "torch does not count a CPU's memory"


def test_a_row_of_calls_starts_with_an_idle_device_and_does_not_wait_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, now_ns = [], [0]

    def spend(name: str, time_ns: int) -> None:
        done.append(name)
        now_ns[0] += time_ns

    monkeypatch.setattr(measure.time, "perf_counter_ns", lambda: now_ns[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: spend("wait", 10**9))
    sampler = measure.Sampler(lambda: spend("call", 3000), "cuda", cold_cache=False)
    assert sampler.host_row_us(seconds=10.0) == 3.0
    assert done == ["wait", *["call"] * measure.MIN_HOST_CALLS, "wait"]


@pytest.mark.gpu
def test_peak_memory_counts_results_and_what_is_freed_within_the_call() -> None:
    size = 8 << 20
    held = torch.zeros(size, dtype=torch.uint8, device="cuda")
    sampler = measure.Sampler(lambda: held.clone(), "cuda")
    sampler.warm_up()
    assert sampler.peak_bytes() == size
    assert measure.Sampler(lambda: held.clone().sum(), "cuda").peak_bytes() >= size
    assert measure.Sampler(lambda: held.add_(1), "cuda").peak_bytes() == 0, "the cache's buffer is not counted"


@pytest.mark.parametrize(
    ("late", "leads"),
    [
        ([False, False], [1, 1]),
        ([True, False, False], [1, 1, 1]),
        ([True, True, True, False, False], [1, 1, 1, 2, 2]),
    ],
    ids=["in time", "one hiccup", "slow host"],
)
def test_a_sample_waits_longer_only_where_the_host_is_late_again_and_again(
    monkeypatch: pytest.MonkeyPatch, late: list[bool], leads: list[int]
) -> None:
    answers, waited = iter(late), []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...

        def query(self) -> bool:
            return next(answers)

        def elapsed_time(self, end: Event) -> float:
            return 0.001

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: waited.append(cycles // measure.LEAD_CYCLES))
    assert measure.Sampler(lambda: None, "cuda", cold_cache=False).take(2) == [1.0, 1.0]
    assert waited == leads


def test_a_wait_is_longer_from_the_start_where_the_host_is_slow_in_every_warm_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the first samples of a slow peer, each a whole call, would be thrown away."""
    now, launches = [0.0], iter(())

    def call() -> None:
        now[0] += next(launches)

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    waits = []
    for each in ([2.0, 0.018, 0.030], [2.0, 0.0004, 0.018], [60.0, 60.0, 60.0]):
        launches, sampler = iter(each), measure.Sampler(call, "cuda", cold_cache=False)
        sampler.warm_up(3, 0.0)
        waits.append(sampler._lead_cycles // measure.LEAD_CYCLES)
    assert waits == [32, 1, 128]


@pytest.mark.gpu
def test_the_hosts_time_between_two_launches_is_not_in_a_sample():
    held, pause_s = torch.zeros(1000, device="cuda"), 0.005

    def call() -> None:
        held.add_(1.0)
        time.sleep(pause_s)
        held.add_(1.0)

    sampler = measure.Sampler(call, "cuda")
    sampler.warm_up()
    assert max(sampler.take(5)) < 2500 and not sampler.late
    pause_s = 0.3
    sampler.take(1)
    assert sampler.late
