"""SevenNet's models in layout ``ir_mul``: every module that takes or gives node features.

Read in sevenn 0.13.0, ``sevenn/model_build.py`` and ``sevenn/nn/``. A model is a sequence of modules that pass on a
dictionary; node features are scalars before the first layer and after the last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from autotune.integrations.acceleration import ARRANGEMENTS, CONVOLUTIONS, CUTOFFS, LINEARS, PRODUCTS, RADIALS
from autotune.integrations.convolution_block import home_of, retype, take_type_back
from autotune.integrations.ir_mul.gate import IrMulGate
from autotune.integrations.ir_mul.linear import AcceleratedLinear
from autotune.integrations.ir_mul.model import ModelLayout, Part
from autotune.integrations.ir_mul.outline import check_same, outline
from autotune.integrations.ir_mul.species_product import SpeciesProduct
from autotune.integrations.packages.sevennet import BLOCKS
from autotune.integrations.radial.cutoffs import AcceleratedCutoff, is_cutoff
from autotune.integrations.radial.folded import AcceleratedRadial
from autotune.integrations.replacement import check_e3nn, e3nn_class
from autotune.integrations.stand_ins import AcceleratedConvolution, has_hooks
from kernelgen.compat import FullyConnectedNet, o3
from kernelgen.errors import UnsupportedError

_HOME = "sevenn.nn."
_COMPILABLE = "autotune.integrations.blocks.sevennet:CompilableSequential"
# Modules that hold no node features, or scalars alone.
_INDIFFERENT = (
    *("EdgePreprocess", "EdgeEmbedding", "OnehotEmbedding", "FCN_e3nn", "AtomReduce", "Rescale", "SpeciesWiseRescale"),
    *("ModalWiseRescale", "ForceOutput", "ForceStressOutput", "ForceStressOutputFromEdge", "_ModalInputPrepare"),
    "MLIAPGhostExchangeModule",
)


class SevenNetLayout(ModelLayout):
    """SevenNet's sequence of modules."""

    def matches(self, model: torch.nn.Module) -> bool:
        kind = f"{home_of(type(model))}:{type(model).__qualname__}"
        return kind in (f"{_HOME}sequential:AtomGraphSequential", _COMPILABLE)

    def parts(self, model: Any) -> Iterator[Part]:
        walk = _Walk()
        for name, module in model._modules.items():
            yield from walk.parts(name, module)
        if any(degree > 0 for degree, _ in outline(walk.features)):
            raise UnsupportedError(f"the model gives features {walk.features}, which users may read")

    def finish(self, model: Any) -> None:
        """What users see are scalars."""
        if "forward" not in model.__dict__:
            retype(model, _COMPILABLE)

    def undo(self, model: torch.nn.Module) -> None:
        take_type_back(model, _COMPILABLE)


class _Walk:
    """Goes through the modules of a model in their order. features: irreps of the node features there."""

    def __init__(self) -> None:
        self.features = ""
        self.connection = ""

    def parts(self, name: str, module: Any) -> Iterator[Part]:
        kind = type(module)
        if not home_of(kind).startswith(_HOME) or "forward" in module.__dict__:
            raise UnsupportedError(f"{name} is a {kind.__name__}, or has a forward, that Equitune does not know")
        if kind.__name__ in _INDIFFERENT:
            if is_cutoff(getattr(module, "cutoff_function", None)):
                yield Part(module, "cutoff_function", f"{name}.cutoff_function", CUTOFFS, AcceleratedCutoff)
            return
        if any(map(has_hooks, module.modules())):
            raise UnsupportedError(f"{name} has hooks, which would see the other layout")
        known = {
            "IrrepsLinear": self._linear,
            "SelfConnectionLinearIntro": self._linear,
            "SelfConnectionIntro": self._product,
            "SelfConnectionOutro": self._sum,
            "IrrepsConvolution": self._convolution,
            "EquivariantGate": self._gate,
        }
        if kind.__name__ not in known:
            raise UnsupportedError(f"{name} is a {kind.__name__}, which takes e3nn's layout")
        yield from known[kind.__name__](name, module)

    def _linear(self, name: str, module: Any) -> Iterator[Part]:
        linear = module.linear
        check_e3nn(linear, o3.Linear)
        given = self.features or str(linear.irreps_in)
        if getattr(module, "num_modalities", 0) > 1 and self.features:
            given += f"+{module.num_modalities}x0e"
        kind = functools.partial(AcceleratedLinear, irreps_in=given)
        yield Part(module, "linear", f"{name}.linear", LINEARS, kind)
        if type(module).__name__ == "IrrepsLinear":
            self.features = str(linear.irreps_out)
        else:
            self.connection = str(linear.irreps_out)

    def _product(self, name: str, module: Any) -> Iterator[Part]:
        product = module.fc_tensor_product
        check_e3nn(product, o3.TensorProduct)
        check_same(self.features, product.irreps_in1, name)
        yield Part(module, "fc_tensor_product", f"{name}.fc_tensor_product", PRODUCTS, SpeciesProduct)
        self.connection = str(product.irreps_out)

    def _sum(self, name: str, module: Any) -> Iterator[Part]:
        check_same(self.connection, self.features, name)
        yield from ()

    def _convolution(self, name: str, module: Any) -> Iterator[Part]:
        (block,) = BLOCKS
        product = module.convolution
        check_e3nn(product, o3.TensorProduct)
        check_same(self.features, product.irreps_in1, name)
        kind = functools.partial(AcceleratedConvolution, layout="ir_mul")
        yield Part(module, "convolution", f"{name}.convolution", CONVOLUTIONS, kind, block)
        if e3nn_class(module.weight_nn, FullyConnectedNet) is None:
            raise UnsupportedError(f"{name} has a radial network that is a {type(module.weight_nn).__name__}")
        yield Part(module, "weight_nn", f"{name}.weight_nn", RADIALS, AcceleratedRadial)
        self.features = str(product.irreps_out)

    def _gate(self, name: str, module: Any) -> Iterator[Part]:
        check_same(self.features, module.gate.irreps_in, name)
        yield Part(module, "gate", f"{name}.gate", ARRANGEMENTS, IrMulGate)
        self.features = str(module.gate.irreps_out)


LAYOUTS = (SevenNetLayout(),)
