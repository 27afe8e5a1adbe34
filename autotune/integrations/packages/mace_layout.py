"""MACE's models in layout ``ir_mul``: every module between two convolutions, and the descriptors that a model gives.

Read in mace-torch 0.3.16, ``mace/modules/models.py``, ``blocks.py`` and ``gate.py``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autotune.integrations.acceleration import ARRANGEMENTS, CONTRACTIONS, CONVOLUTIONS, LINEARS, PRODUCTS, RADIALS
from autotune.integrations.contraction import AcceleratedContraction
from autotune.integrations.convolution_block import home_of
from autotune.integrations.ir_mul.features import FlatFeatures, TaughtGate, with_users_descriptors
from autotune.integrations.ir_mul.linear import AcceleratedLinear
from autotune.integrations.ir_mul.model import ModelLayout, Part
from autotune.integrations.ir_mul.species_product import SpeciesProduct
from autotune.integrations.ir_mul.transposed import TransposedContraction
from autotune.integrations.packages.mace import MaceConvolution, block_of, contraction_of_mace
from autotune.integrations.radial.folded import AcceleratedRadial
from autotune.integrations.replacement import check_e3nn, e3nn_class
from autotune.integrations.stand_ins import has_hooks
from kernelgen.compat import o3
from kernelgen.errors import UnsupportedError

_HOME = "mace.modules"
_STRAINED = "autotune.integrations.blocks.mace"
_MODELS = ("MACE", "ScaleShiftMACE", "AtomicDipolesMACE", "AtomicDielectricMACE", "EnergyDipolesMACE")
_READOUTS = (
    *("LinearReadoutBlock", "NonLinearReadoutBlock", "NonLinearBiasReadoutBlock", "GeneralNonLinearBiasReadoutBlock"),
    *("LinearDipoleReadoutBlock", "NonLinearDipoleReadoutBlock"),
    *("LinearDipolePolarReadoutBlock", "NonLinearDipolePolarReadoutBlock"),
)
# Modules of e3nn and MACE in these blocks that act on scalars alone, or hold no features.
_INDIFFERENT = ("Activation", "RadialMLP")


class MaceLayout(ModelLayout):
    """All of MACE's own models."""

    def matches(self, model: torch.nn.Module) -> bool:
        homes = (f"{_HOME}.models", _STRAINED)
        return home_of(type(model)) in homes and type(model).__qualname__ in _MODELS

    def parts(self, model: Any) -> Iterator[Part]:
        embedding = model.node_embedding.linear
        yield Part(model.node_embedding, "linear", "node_embedding.linear", LINEARS, _linear(embedding))
        for number, (interaction, product) in enumerate(zip(model.interactions, model.products, strict=True)):
            yield from _parts_of_interaction(interaction, f"interactions.{number}.")
            yield from _parts_of_product(product, interaction.irreps_out, f"products.{number}.")
        for number, readout in enumerate(model.readouts):
            _check_class(readout, _READOUTS)
            last = getattr(readout, "linear_2", None) or readout.linear
            if any(mul > 1 and ir.l > 0 for mul, ir in last.irreps_out):
                raise UnsupportedError(f"readouts.{number} gives several copies of an irrep: {last.irreps_out}")
            yield from _other_parts(readout, f"readouts.{number}.")

    def finish(self, model: Any) -> None:
        kind = type(model)
        strained = getattr(importlib.import_module(_STRAINED), kind.__qualname__, None)
        # A model of a torch.package has classes of its own, and one with a forward of its own keeps it.
        if strained is not None and strained.__mro__[1] is kind and "forward" not in model.__dict__:
            model.__class__ = strained
        elif any(ir.l > 0 for product in model.products for _, ir in product.linear.irreps_out):
            model.register_forward_hook(descriptors_for_users)

    def undo(self, model: torch.nn.Module) -> None:
        if home_of(type(model)) == _STRAINED:
            model.__class__ = type(model).__mro__[1]
        for key, hook in list(model._forward_hooks.items()):
            if hook is descriptors_for_users:
                del model._forward_hooks[key]


