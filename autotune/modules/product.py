"""The edge-by-edge tensor product, with e3nn's interface.

Kernels follow e3nn's conventions: real spherical harmonics basis, ``component`` irreps, a path's weights are its
channels, in instruction order. First and second derivatives work in every input, and so do Hessians times vectors
(``torch.autograd.functional.hvp``).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from autotune.database.lookup import Tuning
from autotune.modules.base import Schedules, TunedProduct, autocast
from autotune.modules.convolution import TensorProductConv  # noqa: F401 (pickles of version 0.2 name it here)
from autotune.workload.workload import GraphClass, relayout
from kernelgen.compat import o3
from kernelgen.errors import InputError, ProblemError
from kernelgen.ops.tall_products import full_product
from kernelgen.problem.irreps import Irreps, parse_irreps
from kernelgen.problem.product import TensorProductProblem, problem_of

# Contract shared weights by torch's matrix product.
#
# If every path is of mode ``uvw`` and all edges share one row of weights, the weights are matrices common to all edges.
# An edge-by-edge kernel reads all of them for each edge. Here a kernel forms only the *pairs* of copies (the product of
# mode ``uvuv``), and torch multiplies them by the weights:
#
#     z[e, m, (u, v)] = sum over m1, m2 of C[m1, m2, m] x[e, u, m1] y[e, v, m2]
#     out[e, m, w]    = sum over paths and (u, v) of z[e, m, (u, v)] W[(u, v), w]
#
# The matrix product runs on tensor cores if torch allows it, with torch's accuracy
# (``torch.backends.cuda.matmul.fp32_precision``). It needs memory for z, as e3nn does. The kernel writes each pair at
# once and keeps none.

CONTRACTIONS = ("auto", "edge", "matrix")
# From this number of weights "auto" uses the matrix product. On two cores of a Xeon (float32, forward and backward) it
# is as fast as edge by edge at 8192 weights, 2.3 times as fast at 327680. On a GPU: an estimate, each row reads 128 kB
# from L2.
MATRIX_WEIGHTS = 1 << 15


def by_matrix(problem: TensorProductProblem, contraction: str) -> bool:
    """Whether to use the matrix product; ProblemError for a contraction unknown or undefined for the problem."""
    if contraction not in CONTRACTIONS:
        raise ProblemError(f"contraction is {contraction!r}; expected one of {CONTRACTIONS}")
    paths = problem.paths
    able = problem.shared_weights and bool(paths) and all(path.mode == "uvw" and path.has_weight for path in paths)
    if contraction == "matrix" and not able:
        raise ProblemError("contraction='matrix' needs shared weights and mode uvw alone; take 'auto' or 'edge'")
    if contraction != "auto":
        return contraction == "matrix"
    return able and problem.weight_numel >= MATRIX_WEIGHTS


def pairs_of(problem: TensorProductProblem) -> TensorProductProblem:
    """The unweighted product that forms the pairs of every path, one block per path, with the path's coefficient."""
    blocks, instructions = [], []
    for number, path in enumerate(problem.paths):
        mul1, mul2, _ = problem.muls(path)
        blocks.append((mul1 * mul2, o3.Irreps(problem.irreps_out)[path.out].ir))
        # Without normalisation a path's coefficient is the square root of e3nn's path weight.
        instructions.append((path.in1, path.in2, number, "uvuv", False, path.coefficient**2))
    return TensorProductProblem.from_instructions(
        *(problem.irreps_in1, problem.irreps_in2, o3.Irreps(blocks), instructions),
        shared_weights=True,
        irrep_normalization="none",
        path_normalization="none",
    )


class MatrixContraction(TunedProduct):
    """Called like an operator: x [edges, dim_in1], y [edges, dim_in2], w [weight_numel] -> [edges, dim_out].

    Its ``problem`` is that of the pairs. layout: of x and of the result.
    """

    operation = "plain"

    def __init__(self, whole: TensorProductProblem, *, layout: str, **options: Any) -> None:
        super().__init__(pairs_of(whole), layout="ir_mul", **options)
        self._outer_layout = layout
        self._irreps = whole.irreps_in1, whole.irreps_out
        # For each path: its output block, the shape of its matrix (pairs, copies), and its components.
        self._paths = [
            (path.out, (mul1 * mul2, mul3), whole.out[path.out].dim)
            for path in whole.paths
            for mul1, mul2, mul3 in [whole.muls(path)]
        ]
        self._out_dims = [block.mul * block.dim for block in whole.out]

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if w.dtype != x.dtype or w.device != x.device:
            raise InputError(f"weights are {w.dtype} on {w.device} and x is {x.dtype} on {x.device}; expected the same")
        irreps_in1, irreps_out = self._irreps
        x = relayout(x, irreps_in1, self._outer_layout, "ir_mul")
        z = self._operator_of(x, x.shape[0], x.shape[0])(x, y, w[:0])
        found: list[torch.Tensor | None] = [None] * len(self._out_dims)
        parts = z.split([dim * pairs for _, (pairs, _), dim in self._paths], 1)
        matrices = w.split([pairs * copies for _, (pairs, copies), _ in self._paths])
        for part, matrix, (out, shape, dim) in zip(parts, matrices, self._paths, strict=True):
            values = full_product(part.reshape(z.shape[0], dim, shape[0]), matrix.reshape(shape))
            before = found[out]
            found[out] = values if before is None else before + values
        rows = [
            z.new_zeros(z.shape[0], dim) if values is None else values.reshape(z.shape[0], dim)
            for dim, values in zip(self._out_dims, found, strict=True)
        ]
        return relayout(torch.cat(rows, 1), irreps_out, "ir_mul", self._outer_layout)


