"""The legal form of a schedule: the fewest steps down, and nothing else changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from database_samples import entry, store

from autotune.database.lookup import find_schedule
from autotune.database.nearest import legal_form
from kernelgen.device import DeviceFacts, cuda_facts, representative
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.radial.plan import RadialSchedule
from kernelgen.kernels.spherical_harmonics import HarmonicsCudaSchedule
from kernelgen.problem.product import TensorProductProblem


def shared(schedule: Knobs) -> int:
    """Shared memory as products need it: by team and staged edge."""
    assert isinstance(schedule, CudaSchedule)
    return schedule.block_size // schedule.lanes * schedule.stage_edges


def test_a_legal_schedule_stays() -> None:
    schedule = CudaSchedule(block_size=512, teams_per_node=8)
    assert legal_form(schedule, lambda form: True) is schedule


def test_a_smaller_block_comes_before_fewer_staged_edges_and_keeps_the_threads_that_must_fit() -> None:
    tuned = CudaSchedule(block_size=256, min_blocks=3, stage_edges=16)
    assert legal_form(tuned, lambda form: shared(form) <= 64) == CudaSchedule(
        block_size=128, min_blocks=6, stage_edges=16
    )


def test_steps_go_on_together_where_one_is_not_enough() -> None:
    tuned = CudaSchedule(block_size=64, stage_edges=32, teams_per_node=2)
    keeps_teams = legal_form(tuned, lambda form: shared(form) <= 16 and form.block_size == 64)
    assert keeps_teams == CudaSchedule(block_size=64, stage_edges=8, teams_per_node=2)


def test_fewer_blocks_must_fit_where_a_multiprocessor_holds_fewer_threads() -> None:
    tuned = CudaSchedule(block_size=256, min_blocks=8)
    form = legal_form(tuned, lambda form: form.block_size * form.min_blocks <= 1536)
    assert form == CudaSchedule(block_size=256, min_blocks=6)


def test_harmonics_have_a_form_too_and_an_impossible_limit_has_none() -> None:
    tuned = HarmonicsCudaSchedule(block_size=512, staging="ahead", stages=4)
    form = legal_form(tuned, lambda form: form.block_size <= 512 and form.stages <= 2)
    assert form == HarmonicsCudaSchedule(block_size=512, staging="ahead", stages=2)
    assert legal_form(tuned, lambda form: False) is None


def test_zeros_are_written_apart_where_the_order_of_blocks_is_not_kept() -> None:
    for zeros in ("inside", "cut"):
        tuned = CudaSchedule(accumulate="atomics", zeros=zeros)
        assert legal_form(tuned, lambda form: form.zeros == "apart") == CudaSchedule(accumulate="atomics")  # type: ignore[attr-defined]


def test_products_of_four_warps_become_those_of_each_warp() -> None:
    def is_legal(form: Knobs) -> bool:
        return isinstance(form, RadialSchedule) and form.products == "mma"

    value = RadialSchedule(path_groups=2, tiles=4, ahead="hidden", products="wgmma", paths_at_once=1)
    assert legal_form(value, is_legal) == RadialSchedule(path_groups=2, tiles=2, edge_values="four")
    gradients = RadialSchedule(order="in2", slices=4, coupled=4, products="wgmma", paths_at_once=10)
    assert legal_form(gradients, is_legal) == RadialSchedule(order="in2", slices=4, coupled=4)


@pytest.mark.parametrize(
    ("there", "stays"),
    [(representative("sm_100"), False), (cuda_facts("sm_87", "Orin", 16), True)],
    ids=["B200", "Orin"],
)
def test_what_is_prefetched_need_not_fit_into_l2_unless_it_did(shipped: Path, there: DeviceFacts, stays: bool) -> None:
    """74 MB on an A100, whose L2 has 40. They fit on a B200; by what is known of an Orin (the limits of sm_86, less
    shared memory than it has) the schedule is not even legal there.
    """
    problem = TensorProductProblem.channelwise("64x0e+64x1o+64x2e", "0e+1o+2e", "0e+1o+2e")
    tuned = CudaSchedule(path_groups=1, block_size=512, stage_edges=32, ahead="weights", edge_operand="shared")
    store(shipped, there, entry(tuned, problem=problem.key))
    found = find_schedule(problem, "conv", "forward", "float32", "mul_ir", representative("sm_80"), "conv-e14-d5")
    assert found.origin == "other-device" and (found.schedule == tuned) is stays
