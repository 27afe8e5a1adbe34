"""Spherical harmonics as a module and a function that stand in for e3nn's, from generated kernels.

An operator is built for each (device, dtype) when it is first met, and kept. First and second derivatives work; the
second derivative of a normalised vector is 0 at the zero vector, where torch gives nan.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from e3nn import o3

from autotune.tuned_module import autocast, check_dtype, or_default
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.harmonics import MAX_DEGREE, NORMALIZATIONS, HarmonicsProblem
from kernelgen.harmonics_library import HARMONICS_OPERATORS
from kernelgen.harmonics_operators import HarmonicsOperator, build_harmonics
from kernelgen.harmonics_schedule import HarmonicsSchedule
from kernelgen.problem import parse_irreps

Degrees: TypeAlias = "int | list[int] | tuple[int, ...] | str | o3.Irreps"
_VECTORS = (o3.Irreps("1x1o"), o3.Irreps("1x1e"))
_UNTUNED = "harmonics are not tuned; default from device facts"


@dataclass(frozen=True)
class HarmonicsTuning:
    """A schedule and where it came from: the fields of :class:`autotune.Tuning`, always ``default`` for now."""

    schedule: HarmonicsSchedule
    origin: str = "default"
    entry: None = None
    reason: str = _UNTUNED


def _vector(irreps_out: Degrees, irreps_in: Any) -> o3.Irreps:
    """What the input is, ``1x1o`` or ``1x1e``, given or as e3nn concludes it from the parities of irreps_out."""
    if irreps_in is None:
        even = isinstance(irreps_out, o3.Irreps) and any(ir.l % 2 == 1 and ir.p == 1 for _, ir in irreps_out)
        return _VECTORS[even]
    parsed = parse_irreps(irreps_in, "irreps_in")
    if parsed not in _VECTORS:
        raise ProblemError(f"irreps_in is {parsed}; expected a vector (1x1o) or a pseudovector (1x1e)")
    return parsed


def _degrees(irreps_out: Degrees, parity: int) -> list[int]:
    """The degree of each block, a copy for every multiplicity, of an input of that parity."""
    if not isinstance(irreps_out, o3.Irreps):
        given = irreps_out if isinstance(irreps_out, list | tuple) else [irreps_out]
        try:
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


class SphericalHarmonics(torch.nn.Module):
    """``e3nn.o3.SphericalHarmonics``, x ``[..., 3]`` -> ``[..., irreps_out.dim]``, from a generated kernel.

    irreps_out: a degree, a list of degrees, or irreps, whose parities must be those of the harmonics of irreps_in.
    normalize: whether x is divided by its length first. normalization: a block's length on the sphere is
    sqrt((2l+1) / 4 pi) (``integral``), sqrt(2l+1) (``component``) or 1 (``norm``). irreps_in: ``1o`` or ``1e``; None
    takes 1e where irreps_out has an odd degree of even parity, else 1o.

    The attributes irreps_in, irreps_out, normalize and normalization are e3nn's. Raises ProblemError where e3nn raises
    ValueError, and UnsupportedError for degrees above 12.
    """

    _operator: HarmonicsOperator | None

    def __init__(
        self, irreps_out: Degrees, normalize: bool, normalization: str = "integral", irreps_in: Any = None
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
        # What torch.compile asks before it takes the code of one module for another.
        self._key = self.problem.key
        self.irreps_out = o3.Irreps([(1, (degree, parity**degree)) for degree in degrees]).simplify()
        # e3nn's names.
        self._ls_list = degrees
        self._lmax = max(degrees)
        self._is_range_lmax = degrees == list(range(max(degrees) + 1))
        self._forget_operators()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x ``[..., 3]`` -> ``[..., irreps_out.dim]``; InputError for other shapes, and dtypes but float32, float64.

        Under ``torch.autocast`` x in half precision is taken as float32, and so is the result.
        """
        (x,) = autocast(x)
        if torch.compiler.is_compiling():
            return HARMONICS_OPERATORS[_operator_text(self._key, x.device, x.dtype)](x)
        met = self._operator
        if met is None or met.dtype is not x.dtype or met.device != x.device:
            met = self._operator_for(x.device, x.dtype)
        return met(x)

    @property
    def tuning(self) -> dict[str, HarmonicsTuning]:
        """By direction: schedule, origin and reason, of the operator that was built last.

        Before any was built: what would be taken on torch's default device and dtype.
        """
        made = self._operator or _operator(self._key, *or_default(None, None))
        return {name: HarmonicsTuning(schedule) for name, schedule in made.schedules.items()}

    def _operator_for(self, device: torch.device, dtype: torch.dtype) -> HarmonicsOperator:
        key = (device, dtype)
        if key not in self._operators:
            self._operators[key] = _operator(self._key, device, dtype)
        self._operator = self._operators[key]
        return self._operator

    def _forget_operators(self) -> None:
        self._operators: dict[tuple[torch.device, torch.dtype], HarmonicsOperator] = {}
        self._operator = None

    def __getstate__(self) -> dict[str, Any]:
        # Loaded kernels belong to this process; a copy builds its own (from the compile cache) when it is called.
        return {name: value for name, value in self.__dict__.items() if name not in ("_operators", "_operator")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_operators()


def _operator(key: str, device: torch.device, dtype: torch.dtype) -> HarmonicsOperator:
    check_dtype("x is", dtype)
    return build_harmonics(HarmonicsProblem.from_key(key), dtype=dtype, device=device)


@torch.compiler.assume_constant_result
def _operator_text(key: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name under which the operator is registered: it is built here, and not traced."""
    return _operator(key, device, dtype).text


_MODULES: dict[tuple[str, bool, str], SphericalHarmonics] = {}


def spherical_harmonics(
    l: Degrees,  # noqa: E741  (e3nn's name)
    x: torch.Tensor,
    normalize: bool,
    normalization: str = "integral",
) -> torch.Tensor:
    """``e3nn.o3.spherical_harmonics``: harmonics ``[..., dim]`` of x ``[..., 3]``, arguments as of the module."""
    (x,) = autocast(x)
    if torch.compiler.is_compiling():
        key = _problem_key(l, normalize, normalization)
        return HARMONICS_OPERATORS[_operator_text(key, x.device, x.dtype)](x)
    return _module(l, normalize, normalization)(x)


def _module(degrees: Degrees, normalize: bool, normalization: str) -> SphericalHarmonics:
    """The module of these arguments, made once."""
    key = (f"{type(degrees).__name__} {degrees}", bool(normalize), normalization)
    found = _MODULES.get(key)
    if found is None:
        found = _MODULES[key] = SphericalHarmonics(degrees, normalize, normalization)
    return found


@torch.compiler.assume_constant_result
def _problem_key(degrees: Degrees, normalize: bool, normalization: str) -> str:
    return _module(degrees, normalize, normalization).problem.key
