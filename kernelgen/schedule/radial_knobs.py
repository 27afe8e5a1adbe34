"""Which problems have a kernel that forms edge weights in registers, and which knobs it may have on which devices."""

from __future__ import annotations

from kernelgen.errors import ScheduleError
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.schedule.radial import MOST_HIDDEN, RadialSchedule, RadialSpec

# Warps that multiply together by ``wgmma``, and architectures that have it.
WARPGROUP, WITH_WGMMA = 4, ("sm_90",)


def refusal(problem: TensorProductProblem, hidden: int) -> str:
    """Why no such kernel exists for a problem and a number of hidden features; empty if one does."""
    if not problem.is_channelwise or problem.shared_weights or not problem.paths:
        return "expected weighted uvu paths with one copy of the second input, and weights of each edge"
    if hidden % 4 or not 4 <= hidden <= MOST_HIDDEN:
        return f"{hidden} hidden features; expected a multiple of 4 up to {MOST_HIDDEN}"
    if any(block.mul % 2 for block in (*problem.in1, *problem.out)):
        return "an odd number of channels; expected even ones"
    return ""


def check_form(spec: RadialSpec) -> None:
    """Raise ScheduleError for knobs of the other kind of kernel: a value's, or gradients'."""
    schedule = spec.schedule
    if spec.is_gradient and schedule.tiles > 1:
        raise ScheduleError(f"{schedule.tiles} tiles; expected 1, because a product of gradients has 16 edges")
    if schedule.tiles > 2 and schedule.products != "wgmma":
        raise ScheduleError(f"{schedule.tiles} tiles; expected at most 2: only products=wgmma has registers left")
    if not spec.is_gradient and schedule.slices > 1:
        raise ScheduleError(
            f"{schedule.slices} slices; expected 1, because a warp keeps sums of a receiver in registers"
        )
    if schedule.ahead == "hidden" and (spec.is_gradient or (schedule.tiles > 1 and schedule.products == "mma")):
        raise ScheduleError(
            "ahead=hidden; expected none: only a value's kernel with one tile, or with wgmma, has registers left"
        )
    if not spec.is_gradient and schedule.coupled:
        raise ScheduleError(f"coupled={schedule.coupled}; expected 0, because a value has no cotangents")
    if schedule.products == "wgmma":
        _check_warpgroups(spec)
    elif schedule.paths_at_once != RadialSchedule.paths_at_once:
        raise ScheduleError(
            f"paths_at_once={schedule.paths_at_once}; expected {RadialSchedule.paths_at_once}: without products=wgmma "
            "it has no effect"
        )


def _check_warpgroups(spec: RadialSpec) -> None:
    """Raise ScheduleError where four warps cannot multiply together."""
    schedule, arch = spec.schedule, spec.facts.arch
    if arch not in WITH_WGMMA:
        raise ScheduleError(
            f"products=wgmma; expected mma, because {arch} has no wgmma: only compute capability 9.0 has"
        )
    if spec.is_gradient and not schedule.coupled:
        raise ScheduleError("products=wgmma; expected mma: only gradients with coupled cotangents, and values, have it")
    if schedule.warps % WARPGROUP:
        raise ScheduleError(f"{schedule.warps} warps; expected a multiple of {WARPGROUP}: so many multiply together")
