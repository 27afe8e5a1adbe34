"""Which form of a radial convolution runs where nobody names one: by times in the tuned database."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.modules import convolution
from autotune.modules import convolution as tuned
from autotune.modules.convolution import TensorProductConv, convolve_radial
from autotune.workload.config import find_problem
from kernelgen.device import cuda_facts
from kernelgen.problem.product import size_class

RESULTS = Path(__file__).parents[3] / "results"


class Layer:
    """What is asked of an operator."""

    problem, layout, device = find_problem("mace-mp-medium"), "ir_mul", torch.device("cuda")


OPERATOR: Any = Layer()
WHOLE = {"product-ieee": {"time_us": 30.0}, "product-fp16x3": {"time_us": 12.0}, "streamed": {"time_us": 40.0}}


def is_fastest(monkeypatch: pytest.MonkeyPatch, forward: Any, backward: Any, **how: Any) -> bool:
    tuned.is_fused_fastest.cache_clear()
    monkeypatch.setattr(tuned, "fused_of", lambda *_: object())
    monkeypatch.setattr(tuned, "device_facts", lambda _: cuda_facts("sm_90"))
    found = {
        name: SimpleNamespace(entry=entry, origin="exact")
        for name, entry in (("forward", forward), ("backward", backward))
    }
    monkeypatch.setattr(tuned, "_tunings", lambda *_, **__: found)
    given: dict[str, Any] = {"product": "fp16x3", "beside_whole": True} | how
    return tuned.is_fused_fastest(OPERATOR, 64, size=size_class(1000, 100), **given)


def entry(time_us: float, peers: dict[str, Any] = WHOLE) -> Any:
    return SimpleNamespace(time_us=time_us, peers=peers)


def test_a_value_and_its_gradients_decide_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_fastest(monkeypatch, entry(5.0), entry(19.0)), "12 + 12 is no less"
    assert not is_fastest(monkeypatch, entry(5.0), entry(19.1))
    assert is_fastest(monkeypatch, entry(5.0), entry(20.1), times=1.05), "for much less memory"
    assert not is_fastest(monkeypatch, entry(5.0), entry(20.3), times=1.05)
    assert is_fastest(monkeypatch, entry(5.0), entry(75.0), beside_whole=False), "without room there is 40 + 40"
    assert not is_fastest(monkeypatch, entry(5.0), entry(75.1), beside_whole=False)


@pytest.mark.parametrize(("arch", "expected"), [("sm_90", True), ("sm_80", False)])
def test_entries_of_an_h200_are_for_its_architecture_alone(
    arch: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MACE medium's layer on water: another GPU of the architecture fuses too, older ones were not measured."""
    tuned.is_fused_fastest.cache_clear()
    monkeypatch.setattr(tuned, "fused_of", lambda *_: object())
    monkeypatch.setattr(tuned, "device_facts", lambda _: cuda_facts(arch))
    layer: Any = Layer()
    assert tuned.is_fused_fastest(layer, 64, "fp16x3", size_class(443_074, 5_184), beside_whole=True) is expected


def test_what_was_not_measured_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_fastest(monkeypatch, None, entry(1.0))
    assert not is_fastest(monkeypatch, entry(1.0, {}), entry(1.0, {}))
    failed = {"product-ieee": {"error": "out of memory"}, "product-fp16x3": {"error": "out of memory"}}
    assert not is_fastest(monkeypatch, entry(1.0, failed), entry(1.0))
    one_form = {"product-ieee": {"time_us": 30.0}, "product-fp16x3": {"error": "no such GPU"}}
    assert is_fastest(monkeypatch, entry(1.0, one_form), entry(25.0)), "a form counts if it has both times"


def test_in_tf32_whole_weights_are_in_tf32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = WHOLE | {"product-tf32": {"time_us": 9.0}}
    assert is_fastest(monkeypatch, entry(5.0, beside), entry(19.0, beside))
    assert not is_fastest(monkeypatch, entry(5.0, beside), entry(19.0, beside), product="tf32")
    assert is_fastest(monkeypatch, entry(5.0, beside), entry(13.0, beside), product="tf32")


