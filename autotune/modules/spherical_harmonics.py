"""Spherical harmonics as a module and a function with e3nn's interface, from generated kernels.

An operator is looked up and built at the first call with a device, dtype and number of vectors (rounded to a power of
two), and kept. First and second derivatives
work. The second derivative of a normalised vector is 0 at the zero vector, where torch gives nan.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch

from autotune.database.lookup import Tuning
from autotune.database.misses import asked
from autotune.errors import TuningMissError
from autotune.modules.base import NoTorchScript, autocast, check_dtype, or_default, outside_of_traces
from autotune.modules.sizes import Found, Lookup
from autotune.workload.graph_class import GraphClass
from kernelgen.device import device_facts
from kernelgen.e3nn_import import o3
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.ops.harmonics_operator import HarmonicsOperator, build_harmonics
from kernelgen.ops.registry import OPERATORS
from kernelgen.plan.size_class import size_class
from kernelgen.problem.irreps import parse_irreps
from kernelgen.problem.spherical_harmonics import MAX_DEGREE, NORMALIZATIONS, HarmonicsProblem
from kernelgen.terms.directions import HARMONICS_DIRECTIONS

Degrees: TypeAlias = "int | Iterable[int] | str | o3.Irreps"
_VECTORS = (o3.Irreps("1x1o"), o3.Irreps("1x1e"))
# Everything that determines a module's operators: the problem's key, the graph class ("" for any), strict.
_Key: TypeAlias = tuple[str, str, bool | None]


class _Built(NamedTuple):
    """What was built for a device, dtype and rounded logarithm of the number of vectors (None: the module's own)."""

    size: int | None
    operator: HarmonicsOperator
    tuning: dict[str, Tuning]


def _size(num_vectors: int) -> int:
    return size_class(num_vectors, num_vectors)[0]


def _vector(irreps_out: Degrees, irreps_in: Any) -> o3.Irreps:
    """The input's irreps, ``1x1o`` or ``1x1e``: as given, or inferred from irreps_out's parities as e3nn does."""
    if irreps_in is None:
        even = isinstance(irreps_out, o3.Irreps) and any(ir.l % 2 == 1 and ir.p == 1 for _, ir in irreps_out)
        return _VECTORS[even]
    parsed = parse_irreps(irreps_in, "irreps_in")
    if parsed not in _VECTORS:
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


class SphericalHarmonics(NoTorchScript):
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
        self.problem = HarmonicsProblem(tuple(degrees), normalization, self.normalize)
        if num_vectors is not None and (type(num_vectors) is not int or num_vectors < 1):
            raise ProblemError(f"num_vectors is {num_vectors!r}; expected a positive integer, or None for many")
        graph_class = GraphClass.of("harmonics", num_vectors, 1).text if num_vectors else ""
        # torch.compile compares it before it reuses one module's code for another.
        self._key: _Key = (self.problem.key, graph_class, strict)
        self.irreps_out = o3.Irreps([(1, (degree, parity**degree)) for degree in degrees]).simplify()
        # e3nn's names.
        self._ls_list = degrees
        self._lmax = max(degrees)
        self._is_range_lmax = degrees == list(range(max(degrees) + 1))
        self._forget_operators()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x ``[..., 3]`` -> ``[..., irreps_out.dim]``; InputError for other shapes and for dtypes but float32, float64.

        Under ``torch.autocast`` a half precision x is converted to float32, and the result is float32.
        """
        (x,) = autocast(x)
        numbers, met, size = x.numel(), self._met, None
        if torch.compiler.is_compiling() or type(numbers) is not int:
            return OPERATORS[_operator_text(self._key, x.device, x.dtype)](x)
        if met is not None and met[1] is x.dtype and met[0] == x.device:
            if met[2] == numbers or self._has_one_size:
                return met[3].operator(x)
            size = _size(numbers // 3)
            if size == met[3].size:
                return met[3].operator(x)
        elif not self._has_one_size:
            size = _size(numbers // 3)
        return self._use(x.device, x.dtype, size, numbers).operator(x)

    @property
    def tuning(self) -> dict[str, Tuning]:
        """By direction: schedule, origin, database entry and reason, for the operator used last.

        Before the first call: what would be loaded on torch's default device and dtype, for many vectors unless their
        number was given.
        """
        return dict(self._met[3].tuning) if self._met else self.tuning_for(self._key[1] or None)

    def tuning_for(self, graph_class: GraphClass | str | None) -> dict[str, Tuning]:
        """The same for as many vectors as in a class such as ``harmonics-e14``, on the device and dtype used last."""
        parsed = GraphClass.parse(graph_class) if isinstance(graph_class, str) else graph_class
        if parsed is not None and parsed.operation != "harmonics":
            raise ProblemError(f"graph_class is {parsed.text!r}; expected one of harmonics")
        return _found(self._key, *(self._met[:2] if self._met else or_default(None, None)), parsed).tuning

    def operator_for(self, device: torch.device, dtype: torch.dtype, num_vectors: int | None) -> HarmonicsOperator:
        """The operator for about this number of vectors, None for many; built if needed."""
        size = None if self._has_one_size or num_vectors is None else _size(num_vectors)
        return self._use(device, dtype, size).operator

    def _use(self, device: torch.device, dtype: torch.dtype, size: int | None, numbers: int = -1) -> _Built:
        """What a size class uses, built if needed; the next call on as many numbers finds it at once.

        size: None for the number of vectors that the module was told, or many.
        """
        built = self._operators.get((device, dtype, size))
        if built is None:
            graph_class = GraphClass.parse(self._key[1]) if self._key[1] else None
            with outside_of_traces():
                found = _found(self._key, device, dtype, graph_class if size is None else GraphClass("harmonics", size))
                built = _Built(size, _build(self._key, device, dtype, found), found.tuning)
            self._operators[device, dtype, size] = built
        self.__dict__["_met"] = (device, dtype, numbers, built)
        return built

    @property
    def _operator(self) -> HarmonicsOperator | None:
        return self._met[3].operator if self._met else None

    def _forget_operators(self) -> None:
        self._operators: dict[tuple[torch.device, torch.dtype, int | None], _Built] = {}
        # Device, dtype and numbers in the input of a call, and what it used.
        self._met: tuple[torch.device, torch.dtype, int, _Built] | None = None
        self._has_one_size = self._key[1] != ""

    def __getstate__(self) -> dict[str, Any]:
        # Loaded kernels belong to this process. A copy builds its own from the compile cache at its first call.
        return {name: value for name, value in self.__dict__.items() if name not in ("_operators", "_met")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_operators()


def _lookup(key: _Key, device: torch.device, dtype: torch.dtype) -> Lookup:
    check_dtype("x is", dtype)
    kernel = (HarmonicsProblem.from_key(key[0]), "harmonics", str(dtype), "mul_ir", device_facts(device))
    return Lookup(kernel, tuple(HARMONICS_DIRECTIONS), {}, key[2])


def _found(key: _Key, device: torch.device, dtype: torch.dtype, graph_class: GraphClass | None) -> Found:
    return _lookup(key, device, dtype).find(graph_class)


def _build(key: _Key, device: torch.device, dtype: torch.dtype, found: Found) -> HarmonicsOperator:
    for miss in found.refused.values():
        raise TuningMissError(miss)
    operator = build_harmonics(HarmonicsProblem.from_key(key[0]), found.schedules, dtype=dtype, device=device)
    asked(operator)
    return operator


@torch.compiler.assume_constant_result
def _operator_text(key: _Key, device: torch.device, dtype: torch.dtype) -> str:
    """The name under which the operator is registered: of a family, if schedules depend on the number of vectors.

    Lookup and build happen here, untraced.
    """
    lookup = _lookup(key, device, dtype)
    with outside_of_traces():
        if key[1]:
            return _build(key, device, dtype, lookup.find(GraphClass.parse(key[1]))).text
        return lookup.family(lambda found: _build(key, device, dtype, found)).text


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
        return OPERATORS[_operator_text(key, x.device, x.dtype)](x)
    return _module(l, normalize, normalization)(x)


def _module(degrees: Degrees, normalize: bool, normalization: str) -> SphericalHarmonics:
    """The module with these arguments, made once."""
    key = (f"{type(degrees).__name__} {degrees}", bool(normalize), normalization)
    found = _MODULES.get(key)
    if found is None:
        found = _MODULES[key] = SphericalHarmonics(degrees, normalize, normalization)
    return found


@torch.compiler.assume_constant_result
def _module_key(degrees: Degrees, normalize: bool, normalization: str) -> _Key:
    return _module(degrees, normalize, normalization)._key
