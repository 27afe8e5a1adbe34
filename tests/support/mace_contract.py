"""What a kernel backend reads of MACE version 1's ``mace_core``, written for tests: no release of it can be installed.

Signs of couplings and the basis of contractions are made other than e3nn's and Equitune's, since a backend must take
them from ``mace_core``. The order of a contraction's weights is by degree, then output, or the other way.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.compat import o3
from kernelgen.problem.other_kinds import ContractionProblem


@dataclass(frozen=True)
class Irrep:
    degree: int
    parity: int

    @property
    def dimension(self) -> int:
        return 2 * self.degree + 1

    def __str__(self) -> str:
        return f"{self.degree}{'e' if self.parity == 1 else 'o'}"


@dataclass(frozen=True)
class Irreps:
    terms: tuple[tuple[int, Irrep], ...]

    @classmethod
    def parse(cls, text: str) -> Irreps:
        return cls(tuple((mul, Irrep(ir.l, ir.p)) for mul, ir in o3.Irreps(text)))

    @property
    def dimension(self) -> int:
        return sum(mul * irrep.dimension for mul, irrep in self.terms)


def wigner_3j_real(first: int, second: int, third: int) -> np.ndarray:
    """e3nn's, with a sign of its own where the degrees' sum is odd."""
    return (-1) ** (first + second + third) * o3.wigner_3j(first, second, third, dtype=torch.float64).numpy()


@dataclass(frozen=True)
class ConvPath:
    node_term: int
    edge_term: int
    irrep: Irrep
    multiplicity: int


def channelwise_paths(node: str, edge: str, target: str) -> tuple[ConvPath, ...]:
    """By term of the nodes, then of the edges, then output; sorted by output, even before odd."""
    wanted = {str(irrep) for _, irrep in Irreps.parse(target).terms}
    found = [
        ConvPath(i, j, Irrep(ir.l, ir.p), mul)
        for i, (mul, first) in enumerate(o3.Irreps(node))
        for j, (_, second) in enumerate(o3.Irreps(edge))
        for ir in first * second
        if str(ir) in wanted
    ]
    return tuple(sorted(found, key=lambda path: (path.irrep.degree, -path.irrep.parity)))


@functools.cache
def _basis(irreps_in: str, degree: int, target: str) -> np.ndarray:
    """[paths, 2l+1, inputs, ...]: mixtures of Equitune's polynomials."""
    problem = ContractionProblem(irreps_in, target, degree, 1)
    own = [one for one in polynomials(problem) if one.degree == degree]
    dim = Irreps.parse(target).dimension
    found = np.zeros((len(own), dim, *(problem.dim_in,) * degree))
    for number, one in enumerate(own):
        for m, terms in enumerate(one.components):
            for monomial, coefficient in terms:
                found[(number, m, *monomial)] = coefficient
    random = np.random.default_rng(len(own) + degree)
    mixture = np.eye(len(own)) + 0.3 * random.normal(size=(len(own), len(own)))
    return np.tensordot(mixture, found, 1)


def reduced_symmetric_tensor_product_basis(irreps_in: str, degree: int, target: str) -> dict[str, np.ndarray]:
    return {str(irrep): _basis(irreps_in, degree, str(irrep)) for _, irrep in Irreps.parse(target).terms}


def full_symmetric_tensor_product_basis(irreps_in: str, degree: int, target: str) -> dict[str, np.ndarray]:
    """Every vector twice, the second time with its inputs in another order: linearly dependent, as MACE's are."""
    found = {}
    for name, array in reduced_symmetric_tensor_product_basis(irreps_in, degree, target).items():
        turned = np.transpose(array, (0, 1, *range(array.ndim - 1, 1, -1)))
        found[name] = np.concatenate((array, turned))
    return found


def pieces(irreps_in: str, irreps_out: str, correlation: int, basis: str) -> list[tuple[str, int, np.ndarray]]:
    """Output, degree and basis of the canonical weights that are neighbours."""
    build = full_symmetric_tensor_product_basis if basis == "full" else reduced_symmetric_tensor_product_basis
    outputs, degrees = [str(irrep) for _, irrep in Irreps.parse(irreps_out).terms], range(1, correlation + 1)
    keys = [(output, degree) for output in outputs for degree in degrees]
    if BY_DEGREE[-1]:
        keys = [(output, degree) for degree in degrees for output in outputs]
    return [(output, degree, build(irreps_in, degree, output)[output]) for output, degree in keys]


