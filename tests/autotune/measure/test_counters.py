"""Counters by ncu, mostly a stand-in: its text becomes figures of a call, and nothing that it does loses a search."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from database_samples import HOST, entry
from tiny_config import CONFIG

from autotune.cli.show import show
from autotune.database import trials as trial_records
from autotune.database.store import database_path, read_table
from autotune.measure import counters
from autotune.measure.counters import SHARES, SUMS, Profiler, by_call, parse, run_calls
from autotune.measure.kinds import MeasuredProduct, space_of
from autotune.report import write_reports
from autotune.report.devices import load_device
from autotune.report.kernels import counted_traffic, roofline
from autotune.search.study import Study
from autotune.text import counters_text
from autotune.tune import run as tuning
from autotune.workload.config import load_config
from kernelgen.device import device_facts
from kernelgen.errors import InputError

HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size"'
HEAD += ',"Grid Size","Device","CC"'
MARKED = "void at::cuda::<unnamed>::spin_kernel(long)"

# What a stand-in does first: find its job and the metrics that it is asked for, and print rows as the program does.
BEGIN = """
import os, pickle, re, sys, time
HEAD = {head!r}
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
with open({log!r}, "a") as file:
    print(os.getpid(), *sys.argv[1:-1], file=file)

def row(kernel, value):
    given = {{"gpu__time_duration.sum": '"2,000"'}}
    values = [given.get(metric, f'"{{value}}"') for metric in metrics]
    return ",".join([f'"0","7","python","127.0.0.1","{{kernel}}","1","7","(256, 1, 1)","(9, 1, 1)","0","9.0"', *values])

def report():
    workload, device, calls, limit_s = pickle.load(open(re.search(r"run_calls\\('(.*)'\\)", sys.argv[-1])[1], "rb"))
    units = ['"ns"' if "time" in metric else '"%"' if "pct" in metric else '"byte"' for metric in metrics]
    print("==PROF== Connected to process 7 (/usr/bin/python3)")
    print(",".join([HEAD, *(f'"{{metric}}"' for metric in metrics)]))
    print(",".join(['""'] * 11 + units))
    for number, _ in enumerate(calls, 1):
        print(row({marked!r}, 9), row("tp_forward", 10 * number), sep="\\n")
"""
DENIED = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters."


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a program ``ncu`` on the PATH that runs these lines; returns a function that reads how it was called."""
    log = tmp_path / "called"

    def put(body: str) -> Any:
        program = tmp_path / "ncu"
        begin = BEGIN.format(head=HEAD, log=str(log), marked=MARKED)
        program.write_text(f"#!{sys.executable}\n{begin}\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return lambda: [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    return put


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(CONFIG.format(trials=1))
    return load_config(path, "cpu").workloads[0]


def schedules(workload: Any, count: int = 2) -> list[Any]:
    space = space_of(workload, "forward", device_facts("cpu"))
    return [space.default, *(s for s in space.shuffled(0) if s != space.default)][:count]


def test_a_call_has_the_sums_of_its_launches_and_the_means_of_their_shares_by_time() -> None:
    names = ("dram__bytes_read.sum", "gpu__time_duration.sum", SHARES["sm_percent"][0], *SHARES["tensor_percent"][:2])
    rows = [
        (MARKED, "1", "1", "1", "1", "1"),
        ("zero", "1,000,000", "1,000", "10", "n/a", "0"),
        ("tp<float>(int, int)", "500", "3,000", "50", "n/a", "80"),
        (MARKED, "1", "1", "1", "1", "1"),
        ("tp", "7", "500", "33.333", "n/a", ""),
    ]
    lines = [HEAD + "".join(f',"{name}"' for name in names), '"",' * 11 + '"byte","ns","%","%","%"']
    lines += ['"0","1","python","h","' + '","'.join((row[0], *"17bg09", *row[1:])) + '"' for row in rows]
    found = by_call(parse("\n".join(["==PROF== Connected", "printed by the process", *lines, "==PROF== Disconnected"])))
    first, second = found
    assert first == {"dram_read_bytes": 1000500, "profiled_us": 4.0, "sm_percent": 40.0, "tensor_percent": 60.0}
    assert second == {"dram_read_bytes": 7, "profiled_us": 0.5, "sm_percent": 33.33}
    assert parse("==ERROR== nothing") == [] == by_call([])


def test_calls_are_counted_by_direction_with_cold_caches_and_the_clocks_left_alone(
    stand_in: Any, workload: Any
) -> None:
    called, said = stand_in("report()"), list[str]()
    found = Profiler("cuda:0", said.append).count(workload, {"forward": schedules(workload)}, None)
    first, second = found["forward"]
    assert said == [] and set(found) == {"forward"}
    assert set(first) == {*SUMS, *SHARES} and first["profiled_us"] == 2.0
    assert (first["dram_read_bytes"], second["dram_read_bytes"], second["occupancy_percent"]) == (10, 20, 20.0)
    ((_, *options),) = called()
    text = " ".join(options)
    for option in ("--csv --page raw", "--profile-from-start off", "--cache-control all", "--clock-control none"):
        assert option in text


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (f"print({DENIED!r}); sys.exit(1)", "this user may not read them (ERR_NVGPUCTRPERM)"),
        ("print('==ERROR== The application returned an error code (1).'); print('MemoryError: 3 GiB')", "MemoryError"),
        ("print(end='')", "ncu printed nothing"),
        ("report(); print(row('spin_kernel', 1), row('more', 1), sep=chr(10))", "ncu saw 3 of 2 calls"),
    ],
    ids=["denied", "failed", "silent", "miscounted"],
)
def test_a_failure_that_would_come_again_is_said_once(stand_in: Any, workload: Any, body: str, told: str) -> None:
    called, said = stand_in(body), list[str]()
    profiler = Profiler("cuda:0", said.append)
    for _ in range(2):
        assert profiler.count(workload, {"forward": schedules(workload)}, None) == {}
    assert (
        len(said) == len(called()) == 1 and said[0].startswith(f"{workload.label}: no counters: ") and told in said[0]
    )
    assert profiler.kept_s(time.monotonic() + 1000) == 0


