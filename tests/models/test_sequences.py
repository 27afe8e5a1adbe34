"""What users do to models, in any order: accelerated and captured copies go on as stock. See ``model_sequences``."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model_cases import stand_ins
from model_sequences import Sequence, difference, run
from sequence_actions import ACTIONS
from sequence_models import KINDS, PACKAGES, subject_of

from autotune.models.package import default_dtype

# About ten processor seconds a package. ``python tests/tools/model_sequences.py`` runs a thousand.
EXAMPLES = int(os.environ.get("EQUITUNE_SEQUENCES", "10"))
EVERY_NAME = [name for name, action in ACTIONS.items() for _ in range(action.weight)]
SEQUENCES: Any = st.lists(st.tuples(st.sampled_from(EVERY_NAME), st.integers(0, 9999)), min_size=3, max_size=10)


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param].module, reason=f"{request.param} is not installed")
    return request.param


@pytest.mark.slow
def test_copies_go_on_as_stock(package: str) -> None:
    # Not made shorter, which would take minutes: the command does that to the printed sequence.
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],
    )
    @given(SEQUENCES)
    def check(sequence: Sequence) -> None:
        failures = run(package, sequence).failures
        text = "\n".join(f"{one.kind}, step {one.step}, {one.action}: {one.what}" for one in failures)
        assert not failures, f"{text}\npython tests/tools/model_sequences.py --package {package} --replay '{sequence}'"

    check()


def test_a_deepcopy_stands_for_an_accelerated_model(package: str) -> None:
    """The sequences begin with one."""
    with default_dtype(torch.float64):
        subject = subject_of(package, "accelerated", is_last=True)
        copied = copy.deepcopy(subject.outer)
        assert stand_ins(copied) == stand_ins(subject.outer) > 0
        found = [subject.call(subject.batches[0], model) for model in (copied, subject.outer)]
        assert all(torch.equal(found[0][name], found[1][name]) for name in ("energy", "forces", "stress"))


def test_a_wrong_copy_is_found(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a copy that misses a write, raises, or loses a parameter."""

    def only_stock(subject: Any, draw: Any) -> None:
        if subject.kind == "stock":
            subject.model.requires_grad_(False)
            next(subject.model.parameters()).data.mul_(1 + 1e-6)

    def only_captured(subject: Any, draw: Any) -> None:
        if subject.kind == "captured":
            raise RuntimeError("no")

    monkeypatch.setitem(ACTIONS, "write", ACTIONS["call"]._replace(do=only_stock))
    monkeypatch.setitem(ACTIONS, "raise", ACTIONS["call"]._replace(do=only_captured))
    assert {one.kind: one.what.split()[0] for one in run(package, [("write", 0)]).failures} == dict.fromkeys(
        KINDS[1:], "energy"
    )
    (failure,) = run(package, [("call", 0), ("raise", 0)]).failures
    assert (failure.kind, failure.step, failure.what) == ("captured", 1, "raises RuntimeError: no")


def test_differences_are_relative_and_see_nan() -> None:
    one, nan = (torch.tensor([1e3, last], dtype=torch.float64) for last in (1.0, float("nan")))
    assert difference({"a": one}, {"a": one * (1 + 1e-10)}, 1e-9) == ""
    assert difference({"a": one}, {"a": one * (1 + 1e-8)}, 1e-9).startswith("a differs by 1.0e-08")
    assert difference({"a": one}, {"a": nan}, 1e-9) == "a is nan in other places"
    assert difference({"a": nan}, {"a": nan}, 1e-9) == ""
    assert difference({}, {"a": one}, 1e-9) == "a is missing"
    assert difference({"a": one[:1]}, {"a": one}, 1e-9) == "a has shape (1,), stock (2,)"
