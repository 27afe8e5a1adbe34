"""What :func:`autotune.accelerate` must know of a package's block that gathers, multiplies and sums.

Every file of ``packages/`` has ``BLOCKS``: its kinds of block. A block keeps its identity, parameters, hooks and names
in checkpoints; only its product is replaced by a convolution, and the block is told to call that.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod

import torch
from torch.nn.utils import parametrize

from autotune.integrations.stand_ins import AcceleratedConvolution
from kernelgen.folder import collected


class ConvolutionBlock(ABC):
    """One kind of block of a package.

    module: the Python module with the block's class. names: the class's name and those of its variants there.
    product: the attribute of the block that holds e3nn's product. stand_in: the class that takes the product's place.
    """

    module: str
    names: tuple[str, ...]
    product: str
    stand_in: type[AcceleratedConvolution] = AcceleratedConvolution

    def matches(self, block: torch.nn.Module) -> bool:
        """Whether it is such a block with e3nn's product in it, known by the name of its class."""
        return home_of(type(block)) == self.module and type(block).__qualname__ in self.names

    @abstractmethod
    def fuse(self, block: torch.nn.Module) -> None:
        """Have the block call its product with the graph. The product was replaced before."""

    @abstractmethod
    def unfuse(self, block: torch.nn.Module) -> bool:
        """Undo :meth:`fuse`; whether there was something to undo. The product is put back afterwards."""


class RetypedBlock(ConvolutionBlock):
    """A block whose ``forward`` changes: the instance gets a subclass with the new one, which ``restore`` takes away.

    fused: where the subclass is, as ``module:name``. That module imports the package, so it is loaded only here. The
    class can be imported by name, so models can be pickled.
    """

    fused: str

    def fuse(self, block: torch.nn.Module) -> None:
        retype(block, self.fused)

    def unfuse(self, block: torch.nn.Module) -> bool:
        return take_type_back(block, self.fused)


def retype(module: torch.nn.Module, place: str) -> None:
    """Change an instance's class to the subclass at ``place``, written ``module:name``.

    A module of a torch.package, whose classes are its own, gets a subclass of these; such models cannot be pickled
    anyway.
    """
    home, name = place.split(":")
    changed = getattr(importlib.import_module(home), name)
    if not issubclass(changed, type(module)):
        methods = {key: value for key, value in vars(changed).items() if not key.startswith("__")}
        changed = type(name, (type(module),), {**methods, "__module__": home})
    module.__class__ = changed


def take_type_back(module: torch.nn.Module, place: str) -> bool:
    """Undo :func:`retype`; whether there was something to undo. A parametrization from after it stays."""
    kind = type(module)
    changed = kind if _place(kind) == place else parametrize.type_before_parametrizations(module)
    if _place(changed) != place:
        return False
    before = changed.__mro__[1]
    if kind is changed:
        module.__class__ = before
    else:  # torch put its class on top; copies of the module have it too
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = type(f"Parametrized{before.__name__}", (before,), own)
    return True


def _place(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def home_of(kind: type) -> str:
    """The module of a class; of one that was loaded from a torch.package, the module that was packaged."""
    name = kind.__module__
    return name.partition(">.")[2] if name.startswith("<torch_package_") else name


@functools.cache
def known_blocks() -> tuple[ConvolutionBlock, ...]:
    """The blocks of all packages."""
    return tuple(block for blocks in collected("autotune.integrations.packages", "BLOCKS") for block in blocks)
