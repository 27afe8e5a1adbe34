"""Modules whose rows do not depend on each other: spherical harmonics of vectors, symmetric contractions of nodes.

Operators are looked up by device, dtype and number of rows (:class:`TunedRows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autotune.database.lookup import directions_inside
from autotune.database.misses import asked
from autotune.modules.base import Found, TunedModule, autocast
from autotune.modules.convolution import TensorProductConv
from autotune.workload.kind import Problem
from autotune.workload.workload import LAYOUTS, GraphClass
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.compat import constant_result, o3
from kernelgen.device import device_facts
from kernelgen.errors import ProblemError, TuningMissError, UnsupportedError
from kernelgen.ops.base import DTYPES, OPERATORS
from kernelgen.ops.harmonics import FUSED, HarmonicProduct, HarmonicsOperator, build_harmonics
from kernelgen.ops.product import Operator
from kernelgen.ops.symmetric_contraction import ContractionOperator, build_contraction
from kernelgen.problem.irreps import Irreps, parse_irreps
from kernelgen.problem.other_kinds import (
    MAX_DEGREE,
    NORMALIZATIONS,
    ContractionProblem,
    HarmonicsProblem,
    VectorProblem,
)
from kernelgen.problem.product import size_class

# What determines a module's operators: the problem's key, the graph class ("" for any), strict and the layout.
Key: TypeAlias = tuple[str, str, bool | None, str]


def build_rows(
    problem: Problem, layout: str, device: torch.device, dtype: torch.dtype, found: Found
) -> HarmonicsOperator | ContractionOperator:
    """The operator of harmonics or of a contraction, by what a lookup found; TuningMissError for what it refused."""
    for miss in found.refused.values():
        raise TuningMissError(miss)
    made: HarmonicsOperator | ContractionOperator
    if isinstance(problem, ContractionProblem):
        made = build_contraction(problem, found.schedules, layout=layout, dtype=dtype, device=device)
    else:
        assert isinstance(problem, HarmonicsProblem)
        made = build_harmonics(problem, found.schedules, dtype=dtype, device=device)
    asked(made)
    return made


class TunedRows(TunedModule):
    """A module that takes the schedules tuned for its device, dtype and number of rows."""

    _inputs = "x is"
    _key: Key

    def _set_problem(self, problem: Problem, num_rows: int | None, strict: bool | None, name: str) -> None:
        """num_rows: take the schedules for about this number in every call; ``name``: of that argument."""
        if num_rows is not None and (type(num_rows) is not int or num_rows < 1):
            raise ProblemError(f"{name} is {num_rows!r}; expected a positive integer, or None for many")
        self.problem = problem
        graph_class = GraphClass.of(self.operation, num_rows, 1).text if num_rows else ""
        self._key = (problem.key, graph_class, strict, self.layout)
        self._forget_operators()

    def _forget_operators(self) -> None:
        # Pickles of version 0.2 have the key alone, and in it no layout.
        key, graph_class, self.strict = self._key[:3]
        self._key = key, graph_class, self.strict, self.layout
        self.graph_class = GraphClass.parse(graph_class) if graph_class else None
        super()._forget_operators()

    def operator_for(self, device: torch.device, dtype: torch.dtype, num_rows: int | None) -> Any:
        """The operator for about this number of rows, None for many; built if needed."""
        size = None if self._has_one_size or num_rows is None else size_class(num_rows, num_rows)
        return self._use(device, dtype, size).operator

    def _build(self, device: torch.device, dtype: torch.dtype, found: Found) -> Any:
        return build_rows(self.problem, self.layout, device, dtype, found)


# Spherical harmonics as a module and a function with e3nn's interface. First and second derivatives work; the second
# derivative of a normalised vector is 0 at the zero vector, where torch gives nan.

Degrees: TypeAlias = "int | Iterable[int] | str | o3.Irreps"


def _vector(irreps_out: Degrees, irreps_in: Any) -> o3.Irreps:
    """The input's irreps, ``1x1o`` or ``1x1e``: as given, or inferred from irreps_out's parities as e3nn does."""
    if irreps_in is None:
        even = isinstance(irreps_out, o3.Irreps) and any(ir.l % 2 == 1 and ir.p == 1 for _, ir in irreps_out)
        return o3.Irreps("1x1e" if even else "1x1o")
    parsed = parse_irreps(irreps_in, "irreps_in")
    if str(parsed) not in ("1x1o", "1x1e"):
        raise ProblemError(f"irreps_in is {parsed}; expected a vector (1x1o) or a pseudovector (1x1e)")
    return parsed


def _degrees(irreps_out: Degrees, parity: int) -> list[int]:
    """The degree of each block for an input of that parity, repeated by multiplicity."""
    if not isinstance(irreps_out, o3.Irreps):
        try:
            given = irreps_out if isinstance(irreps_out, Iterable) else [irreps_out]
            return [index(degree) for degree in given]  # type: ignore[arg-type]
        except TypeError as error:
            raise ProblemError(
                f"irreps_out is {irreps_out!r}; expected a degree, a list of degrees or irreps such as '0e + 1o'"
            ) from error
    degrees = []
    for mul, ir in irreps_out:
        if ir.p != parity**ir.l:
            raise ProblemError(
                f"irreps_out is {irreps_out}: {ir} has parity {ir.p}, but harmonics of degree {ir.l} of an input of "
                f"parity {parity} have parity {parity**ir.l}; change the parity in irreps_out, or irreps_in"
            )
        degrees += [ir.l] * mul
    return degrees


class SphericalHarmonics(TunedRows):
    """``e3nn.o3.SphericalHarmonics``, x ``[..., 3]`` -> ``[..., irreps_out.dim]``, from a generated kernel.

    irreps_out: a degree, a list of degrees, or irreps, whose parities must be those of the harmonics of irreps_in.
    normalize: whether to divide x by its length first. normalization: a block's length on the sphere is
    sqrt((2l+1) / 4 pi) (``integral``), sqrt(2l+1) (``component``) or 1 (``norm``). irreps_in: ``1o`` or ``1e``; None
    means 1e if irreps_out has an odd degree of even parity, else 1o. num_vectors: take the schedules tuned for about
    this number of vectors in every call (None: for as many as the call has). strict: raise TuningMissError at the first
    call unless schedules were tuned on this device; None reads ``$EQUITUNE_STRICT``.

    The attributes irreps_in, irreps_out, normalize and normalization are e3nn's. Raises ProblemError where e3nn raises
    ValueError, and UnsupportedError for degrees above 12.
    """

    operation = "harmonics"
    problem: HarmonicsProblem

    def __init__(
        self,
        irreps_out: Degrees,
        normalize: bool,
        normalization: str = "integral",
        irreps_in: Any = None,
        *,
        num_vectors: int | None = None,
        strict: bool | None = None,
    ) -> None:
        super().__init__()
        if isinstance(irreps_out, str | o3.Irreps):
            irreps_out = parse_irreps(irreps_out, "irreps_out")
        if normalization not in NORMALIZATIONS:
            raise ProblemError(f"normalization is {normalization!r}; choose one of {NORMALIZATIONS}")
        self.normalize = bool(normalize)
        self.normalization = normalization
        self.irreps_in = _vector(irreps_out, irreps_in)
        parity = self.irreps_in[0].ir.p
        degrees = _degrees(irreps_out, parity)
        if max(degrees, default=0) > MAX_DEGREE:
            raise UnsupportedError(
                f"irreps_out has degree {max(degrees)}; harmonics are generated up to degree {MAX_DEGREE}, "
                "as e3nn's are"
            )
        problem = HarmonicsProblem(tuple(degrees), normalization, self.normalize)
        self._set_problem(problem, num_vectors, strict, "num_vectors")
        self.irreps_out = o3.Irreps([(1, (degree, parity**degree)) for degree in degrees]).simplify()
        # e3nn's names.
        self._ls_list = degrees
        self._lmax = max(degrees)
        self._is_range_lmax = degrees == list(range(max(degrees) + 1))

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., 3]`` -> ``[..., irreps_out.dim]``; InputError for other shapes and for dtypes but float32, float64.

        Under ``torch.autocast`` a half precision x is converted to float32, and the result is float32.
        """
        (x,) = autocast(x)
        rows = x.numel() // 3
        return self._operator_of(x, rows, rows)(x)


