"""What users do to a model: each action is a function of a copy of it and of random numbers, ``ACTIONS`` the table.

A copy of another kind is given the same random numbers. An action returns results to compare, or nothing.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sequence_models import Results, Subject
from torch import Tensor
from torch.nn.utils import parametrize, prune

from autotune.models.accelerate import accelerate, restore
from autotune.models.capture import capture

# Once a copy was in float32, whose constants e3nn rounds and Equitune does not.
AFTER_FLOAT32 = 1e-4
# The answer of an action that finds nothing to do, such as no pruning that could be removed.
NOTHING: Results = {}
FOLDERS = tuple(str(Path(__file__).resolve().parents[2] / name) for name in ("autotune", "kernelgen"))


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


def drawn_weight(subject: Subject, draw: random.Random, least_dim: int = 1) -> Any:
    fitting = [found for found in weights_of(subject) if found[2].dim() >= least_dim]
    return draw.choice(fitting) if fitting else (None, "", None)


def parameters_of(subject: Subject, draw: random.Random) -> list[torch.nn.Parameter]:
    """All, or a drawn one."""
    found = [parameter for _, parameter in sorted(subject.model.named_parameters())]
    return found if draw.random() < 0.5 else [draw.choice(found)]


def drawn_factor(draw: random.Random) -> float:
    return draw.choice((0.9, 1.1, 1.25))


def noise(like: Tensor, draw: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


# Actions: calls.


def detached(found: Results) -> Results:
    return {name: value.detach().clone() for name, value in found.items()}


def do_call(subject: Subject, draw: random.Random) -> Results:
    """A drawn structure; in tensors that were used before, or in new ones."""
    batch, options = draw.choice(subject.batches), {}
    if subject.package.module == "mace":
        options = draw.choice(({}, {}, {"compute_stress": False}, {"training": True}, {"compute_virials": True}))
    if draw.random() < 0.5:
        batch = {name: value.clone() for name, value in batch.items()}
    return detached(subject.call(batch, **options))


def do_evaluate(subject: Subject, draw: random.Random) -> Results:
    """As MACE's evaluation between epochs: no parameter needs gradients for the time of the call."""
    needed = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    for parameter in needed:
        parameter.requires_grad_(False)
    try:
        return do_call(subject, draw)
    finally:
        for parameter in needed:
            parameter.requires_grad_()


def do_call_without_gradients(subject: Subject, draw: random.Random) -> Results:
    """Energies; a captured model gives forces too, where stock raises."""
    context = draw.choice((torch.no_grad, torch.inference_mode))
    batch, new = draw.choice(subject.batches), draw.random() < 0.5
    with _right_if_it_raises(subject, batch), context():
        if new:
            batch = {name: value.clone() for name, value in batch.items()}
        return detached(subject.call(batch, energy_alone=True))


@contextlib.contextmanager
def _right_if_it_raises(subject: Subject, batch: dict[str, Tensor]) -> Iterator[None]:
    """An exception of stock's tells what its results would be, for a copy that answers."""
    try:
        yield
    except Exception as error:
        if not subject.is_fast:
            error.right = detached(subject.call(batch))  # type: ignore[attr-defined]
        raise


def do_failing_call(subject: Subject, draw: random.Random) -> Results:
    """Of a batch with one wrong tensor. Stock says too what is right, for a copy that does not read that tensor."""
    whole = draw.choice(subject.batches)
    faulty = _faulty(subject, whole, draw)
    if subject.is_fast:
        return detached(subject.call(faulty))
    with _right_if_it_raises(subject, whole):
        found = detached(subject.call(faulty))
    return found | {f"right {name}": value for name, value in detached(subject.call(whole)).items()}


def _faulty(subject: Subject, whole: dict[str, Tensor], draw: random.Random) -> dict[str, Tensor]:
    batch = {name: value.clone() for name, value in whole.items()}
    name = draw.choice([name for name in subject.package.read if name in batch])
    tensor = batch[name]
    faults = ["missing", "dtype"]
    if tensor.is_floating_point() and tensor.dim() > 1 and name != "node_attrs":
        faults.append("columns")
    if subject.device.type == "cpu":  # elsewhere such rows may end in a device-side assertion, which is for good
        faults += ["transposed", "fewer", "more", "nan" if tensor.is_floating_point() else "index"]
    fault = draw.choice(faults)
    if fault == "missing":
        del batch[name]
    elif fault == "dtype":
        batch[name] = tensor.to(torch.float32)
    elif fault == "transposed":
        batch[name] = tensor.mT.contiguous() if tensor.dim() > 1 else tensor[:, None]
    elif fault == "fewer":
        batch[name] = tensor[:-1]
    elif fault == "columns":
        batch[name] = tensor[..., :-1].contiguous()
    elif fault == "more":
        batch[name] = torch.cat((tensor, tensor[:1]))
    elif fault == "index":
        beyond = (batch["batch"].shape[0] if "batch" in batch else 9, 1000, -1000, 1 << 40)
        tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice(beyond)
    else:
        tensor.view(-1)[draw.randrange(tensor.numel())] = math.nan
    return batch


