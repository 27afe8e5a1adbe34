"""The calls of a problem's operator: values and first gradients, with the schedules that a module would load here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import combinations

import torch

from autotune.modules.base import Found, Lookup
from autotune.modules.convolution import operator_text
from autotune.workload.config import find_problem
from autotune.workload.kinds.registry import kernel_kind, operations_of
from kernelgen.device import CUDA_ARCHS, DeviceFacts, assumed, cuda_facts, device_facts, representative
from kernelgen.errors import InputError, ScheduleError
from kernelgen.ops.product import Operator, build
from kernelgen.packs.calls import Call, launches
from kernelgen.problem.product import TensorProductProblem

# Second derivatives that a loss on energies and forces takes: those of dF/dy, of dF/dx and dF/dy, with the value's.
_TRAINING = (
    *(("y", outputs) for outputs in ("xwg", "xw", "wg")),
    *(("xy", "xywg"), ("xyw", "xywg")),
    *(("yg", outputs) for outputs in ("xyw", "xw", "w")),
)


def calls_of(
    text: str, operation: str, dtype: str, layout: str, *, archs: Sequence[str] = (), training: bool = False
) -> list[Call]:
    """The calls of a problem (its name or key), on the CPU, or with ``archs`` on a GPU.

    A GPU's schedules are those for the first architecture. InputError for another dtype than float32 and float64.
    """
    with assumed(card_of(archs[0])) if archs else nullcontext():
        return _calls_on("cuda" if archs else "cpu", text, operation, dtype, layout, training)


def card_of(arch: str) -> DeviceFacts:
    """The card that stands for an architecture, for which schedules may have been tuned."""
    return representative(arch) if arch in CUDA_ARCHS else cuda_facts(arch)


def _calls_on(kind: str, text: str, operation: str, dtype: str, layout: str, training: bool) -> list[Call]:
    problem = find_problem(text)
    if dtype not in ("float32", "float64"):
        raise InputError(f"dtype is {dtype!r}; expected float32 or float64")
    device, of_torch = torch.device(kind), getattr(torch, dtype)
    if not isinstance(problem, TensorProductProblem):
        operation = operations_of(problem)[0]
        name = operator_text(operation, layout, (problem.key, "", None), device, of_torch)
        return [*_of_rows(operation, name, training)]

    def made(found: Found) -> Operator:
        options = {"operation": operation, "dtype": of_torch, "layout": layout}
        return build(problem, found.schedules, device=device, refused=found.refused, **options)

    kernel = (problem, operation, dtype, layout, device_facts(device))
    operator = Lookup(kernel, tuple(kernel_kind(operation).directions), {}, None).family(made)
    calls = [Call("tp_forward", operator.text)]
    calls += [Call("tp_backward", operator.text, "", outputs) for outputs in _subsets("xyw")]
    if training:
        calls += [Call("tp_double_backward", operator.text, *of) for of in _TRAINING]
    return [call for call in calls if all(_is_legal(one, call) for one in getattr(operator, "members", (operator,)))]


def _is_legal(operator: Operator, call: Call) -> bool:
    """Whether the direction's schedule allows these outputs: knobs may be about an operand that they do not read."""
    try:
        launches(operator, call, ("int64",))
    except ScheduleError:
        return False
    return True


def _of_rows(operation: str, text: str, training: bool) -> list[Call]:
    if operation == "harmonics":
        second = [Call("sh_double_backward", text, "", outputs) for outputs in ("xg", "x", "g")]
        return [Call("sh_forward", text), Call("sh_backward", text), *(second if training else ())]
    return [Call("sc_forward", text), Call("sc_backward", text, "", "x")]


def _subsets(slots: str) -> list[str]:
    return ["".join(some) for count in range(1, len(slots) + 1) for some in combinations(slots, count)]
