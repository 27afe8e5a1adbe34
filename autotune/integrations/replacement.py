"""Make a stand-in for one of e3nn's modules and compare both, or say in words why the module stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from autotune.integrations.acceleration import HARMONICS, PRODUCTS
from autotune.integrations.convolution_block import ConvolutionBlock, home_of
from autotune.integrations.ir_mul.stand_in import NodeStandIn
from autotune.integrations.packages.package_product import PackageStandIn, product_of
from autotune.integrations.stand_ins import AcceleratedConvolution, AcceleratedHarmonics, AcceleratedProduct
from autotune.modules.product import CODE, MATRIX_WEIGHTS
from autotune.workload.workload import relayout
from kernelgen.compat import o3
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.problem.product import problem_of

TunedStandIn: TypeAlias = AcceleratedProduct | AcceleratedConvolution | AcceleratedHarmonics | PackageStandIn
AnyStandIn: TypeAlias = TunedStandIn | NodeStandIn

# Largest allowed relative difference between a replacement's result and e3nn's.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
_CHECKED_ROWS = 16


# By the words for them in the table.
KINDS: dict[str, type[torch.nn.Module]] = {
    PRODUCTS: o3.TensorProduct,
    HARMONICS: o3.SphericalHarmonics,
}


def is_of(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether it is of that e3nn class, or TorchScript's form of it (recognised by name)."""
    name = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    scripted = "TensorProduct" in name if kind is o3.TensorProduct else name == kind.__name__
    return scripted or e3nn_class(module, kind) is not None


def e3nn_class(module: torch.nn.Module, kind: type[torch.nn.Module]) -> type | None:
    """That class of e3nn among the module's own: the installed e3nn's, or that of a torch.package (NequIP's files)."""
    name = (kind.__module__, kind.__qualname__)
    return next((base for base in type(module).__mro__ if (home_of(base), base.__qualname__) == name), None)


def kind_of(module: torch.nn.Module) -> str | None:
    """The words for a module that might be replaced, None for any other."""
    found = next((words for words, kind in KINDS.items() if is_of(module, kind)), None)
    product = product_of(module) if found is None else None
    return found if product is None else product.kind


class Replacing:
    """Makes the stand-ins of one model.

    like: a tensor with the model's device and dtype, or None if stand-ins are not to be compared with e3nn.
    unfused: by product, why no convolution takes its place though its block has one.
    """

    def __init__(self, strict: bool | None, deterministic: bool, like: torch.Tensor | None) -> None:
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
    kind = next(kind for kind in KINDS.values() if is_of(module, kind))
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


def normal(like: torch.Tensor, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random inputs, the same at every call."""
    if like.dtype not in TOLERANCE:
        raise UnsupportedError(f"it is {like.dtype}; kernels are generated for float32 and float64")
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(like) for shape in shapes]


@torch.no_grad()
def difference(module: Any, made: AnyStandIn, like: torch.Tensor) -> str:
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


def _results(
    made: TunedStandIn, module: o3.TensorProduct, given: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
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


def check_graph(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Senders and receivers of as many edges as there are nodes: several at some nodes, none at others."""
    edges = torch.arange(_CHECKED_ROWS, device=device)
    return (3 * edges + 1) % len(edges), edges // 3


def _was_rounded(module: torch.nn.Module) -> bool:
    """Whether all constants of e3nn's code are float32's, though they are stored as float64."""
    constants = [buffer for name, buffer in module.named_buffers() if name.startswith(CODE)]
    return bool(constants) and all(torch.equal(constant, constant.float().double()) for constant in constants)


def compared(found: torch.Tensor, wanted: torch.Tensor, whose: str = "e3nn") -> str:
    """The largest difference, relative to the largest element, if it exceeds the tolerance; else empty."""
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if wanted.numel() else 0.0
    limit = TOLERANCE[wanted.dtype]
    return "" if error <= limit else f"differs from {whose} by {error:.1e}, more than {limit:.0e}"