def do_interrupted_call(subject: Subject, draw: random.Random) -> None:
    """Ctrl-C at a drawn place in Equitune's code, or in what that calls."""
    batch = draw.choice(subject.batches)
    places = int(math.exp(draw.uniform(0.0, math.log(3000))))
    if subject.is_fast:
        with contextlib.suppress(KeyboardInterrupt), interrupt_after(places):
            subject.call(batch)


@contextlib.contextmanager
def interrupt_after(places: int) -> Iterator[None]:
    """KeyboardInterrupt where Python looks for signals: at the start of a function, and when one of C has returned.

    Not between any two lines: Python leaves no place to interrupt between a ``with`` and the release of its lock.
    """
    left = places

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event == "call":
            is_ours = _is_ours(frame) or (frame.f_back is not None and _is_ours(frame.f_back))
        else:
            is_ours = event == "c_return" and _is_ours(frame)
        left -= is_ours
        if is_ours and left == 0:
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def _is_ours(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith(FOLDERS)


def do_gradients(subject: Subject, draw: random.Random) -> Results:
    """Of a loss on energies and forces by every parameter."""
    found = _losses(subject, draw.choice(subject.batches))
    given = {name: value for name, value in subject.model.named_parameters() if value.requires_grad}
    if not given:
        return NOTHING
    gradients = torch.autograd.grad(found.pop("loss"), list(given.values()), allow_unused=True)
    zeros = (
        torch.zeros_like(value) if one is None else one for one, value in zip(gradients, given.values(), strict=True)
    )
    return detached(found | {f"gradient of {name}": value for name, value in zip(given, zeros, strict=True)})


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
    factor, way = drawn_factor(draw), draw.choice(("mul", "copy", "numpy", "set"))
    for parameter in parameters_of(subject, draw):
        if way == "copy":
            parameter.data.copy_(parameter.detach() * factor)
        elif way == "set":
            parameter.data = parameter.detach() * factor
        elif way == "numpy" and parameter.device.type == "cpu":
            parameter.data.numpy()[...] *= factor
        else:
            parameter.data.mul_(factor)


def do_write_without_gradients(subject: Subject, draw: random.Random) -> None:
    factor = drawn_factor(draw)
    with draw.choice((torch.no_grad, torch.inference_mode))():
        for parameter in parameters_of(subject, draw):
            parameter.mul_(factor)


def do_load_state_dict(subject: Subject, draw: random.Random) -> None:
    factor, names = drawn_factor(draw), {name for name, _ in subject.model.named_parameters()}
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
    return detached(found)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    # A large eps: Adam would turn a gradient that is zero but for rounding into a whole step.
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-3)


def _descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)


def do_average(subject: Subject, draw: random.Random) -> None:
    """A moving average takes the weights in, as torch_ema does."""
    for name, parameter in subject.model.named_parameters():
        before = subject.average.get(name)
        if before is not None and before.shape == parameter.shape:
            subject.average[name] = before.lerp(parameter.detach(), 0.5)
        else:
            subject.average[name] = parameter.detach() * 1.02


def do_average_in(subject: Subject, draw: random.Random) -> Results | None:
    """The average takes the place of the weights, through ``.data``."""
    if not subject.average:
        return NOTHING
    subject.stored = {name: parameter.detach().clone() for name, parameter in subject.model.named_parameters()}
    _copy_data(subject, subject.average)
    return None


def do_average_out(subject: Subject, draw: random.Random) -> Results | None:
    if not subject.stored:
        return NOTHING
    _copy_data(subject, subject.stored)
    return None


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
        self.left, self.right = (torch.nn.Parameter(0.3 * noise(shape, draw)) for shape in shapes)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.left @ self.right).view(weight.shape)


def do_parametrize(subject: Subject, draw: random.Random) -> Results | None:
    module, name, weight = drawn_weight(subject, draw)
    if module is None:
        return NOTHING
    parametrize.register_parametrization(module, name, LowRank(weight.detach(), draw))
    return None


