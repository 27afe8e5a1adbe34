"""The edge-by-edge tensor product, with e3nn's interface.

Kernels follow e3nn's conventions: real spherical harmonics basis, ``component`` irreps, a path's weights are its
channels, in instruction order. First and second derivatives work in every input, and so do Hessians times vectors
(``torch.autograd.functional.hvp``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from autotune.database.lookup import Tuning
from autotune.modules.base import Schedules, TunedModule, autocast
from autotune.modules.e3nn_interface.checkpoints import E3nnCheckpoints, output_mask
from autotune.modules.e3nn_interface.path_weights import PathWeights, Weight, check_last
from autotune.modules.matrix_contraction import MatrixContraction, by_matrix
from autotune.modules.tensor_product_conv import TensorProductConv  # noqa: F401 (pickles of version 0.2 name it here)
from autotune.workload.graph_class import GraphClass
from kernelgen.errors import InputError, ProblemError
from kernelgen.problem.irreps import Irreps
from kernelgen.problem.product import TensorProductProblem, problem_of

Variances: TypeAlias = "Sequence[float] | torch.Tensor | None"


def _with_variances(problem: TensorProductProblem, variances: tuple[Variances, ...]) -> TensorProductProblem:
    """The problem with path weights that also compensate the variances of its blocks, as in e3nn."""
    names = ("in1_var", "in2_var", "out_var")
    try:
        module = problem.reference(**dict(zip(names, variances, strict=True)), compile_left_right=False)
    except AssertionError as error:
        raise ProblemError(f"in1_var, in2_var and out_var need one variance for each block: {error}") from error
    return problem_of(module)


class TensorProduct(PathWeights, E3nnCheckpoints, TunedModule):
    """``e3nn.o3.TensorProduct``, any connection mode, edge by edge, from a tuned kernel.

    e3nn's arguments come first, in e3nn's order and with its defaults:

    irreps_in1, irreps_in2, irreps_out, instructions: ``(in1, in2, out, mode, has_weight[, path_weight])``.
    in1_var, in2_var, out_var: variances that the normalisation assumes for the blocks, 1 by default.
    irrep_normalization: ``component`` (None), ``norm`` or ``none``. path_normalization: ``element`` (None), ``path``
        or ``none``.
    shared_weights, internal_weights: shared weights are one row for all edges (the default). Internal weights are the
        parameter ``weight`` of the module (the default if weights are shared and there are any).
    compile_left_right, compile_right, _specialized_code, _optimize_einsums: settings of e3nn's generated code. They
        only decide which of its constants go into checkpoints, for e3nn to read.
    normalization: former name of irrep_normalization.

    Equitune's arguments follow:

    layout: of x and of the result, ``mul_ir`` (e3nn's: channel, then component) or ``ir_mul``.
    schedule: a Schedule for every direction, or some by direction name; None loads the best one known here.
    strict: raise TuningMissError for a direction without a schedule tuned on this device: at once for forward, at first
        use for derivatives. None reads ``$EQUITUNE_STRICT``.
    deterministic: bitwise equal results from run to run, but slower; loads schedules tuned in this mode.
    tolerance: load only schedules measured with at most this relative error, against float64 e3nn and under rotation,
        in every output and gradient. A direction without one raises TuningMissError, as with strict.
    contraction: how shared weights of mode ``uvw`` are multiplied by the pairs of copies. ``edge``: edge by edge in the
        kernel. ``matrix``: by torch's matrix product, with torch's settings for tensor cores and accuracy, see
        ``autotune.modules.matrix_contraction``. ``auto``: ``matrix`` from 2**15 weights on unless a schedule is given.
    graph_class: load the schedules of this class, such as ``plain-e16`` (about 2**16 edges), in every call. None takes
        those of each call's number of edges.
    device, dtype: if either is given, the operator is built now and not at the first call.

    Raises ProblemError for irreps or instructions that are not well-defined.
    """

    operation = "plain"
    _matrix: MatrixContraction | None

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps,
        instructions: Iterable[Sequence],
        in1_var: Variances = None,
        in2_var: Variances = None,
        out_var: Variances = None,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        compile_left_right: bool = True,
        compile_right: bool = False,
        normalization: str | None = None,
        _specialized_code: bool | None = None,
        _optimize_einsums: bool | None = None,
        *,
        layout: str = "mul_ir",
        schedule: Schedules | None = None,
        strict: bool | None = None,
        deterministic: bool = False,
        tolerance: float | None = None,
        contraction: str = "auto",
        graph_class: GraphClass | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if normalization is not None:
            warnings.warn("normalization is now irrep_normalization", DeprecationWarning, stacklevel=2)
            irrep_normalization = normalization
        # e3nn.o3.TensorProduct's defaults, in its order.
        if shared_weights is False and internal_weights is None:
            internal_weights = False
        shared = True if shared_weights is None else shared_weights
        instructions = list(instructions)
        problem = TensorProductProblem.from_instructions(
            *(irreps_in1, irreps_in2, irreps_out, instructions),
            shared_weights=shared,
            irrep_normalization=irrep_normalization,
            path_normalization=path_normalization,
        )
        if in1_var is not None or in2_var is not None or out_var is not None:
            problem = _with_variances(problem, (in1_var, in2_var, out_var))
        if internal_weights is None:
            internal_weights = shared and any(instruction.has_weight for instruction in problem.instructions)
        if internal_weights and not shared:
            raise ProblemError("internal_weights=True needs shared_weights=True: they are one row for all edges")
        matrix = by_matrix(problem, "edge" if contraction == "auto" and schedule is not None else contraction)
        options: dict[str, Any] = {
            "layout": layout,
            "graph_class": graph_class,
            "schedule": schedule,
            "strict": strict,
            "deterministic": deterministic,
            "tolerance": tolerance,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(problem, **(options | {"device": None, "dtype": None} if matrix else options))
        # Not registered, because it has neither parameters nor buffers.
        self.__dict__["_matrix"] = MatrixContraction(problem, **options) if matrix else None
        self.internal_weights = internal_weights
        self._specialized_code, self._optimize_einsums = _specialized_code, _optimize_einsums
        self._code_options = (compile_left_right, compile_right, _specialized_code, _optimize_einsums)
        if internal_weights and self.weight_numel > 0:
            self.weight = torch.nn.Parameter(torch.randn(self.weight_numel, device=device, dtype=dtype))
        else:
            # As in e3nn: without internal weights, ``weight`` is an empty buffer.
            self.register_buffer("weight", torch.empty(0, device=device, dtype=dtype))
        mask = output_mask(self.instructions, self.irreps_out)
        self.register_buffer("output_mask", mask.to(device=device, dtype=dtype or torch.get_default_dtype()))

    def forward(self, x: torch.Tensor, y: torch.Tensor, weight: Weight = None) -> torch.Tensor:
        """x ``[..., irreps_in1.dim]``, y ``[..., irreps_in2.dim]`` -> ``[..., irreps_out.dim]``, broadcast.

        weight: ``[weight_numel]`` if weights are shared, else ``[..., weight_numel]`` with at least one leading
        dimension; or, as in e3nn, a list with a tensor ``[..., *path_shape]`` for each weighted path. None uses the
        internal weights. Under ``torch.autocast`` half precision tensors are converted to float32, and the result is
        float32. Raises InputError if shapes, dtypes or devices disagree.
        """
        dim_in1, dim_in2, dim_out = self._dims
        check_last("x", x, dim_in1)
        check_last("y", y, dim_in2)
        x, y, weight = autocast(x, y, self._weight_for(weight))
        batched = (x, y) if self.shared_weights else (x, y, weight)
        if all(tensor.ndim == 2 and tensor.shape[0] == x.shape[0] for tensor in batched):
            return self._run_rows(x, y, weight)
        try:
            batch = torch.broadcast_shapes(*(tensor.shape[:-1] for tensor in batched))
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batched)
            raise InputError(f"leading dimensions of the shapes {shapes} do not broadcast") from error
        rows = [tensor.expand(*batch, tensor.shape[-1]).reshape(batch.numel(), tensor.shape[-1]) for tensor in batched]
        out = self._run_rows(rows[0], rows[1], weight if self.shared_weights else rows[2])
        return out.reshape(*batch, dim_out)

    def _run_rows(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        operator = self._operator_of(x, rows, rows) if self._matrix is None else self._matrix
        return operator(x, y, weight)

    @property
    def tuning(self) -> dict[str, Tuning]:
        """As in every module; with ``contraction="matrix"``, of the kernels that form the pairs."""
        return super().tuning if self._matrix is None else self._matrix.tuning

    def tuning_for(self, graph_class: GraphClass | str | None) -> dict[str, Tuning]:
        """As in every module; with ``contraction="matrix"``, of the kernels that form the pairs."""
        return super().tuning_for(graph_class) if self._matrix is None else self._matrix.tuning_for(graph_class)

    def right(self, y: torch.Tensor, weight: Weight = None) -> torch.Tensor:
        """The matrix that maps x to the product: y ``[..., dim_in2]`` -> ``[..., dim_in1, dim_out]``.

        Computed as the product with every unit vector for x.
        """
        weight = self._weight_for(weight)
        rows = torch.eye(self._dims[0], dtype=y.dtype, device=y.device)
        return self.forward(rows, y.unsqueeze(-2), weight if self.shared_weights else weight.unsqueeze(-2))
