"""Make a stand-in for one of e3nn's modules and compare both, or say in words why the module stays."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from autotune.database.lookup import Tuning
from autotune.models.stand_ins import (
    CONVOLUTIONS,
    HARMONICS,
    PRODUCTS,
    AcceleratedConvolution,
    AcceleratedHarmonics,
    AcceleratedProduct,
    NodeStandIn,
    Place,
    StandIn,
    of_packages,
)
from autotune.modules.base import NoTorchScript
from autotune.modules.convolution import TensorProductConv
from autotune.modules.product import CODE, MATRIX_WEIGHTS
from autotune.workload.workload import relayout
from kernelgen.compat import o3
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.problem.product import problem_of

# What :func:`autotune.accelerate` must know of a package's block that gathers, multiplies and sums.
#
# Every package's table has ``blocks``: its kinds of block. A block keeps its identity, parameters, hooks and
# names in checkpoints; only its product is replaced by a convolution, and the block is told to call that.


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


def full_name(kind: type) -> str:
    """``module.Class``, the module as :func:`home_of` gives it."""
    return f"{home_of(kind)}.{kind.__qualname__}"


# What :func:`autotune.accelerate` must know of a package's own product, one that is no module of e3nn's.


class PackageStandIn(StandIn, NoTorchScript):
    """Replaces one product of a package. Made with the arguments ``original``, ``strict`` and ``deterministic``.

    Parameters and names in checkpoints stay the package's. computed_by: its attribute with the module of Equitune's.
    """

    computed_by: str

    def tuning_for(self, *arguments: Any) -> Mapping[str, Tuning]:
        """As of :class:`autotune.TensorProduct`."""
        return getattr(self, self.computed_by).tuning_for(*arguments)

    @property
    def tuning(self) -> Mapping[str, Tuning]:
        """As of :class:`autotune.TensorProduct`."""
        return getattr(self, self.computed_by).tuning

    @abstractmethod
    def both_results(self, normal: Callable[..., list[Tensor]]) -> tuple[Tensor, Tensor]:
        """Its result and the original's on random inputs; ``normal`` makes them from a tensor like them and shapes."""


@dataclass(frozen=True)
class PackageProduct:
    """One of the ``products`` of a package's table.

    why_it_stays: of a module, the reason; empty if it can be replaced; None if it is no such product. kind: the words
    for it in the table of ``accelerate``.
    """

    why_it_stays: Callable[[torch.nn.Module], str | None]
    stand_in: type[PackageStandIn]
    kind: str = PRODUCTS


def product_of(module: torch.nn.Module) -> PackageProduct | None:
    """The package's product that a module is, if any."""
    known: tuple[PackageProduct, ...] = of_packages("products")
    return next((product for product in known if product.why_it_stays(module) is not None), None)


TunedStandIn: TypeAlias = AcceleratedProduct | AcceleratedConvolution | AcceleratedHarmonics | PackageStandIn
AnyStandIn: TypeAlias = TunedStandIn | NodeStandIn

# Largest allowed relative difference between a replacement's result and e3nn's.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
_CHECKED_ROWS = 16


def _kinds() -> dict[str, type[torch.nn.Module]]:
    """e3nn's classes by the words for them in the table."""
    return {PRODUCTS: o3.TensorProduct, HARMONICS: o3.SphericalHarmonics}


