"""Kernels that form edge weights in tensor cores: lane by lane against e3nn, and compiled for each architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_emulator import FACTS
from emulated_radial import run_radial
from radial_cases import RadialCase, make_radial_case
from reference import relative_error

from autotune.workload.config import load_problems
from kernelgen.arithmetic.directions import Direction, backward, forward
from kernelgen.compile.compiler import compile_source
from kernelgen.device import cuda_facts, hip_facts
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.kernels.dispatch import emit, geometry
from kernelgen.kernels.radial.plan import RadialPlan, RadialSchedule, RadialSpec, default_radial_schedule, radial_plan
from kernelgen.problem.product import TensorProductProblem

SUITE = load_problems()
# Channels that fill a warp's 16 rows in part or more than once; blocks of different multiplicities.
SMALL = TensorProductProblem.channelwise("6x0e+6x1o", "0e+1o", "0e+1o")
UNEVEN = TensorProductProblem.channelwise("18x0e+4x1o+2x2e", "0e+1o+2e", "0e+1o+2e")
CASES = {"small": SMALL, "uneven": UNEVEN}


def assert_right(given: RadialCase, direction: Direction, tolerance: float, *how: object) -> None:
    wanted = given.expected()
    for name, value in run_radial(given, direction, *how).items():  # type: ignore[arg-type]
        assert relative_error(value, wanted[name]) < tolerance, (name, relative_error(value, wanted[name]))


@pytest.mark.parametrize(("outputs", "tiles"), [("", 1), ("", 2), ("x", 1), ("y", 1), ("w", 1), ("yw", 1), ("xyw", 1)])
def test_lane_by_lane(outputs: str, tiles: int) -> None:
    """Receivers with up to 40 edges: less than a tile, several, more than are staged at a time; one has none."""
    direction, schedule = backward(outputs) if outputs else forward(), RadialSchedule(warps=2, tiles=tiles)
    assert_right(make_radial_case(SMALL, 8, edges=60, num_out=4), direction, 3e-7, schedule)


VALUES = [{"tiles": 2, "edge_values": "four"}, {"edge_values": "reloaded", "ahead": "hidden"}, {"ahead": "hidden"}]


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", ["ir_mul", "mul_ir"])
@pytest.mark.parametrize("knobs", VALUES)
@pytest.mark.parametrize(
    ("problem", "groups", "edges", "num_out"), [(UNEVEN, 3, 100, 4), (SMALL, 1, 70, 2), (SMALL, 2, 12, 9)]
)
def test_other_forms_of_values(
    problem: TensorProductProblem, groups: int, edges: int, num_out: int, knobs: dict[str, Any], layout: str
) -> None:
    """What is loaded again, and what one step ahead: steps that end within a tile, and receivers of few edges."""
    given = make_radial_case(problem, 20, edges=edges, num_out=num_out)
    assert_right(given, forward(), 5e-7, RadialSchedule(groups, warps=2, **knobs), "ieee", layout)


BY_ATTRIBUTES = {"order": "in2", "edge_values": "reloaded"}


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", ["ir_mul", "mul_ir"])
@pytest.mark.parametrize("outputs", ["xyw", "yw", "w"])
@pytest.mark.parametrize("knobs", [{"slices": 4}, {"slices": 2}, BY_ATTRIBUTES, BY_ATTRIBUTES | {"slices": 2}])
def test_other_forms_of_gradients(knobs: dict[str, Any], outputs: str, layout: str) -> None:
    """In which order paths come, what is loaded again, and how many slices of channels a warp takes."""
    given = make_radial_case(UNEVEN, 20, edges=100, num_out=4)
    assert_right(given, backward(outputs), 3e-7, RadialSchedule(3, warps=2, **knobs), "ieee", layout)


@pytest.mark.covering(2)
@pytest.mark.parametrize("groups", [3, 5])
@pytest.mark.parametrize("layout", ["ir_mul", "mul_ir"])
@pytest.mark.parametrize("direction", [forward(), backward("xyw")], ids=lambda direction: direction.name)
def test_groups_of_unequal_work(direction: Direction, layout: str, groups: int) -> None:
    """Slices of 16 channels of which the last has 2; 20 hidden features, padded to 32; groups that share outputs."""
    given = make_radial_case(UNEVEN, 20, edges=30, num_out=5)
    assert_right(given, direction, 3e-7, RadialSchedule(groups, warps=4), "ieee", layout)


@pytest.mark.parametrize("hidden", [4, 32, 64, 128])
def test_hidden_sizes(hidden: int) -> None:
    """Few edges a receiver: 12 edges of 9 receivers."""
    given = make_radial_case(SMALL, hidden, edges=12, num_out=9)
    for direction, knobs in ((forward(), {}), (backward("xyw"), {}), (backward("xyw"), BY_ATTRIBUTES)):
        assert_right(given, direction, 3e-7, RadialSchedule(2, warps=2, **knobs))


def test_one_product_has_the_errors_of_tf32() -> None:
    given = make_radial_case(SMALL, 64, edges=30)
    for direction, knobs in ((forward(), {}), (backward("xyw"), {}), (backward("xyw"), BY_ATTRIBUTES)):
        schedule = RadialSchedule(warps=2, **knobs)
        assert_right(given, direction, 5e-4, schedule, "tf32")
        with pytest.raises(AssertionError):
            assert_right(given, direction, 1e-5, schedule, "tf32")


@pytest.mark.parametrize("range_of_h", [1e5, 1e12])
def test_each_edge_is_accurate_whatever_the_others_are(range_of_h: float) -> None:
    """Rows of h over many magnitudes, one of zeros: gradients of each edge, relative to its own size."""
    given = make_radial_case(SMALL, 16, edges=40, range_of_h=range_of_h)
    found, wanted = run_radial(given, backward("xyw"), RadialSchedule(warps=2)), given.expected()
    for slot in "yh":
        errors = (found[slot].double() - wanted[slot]).norm(dim=1)
        assert (errors <= 2e-6 * wanted[slot].norm(dim=1)).all(), slot
    assert relative_error(found["x"], wanted["x"]) < 5e-7


def test_each_channel_is_accurate_whatever_the_others_are() -> None:
    """Columns of the matrix over e**12."""
    given = make_radial_case(SMALL, 16, edges=40)
    columns = torch.linspace(-6, 6, given.matrix.shape[1], dtype=torch.float64).exp()
    order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
    given = RadialCase(given.case, given.h, given.matrix * columns[order])
    found, wanted = run_radial(given, forward(), RadialSchedule(warps=2))["out"], given.expected()["out"]
    errors = (found.double() - wanted).norm(dim=0)
    assert (errors <= 1e-6 * wanted.norm(dim=0)).all()


@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_any_size_of_the_operands(size: float) -> None:
    """Halves end at 65504: h, the matrix and what meets gradients of weights take powers of two."""
    given = make_radial_case(SMALL, 16, edges=20)
    given = RadialCase(given.case, given.h * size, given.matrix / size)
    for direction, knobs in ((forward(), {}), (backward("xyw"), {}), (backward("xyw"), BY_ATTRIBUTES)):
        assert_right(given, direction, 3e-7, RadialSchedule(warps=2, **knobs))


def test_no_edges_are_no_blocks() -> None:
    """So nothing is launched, and receivers keep their zeros: see ``test_radial_fused.py``."""
    for direction in (forward(), backward("xyw")):
        spec = RadialSpec(SMALL, 8, direction, RadialSchedule(warps=2), "ieee", "ir_mul", "int64", cuda_facts("sm_90"))
        assert geometry(radial_plan(spec), 0, 6, 6)[0] == 0 < geometry(radial_plan(spec), 1, 6, 6)[0]


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("name", "arch", "accuracy"),
    [
        *(("mace-mp-medium", arch, "ieee") for arch in ("sm_80", "sm_90", "sm_120")),
        ("mace-mp-medium", "sm_90", "tf32"),
        ("mace-mp-large", "sm_90", "ieee"),
        ("sevennet-l3i5", "sm_90", "ieee"),
    ],
)
def test_default_schedules_compile(name: str, arch: str, accuracy: str) -> None:
    """A few words spill; most sums stay in registers, and the matrix fits into shared memory."""
    facts = cuda_facts(arch)
    for direction in (forward(), backward("xyw")):
        spec = RadialSpec(SUITE[name], 64, direction, RadialSchedule(), accuracy, "ir_mul", "int64", facts)
        plan = radial_plan(default_radial_schedule(spec))
        resources = compile_source(emit(plan), facts).resources
        assert 0 < resources["registers"] <= 255 and resources["spill_bytes"] <= 1024
        assert resources["shared_bytes"] == 0 and plan.shared_bytes <= facts.shared_per_block


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_a_default_schedule_is_found_at_once(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call waits for it: no plan that is tried adds up a group's shared memory once for each pair of groups."""
    calls: list[Any] = []
    count = RadialPlan._stream_with
    monkeypatch.setattr(RadialPlan, "_stream_with", lambda plan, *what: calls.append(what) or count(plan, *what))
    for direction in (forward(), backward("xyw")):
        calls.clear()
        form = (RadialSchedule(), "ieee", "ir_mul", "int64", cuda_facts(arch))
        default_radial_schedule(RadialSpec(SUITE["sevennet-l3i5"], 64, direction, *form))
        assert 0 < len(calls) < 1000


