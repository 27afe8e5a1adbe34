"""Replace e3nn's modules in a model by generated kernels, in one call, and put them back.

In a block of MACE, NequIP or SevenNet that gathers, multiplies and sums, all three become one convolution, and what
lies between two of them changes too. Parameters stay the same objects, so optimizers keep working; checkpoints keep
their names.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch

from autotune.models.capture import why_not_captured
from autotune.models.layout import change_layouts, undo_layouts
from autotune.models.replace import (
    ConvolutionBlock,
    ExchangedConvolution,
    Replacing,
    exchange_all,
    kind_of,
)
from autotune.models.stand_ins import (
    CONVOLUTIONS,
    PRODUCTS,
    REFUSED,
    AcceleratedConvolution,
    Acceleration,
    NodeStandIn,
    Place,
    StandIn,
    of_packages,
)
from autotune.models.step import LOG, quicken, unquicken
from kernelgen.errors import InputError, UnsupportedError
from kernelgen.ops.radial_convolution import EDGE_PRODUCTS

PRECISIONS, MEMORIES = ("float32", "tf32"), ("auto", "low")
_NO_BF16 = (
    "precision='bf16' is not offered: kernels read and write float32 and float64 alone, so features and weights of "
    "edges in bfloat16 would be converted by passes of their own, which cost the traffic that they save; take 'tf32'"
)
# Old options, for one version: by value what to give in its place.
_LEAVE = "leave it out"
_OLD = {
    "edge_weights": {
        "auto": _LEAVE,
        "streamed": "memory='low' in its place",
        "whole": f"{_LEAVE}: memory='auto' takes the fastest form that fits",
        "fused": f"{_LEAVE}: memory='auto' takes the fastest form that fits",
    },
    "edge_product": {
        "fp16x3": _LEAVE,
        "float32": f"{_LEAVE}: the default has float32's errors too",
        "tf32": "precision='tf32' in its place",
    },
    "edge_network": {"fused": _LEAVE, "layers": _LEAVE},
}
assert tuple(_OLD["edge_product"]) == EDGE_PRODUCTS
# For who opened a compiled file.
FROM_A_FILE = ", or open the checkpoint that it was made from and accelerate that"


def accelerate(
    model: Any,
    *,
    precision: str = "float32",
    memory: str = "auto",
    deterministic: bool = False,
    strict: bool | None = None,
    check: bool = True,
    edge_weights: str | None = None,
    edge_product: str | None = None,
    edge_network: str | None = None,
) -> Acceleration:
    """Replace e3nn's tensor products and spherical harmonics in ``model``, in place, where a kernel computes the same.

    model: a module; or an object that holds one as ``model`` or several as ``models``, such as an ASE calculator (its
    steps become Equitune's too) or a sum of them. Blocks of MACE, NequIP and SevenNet get the whole convolution, also
    of MACE converted for cuEquivariance or OpenEquivariance. A stock model changes to layout ``ir_mul`` inside, as a
    whole or not at all (then the note says why); users, parameters and checkpoints see e3nn's.
    precision: of products with matrices in a float32 model on an NVIDIA GPU, in training too. ``float32``: float32's
    errors. ``tf32``: factors are rounded to the 11 bits of TF32, sums are float32, in radial networks, self-connections
    and linear layers; layers to fewer than ``LEAST_IN_TF32`` channels, such as those that give energies, stay float32,
    and so does all that torch traces or compiles. torch's own settings stay the user's. bf16 is an UnsupportedError.
    memory: ``auto`` takes the fastest form of each convolution that fits. On a GPU the weights of edges, the last
    product of a radial network, are formed in the convolution's own kernel where the tuned database says that this is
    the fastest (or takes at most 5% longer, where all weights would take a GiB), and the network's weights need no
    gradients; else for all edges at once, if there is room. ``low``: for some edges at a time (see
    :class:`autotune.RadialTensorProductConv`), also formed again for gradients; on a CPU that is ``auto`` too, if
    they need none.
    deterministic, strict: as in :class:`autotune.TensorProduct`; harmonics are always deterministic.
    check: compare each replacement with e3nn on random inputs, on the module's device and in its dtype; one that
    differs by more than ``TOLERANCE`` is not used.
    edge_weights, edge_product, edge_network: old spellings, which work for one version more; a FutureWarning names the
    new one.

    Modules stay, with the reason in the result, if they were compiled, have a ``forward``, parameters or modules of
    their own, or fail when tried. InputError if there is no module. The logger ``equitune`` gets a line, and the table.
    """
    where, product = _checked(precision, memory, edge_weights, edge_product, edge_network)
    from autotune.models import radial  # e3nn loads with it, for longer than all else here

    name, calculators, model = type(model).__name__, _calculators_in(model), _module_of(model)
    tensors = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
    replacing = Replacing(strict, deterministic, next(tensors, torch.empty(0)) if check else None)
    before = sum(isinstance(module, StandIn) for module in model.modules())
    places, reason = change_layouts(model, replacing)
    places += [_replaced(replacing, *found) for found in list(_found(model))]
    places += exchange_all(model, replacing)
    whole = _form_weights(model, where, product)
    kept = f"node features stay in layout mul_ir: {reason}" if reason else whole
    radial.take_edge_networks(model)
    in_one_kernel = edge_network != "layers" and product != "float32"  # torch has no such kernel
    count = radial.choose_arithmetic(model, product, in_one_kernel, in_tf32=precision == "tf32")
    steps = dict.fromkeys(quicken(calculator) for calculator in calculators)
    note, refused = _note(model, before, places) or kept, "; ".join((REFUSED, *why_not_captured(model)))
    said = "" if precision == "float32" else _said_of(precision, model, count)
    done = Acceleration(tuple(places), note, "; ".join(filter(None, steps)), refused, said)
    LOG.info("%s: %s", name, done.line)
    LOG.debug("%s", done)
    return done


def take_options(arguments: list[str]) -> dict[str, str]:
    """``precision`` and ``memory`` of a package's training command, as ``--equitune-precision tf32``.

    They are taken out of the arguments, which are then the package's own. Ends the program at an unknown value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--equitune-precision", dest="precision", choices=PRECISIONS)
    parser.add_argument("--equitune-memory", dest="memory", choices=MEMORIES)
    options, arguments[:] = parser.parse_known_args(arguments)
    return vars(options)


def _checked(precision: str, memory: str, *old: str | None) -> tuple[str, str]:
    """Where weights of edges are formed and how radial networks multiply, as the old options would say it."""
    if precision == "bf16":
        raise UnsupportedError(_NO_BF16)
    for option, value, known in (("precision", precision, PRECISIONS), ("memory", memory, MEMORIES)):
        if value not in known:
            raise InputError(f"{option} is {value!r}; expected one of {', '.join(known)}")
    new = {"edge_weights": ("memory", memory == "low"), "edge_product": ("precision", precision == "tf32")}
    for (option, values), given in zip(_OLD.items(), old, strict=True):
        if given is None:
            continue
        if given not in values:
            raise InputError(f"{option} is {given!r}; expected one of {', '.join(values)}")
        instead, is_given = new.get(option, ("", False))
        if is_given:
            raise InputError(f"{instead} and {option}={given!r} are both given; expected {instead} alone")
        hint = f"{option}={given!r} is an old spelling, which goes with the next version; {values[given]}"
        warnings.warn(hint, FutureWarning, stacklevel=3)  # for the caller of accelerate
    where, product, _ = old
    product = product or ("tf32" if precision == "tf32" else "fp16x3")
    return where or ("streamed" if memory == "low" else "auto"), product


def _said_of(precision: str, model: torch.nn.Module, count: int) -> str:
    """For the line: in how many modules products are of this class, or why it means nothing for a model."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    if tensors and all(tensor.dtype is torch.float64 for tensor in tensors):
        return f"{precision} means nothing for a model in float64, whose products stay float64"
    if tensors and (torch.version.hip or not any(tensor.is_cuda for tensor in tensors)):
        return f"{precision} means nothing without an NVIDIA GPU: products stay float32 here"
    return f"{precision} in {count} modules"


def _form_weights(model: torch.nn.Module, where: str, product: str) -> str:
    """Have convolutions form their edges' weights: ``whole``, ``streamed``, ``fused`` or as ``auto`` chooses; why they
    do not, if they were told to.
    """
    from autotune.models import radial

    if where == "whole":
        return ""
    fused = None if where == "auto" and product != "float32" else where == "fused"
    inside = radial.form_weights_inside(model, always_streamed=where == "streamed", product=product, fused=fused)
    if inside or where == "auto":
        return ""
    return "edge weights are whole: no radial network of MACE, NequIP or SevenNet gives them"


def _replaced(
    replacing: Replacing, parent: torch.nn.Module | None, attribute: str, name: str, module: torch.nn.Module
) -> Place:
    """Put a stand-in into the model if there is one."""
    kind = kind_of(module) or PRODUCTS
    known: tuple[ConvolutionBlock, ...] = of_packages("blocks")
    matching = (block for block in known if block.product == attribute)
    block = next((block for block in matching if parent is not None and block.matches(parent)), None)
    found = replacing.stand_in(module, parent, block)
    if isinstance(found, str) or parent is None:
        return Place(name, repr(module), False, str(found), kind if block is None else CONVOLUTIONS)
    setattr(parent, attribute, found)
    tuning = found.tuning_for(None)["forward"]
    detail = f"schedule {tuning.origin}: {tuning.reason}"
    if block is not None and isinstance(found, AcceleratedConvolution):
        block.fuse(parent)
        return Place(name, repr(module), True, detail, CONVOLUTIONS)
    if reason := replacing.unfused.get(module):
        detail += f"; gather and sum stay the package's: {reason}"
    return Place(name, repr(module), True, detail, kind)


def restore(model: Any) -> int:
    """Put e3nn's modules back where :func:`accelerate` replaced them; returns the number of places.

    Changes to the replacements carry over: another weight, hooks, parametrizations, pruning, the mode. A calculator of
    Equitune becomes its package's, without ``acceleration`` and ``step``. InputError for a part of a model whose layout
    was changed as a whole.
    """
    from autotune.models import radial

    calculators, model = _calculators_in(model), _module_of(model)
    undo_layouts(model)
    radial.undo_weights_inside(model)
    found = [(parent, name, child) for parent in model.modules() for name, child in _children(parent)]
    replaced = [(parent, name, child) for parent, name, child in found if isinstance(child, StandIn)]
    # All before the first takes its place: neighbours in two layouts would give wrong numbers.
    originals = [child.put_back() for _, _, child in replaced]
    for (parent, name, child), original in zip(replaced, originals, strict=True):
        if isinstance(child, AcceleratedConvolution | ExchangedConvolution):
            any(block.unfuse(parent) for block in of_packages("blocks"))
        setattr(parent, name, original)
    for calculator in calculators:
        unquicken(calculator)
    return len(replaced)


def _calculators_in(model: object) -> list[Any]:
    """The calculators that a sum of them mixes, or the object itself; none for a module."""
    if isinstance(model, torch.nn.Module):
        return []
    mixed = getattr(getattr(model, "mixer", None), "calcs", None)
    return [model] if mixed is None else list(mixed)


def _module_of(model: object) -> torch.nn.Module:
    """The module itself, or the modules that an object holds; InputError if it has none."""
    if isinstance(model, str | PathLike):
        raise InputError(
            f"model is the path {str(model)!r}; expected a torch.nn.Module: load the file first, "
            "with torch.load(path, weights_only=False) if it holds a whole model"
        )
    if isinstance(model, torch.nn.Module):
        return model
    held: list[Any] = []
    for calculator in _calculators_in(model):
        modules = getattr(calculator, "models", None) or getattr(calculator, "model", None)
        held += modules if isinstance(modules, list | tuple) else [] if modules is None else [modules]
    if not held or not all(isinstance(module, torch.nn.Module) for module in held):
        raise InputError(
            f"model is of type {type(model).__name__}; expected a torch.nn.Module, or an object with one as its model "
            "or with several as its models, such as an ASE calculator"
        )
    return held[0] if len(held) == 1 else torch.nn.ModuleList(held)


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
                f"torch.jit.trace and torch.jit.freeze{FROM_A_FILE}"
            )
        if any(type(held).__name__ == "AOTICompiledModel" for held in vars(module).values()):
            return (
                f"AOTInductor has compiled {name or 'the model'}, which keeps its kernels; compile it anew with "
                f"Equitune inside (nequip-compile --modifiers enable_Equitune){FROM_A_FILE}"
            )
        if isinstance(module, torch.fx.GraphModule):
            return f"{name or 'the model'} is a graph of torch.fx; accelerate the model before it is traced or exported"
    return "the model has no module of e3nn.o3.TensorProduct or e3nn.o3.SphericalHarmonics"


def _found(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module | None, str, str, torch.nn.Module]]:
    """Parent, attribute, full name and module of every such e3nn module; a shared one appears several times.

    What a stand-in keeps of its original is not called.
    """
    if kind_of(model) is not None:
        yield None, "", "(the model)", model
    for prefix, parent in model.named_modules():
        for attribute, child in () if isinstance(parent, NodeStandIn) else _children(parent):
            if kind_of(child) is not None:
                yield parent, attribute, f"{prefix}.{attribute}".lstrip("."), child
