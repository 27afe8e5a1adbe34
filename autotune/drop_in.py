"""One call for a whole model: e3nn tensor products enter, the same products from tuned kernels take their places.

:func:`accelerate` walks a module tree and replaces every ``e3nn.o3.TensorProduct`` that the generator covers; the
others stay, and the table says why. Parameters are the same objects as before, so optimizers go on; checkpoints keep
e3nn's names. :func:`restore` puts e3nn's modules back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from e3nn import o3

from autotune.modules import TensorProduct
from kernelgen.errors import EquituneError, ProblemError, UnsupportedError
from kernelgen.from_e3nn import problem_of

# Largest relative difference from e3nn's own result that a replacement may have.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Place:
    """What became of one e3nn product: its name in the model, whether it was replaced, and with what or why not."""

    name: str
    module: str
    replaced: bool
    detail: str


@dataclass(frozen=True)
class Acceleration:
    """Every e3nn tensor product of a model; prints as a table."""

    places: tuple[Place, ...]

    @property
    def replaced(self) -> int:
        return sum(place.replaced for place in self.places)

    def __str__(self) -> str:
        lines = [f"{self.replaced} of {len(self.places)} e3nn tensor products replaced"]
        width = max((len(place.name) for place in self.places), default=0)
        for place in self.places:
            lines.append(f"{place.name:{width}}  {'replaced' if place.replaced else 'kept':8}  {place.detail}")
        return "\n".join(lines)


def accelerate(
    model: torch.nn.Module, *, strict: bool | None = None, deterministic: bool = False, check: bool = True
) -> Acceleration:
    """Replace the e3nn tensor products of ``model``, in place, where a generated kernel computes the same.

    strict, deterministic: as in :class:`autotune.TensorProduct`. check: compare each with e3nn on random inputs, on the
    module's device and in its dtype, and keep e3nn's where they differ by more than ``TOLERANCE``.

    Kept as they are, with the reason in the result: modules that TorchScript has compiled, and subclasses with a
    ``forward`` of their own.
    """
    made: dict[torch.nn.Module, AcceleratedProduct | str] = {}
    places = []
    for parent, attribute, name, module in list(_products(model)):
        if module not in made:
            made[module] = _replacement(module, parent is None, strict, deterministic, check)
        found = made[module]
        if isinstance(found, str) or parent is None:
            places.append(Place(name, repr(module), False, str(found)))
            continue
        setattr(parent, attribute, found)
        tuning = found.tuning["forward"]
        places.append(Place(name, repr(module), True, f"schedule {tuning.origin}: {tuning.reason}"))
    return Acceleration(tuple(places))


def restore(model: torch.nn.Module) -> int:
    """Put e3nn's modules back where :func:`accelerate` replaced them; how many places that were."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    replaced = [(parent, name, child) for parent, name, child in found if isinstance(child, AcceleratedProduct)]
    for parent, name, child in replaced:
        setattr(parent, name, child.original)
    return len(replaced)


class AcceleratedProduct(TensorProduct):
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

    def forward(self, x: torch.Tensor, y: torch.Tensor, weight: Any = None) -> torch.Tensor:
        """As :meth:`autotune.TensorProduct.forward`; weight may also be e3nn's list, a tensor a path."""
        return super().forward(x, y, self.original._prep_weights_python(weight))

    def right(self, y: torch.Tensor, weight: Any = None) -> torch.Tensor:
        """``e3nn.o3.TensorProduct.right``, by e3nn itself."""
        return self.original.right(y, weight)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in self.__dict__:
                raise
            return getattr(self.__dict__["original"], name)

    def _take_weight(self) -> None:
        """``weight`` is the original's: the same parameter, or its empty buffer."""
        for kind in (self._parameters, self._buffers):
            kind.pop("weight", None)
        own = "_parameters" if "weight" in self.original._parameters else "_buffers"
        getattr(self, own)["weight"] = getattr(self.original, own)["weight"]

    def _apply(self, fn: Any, recurse: bool = True) -> AcceleratedProduct:
        self.original._apply(fn, recurse)
        self._take_weight()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.original._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.original._load_from_state_dict(*arguments)
        self._take_weight()


def _products(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module | None, str, str, torch.nn.Module]]:
    """Parent, attribute, full name and module of every e3nn product, several times where it is shared."""
    if isinstance(model, o3.TensorProduct):
        yield None, "", "(the model)", model
    for prefix, parent in model.named_modules():
        for attribute, child in parent.named_children():
            if isinstance(child, o3.TensorProduct) or _scripted_product(child):
                yield parent, attribute, f"{prefix}.{attribute}".lstrip("."), child


def _scripted_product(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and "TensorProduct" in getattr(module, "original_name", "")


def _replacement(
    module: torch.nn.Module, is_root: bool, strict: bool | None, deterministic: bool, check: bool
) -> AcceleratedProduct | str:
    """The module that takes a product's place, or why it stays."""
    if is_root:
        return "it is the model itself; wrap it in a module, or build an autotune.TensorProduct"
    if not isinstance(module, o3.TensorProduct):
        return "TorchScript has compiled it; accelerate the model before torch.jit.script"
    if type(module).forward is not o3.TensorProduct.forward:
        return f"{type(module).__name__} has a forward of its own"
    try:
        made = AcceleratedProduct(module, strict=strict, deterministic=deterministic)
        error = _difference(module, made) if check else 0.0
    except (UnsupportedError, ProblemError) as reason:
        return str(reason)
    except EquituneError as reason:
        return f"{type(reason).__name__}: {reason}"
    limit = TOLERANCE[module.output_mask.dtype]
    return made if error <= limit else f"differs from e3nn by {error:.1e}, more than {limit:.0e}"


@torch.no_grad()
def _difference(module: o3.TensorProduct, made: AcceleratedProduct) -> float:
    """Largest difference of both results on random inputs, relative to the largest element."""
    mask, rows = module.output_mask, _CHECKED_ROWS
    if mask.dtype not in TOLERANCE:
        raise UnsupportedError(f"it is {mask.dtype}; kernels are generated for float32 and float64")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(mask)

    x, y = normal(rows, module.irreps_in1.dim), normal(rows, module.irreps_in2.dim)
    weight = normal(*(() if module.shared_weights else (rows,)), module.weight_numel)
    wanted, found = module(x, y, weight), made(x, y, weight)
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if wanted.numel() else 0.0