_MODULES: dict[tuple[str, bool, str], SphericalHarmonics] = {}


def spherical_harmonics(
    l: Degrees,  # noqa: E741  (e3nn's name)
    x: Tensor,
    normalize: bool,
    normalization: str = "integral",
) -> Tensor:
    """``e3nn.o3.spherical_harmonics``: harmonics ``[..., dim]`` of x ``[..., 3]``, with the module's arguments."""
    (x,) = autocast(x)
    if torch.compiler.is_compiling():
        return OPERATORS[_text_of(l, normalize, normalization, x.device, x.dtype)](x)
    return _module(l, normalize, normalization)(x)


def _module(degrees: Degrees, normalize: bool, normalization: str) -> SphericalHarmonics:
    """The module with these arguments, made once."""
    key = (f"{type(degrees).__name__} {degrees}", bool(normalize), normalization)
    found = _MODULES.get(key)
    if found is None:
        found = _MODULES[key] = SphericalHarmonics(degrees, normalize, normalization)
    return found


@constant_result
def _text_of(degrees: Degrees, normalize: bool, normalization: str, device: torch.device, dtype: torch.dtype) -> str:
    module = _module(degrees, normalize, normalization)
    return module._operator_text(module._key, device, dtype)


# Convolution on edge vectors, which forms their spherical harmonics inside its kernels.
#
# :class:`SphericalHarmonicsConv` takes edge vectors where :class:`TensorProductConv` takes their harmonics. It gives
# gradients with respect to the vectors, from which models compute forces.


