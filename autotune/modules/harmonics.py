"""Spherical harmonics as a module and a function with e3nn's interface, from generated kernels.

Operators are looked up by device, dtype and number of vectors (:class:`TunedRows`). First and second derivatives work.
The second derivative of a normalised vector is 0 at the zero vector, where torch gives nan.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from autotune.database.lookup import directions_inside
from autotune.modules.base import autocast
from autotune.modules.convolution import Key, TensorProductConv, TunedRows, operator_text
from autotune.workload.workload import GraphClass
from kernelgen.compat import constant_result, o3
from kernelgen.device import device_facts
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.ops.base import DTYPES, OPERATORS
from kernelgen.ops.harmonics import FUSED, HarmonicProduct, HarmonicsOperator
from kernelgen.ops.product import Operator
from kernelgen.problem.irreps import Irreps, parse_irreps
from kernelgen.problem.other_kinds import MAX_DEGREE, NORMALIZATIONS, HarmonicsProblem, VectorProblem

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
            return [operator.index(degree) for degree in given]  # type: ignore[arg-type]
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x ``[..., 3]`` -> ``[..., irreps_out.dim]``; InputError for other shapes and for dtypes but float32, float64.

        Under ``torch.autocast`` a half precision x is converted to float32, and the result is float32.
        """
        (x,) = autocast(x)
        return self._operator_of(x.device, x.dtype, x.numel() // 3)(x)


_MODULES: dict[tuple[str, bool, str], SphericalHarmonics] = {}


def spherical_harmonics(
    l: Degrees,  # noqa: E741  (e3nn's name)
    x: torch.Tensor,
    normalize: bool,
    normalization: str = "integral",
) -> torch.Tensor:
    """``e3nn.o3.spherical_harmonics``: harmonics ``[..., dim]`` of x ``[..., 3]``, with the module's arguments."""
    (x,) = autocast(x)
    if torch.compiler.is_compiling():
        key = _module_key(l, normalize, normalization)
        return OPERATORS[operator_text("harmonics", "mul_ir", key, x.device, x.dtype)](x)
    return _module(l, normalize, normalization)(x)


def _module(degrees: Degrees, normalize: bool, normalization: str) -> SphericalHarmonics:
    """The module with these arguments, made once."""
    key = (f"{type(degrees).__name__} {degrees}", bool(normalize), normalization)
    found = _MODULES.get(key)
    if found is None:
        found = _MODULES[key] = SphericalHarmonics(degrees, normalize, normalization)
    return found


@constant_result
def _module_key(degrees: Degrees, normalize: bool, normalization: str) -> Key:
    return _module(degrees, normalize, normalization)._key


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
        node_feats: torch.Tensor,
        edge_vectors: torch.Tensor,
        weights: torch.Tensor,
        sender: torch.Tensor,
        receiver: torch.Tensor,
        **graph: Any,
    ) -> torch.Tensor:
        """As in :class:`TensorProductConv`, with edge_vectors ``[edges, 3]`` for edge_attrs; same keyword arguments."""
        return super().forward(node_feats, edge_vectors, weights, sender, receiver, **graph)

    def _run(
        self, operator: Any, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *edges: torch.Tensor, **graph: Any
    ) -> torch.Tensor:
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
