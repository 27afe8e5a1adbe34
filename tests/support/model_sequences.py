"""Sequences of what users do to a model, on stock, accelerated and captured copies of it: all must go on alike.

    python tests/support/model_sequences.py --package mace --sequences 1000 --seed 1
    python tests/support/model_sequences.py --package mace --replay '[("call", 3), ("write_data", 7), ("call", 3)]'

A sequence is a list of (action, number); the number draws the action's details, the same for every copy. ``ACTIONS``
is the table of them. After each action a copy has stock's results to ``TOLERANCE``, or it raised an error of Equitune's
that says what to do, or stock raised too. The command prints failures, shortened, and how often each action ran.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import io
import math
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # Before torch: one process is timed and compared, and results do not depend on how threads share a sum.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("EQUITUNE_MISSES", "0")
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch
from ase import Atoms
from model_cases import imidazole, symbols_in
from torch import Tensor
from torch.nn.utils import parametrize, prune

from autotune import CapturedModel, accelerate, capture, restore
from autotune.models.packages.base import default_dtype
from kernelgen.errors import EquituneError

# Largest relative error in float64; once a copy was in float32, whose constants e3nn rounds and Equitune does not.
TOLERANCE, AFTER_FLOAT32, IN_FLOAT32 = 1e-9, 1e-4, 1e-3
KINDS = ("stock", "accelerated", "captured")
FOLDERS = tuple(str(Path(__file__).resolve().parents[2] / name) for name in ("autotune", "kernelgen"))

Results = dict[str, Tensor]
Sequence = list[tuple[str, int]]


# The packages.


@dataclass(frozen=True)
class Package:
    """How the models of a package are made, fed and called.

    module: of the package. read: the tensors of an input that a model may read.
    """

    module: str
    read: tuple[str, ...]
    build: Callable[[], torch.nn.Module]
    batch: Callable[[Any, list[Atoms]], dict[str, Tensor]]
    call: Callable[..., Results]


def _mace() -> torch.nn.Module:
    return importlib.import_module("mace_cases").model_of([1, 6, 7])


def _mace_batch(model: Any, structures: list[Atoms]) -> dict[str, Tensor]:
    return importlib.import_module("mace_cases").batch_of(model, *structures)


def _call_mace(model: Any, given: dict[str, Tensor], energy_alone: bool = False, **options: Any) -> Results:
    options = {"compute_force": not energy_alone, "compute_stress": not energy_alone} | options
    out = model(given, **options)
    return {name: out[name] for name in ("energy", "forces", "stress") if out.get(name) is not None}


def _sevennet() -> torch.nn.Module:
    key = importlib.import_module("sevenn._keys")
    small = {key.NUM_CONVOLUTION: 2, key.IRREPS_MANUAL: ["8x0e", "8x0e+4x1e", "8x0e"], key.LMAX: 1}
    return importlib.import_module("sevennet_cases").CASE.build(imidazole(), **small)


def _sevennet_batch(model: Any, structures: list[Atoms]) -> dict[str, Tensor]:
    return importlib.import_module("sevennet_cases").CASE.batch(model, *structures)


def _call_sevennet(model: Any, given: dict[str, Tensor], **_: Any) -> Results:
    out = model(given)
    names = {"energy": "inferred_total_energy", "forces": "inferred_force", "stress": "inferred_stress"}
    return {name: out[theirs] for name, theirs in names.items()}


def _nequip() -> torch.nn.Module:
    return importlib.import_module("nequip_cases").CASE.build(imidazole(), num_layers=2)


def _allegro() -> torch.nn.Module:
    return importlib.import_module("allegro_cases").CASE.build(imidazole())


def _nequip_batch(model: Any, structures: list[Atoms]) -> dict[str, Tensor]:
    cases, data = importlib.import_module("nequip_cases"), importlib.import_module("nequip.data")
    steps = (
        cases.ChemicalSpeciesToAtomTypeMapper(symbols_in(imidazole())),
        cases.NeighborListTransform(r_max=cases.CUTOFF),
    )
    frames = [data.from_ase(atoms) for atoms in structures]
    for step in steps:
        frames = [step(frame) for frame in frames]
    return frames[0] if len(frames) == 1 else data.AtomicDataDict.batched_from_list(frames)


def _call_nequip(model: Any, given: dict[str, Tensor], **_: Any) -> Results:
    out = model(given)
    names = {"energy": "total_energy", "forces": "forces", "stress": "stress"}
    return {name: out[theirs] for name, theirs in names.items()}


_MACE_READS = ("positions", "node_attrs", "batch", "edge_index", "shifts", "unit_shifts", "cell", "ptr", "head")
_SEVENNET_READS = ("x", "atomic_numbers", "batch", "edge_index", "edge_vec", "cell_volume", "num_atoms")
_NEQUIP_READS = ("pos", "atom_types", "batch", "edge_index", "edge_cell_shift", "cell", "num_atoms")
PACKAGES = {
    "mace": Package("mace", _MACE_READS, _mace, _mace_batch, _call_mace),
    "sevennet": Package("sevenn", _SEVENNET_READS, _sevennet, _sevennet_batch, _call_sevennet),
    "nequip": Package("nequip", _NEQUIP_READS, _nequip, _nequip_batch, _call_nequip),
    "allegro": Package("allegro", _NEQUIP_READS, _allegro, _nequip_batch, _call_nequip),
}


def structures() -> list[list[Atoms]]:
    """Inputs of several sizes; the first three have equally many atoms, but other edges or elements."""
    atoms = imidazole()
    moved, swapped, grown, slanted, lonely = (atoms.copy() for _ in range(5))
    moved.rattle(0.1, seed=1)
    swapped.numbers = swapped.numbers[::-1].copy()
    grown += Atoms("H", [[3.0, 3.0, 3.0]])
    slanted.set_cell([[6.0, 0.0, 0.0], [2.0, 5.5, 0.0], [0.5, 1.0, 9.0]])
    lonely.positions[0] += [4.5, 0.0, 4.5]
    return [[atoms], [moved], [swapped], [grown], [atoms[:5]], [slanted], [lonely], [atoms, slanted, atoms[:4]]]


# The copies of a model.


@dataclass
class Subject:
    """One copy of a model, and what its user holds beside it. outer: what is called, a CapturedModel or the model."""

    kind: str
    package: Package
    outer: Any
    batches: list[dict[str, Tensor]]
    tolerance: float = TOLERANCE
    optimizer: torch.optim.Optimizer | None = None
    average: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)
    originals: list[Any] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.outer.model if isinstance(self.outer, CapturedModel) else self.outer

    @property
    def is_fast(self) -> bool:
        return self.kind != "stock"

    @property
    def device(self) -> torch.device:
        return self.batches[0]["edge_index"].device

    def either(self, draw: random.Random) -> Any:
        """The model, or for a captured one what holds it."""
        return draw.choice((self.outer, self.model))

    def call(self, batch: dict[str, Tensor], model: Any = None, **options: Any) -> Results:
        # A model writes into its dictionary, and has tensors need gradients.
        given = {name: value.detach() if torch.is_tensor(value) else value for name, value in batch.items()}
        return self.package.call(self.outer if model is None else model, given, **options)


@functools.cache
def _prepared(name: str, device: str) -> tuple[dict[str, torch.nn.Module], list[dict[str, Tensor]]]:
    """By kind a package's models, and inputs."""
    package = PACKAGES[name]
    stock = package.build().eval().to(device)
    batches = [_moved(package.batch(stock, atoms), device) for atoms in structures()]
    models = {kind: copy.deepcopy(stock) for kind in KINDS}
    for kind in KINDS[1:]:
        assert accelerate(models[kind]).replaced, "else nothing would be compared"
    return models, batches