# Save and load checkpoints with e3nn's names: ``weight``, ``output_mask`` and the constants of e3nn's code.

# e3nn keeps generated code as submodules, with the Wigner 3j symbols as their buffers.
CODE = ("_compiled_main_left_right.", "_compiled_main_right.")


@functools.lru_cache(maxsize=256)
def _constants(problem: TensorProductProblem, options: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The constants that e3nn's module of a problem adds to its checkpoints."""
    names = ("compile_left_right", "compile_right", "_specialized_code", "_optimize_einsums")
    module = problem.reference(**dict(zip(names, options, strict=True)))
    return {name: tensor for name, tensor in module.state_dict().items() if name.startswith(CODE)}


def output_mask(instructions: Any, irreps_out: Any) -> torch.Tensor:
    """Ones where at least one path adds to the result, as in e3nn."""
    reached = {i.i_out for i in instructions if i.path_weight != 0 and 0 not in i.path_shape}
    masks = [torch.full((mul * ir.dim,), float(block in reached)) for block, (mul, ir) in enumerate(irreps_out)]
    return torch.cat(masks) if masks else torch.ones(0)


class E3nnCheckpoints(torch.nn.Module):
    """A module with a ``problem`` and the buffer ``output_mask``, whose checkpoints have e3nn's format.

    Constants of e3nn's code are written for e3nn, and ignored when read. Checkpoints of older Equitune versions
    without ``output_mask`` load too.
    """

    problem: TensorProductProblem
    output_mask: torch.Tensor
    # The arguments that concern e3nn's generated code.
    _code_options: tuple[Any, ...]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, constant in _constants(self.problem, self._code_options).items():
            destination[prefix + name] = constant.to(self.output_mask)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        code = tuple(prefix + name for name in CODE)
        known = {name: value for name, value in state_dict.items() if not name.startswith(code)}
        known.setdefault(prefix + "output_mask", self.output_mask)
        super()._load_from_state_dict(known, prefix, *arguments)


Weight: TypeAlias = "torch.Tensor | list[torch.Tensor] | None"


def check_last(name: str, tensor: torch.Tensor, expected: int) -> None:
    if tensor.ndim == 0 or tensor.shape[-1] != expected:
        raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected a last dimension of {expected}")


Variances: TypeAlias = "Sequence[float] | torch.Tensor | None"


class TensorProduct(E3nnCheckpoints, TunedProduct):
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
        ``autotune.modules.product``. ``auto``: ``matrix`` from 2**15 weights on unless a schedule is given.
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
        instructions: Iterable[Sequence[Any]],
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
        shared = True if shared_weights is None else shared_weights
        problem = TensorProductProblem.from_instructions(
            *(irreps_in1, irreps_in2, irreps_out, instructions),
            shared_weights=shared,
            irrep_normalization=irrep_normalization,
            path_normalization=path_normalization,
        )
        if in1_var is not None or in2_var is not None or out_var is not None:
            # Path weights also compensate the variances of the blocks, as in e3nn.
            variances = {"in1_var": in1_var, "in2_var": in2_var, "out_var": out_var}
            try:
                problem = problem_of(problem.reference(**variances, compile_left_right=False))
            except AssertionError as error:
                raise ProblemError(f"in1_var, in2_var and out_var need one variance for each block: {error}") from error
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

    def weight_view_for_instruction(self, instruction: int, weight: Weight = None) -> torch.Tensor:
        """The weights of one instruction, a view ``[..., *path_shape]`` of ``weight`` or of the internal ones.

        ValueError, as in e3nn, for an instruction without weights.
        """
        if not self.instructions[instruction].has_weight:
            raise ValueError(f"instruction {instruction} has no weights; those of e3nn's has_weight=True have some")
        views = self.weight_views(weight, yield_instruction=True)
        return next(view for number, _, view in views if number == instruction % len(self.instructions))

    def weight_views(self, weight: Weight = None, yield_instruction: bool = False) -> Iterator[Any]:
        """The weights of each instruction that has some, or (number, instruction, weights), as in e3nn."""
        weight, offset = self._weight_for(weight), 0
        for number, instruction in enumerate(self.instructions):
            if not instruction.has_weight:
                continue
            size = math.prod(instruction.path_shape)
            view = weight.narrow(-1, offset, size).view(*weight.shape[:-1], *instruction.path_shape)
            offset += size
            yield (number, instruction, view) if yield_instruction else view

    def _weight_for(self, weight: Weight) -> torch.Tensor:
        if isinstance(weight, list):
            weight = self._as_one_row(weight)
        if weight is None:
            if self.weight_numel > 0 and not self.internal_weights:
                raise InputError(f"weight is missing; expected {self.weight_numel} weights, there are no internal ones")
            # No paths, no weights: any empty row works.
            return self.weight if self.shared_weights else self.weight.reshape(1, 0)
        check_last("weight", weight, self.weight_numel)
        if (weight.ndim == 1) is not self.shared_weights:
            wanted = f"({self.weight_numel},)" if self.shared_weights else f"(..., {self.weight_numel}), a row an edge"
            raise InputError(f"weight has shape {tuple(weight.shape)}; expected {wanted}")
        return weight

    def _as_one_row(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """Join weights given as one tensor per path, ``[..., *path_shape]`` or ``[..., numel]``."""
        shapes = [instruction.path_shape for instruction in self.instructions if instruction.has_weight]
        if len(weights) != len(shapes):
            raise InputError(f"{len(weights)} tensors of weights were given; expected {len(shapes)}, one a path")
        rows = []
        for given, shape in zip(weights, shapes, strict=True):
            if tuple(given.shape[-len(shape) :]) == shape:
                rows.append(given.flatten(-len(shape)))
            elif given.shape[-1:] == (math.prod(shape),):
                rows.append(given)
            else:
                raise InputError(f"weights of a path have shape {tuple(given.shape)}; expected (..., *{shape})")
        return torch.cat(rows, -1)

    def right(self, y: torch.Tensor, weight: Weight = None) -> torch.Tensor:
        """The matrix that maps x to the product: y ``[..., dim_in2]`` -> ``[..., dim_in1, dim_out]``.

        Computed as the product with every unit vector for x.
        """
        weight = self._weight_for(weight)
        rows = torch.eye(self._dims[0], dtype=y.dtype, device=y.device)
        return self.forward(rows, y.unsqueeze(-2), weight if self.shared_weights else weight.unsqueeze(-2))


# e3nn's fully connected, elementwise and full tensor products, from generated kernels.
#
# Each takes e3nn's arguments in e3nn's order and with its defaults, then those of :class:`autotune.TensorProduct`. The
# paths come from e3nn's class, so irreps are split, ordered and named as there.


class _ReadyMade(TensorProduct):
    """A product whose output or paths follow from its arguments."""

    def _connect(self, kind: str, irreps: tuple[Irreps, ...], given: dict[str, Any]) -> dict[str, Any]:
        """Irreps and instructions that e3nn's class of that name derives, as arguments of the base class."""
        names = ("irreps_in1", "irreps_in2", "irreps_out")
        parsed = [parse_irreps(text, name) for text, name in zip(irreps, names, strict=False)]
        try:
            made = getattr(o3, kind)(*parsed, compile_left_right=False, internal_weights=False, **given)
        except (AssertionError, ValueError) as error:
            shown = ", ".join(map(str, parsed))
            raise ProblemError(f"{kind}({shown}): {str(error) or 'the irreps do not fit each other'}") from error
        paths = [(i.i_in1, i.i_in2, i.i_out, i.connection_mode, i.has_weight) for i in made.instructions]
        return dict(
            zip((*names, "instructions"), (made.irreps_in1, made.irreps_in2, made.irreps_out, paths), strict=True)
        )


class FullyConnectedTensorProduct(_ReadyMade):
    """``e3nn.o3.FullyConnectedTensorProduct``: every allowed path of mode ``uvw``, weighted.

    irreps_in1, irreps_in2, irreps_out: of both inputs and the result.
    irrep_normalization, path_normalization, options: as in :class:`autotune.TensorProduct`.
    Raises ProblemError for irreps that are not well-defined.
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
            **self._connect("FullyConnectedTensorProduct", (irreps_in1, irreps_in2, irreps_out), {}),
            irrep_normalization=irrep_normalization,
            path_normalization=path_normalization,
            **options,
        )


class _OfInputs(_ReadyMade):
    """A product without weights whose output irreps follow from both inputs."""

    _kind: str

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        filter_ir_out: Iterable[str | o3.Irrep] | None = None,
        irrep_normalization: str | None = None,
        **options: Any,
    ) -> None:
        found = self._connect(self._kind, (irreps_in1, irreps_in2), {"filter_ir_out": filter_ir_out})
        super().__init__(**found, irrep_normalization=irrep_normalization, **options)


class ElementwiseTensorProduct(_OfInputs):
    """``e3nn.o3.ElementwiseTensorProduct``: copy u of one input times copy u of the other, without weights.

    irreps_in1, irreps_in2: equally many irreps. filter_ir_out: irreps of the result, all by default.
    Raises ProblemError if the inputs differ in their number of irreps.
    """

    _kind = "ElementwiseTensorProduct"


class FullTensorProduct(_OfInputs):
    """``e3nn.o3.FullTensorProduct``: every copy of one input times every copy of the other, without weights.

    irreps_in1, irreps_in2: of both inputs; the result's irreps follow, sorted. filter_ir_out: irreps of the result, all
    by default.
    """

    _kind = "FullTensorProduct"
