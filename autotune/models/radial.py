"""Networks of edges: those that give the weights of a convolution leave their last layer to it, all multiply as
``precision`` says.

A package's table has ``radial_blocks``: its kinds of blocks with networks of the former kind; and ``edge_networks``:
modules with networks whose rows are edges and that end in no convolution.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.nn.utils import parametrize

from autotune.models.replace import home_of, retype, take_type_back
from autotune.models.stand_ins import AcceleratedConvolution, Draw, NodeStandIn, has_hooks, of_packages
from autotune.modules.base import autocast
from kernelgen.compat import FullyConnectedNet, runs_eagerly
from kernelgen.ops import node_kernels as gates
from kernelgen.ops.edge_networks import few_pass_silu, hidden_features, is_one_kernel
from kernelgen.ops.radial_convolution import ACCURACY, multiply_by


class RadialBlock(NamedTuple):
    """One kind of block, by its class. network, convolution: where both are in it; nobody else calls the network."""

    module: str
    names: tuple[str, ...]
    network: str
    convolution: str

    def matches(self, block: torch.nn.Module) -> bool:
        """Whether it is such a block, or one whose class Equitune changed."""
        kinds = ((home_of(kind), kind.__qualname__) for kind in type(block).__mro__)
        return any(module == self.module and name in self.names for module, name in kinds)


class EdgeNetworks(NamedTuple):
    """One kind of module, by its class, and its attributes that are networks, or lists of them."""

    module: str
    name: str
    networks: tuple[str, ...]


def take_edge_networks(model: torch.nn.Module) -> None:
    """Have networks that end in no convolution multiply as :func:`choose_arithmetic` says."""
    known = {(kind.module, kind.name): kind.networks for kind in of_packages("edge_networks")}
    for block in list(model.modules()):
        for attribute in known.get((home_of(type(block)), type(block).__qualname__), ()):
            for network in block.get_submodule(attribute).modules():
                if name := _shortened_name(network):
                    retype(network, name)


def form_weights_inside(model: torch.nn.Module, **how: Any) -> int:
    """Have convolutions form the weights of their edges; the number of those that do.

    how: options of :func:`autotune.modules.convolution.convolve_radial`, with the ``product``.
    """
    count = 0
    for block in list(model.modules()):
        for kind in of_packages("radial_blocks"):
            if kind.matches(block):
                convolution, network = block.get_submodule(kind.convolution), block.get_submodule(kind.network)
                if isinstance(convolution, AcceleratedConvolution) and shorten(network):
                    convolution.form_weights_of(network, **how)
                    count += 1
    return count


def undo_weights_inside(model: torch.nn.Module) -> None:
    """Have all radial networks give weights again. The convolutions are replaced afterwards."""
    for module in model.modules():
        lengthen(module)


# Radial networks that end with a matrix product, and can leave that product to a convolution.
#
# Such a network changes its class to a subclass whose ``forward`` stops before the last layer, and whose ``matrix()``
# is that layer's [hidden, weights] with all constants. Parameters and names in checkpoints stay. ``stops_early`` says
# whether it does so now: not while it or its last layer has hooks, or that layer is another module (pruning, adapters).

# By module and name of a network's class: its subclass, in a module that imports the package.
_SHORTENED = {
    ("e3nn.nn._fc", "FullyConnectedNet"): "autotune.models.radial:ShortenedFullyConnectedNet",
    ("mace.modules.radial", "RadialMLP"): "autotune.models.mace.patched:ShortenedRadialMLP",
    ("nequip.nn.mlp", "ScalarMLPFunction"): "autotune.models.nequip.patched:EdgeScalarMLP",
}


def _shortened_name(network: Any) -> str | None:
    """Of the subclass for it; None if there is none."""
    kind = type(network)
    is_stock = "forward" not in network.__dict__ and not isinstance(network, torch.jit.ScriptModule)
    return _SHORTENED.get((home_of(kind), kind.__qualname__)) if is_stock else None


def shorten(network: Any) -> bool:
    """Have a network stop before its last layer; whether it can."""
    if isinstance(network, AcceleratedRadial):
        network.__dict__["shortened"] = True
        return network.stops_early
    name = _shortened_name(network)
    if name is None:
        return False
    retype(network, name)
    network.__dict__["shortened"] = True
    return network.stops_early or not _take_back(network, name)


def lengthen(network: torch.nn.Module) -> None:
    """Undo :func:`shorten` and :func:`take_edge_networks`."""
    any(_take_back(network, name) for name in _SHORTENED.values())


def _take_back(network: torch.nn.Module, name: str) -> bool:
    is_taken = take_type_back(network, name)
    for option in ("shortened", "product", "in_one_kernel", "rounds") if is_taken else ():
        network.__dict__.pop(option, None)
    return is_taken


def choose_arithmetic(model: torch.nn.Module, product: str, in_one_kernel: bool, in_tf32: bool) -> int:
    """How Equitune's radial networks multiply, and whether their hidden layers are one kernel where there is one.

    in_tf32: whether layers of node features round to TF32. Returns how many modules do, or whose networks do.
    """
    count = 0
    for module in model.modules():
        kind = type(module)
        if isinstance(module, AcceleratedRadial) or f"{kind.__module__}:{kind.__qualname__}" in _SHORTENED.values():
            module.__dict__.update(product=product, in_one_kernel=in_one_kernel)
            rounds = product == "tf32"
        elif kernels := getattr(module, "block_products", ()):
            for kernel in kernels:
                kernel.in_tf32 = in_tf32
            rounds = in_tf32
        else:
            continue
        module.__dict__["rounds"] = rounds  # a captured step sees that it changes
        count += rounds
    return count


# e3nn's ``FullyConnectedNet`` with all its constants in the weights, so that no pass over the edges scales them.


class AcceleratedRadial(NodeStandIn, FullyConnectedNet):
    """Replaces one ``e3nn.nn.FullyConnectedNet``; its layers keep the weights.

    ``product``, in its dictionary, is one of ``kernelgen.ops.radial_convolution.EDGE_PRODUCTS``; ``in_one_kernel`` says
    whether hidden layers are (``kernelgen.ops.edge_networks``), ``shortened`` whether a convolution would multiply by
    the last one.
    """

    original: Any
    detail = "constants multiply the weights, not the edges"

    def __init__(self, original: Any, **_: Any) -> None:
        torch.nn.Module.__init__(self)
        self._take_place_of(original)
        self._keep_children_of(original)

    def forward(self, x: Tensor) -> Tensor:
        """The network's output; if the convolution multiplies by the last layer's :meth:`matrix`, what goes into it."""
        layers: list[Any] = list(self._modules.values())
        if not all(map(is_e3nn_layer, layers)):
            return super().forward(x)
        if stops_early := self.stops_early:
            layers.pop()
        multiply = multiply_by(self.__dict__.get("product", "fp16x3"))
        x, layers, scale = self._in_one_kernel(x, layers) if self.__dict__.get("in_one_kernel") else (x, layers, 1.0)
        for layer in layers:
            x, weight = autocast(x, layer.weight)
            x = multiply.rows(x, weight * (scale * _factor(layer)))
            scale = 1.0
            if layer.act is not None:
                x = few_pass_silu(x) if layer.act.f is silu else layer.act.f(x)
                scale = _factor_after(layer)
        return x if scale == 1.0 or stops_early else x * scale

    def _in_one_kernel(self, x: Tensor, layers: list[Any]) -> tuple[Tensor, list[Any], float]:
        """What the first layers with SiLU give, the layers that are left, and the factor of their input."""
        matrices, factors, scale = [], [], 1.0
        for layer in itertools.takewhile(lambda layer: layer.act is not None and layer.act.f is silu, layers):
            matrices.append(layer.weight)
            factors.append(scale * _factor(layer))
            scale = _factor_after(layer)
        if not is_one_kernel(x, matrices, self.training):
            return x, layers, 1.0
        accuracy = ACCURACY[self.__dict__.get("product", "fp16x3")]
        return hidden_features(x, matrices, factors, accuracy), layers[len(matrices) :], scale

    def matrix(self) -> Tensor:
        """The last layer's weights [hidden, weights] with all constants after the last activation."""
        layers: list[Any] = list(self._modules.values())
        *before, last = layers
        scale = _factor(last)
        if before and before[-1].act is not None:
            scale *= _factor_after(before[-1])
        return last.weight * scale

    @property
    def stops_early(self) -> bool:
        """Whether the convolution multiplies by the last layer's matrix."""
        return bool(self.__dict__.get("shortened")) and can_stop_early(self)

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        (x,) = draw((16, self.original.hs[0]))
        return self.forward(x), self.original.forward(x)