def _moved(batch: dict[str, Any], device: str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items() if torch.is_tensor(value)}


def subject_of(name: str, kind: str, device: str = "cpu", is_last: bool = False) -> Subject:
    """A new copy; is_last: the process uses it for one sequence and ends, so that no copy is needed."""
    models, batches = _prepared(name, device)
    model = models[kind] if is_last else copy.deepcopy(models[kind])
    own = [{name: value.clone() for name, value in batch.items()} for batch in batches]
    return Subject(kind, PACKAGES[name], capture(model) if kind == "captured" else model, own)


def weights_of(subject: Subject) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Module, attribute and parameter of what is not changed by surgery yet."""
    found = []
    for name, parameter in sorted(subject.model.named_parameters()):
        path, _, attribute = name.rpartition(".")
        module = subject.model.get_submodule(path)
        is_plain = not any(part in name for part in ("parametrizations", "_orig", "_g", "_v", "lora"))
        if is_plain and not isinstance(module, torch.nn.ParameterList) and attribute.isidentifier():
            found.append((module, attribute, parameter))
    return found


def _drawn_weight(subject: Subject, draw: random.Random, least_dim: int = 1) -> Any:
    fitting = [found for found in weights_of(subject) if found[2].dim() >= least_dim]
    return draw.choice(fitting) if fitting else (None, "", None)


def _parameters(subject: Subject, draw: random.Random) -> list[torch.nn.Parameter]:
    """All, or a drawn one."""
    found = [parameter for _, parameter in sorted(subject.model.named_parameters())]
    return found if draw.random() < 0.5 else [draw.choice(found)]


def _factor(draw: random.Random) -> float:
    return draw.choice((0.9, 1.1, 1.25))


def _noise(like: Tensor, draw: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


# Actions: calls.


def _detached(found: Results) -> Results:
    return {name: value.detach().clone() for name, value in found.items()}


def _context(draw: random.Random) -> Any:
    return draw.choice((contextlib.nullcontext, contextlib.nullcontext, torch.no_grad, torch.inference_mode))


def do_call(subject: Subject, draw: random.Random) -> Results:
    """A drawn structure; in tensors that were used before, or in new ones."""
    batch, options = draw.choice(subject.batches), {}
    if subject.package.module == "mace":
        options = draw.choice(({}, {}, {"compute_stress": False}, {"training": True}, {"compute_virials": True}))
    if draw.random() < 0.5:
        batch = {name: value.clone() for name, value in batch.items()}
    return _detached(subject.call(batch, **options))


def do_call_without_gradients(subject: Subject, draw: random.Random) -> Results:
    context = draw.choice((torch.no_grad, torch.inference_mode))
    batch, new = draw.choice(subject.batches), draw.random() < 0.5
    with context():
        if new:
            batch = {name: value.clone() for name, value in batch.items()}
        return _detached(subject.call(batch, energy_alone=True))


def do_failing_call(subject: Subject, draw: random.Random) -> Results:
    return _detached(subject.call(_faulty(subject, draw)))


def _faulty(subject: Subject, draw: random.Random) -> dict[str, Tensor]:
    """A batch with one wrong tensor."""
    batch = {name: value.clone() for name, value in draw.choice(subject.batches).items()}
    name = draw.choice([name for name in subject.package.read if name in batch])
    tensor = batch[name]
    faults = ["missing", "dtype", "transposed"]
    if subject.device.type == "cpu":  # elsewhere such rows may end in a device-side assertion, which is for good
        faults += ["fewer", "more", "index" if not tensor.is_floating_point() else "nan"]
    fault = draw.choice(faults if name != "cell" else [*faults, "fewer"])
    if fault == "missing":
        del batch[name]
    elif fault == "dtype":
        batch[name] = tensor.to(torch.float32)
    elif fault == "transposed":
        batch[name] = tensor.mT.contiguous() if tensor.dim() > 1 else tensor[:, None]
    elif fault == "fewer":
        batch[name] = tensor[..., :-1].contiguous() if draw.random() < 0.5 else tensor[:-1]
    elif fault == "more":
        batch[name] = torch.cat((tensor, tensor[:1]))
    elif fault == "index":
        tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice((1000, -1000, 1 << 40))
    else:
        tensor.view(-1)[draw.randrange(tensor.numel())] = math.nan
    return batch


def do_interrupted_call(subject: Subject, draw: random.Random) -> None:
    """Ctrl-C before a drawn line of Equitune's."""
    batch = draw.choice(subject.batches)
    lines = int(math.exp(draw.uniform(0.0, math.log(3000))))
    if subject.is_fast:
        with contextlib.suppress(KeyboardInterrupt), interrupt_after(lines):
            subject.call(batch)


