"""Replace e3nn's modules in a model by generated kernels, in one call.

:func:`accelerate` replaces every ``e3nn.o3.TensorProduct`` and ``e3nn.o3.SphericalHarmonics`` in a module tree that the
generator covers. The others stay, and the returned table says why. Parameters stay the same objects, so optimizers keep
working; checkpoints keep e3nn's names. :func:`restore` puts e3nn's modules back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

import torch

from autotune.modules.e3nn_checkpoints import CODE
from autotune.modules.stand_ins import AcceleratedHarmonics, AcceleratedProduct, StandIn
from kernelgen.e3nn_import import o3
from kernelgen.errors import InputError, ProblemError, UnsupportedError

# Largest allowed relative difference between a replacement's result and e3nn's.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Place:
    """One e3nn module: its name in the model, whether it was replaced, and with what or why not.

    kind: ``tensor products`` or ``spherical harmonics``.
    """

    name: str
    module: str
    replaced: bool
    detail: str
    kind: str = "tensor products"


@dataclass(frozen=True)
class Acceleration:
    """Every e3nn tensor product and spherical harmonics module of a model; prints as a table.

    note: a remark on the model, such as why no module was found.
    """

    places: tuple[Place, ...]
    note: str = ""

    @property
    def replaced(self) -> int:
        return sum(place.replaced for place in self.places)

    def __str__(self) -> str:
        counts = []
        for kind in dict.fromkeys(("tensor products", *(place.kind for place in self.places))):
            found = [place.replaced for place in self.places if place.kind == kind]
            counts.append(f"{sum(found)} of {len(found)} e3nn {kind}")
        lines = [f"{' and '.join(counts)} replaced{self.note and f': {self.note}'}"]
        width = max((len(place.name) for place in self.places), default=0)
        for place in self.places:
            lines.append(f"{place.name:{width}}  {'replaced' if place.replaced else 'kept':8}  {place.detail}")
        return "\n".join(lines)


def accelerate(
    model: torch.nn.Module, *, strict: bool | None = None, deterministic: bool = False, check: bool = True
) -> Acceleration:
    """Replace e3nn's tensor products and spherical harmonics in ``model``, in place, where a kernel computes the same.

    strict, deterministic: as in :class:`autotune.TensorProduct`; harmonics are always deterministic.
    check: compare each replacement with e3nn on random inputs, on the module's device and in its dtype (for harmonics,
    which have neither, the model's). A replacement that differs by more than ``TOLERANCE`` is not used.

    Some modules stay, with the reason in the result: those compiled by TorchScript or torch.compile, those with a
    ``forward``, parameters or modules of their own, and those that fail when tried. Hooks, parametrizations and pruning
    of a replacement pass to e3nn's module when it is put back. Raises InputError if ``model`` is no module.
    """
    _check_module(model)
    made: dict[torch.nn.Module, AcceleratedProduct | AcceleratedHarmonics | str] = {}
    places: list[Place] = []
    like = _sample_of(model)
    before = sum(isinstance(module, StandIn) for module in model.modules())
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
    return Acceleration(tuple(places), _note(model, before, places))


def restore(model: torch.nn.Module) -> int:
    """Put e3nn's modules back where :func:`accelerate` replaced them; returns the number of places.

    Changes to the replacements carry over: another weight, hooks, parametrizations, pruning, the mode.
    """
    _check_module(model)
    found = [(parent, name, child) for parent in model.modules() for name, child in _children(parent)]
    replaced = [(parent, name, child) for parent, name, child in found if isinstance(child, StandIn)]
    for parent, name, child in replaced:
        setattr(parent, name, child.put_back())
    return len(replaced)


def _check_module(model: object) -> None:
    if isinstance(model, str | PathLike):
        raise InputError(
            f"model is the path {str(model)!r}; expected a torch.nn.Module: load the file first, "
            "with torch.load(path, weights_only=False) if it holds a whole model"
        )
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is of type {type(model).__name__}; expected a torch.nn.Module")


def _children(parent: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Attribute and module of each child; unlike ``named_children``, once per attribute of a shared child."""
    return ((name, child) for name, child in parent._modules.items() if child is not None)


