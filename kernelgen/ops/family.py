"""Families of operators: the same kernels with different schedules, one for each size class of graphs.

In eager mode a module picks the operator itself. What torch traces, compiles or exports holds an operator's text as a
constant while the number of edges may vary, so there the text is a family's: each op picks the member at run time, by
the sizes of its own tensors. All ops of a call see the same sizes, so derivatives take the value's choice.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelgen.compat import is_transforming
from kernelgen.ops.base import rebuilds, register, resolve
from kernelgen.ops.harmonics import HarmonicsOperator
from kernelgen.ops.library import order_for_size
from kernelgen.ops.product import Operator
from kernelgen.ops.symmetric_contraction import ContractionOperator
from kernelgen.problem.sizes import size_class
from kernelgen.runtime.graph import NO_ORDER, EdgeOrder, order_by

# For each rounded log2 of the number of edges, and in it for each of the edges a node, the place of a member.
Classes = Sequence[Sequence[int]]


def build_family(members: Sequence[Any], classes: Classes) -> Any:
    """The family of some operators of one kind, problem, dtype, layout and device; a single one is its own family.

    members: the first one is for large graphs; it tells what does not depend on the size. classes: a graph beyond the
    last row or column takes the last one.
    """
    if len(members) == 1:
        return members[0]
    first = members[0]
    if isinstance(first, HarmonicsOperator):
        return register(HarmonicsFamily(members, classes))
    if isinstance(first, ContractionOperator):
        return register(ContractionFamily(members, classes))
    return register(OperatorFamily(members, classes))


def _text(members: Sequence[Any], classes: Classes) -> str:
    """Packed, because members differ in few knobs, and each call of an op looks its text up."""
    data = {"members": [member.text for member in members], "classes": [list(row) for row in classes]}
    packed = base64.b85encode(zlib.compress(json.dumps(data).encode(), 9)).decode()
    return json.dumps({"kind": "family", "packed": packed})


def _rebuild(text: str) -> Any:
    data = json.loads(zlib.decompress(base64.b85decode(json.loads(text)["packed"])))
    return build_family([resolve(member) for member in data["members"]], data["classes"])


def _member(members: Sequence[Any], classes: Classes, num_edges: int, num_nodes: int) -> Any:
    log2_edges, log2_degree = size_class(num_edges, num_nodes)
    row = classes[min(log2_edges, len(classes) - 1)]
    return members[row[min(log2_degree, len(row) - 1)]]


class OperatorFamily(Operator):
    """An operator of which each call takes the member for its graph."""

    def __init__(self, members: Sequence[Operator], classes: Classes) -> None:
        first = members[0]
        options = (first.operation, first.dtype, first.layout, first.device, first.deterministic, first.refused)
        super().__init__(first.problem, first.schedules, *options)
        self.members, self.classes, self.text = tuple(members), classes, _text(members, classes)
        # The ends by which every member needs the edges in order, and those by which some do.
        needs = [(member.by_receiver, member.by_sender) for member in members]
        self.by_receiver, self.by_sender = (all(by) for by in zip(*needs, strict=True))
        self._eager_ends = (self.by_receiver, self.by_sender)
        some = [any(by) for by in zip(*needs, strict=True)]
        self.by_size = (some[0] and not self.by_receiver, some[1] and not self.by_sender)

    def for_size(self, num_edges: int, num_out: int) -> Operator:
        """The member for a graph."""
        return _member(self.members, self.classes, num_edges, num_out if self.is_conv else num_edges)

    def order(self, sender: Tensor, receiver: Tensor, num_in: int, num_out: int, is_sorted: bool = False) -> EdgeOrder:
        """As an operator's; what only some members need is left to an op, which looks at the graph's size."""
        if not torch.compiler.is_compiling() and is_transforming():
            return NO_ORDER
        order = super().order(sender, receiver, num_in, num_out, is_sorted)
        if self.by_size[0]:
            if is_sorted:
                spans, perm = order_by("receiver", receiver, num_out, True)
            else:
                spans, perm = order_for_size(receiver, num_out, num_out, "receiver", self.text)
            order = order._replace(spans=spans, perm=perm)
        if self.by_size[1]:
            spans, perm = order_for_size(sender, num_out, num_in, "sender", self.text)
            order = order._replace(sender_spans=spans, sender_perm=perm)
        return order


class HarmonicsFamily(HarmonicsOperator):
    """Harmonics of which each call takes the member for its number of vectors."""

    def __init__(self, members: Sequence[HarmonicsOperator], classes: Classes) -> None:
        first = members[0]
        super().__init__(first.problem, first.schedules, first.dtype, first.device)
        self.members, self.classes, self.text = tuple(members), classes, _text(members, classes)

    def for_size(self, rows: int) -> HarmonicsOperator:
        """The member for a number of vectors."""
        return _member(self.members, self.classes, rows, rows)


class ContractionFamily(ContractionOperator):
    """A contraction of which each call takes the member for its number of nodes."""

    def __init__(self, members: Sequence[ContractionOperator], classes: Classes) -> None:
        first = members[0]
        super().__init__(first.problem, first.schedules, first.dtype, first.device, first.layout)
        self.members, self.classes, self.text = tuple(members), classes, _text(members, classes)

    def for_size(self, rows: int) -> ContractionOperator:
        """The member for a number of nodes."""
        return _member(self.members, self.classes, rows, rows)


rebuilds("family", _rebuild)