@contextlib.contextmanager
def interrupt_after(lines: int) -> Iterator[None]:
    left = lines

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def do_gradients(subject: Subject, draw: random.Random) -> Results:
    """Of a loss on energies and forces by every parameter."""
    found = _losses(subject, draw.choice(subject.batches))
    given = {name: value for name, value in subject.model.named_parameters() if value.requires_grad}
    if not given:
        return {}
    gradients = torch.autograd.grad(found.pop("loss"), list(given.values()), allow_unused=True)
    zeros = (torch.zeros_like(value) if one is None else one for one, value in zip(gradients, given.values()))
    return _detached(found | {f"gradient of {name}": value for name, value in zip(given, zeros)})


def _losses(subject: Subject, batch: dict[str, Tensor]) -> Results:
    """Differentiable results with a loss; in training mode, which the packages want for it."""
    was_training = subject.outer.training
    subject.outer.train()
    try:
        found = subject.call(batch, training=True)
    finally:
        subject.outer.train(was_training)
    parts = (found[name] / found[name].detach().abs().max().clamp(min=1e-6) for name in ("energy", "forces"))
    return found | {"loss": sum((part.square().sum() for part in parts), torch.zeros((), device=subject.device))}


# Actions: other values in the same or in other memory.


def do_write_data(subject: Subject, draw: random.Random) -> None:
    factor, way = _factor(draw), draw.choice(("mul", "copy", "numpy", "set"))
    for parameter in _parameters(subject, draw):
        if way == "copy":
            parameter.data.copy_(parameter.detach() * factor)
        elif way == "set":
            parameter.data = parameter.detach() * factor
        elif way == "numpy" and parameter.device.type == "cpu":
            parameter.data.numpy()[...] *= factor
        else:
            parameter.data.mul_(factor)


