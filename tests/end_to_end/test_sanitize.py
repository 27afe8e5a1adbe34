"""What ``make sanitize`` runs on a GPU: that no kernel form is left out."""

from __future__ import annotations

import pytest
import sanitize

from kernelgen.device import cuda_facts
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.kernels.spherical_harmonics import HarmonicsCudaSchedule, HarmonicsSpec
from kernelgen.kernels.symmetric_contraction import ContractionCudaSchedule, ContractionSpec

# Knobs whose every value is a form of its own; of the others (sizes) two values or more, but of the registers' limit.
FORMS = ("fuse", "accumulate", "order", "edge_operand", "prefetch", "ahead", "stream", "finish", "zeros", "runs")


@pytest.fixture(scope="module")
def cases() -> dict[str, sanitize.AnySpec]:
    return sanitize.cases(cuda_facts("sm_90"))


def test_every_value_of_the_knobs_that_are_forms(cases: dict[str, sanitize.AnySpec]) -> None:
    schedules = [spec.schedule for spec in cases.values()]
    for knob, choices in CudaSchedule.choices.items():
        seen = {getattr(schedule, knob) for schedule in schedules if isinstance(schedule, CudaSchedule)}
        assert seen == set(choices) if knob in FORMS else len(seen) > 1 or knob == "min_blocks", knob
    stagings = {schedule.staging for schedule in schedules if isinstance(schedule, HarmonicsCudaSchedule)}
    assert stagings == set(HarmonicsCudaSchedule.choices["staging"])
    for knob in ("order", "gradients", "pace", "sums"):
        seen = {getattr(schedule, knob) for schedule in schedules if isinstance(schedule, ContractionCudaSchedule)}
        assert seen == set(ContractionCudaSchedule.choices[knob]), knob


def test_every_direction_of_every_kind(cases: dict[str, sanitize.AnySpec]) -> None:
    kinds: dict[str, set[str]] = {}
    for name, spec in cases.items():
        others = {HarmonicsSpec: "harmonics", ContractionSpec: "contractions"}
        kind = others.get(type(spec)) or str(spec.problem.is_channelwise)
        kinds.setdefault("inside" if name.startswith("harmonics inside") else kind, set()).add(spec.direction.name)
    assert kinds["True"] == kinds["False"] == set(sanitize.DIRECTIONS)
    assert any(
        spec.deterministic and sanitize.plan_of(spec).partial_y for spec in cases.values() if isinstance(spec, Spec)
    )
    assert kinds["contractions"] == {"forward", "backward", "feature_backward", "double_backward"}
    assert kinds["harmonics"] == {"forward", "backward", "double_backward"} and len(kinds["inside"]) == 4
