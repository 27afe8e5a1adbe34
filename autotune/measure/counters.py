"""What ``ncu``, NVIDIA's profiler, counts of our kernels: bytes of DRAM and L2, instructions, tensor cores, occupancy.

A workload and schedules by direction give the :data:`COUNTERS` of one call of each, which records keep beside the
compiler's resources. The calls run in a process of their own under ``ncu``, which repeats each launch until it has
counted everything, with cold caches, and leaves the clocks alone. Nothing that fails here ends a search: a line says
why there are no counters.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgen.errors import InputError

if TYPE_CHECKING:
    from autotune.workload.workload import Workload
    from kernelgen.device import DeviceFacts
    from kernelgen.kernels.knobs import Knobs

Counted = dict[str, float]

# By name, what ``ncu`` calls it; of several, the first that a GPU has. These are added up over the launches of a call.
SUMS = {
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "executed_instructions": ("sm__inst_executed.sum",),
    "tensor_instructions": ("sm__inst_executed_pipe_tensor.sum", "sm__inst_executed_pipe_tensor_op_hmma.sum"),
    "profiled_us": ("gpu__time_duration.sum",),
}
# Percent of the most that is possible, for a call the mean of its launches by their times.
SHARES = {
    "dram_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "tensor_percent": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
COUNTERS = (*SUMS, *SHARES)
# To bytes, microseconds and counts.
SCALES = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3}
SCALES |= {"s": 1e6, "second": 1e6}
PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu")
OPTIONS = (
    *("--csv", "--page", "raw", "--print-units", "base", "--target-processes", "application-only"),
    *("--profile-from-start", "off", "--cache-control", "all", "--clock-control", "none"),
)
# A kernel of torch whose launch comes before each call: a call may be several launches.
MARK = "spin_kernel"
# A child that imports torch and runs a call under the profiler takes no less; none may take more.
LEAST_S, MOST_S = 8.0, 60.0
# Most of a comparison's time that is kept for the counters, and of that how much.
KEPT_SHARE, KEPT_S = 0.25, 15.0


class _NotCounted(Exception):
    """Why there are no counters; ``again``: whether another call may have them."""

    def __init__(self, reason: str, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


def find_ncu() -> str | None:
    """The program on the PATH, else the newest where NVIDIA's installers put it."""
    found = (sorted(Path("/").glob(place.lstrip("/")), reverse=True) for place in PLACES)
    return shutil.which("ncu") or next((str(path) for paths in found for path in paths), None)


def counts_asked(text: str) -> bool:
    """Whether ``--counters`` asks for them: ``auto`` does, ``none`` does not; InputError for anything else."""
    if text not in ("auto", "none"):
        raise InputError(f"--counters is {text!r}; expected auto (where ncu and a GPU are there) or none")
    return text == "auto"


class Profiler:
    """``ncu`` on one GPU. After a failure that would come again it counts nothing more.

    say: is told why there are no counters, each reason once.
    """

    def __init__(self, device: str, say: Callable[[str], object]) -> None:
        self.device, self._say = device, say
        self._program, self._needs_s, self._said = find_ncu(), LEAST_S, set[str]()
        if self._program is None:
            say("no counters: ncu (NVIDIA Nsight Compute) is not on the PATH; --counters none leaves them out")

    def kept_s(self, end: float | None) -> float:
        """Seconds of the time until ``end`` that a comparison leaves for the counters; 0 if they would not suffice."""
        share = 0.0 if end is None or self._program is None else KEPT_SHARE * (end - time.monotonic())
        return min(share, max(KEPT_S, self._needs_s)) if share >= self._needs_s else 0.0

    def count(
        self, workload: Workload, schedules: Mapping[str, Sequence[Knobs]], end: float | None
    ) -> dict[str, list[Counted]]:
        """The counters of one call with each schedule, by direction; empty if there are none.

        end: a moment of ``time.monotonic`` at which it gives up.
        """
        begin, calls = time.monotonic(), [(which, each) for which, chosen in schedules.items() for each in chosen]
        limit_s = MOST_S if end is None else min(MOST_S, end - begin)
        if self._program is None or not calls:
            return {}
        try:
            if limit_s < self._needs_s:
                raise _NotCounted("the time is up; a longer --budget has them", again=True)
            with tempfile.TemporaryDirectory(prefix="equitune-counters-") as folder:
                job = Path(folder) / "job"
                job.write_bytes(pickle.dumps((workload, self.device, calls, limit_s)))
                counted = by_call(self._rows(self._program, job, begin + limit_s))
            if len(counted) != len(calls):
                raise _NotCounted(f"ncu saw {len(counted)} of {len(calls)} calls")
        except _NotCounted as failed:
            if str(failed) not in self._said:
                self._say(f"{workload.label}: no counters: {failed}")
            self._said.add(str(failed))
            self._program = self._program if failed.again else None
            self._needs_s = 2 * limit_s if time.monotonic() >= begin + limit_s else self._needs_s
            return {}
        self._needs_s = max(LEAST_S, time.monotonic() - begin)
        found = iter(counted)
        return {which: list(itertools.islice(found, len(chosen))) for which, chosen in schedules.items()}

    def _rows(self, program: str, job: Path, end: float) -> list[dict[str, str | float]]:
        """The profiled launches in their order. A GPU that does not know a metric is asked for the others."""
        metrics = [metric for names in (*SUMS.values(), *SHARES.values()) for metric in names]
        while True:
            text = _output((program, *OPTIONS, "--metrics", ",".join(metrics)), job, end)
            if rows := parse(text):
                return rows
            errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
            unknown = [name for name in metrics if any(name in line.replace(",", " ").split() for line in errors)]
            metrics = [name for name in metrics if name not in unknown]
            if not unknown or not metrics:
                raise _NotCounted(_reason(text))


