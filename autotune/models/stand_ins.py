"""Modules that replace e3nn's in a model. Each keeps the original, so that it can be put back.

Stand-in and original share their dictionaries of parameters, buffers and hooks. So what torch does to a stand-in
(conversion, loading, pruning, hooks) also changes the original. Children are not shared: the original's are e3nn's
generated code.
"""

from __future__ import annotations

import functools
import importlib
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from autotune.modules.base import NoTorchScript
from autotune.modules.convolution import TensorProductConv, convolve_radial
from autotune.modules.product import E3nnCheckpoints, TensorProduct
from autotune.modules.rows import SphericalHarmonics
from autotune.workload.workload import relayout
from kernelgen.compat import o3
from kernelgen.errors import UnsupportedError
from kernelgen.problem.product import problem_of

# Names of the attributes that every torch module has.
_SHARED = tuple(name for name in vars(torch.nn.Module()) if name not in ("training", "_modules"))


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling a module runs hooks. They may make its weights (pruning, the old ``weight_norm``) or watch it, so
    a stand-in may not read its weights and leave the call out.
    """
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class StandIn(torch.nn.Module):
    """Holds e3nn's module as ``original``, unregistered, and takes missing attributes from it."""

    original: torch.nn.Module

    def _take_place_of(self, original: torch.nn.Module) -> None:
        if parametrize.is_parametrized(original):
            # Nothing of its own may have the name of a tensor.
            self.__dict__.update({name: value for name, value in vars(torch.nn.Module()).items() if name in _SHARED})
            for name in original.parametrizations:  # type: ignore[union-attr]
                _parametrize_alike(self, original, name)
        self.__dict__["original"] = original
        for name in _SHARED:
            self.__dict__[name] = original.__dict__[name]
        self.train(original.training)

    def _keep_children_of(self, original: torch.nn.Module) -> None:
        """For an original whose children hold its parameters: their names in checkpoints stay."""
        self.__dict__["_modules"] = original.__dict__["_modules"]

    def put_back(self) -> torch.nn.Module:
        """The original, with all later changes of this module."""
        original = self.original
        # Attributes that are no dictionaries are copied.
        original.__dict__.update({name: self.__dict__[name] for name in _SHARED})
        hook: Any
        for hook in original._load_state_dict_pre_hooks.values():
            if getattr(hook, "with_module", False) and hook.module() is self:
                hook.module = weakref.ref(original)  # else the hook would refer to a deleted module
        # A pruned weight is a plain attribute.
        plain = {name: value for name, value in self.__dict__.items() if isinstance(value, Tensor)}
        original.__dict__.update(plain)
        for name, child in self.named_children():
            if name != "parametrizations":
                original.add_module(name, child)
        for name in self.parametrizations if parametrize.is_parametrized(self) else ():
            _parametrize_alike(original, self, name)
        theirs = cast(torch.nn.ModuleDict, original.parametrizations if parametrize.is_parametrized(original) else {})
        for name in tuple(theirs):
            if not parametrize.is_parametrized(self, name):
                _unparametrize(original, name)
        return original.train(self.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            # Parametrizations of the original are this module's own, as long as it has them.
            if original is None or name == "parametrizations" or parametrize.is_parametrized(original, name):
                raise
            return getattr(original, name)

    # A weight that a hook makes is a plain attribute: the original's until the first call, then this module's.

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Tensor):
            self._plain_of_original().pop(name, None)

    def __delattr__(self, name: str) -> None:
        if isinstance(self._plain_of_original().get(name), Tensor):
            del self._plain_of_original()[name]
        else:
            super().__delattr__(name)

    def _plain_of_original(self) -> dict[str, Any]:
        original = self.__dict__.get("original")  # a layer that was made anew has none
        return {} if original is None else original.__dict__


def _parametrize_alike(module: torch.nn.Module, other: torch.nn.Module, name: str) -> None:
    """Give a module the other's parametrization of a tensor, with the same parameters."""
    if not parametrize.is_parametrized(module, name):
        # A temporary tensor and parametrization, so that torch adds the property.
        module.register_parameter(name, torch.nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, torch.nn.Identity())
    to, of = cast(tuple[torch.nn.ModuleDict, ...], (module.parametrizations, other.parametrizations))
    to[name] = of[name]


def _unparametrize(module: torch.nn.Module, name: str) -> None:
    """Undo it without a change of the tensor, which torch's function computes anew."""
    if name in vars(type(module)):  # a copy has the class of what it is a copy of
        delattr(type(module), name)
    parametrizations = cast(torch.nn.ModuleDict, module.parametrizations)
    del parametrizations[name]
    if not parametrizations:
        del module.parametrizations
        module.__class__ = type(module).__bases__[0]