def is_e3nn_layer(layer: Any) -> bool:
    """Whether it is a layer as e3nn makes it, whose weights may be read in the place of a call."""
    kind = type(layer)
    if kind.__name__ != "_Layer":  # torch's question takes long, and each call asks
        kind = parametrize.type_before_parametrizations(layer)
    return kind.__name__ == "_Layer" and "forward" not in layer.__dict__ and not has_hooks(layer)


def can_stop_early(network: Any) -> bool:
    """Whether all are e3nn's layers, the last one is a matrix product alone, and no hook expects its weights."""
    layers: list[Any] = list(network._modules.values())
    are_known = len(layers) > 1 and all(map(is_e3nn_layer, layers))
    return are_known and layers[-1].act is None and not has_hooks(network)


def _factor(layer: Any) -> float:
    """The constant of a layer's product; of a last one without activation, that of its output too."""
    return float(((layer.var_out if layer.act is None else 1.0) / (layer.h_in * layer.var_in)) ** 0.5)


def _factor_after(layer: Any) -> float:
    """The constant of an activation."""
    return float(layer.var_out**0.5 * (1.0 if layer.act._is_id else layer.act.cst))


# The packages' polynomial cutoffs by one kernel: 1 - (p+1)(p+2)/2 x^p + p(p+2) x^(p+1) - p(p+1)/2 x^(p+2).
#
# Klicpera et al., arXiv:2003.03123. In torch's operations, value and derivatives are some 70 launches a training step.

