"""Schedules of symmetric contractions: which are legal for a problem and a device, and the default."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from kernelgen.arithmetic.contraction import (
    CONTRACTION_DIRECTIONS,
    FORWARD,
    ContractionDirection,
    contraction_backward,
    contraction_double_backward,
    contraction_parts,
)
from kernelgen.device import DeviceFacts, cuda_facts, device_facts, hip_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.knobs import read_schedule
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.kernels.symmetric_contraction import (
    CONTRACTION_SCHEDULES,
    ContractionCudaSchedule,
    ContractionHostSchedule,
    ContractionSchedule,
    ContractionSpec,
    contraction_plan,
    default_contraction_schedule,
    task_nodes,
)
from kernelgen.problem.other_kinds import ContractionProblem

SMALL = ContractionProblem("0e+1o", "0e+1o", 2, 6)
MACE = ContractionProblem("0e+1o+2e+3o", "0e+1o+2e", 3, 128)
FACTS, HOST = cuda_facts("sm_90"), dataclasses.replace(device_facts("cpu"), units=4)


def spec(
    schedule: ContractionSchedule, direction: ContractionDirection = FORWARD, facts: DeviceFacts | None = None
) -> ContractionSpec:
    facts = facts or (FACTS if schedule.backend == "cuda" else HOST)
    return ContractionSpec(SMALL, direction, schedule, "float32", "ir_mul", "int64", facts)


@pytest.mark.parametrize(
    "schedule",
    [
        ContractionHostSchedule(8, "element", "apart", channel_block=32, threads=2),
        ContractionCudaSchedule(16, "element", "apart", 256, 2, "parts", "memory"),
    ],
    ids=lambda schedule: schedule.backend,
)
def test_schedules_come_back(schedule: ContractionSchedule) -> None:
    assert read_schedule(schedule.to_dict(), CONTRACTION_SCHEDULES) == schedule
    assert read_schedule({"backend": schedule.backend}, CONTRACTION_SCHEDULES) == type(schedule)()


@pytest.mark.parametrize(
    "data, message",
    [
        ({"backend": "cuda", "block_size": 48}, r"ContractionCudaSchedule.block_size is 48; expected one of \(32, 64"),
        ({"backend": "cuda", "sums": True}, r"sums is True; expected one of \('registers', 'memory'\)"),
        ({"backend": "cpu", "nodes_per_task": 3}, "nodes_per_task is 3; expected one of"),
        ({"backend": "cpu", "order": "receiver"}, r"order is 'receiver'; expected one of \('given', 'element'\)"),
        (
            {"backend": "cpu", "channel_blocks": 8},
            "unknown knob 'channel_blocks' for cpu; did you mean 'channel_block'",
        ),
        ({"backend": "rocm"}, r"schedule backend is 'rocm'; expected one of \('cuda', 'cpu'\)"),
    ],
)
def test_schedules_that_do_not_exist(data: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_schedule(data, CONTRACTION_SCHEDULES)


@pytest.mark.parametrize(
    "direction",
    [contraction_backward(), contraction_backward("w"), contraction_double_backward()],
    ids=lambda d: d.text,
)
@pytest.mark.parametrize("schedule", [ContractionHostSchedule(), ContractionCudaSchedule()], ids=lambda s: s.backend)
def test_rows_of_gradients_of_weights_need_nodes_by_element(
    schedule: ContractionSchedule, direction: ContractionDirection
) -> None:
    with pytest.raises(ScheduleError, match="order='given' is not for rows of gradients of the weights; take order"):
        contraction_plan(spec(schedule, direction))
    plan = contraction_plan(spec(dataclasses.replace(schedule, order="element"), direction))
    # A GPU writes the rows that are summed, a host adds to them.
    assert plan.sums_weights and plan.zeroed == ({"w"} if schedule.backend == "cpu" else set())


def test_sums_without_rows_take_both_orders() -> None:
    for order in ("given", "element"):
        plan = contraction_plan(spec(ContractionCudaSchedule(order=order, adds="atomic"), contraction_backward()))
        assert plan.sums_weights and not plan.has_rows


def test_zeros_by_the_kernel_itself_are_for_what_it_adds_to() -> None:
    inside = ContractionCudaSchedule(adds="atomic", zeros="inside")
    assert contraction_plan(spec(inside, contraction_backward())).writes_zeros
    rows = dataclasses.replace(inside, order="element", adds="rows")
    for schedule, direction in ((inside, FORWARD), (inside, contraction_backward("x")), (rows, contraction_backward())):
        plan = contraction_plan(spec(schedule, direction))
        assert not plan.writes_zeros and plan.schedule == dataclasses.replace(schedule, zeros="apart")
    with pytest.raises(ScheduleError, match="which an AMD GPU does not keep to"):
        contraction_plan(spec(inside, contraction_backward(), hip_facts("gfx942")))
    default = default_contraction_schedule(MACE, contraction_backward(), "float32", hip_facts("gfx942"))
    assert isinstance(default, ContractionCudaSchedule) and default.zeros == "apart"


@pytest.mark.parametrize("schedule", [ContractionHostSchedule(), ContractionCudaSchedule()], ids=lambda s: s.backend)
def test_other_directions_take_both_orders(schedule: ContractionSchedule) -> None:
    for direction in (FORWARD, contraction_backward("x"), contraction_double_backward("xw", "xg")):
        for order in ("given", "element"):
            plan = contraction_plan(spec(dataclasses.replace(schedule, order=order), direction))
            assert not plan.sums_weights and not plan.zeroed


def test_limits_are_said() -> None:
    with pytest.raises(ScheduleError, match="threads=5 exceeds the 4 cores of"):
        contraction_plan(spec(ContractionHostSchedule(threads=5)))
    with pytest.raises(ScheduleError, match="block_size x min_blocks = 8192 threads exceeds the multiprocessor's 2048"):
        contraction_plan(spec(ContractionCudaSchedule(block_size=512, min_blocks=16)))
    with pytest.raises(ScheduleError, match="threads exceeds the multiprocessor's 1536"):
        contraction_plan(spec(ContractionCudaSchedule(block_size=512, min_blocks=4), facts=cuda_facts("sm_89")))
    with pytest.raises(ScheduleError, match="a cuda schedule cannot run on"):
        spec(ContractionCudaSchedule(), facts=HOST)
    with pytest.raises(ScheduleError, match="a plain schedule cannot run on"):
        spec(ContractionSchedule())
    with pytest.raises(ScheduleError, match="the schedule is a HostSchedule; expected a ContractionSchedule"):
        spec(HostSchedule())


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"dtype": "float16"}, r"dtype is 'float16'; expected one of \('float32', 'float64'\)"),
        ({"layout": "uvw"}, r"layout is 'uvw'; expected one of \('mul_ir', 'ir_mul'\)"),
        ({"index": "int16"}, r"index is 'int16'; expected one of \('int32', 'int64'\)"),
    ],
)
def test_what_is_no_spec(changed: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        dataclasses.replace(spec(ContractionHostSchedule()), **changed)


@pytest.mark.parametrize("facts", [FACTS, cuda_facts("sm_80"), HOST], ids=lambda facts: facts.arch)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_defaults_are_legal(dtype: str, facts: DeviceFacts) -> None:
    for problem, direction in itertools.product((SMALL, MACE), CONTRACTION_DIRECTIONS.values()):
        schedule = default_contraction_schedule(problem, direction, dtype, facts)
        plan = make_plan(ContractionSpec(problem, direction, schedule, dtype, "ir_mul", "int64", facts))
        assert plan.schedule == schedule and plan.weights in (5, 49)


def test_nodes_of_a_task() -> None:
    """Without a number, all tasks run at once: 132 multiprocessors with 65536 registers, and 2048 threads at most."""

    def found(nodes: int, registers: int, given: int = 0, block_size: int = 128) -> int:
        schedule = ContractionCudaSchedule(given, "element", block_size=block_size)
        one = dataclasses.replace(spec(schedule, contraction_backward()), problem=MACE)
        return task_nodes(contraction_plan(one), nodes, registers)

    assert found(5184, 128) == 10, "4 blocks of a multiprocessor, 528 tasks"
    assert found(5184, 121) == 10, "registers come by eights"
    assert found(5184, 168) == 14, "3 blocks"
    assert found(5184, 16) == found(5184, 0) == 3, "16 blocks"
    assert found(5184, 128, block_size=512) == 10 and found(5184, 96, block_size=512) == 10
    assert found(528, 128) == 1 and found(529, 128) == 2 and found(21, 128) == found(0, 128) == 1
    assert found(5184, 128, given=8) == found(21, 0, given=8) == 8
    assert (
        "nodes_per_task" in ContractionHostSchedule.choices
        and 0 not in ContractionHostSchedule.choices["nodes_per_task"]
    ), "a host's results do not depend on the number of threads"


@pytest.mark.parametrize(
    "channels, dtype, vector_bytes, block",
    [
        (128, "float32", 64, 16),
        (128, "float64", 64, 8),
        (6, "float32", 64, 4),
        (1, "float32", 64, 1),
        (128, "float64", 16, 2),
    ],
)
def test_the_default_of_a_host_fills_one_register(channels: int, dtype: str, vector_bytes: int, block: int) -> None:
    facts, problem = dataclasses.replace(HOST, vector_bytes=vector_bytes), dataclasses.replace(SMALL, channels=channels)
    schedule = default_contraction_schedule(problem, FORWARD, dtype, facts)
    assert isinstance(schedule, ContractionHostSchedule) and schedule.channel_block == block


def test_gradients_apart_are_other_statements() -> None:
    schedule = ContractionHostSchedule(order="element", gradients="apart")
    apart = contraction_plan(spec(schedule, contraction_backward())).parts
    together = contraction_plan(spec(dataclasses.replace(schedule, gradients="together"), contraction_backward())).parts
    assert apart == contraction_parts(SMALL, contraction_backward(), True) and len(apart) == 2 * len(together)
    # Without gradients of x, or with nothing else, there is one walk.
    for direction in (FORWARD, contraction_backward("x"), contraction_backward("w")):
        assert contraction_parts(SMALL, direction, True) == contraction_parts(SMALL, direction)


def test_the_work_of_a_node_grows_with_channels_and_components() -> None:
    one = spec(ContractionHostSchedule())
    assert one.row_work == 8 * 6 * (4 + 4)
    assert dataclasses.replace(one, problem=MACE).row_work == 8 * 128 * (16 + 9)


@pytest.mark.parametrize(
    "irreps_out, dtype, backward, double_backward",
    [
        ("0e", "float64", "registers", "registers"),
        ("0e+1o", "float32", "registers", "registers"),
        ("0e+1o", "float64", "registers", "memory"),
        ("0e+1o+2e", "float32", "registers", "memory"),
        ("0e+1o+2e", "float64", "memory", "memory"),
    ],
)
def test_sums_are_in_registers_where_they_fit(irreps_out: str, dtype: str, backward: str, double_backward: str) -> None:
    """What compilers for sm_90 say; where both fit, registers were faster on an H200."""
    problem = dataclasses.replace(MACE, irreps_out=irreps_out)
    for direction, sums in ((contraction_backward(), backward), (contraction_double_backward(), double_backward)):
        schedule = default_contraction_schedule(problem, direction, dtype, FACTS)
        assert isinstance(schedule, ContractionCudaSchedule) and schedule.sums == sums