class ProductStandIn(StandIn, E3nnCheckpoints):
    """The stand-in of an ``e3nn.o3.TensorProduct``, with its parameter, checkpoint names and other attributes."""

    original: o3.TensorProduct

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for code in self.original.children() if recurse else ():
            code._apply(fn)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super(E3nnCheckpoints, self)._save_to_state_dict(destination, prefix, keep_vars)
        for name, code in self.original.named_children():
            code.state_dict(destination=destination, prefix=f"{prefix}{name}.", keep_vars=keep_vars)


def _arguments(original: o3.TensorProduct) -> dict[str, Any]:
    """The arguments with which Equitune's modules solve the same problem."""
    problem = problem_of(original)
    return {
        "irreps_in1": problem.irreps_in1,
        "irreps_in2": problem.irreps_in2,
        "irreps_out": problem.irreps_out,
        "instructions": problem.e3nn_instructions,
        "shared_weights": problem.shared_weights,
        "irrep_normalization": problem.irrep_normalization,
        "path_normalization": problem.path_normalization,
    }


class AcceleratedProduct(ProductStandIn, TensorProduct):
    """Replaces one ``e3nn.o3.TensorProduct``."""

    def __init__(self, original: o3.TensorProduct, *, strict: bool | None = None, deterministic: bool = False) -> None:
        super().__init__(**_arguments(original), internal_weights=False, strict=strict, deterministic=deterministic)
        self.internal_weights = original.internal_weights
        self._take_place_of(original)


class AcceleratedConvolution(ProductStandIn, TensorProductConv):
    """Replaces one ``e3nn.o3.TensorProduct`` together with the gather before it and the sum after it."""

    def __init__(
        self,
        original: o3.TensorProduct,
        *,
        strict: bool | None = None,
        deterministic: bool = False,
        layout: str = "mul_ir",
    ) -> None:
        if original.internal_weights:
            raise UnsupportedError("its weights are internal; a convolution takes the weights as an argument")
        super().__init__(**_arguments(original), layout=layout, strict=strict, deterministic=deterministic)
        self._take_place_of(original)

    def form_weights_of(self, network: torch.nn.Module, **how: Any) -> None:
        """Multiply by the last layer of a radial network here: the network gives what goes into it, as ``weights``.

        how: options of :func:`autotune.modules.convolution.convolve_radial`.
        """
        self.__dict__["radial"], self.__dict__["how"] = network, how

    @property
    def always_streamed(self) -> bool:
        """Whether it forms weights for some edges at a time on every device, which makes the host wait for a GPU."""
        return bool(self.__dict__.get("how", {}).get("always_streamed"))

    @property
    def is_fused(self) -> bool:
        """Whether a GPU forms the weights of energies and forces in registers."""
        return bool(self.__dict__.get("how", {}).get("fused"))

    def forward(self, x: Tensor, y: Tensor, weights: Tensor, sender: Tensor, receiver: Tensor) -> Tensor:  # type: ignore[override]
        """As :class:`autotune.TensorProductConv`'s; ``weights``: see :meth:`form_weights_of`."""
        radial: Any = self.__dict__.get("radial")
        if radial is None or not radial.stops_early:
            return super().forward(x, y, weights, sender, receiver)
        return convolve_radial(self, x, y, weights, radial.matrix(), sender, receiver, **self.__dict__["how"])

    def convolve(self, x: Tensor, y: Tensor, weights: Tensor, sender: Tensor, receiver: Tensor) -> Tensor:
        """This class's ``forward``, whatever the arguments of a subclass's."""
        return AcceleratedConvolution.forward(self, x, y, weights, sender, receiver)


class AcceleratedHarmonics(StandIn, SphericalHarmonics):
    """Replaces one ``e3nn.o3.SphericalHarmonics``, with its other attributes."""

    original: o3.SphericalHarmonics

    def __init__(
        self, original: o3.SphericalHarmonics, *, strict: bool | None = None, deterministic: bool = False
    ) -> None:
        # As text: a torch.package has an Irreps class of its own.
        options = (original.normalize, original.normalization, str(original.irreps_in))
        super().__init__(original._ls_list, *options, strict=strict)
        self._take_place_of(original)


# What Equitune knows of each package. These files import those that ask for it, so they load when they are asked.
PACKAGES = ("autotune.models.mace.package", "autotune.models.nequip.package", "autotune.models.sevennet.package")


