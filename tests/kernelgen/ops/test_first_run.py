"""The first run of a direction with a shortlist: which schedule stays, and that every call is right."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import operator_cases as cases
import pytest
import reference
import torch

from kernelgen.errors import CompileError
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.ops import first_run
from kernelgen.ops.base import OPERATORS, resolve
from kernelgen.ops.first_run import FEWEST_EDGES, LISTENERS, Choice, agreed, best_of, times_of
from kernelgen.ops.harmonics import HarmonicProduct, build_harmonics
from kernelgen.ops.product import Operator, build
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.runtime import call as runners

FIRST = HostSchedule()
OTHERS = (HostSchedule(accumulate="atomics"), HostSchedule(fuse=False))
EDGES = FEWEST_EDGES + 5


@pytest.fixture(autouse=True)
def operators_of_this_test() -> Iterator[None]:
    """An operator chooses once, so no test may meet one of another."""
    known = dict(OPERATORS)
    OPERATORS.clear()
    yield
    OPERATORS.update(known)


def shortlisted(others: Sequence[HostSchedule] = OTHERS) -> Operator:
    names = ("forward", "backward", "double_backward", "joint_backward")
    return build(cases.problem(), FIRST, dtype=torch.float64, shortlists=dict.fromkeys(names, others))


@pytest.fixture
def choices() -> Iterator[list[Choice]]:
    found: list[Choice] = []
    LISTENERS.append(found.append)
    yield found
    LISTENERS.remove(found.append)


def prefer(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Let the schedule at a place be the fastest; all of them run."""

    def times(runs: Sequence[Any], device: torch.device) -> tuple[float, ...]:
        assert all(math.isfinite(time) for time in times_of(runs, device)), "all agree"
        return tuple(1.0 if at == place else 2.0 for at in range(len(runs)))

    monkeypatch.setattr(first_run, "times_of", times)


@pytest.mark.parametrize("place", range(3))
def test_every_direction_keeps_its_fastest_schedule_and_is_right(
    place: int, choices: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, place)
    operator, given = shortlisted(), cases.case(edges=EDGES)
    cases.assert_same(cases.differentiated(operator, given), cases.wanted(given))
    assert [choice.direction.name for choice in choices] == ["forward", "backward", "double_backward"]
    wanted = (operator.schedules["edge_backward"], *OTHERS)[place]
    assert all(operator.schedules[choice.direction.name] == wanted for choice in choices)
    assert operator.chosen["forward"][0] == place and set(operator.shortlists) == {"joint_backward"}
    cases.assert_same(cases.differentiated(operator, given), cases.wanted(given))
    cases.assert_same(cases.differentiated(operator, given, torch.int32), cases.wanted(given))
    assert len(choices) == 3, "a direction chooses once"


def test_a_check_on_a_few_edges_chooses_nothing(choices: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 1)
    operator, few, many = shortlisted(), cases.case(edges=FEWEST_EDGES - 1), cases.case(edges=EDGES)
    cases.assert_same(cases.differentiated(operator, few), cases.wanted(few))
    assert not choices and operator.schedules["forward"] == FIRST
    cases.assert_same(cases.differentiated(operator, many), cases.wanted(many))
    assert len(choices) == 3 and operator.schedules["forward"] == OTHERS[0]
    cases.assert_same(cases.differentiated(operator, few), cases.wanted(few))


def test_edges_are_ordered_for_all_until_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 0)
    owns = HostSchedule()
    operator = build(cases.problem(), OTHERS[0], dtype=torch.float64, shortlists={"forward": [owns]})
    assert owns.owner == "receiver" and OTHERS[0].owner == "" and not operator.by_receiver
    given = cases.case(edges=EDGES)
    assert operator.order(given.sender, given.receiver, cases.NODES, given.num_out).spans is not None
    cases.assert_same(cases.differentiated(operator, given), cases.wanted(given))
    assert operator.order(given.sender, given.receiver, cases.NODES, given.num_out).spans is None