def is_of(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether it is of that e3nn class, or TorchScript's form of it (recognised by name)."""
    name = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    scripted = "TensorProduct" in name if kind is o3.TensorProduct else name == kind.__name__
    return scripted or e3nn_class(module, kind) is not None


def e3nn_class(module: torch.nn.Module, kind: type[torch.nn.Module]) -> type | None:
    """That class of e3nn among the module's own: the installed e3nn's, or that of a torch.package (NequIP's files)."""
    return next((base for base in type(module).__mro__ if full_name(base) == full_name(kind)), None)


def kind_of(module: torch.nn.Module) -> str | None:
    """The words for a module that might be replaced, None for any other."""
    found = next((words for words, kind in _kinds().items() if is_of(module, kind)), None)
    product = product_of(module) if found is None else None
    return found if product is None else product.kind


class Replacing:
    """Makes the stand-ins of one model.

    like: a tensor with the model's device and dtype, or None if stand-ins are not to be compared with e3nn.
    unfused: by product, why no convolution takes its place though its block has one.
    """

    def __init__(self, strict: bool | None, deterministic: bool, like: Tensor | None) -> None:
        self.strict, self.deterministic, self.like = strict, deterministic, like
        self.unfused: dict[torch.nn.Module, str] = {}
        self._made: dict[tuple[torch.nn.Module, object], Any] = {}

    def stand_in(
        self, module: torch.nn.Module, parent: torch.nn.Module | None, block: ConvolutionBlock | None
    ) -> TunedStandIn | str:
        """The stand-in for a module, the same at every place; or why it stays."""
        if (product := product_of(module)) is not None:
            return product.why_it_stays(module) or self._tried(module, product.stand_in)
        if reason := why_it_stays(module, parent):
            return reason
        is_product = is_of(module, o3.TensorProduct)
        if block is not None and is_product:
            found = self._tried(module, block.stand_in)
            if not isinstance(found, str):
                return found
            self.unfused[module] = found
        if is_product and _weighs_scalars(module):
            return _FASTER_IN_E3NN
        return self._tried(module, AcceleratedProduct if is_product else AcceleratedHarmonics)

    def _tried(self, module: torch.nn.Module, kind: Callable[..., TunedStandIn]) -> TunedStandIn | str:
        if (module, kind) not in self._made:
            self._made[module, kind] = self.made_and_compared(module, kind)
        return self._made[module, kind]

    def made_and_compared(self, module: Any, kind: Callable[..., AnyStandIn]) -> AnyStandIn | str:
        """A stand-in of this kind, or why there is none."""
        try:
            made = kind(module, strict=self.strict, deterministic=self.deterministic)
            return (difference(module, made, self.like) if self.like is not None else "") or made
        except (UnsupportedError, ProblemError) as reason:
            return str(reason)
        except Exception as reason:  # from the kernel or from e3nn's module: one failure must not stop the others
            return f"{type(reason).__name__}: {reason}"


def why_it_stays(module: torch.nn.Module, parent: torch.nn.Module | None) -> str:
    """Why a module cannot be replaced whatever it computes; empty if it can."""
    kind = next(kind for kind in _kinds().values() if is_of(module, kind))
    if parent is None:
        return f"it is the model itself; wrap it in a module, or build an autotune.{kind.__name__}"
    if type(parent).__name__ == "OptimizedModule":
        return "torch.compile holds it; accelerate the model first"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript has compiled it; accelerate the model before torch.jit.script"
    return what_would_be_lost(module, kind)


_FASTER_IN_E3NN = "e3nn's own code is faster here: it contracts the weights with the scalars of the second input first"


def _weighs_scalars(module: Any) -> bool:
    """Whether it is a self-connection: all weights shared and many, and the second input scalars (species).

    e3nn contracts scalars and weights first, once for all components of an irrep. Equitune's matrix contraction forms
    all pairs first: on two cores of a Xeon, energies and forces of 424 atoms, it took 1.4 to 3.1 times as long for the
    self-connections of NequIP-OAM-L, SevenNet-0 and MACE-MP-0 medium.
    """
    is_weighted = all(path.connection_mode == "uvw" and path.has_weight for path in module.instructions)
    is_scalar = all(ir.l == 0 for _, ir in o3.Irreps(str(module.irreps_in2)))
    return is_weighted and is_scalar and module.shared_weights and module.weight_numel >= MATRIX_WEIGHTS


def what_would_be_lost(module: torch.nn.Module, kind: type[torch.nn.Module]) -> str:
    """What the module does that a replacement would not, in words; empty if nothing."""
    name = type(module).__name__
    base = e3nn_class(module, kind)
    for method in ("forward", "right"):
        if method in module.__dict__ or getattr(type(module), method, None) is not getattr(base, method, None):
            return f"{name} has a {method} of its own"
    own = {"weight", *(code.rstrip(".") for code in CODE)}
    more = (*module._parameters, *module._modules) if kind is o3.TensorProduct else ()
    extra = [part for part in more if part not in own]
    if extra:
        return f"{name} has parameters or modules of its own: {', '.join(extra)}"
    return ""


def check_e3nn(module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """UnsupportedError unless it is of that e3nn class, and does what the class does."""
    if e3nn_class(module, kind) is None:
        raise UnsupportedError(f"a {kind.__name__} is a {type(module).__name__}, not e3nn's")
    if reason := what_would_be_lost(module, kind):
        raise UnsupportedError(reason)


def normal(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Random inputs, the same at every call."""
    if like.dtype not in TOLERANCE:
        raise UnsupportedError(f"it is {like.dtype}; kernels are generated for float32 and float64")
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(like) for shape in shapes]


@torch.no_grad()
def difference(module: Any, made: AnyStandIn, like: Tensor) -> str:
    """How far both results differ on random inputs; empty if they agree. Hooks are not called."""
    if isinstance(made, NodeStandIn):
        return compared(*made.both_results(functools.partial(normal, like)))
    if isinstance(made, PackageStandIn):
        return compared(*made.both_results(normal), "the package's own")
    if isinstance(made, AcceleratedHarmonics):
        (x,) = normal(like, (_CHECKED_ROWS, 3))
        return compared(made.forward(x), module.forward(x))
    rows, numbers = _CHECKED_ROWS, (module.weight_numel,)
    shapes = ((rows, module.irreps_in1.dim), (rows, module.irreps_in2.dim))
    given = normal(module.output_mask, *shapes, numbers if module.shared_weights else (rows, *numbers))
    found, wanted = _results(made, module, given)
    reason = compared(found, wanted)
    if reason and wanted.dtype == torch.float64 and _was_rounded(module):
        # Converted from float32: e3nn's constants were rounded then, the kernel's are not.
        exact = problem_of(module).reference(compile_right=False).to(wanted)
        closest = _results(made, exact, given)
        return compared(*closest) or compared(found.float(), wanted.float())
    return reason


def _results(made: TunedStandIn, module: o3.TensorProduct, given: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The stand-in's result and e3nn's; a convolution's on a graph with several edges a node, and nodes without any."""
    if not isinstance(made, AcceleratedConvolution):
        return made.forward(*given), module.forward(*given)
    x, y, weight = given
    sender, receiver = check_graph(x.device)
    messages = module.forward(x[sender], y, weight)
    wanted = messages.new_zeros(messages.shape).index_add(0, receiver, messages)
    irreps = (str(module.irreps_in1), str(module.irreps_out))
    found = made.convolve(relayout(x, irreps[0], "mul_ir", made.layout), y, weight, sender, receiver)
    return relayout(found, irreps[1], made.layout, "mul_ir"), wanted


def check_graph(device: torch.device) -> tuple[Tensor, Tensor]:
    """Senders and receivers of as many edges as there are nodes: several at some nodes, none at others."""
    edges = torch.arange(_CHECKED_ROWS, device=device)
    return (3 * edges + 1) % len(edges), edges // 3


def _was_rounded(module: torch.nn.Module) -> bool:
    """Whether all constants of e3nn's code are float32's, though they are stored as float64."""
    constants = [buffer for name, buffer in module.named_buffers() if name.startswith(CODE)]
    return bool(constants) and all(torch.equal(constant, constant.float().double()) for constant in constants)


def compared(found: Tensor, wanted: Tensor, whose: str = "e3nn") -> str:
    """The largest difference, relative to the largest element, if it exceeds the tolerance; else empty."""
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if wanted.numel() else 0.0
    limit = TOLERANCE[wanted.dtype]
    return "" if error <= limit else f"differs from {whose} by {error:.1e}, more than {limit:.0e}"


# Equitune's convolution in blocks that a package's conversion gave another library's (cuEquivariance, for one).
#
# The other parts of the conversion stay, such as cuEquivariance's symmetric contraction. A package's table may have
# ``exchanges``: its kinds of such blocks.


class ExchangedConvolution(StandIn, TensorProductConv):
    """Replaces another library's convolution; checkpoints keep the names of its parameters and children."""

    def __init__(self, original: torch.nn.Module, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._take_place_of(original)
        self._keep_children_of(original)


class Exchange(ABC):
    """One kind of block. product: the attribute that holds the other library's convolution."""

    product: str

    @abstractmethod
    def library(self, block: torch.nn.Module) -> str:
        """The name of the library whose convolution the block holds; empty for any other module."""

    @abstractmethod
    def stand_in(self, block: Any, **options: Any) -> ExchangedConvolution:
        """Equitune's convolution for this block, with the options ``strict`` and ``deterministic``."""

    @abstractmethod
    def convolved(self, block: Any, x: Tensor, y: Tensor, weights: Tensor, edges: Tensor) -> Tensor:
        """What the block's own convolution gives, ``edges`` [2, edges] being senders and receivers."""

    @abstractmethod
    def fuse(self, block: torch.nn.Module) -> None:
        """Have the block call its product with the graph."""


def exchange_all(model: torch.nn.Module, replacing: Replacing) -> Iterator[Place]:
    """Exchange every such convolution of a model, in place."""
    for name, block in list(model.named_modules()):
        for kind in of_packages("exchanges"):
            if library := kind.library(block):
                yield _exchanged(replacing, kind, block, f"{name}.{kind.product}".lstrip("."), library)


def _exchanged(replacing: Replacing, kind: Exchange, block: torch.nn.Module, name: str, library: str) -> Place:
    original = getattr(block, kind.product)
    try:
        made = kind.stand_in(block, strict=replacing.strict, deterministic=replacing.deterministic)
        reason = "" if replacing.like is None else _difference(kind, block, made, replacing.like)
    except Exception as error:  # from the kernel or from the library: one failure must not stop the others
        reason = f"{type(error).__name__}: {error}"
    if reason:
        return Place(name, repr(original), False, f"{library} computes it: {reason}", CONVOLUTIONS)
    setattr(block, kind.product, made)
    kind.fuse(block)
    chosen = made.tuning["forward"]
    detail = f"in the place of {library}'s; schedule {chosen.origin}: {chosen.reason}"
    return Place(name, repr(original), True, detail, CONVOLUTIONS)


@torch.no_grad()
def _difference(kind: Exchange, block: Any, made: ExchangedConvolution, like: Tensor) -> str:
    """How far the two convolutions differ on random inputs; empty if they agree."""
    sizes = (made.irreps_in1.dim, made.irreps_in2.dim, made.weight_numel)
    sender, receiver = check_graph(like.device)
    x, y, weights = normal(like, *((len(sender), size) for size in sizes))
    found = TensorProductConv.forward(made, x, y, weights, sender, receiver)
    return compared(found, kind.convolved(block, x, y, weights, torch.stack((sender, receiver))))