def do_write_without_gradients(subject: Subject, draw: random.Random) -> None:
    factor = _factor(draw)
    with draw.choice((torch.no_grad, torch.inference_mode))():
        for parameter in _parameters(subject, draw):
            parameter.mul_(factor)


def do_load_state_dict(subject: Subject, draw: random.Random) -> None:
    factor, names = _factor(draw), {name for name, _ in subject.model.named_parameters()}
    state = {
        name: value * factor if name in names else value.clone() for name, value in subject.model.state_dict().items()
    }
    subject.model.load_state_dict(state, assign=draw.random() < 0.3)


def do_train(subject: Subject, draw: random.Random) -> Results:
    """One to three steps of an optimizer, a new one or that of before."""
    kind, is_new = draw.choice((_adam, _descent)), draw.random() < 0.3
    if subject.optimizer is None or is_new:
        subject.optimizer = kind(subject.model.parameters())
    batch, found = draw.choice(subject.batches), {}
    for step in range(draw.randint(1, 3)):
        found[f"loss {step}"] = loss = _losses(subject, batch)["loss"]
        subject.optimizer.zero_grad(set_to_none=draw.random() < 0.5)
        loss.backward()
        subject.optimizer.step()
    return _detached(found)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    # A large eps: Adam would turn a gradient that is zero but for rounding into a whole step.
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-3)


def _descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)


def do_average(subject: Subject, draw: random.Random) -> None:
    """A moving average takes the weights in, as torch_ema does."""
    for name, parameter in subject.model.named_parameters():
        before = subject.average.get(name)
        fits = before is not None and before.shape == parameter.shape
        subject.average[name] = before.lerp(parameter.detach(), 0.5) if fits else parameter.detach().clone() * 1.02


def do_average_in(subject: Subject, draw: random.Random) -> None:
    """The average takes the place of the weights, through ``.data``."""
    subject.stored = {name: parameter.detach().clone() for name, parameter in subject.model.named_parameters()}
    _copy_data(subject, subject.average)


def do_average_out(subject: Subject, draw: random.Random) -> None:
    _copy_data(subject, subject.stored)


def _copy_data(subject: Subject, values: dict[str, Tensor]) -> None:
    for name, parameter in subject.model.named_parameters():
        if name in values and values[name].shape == parameter.shape:
            parameter.data.copy_(values[name].data)


def do_write_inputs(subject: Subject, draw: random.Random) -> None:
    """The tensors of the first three structures in place, with those of another of them, in one of three ways."""
    first, other = draw.sample(subject.batches[:3], 2)
    way = draw.choice(("copy", "data", "numpy"))
    for name, value in first.items():
        if other[name].shape == value.shape:
            if way == "numpy" and value.device.type == "cpu":
                value.numpy()[...] = other[name].numpy()
            else:  # torch does not count writes through .data, and on a GPU they must not happen to indices
                (value.data if way == "data" and value.is_floating_point() else value).copy_(other[name])


# Actions: other modules and parameters.


