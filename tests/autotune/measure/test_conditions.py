"""What disturbs a measurement is noticed, stored with it, and disturbed samples are taken again, within a limit."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from busy import spinning

from autotune.measure import timing
from autotune.measure.timing import MOST_RETAKEN, RETAKEN_S, Conditions, Sampler, Watch, time_callable
from kernelgen.errors import ToolMissingError


def work() -> torch.Tensor:
    return torch.ones(1 << 20).sin_().sum()


def test_a_busy_machine_is_noticed() -> None:
    with spinning():
        found = time_callable(work, "cpu", min_samples=40, max_samples=60, max_seconds=0.5).conditions
    assert "cores busy" in found["noise"] and found["load"] > 0.25
    assert found["retaken"] > 0, "samples in which threads waited for a core are taken again"


def test_a_machine_at_rest_has_no_noise() -> None:
    assert Conditions(load=0.05, steal=0.01, retaken=3).to_dict() == {"load": 0.05, "steal": 0.01, "retaken": 3}
    assert Conditions().to_dict() == {}


@pytest.mark.parametrize(
    ("met", "said"),
    [
        (Conditions(load=1.7), "other processes kept 1.7 cores busy"),
        (Conditions(steal=0.6), "the hypervisor took 0.6 cores"),
        (Conditions(throttle=("power cap",)), "the GPU was throttled (power cap)"),
        (Conditions(gpu_processes=1), "another process computed on the GPU"),
        (Conditions(disturbed=0.8), "80% of the samples were disturbed"),
    ],
)
def test_noise_is_said_in_words(met: Conditions, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda pid: {0, 1})
    assert met.noise == said == met.to_dict()["noise"]


def test_load_is_what_others_do_on_these_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process used 1 of 3 busy seconds within 2; the hypervisor took half a second."""
    cores, clock, own = iter([(10.0, 1.0), (13.0, 1.5)]), iter([5.0, 7.0]), iter([2.0, 3.0])
    monkeypatch.setattr(timing, "_cores_s", lambda: next(cores))
    ticking = types.SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: next(own), time_ns=lambda: 0)
    monkeypatch.setattr(timing, "time", ticking)
    assert Watch("cpu").read() == Conditions(load=1.0, steal=0.25)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[int]], None]:
    def use(nanoseconds: Iterator[int]) -> None:
        """Threads wait for so long in each sample."""
        total = itertools.chain.from_iterable(zip(itertools.repeat(0), nanoseconds, strict=False))
        monkeypatch.setattr(timing, "waited_ns", lambda: next(total))

    return use


def test_disturbed_samples_are_taken_again_and_then_kept(waiting: Callable) -> None:
    waiting(itertools.chain([10**9] * 3, itertools.repeat(0)))
    sampler = Sampler(lambda: None, "cpu", cold_cache=False)
    assert len(sampler.take(5)) == 5
    found = sampler.conditions()
    assert (found.retaken, found.disturbed) == (3, 0.0)
    waiting(itertools.repeat(10**9))
    assert len(sampler.take(4)) == 4
    found = sampler.conditions()
    assert (found.retaken, found.disturbed) == (MOST_RETAKEN, 1.0) and "100% of the samples" in found.noise


def test_long_samples_are_taken_again_for_a_short_time_only(waiting: Callable) -> None:
    waiting(itertools.repeat(10**9))
    sampler = Sampler(lambda: time.sleep(0.6 * RETAKEN_S), "cpu", cold_cache=False)
    sampler.take(1)
    assert sampler.conditions().retaken == 2


@dataclass(frozen=True)
class Used:
    pid: int
    smUtil: int


def gpu(monkeypatch: pytest.MonkeyPatch, reasons: int, used: list[Used]) -> torch.device:
    """A GPU whose NVML answers so; returns the device."""
    nvml = types.SimpleNamespace(
        nvmlClocksThrottleReasonSwPowerCap=4,
        nvmlClocksThrottleReasonGpuIdle=1,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons,
        nvmlDeviceGetProcessUtilization=lambda handle, since_us: used,
    )
    monkeypatch.setattr(timing, "_nvml", lambda device: (nvml, object()))
    return torch.device("cuda", 0)


def test_throttled_clocks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(gpu(monkeypatch, 4 | 1, []))
    assert watch.glance()
    assert watch.read().throttle == ("power cap",) and watch.read().throttle == ()
    assert not Watch(gpu(monkeypatch, 1, [])).glance(), "an idle GPU lowers its clocks"


def test_others_on_the_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = timing.os.getpid()
    for used, others in (([], 0), ([(own, 90)], 0), ([(own, 50), (7, 40), (8, 0)], 1), ([(7, 40), (9, 50)], 1)):
        device = gpu(monkeypatch, 0, [Used(*one) for one in used])
        assert Watch(device).read().gpu_processes == others, (
            "the last: numbered by the host, one of them is this process"
        )


@pytest.mark.gpu
def test_a_second_process_that_computes_on_the_gpu_is_noticed() -> None:
    lines = ("import torch", "a = torch.ones(4096, 4096, device='cuda')", "print('ready', flush=True)")
    code = "\n".join((*lines, "while True:", "    a @ a", "    torch.cuda.synchronize()"))
    rows = torch.ones(1 << 24, device="cuda")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        watch, end = Watch("cuda"), time.monotonic() + 3
        while time.monotonic() < end:
            rows.sin_()
            torch.cuda.synchronize()
        found = watch.read()
        other.kill()
    assert found.gpu_processes == 1 and "another process computed on the GPU" in found.noise


def test_without_nvml_nothing_is_known_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    timing._nvml.cache_clear()
    assert Watch("cuda:0").read() == Conditions()
    for device in ("cpu", "cuda:0"):
        with pytest.raises(ToolMissingError, match=f"'{device}' is not counted; expected an NVIDIA GPU"):
            timing.require_energy(device)
    timing._nvml.cache_clear()


def test_energy_of_a_call_is_that_of_whole_steps_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing.joules_a_call(lambda: None, "cpu") is None
    begin = 5.0
    clock = [begin]
    device = gpu(monkeypatch, 0, [])
    nvml, _ = timing._nvml(device)
    done: list[tuple[str, float]] = []

    def energy(handle: object) -> float:
        done.append(("read", clock[0]))
        return 300e3 * 0.1 * int(clock[0] * 10 + 1e-6)  # 300 W, in steps of 0.1 s

    def call() -> None:
        done.append(("call", clock[0]))
        clock[0] += 2e-3

    nvml.nvmlDeviceGetTotalEnergyConsumption = energy
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "synchronize", lambda device: done.append(("wait", clock[0])))
    assert timing.joules_a_call(call, device) == pytest.approx(0.6, rel=0.03)
    first = next(at for at, (what, _) in enumerate(done) if what == "read" and at)
    assert done[first][1] - begin >= timing.STEADY_S, "power is steady before the counter counts"
    counted = [what for what, _ in done[first:]]
    assert counted.count("wait") >= counted.count("read") - 2, "the counter is read when the calls have run"
    assert counted.count("call") > 1.5 * counted.count("read"), "calls are launched in rows"
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 0
    assert timing.joules_a_call(call, device) is None, "the counter does not move"