def test_equal_specs_give_equal_text() -> None:
    texts = [emit(planned(SMALL, 8)).text for _ in range(2)]
    assert texts[0] == texts[1] and texts[0] != emit(planned(SMALL, 16)).text


def planned(problem: TensorProductProblem, hidden: int, **knobs: Any) -> RadialPlan:
    schedule = RadialSchedule(**knobs)
    return radial_plan(RadialSpec(problem, hidden, forward(), schedule, "ieee", "ir_mul", "int64", FACTS))


def test_what_has_no_such_kernel() -> None:
    odd = TensorProductProblem.channelwise("3x0e", "0e", "0e")
    shared = TensorProductProblem.channelwise("4x0e", "0e", "0e", shared_weights=True)
    refused = [(odd, 8, "odd"), (SMALL, 6, "6 hidden"), (SMALL, 132, "132 hidden"), (shared, 8, "weights of each")]
    for problem, hidden, why in refused:
        with pytest.raises(UnsupportedError, match=why):
            planned(problem, hidden)
    with pytest.raises(UnsupportedError, match='not on AMD .*; take an NVIDIA GPU, or .* memory="low"'):
        radial_plan(RadialSpec(SMALL, 8, forward(), RadialSchedule(), "ieee", "ir_mul", "int64", hip_facts("gfx942")))
    for knobs in ({"tiles": 2, "ahead": "hidden"}, {"slices": 2}, {"coupled": 2}):
        with pytest.raises(ScheduleError, match="expected (none|1|0)"):
            planned(SMALL, 8, **knobs)
    with pytest.raises(ScheduleError, match="use more path_groups or fewer warps"):
        planned(SUITE["mace-mp-large"], 128, min_blocks=2)
    with pytest.raises(ScheduleError, match="accuracy is 'half'"):
        RadialSpec(SMALL, 8, forward(), RadialSchedule(), "half", "ir_mul", "int64", FACTS)