class LowRank(torch.nn.Module):
    """A weight and a small product of two matrices."""

    def __init__(self, weight: Tensor, draw: random.Random) -> None:
        super().__init__()
        rows = weight.shape[0]
        shapes = weight.new_empty(rows, 2), weight.new_empty(2, weight.numel() // rows)
        self.left, self.right = (torch.nn.Parameter(0.3 * _noise(shape, draw)) for shape in shapes)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.left @ self.right).view(weight.shape)


def do_parametrize(subject: Subject, draw: random.Random) -> None:
    module, name, weight = _drawn_weight(subject, draw)
    if module is not None:
        parametrize.register_parametrization(module, name, LowRank(weight.detach(), draw))


def do_remove_parametrization(subject: Subject, draw: random.Random) -> None:
    found = [module for module in _ordered_modules(subject) if parametrize.is_parametrized(module)]
    if found:
        module = draw.choice(found)
        name = next(iter(module.parametrizations))
        parametrize.remove_parametrizations(module, name, leave_parametrized=draw.random() < 0.5)


def _ordered_modules(subject: Subject) -> list[Any]:
    return [module for _, module in sorted(subject.model.named_modules())]


def do_prune(subject: Subject, draw: random.Random) -> None:
    module, name, weight = _drawn_weight(subject, draw)
    if module is not None:
        prune.custom_from_mask(module, name, (_noise(weight, draw) > -1.0).to(weight))


def do_remove_pruning(subject: Subject, draw: random.Random) -> None:
    found = [
        (module, hook._tensor_name)
        for module in _ordered_modules(subject)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, prune.BasePruningMethod)
    ]
    if found:
        prune.remove(*draw.choice(found))


def do_weight_norm(subject: Subject, draw: random.Random) -> None:
    module, name, _ = _drawn_weight(subject, draw, least_dim=2)
    if module is not None:
        torch.nn.utils.weight_norm(module, name, dim=draw.choice((0, 1, None)))


def do_remove_weight_norm(subject: Subject, draw: random.Random) -> None:
    kind = importlib.import_module("torch.nn.utils.weight_norm").WeightNorm
    found = [
        (module, hook.name)
        for module in _ordered_modules(subject)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, kind)
    ]
    if found:
        torch.nn.utils.remove_weight_norm(*draw.choice(found))


def do_inject_lora(subject: Subject, draw: random.Random) -> None:
    """MACE's, once; its adapters begin with zeros, which would show nothing."""
    names = [name for name, _ in subject.model.named_parameters()]
    if subject.package.module != "mace" or any("lora" in name for name in names):
        return
    inject = importlib.import_module("mace.modules.lora").inject_lora
    inject(subject.model, rank=2, wrap_dense=draw.random() < 0.5)
    for name, parameter in sorted(subject.model.named_parameters()):
        if name not in names and "lora" in name:
            parameter.data.copy_(0.1 * _noise(parameter, draw))


def do_replace_parameter(subject: Subject, draw: random.Random) -> None:
    module, name, weight = _drawn_weight(subject, draw)
    if module is not None:
        new = torch.nn.Parameter(weight.detach() * _factor(draw), requires_grad=weight.requires_grad)
        setattr(module, name, new)


# Actions: copies, modes and Equitune's own functions.


def do_deepcopy(subject: Subject, draw: random.Random) -> None:
    """Goes on with the copy; the original is called at the end."""
    new = copy.deepcopy(subject.outer)
    subject.originals.append(subject.outer)
    subject.outer, subject.optimizer = new, None


def do_pickle(subject: Subject, draw: random.Random) -> None:
    _go_on_with(subject, pickle.loads(pickle.dumps(subject.outer)))


def do_save(subject: Subject, draw: random.Random) -> None:
    file = io.BytesIO()
    torch.save(subject.outer, file)
    file.seek(0)
    _go_on_with(subject, torch.load(file, weights_only=False))


def _go_on_with(subject: Subject, new: Any) -> None:
    subject.outer, subject.optimizer = new, None


def do_float_and_double(subject: Subject, draw: random.Random) -> None:
    model = subject.either(draw)
    if draw.random() < 0.5:
        model.float().double()
    else:
        model.to(torch.float32)
        model.to(torch.float64)
    subject.tolerance = AFTER_FLOAT32