# By module and name of the class: whether it is zero from 1 on, and its attribute by which it divides lengths.
_KNOWN = {
    ("mace.modules.radial", "PolynomialCutoff"): (True, "r_max"),
    ("nequip.nn.embedding.cutoffs", "PolynomialCutoff"): (True, ""),
    ("sevenn.nn.edge_embedding", "PolynomialCutoff"): (False, "cutoff_length"),
}


def is_cutoff(module: Any) -> bool:
    """Whether it is one of a package's, and not compiled by TorchScript."""
    kind = type(module)
    is_known = (home_of(kind), kind.__qualname__) in _KNOWN and "forward" not in module.__dict__
    return is_known and not has_hooks(module)


class AcceleratedCutoff(NodeStandIn):
    """Replaces one of these cutoffs."""

    original: Any
    detail = "one kernel on a GPU"

    def __init__(self, original: Any, **_: Any) -> None:
        super().__init__()
        is_cut = _KNOWN[home_of(type(original)), type(original).__qualname__][0]
        kind = gates.CUT_POLYNOMIAL if is_cut else gates.POLYNOMIAL
        self.__dict__["kernel"] = gates.scalar_kernel(kind, float(original.p))
        self._take_place_of(original)

    @property
    def _length(self) -> Any:
        """Where the polynomial is zero; 1 of lengths that were divided before."""
        _, name = _KNOWN[home_of(type(self.original)), type(self.original).__qualname__]
        return getattr(self.original, name) if name else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Lengths of any shape -> factors of the same shape."""
        if not (runs_eagerly(x) and gates.may_launch(x)):
            return self.original.forward(x)
        length = self._length
        rows = x if isinstance(length, float) and length == 1 else x / length
        return gates.gated(rows.reshape(-1, 1), self.kernel, self._composed).view(x.shape)

    def _composed(self, rows: Tensor) -> Tensor:
        return self.original.forward(rows * self._length)

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Lengths up to the cutoff."""
        (x,) = draw((64,))
        x = torch.sigmoid(x) * self._length
        return self.forward(x), self.original.forward(x)


# e3nn's ``FullyConnectedNet`` without its last layer, which a convolution multiplies by.


class ShortenedFullyConnectedNet(FullyConnectedNet):
    """Gives what goes into the last layer."""

    stops_early = property(can_stop_early)

    def forward(self, x: Tensor) -> Tensor:
        """x [edges, inputs] -> [edges, hidden]; all layers' output once the last one cannot be left out."""
        for layer in list(self._modules.values())[: -1 if self.stops_early else None]:
            x = layer(x)
        return x

    def matrix(self) -> Tensor:
        """[hidden, weights]."""
        *_, last = self._modules.values()
        return last.weight / (last.h_in * last.var_in / last.var_out) ** 0.5
