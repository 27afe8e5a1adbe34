"""e3nn's fully connected, elementwise and full tensor products, from generated kernels.

Each takes e3nn's arguments in e3nn's order and with its defaults, then those of :class:`autotune.TensorProduct`. The
paths come from e3nn's class, so irreps are split, ordered and named as there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotune.modules.tensor_product import TensorProduct
from kernelgen.compat import o3
from kernelgen.errors import ProblemError
from kernelgen.problem.irreps import Irreps, parse_irreps


class _ReadyMade(TensorProduct):
    """A product whose output or paths follow from its arguments."""

    def _connect(
        self, kind: type[o3.TensorProduct], irreps: tuple[Irreps, ...], given: dict[str, Any]
    ) -> dict[str, Any]:
        """Irreps and instructions that e3nn's class derives, as arguments of the base class."""
        names = ("irreps_in1", "irreps_in2", "irreps_out")
        parsed = [parse_irreps(text, name) for text, name in zip(irreps, names, strict=False)]
        try:
            made = kind(*parsed, compile_left_right=False, internal_weights=False, **given)
        except (AssertionError, ValueError) as error:
            shown = ", ".join(map(str, parsed))
            raise ProblemError(
                f"{kind.__name__}({shown}): {str(error) or 'the irreps do not fit each other'}"
            ) from error
        paths = [(i.i_in1, i.i_in2, i.i_out, i.connection_mode, i.has_weight) for i in made.instructions]
        return dict(
            zip((*names, "instructions"), (made.irreps_in1, made.irreps_in2, made.irreps_out, paths), strict=True)
        )


class FullyConnectedTensorProduct(_ReadyMade):
    """``e3nn.o3.FullyConnectedTensorProduct``: every allowed path of mode ``uvw``, weighted.

    irreps_in1, irreps_in2, irreps_out: of both inputs and the result. irrep_normalization, path_normalization and
    options: as in :class:`autotune.TensorProduct`. Raises ProblemError for irreps that are not well-defined.
    """

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            **self._connect(o3.FullyConnectedTensorProduct, (irreps_in1, irreps_in2, irreps_out), {}),
            irrep_normalization=irrep_normalization,
            path_normalization=path_normalization,
            **options,
        )


class _OfInputs(_ReadyMade):
    """A product without weights whose output irreps follow from both inputs."""

    kind: type[o3.TensorProduct]

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        filter_ir_out: Iterable[str | o3.Irrep] | None = None,
        irrep_normalization: str | None = None,
        **options: Any,
    ) -> None:
        found = self._connect(self.kind, (irreps_in1, irreps_in2), {"filter_ir_out": filter_ir_out})
        super().__init__(**found, irrep_normalization=irrep_normalization, **options)


class ElementwiseTensorProduct(_OfInputs):
    """``e3nn.o3.ElementwiseTensorProduct``: copy u of one input times copy u of the other, without weights.

    irreps_in1, irreps_in2: equally many irreps. filter_ir_out: irreps of the result, all by default.
    Raises ProblemError if the inputs differ in their number of irreps.
    """

    kind = o3.ElementwiseTensorProduct


class FullTensorProduct(_OfInputs):
    """``e3nn.o3.FullTensorProduct``: every copy of one input times every copy of the other, without weights.

    irreps_in1, irreps_in2: of both inputs; the result's irreps follow, sorted. filter_ir_out: irreps of the result, all
    by default.
    """

    kind = o3.FullTensorProduct
