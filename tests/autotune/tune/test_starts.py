"""A search first measures what modules run without it, so that it cannot end with something slower."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from autotune.database.lookup import find_schedule
from autotune.tune.settings import Settings
from autotune.tune.studies import first_schedules
from autotune.workload.config import load_config
from autotune.workload.workload import Workload
from kernelgen.device import cuda_facts

H200 = cuda_facts("sm_90", "NVIDIA H200", 132)
CONFIG = """
problem = "nequip-lips"
layout = "ir_mul"
graph = ["hubs", "carbon"]
"""


def workloads(folder: Path) -> tuple[Workload, ...]:
    config = folder / "starts.toml"
    config.write_text(CONFIG)
    return load_config(config, "cuda").workloads


def test_rows_that_no_run_cuts_are_stored_next_on_a_skewed_graph(tmp_path: Path) -> None:
    """In runs that fill whole waves, then of a fixed length; searches of skewed graphs try longer runs too."""
    settings = Settings("cuda", H200, None, 16, "auto", "sqlite://", 0, tmp_path, False)
    for workload in workloads(tmp_path):
        for direction in ("forward", "backward"):
            space, first = first_schedules(workload, direction, settings)
            skewed = workload.graph.name == "hubs"
            assert (space.knobs.get("zeros") == ("apart", "cut")) == (skewed and direction == "forward")
            assert (128 in space.knobs["edges_per_chunk"]) == skewed
            forms = [dataclasses.asdict(schedule) for schedule in first]
            if skewed and direction == "forward":
                assert forms[2] == {**forms[1], "zeros": "cut"} and forms[2]["runs"] == "waves"
                assert forms[3] == {**forms[2], "runs": "fixed"}
                assert forms[4] == {**forms[3], "edges_per_chunk": 64}
                assert forms[5] == {**forms[3], "edges_per_chunk": 128}
                assert all(space.broken_limit(schedule) is None for schedule in first[2:6])
            else:
                assert all(form["zeros"] != "cut" for form in forms)


def test_what_runs_now_is_tried_first(tmp_path: Path) -> None:
    settings = Settings("cuda", H200, None, 16, "auto", "sqlite://", 0, tmp_path, False)
    for workload in workloads(tmp_path):
        for direction in ("forward", "backward"):
            kernel = (workload.problem, "conv", direction, "float32", "ir_mul", H200, workload.graph_class())
            running = find_schedule(*kernel).schedule
            space, first = first_schedules(workload, direction, settings)
            assert first[:2] == [space.default, space.canonical(running)]
            skewed = workload.graph.name == "hubs"
            assert (dataclasses.asdict(running)["runs"] == "waves") == skewed