def descriptors_for_users(model: Any, _: Any, out: dict[str, Tensor]) -> dict[str, Tensor]:
    """The hook of a model in ``ir_mul`` whose class stays."""
    return with_users_descriptors(model, out)


def _check_class(block: torch.nn.Module, names: tuple[str, ...]) -> None:
    kind = type(block)
    if home_of(kind) != f"{_HOME}.blocks" or kind.__qualname__ not in names or "forward" in block.__dict__:
        raise UnsupportedError(f"{kind.__module__}.{kind.__qualname__} is no block of MACE that Equitune knows")
    if any(map(has_hooks, block.modules())):
        raise UnsupportedError(f"a {kind.__qualname__} has hooks, which would see the other layout")
    config = getattr(block, "cueq_config", None)
    if config is not None and config.enabled:
        raise UnsupportedError("MACE converted the model for cuEquivariance")


def _linear(module: torch.nn.Module) -> type[AcceleratedLinear]:
    check_e3nn(module, o3.Linear)
    return AcceleratedLinear


def _parts_of_interaction(block: Any, prefix: str) -> Iterator[Part]:
    kind = block_of(block)
    if kind is None:
        raise UnsupportedError(f"{prefix.rstrip('.')} is a {type(block).__name__}, or its product is not e3nn's")
    _check_class(block, kind.names)
    convolution = functools.partial(MaceConvolution, layout="ir_mul")
    check_e3nn(block.conv_tp, o3.TensorProduct)
    yield Part(block, "conv_tp", f"{prefix}conv_tp", CONVOLUTIONS, convolution, kind)
    yield Part(block, "reshape", f"{prefix}reshape", ARRANGEMENTS, FlatFeatures)
    yield from _other_parts(block, prefix, ("conv_tp", "reshape"))


def _parts_of_product(block: Any, irreps_in: Any, prefix: str) -> Iterator[Part]:
    _check_class(block, ("EquivariantProductBasisBlock",))
    irreps = {"irreps_in": str(irreps_in), "irreps_out": str(block.linear.irreps_in)}
    contraction = functools.partial(_contraction, **irreps)
    name = "symmetric_contractions"
    yield Part(block, name, prefix + name, CONTRACTIONS, contraction)
    yield from _other_parts(block, prefix, (name,))


def _contraction(
    original: Any, irreps_in: str, irreps_out: str, **options: Any
) -> AcceleratedContraction | TransposedContraction:
    """The generated kernel; MACE's own where there is none, and where MACE has prepared the model for torch.compile."""
    if contraction_of_mace(original) == "":
        try:
            return AcceleratedContraction(original, layout="ir_mul", **options)
        except UnsupportedError:
            pass
    return TransposedContraction(original, irreps_in, irreps_out)


def _other_parts(block: torch.nn.Module, prefix: str, done: tuple[str, ...] = ()) -> Iterator[Part]:
    """Linear layers, products with species and gates; UnsupportedError for what may depend on the layout."""
    for attribute, child in block._modules.items():
        if child is None or attribute in done:
            continue
        name = prefix + attribute
        if e3nn_class(child, o3.Linear) is not None:
            yield Part(block, attribute, name, LINEARS, _linear(child))
        elif e3nn_class(child, o3.TensorProduct) is not None:
            check_e3nn(child, o3.TensorProduct)
            yield Part(block, attribute, name, PRODUCTS, SpeciesProduct)
        elif type(child).__name__ == "GatedEquivariantBlock" and hasattr(child, "_layout_is_ir_mul"):
            yield Part(block, attribute, name, ARRANGEMENTS, TaughtGate)
        elif home_of(type(child)) == "e3nn.nn._fc" and type(child).__name__ == "FullyConnectedNet":
            yield Part(block, attribute, name, RADIALS, AcceleratedRadial)
        elif type(child).__name__ not in _INDIFFERENT:
            raise UnsupportedError(f"{name} is a {type(child).__name__}, which takes e3nn's layout")


LAYOUTS = (MaceLayout(),)