def test_without_the_program_a_line_says_so(workload: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters, "PLACES", (f"{tmp_path}/nsight/*/ncu",))
    said: list[str] = []
    assert Profiler("cuda:0", said.append).count(workload, {"forward": schedules(workload)}, None) == {}
    assert len(said) == 1 and "ncu (NVIDIA Nsight Compute) is not on the PATH" in said[0]
    for version in ("2024.1", "2025.3"):
        (tmp_path / "nsight" / version).mkdir(parents=True)
        (tmp_path / "nsight" / version / "ncu").touch()
    assert counters.find_ncu() == str(tmp_path / "nsight/2025.3/ncu"), "the newest"


def test_a_program_that_hangs_is_ended_with_its_children_and_not_tried_again_in_as_little_time(
    stand_in: Any, workload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "LEAST_S", 0.5)
    called = stand_in("import subprocess; subprocess.run(['sleep', '600'])")
    said: list[str] = []
    profiler, begin = Profiler("cuda:0", said.append), time.monotonic()
    for _ in range(3):
        assert profiler.count(workload, {"forward": schedules(workload)}, time.monotonic() + 1.5) == {}
    assert time.monotonic() - begin < 20 and len(called()) == 1
    assert [text.partition("no counters: ")[2] for text in said] == [
        "ncu did not end within 1 s",
        "the time is up; a longer --budget has them",
    ]
    group, end = int(called()[0][0]), time.monotonic() + 60
    while running := _running_in(group):  # its children were sent the signal, and nobody waits for them
        assert time.monotonic() < end, running
        time.sleep(0.05)


def _running_in(group: int) -> list[str]:
    """The processes of a group, without those that ended and that their parent has not asked for."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getpgid(int(pid)) == group:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                found += [pid] if state != "Z" else []
    return found


def test_a_gpu_that_lacks_a_metric_is_asked_for_the_others(stand_in: Any, workload: Any) -> None:
    lacking = "sm__inst_executed_pipe_tensor.sum"
    called = stand_in(
        f"if {lacking!r} in metrics:\n    print('==ERROR== Failed to find metric {lacking}')\n    sys.exit(9)\nreport()"
    )
    said: list[str] = []
    found = Profiler("cuda:0", said.append).count(workload, {"forward": schedules(workload, 1)}, None)
    assert said == [] and len(called()) == 2
    assert set(found["forward"][0]) == {*SUMS, *SHARES}, "another metric stands in for it"


def test_the_profiled_process_runs_each_call_unseen_then_marked(
    workload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real = MeasuredProduct.run

    def run(kind: Any, operator: Any, direction: str, *given: Any, **named: Any) -> Any:
        call = real(kind, operator, direction, *given, **named)
        return lambda: (events.append(direction), call())[1]

    monkeypatch.setattr(MeasuredProduct, "run", run)
    profiler = types.SimpleNamespace(
        cudaProfilerStart=lambda: events.append("start"), cudaProfilerStop=lambda: events.append("stop")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: profiler)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append("mark"), raising=False)
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps((workload, "cpu", [("forward", each) for each in schedules(workload)], 60.0)))
    try:
        run_calls(str(job))
    finally:
        assert signal.alarm(0) > 0, "nobody else ends it if the tuner was killed"
    assert events == ["forward", "wait", "start", "mark", "forward", "wait", "stop"] * 2


def test_a_comparison_leaves_time_for_them_if_it_suffices(stand_in: Any) -> None:
    stand_in("report()")
    profiler, now = Profiler("cuda:0", print), time.monotonic()
    assert profiler.kept_s(None) == profiler.kept_s(now + 20) == 0
    assert 9.9 < profiler.kept_s(now + 40) <= 10 and profiler.kept_s(now + 400) == 15


def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A search of two trials on a CPU whose counters come from the stand-in; the entry and the results folder."""
    monkeypatch.setattr(tuning, "profiler_for", lambda asked, device, facts, say: Profiler(device, say))
    monkeypatch.setattr(Study, "pace_us", None)  # on a busy machine one of the two would be given up as far slower
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.format(trials=2))
    results = tmp_path / "results"
    (found,) = tuning.tune(path, "cpu", results_dir=results, with_peers=False)
    (stored,) = read_table(database_path(results, device_facts("cpu").slug)).by_identity.values()
    assert stored == found
    return found, results