class SphericalHarmonicsConv(TensorProductConv):
    """``TensorProductConv(irreps_in1, harmonics.irreps_out, ...)`` of the harmonics of edge vectors.

    harmonics: degrees, normalisation and whether vectors are normalised first. fuse: True forms the harmonics of an
    edge in registers, inside the kernels of the value and first gradients, and never writes them to memory; False
    computes them in separate kernels. None, the default, chooses for each direction what measured faster for this
    problem, device and graph class, and fuses where nothing was measured. Harmonics are always separate for gradients
    that are differentiated again, torch.compile, torch.func, and products other than weighted ``uvu`` with one copy of
    each degree. Results agree to rounding. The other arguments are those of :class:`TensorProductConv`.
    """

    def __init__(
        self, irreps_in1: Irreps, harmonics: SphericalHarmonics, *args: Any, fuse: bool | None = None, **options: Any
    ) -> None:
        # Built once the harmonics are there.
        place = options.pop("device", None), options.pop("dtype", None)
        super().__init__(irreps_in1, harmonics.irreps_out, *args, **options)
        self.harmonics = harmonics
        self.fuse = fuse
        self._build_for(*place)

    def forward(  # type: ignore[override]
        self,
        node_feats: Tensor,
        edge_vectors: Tensor,
        weights: Tensor,
        sender: Tensor,
        receiver: Tensor,
        **graph: Any,
    ) -> Tensor:
        """As in :class:`TensorProductConv`, with edge_vectors ``[edges, 3]`` for edge_attrs; same keyword arguments."""
        return super().forward(node_feats, edge_vectors, weights, sender, receiver, **graph)

    def _run(self, operator: Any, x: Tensor, y: Tensor, w: Tensor, *edges: Tensor, **graph: Any) -> Tensor:
        if isinstance(operator, Operator):  # torch traces this call
            y = self.harmonics(y)
        return operator(x, y, w, *edges, **graph)

    def _run_by(self, operator: Operator, graph_class: GraphClass | None, device: torch.device) -> HarmonicProduct:
        vectors = None if graph_class is None else 2**graph_class.log2_edges
        harmonics = self.harmonics.operator_for(device, operator.dtype, vectors)
        return HarmonicProduct(operator, harmonics, self._inside(operator, harmonics, graph_class, device))

    def _inside(
        self,
        operator: Operator,
        harmonics: HarmonicsOperator,
        graph_class: GraphClass | None,
        device: torch.device,
    ) -> Sequence[str]:
        if self.fuse is not None or not self.problem.is_channelwise:
            return FUSED if self.fuse else ()
        problem = VectorProblem(self.problem, harmonics.problem)
        where = (DTYPES[operator.dtype], self.layout, device_facts(device), graph_class)
        return directions_inside(problem, *where, self.strict)


# MACE's symmetric contraction as a module, from generated kernels with the schedules tuned for the device.
#
# :class:`TunedContraction` has no parameters: it contracts features with weights in the order of
# ``kernelgen.arithmetic.contraction_couplings``. :class:`SymmetricContraction` has the weights.


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
        rows = x.shape[0]
        return self._operator_of(x, rows, rows)(x, w, elements)


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