def do_float_call(subject: Subject, draw: random.Random) -> Results:
    """A call in float32, then float64 again."""
    model, batch = subject.either(draw), draw.choice(subject.batches)
    model.float()
    subject.tolerance = AFTER_FLOAT32
    try:
        given = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
        return _detached(subject.call(given))
    finally:
        model.double()


def do_train_mode(subject: Subject, draw: random.Random) -> None:
    subject.either(draw).train(draw.random() < 0.4)


def do_requires_grad(subject: Subject, draw: random.Random) -> None:
    needed = draw.random() < 0.5
    for parameter in _parameters(subject, draw):
        parameter.requires_grad_(needed)


def do_zero_gradients(subject: Subject, draw: random.Random) -> None:
    subject.model.zero_grad(set_to_none=draw.random() < 0.5)


def do_restore(subject: Subject, draw: random.Random) -> None:
    if subject.is_fast:
        restore(subject.model)


def do_accelerate(subject: Subject, draw: random.Random) -> None:
    how = draw.choice(("auto", "auto", "whole", "streamed"))
    if subject.is_fast:
        # Parts that were replaced with other options go first: a second call leaves them as they are.
        restore(subject.model)
        accelerate(subject.model, edge_weights=how if subject.kind == "accelerated" else "auto")


def do_capture(subject: Subject, draw: random.Random) -> None:
    growth, kept, outgrown = draw.choice((1.25, 2.0, 4.0)), draw.choice((1, 2, 4)), draw.choice(("capture", "eager"))
    if subject.kind != "captured":
        return
    if draw.random() < 0.3:
        subject.outer.forget()
    else:
        was_training = subject.outer.training
        subject.outer = capture(subject.model, growth=growth, kept=kept, outgrown=outgrown).train(was_training)


class Action(NamedTuple):
    """do: the function. weight: how often it is drawn. copies: leaves the model as it is if it raises."""

    do: Callable[[Subject, random.Random], Results | None]
    weight: int = 2
    copies: bool = False


ACTIONS = {
    "call": Action(do_call, 20, copies=True),
    "call_without_gradients": Action(do_call_without_gradients, 3, copies=True),
    "failing_call": Action(do_failing_call, 4, copies=True),
    "interrupted_call": Action(do_interrupted_call, 4, copies=True),
    "gradients": Action(do_gradients, 4, copies=True),
    "write_data": Action(do_write_data, 4),
    "write_without_gradients": Action(do_write_without_gradients),
    "load_state_dict": Action(do_load_state_dict),
    "train": Action(do_train, 3),
    "average": Action(do_average),
    "average_in": Action(do_average_in),
    "average_out": Action(do_average_out),
    "write_inputs": Action(do_write_inputs, 3),
    "parametrize": Action(do_parametrize),
    "remove_parametrization": Action(do_remove_parametrization),
    "prune": Action(do_prune),
    "remove_pruning": Action(do_remove_pruning),
    "weight_norm": Action(do_weight_norm),
    "remove_weight_norm": Action(do_remove_weight_norm),
    "inject_lora": Action(do_inject_lora, 1),
    "replace_parameter": Action(do_replace_parameter),
    "deepcopy": Action(do_deepcopy, copies=True),
    "pickle": Action(do_pickle, 1, copies=True),
    "save": Action(do_save, 1, copies=True),
    "float_and_double": Action(do_float_and_double, 1),
    "float_call": Action(do_float_call, 1, copies=True),
    "train_mode": Action(do_train_mode),
    "requires_grad": Action(do_requires_grad),
    "zero_gradients": Action(do_zero_gradients, 1),
    "restore": Action(do_restore),
    "accelerate": Action(do_accelerate),
    "capture": Action(do_capture),
}
# Contexts in which a captured model computes gradients all the same, and stock raises.
_ANSWERED_BY_CAPTURES = ("call_without_gradients",)


# The comparison.


@dataclass(frozen=True)
class Failure:
    """Why a copy does not go on as stock: at which step of the sequence, in which action, and in words."""

    kind: str
    step: int
    action: str
    what: str
    trace: str = ""

    @property
    def signature(self) -> tuple[str, str, str]:
        """The same for failures that are probably one fault."""
        kept = "".join("#" if letter.isdigit() else letter for letter in self.what.partition(" by ")[0])
        return self.kind, self.action, kept[:100]