@functools.cache
def packages() -> tuple[Any, ...]:
    """The table of each (:class:`autotune.models.package.Package`), which its file has as ``PACKAGE``."""
    return tuple(importlib.import_module(home).PACKAGE for home in PACKAGES)


@functools.cache
def of_packages(name: str) -> tuple[Any, ...]:
    """What the tables of all packages have as ``name``, such as ``blocks``."""
    return tuple(value for package in packages() for value in getattr(package, name))


# What :func:`autotune.accelerate` did to a model, as a table.

# In the order in which the table names them.
CONVOLUTIONS, CONTRACTIONS, PRODUCTS, LINEARS, RADIALS, ARRANGEMENTS, HARMONICS, CUTOFFS = KIND_NAMES = (
    *("convolutions", "symmetric contractions", "tensor products", "linear layers", "radial networks"),
    *("reshapes and gates", "spherical harmonics", "cutoffs"),
)
# What an accelerated model raises an UnsupportedError for, and stock does not.
REFUSED = "third derivatives, TorchScript"


@dataclass(frozen=True)
class Place:
    """One module of e3nn or a package: its name in the model, whether it was replaced, and with what or why not.

    kind: one of ``KIND_NAMES``.
    """

    name: str
    module: str
    replaced: bool
    detail: str
    kind: str = PRODUCTS


@dataclass(frozen=True)
class Acceleration:
    """Every tensor product and spherical harmonics module of a model, and what else changed; prints as a table.

    note: a remark on the model, such as why no module was found. step: how a calculator's inputs are made. refused:
    what stock models do and this one will not. precision: the class that was asked for, if not float32's.
    """

    places: tuple[Place, ...]
    note: str = ""
    step: str = ""
    refused: str = REFUSED
    precision: str = ""

    @property
    def line(self) -> str:
        """For a log: how many of each kind were replaced, and what stayed stock."""
        kept = [place.name for place in self.places if not place.replaced]
        others = f" and {len(kept) - 6} more" if len(kept) > 6 else ""
        stock = f"; stock: {', '.join(kept[:6])}{others}" if kept else ""
        return f"{self._head()}{stock}"

    @property
    def replaced(self) -> int:
        return sum(place.replaced for place in self.places)

    def warn_without_convolutions(self) -> None:
        """A UserWarning, with the table, if no convolution is Equitune's; for the caller of who calls this."""
        if not any(place.replaced and place.kind == CONVOLUTIONS for place in self.places):
            warnings.warn(f"no convolution of the model is Equitune's: {self}", stacklevel=3)

    def __str__(self) -> str:
        """How many of each kind, then the modules' names; those with one reason share it."""
        lines = [self._head()]
        groups: dict[tuple[bool, str], list[str]] = {}
        for place in sorted(self.places, key=lambda place: (not place.replaced, KIND_NAMES.index(place.kind))):
            groups.setdefault((place.replaced, place.detail), []).append(place.name)
        for (replaced, detail), names in groups.items():
            lines += [f"{'replaced' if replaced else 'kept':8}  {', '.join(names)}", f"          {detail}"]
        if self.step:
            lines.append(f"{'steps':8}  {self.step}")
        if self.replaced:
            lines += [f"{'refused':8}  {self.refused}", "          autotune.restore(model) makes the model stock again"]
        return "\n".join(lines)

    def _head(self) -> str:
        said = self.precision and f", {self.precision}"
        return f"{self._counts()} replaced{said}{self.note and f': {self.note}'}"

    def _counts(self) -> str:
        """Such as ``2 of 2 convolutions and 1 of 2 tensor products``."""
        counts = []
        for kind in KIND_NAMES:
            found = [place.replaced for place in self.places if place.kind == kind]
            if found or (kind == PRODUCTS and not self.places):
                counts.append(f"{sum(found)} of {len(found)} {kind}")
        return " and ".join(filter(None, (", ".join(counts[:-1]), counts[-1])))


# What all stand-ins for node features in ``ir_mul`` have in common.

# Random tensors of given shapes, of a model's device and dtype.
Draw: TypeAlias = "Callable[..., list[Tensor]]"


class NodeStandIn(StandIn, NoTorchScript):
    """Made with the arguments ``original``, ``strict`` and ``deterministic``. detail: what computes it, in words."""

    detail: str

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Its result and the original's, in the original's layout, on random inputs; here of one tensor of features."""
        irreps = (str(self.irreps_in), str(self.irreps_out))
        (x,) = draw((16, self.irreps_in.dim))
        found = self.forward(relayout(x, irreps[0], "mul_ir", "ir_mul"))
        return relayout(found, irreps[1], "ir_mul", "mul_ir"), self.original.forward(x)
