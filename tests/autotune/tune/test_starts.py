"""A search first measures what modules run without it, so that it cannot end with something slower."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from database_samples import entry, store

from autotune.database.lookup import find_schedule
from autotune.tune.run import first_schedules
from autotune.tune.settings import Settings
from autotune.workload.config import load_config
from autotune.workload.workload import Workload
from kernelgen.device import cuda_facts
from kernelgen.kernels.product.schedule import CudaSchedule

H200 = cuda_facts("sm_90", "NVIDIA H200", 132)
CONFIG = """
problem = "nequip-lips"
layout = "ir_mul"
graph = ["hubs", "carbon"]
"""


TUNED = CudaSchedule(path_groups=2, block_size=64, edge_operand="shared", stage_edges=16)


@pytest.fixture(name="workloads")
def tuned_on_even_graphs(shipped: Path, tmp_path: Path) -> tuple[Workload, ...]:
    """Of a skewed and of an even graph, for a problem that was tuned on even ones alone."""
    config = tmp_path / "starts.toml"
    config.write_text(CONFIG)
    found = load_config(config, "cuda").workloads
    made = {"problem": found[0].problem.key, "layout": "ir_mul"}
    entries = [
        entry(TUNED, direction=direction, graph_class=graph_class, **made)
        for direction in ("forward", "backward")
        for graph_class in ("conv-e17-d5", "conv-e17-d7")
    ]
    store(shipped, H200, *entries)
    return found


def test_rows_that_no_run_cuts_are_stored_next_where_degrees_are_skewed(
    tmp_path: Path, workloads: tuple[Workload, ...]
) -> None:
    """In runs that fill whole waves, then of a fixed length; searches of skewed graphs try longer runs too."""
    settings = Settings("cuda", H200, None, 16, "auto", "sqlite://", 0, tmp_path, False)
    for workload in workloads:
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


def test_what_runs_now_is_tried_first(tmp_path: Path, workloads: tuple[Workload, ...]) -> None:
    settings = Settings("cuda", H200, None, 16, "auto", "sqlite://", 0, tmp_path, False)
    for workload in workloads:
        for direction in ("forward", "backward"):
            kernel = (workload.problem, "conv", direction, "float32", "ir_mul", H200, workload.graph_class())
            running = find_schedule(*kernel).schedule
            space, first = first_schedules(workload, direction, settings)
            assert first[:2] == [space.default, space.canonical(running)]
            skewed = workload.graph.name == "hubs"
            assert (dataclasses.asdict(running)["runs"] == "waves") == skewed


def test_other_counts_of_path_groups_of_a_fused_value_are_next(shipped: Path, tmp_path: Path) -> None:
    """One more and one fewer than what runs."""
    config = tmp_path / "fused.toml"
    config.write_text('problem = "mace-mp-large-radial"\nlayout = "ir_mul"\ngraph = "carbon"\n')
    (workload,) = load_config(config, "cuda").workloads
    settings = Settings("cuda", H200, None, 16, "auto", "sqlite://", 0, tmp_path, False)
    space, first = first_schedules(workload, "forward", settings)
    assert first[0] == space.default
    assert first[1:3] == [dataclasses.replace(space.default, path_groups=count) for count in (4, 2)]
