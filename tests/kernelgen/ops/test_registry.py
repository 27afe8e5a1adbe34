"""Operators are found by their text: in this process, in present pickles, and in those of version 0.1."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

from kernelgen.ops import base as registry
from kernelgen.ops.harmonics import build_harmonics
from kernelgen.ops.product import build
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem

PRODUCT = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
HARMONICS = HarmonicsProblem((0, 1), "component", True)


@pytest.fixture(params=["product", "harmonics"])
def operator(request: pytest.FixtureRequest) -> Any:
    return build(PRODUCT) if request.param == "product" else build_harmonics(HARMONICS)


def test_an_operator_is_found_and_made_again_where_it_is_not_known(
    operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.resolve(operator.text) is operator
    monkeypatch.setattr(registry, "OPERATORS", {})
    again = registry.resolve(operator.text)
    assert again is not operator and type(again) is type(operator) and again.text == operator.text
    assert registry.resolve(operator.text) is again


def test_a_pickle_gives_the_operator_of_this_process(operator: Any) -> None:
    assert pickle.loads(pickle.dumps(operator)) is operator


@pytest.mark.parametrize("name", ["library\nresolve", "harmonics_library\nresolve_harmonics"])
def test_pickles_of_version_0_1_load(name: str) -> None:
    made = build(PRODUCT) if name.startswith("library") else build_harmonics(HARMONICS)
    old = f"ckernelgen.{name}\n(V{made.text}\ntR.".encode()
    assert pickle.loads(old) is made


def test_an_operator_of_another_device_does_not_take_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "OPERATORS", {})
    first = build_harmonics(HARMONICS)
    assert build_harmonics(HARMONICS) is first
    other = build_harmonics(HARMONICS, device=torch.device("cpu", 0))
    assert other is not first and registry.resolve(first.text) is first


def test_a_text_may_name_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REBUILD", dict(registry._REBUILD))
    registry.rebuilds("another", lambda text: (text, "made"))
    text = json.dumps({"kind": "another"})
    monkeypatch.setattr(registry, "OPERATORS", {})
    assert registry.resolve(text) == (text, "made")
