"""MACE's symmetric contraction as a module, from generated kernels with the schedules tuned for the device.

:class:`TunedContraction` has no parameters: it contracts features with weights in the order of
``kernelgen.arithmetic.contraction_couplings``. :class:`SymmetricContraction` has the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.modules.base import autocast
from autotune.modules.convolution import TunedRows
from autotune.workload.workload import LAYOUTS
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.compat import o3
from kernelgen.errors import ProblemError
from kernelgen.problem.irreps import parse_irreps
from kernelgen.problem.other_kinds import ContractionProblem


class TunedContraction(TunedRows):
    """Contracts features with weights that the caller has, by the schedules tuned for each number of nodes.

    layout: ``mul_ir``, features [nodes, channels, dim_in] as in MACE and values in e3nn's order; or ``ir_mul``,
    features [nodes, dim_in, channels] and values [nodes, dim_out, channels]. num_nodes: take the schedules tuned for
    about this number of nodes in every call (None: for as many as the call has). strict: raise TuningMissError at the
    first call unless schedules were tuned on this device; None reads ``$EQUITUNE_STRICT``.
    """

    operation = "contraction"
    problem: ContractionProblem

    def __init__(
        self,
        problem: ContractionProblem,
        *,
        layout: str = "mul_ir",
        num_nodes: int | None = None,
        strict: bool | None = None,
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ProblemError(f"layout is {layout!r}; expected one of {LAYOUTS}")
        self.layout = layout
        self.num_weights = len(polynomials(problem))
        self._set_problem(problem, num_nodes, strict, "num_nodes")

    def contract(self, x: Tensor, w: Tensor, elements: Tensor) -> Tensor:
        """The values [nodes, dim_out * channels], differentiable twice with respect to x and w.

        x: features, with the layout's last two dimensions or with one for both. w [elements, num_weights, channels].
        elements [nodes]: int32 or int64, the row of w of each node. Under ``torch.autocast`` features and weights in
        half precision are converted to float32. Raises InputError for other shapes and dtypes.
        """
        x, w = autocast(x, w)
        if x.dim() == 3:
            x = x.flatten(1)
        return self._operator_of(x.device, x.dtype, x.shape[0])(x, w, elements)


class SymmetricContraction(TunedContraction):
    """The symmetric contraction of MACE with weights of each element: x, elements -> [nodes, irreps_out.dim].

        >>> contraction = SymmetricContraction("128x0e+128x1o+128x2e+128x3o", "128x0e+128x1o", 3, num_elements=89)
        >>> out = contraction(x, elements)     # x [nodes, 128, 16], elements [nodes]

    irreps_in, irreps_out: all of one multiplicity, the number of channels; or of one channel, with ``channels``.
    correlation: highest degree in the features, 1 to 4. ``weight`` [num_elements, num_weights, channels] has one weight
    for each polynomial of a basis, so fewer than MACE's module, whose polynomials depend on each other linearly. Other
    arguments: see :class:`TunedContraction`. Raises ProblemError for irreps that do not fit.
    """

    def __init__(
        self,
        irreps_in: Any,
        irreps_out: Any,
        correlation: int,
        num_elements: int,
        *,
        channels: int | None = None,
        layout: str = "mul_ir",
        num_nodes: int | None = None,
        strict: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if type(num_elements) is not int or num_elements < 1:
            raise ProblemError(f"num_elements is {num_elements!r}; expected a positive integer")
        inside, out = parse_irreps(irreps_in, "irreps_in"), parse_irreps(irreps_out, "irreps_out")
        channels = _channels(inside, out) if channels is None else channels
        one, other = ("+".join(str(ir) for _, ir in irreps) for irreps in (inside, out))
        problem = ContractionProblem(one, other, correlation, channels)
        super().__init__(problem, layout=layout, num_nodes=num_nodes, strict=strict)
        for name, irreps in (("irreps_in", inside), ("irreps_out", out)):
            if any(mul not in (1, channels) for mul, _ in irreps):
                raise ProblemError(
                    f"{name} is {irreps}; expected the multiplicity {channels} (channels), or 1, of each"
                )
        self.irreps_in, self.irreps_out = (o3.Irreps([(channels, ir) for _, ir in irreps]) for irreps in (inside, out))
        self.correlation, self.num_elements, self.channels = correlation, num_elements, channels
        shape = (num_elements, self.num_weights, channels)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights, divided by the number of polynomials of their block and degree, as MACE's are."""
        kinds = [(one.block, one.degree) for one in polynomials(self.problem)]
        scale = self.weight.new_tensor([1 / kinds.count(kind) for kind in kinds])
        with torch.no_grad():
            self.weight.normal_().mul_(scale[:, None])

    def forward(self, x: Tensor, elements: Tensor) -> Tensor:
        """The contraction of x with the weights of each node's element; see :meth:`TunedContraction.contract`."""
        return self.contract(x, self.weight, elements)

    def extra_repr(self) -> str:
        return (
            f"{self.irreps_in} -> {self.irreps_out} | correlation {self.correlation} | {self.num_elements} elements | "
            f"{self.num_weights} weights a channel"
        )


def _channels(inside: o3.Irreps, out: o3.Irreps) -> int:
    found = {mul for mul, _ in (*inside, *out)}
    if len(found) != 1:
        raise ProblemError(f"irreps_in is {inside} and irreps_out {out}; expected one multiplicity, or channels")
    return found.pop()
