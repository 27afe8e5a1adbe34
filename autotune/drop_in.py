"""One call for a whole model: e3nn's modules enter, the same functions from generated kernels take their places.

:func:`accelerate` walks a module tree and replaces every ``e3nn.o3.TensorProduct`` and ``e3nn.o3.SphericalHarmonics``
that the generator covers; the others stay, and the table says why. Parameters are the same objects as before, so
optimizers go on; checkpoints keep e3nn's names. :func:`restore` puts e3nn's modules back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from e3nn import o3

from autotune.checkpoints import CODE
from autotune.harmonics import SphericalHarmonics
from autotune.modules import TensorProduct
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.from_e3nn import problem_of

# Largest relative difference from e3nn's own result that a replacement may have.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Place:
    """What became of one e3nn module: its name in the model, whether it was replaced, and with what or why not.

    kind: ``tensor products`` or ``spherical harmonics``.
    """

    name: str
    module: str
    replaced: bool
    detail: str
    kind: str = "tensor products"


@dataclass(frozen=True)
class Acceleration:
    """Every e3nn tensor product and spherical harmonics module of a model; prints as a table."""

    places: tuple[Place, ...]

    @property
    def replaced(self) -> int:
        return sum(place.replaced for place in self.places)

    def __str__(self) -> str:
        counts = []
        for kind in dict.fromkeys(("tensor products", *(place.kind for place in self.places))):
            found = [place.replaced for place in self.places if place.kind == kind]
            counts.append(f"{sum(found)} of {len(found)} e3nn {kind}")
        lines = [f"{' and '.join(counts)} replaced"]
        width = max((len(place.name) for place in self.places), default=0)
        for place in self.places:
            lines.append(f"{place.name:{width}}  {'replaced' if place.replaced else 'kept':8}  {place.detail}")
        return "\n".join(lines)


def accelerate(
    model: torch.nn.Module, *, strict: bool | None = None, deterministic: bool = False, check: bool = True
) -> Acceleration:
    """Replace e3nn's tensor products and spherical harmonics in ``model``, in place, where a kernel computes the same.

    strict, deterministic: as in :class:`autotune.TensorProduct`; harmonics are deterministic in any case.
    check: compare each with e3nn on random inputs, on the module's device and in its dtype (harmonics, which have
    neither: the model's), and keep e3nn's where they differ by more than ``TOLERANCE``.

    Kept as they are, with the reason in the result: modules that TorchScript or torch.compile has compiled, that have a
    ``forward``, parameters, modules or hooks of their own, or that fail when they are tried.
    """
    made: dict[torch.nn.Module, AcceleratedProduct | AcceleratedHarmonics | str] = {}
    places = []
    like = _sample_of(model)
    for parent, attribute, name, module in list(_found(model)):
        if module not in made:
            made[module] = _replacement(module, parent, strict, deterministic, like if check else None)
        found = made[module]
        kind = "spherical harmonics" if _is(module, o3.SphericalHarmonics) else "tensor products"
        if isinstance(found, str) or parent is None:
            places.append(Place(name, repr(module), False, str(found), kind))
            continue
        setattr(parent, attribute, found)
        tuning = found.tuning["forward"]
        places.append(Place(name, repr(module), True, f"schedule {tuning.origin}: {tuning.reason}", kind))
    return Acceleration(tuple(places))


def restore(model: torch.nn.Module) -> int:
    """Put e3nn's modules back where :func:`accelerate` replaced them; how many places that were."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    ours = (AcceleratedProduct, AcceleratedHarmonics)
    replaced = [(parent, name, child) for parent, name, child in found if isinstance(child, ours)]
    for parent, name, child in replaced:
        setattr(parent, name, child.original.train(child.training))
    return len(replaced)


class _StandIn(torch.nn.Module):
    """What it does not have itself is asked of the ``original``, which is not registered."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in self.__dict__:
                raise
            return getattr(self.__dict__["original"], name)


class AcceleratedProduct(_StandIn, TensorProduct):
    """Stands in for one ``e3nn.o3.TensorProduct``: its parameter, its names in checkpoints, its other attributes.

    original: the module that it stands for, not registered: it shares the parameter and waits to be put back.
    """

    def __init__(self, original: o3.TensorProduct, *, strict: bool | None = None, deterministic: bool = False) -> None:
        problem = problem_of(original)
        super().__init__(
            *(problem.irreps_in1, problem.irreps_in2, problem.irreps_out),
            problem.e3nn_instructions,
            shared_weights=problem.shared_weights,
            internal_weights=False,
            irrep_normalization=problem.irrep_normalization,
            path_normalization=problem.path_normalization,
            strict=strict,
            deterministic=deterministic,
        )
        self.__dict__["original"] = original
        self.internal_weights = original.internal_weights
        self.train(original.training)
        self._take_weight()

    def _take_weight(self) -> None:
        """``weight`` is the original's: the same parameter, or its empty buffer."""
        for kind in (self._parameters, self._buffers):
            kind.pop("weight", None)
        own = "_parameters" if "weight" in self.original._parameters else "_buffers"
        getattr(self, own)["weight"] = getattr(self.original, own)["weight"]
        self._buffers["output_mask"] = self.original.output_mask

    def __setattr__(self, name: str, value: Any) -> None:
        """Another ``weight`` is the original's too, which checkpoints and :func:`restore` take it from."""
        if name == "weight" and "original" in self.__dict__:
            setattr(self.original, name, value)
            self._take_weight()
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> AcceleratedProduct:
        self.original._apply(fn, recurse)
        self._take_weight()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.original.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)  # its code's too

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.original._load_from_state_dict(*arguments)
        self._take_weight()