@pytest.mark.parametrize(("name", "accuracy"), [("mace-mp-medium", "tf32"), ("mace-mp-first", "ieee")])
def test_schedules_in_tf32_are_those_of_its_class_where_they_were_tuned(
    name: str, accuracy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first layer was tuned for three products alone."""
    monkeypatch.setattr(tuned, "device_facts", lambda _: cuda_facts("sm_90"))
    layer: Any = Layer()
    layer.problem = find_problem(name)
    found = tuned._tunings(layer, 64, "tf32", (17, 7), None)
    assert {each.entry.problem.split("|")[2] for each in found.values()} == {accuracy}
    in_float32 = tuned._tunings(layer, 64, "fp16x3", (17, 7), None)
    assert {each.entry.problem.split("|")[2] for each in in_float32.values()} == {"ieee"}


def test_no_recorded_row_is_slower_by_the_choice() -> None:
    """What the shipped database says is the fastest form was so, to 2%, when the record of rows was measured."""
    both, exact = "forward+backward", ("product-ieee", "product-fp16x3")
    times: dict[tuple[str, str], list[Any]] = {}
    for each in json.loads((RESULTS / "nvidia-h200.json").read_text())["entries"]:
        if each["operation"] == "radial":
            times.setdefault((each["label"], each["graph"]["name"]), []).append(each)
    rows = json.loads((RESULTS / "bench" / "nvidia-h200.json").read_text())["rows"]
    rows = [row for row in rows if row["operation"] == "radial" and row["pass"] == both]
    assert len(rows) == len(times) >= 18
    for row in rows:
        entries = times[row["label"], row["graph"]["name"]]
        whole = (*exact, "product-tf32") if row["label"].endswith("-tf32") else exact
        least = min(sum(each["peers"][name]["time_us"] for each in entries) for name in whole)
        is_fused = sum(each["time_us"] for each in entries) <= least
        found = {name: cell["time_us"] for name, cell in row["times"].items() if "time_us" in cell}
        taken = found["equitune"] if is_fused else min(found[name] for name in whole)
        assert taken <= 1.02 * min(found[name] for name in whole), (row["label"], row["graph"]["name"])


def inputs(device: str) -> tuple[TensorProductConv, list[torch.Tensor], list[torch.Tensor]]:
    conv = TensorProductConv("4x0e+4x1o", "0e+1o", filter_irreps_out="0e+1o", layout="ir_mul")
    generator = torch.Generator().manual_seed(0)
    sizes = ((9, 16), (60, 4), (60, 8), (8, conv.weight_numel))
    given = [torch.randn(*size, generator=generator).to(device) for size in sizes]
    return conv.to(device), given, [torch.randint(9, (60,), generator=generator).to(device) for _ in range(2)]


def test_a_cpu_has_no_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "is_fused_fastest", lambda *_, **__: pytest.fail("a CPU has none"))
    conv, given, graph = inputs("cpu")
    assert convolve_radial(conv, *given, *graph, fused=None).shape == (9, conv.irreps_out.dim)


@pytest.mark.gpu
def test_a_gpu_takes_the_form_that_was_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, given, graph = inputs("cuda")
    ran, product = [], convolution.radial_product
    monkeypatch.setattr(convolution, "radial_product", lambda *a: ran.append(a[-1] is not None) or product(*a))
    results = []
    for fastest, trains in ((True, False), (False, False), (True, True)):
        monkeypatch.setattr(convolution, "is_fused_fastest", lambda *_, fastest=fastest, **__: fastest)
        x, y, h, matrix = (tensor.detach().requires_grad_() for tensor in given)
        out = convolve_radial(conv, x, y, h, matrix.requires_grad_(trains), *graph, always_streamed=False, fused=None)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, y, h))])
    assert ran == [True, False, False], "gradients of the matrix stream, so a training step takes whole weights"
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
