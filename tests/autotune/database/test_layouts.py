"""Entries of the other layout: their schedules get the form for this one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from database_samples import GPU, PROBLEM, entry, store

from autotune.database.lookup import find_schedule
from autotune.measure.space import search_space
from autotune.search.starting_points import starting_points
from autotune.workload.workload import GraphClass
from kernelgen.kernels.product.schedule import CudaSchedule

LARGE = "conv-e17-d7"
PLAIN = CudaSchedule(path_groups=2, edges_per_warp=4, stage_edges=8)


def stored(schedule: CudaSchedule, direction: str, layout: str, **more: object):
    default = {"schedule": CudaSchedule().to_dict(), "time_us": 3000.0, "q1_us": 2900.0, "q3_us": 3100.0}
    return entry(schedule, direction=direction, layout=layout, graph_class=LARGE, default=default, **more)


@pytest.mark.parametrize(
    ("direction", "writes"),
    [("forward", "lanes"), ("backward", "rows"), ("double_backward", "rows"), ("edge_backward", "lanes")],
)
def test_a_schedule_of_ir_mul_writes_rows_in_mul_ir_where_it_adds_to_rows_of_x(
    shipped: Path, direction: str, writes: str
) -> None:
    kept = stored(PLAIN, direction, "ir_mul")
    store(shipped, GPU, kept)
    found = find_schedule(PROBLEM, "conv", direction, "float32", "mul_ir", GPU, LARGE)
    assert (found.origin, found.entry) == ("nearest", kept)
    assert found.schedule.writes == writes and found.schedule.path_groups == 2
    assert find_schedule(PROBLEM, "conv", direction, "float32", "ir_mul", GPU, LARGE).schedule == PLAIN


def test_a_schedule_of_a_small_graph_gets_that_form_too(shipped: Path) -> None:
    small = "conv-e8-d4"
    store(shipped, GPU, dataclasses.replace(stored(PLAIN, "backward", "ir_mul"), graph_class=small))
    assert find_schedule(PROBLEM, "conv", "backward", "float32", "mul_ir", GPU, small).schedule.writes == "rows"


def test_a_schedule_of_mul_ir_keeps_its_form_there_and_writes_its_own_channels_in_ir_mul(shipped: Path) -> None:
    rows = CudaSchedule(path_groups=2, edges_per_warp=4, stage_edges=8, writes="rows")
    store(shipped, GPU, stored(rows, "backward", "mul_ir"))
    found = [
        find_schedule(PROBLEM, "conv", "backward", "float32", layout, GPU, LARGE) for layout in ("mul_ir", "ir_mul")
    ]
    assert [each.schedule for each in found] == [rows, PLAIN]
    assert [each.origin for each in found] == ["exact", "nearest"]


def test_a_search_in_mul_ir_starts_with_rows(shipped: Path) -> None:
    space = search_space(PROBLEM, "conv", "backward", "float32", GPU, "mul_ir", num_edges=100_000)
    first, *_ = starting_points(space, GraphClass.parse(LARGE), [stored(PLAIN, "backward", "ir_mul")])
    assert first.writes == "rows"
    assert "writes" not in search_space(PROBLEM, "conv", "backward", "float32", GPU, "ir_mul").knobs
    assert "writes" not in search_space(PROBLEM, "conv", "edge_backward", "float32", GPU, "mul_ir").knobs
