"""The legal form of a schedule: the fewest steps down, and nothing else changed."""

from __future__ import annotations

from autotune.database.candidates.legal_form import legal_form
from kernelgen.schedule.knobs import Knobs
from kernelgen.schedule.radial import RadialSchedule
from kernelgen.schedule.spherical_harmonics import HarmonicsCudaSchedule
from kernelgen.schedule.tensor_product import CudaSchedule


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