def profiler_for(asked: str, device: str, facts: DeviceFacts, say: Callable[[str], object]) -> Profiler | None:
    """Of a device of CUDA, if ``--counters`` asks for it."""
    return Profiler(device, say) if counts_asked(asked) and facts.backend == "cuda" else None


def _output(command: Sequence[str], job: Path, end: float) -> str:
    """What ``ncu`` prints of the process that runs the job's calls; both end at ``end``, or with an exception here."""
    child = (sys.executable, "-c", f"from {__name__} import run_calls; run_calls({str(job)!r})")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    streams |= {"encoding": "utf-8", "errors": "replace"}
    try:
        process = subprocess.Popen((*command, *child), **streams, env=environment, start_new_session=True)
    except OSError as error:
        raise _NotCounted(f"ncu cannot be started ({error.strerror}): {command[0]}") from None
    try:
        limit_s = max(0.0, end - time.monotonic())
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        raise _NotCounted(f"ncu did not end within {limit_s:.0f} s", again=True) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(text: str) -> str:
    """Its last error, and the last line of the process; what to do if the driver keeps the counters for root."""
    if "ERR_NVGPUCTRPERM" in text:
        return "this user may not read them (ERR_NVGPUCTRPERM); run as root, or allow it in the driver's module options"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors, others = ([line for line in lines if line.startswith("==") is ours] for ours in (True, False))
    last = [line.removeprefix("==ERROR==").strip()[:200] for part in (errors, others) for line in part[-1:]]
    return f"ncu: {'; '.join(last)}" if last else "ncu printed nothing"


def parse(text: str) -> list[dict[str, str | float]]:
    """The launches in what ``ncu --csv --page raw`` prints: ``Kernel Name``, and metrics in bytes and microseconds.

    Metrics that the GPU does not have (``n/a``) are left out.
    """
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(table) < 3 or "Kernel Name" not in table[0]:
        return []
    launches = []
    for row in table[2:]:
        launch: dict[str, str | float] = {}
        for name, unit, value in zip(table[0], table[1], row, strict=False):
            if name == "Kernel Name":
                launch[name] = value
            elif "__" in name:
                with contextlib.suppress(ValueError):
                    launch[name] = float(value.replace(",", "")) * SCALES.get(unit, 1.0)
        launches.append(launch)
    return launches


def by_call(launches: Sequence[Mapping[str, str | float]]) -> list[Counted]:
    """The counters of each call: of the launches between two marks."""
    calls: list[list[Mapping[str, str | float]]] = []
    for launch in launches:
        if MARK in str(launch.get("Kernel Name")):
            calls.append([])
        elif calls:
            calls[-1].append(launch)
    return [_of_call(call) for call in calls if call]


def _of_call(launches: Sequence[Mapping[str, str | float]]) -> Counted:
    def values(metrics: Sequence[str]) -> list[float]:
        known = ([float(launch[name]) for launch in launches if name in launch] for name in metrics)
        return next((found for found in known if len(found) == len(launches)), [])

    found = {name: sum(each) for name, metrics in SUMS.items() if (each := values(metrics))}
    times = values(SUMS["profiled_us"])
    for name, metrics in SHARES.items():
        if (each := values(metrics)) and sum(times):
            found[name] = sum(share * time_us for share, time_us in zip(each, times, strict=True)) / sum(times)
    return {name: round(value) if name in SUMS and name != "profiled_us" else round(value, 2)
            for name, value in found.items()}  # fmt: skip


def run_calls(path: str) -> None:
    """In the profiled process: run each call once unseen and once marked and counted."""
    import torch

    from autotune.measure.kinds import measured_kind, order_of

    workload, device, calls, limit_s = pickle.loads(Path(path).read_bytes())
    signal.alarm(1 + int(limit_s))  # if the tuner was killed, nobody else ends this process
    kind, runtime = measured_kind(workload.operation), torch.cuda.cudart()
    tensors = kind.tensors(workload, device)
    order = order_of(tensors)
    with torch.cuda.device(device):
        for direction, schedule in calls:
            run = kind.run(kind.build(workload, {direction: schedule}, device), direction, tensors, order, poison=False)
            run()
            torch.cuda.synchronize()
            runtime.cudaProfilerStart()
            torch.cuda._sleep(1)
            run()
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()
