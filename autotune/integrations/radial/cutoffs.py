"""The packages' polynomial cutoffs by one kernel: 1 - (p+1)(p+2)/2 x^p + p(p+2) x^(p+1) - p(p+1)/2 x^(p+2).

Klicpera et al., arXiv:2003.03123. In torch's operations, value and derivatives are some 70 launches a training step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.integrations.convolution_block import home_of
from autotune.integrations.ir_mul.stand_in import Draw, NodeStandIn
from autotune.integrations.stand_ins import has_hooks
from kernelgen.compat import runs_eagerly
from kernelgen.ops import gates

# By module and name of the class: whether it is zero from 1 on.
_KNOWN = {
    ("nequip.nn.embedding.cutoffs", "PolynomialCutoff"): True,
    ("sevenn.nn.edge_embedding", "PolynomialCutoff"): False,
}


def is_cutoff(module: Any) -> bool:
    """Whether it is one of a package's, and not compiled by TorchScript."""
    kind = type(module)
    is_known = (home_of(kind), kind.__qualname__) in _KNOWN and "forward" not in module.__dict__
    return is_known and not has_hooks(module)


class AcceleratedCutoff(NodeStandIn):
    """Replaces one; of lengths over ``cutoff_length``, if it has one, else of the lengths that it is given."""

    original: Any
    detail = "one kernel on a GPU"

    def __init__(self, original: Any, **_: Any) -> None:
        super().__init__()
        is_cut = _KNOWN[home_of(type(original)), type(original).__qualname__]
        kind = gates.CUT_POLYNOMIAL if is_cut else gates.POLYNOMIAL
        self.__dict__["kernel"] = gates.scalar_kernel(kind, float(original.p))
        self._take_place_of(original)

    def forward(self, x: Tensor) -> Tensor:
        """Lengths of any shape -> factors of the same shape."""
        if not (runs_eagerly(x) and gates.takes(x)):
            return self.original.forward(x)
        length = getattr(self.original, "cutoff_length", None)
        rows = x if length is None else x / length
        return gates.gated(rows.reshape(-1, 1), self.kernel, self._composed).view(x.shape)

    def _composed(self, rows: Tensor) -> Tensor:
        return self.original.forward(rows * getattr(self.original, "cutoff_length", 1.0))

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Lengths up to the cutoff."""
        (x,) = draw((64,))
        x = torch.sigmoid(x) * getattr(self.original, "cutoff_length", 1.0)
        return self.forward(x), self.original.forward(x)
