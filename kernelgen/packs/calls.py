"""What a call of an operator needs, as data that programs without Python can read: ``operators`` of a pack's index.

An entry has the operator's ``text``, by which exported models name it, and ``calls``: by op and outputs (such as
``tp_backward xy`` or ``tp_double_backward y xwg``) the kernels to launch, one after the other. A family has ``members``
(places in the list) and ``classes`` instead, see ``kernelgen.ops.base``. ``needs``: whether ``receiver`` and
``sender`` must be ordered before a call. Each launch of a call has

    outputs     slots that get a gradient; those that ``writes`` lacks are zero
    writes      by slot ``zero`` (the kernel adds to zeros), ``inside`` (it zeroes itself) or ``empty`` (it overwrites)
    reads       places of its operands in ``kernelgen.arithmetic.directions.OPERANDS``
    order       ``receiver`` or ``sender``: the end by which the edges must be in order, for workers that own its nodes
                or store its rows; ``element`` or ``given``: of a contraction
    gathers     whether rows of nodes are gathered and summed outside of the kernel
    partial_y   rows of partial sums of dF/dy, 0 for none
    task_nodes  nodes of a contraction's task, else 0
    widths      elements of a row of x, y, w and g; weights: their shape if they do not have a row an edge
    matrix      shape of the matrix that forms a fused convolution's weights, in the place of tangents of w
    marks       rows of marks [rows, nodes] that such a kernel has in the place of an output y; zero before
    kernels     places in the index's ``kernels``, by dtype of the indices and target, such as ``int64 cpu``
    permuted    the same, of kernels that run instead if the edges' order by receiver is known (GPUs)

A kernel for a GPU has a rule for its ``launch``: ``kernelgen.kernels.source.LaunchRule``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kernelgen.arithmetic.contraction import FORWARD as CONTRACTION
from kernelgen.arithmetic.contraction import contraction_backward, contraction_double_backward
from kernelgen.arithmetic.directions import (
    BACKWARD,
    DOUBLE_BACKWARD,
    FORWARD,
    OPERANDS,
    Direction,
    backward,
    double_backward,
    forward,
)
from kernelgen.errors import UnsupportedError
from kernelgen.kernels.dispatch import AnyPlan, make_plan
from kernelgen.kernels.radial.schedule import operands_of
from kernelgen.kernels.source import LaunchRule, Source
from kernelgen.ops.edge_networks import Network
from kernelgen.ops.harmonics import HarmonicsOperator
from kernelgen.ops.product import Operator
from kernelgen.ops.radial_convolution import FusedRadial
from kernelgen.ops.symmetric_contraction import ContractionOperator
from kernelgen.runtime.runner import recipe_of

INDICES = {"int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True)
class Call:
    """An op of ``equitune::`` with its operator's text, and the slots of its tangents and outputs where it has them."""

    op: str
    text: str
    tangents: str = ""
    outputs: str = ""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.op, self.tangents, self.outputs) if part)


@dataclass(frozen=True)
class Launch:
    """One launch of a call: its description without kernels, and the plan of its kernel by dtype of the indices.

    permuted: of the kernels that take edges by receiver, where those are better than edges in a graph's own order.
    fixed: of rows without indices, a source that no plan makes, and how it is launched.
    """

    facts: dict[str, Any]
    plans: dict[str, AnyPlan]
    permuted: dict[str, AnyPlan] = field(default_factory=dict)
    fixed: tuple[Source, LaunchRule] | None = None


def launches(operator: Any, call: Call, indices: tuple[str, ...]) -> list[Launch]:
    """The launches of a call of an operator that is no family. UnsupportedError for sums that only training needs."""
    if isinstance(operator, HarmonicsOperator):
        return [_of_harmonics(operator, call)]
    if isinstance(operator, Network):
        outputs, widths = ("g", {"g": operator.hidden}) if call.op == "en_forward" else ("x", {})
        facts = _facts(outputs, (), widths) | {"dtype": "float32"}
        return [Launch(facts, {}, fixed=(operator.kernel(call.op).source, operator.launch))]
    if isinstance(operator, FusedRadial):
        return [_of_radial(operator, call, indices)]
    if isinstance(operator, ContractionOperator):
        return [_of_contraction(operator, call, indices)]
    return list(_of_product(operator, call, indices))


def needs(operator: Any) -> dict[str, bool]:
    """The ends by which the operator's kernels need the edges in order."""
    return {"receiver": getattr(operator, "by_receiver", False), "sender": getattr(operator, "by_sender", False)}