def _note(model: torch.nn.Module, before: int, places: list[Place]) -> str:
    """Why nothing was found in a model, and how many modules were replaced ``before``."""
    if before:
        return f"{before} modules were replaced before"
    if places:
        return ""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return (
                f"TorchScript has compiled {name or 'the model'}; accelerate the model before torch.jit.script, "
                "torch.jit.trace and torch.jit.freeze"
            )
        if isinstance(module, torch.fx.GraphModule):
            return f"{name or 'the model'} is a graph of torch.fx; accelerate the model before it is traced or exported"
    return "the model has no module of e3nn.o3.TensorProduct or e3nn.o3.SphericalHarmonics"


_KINDS = (o3.TensorProduct, o3.SphericalHarmonics)


def _is(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether it is of that e3nn class, or TorchScript's form of it (recognised by name)."""
    name = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    scripted = "TensorProduct" in name if kind is o3.TensorProduct else name == kind.__name__
    return scripted or isinstance(module, kind)


def _found(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module | None, str, str, torch.nn.Module]]:
    """Parent, attribute, full name and module of every such e3nn module; a shared one appears several times."""
    if isinstance(model, _KINDS):
        yield None, "", "(the model)", model
    for prefix, parent in model.named_modules():
        for attribute, child in _children(parent):
            if any(_is(child, kind) for kind in _KINDS):
                yield parent, attribute, f"{prefix}.{attribute}".lstrip("."), child


def _sample_of(model: torch.nn.Module) -> torch.Tensor:
    """A tensor with the model's device and dtype: its first floating-point one, else one with torch's defaults."""
    tensors = (tensor for found in (model.parameters(), model.buffers()) for tensor in found)
    return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))


def _replacement(
    module: torch.nn.Module,
    parent: torch.nn.Module | None,
    strict: bool | None,
    deterministic: bool,
    like: torch.Tensor | None,
) -> AcceleratedProduct | AcceleratedHarmonics | str:
    """The replacement of a module, or why the module stays. Both are compared unless ``like`` is None."""
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
    except Exception as reason:  # from the kernel or from e3nn's module: one failure must not stop the others
        return f"{type(reason).__name__}: {reason}"


def _what_would_be_lost(module: torch.nn.Module, kind: type[torch.nn.Module]) -> str:
    """What the module does that a replacement would not, in words; empty if nothing."""
    name = type(module).__name__
    for method in ("forward", "right"):
        if method in module.__dict__ or getattr(type(module), method, None) is not getattr(kind, method, None):
            return f"{name} has a {method} of its own"
    own = {"weight", *(code.rstrip(".") for code in CODE)}
    more = (*module._parameters, *module._modules) if kind is o3.TensorProduct else ()
    extra = [part for part in more if part not in own]
    if extra:
        return f"{name} has parameters or modules of its own: {', '.join(extra)}"
    return ""


def _normal(like: torch.Tensor, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random inputs, the same at every call."""
    if like.dtype not in TOLERANCE:
        raise UnsupportedError(f"it is {like.dtype}; kernels are generated for float32 and float64")
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(like) for shape in shapes]


@torch.no_grad()
def _difference(module: o3.TensorProduct, made: AcceleratedProduct) -> str:
    """How far both results differ on random inputs; empty if they agree. Hooks are not called."""
    rows, weight = _CHECKED_ROWS, (module.weight_numel,)
    shapes = ((rows, module.irreps_in1.dim), (rows, module.irreps_in2.dim))
    given = _normal(module.output_mask, *shapes, weight if module.shared_weights else (rows, *weight))
    return _compared(made.forward(*given), module.forward(*given))


@torch.no_grad()
def _difference_of_harmonics(module: o3.SphericalHarmonics, made: AcceleratedHarmonics, like: torch.Tensor) -> str:
    (x,) = _normal(like, (_CHECKED_ROWS, 3))
    return _compared(made.forward(x), module.forward(x))


def _compared(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """The largest difference, relative to the largest element, if it exceeds the tolerance; else empty."""
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if wanted.numel() else 0.0
    limit = TOLERANCE[wanted.dtype]
    return "" if error <= limit else f"differs from e3nn by {error:.1e}, more than {limit:.0e}"
