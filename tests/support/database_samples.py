"""Entries, devices and files for tests of the database and its readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.database.entry import Entry
from autotune.database.store import Database, database_path, device_record
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.kernels.product.schedule import HostSchedule, Schedule
from kernelgen.problem.product import TensorProductProblem

PROBLEM = TensorProductProblem.channelwise("8x0e+8x1o", "0e+1o", "0e+1o")
HOST = DeviceFacts("cpu", "Test CPU 4 cores", "x86_64", 4, vector_bytes=32)
GPU = cuda_facts("sm_90", "NVIDIA Test", 132)


def entry(schedule: Schedule | None = None, **changes: Any) -> Entry:
    """A valid entry of PROBLEM: forward, float32, mul_ir, conv-e14-d5."""
    schedule = schedule or HostSchedule(path_groups=2)
    data: dict[str, Any] = {
        "label": "small",
        "problem": PROBLEM.key,
        "operation": "conv",
        "direction": "forward",
        "dtype": "float32",
        "layout": "mul_ir",
        "graph_class": "conv-e14-d5",
        "graph": {"name": "mof", "edges": 11872, "nodes": 424},
        "schedule": schedule.to_dict(),
        "time_us": 1500.0,
        "q1_us": 1400.0,
        "q3_us": 1700.0,
        "default": {"schedule": HostSchedule().to_dict(), "time_us": 3000.0, "q1_us": 2900.0, "q3_us": 3100.0},
        "peers": {
            "e3nn": {"time_us": 45000.0, "q1_us": 44000.0, "q3_us": 46000.0},
            "openequivariance": {"error": "not installed"},
        },
        "errors": {"g": 3e-7},
        "tolerance": 1e-5,
        "bytes": 1000000,
        "copy_bandwidth": 1e10,
        "floor_us": 100.0,
        "resources": {"registers": 96},
        "generator": "0.1.0+0123456789",
        "software": {"torch": "2.13"},
        "date": "2026-11-20T12:00:00+00:00",
        "trials": {"file": "trials/test/small.jsonl", "count": 10, "ok": 9, "sampler": "tpe", "seed": 0},
    }
    return Entry.from_dict(data | changes)


def store(directory: Path, facts: DeviceFacts, *entries: Entry) -> Path:
    """Write entries into the device's file of a directory."""
    path = database_path(directory, facts.slug)
    database = Database.load(path, device_record(facts))
    for item in entries:
        database.put(item)
    database.save()
    return path
