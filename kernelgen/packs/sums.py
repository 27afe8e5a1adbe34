"""Sums of all rows into one, such as the energy of a structure from its atoms', as sums instead of scattered additions.

Torch's compiler writes the scattered form wrongly. In 2.11 its code for GPUs also adds what idle lanes hold, such as a
constant shift of each atom's energy, up to the next power of two (pytorch issue 178871).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
# Each takes (result, dim, index, rows), and adds to the result; the first also takes what to do there.
_ADDED = {
    aten.scatter_reduce.two: aten.add.Tensor,
    aten.scatter_reduce_.two: aten.add_.Tensor,
    aten.scatter_add.default: aten.add.Tensor,
    aten.scatter_add_.default: aten.add_.Tensor,
    aten.index_add.default: aten.add.Tensor,
    aten.index_add_.default: aten.add_.Tensor,
}


def with_plain_sums(traced: fx.GraphModule) -> fx.GraphModule:
    """The same module, changed in place: additions of rows into a result of one row are sums of the rows.

    traced: by ``make_fx``, whose nodes know their shapes. Equal for all valid inputs, since the one row is all that an
    index can name; results differ in the order of additions.
    """
    for node in list(traced.graph.nodes):
        if node.op == "call_function" and node.target in _ADDED and _is_of_one_row(node):
            given: list[Any] = list(node.args)
            result, dim, _, rows = given[:4]
            with traced.graph.inserting_before(node):
                total = traced.graph.call_function(aten.sum.dim_IntList, (rows, [dim], True))
                added = traced.graph.call_function(_ADDED[node.target], (result, total))
            total.meta["val"] = rows.meta["val"].sum(dim, keepdim=True)
            added.meta = dict(node.meta)
            node.replace_all_uses_with(added)
            traced.graph.erase_node(node)
    traced.recompile()
    return traced


def _is_of_one_row(node: fx.Node) -> bool:
    """Whether all rows, and all of them whole, are added to the only row."""
    given: list[Any] = [one.meta["val"] if isinstance(one, fx.Node) else one for one in node.args[:4]]
    result, dim, index, rows = given
    of_rows = "index_add" in str(node.target)
    plain = node.args[4:] in ((), ("sum",)) and not node.kwargs
    if not plain or result.dim() == 0 or result.shape[dim] != 1:
        return False
    whole = rows.sum(dim, keepdim=True).shape == result.shape
    return whole and (of_rows or index.shape == rows.shape)