# Whether degrees come before outputs.
BY_DEGREE = [True]


def contraction_path_labels(irreps_in: str, irreps_out: str, correlation: int, basis: str = "reduced") -> tuple:
    return tuple(
        "|".join(f"0:{output}" for _ in range(degree))
        for output, degree, array in pieces(irreps_in, irreps_out, correlation, basis)
        for _ in array
    )


def linear_weight_scale(irreps_in: str, irrep: Irrep) -> float:
    return sum(mul for mul, other in Irreps.parse(irreps_in).terms if other == irrep) ** -0.5


def fully_connected_tp_weight_scale(first: int, second: int) -> float:
    return (first * second) ** -0.5


def symmetric_contraction_weight_scale() -> float:
    return 1.0


@dataclass(frozen=True)
class Descriptor:
    precision: str = "float64"
    layout: str = "mul_ir"


@dataclass(frozen=True)
class LinearDescriptor(Descriptor):
    irreps_in: str = "0e"
    irreps_out: str = "0e"
    has_bias: bool = False


@dataclass(frozen=True)
class ChannelwiseTPConvDescriptor(Descriptor):
    irreps_node: str = "0e"
    irreps_edge: str = "0e"
    irreps_out: str = "0e"
    num_radial: int = 8
    num_features: int = 1


@dataclass(frozen=True)
class SymmetricContractionDescriptor(Descriptor):
    irreps_in: str = "0e"
    irreps_out: str = "0e"
    correlation: int = 1
    num_elements: int = 1
    num_features: int = 1
    basis: str = "reduced"


@dataclass(frozen=True)
class FullyConnectedTPDescriptor(Descriptor):
    irreps_in1: str = "0e"
    irreps_in2: str = "0e"
    irreps_out: str = "0e"


@dataclass(frozen=True)
class SegmentReduceDescriptor(Descriptor):
    reduction: str = "sum"
    num_features: int = 1


class UnsupportedDescriptorError(RuntimeError):
    pass


@dataclass(frozen=True)
class BackendCapabilities:
    ops: frozenset = frozenset()
    devices: frozenset = frozenset({"cpu"})
    dtypes: frozenset = frozenset({"float64"})
    max_lmax: int = 0
    layouts: frozenset = frozenset({"mul_ir"})
    activation_layouts: frozenset = frozenset({"mul_ir"})
    native_layout: str = "mul_ir"
    bases: frozenset = frozenset({"reduced"})
    supports_double_backward: bool = False
    wide_accumulation: bool = False
    spec_version: str = field(default="1.0")

    def supports(self, descriptor: Descriptor) -> bool:
        is_known = descriptor.precision in self.dtypes and descriptor.layout in self.activation_layouts
        return is_known and getattr(descriptor, "basis", "reduced") in self.bases


KERNEL_SPEC_VERSION = "1.0"
_PLACES = {
    "clebsch_gordan.irreps": ("Irrep", "Irreps"),
    "clebsch_gordan.real_basis": ("wigner_3j_real",),
    "clebsch_gordan.reduced_basis": (
        "reduced_symmetric_tensor_product_basis",
        "full_symmetric_tensor_product_basis",
    ),
    "kernels.paths": ("ConvPath", "channelwise_paths"),
    "kernels.capabilities": ("BackendCapabilities", "UnsupportedDescriptorError"),
    "kernels.canonical": (
        *("KERNEL_SPEC_VERSION", "contraction_path_labels", "linear_weight_scale"),
        *("fully_connected_tp_weight_scale", "symmetric_contraction_weight_scale"),
    ),
    "kernels.descriptors": (
        *("Descriptor", "LinearDescriptor", "ChannelwiseTPConvDescriptor", "SymmetricContractionDescriptor"),
        *("FullyConnectedTPDescriptor", "SegmentReduceDescriptor"),
    ),
}


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """``mace_core`` can be imported, as this file, unless it is installed."""
    made = {}
    for place, names in _PLACES.items():
        *folders, _ = place.split(".")
        for name in ("mace_core", ".".join(["mace_core", *folders]), f"mace_core.{place}"):
            made.setdefault(name, types.ModuleType(name))
        made[f"mace_core.{place}"].__dict__.update({name: globals()[name] for name in names})
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
        if name not in sys.modules:
            sys.modules[name] = module
    try:
        yield
    finally:
        for name in (*made, *[name for name in sys.modules if name.startswith("autotune.models.mace.backend")]):
            sys.modules.pop(name, None)