@dataclass
class Run:
    """What a sequence did. outcomes: stock's. ends: text of the typed error in which a copy's sequence ended."""

    sequence: Sequence
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)


Outcome = tuple[Results | None, BaseException | None]


def _attempt(subject: Subject, action: Callable[..., Any], number: int) -> Outcome:
    torch.manual_seed(number)
    try:
        return action(subject, random.Random(number)), None
    except Exception as error:
        return None, error


def _finals(subject: Subject, draw: random.Random) -> Results:
    """A call of every structure's size, and of the models that were copied."""
    found = {}
    for place in (0, 4, 7):
        found |= {f"{name} of {place}": value for name, value in subject.call(subject.batches[place]).items()}
    for number, model in enumerate(subject.originals):
        given = subject.call(subject.batches[0], model)
        found |= {f"{name} of original {number}": value for name, value in given.items()}
    return _detached(found)


def run(package: str, sequence: Sequence, device: str = "cpu", is_last: bool = False) -> Run:
    """Apply a sequence to all copies of a package's model. is_last: see :func:`subject_of`."""
    done, steps = Run(sequence), [*sequence, ("final", 0)]
    # TorchScript would optimise e3nn's code anew in the first calls of each copy.
    with default_dtype(torch.float64), torch.jit.optimized_execution(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, wanted = subject_of(package, "stock", device, is_last), []
        for name, number in steps:
            action = Action(_finals, copies=True) if name == "final" else ACTIONS[name]
            found, error = _attempt(stock, action.do, number)
            done.outcomes.append((name, "ran" if error is None else "stock raised"))
            if error is not None and not action.copies:
                break  # what it did before it raised is unknown
            wanted.append((name, number, action, found, error, stock.tolerance, _names(stock)))
        for kind in KINDS[1:]:
            _compare(subject_of(package, kind, device, is_last), wanted, done)
    return done


def run_apart(package: str, sequence: Sequence, device: str = "cpu") -> Run:
    """The same in a process of its own, if the device allows it: a crash is a failure, and models need no copies."""
    if device != "cpu":
        return run(package, sequence, device)
    _warm_up(package)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        done = run(package, sequence, is_last=True)
        with os.fdopen(writing, "wb") as file:
            pickle.dump(done, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    status = os.waitpid(child, 0)[1]
    if status or not answer:
        return Run(sequence, failures=[Failure("process", len(sequence), "any", f"ends with status {status}")])
    return pickle.loads(answer)


@functools.cache
def _warm_up(package: str) -> None:
    """Load kernels, once for all processes that are made of this one."""
    run(package, [(name, number) for name in ("call", "gradients", "call") for number in range(6)])


def _names(subject: Subject) -> list[str]:
    return sorted(name for name, _ in subject.model.named_parameters())


def _compare(subject: Subject, wanted: list[Any], done: Run) -> None:
    """Apply the steps to another copy; ends at the first failure or typed error."""
    for step, (name, number, action, results, stock_error, tolerance, names) in enumerate(wanted):
        found, error = _attempt(subject, action.do, number)
        if isinstance(error, EquituneError) and stock_error is None:
            done.ends[subject.kind] = f"{name}: {type(error).__name__}: {error}"
            return
        what = _difference(subject, name, found, error, results, stock_error, tolerance)
        if not what and error is None and names != _names(subject):
            what = f"parameters have other names: {sorted(set(names) ^ set(_names(subject)))[:3]}"
        if what:
            trace = "" if error is None else "".join(traceback.format_exception(error)[-3:])
            done.failures.append(Failure(subject.kind, step, name, what, trace))
            return


def _difference(
    subject: Subject,
    name: str,
    found: Results | None,
    error: BaseException | None,
    wanted: Results | None,
    stock_error: BaseException | None,
    tolerance: float,
) -> str:
    """In words; empty if a copy did as stock."""
    if stock_error is not None:
        answers = subject.kind == "captured" and name in _ANSWERED_BY_CAPTURES
        if error is not None or answers or found is None:
            return ""
        return f"answers where stock raises {type(stock_error).__name__}: {stock_error}"
    if error is not None:
        return f"raises {type(error).__name__}: {error}"
    if name == "float_call":
        tolerance = IN_FLOAT32
    elif name == "failing_call":  # a float32 tensor in stock's float64 model
        tolerance = AFTER_FLOAT32
    return difference(found or {}, wanted or {}, tolerance)


def difference(found: Results, wanted: Results, tolerance: float) -> str:
    """Relative to each result's largest number, or to a small part of that of all results of its sort."""
    largest: dict[bool, float] = {False: 0.0, True: 0.0}
    for name, value in wanted.items():
        finite = value[value.isfinite()].abs()
        largest[_is_gradient(name)] = max(largest[_is_gradient(name)], float(finite.max()) if finite.numel() else 0.0)
    for name, value in wanted.items():
        if name not in found:
            return f"{name} is missing"
        if found[name].shape != value.shape:
            return f"{name} has shape {tuple(found[name].shape)}, stock {tuple(value.shape)}"
        if not torch.equal(found[name].isnan(), value.isnan()):
            return f"{name} is nan in other places"
        size = max(_size(value), (1e-6 if _is_gradient(name) else 1e-8) * largest[_is_gradient(name)], 1e-30)
        error = _size(found[name] - value) / size
        if not error <= tolerance:
            return f"{name} differs by {error:.1e}"
    return ""


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient")


def _size(value: Tensor) -> float:
    return float(value.nan_to_num(nan=0.0).abs().max()) if value.numel() else 0.0


# The command.


def drawn(draw: random.Random, most: int, without: Container[str] = ()) -> Sequence:
    names = [name for name in ACTIONS if name not in without]
    weights = [ACTIONS[name].weight for name in names]
    return [(name, draw.randrange(10_000)) for name in draw.choices(names, weights, k=draw.randint(3, most))]


def shortened(package: str, sequence: Sequence, failure: Failure, device: str) -> Sequence:
    """Leave actions out while the same copy fails in the same way."""
    place = 0
    while place < len(sequence):
        fewer = sequence[:place] + sequence[place + 1 :]
        found = run_apart(package, fewer, device).failures
        if any(one.signature == failure.signature for one in found):
            sequence = fewer
        else:
            place += 1
    return sequence


@dataclass
class Coverage:
    """What ran, over all sequences; prints as a table."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)
    sequences: int = 0
    failed: int = 0

    def add(self, index: int, done: Run) -> list[Failure]:
        """Its failures that were not seen before."""
        self.sequences += 1
        self.failed += bool(done.failures)
        self.outcomes.update(done.outcomes)
        self.ends.update(done.ends.items())
        new = [one for one in done.failures if one.signature not in self.failures]
        for one in done.failures:
            self.failures.setdefault(one.signature, []).append(index)
        return new

    def __str__(self) -> str:
        lines = ["", f"{'action':26}{'ran':>8}{'stock raised':>14}"]
        for name in (*ACTIONS, "final"):
            lines.append(f"{name:26}{self.outcomes[name, 'ran']:8}{self.outcomes[name, 'stock raised']:14}")
        lines += ["", f"sequences that ended in a typed error: {sum(self.ends.values())}"]
        lines += [f"{count:6}  {kind}: {text[:300]}" for (kind, text), count in self.ends.most_common()]
        lines += ["", f"{self.failed} of {self.sequences} sequences failed"]
        for signature, places in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            lines.append(f"{len(places):6}  {': '.join(signature)}  (sequences {places[:8]})")
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=PACKAGES, required=True)
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=12, help="most actions in a sequence")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--without", nargs="*", default=(), choices=ACTIONS, help="actions that are not drawn")
    parser.add_argument("--replay", help="a sequence as it was printed, instead of drawn ones")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, device, begin = arguments.package, arguments.device, time.monotonic()
    coverage, many = Coverage(), range(arguments.sequences)
    given = [ast.literal_eval(arguments.replay)] if arguments.replay else None
    for index in many if given is None else range(1):
        sequence = given[0] if given else drawn(random.Random(f"{arguments.seed} {index}"), arguments.length, arguments.without)
        for failure in coverage.add(index, run_apart(name, sequence, device)):
            short = shortened(name, sequence[: failure.step + 1], failure, device)
            print(f"sequence {index}, {failure.kind}, {failure.action}: {failure.what}\n{failure.trace}", end="")
            print(f"    --package {name} --device {device} --replay '{short}'", flush=True)
    print(coverage)
    print(f"{name} on {device}, seed {arguments.seed}: {time.monotonic() - begin:.0f} s")
    return int(bool(coverage.failures))


if __name__ == "__main__":
    raise SystemExit(main())
