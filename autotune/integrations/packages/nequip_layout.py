"""NequIP's models in layout ``ir_mul``: every module that takes or gives node features.

Read in nequip 0.19.1, ``nequip/model/nequip_models.py``, ``nequip/nn/convnetlayer.py`` and ``interaction_block.py``.
Node features are scalars before the first layer and after the last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from autotune.integrations.acceleration import ARRANGEMENTS, CONVOLUTIONS, CUTOFFS, LINEARS, PRODUCTS
from autotune.integrations.convolution_block import RetypedBlock, home_of, retype, take_type_back
from autotune.integrations.ir_mul.gate import IrMulGate
from autotune.integrations.ir_mul.linear import AcceleratedLinear
from autotune.integrations.ir_mul.model import ModelLayout, Part
from autotune.integrations.ir_mul.outline import check_same, outline
from autotune.integrations.ir_mul.species_product import SpeciesProduct
from autotune.integrations.ir_mul.typed_product import TypedProduct
from autotune.integrations.packages.nequip import BLOCKS
from autotune.integrations.radial.cutoffs import AcceleratedCutoff, is_cutoff
from autotune.integrations.replacement import check_e3nn, e3nn_class
from autotune.integrations.stand_ins import AcceleratedConvolution, has_hooks
from kernelgen.compat import Gate, o3
from kernelgen.errors import UnsupportedError

_HOME = "nequip.nn."
# Modules that need the edges' vectors, and whichever is first computes them; by name, what they become.
_OF_EDGES = {
    name: f"autotune.integrations.blocks.nequip:Batched{name}"
    for name in ("SphericalHarmonicEdgeAttrs", "EdgeLengthNormalizer")
}
_SEQUENCE = (f"{_HOME}_graph_mixin", "SequentialGraphNetwork")
_LAYER = (f"{_HOME}convnetlayer", "ConvNetLayer")
# Modules that hold no node features, or scalars alone.
_INDIFFERENT = (
    *("NodeTypeEmbed", "SphericalHarmonicEdgeAttrs", "EdgeLengthNormalizer", "BesselEdgeLengthEncoding", "ApplyFactor"),
    *("AddRadialCutoffToData", "ScalarMLP", "PerTypeScaleShift", "AtomwiseReduce", "LennardJones"),
    *("SimpleLennardJones", "ZBL"),
)


class InteractionBlock(RetypedBlock):
    """The block around the convolution, told to show the nodes' types to its self-connection."""

    module = f"{_HOME}interaction_block"
    names = ("InteractionBlock",)
    product = "sc"
    fused = "autotune.integrations.blocks.nequip:TypedInteractionBlock"


_TYPED = InteractionBlock()


class NequIPLayout(ModelLayout):
    """NequIP's sequence of modules with convolution layers in it."""

    def matches(self, model: torch.nn.Module) -> bool:
        is_sequence = (home_of(type(model)), type(model).__qualname__) == (
            f"{_HOME}_graph_mixin",
            "SequentialGraphNetwork",
        )
        return is_sequence and any(_is_layer(module) for module in model._modules.values())

    def parts(self, model: Any) -> Iterator[Part]:
        features, types = None, _types_of(model)
        for name, module in model._modules.items():
            kind = type(module)
            if _is_layer(module):
                features = yield from _parts_of_layer(module, name, features, types)
            elif (
                not home_of(kind).startswith(_HOME) or kind.__name__ not in _INDIFFERENT or "forward" in module.__dict__
            ):
                raise UnsupportedError(f"{name} is a {kind.__name__}, which may take node features")
            elif is_cutoff(getattr(module, "cutoff", None)):
                yield Part(module, "cutoff", f"{name}.cutoff", CUTOFFS, AcceleratedCutoff)
        if any(degree > 0 for degree, _ in outline(features or "")):
            raise UnsupportedError(f"the last layer gives features {features}, which users may read")

    def finish(self, model: Any) -> None:
        """What users see are scalars."""
        for module in model._modules.values():
            if type(module).__name__ in _OF_EDGES and _is_indifferent(module):
                retype(module, _OF_EDGES[type(module).__name__])

    def undo(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            _TYPED.unfuse(module)
            for place in _OF_EDGES.values():
                take_type_back(module, place)


def _is_layer(module: Any) -> bool:
    return (home_of(type(module)), type(module).__qualname__) == _LAYER and "forward" not in module.__dict__


def _types_of(model: Any) -> int:
    embeddings = [module for module in model._modules.values() if type(module).__name__ == "NodeTypeEmbed"]
    if len(embeddings) != 1 or len(embeddings[0].categorical_graph_field_embed_modules):
        return 0
    return embeddings[0].num_types


def _is_indifferent(module: Any) -> bool:
    kind = type(module)
    return home_of(kind).startswith(_HOME) and kind.__name__ in _INDIFFERENT and "forward" not in module.__dict__


def _parts_of_layer(layer: Any, name: str, features: str | None, types: int) -> Any:
    """Yields the parts; returns the irreps of the node features after the layer, given those before it.

    types: the number of types on which alone a node's attributes depend, 0 if they depend on more.
    """
    block, gate = layer.conv, layer.equivariant_nonlin
    if not _TYPED.matches(block):
        raise UnsupportedError(f"{name}.conv is a {type(block).__name__}")
    if e3nn_class(gate, Gate) is None or "forward" in block.__dict__:
        raise UnsupportedError(f"{name} has a {type(gate).__name__} in the place of a gate, or a forward of its own")
    if any(map(has_hooks, layer.modules())):
        raise UnsupportedError(f"{name} has hooks, which would see the other layout")
    features = str(block.linear_1.irreps_in) if features is None else features
    scatter = block.tp_scatter
    for linear in (block.linear_1, block.linear_2):
        check_e3nn(linear, o3.Linear)
    check_e3nn(scatter.tp, o3.TensorProduct)
    (kind,) = BLOCKS
    if not kind.matches(scatter):
        raise UnsupportedError(f"{name}.conv.tp_scatter is a {type(scatter).__name__}")
    prefix = f"{name}.conv."
    if block.sc is not None:
        check_e3nn(block.sc, o3.TensorProduct)
        check_same(features, block.sc.irreps_in1, f"{prefix}sc")
        check_same(block.sc.irreps_out, block.linear_2.irreps_out, f"{prefix}sc")
        product = functools.partial(TypedProduct, types=types) if types else SpeciesProduct
        yield Part(block, "sc", f"{prefix}sc", PRODUCTS, product, _TYPED if types else None)
    first = functools.partial(AcceleratedLinear, irreps_in=features)
    yield Part(block, "linear_1", f"{prefix}linear_1", LINEARS, first)
    check_same(block.linear_1.irreps_out, scatter.tp.irreps_in1, f"{prefix}tp_scatter")
    convolution = functools.partial(AcceleratedConvolution, layout="ir_mul")
    yield Part(scatter, "tp", f"{prefix}tp_scatter.tp", CONVOLUTIONS, convolution, kind)
    second = functools.partial(AcceleratedLinear, irreps_in=str(scatter.tp.irreps_out))
    yield Part(block, "linear_2", f"{prefix}linear_2", LINEARS, second)
    check_same(block.linear_2.irreps_out, gate.irreps_in, f"{name}.equivariant_nonlin")
    yield Part(layer, "equivariant_nonlin", f"{name}.equivariant_nonlin", ARRANGEMENTS, IrMulGate)
    if layer.resnet:
        check_same(features, gate.irreps_out, name)
    return str(gate.irreps_out)


LAYOUTS = (NequIPLayout(),)
