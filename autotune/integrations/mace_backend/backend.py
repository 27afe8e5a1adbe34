"""What Equitune builds for MACE, and what it leaves to MACE's reference backend."""

from __future__ import annotations

from typing import Any

import torch
from mace_core.clebsch_gordan.irreps import Irreps
from mace_core.kernels.canonical import KERNEL_SPEC_VERSION
from mace_core.kernels.capabilities import BackendCapabilities, UnsupportedDescriptorError
from mace_core.kernels.descriptors import (
    ChannelwiseTPConvDescriptor,
    FullyConnectedTPDescriptor,
    LinearDescriptor,
    SymmetricContractionDescriptor,
)
from mace_core.kernels.paths import channelwise_paths

from autotune.integrations.mace_backend.canonical import pairs_of
from autotune.integrations.mace_backend.contraction import BackendContraction
from autotune.integrations.mace_backend.convolution import BackendConvolution
from autotune.integrations.mace_backend.linear import BackendLinear
from autotune.integrations.mace_backend.skip import BackendSkip

# A sum by index is torch's own; harmonics and radial functions are MACE's.
_OPERATIONS = ("linear", "channelwise_tp_conv", "symmetric_contraction", "fully_connected_tp")
_MOST_DEGREE, _MOST_CORRELATION = 6, 4


class EquituneCapabilities(BackendCapabilities):
    """MACE's coarse answer, and the shapes that kernels are generated for."""

    def supports(self, descriptor: Any) -> bool:
        if not super().supports(descriptor):
            return False
        if isinstance(descriptor, LinearDescriptor):
            return True
        if isinstance(descriptor, ChannelwiseTPConvDescriptor):
            irreps = descriptor.irreps_node, descriptor.irreps_edge, descriptor.irreps_out
            return all(map(_is_known, irreps)) and len(channelwise_paths(*irreps)) > 0
        if isinstance(descriptor, SymmetricContractionDescriptor):
            both = descriptor.irreps_in, descriptor.irreps_out
            return all(map(_is_known, both)) and 1 <= descriptor.correlation <= _MOST_CORRELATION
        if isinstance(descriptor, FullyConnectedTPDescriptor):
            scalars = Irreps.parse(descriptor.irreps_in2).terms
            has_pairs = bool(pairs_of(descriptor.irreps_in1, descriptor.irreps_out))
            return has_pairs and all((irrep.degree, irrep.parity) == (0, 1) for _, irrep in scalars)
        return False


def _is_known(irreps: str) -> bool:
    """Whether these are one copy of each irrep, up to the highest degree of a kernel."""
    terms = Irreps.parse(irreps).terms
    kinds = {str(irrep) for _, irrep in terms}
    return len(kinds) == len(terms) and all(mul == 1 and irrep.degree <= _MOST_DEGREE for mul, irrep in terms)


class EquituneBackend:
    """The object that MACE's registry makes of the name ``equitune``."""

    name = "equitune"

    def capabilities(self) -> EquituneCapabilities:
        return EquituneCapabilities(
            ops=frozenset(_OPERATIONS),
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({"float32", "float64"}),
            activation_layouts=frozenset({"ir_mul"}),
            native_layout="ir_mul",
            bases=frozenset({"reduced", "full"}),
            supports_double_backward=True,
            spec_version=KERNEL_SPEC_VERSION,
        )

    def make_linear(self, descriptor: Any) -> torch.nn.Module:
        return self._made(BackendLinear, descriptor)

    def make_channelwise_tp_conv(self, descriptor: Any) -> torch.nn.Module:
        return self._made(BackendConvolution, descriptor)

    def make_symmetric_contraction(self, descriptor: Any) -> torch.nn.Module:
        return self._made(BackendContraction, descriptor)

    def make_fully_connected_tp(self, descriptor: Any) -> torch.nn.Module:
        return self._made(BackendSkip, descriptor)

    def make_segment_reduce(self, descriptor: Any) -> torch.nn.Module:
        """Always declined: see ``capabilities``."""
        raise UnsupportedDescriptorError(f"Equitune leaves {descriptor} to MACE's reference backend")

    def make_spherical_harmonics(self, descriptor: Any) -> None:
        """None: MACE's own."""

    def make_radial_basis(self, descriptor: Any) -> None:
        """None: MACE's own."""

    def make_interaction_layer(self, descriptors: Any) -> None:
        """None: operation by operation."""

    def _made(self, kind: type[torch.nn.Module], descriptor: Any) -> torch.nn.Module:
        if not self.capabilities().supports(descriptor):
            raise UnsupportedDescriptorError(
                f"Equitune builds nothing for {descriptor}: it takes features in layout ir_mul, one copy of each irrep "
                f"up to degree {_MOST_DEGREE} in convolutions and contractions, a correlation up to "
                f"{_MOST_CORRELATION}, and even scalars in skip connections"
            )
        return kind(descriptor)