def do_remove_parametrization(subject: Subject, draw: random.Random) -> Results | None:
    found = [module for module in _ordered_modules(subject) if parametrize.is_parametrized(module)]
    if not found:
        return NOTHING
    module = draw.choice(found)
    name = next(iter(module.parametrizations))
    parametrize.remove_parametrizations(module, name, leave_parametrized=draw.random() < 0.5)
    return None


def _ordered_modules(subject: Subject) -> list[Any]:
    return [module for _, module in sorted(subject.model.named_modules())]


def do_prune(subject: Subject, draw: random.Random) -> Results | None:
    module, name, weight = drawn_weight(subject, draw)
    if module is None:
        return NOTHING
    prune.custom_from_mask(module, name, (noise(weight, draw) > -1.0).to(weight))
    return None


def do_remove_pruning(subject: Subject, draw: random.Random) -> Results | None:
    found = [
        (module, hook._tensor_name)
        for module in _ordered_modules(subject)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, prune.BasePruningMethod)
    ]
    if not found:
        return NOTHING
    prune.remove(*draw.choice(found))
    return None


def do_weight_norm(subject: Subject, draw: random.Random) -> Results | None:
    module, name, _ = drawn_weight(subject, draw, least_dim=2)
    if module is None:
        return NOTHING
    torch.nn.utils.weight_norm(module, name, dim=draw.choice((0, 1)))
    return None


def do_remove_weight_norm(subject: Subject, draw: random.Random) -> Results | None:
    kind = importlib.import_module("torch.nn.utils.weight_norm").WeightNorm
    found = [
        (module, hook.name)
        for module in _ordered_modules(subject)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, kind)
    ]
    if not found:
        return NOTHING
    torch.nn.utils.remove_weight_norm(*draw.choice(found))
    return None


def do_inject_lora(subject: Subject, draw: random.Random) -> Results | None:
    """MACE's, once; its adapters begin with zeros, which would show nothing."""
    names = [name for name, _ in subject.model.named_parameters()]
    if subject.package.module != "mace" or any("lora" in name for name in names):
        return NOTHING
    inject = importlib.import_module("mace.modules.lora").inject_lora
    inject(subject.model, rank=2, wrap_dense=draw.random() < 0.5)
    for name, parameter in sorted(subject.model.named_parameters()):
        if name not in names and "lora" in name:
            parameter.data.copy_(0.1 * noise(parameter, draw))
    return None


class Scaled:
    """A forward hook, which can be copied and pickled."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: Any, given: Any, out: Any) -> Any:
        return out * self.factor if torch.is_tensor(out) else None


def do_hook(subject: Subject, draw: random.Random) -> Results | None:
    """On a module with parameters; a layout of features does not change what it does."""
    module, _, _ = drawn_weight(subject, draw)
    if module is None:
        return NOTHING
    module.register_forward_hook(Scaled(drawn_factor(draw)))
    return None


def do_remove_hooks(subject: Subject, draw: random.Random) -> Results | None:
    found = [
        (module, key)
        for module in _ordered_modules(subject)
        for key, hook in module._forward_hooks.items()
        if isinstance(hook, Scaled)
    ]
    for module, key in found:
        del module._forward_hooks[key]
    return None if found else NOTHING


def do_replace_parameter(subject: Subject, draw: random.Random) -> Results | None:
    module, name, weight = drawn_weight(subject, draw)
    if module is None:
        return NOTHING
    new = torch.nn.Parameter(weight.detach() * drawn_factor(draw), requires_grad=weight.requires_grad)
    setattr(module, name, new)
    return None


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
        return detached(subject.call(given))
    finally:
        model.double()


def do_train_mode(subject: Subject, draw: random.Random) -> None:
    subject.either(draw).train(draw.random() < 0.4)


def do_requires_grad(subject: Subject, draw: random.Random) -> None:
    needed = draw.random() < 0.5
    for parameter in parameters_of(subject, draw):
        parameter.requires_grad_(needed)


def do_zero_gradients(subject: Subject, draw: random.Random) -> None:
    subject.model.zero_grad(set_to_none=draw.random() < 0.5)


def do_restore(subject: Subject, draw: random.Random) -> None:
    if subject.is_fast:
        restore(subject.model)


def do_accelerate(subject: Subject, draw: random.Random) -> None:
    memory = draw.choice(("auto", "auto", "auto", "low"))
    if subject.is_fast:
        # Parts that were replaced with other options go first: a second call leaves them as they are.
        restore(subject.model)
        accelerate(subject.model, memory=memory if subject.kind == "accelerated" else "auto")


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
    "call": Action(do_call, 15, copies=True),
    "evaluate": Action(do_evaluate, 10, copies=True),
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
    "hook": Action(do_hook, 1),
    "remove_hooks": Action(do_remove_hooks, 1),
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
