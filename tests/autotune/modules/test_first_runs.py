"""Modules without an entry: the first run tries the likeliest schedules, the fastest stays, for later processes too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from database_samples import entry, store
from module_cases import assert_equal_derivatives, conv_inputs, e3nn_conv, random_graph, small_conv

from autotune.database import lookup
from autotune.database import predicted as first_runs
from autotune.database.predicted import Predicted, first_runs_path, tries
from autotune.modules.convolution import TensorProductConv
from autotune.workload.workload import GraphClass
from kernelgen.device import device_facts
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.ops import first_run
from kernelgen.ops.base import OPERATORS
from kernelgen.ops.first_run import times_of

SHORTLIST = (HostSchedule(), HostSchedule(accumulate="atomics"), HostSchedule(path_groups=2, channel_block=4))
EDGES, NODES = 300, 40


@pytest.fixture(autouse=True)
def untuned(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No entry, a model that knows three schedules on a CPU, and a memory of this test's own."""
    monkeypatch.setattr(lookup, "predict", lambda *_: Predicted(SHORTLIST[0], "a model said so", SHORTLIST[1:]))
    monkeypatch.setattr(first_runs, "cache_dir", lambda: tmp_path / "cache")
    known = dict(OPERATORS)
    OPERATORS.clear()
    torch.compiler.reset()
    yield
    OPERATORS.update(known)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many schedules each first run tried; the third is always the fastest."""
    found: list[int] = []

    def times(runs: Sequence[Callable], device: torch.device) -> tuple[float, ...]:
        assert all(map(math.isfinite, times_of(runs, device)))
        found.append(len(runs))
        return tuple(10.0 - place for place in range(len(runs)))

    monkeypatch.setattr(first_run, "times_of", times)
    return found


def call(conv: Any, edges: int = EDGES, nodes: int = NODES) -> None:
    sender, receiver = random_graph(edges, nodes, nodes)

    def mine(*inputs: torch.Tensor) -> torch.Tensor:
        return conv(*inputs, sender, receiver)

    assert_equal_derivatives(mine, e3nn_conv(conv, sender, receiver, nodes), conv_inputs(conv, edges, nodes))


def as_a_new_process() -> None:
    OPERATORS.clear()
    first_runs._choices_in.known.clear()


def test_the_first_run_chooses_and_the_next_process_takes_it_at_once(tried: list[int]) -> None:
    conv = small_conv()
    assert conv.tuning_for("conv-e8-d3")["forward"].origin == "predicted"
    call(conv)
    assert tried == [3, 3, 3], "value, first and second derivatives"
    found = conv.tuning["forward"]
    assert (found.schedule, found.origin) == (SHORTLIST[2], "tried")
    assert "fastest of 3 schedules in a first run on this device (10.0, 9.0, 8.0 us)" in found.reason
    assert "a model said so" in found.reason and conv.tuning["joint_backward"].origin == "predicted"
    as_a_new_process()
    again = small_conv()
    call(again)
    assert len(tried) == 3, "nothing is tried again"
    assert again.tuning["forward"] == found
    assert {name for name, each in again.tuning.items() if each.origin == "predicted"} == {
        *("joint_backward", "edge_backward", "source_backward")
    }
    call(again, 5000, 200)
    assert len(tried) == 6, "another size has a first run of its own"


def test_compiled_code_has_a_first_run_too(tried: list[int]) -> None:
    conv = small_conv(graph_class="conv-e8-d3")
    sender, receiver = random_graph(EDGES, NODES, NODES)
    inputs = conv_inputs(conv, EDGES, NODES)
    compiled = torch.compile(conv, backend="aot_eager")
    for _ in range(2):
        found = compiled(*inputs, sender, receiver)
    torch.testing.assert_close(found, e3nn_conv(conv, sender, receiver, NODES)(*inputs), rtol=1e-10, atol=1e-10)
    assert tried == [3]


def test_a_tuned_entry_and_a_number_of_one_try_nothing(
    shipped: Path, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = entry(SHORTLIST[1], problem=small_conv().problem.key, graph_class="conv-e8-d3", dtype="float64")
    store(shipped, device_facts("cpu"), exact)
    conv = small_conv()
    with torch.no_grad():
        conv(*conv_inputs(conv, EDGES, NODES), *random_graph(EDGES, NODES, NODES))
    assert conv.tuning["forward"].origin == "exact" and tried == []
    for text, count in (("1", 1), ("0", 1), ("3", 3), ("", 6), ("many", 6)):
        monkeypatch.setenv("EQUITUNE_TRY", text)
        assert tries() == count


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(json.dumps({"format": 99, "choices": {}})),
        lambda path: path.write_text(json.dumps({"format": 1, "choices": []})),
        lambda path: path.write_text(path.read_text().replace('"times_us": [', '"times_us": ["x", ')),
        lambda path: path.write_text(path.read_text().replace("10.0", "-1.0")),
        lambda path: path.unlink(),
    ],
)
def test_a_spoilt_memory_is_no_memory(spoil: Callable[[Path], Any], tried: list[int]) -> None:
    path = first_runs_path(device_facts("cpu").slug)
    call(small_conv())
    assert path.is_file()
    spoil(path)
    as_a_new_process()
    call(small_conv())
    assert tried == [3] * 6


def test_a_folder_that_cannot_be_written_stops_no_model(
    tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(first_runs, "cache_dir", lambda: tmp_path / "file")
    call(small_conv())
    assert len(tried) == 3


def test_the_memory_keeps_the_newest(tried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_runs, "MOST_KEPT", 2)
    call(small_conv())
    kept = json.loads(first_runs_path(device_facts("cpu").slug).read_text())["choices"]
    assert [found["kernel"].split()[1] for found in kept.values()] == ["backward", "double_backward"]


def test_another_devices_entry_is_tried_beside_what_the_model_says(shipped: Path) -> None:
    facts = device_facts("cpu")
    there = type(facts)(**{**facts.__dict__, "name": "Another CPU"})
    store(shipped, there, entry(SHORTLIST[1], problem=small_conv().problem.key, graph_class="conv-e8-d3"))
    kernel = (small_conv().problem, "conv", "forward", "float32", "mul_ir", facts)
    found = lookup.find_schedule(*kernel, GraphClass.parse("conv-e8-d3"))
    assert (found.origin, found.schedule, found.others) == ("other-device", SHORTLIST[1], (SHORTLIST[0], SHORTLIST[2]))
    proven = lookup.find_schedule(*kernel, GraphClass.parse("conv-e8-d3"), tolerance=1.0)
    assert proven.others == (), "an error is proven of one schedule"


def test_a_module_that_was_given_its_schedules_tries_nothing(tried: list[int]) -> None:
    conv = TensorProductConv("8x0e+8x1o", "0e+1o", filter_irreps_out="0e+1o", schedule=SHORTLIST[0])
    call(conv)
    assert tried == [] and conv.tuning["forward"].origin == "given"