def _of_product(operator: Operator, call: Call, indices: tuple[str, ...]) -> Iterator[Launch]:
    direction = _direction(call)
    problem = operator.problem
    for part in operator.parts(direction):
        by_index = {
            index: recipe_of(operator.spec(part, INDICES[index]), operator.is_conv)
            for index in (indices if operator.is_conv else ("int64",))
        }
        recipe = next(iter(by_index.values()))
        if recipe.plan is not None and recipe.gathers:
            by_index = {"int64": recipe}
        facts = {
            "outputs": part.outputs,
            "writes": recipe.writes,
            "reads": [OPERANDS.index(name) for name in recipe.reads],
            "order": recipe.order,
            "gathers": recipe.gathers,
            "partial_y": recipe.partial_y,
            "task_nodes": 0,
            "dtype": recipe.spec.dtype,
            "widths": {"x": problem.dim_in1, "y": problem.dim_in2, "w": problem.weight_numel, "g": problem.dim_out},
            "weights": [problem.weight_numel] if problem.shared_weights else None,
        }
        plans = {index: one.plan for index, one in by_index.items() if one.plan is not None}
        permuted = {index: make_plan(one.permuted) for index, one in by_index.items() if one.permuted is not None}
        yield Launch(facts, plans, permuted)


def _direction(call: Call) -> Direction:
    if call.op == "tp_forward":
        return forward()
    return backward(call.outputs) if call.op == "tp_backward" else double_backward(call.tangents, call.outputs)


def _of_harmonics(operator: HarmonicsOperator, call: Call) -> Launch:
    direction = {"sh_forward": FORWARD, "sh_backward": BACKWARD}.get(call.op) or DOUBLE_BACKWARD[call.outputs]
    reads = {"forward": ("x",), "backward": ("x", "g"), "double_backward": ("x", "tx", "g")}[direction.name]
    facts = _facts(direction.outputs, reads, {"x": 3, "g": operator.dim_out})
    plan = make_plan(operator.spec(direction))
    return Launch(facts | {"dtype": plan.spec.dtype}, {"int64": plan})


def _of_radial(operator: FusedRadial, call: Call, indices: tuple[str, ...]) -> Launch:
    direction = forward() if call.op == "rc_forward" else backward(call.outputs)
    plans = {index: make_plan(operator.spec(direction, INDICES[index])) for index in indices}
    plan = next(iter(plans.values()))
    widths = {slot: width for slot, (_, width) in operator.shapes(0, 0, 0).items() if slot != "tw"}
    facts = _facts(direction.outputs, operands_of(direction), widths)
    facts["writes"] = {slot: "zero" if f"out_{slot}" in plan.zeroed else "empty" for slot in direction.outputs}
    facts |= {"dtype": "float32", "order": "receiver", "marks": plan.marks}
    return Launch(facts | {"matrix": list(operator.shapes(0, 0, 0)["tw"])}, plans)


def _of_contraction(operator: ContractionOperator, call: Call, indices: tuple[str, ...]) -> Launch:
    if call.op == "sc_forward":
        direction = CONTRACTION
    elif call.op == "sc_backward":
        direction = contraction_backward(call.outputs)
    else:
        direction = contraction_double_backward(call.tangents, call.outputs)
    if "w" in direction.outputs:
        raise UnsupportedError(
            "gradients of a contraction's weights are not for packs: call model.requires_grad_(False) before exporting"
        )
    plans = {index: make_plan(operator.spec(direction, index)) for index in indices}
    plan = next(iter(plans.values()))
    facts = _facts(direction.outputs, direction.operands, operator.widths)
    facts |= {
        "dtype": plan.spec.dtype,
        "order": plan.schedule.order,
        "weights": [-1, operator.num_weights, operator.problem.channels],
        "task_nodes": plan.schedule.nodes_per_task or 1,
    }
    return Launch(facts, plans)


def _facts(outputs: str, reads: tuple[str, ...], widths: dict[str, int]) -> dict[str, Any]:
    """A launch that overwrites all of its outputs, row by row."""
    return {
        "outputs": outputs,
        "writes": dict.fromkeys(outputs, "empty"),
        "reads": [OPERANDS.index(name) for name in reads],
        "order": "",
        "gathers": False,
        "partial_y": 0,
        "task_nodes": 0,
        "widths": widths,
        "weights": None,
    }