def test_a_search_stores_and_shows_them(stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = stand_in("report()")
    found, results = tuned(tmp_path, monkeypatch)
    assert len(called()) == 1 and found.resources["dram_read_bytes"] == 10
    assert "code_bytes" in found.resources or len(found.resources) > len({*SUMS, *SHARES}), "the compiler's stay"
    path = results / found.trials["file"]
    lines = trial_records.read_study(path)
    assert len(lines) == found.trials["count"] == 2, "a trial that was counted is still one trial"
    counted = {json.dumps(line["schedule"]): line["resources"] for line in lines}
    assert sorted(each["dram_read_bytes"] for each in counted.values()) == [10, 20]
    assert counted[json.dumps(found.schedule)]["dram_read_bytes"] == 10
    tuned(tmp_path, monkeypatch)
    assert len(called()) == 1, "nothing new: the study was read with its amended records"

    monkeypatch.setenv("EQUITUNE_DATABASE", str(results))
    shown = show(found.problem, operation=found.operation, layout=found.layout, graph_class=found.graph_class)
    data = load_device(results, found_slug := device_facts("cpu").slug)
    drawn = roofline(data)
    assert drawn is not None and drawn["counted"][0][1] == 1
    (row,) = data.tuned
    assert counted_traffic(data, data.tuned) == {id(row): 20.0}
    (page,) = write_reports(results, tmp_path / "reports")
    text = page.read_text() + "".join(each.read_text() for each in page.parent.glob(f"{found_slug}*.js"))
    assert "Traffic of DRAM that ncu counted" in text and "Counted by ncu: 20 B of DRAM" in text
    assert "  counters 20 B of DRAM" in shown


@pytest.mark.slow
def test_a_search_without_counters_is_published_all_the_same(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(f"print({DENIED!r}); sys.exit(1)")
    found, results = tuned(tmp_path, monkeypatch)
    assert not {*SUMS, *SHARES} & set(found.resources)
    assert capfd.readouterr().err.count("no counters: ") == 1
    drawn = roofline(load_device(results, device_facts("cpu").slug))
    assert drawn is None, "neither a bench nor counters"


def test_a_cpu_and_none_ask_no_profiler() -> None:
    gpu = types.SimpleNamespace(backend="cuda")
    assert counters.profiler_for("auto", "cpu", HOST, print) is None
    assert counters.profiler_for("none", "cuda:0", gpu, print) is None  # type: ignore[arg-type]
    assert counters.profiler_for("auto", "cuda:0", gpu, lambda text: None) is not None  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--counters is 'all'; expected auto"):
        counters.counts_asked("all")


def test_what_a_kernel_waits_for_is_said_by_what_it_uses_most() -> None:
    known = {"dram_read_bytes": 8e6, "dram_write_bytes": 2e6, "l2_bytes": 3e7, "occupancy_percent": 50.0}
    shares = {"dram_percent": 71.0, "tensor_percent": 12.0, "sm_percent": 40.0}
    text = counters_text(known | shares, 5e6, 10.0)
    assert text == (
        "10.0 MB of DRAM, 2.00 times the compulsory traffic, 1.00 TB/s, 30.0 MB of L2, DRAM 71% used, "
        "tensor cores 12% used, SMs 40% used, occupancy 50%, so it waits for DRAM"
    )
    assert "latency" in counters_text(known | shares | {"dram_percent": 30.0}, 5e6, 10.0)
    assert "tensor cores" in counters_text(known | shares | {"tensor_percent": 90.0}, 5e6, 10.0).rpartition("so ")[2]
    assert counters_text({"registers": 40}, 5e6, 10.0) == "" == counters_text(dict(entry().resources), 1.0, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["quick", "radial"])
def test_the_real_program_counts_a_call(config: str) -> None:
    if counters.find_ncu() is None:
        pytest.skip("no ncu here")
    said: list[str] = []
    work = load_config(config, "cuda").workloads[0]
    direction = work.directions[0]
    facts = device_facts("cuda")
    chosen = {direction: [space_of(work, direction, facts).default]}
    found = Profiler("cuda", said.append).count(work, chosen, None)
    if any("ERR_NVGPUCTRPERM" in text for text in said):
        pytest.skip(said[0])
    assert said == []
    ((counted,),) = found.values()
    assert {*SUMS, *SHARES} == set(counted)
    assert counted["dram_read_bytes"] > 0 and counted["executed_instructions"] > 0 and counted["profiled_us"] > 0
    assert all(0 <= counted[name] <= 100 for name in SHARES) and counted["occupancy_percent"] > 0
    assert (counted["tensor_percent"] > 1) == (config == "radial"), "only fused radial kernels use tensor cores"