class AcceleratedHarmonics(_StandIn, SphericalHarmonics):
    """Stands in for one ``e3nn.o3.SphericalHarmonics``, with its other attributes.

    original: the module that it stands for, not registered: it waits to be put back.
    """

    def __init__(self, original: o3.SphericalHarmonics, *, strict: bool | None = None) -> None:
        options = (original.normalize, original.normalization, original.irreps_in)
        super().__init__(original._ls_list, *options, strict=strict)
        self.__dict__["original"] = original
        self.train(original.training)


_KINDS = (o3.TensorProduct, o3.SphericalHarmonics)


def _is(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether it is of that e3nn class, TorchScript's form of it included (known by its name alone)."""
    name = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    scripted = "TensorProduct" in name if kind is o3.TensorProduct else name == kind.__name__
    return scripted or isinstance(module, kind)


def _found(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module | None, str, str, torch.nn.Module]]:
    """Parent, attribute, full name and module of every such e3nn module, several times where it is shared."""
    if isinstance(model, _KINDS):
        yield None, "", "(the model)", model
    for prefix, parent in model.named_modules():
        for attribute, child in parent.named_children():
            if any(_is(child, kind) for kind in _KINDS):
                yield parent, attribute, f"{prefix}.{attribute}".lstrip("."), child


def _sample_of(model: torch.nn.Module) -> torch.Tensor:
    """A tensor of the model's device and dtype: its first floating one, or one of torch's defaults."""
    tensors = (tensor for found in (model.parameters(), model.buffers()) for tensor in found)
    return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))


def _replacement(
    module: torch.nn.Module,
    parent: torch.nn.Module | None,
    strict: bool | None,
    deterministic: bool,
    like: torch.Tensor | None,
) -> AcceleratedProduct | AcceleratedHarmonics | str:
    """The module that takes another's place, or why that stays; compared with it unless ``like`` is None."""
    kind = next(kind for kind in _KINDS if _is(module, kind))
    if parent is None:
        return f"it is the model itself; wrap it in a module, or build an autotune.{kind.__name__}"
    if type(parent).__name__ == "OptimizedModule":
        return "torch.compile holds it; accelerate the model first"
    if not isinstance(module, _KINDS):
        return "TorchScript has compiled it; accelerate the model before torch.jit.script"
    if reason := _what_would_be_lost(module, kind):
        return reason
    try:
        if isinstance(module, o3.TensorProduct):
            product = AcceleratedProduct(module, strict=strict, deterministic=deterministic)
            return (_difference(module, product) if like is not None else "") or product
        harmonics = AcceleratedHarmonics(module, strict=strict)
        return (_difference_of_harmonics(module, harmonics, like) if like is not None else "") or harmonics
    except (UnsupportedError, ProblemError) as reason:
        return str(reason)
    except Exception as reason:  # of the kernel or of e3nn's own module: one that fails may not stop the others
        return f"{type(reason).__name__}: {reason}"


def _what_would_be_lost(module: torch.nn.Module, kind: type[torch.nn.Module]) -> str:
    """What a replacement would not do that the module does, in words; empty if nothing."""
    name = type(module).__name__
    for method in ("forward", "right"):
        if method in module.__dict__ or getattr(type(module), method, None) is not getattr(kind, method, None):
            return f"{name} has a {method} of its own"
    own = {"weight", *(code.rstrip(".") for code in CODE)}
    more = (*module._parameters, *module._modules) if kind is o3.TensorProduct else ()
    extra = [part for part in more if part not in own]
    if extra:
        return f"{name} has parameters or modules of its own: {', '.join(extra)}"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, hook, None) for hook in hooks):
        return "it has hooks, which would not be called; register them after accelerate"
    return ""


def _normal(like: torch.Tensor, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random inputs, the same at every call."""
    if like.dtype not in TOLERANCE:
        raise UnsupportedError(f"it is {like.dtype}; kernels are generated for float32 and float64")
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(like) for shape in shapes]


@torch.no_grad()
def _difference(module: o3.TensorProduct, made: AcceleratedProduct) -> str:
    """How far both results on random inputs differ, empty where they do not."""
    rows, weight = _CHECKED_ROWS, (module.weight_numel,)
    shapes = ((rows, module.irreps_in1.dim), (rows, module.irreps_in2.dim))
    given = _normal(module.output_mask, *shapes, weight if module.shared_weights else (rows, *weight))
    return _compared(made(*given), module(*given))


@torch.no_grad()
def _difference_of_harmonics(module: o3.SphericalHarmonics, made: AcceleratedHarmonics, like: torch.Tensor) -> str:
    (x,) = _normal(like, (_CHECKED_ROWS, 3))
    return _compared(made(x), module(x))


def _compared(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Of the largest difference, relative to the largest element: whether it is above the tolerance."""
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if wanted.numel() else 0.0
    limit = TOLERANCE[wanted.dtype]
    return "" if error <= limit else f"differs from e3nn by {error:.1e}, more than {limit:.0e}"