def test_a_schedule_that_does_not_compile_is_left_out(choices: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    load = runners.load_kernel

    def refuse(spec: Any) -> Any:
        if spec.schedule.accumulate == "atomics":
            raise CompileError("too many registers")
        return load(spec)

    monkeypatch.setattr(runners, "load_kernel", refuse)
    operator, given = shortlisted(OTHERS[:1]), cases.case(edges=EDGES)
    edges = (given.sender, given.receiver, given.num_out)
    found = reference.run_direct(operator, "forward", given.tensors, *edges)["g"]
    assert reference.relative_error(found, reference.expected(given, "forward")["g"]) < 1e-12
    assert choices[0].place == 0 and choices[0].times_us[1] == math.inf
    broken = build(cases.problem(), OTHERS[0], dtype=torch.float64, shortlists={"forward": OTHERS[:1]})
    with pytest.raises(CompileError, match="too many registers"):
        reference.run_direct(broken, "forward", given.tensors, *edges)


def test_a_wrong_result_or_none_is_not_chosen() -> None:
    def run(*values: float) -> dict[str, torch.Tensor]:
        return {"g": torch.tensor(values)}

    cpu = torch.device("cpu")
    times = times_of([None, lambda: run(1.0, 2.0), lambda: run(1.0, 2.0001), lambda: run(1.0, 2.1), None], cpu)
    assert [math.isfinite(time) for time in times] == [False, True, True, False, False]
    times = times_of([lambda: run(1.0, math.nan), lambda: run(1.0, 2.0)], cpu)
    assert best_of(times) == 0


def test_without_memory_for_more_the_first_one_stays() -> None:
    calls = []

    def run() -> dict[str, torch.Tensor]:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("full")
        return {"g": torch.ones(1)}

    assert best_of(times_of([run, run], torch.device("cpu"))) == 0 and len(calls) == 2


def test_another_schedule_must_be_faster_by_more_than_noise() -> None:
    assert best_of((100.0, 99.5, math.inf)) == 0
    assert best_of((100.0, 97.0, 96.5)) == 1
    assert best_of((100.0, 97.0, 90.0)) == 2
    assert best_of((math.inf, 3.0)) == 1


def test_harmonics_inside_choose_too(choices: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 1)
    harmonics = build_harmonics(HarmonicsProblem((0, 1), "component", True), dtype=torch.float64)
    both = HarmonicProduct(shortlisted(OTHERS[:1]), harmonics)
    apart = HarmonicProduct(build(cases.problem(), dtype=torch.float64), harmonics, inside=())
    given = cases.case(edges=EDGES)
    v = torch.randn(EDGES, 3, dtype=torch.float64, requires_grad=True)
    arguments = (given.tensors["x"], v, given.tensors["w"], given.sender, given.receiver)
    found, wanted = (each(*arguments, num_out=given.num_out).detach() for each in (both, apart))
    assert reference.relative_error(found, wanted) < 1e-12
    assert [choice.place for choice in choices] == [1] and both.product.schedules["forward"] == OTHERS[0]


def test_a_copy_in_another_process_has_the_shortlist() -> None:
    operator = shortlisted()
    assert operator.text != build(cases.problem(), FIRST, dtype=torch.float64).text
    assert pickle.loads(pickle.dumps(operator)) is operator
    del OPERATORS[operator.text]
    assert resolve(operator.text).shortlists == operator.shortlists


def test_threads_agree(choices: list[Choice]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    operator, given = shortlisted(), cases.case(edges=EDGES)
    edges = (given.sender, given.receiver, given.num_out)

    def run(_: int) -> torch.Tensor:
        return reference.run_direct(operator, "forward", given.tensors, *edges)["g"]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(8)))
    expected = reference.expected(given, "forward")["g"]
    assert max(reference.relative_error(each, expected) for each in found) < 1e-12
    assert len(choices) == 1


@pytest.mark.gpu
def test_on_a_gpu_one_is_chosen_by_its_time_and_never_while_a_graph_is_captured(choices: list[Choice]) -> None:
    given, edges = cases.case(edges=5000), (cases.case(edges=5000).sender, cases.case(edges=5000).receiver)
    others = (CudaSchedule(accumulate="atomics"), CudaSchedule(block_size=64), CudaSchedule(fuse=False))
    names = ("forward", "backward")
    operator = build(
        *(cases.problem(), CudaSchedule()), dtype=torch.float64, device="cuda", shortlists=dict.fromkeys(names, others)
    )
    x, y, w, g = (given.tensors[name].cuda() for name in "xywg")
    sender, receiver = (index.cuda() for index in edges if index is not None)
    order = operator.order(sender, receiver, len(x), given.num_out)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    one_edge = {"x": x[:, :], "y": y[:1], "w": w[:1]}  # loads the first schedule
    reference.run_direct(operator, "forward", one_edge, sender[:1], receiver[:1], given.num_out)
    tensors, whole = {"x": x, "y": y, "w": w, "g": g}, (sender, receiver, given.num_out, order)
    with torch.cuda.graph(graph, stream=stream):
        captured = reference.run_direct(operator, "forward", tensors, *whole)["g"]
    graph.replay()
    assert not choices and set(operator.shortlists) == set(names)
    found = reference.run_direct(operator, "forward", tensors, *whole)["g"]
    first = reference.run_direct(operator, "backward", tensors, *whole)
    for value in (captured, found):
        assert reference.relative_error(value.cpu(), reference.expected(given, "forward")["g"]) < 1e-12
    for slot, expected in reference.expected(given, "backward").items():
        assert reference.relative_error(first[slot].cpu(), expected) < 1e-12
    assert [choice.direction.name for choice in choices] == list(names) and operator.shortlists == {}
    for choice in choices:
        assert len(choice.times_us) == 4 and all(0 < time < 1e5 for time in choice.times_us)
        assert operator.schedules[choice.direction.name] == choice.schedules[best_of(choice.times_us)]


def test_processes_that_train_together_take_the_first_ones_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes, one after the other, with different times."""
    store, distributed = torch.distributed.HashStore(), torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
    assert agreed(("product", "a", "b"), lambda: (2.0, 1.0)) == (2.0, 1.0)
    assert agreed(("product", "a", "b"), lambda: pytest.fail("taken again")) == (2.0, 1.0)
    assert agreed(("product", "a", "c"), lambda: (1.0, math.inf)) == (1.0, math.inf), "another shortlist"

    def taken_meanwhile() -> tuple[float, ...]:
        agreed(("at once",), lambda: (3.0, 4.0))
        return 4.0, 3.0

    assert agreed(("at once",), taken_meanwhile) == (3.0, 4.0)
