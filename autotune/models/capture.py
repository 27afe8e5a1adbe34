"""``autotune.capture``: a model whose steps of energies and forces are one launch each.

A GPU is faster than its host on small systems: the launches of some hundred kernels take longer than the kernels. A
CUDA graph launches all of them at once, but only for tensors of one size in one place. So a graph's atoms and edges are
padded with ghosts to steps of size, and copied to where the captured kernels read them.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotune.models.package import Package
from autotune.models.padding import Compute, Counts, Field, Fields, GraphMemory, PaddedStep, best_fit, padded_size
from autotune.models.replace import full_name
from autotune.models.stand_ins import packages
from kernelgen.errors import InputError, UnsupportedError

OUTGROWN = ("capture", "eager")


def capture(
    model: torch.nn.Module,
    example: Mapping[str, Any] | None = None,
    *,
    growth: float = 1.25,
    kept: int = 4,
    outgrown: str = "capture",
    **options: Any,
) -> CapturedModel:
    """A module that takes and gives what ``model`` does, and computes energies, forces and stress in one CUDA graph.

        >>> model = autotune.capture(model, batch, compute_stress=True)
        >>> out = model(batch, compute_stress=True)      # out["forces"] [atoms, 3], as the model's

    model: of MACE (``MACE``, ``ScaleShiftMACE``), NequIP or SevenNet, best after :func:`autotune.accelerate`.
    example: the inputs of one call, captured at once, with the call's ``options``; else the first call captures.

    growth: numbers of atoms and edges are padded to steps, each so many times the last one (beyond 32768 the fourth
    root of it). Ghost atoms and ghost edges are a structure of their own, and add nothing to the real ones. kept: the
    number of captured sizes that stay, those used last; all compute in the same memory.

    outgrown: what happens to a graph that fits no captured size: ``capture`` it, or leave it to the model (``eager``),
    which is as fast for large systems. Calls that need gradients of the results (``training=True``), those that ask for
    other results, such as a Hessian, and those for MACE's energies alone under ``torch.no_grad`` are always left to it.

    A capture is thrown away when the model's modules, hooks, mode, dtype or device change, or a parameter gets other
    memory. Parameters that are written in place (an optimizer's step, ``load_state_dict``) are seen. Results are
    detached. What NequIP and SevenNet leave in the data beside them is left out: all of edges, ``node_attrs``,
    ``feature_norm_factor``; ``x``, ``node_attr``, ``atom_type``, ``scaled_atomic_energy``. On a CPU there is no graph:
    each call runs the model on the padded inputs.

    Raises UnsupportedError for other models, also those with a ``forward`` or hooks of their own; in a call, for inputs
    that the model reads and results that it gives and a captured step does not know; for ``accelerate(model,
    memory="low")``, and on a GPU for a model with a part that waits for the device. InputError for fields of
    other lengths, and on a CPU for indices out of range.
    """
    captured = CapturedModel(model, growth=growth, kept=kept, outgrown=outgrown)
    if example is not None:
        captured(dict(example), **options)
    elif options:
        raise InputError(f"the options {sorted(options)} belong to the call on an example, and there is no example")
    return captured


class CapturedModel(torch.nn.Module):
    """Made by :func:`capture`. Attributes that it does not have are the model's.

    captures: captured sizes so far; replays: steps by them; eager_calls: calls that were left to the model.
    """

    # What the rows of a step's results are, if they are not the model's.
    step_results: Mapping[str, str] = {}

    def __init__(self, model: torch.nn.Module, *, growth: float, kept: int, outgrown: str) -> None:
        super().__init__()
        if not growth > 1:
            raise InputError(f"growth is {growth}; expected more than 1, such as 1.25")
        if kept < 1:
            raise InputError(f"kept is {kept}; expected the number of captured sizes that stay, at least 1")
        if outgrown not in OUTGROWN:
            raise InputError(f"outgrown is {outgrown!r}; expected one of {OUTGROWN}")
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"model is of type {type(model).__name__}; expected a torch.nn.Module")
        if isinstance(model, CapturedModel):
            raise InputError("model is captured already; capture the model that it holds, its attribute model")
        self.package = package_for(model)
        self.model = model
        self.growth, self.kept, self.outgrown = growth, kept, outgrown
        self.captures = self.replays = self.eager_calls = 0
        self.training = model.training
        self._forget()

    def forget(self) -> None:
        """Free what was captured, its memory included; the next step captures again."""
        with self._lock:
            self._steps.clear()

    def _forget(self) -> None:
        # Least recently used first.
        self._steps: OrderedDict[tuple[Hashable, Counts], PaddedStep] = OrderedDict()
        self._state: ModelState | None = None
        self._cutoff = 0.0
        self.memory = GraphMemory()
        self._lock = threading.Lock()

    @property
    def sizes(self) -> tuple[Counts, ...]:
        """The captured numbers of atoms, edges and graphs, ghosts included, least recently used first."""
        return tuple(size for _, size in self._steps)

    def forward(self, inputs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """The model's results for the model's ``inputs``, detached from them."""
        # Tensors are put into buffers by one call at a time.
        with self._lock:
            if not self.package.runs_eagerly(self.model, inputs, options):
                found = self._replayed(inputs, options)
                if found is None:
                    self.follow_the_model()
                    found = self._found(*self._fields(inputs), inputs, options)
                if found is not None:
                    return self.package.answer(self.model, inputs, found)
            self.eager_calls += 1
        return self.model(inputs, **options)

    def _fields(self, inputs: Mapping[str, Any]) -> tuple[Fields, Counts]:
        try:
            return self.package.fields(self.model, inputs, self._cutoff)
        except KeyError as missing:
            raise InputError(
                f"the inputs lack {missing}, which a captured step reads; pass it, or call the model itself, uncaptured"
            ) from missing

    def _replayed(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any] | None:
        """The results of a captured step that serves, if the model is the one that was captured.

        The host compares the model while a GPU computes: what was captured reads memory that is kept.
        """
        if self._state is None or self._state.modules[0] is not self.model:
            return None
        fields, real = self._fields(inputs)
        step = self.serving(kind_of_step(fields, options, device_of(self.model, fields)), real)
        if step is None:
            return None
        found = step(fields, real)
        if not self.is_still():
            return None
        step.check_asked(inputs)
        self.replays += 1
        return found

    def follow_the_model(self) -> None:
        """Forget what was captured of a model that has changed since."""
        if not self.is_still():
            self._steps.clear()
            self.package = package_for(self.model)
            self._cutoff = self.package.cutoff(self.model)
            self._state = ModelState(self.model)

    def is_still(self) -> bool:
        """Whether the model is the one that was captured."""
        return self._state is not None and self._state.is_still()

    def _found(
        self, fields: Fields, real: Counts, inputs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The results of the captured step that serves a graph, made if needed; None if none shall."""
        device = device_of(self.model, fields)
        kind = kind_of_step(fields, options, device)
        step = self.serving(kind, real)
        if step is not None:
            return self._run(step, fields, real, inputs)
        if self.outgrown == "eager" and any(known == kind for known, _ in self._steps):
            return None
        self.make_room()
        size, compute = padded_size(real, self.growth), self.computing(options)
        step = PaddedStep(size, fields, device, compute, self.step_results or self.package.results, self.memory)
        found = self._run(step, fields, real, inputs)
        self.keep(kind, step)
        return found

    def has(self, kind: Hashable, step: PaddedStep) -> bool:
        """Whether it is still kept."""
        return self._steps.get((kind, step.size)) is step

    def serving(self, kind: Hashable, real: Counts) -> PaddedStep | None:
        """The captured step of a kind that serves a graph, if there is one."""
        sizes = [size for known, size in self._steps if known == kind]
        size = best_fit(real, sizes, self.growth)
        if size is None:
            return None
        self._steps.move_to_end((kind, size))
        return self._steps[kind, size]

    def make_room(self) -> None:
        """For one more captured step."""
        while len(self._steps) >= self.kept:
            self._steps.popitem(last=False)

    def keep(self, kind: Hashable, step: PaddedStep) -> None:
        """After its first call: a step whose first call failed is made anew by the next one."""
        self._steps[kind, step.size] = step
        self.captures += 1

    def computing(self, options: Mapping[str, Any]) -> Compute:
        """What a step computes of padded tensors: the model's results with a call's options."""
        given_options = dict(options)

        def compute(given: dict[str, Tensor], size: Counts) -> dict[str, Any]:
            return self.package.known_results(self.package.compute(self.model, given, size, given_options), given)

        return compute

    def _run(self, step: PaddedStep, fields: Fields, real: Counts, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found = step(fields, real)
        step.check_asked(inputs)
        self.replays += 1
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("model")
            if model is None:
                raise
            return getattr(model, name)

    def __getstate__(self) -> dict[str, Any]:
        # Captured graphs belong to this process and to this model's memory.
        of_process = ("_steps", "_state", "_lock", "memory")
        return {name: value for name, value in self.__dict__.items() if name not in of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


def kind_of_step(fields: Fields, options: Mapping[str, Any], device: torch.device) -> Hashable:
    """What a captured step depends on beside the model and its size."""
    signatures = tuple((name, field.signature) for name, field in fields.items())
    return tuple(sorted(options.items())), signatures, device, settings_of(device)


def device_of(model: torch.nn.Module, fields: Fields) -> torch.device:
    """Where the model is; where its inputs are if it has no parameters."""
    parameter = next(model.parameters(), None)
    return next(iter(fields.values())).tensor.device if parameter is None else parameter.device


def settings_of(device: torch.device) -> tuple[Hashable, ...]:
    """torch's settings that change what kernels a model runs."""
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


# Which package captures a model, and what it would not see.


def package_for(model: torch.nn.Module) -> Package:
    """The package of a model; UnsupportedError if there is none, or the model cannot be captured."""
    for package in packages():
        if _is_of(package, model):
            if any(getattr(module, "always_streamed", False) for module in model.modules()):
                raise UnsupportedError(
                    "memory='low' waits for the device in every step; accelerate the model with memory='auto' to "
                    "capture it"
                )
            package.check_captured(model)
            if own := _what_would_be_lost(model, package):
                raise UnsupportedError(
                    f"{own}, whose inputs and results a captured step does not know; call the model itself, uncaptured"
                )
            return package
    names = ", ".join(package.title for package in packages())
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise UnsupportedError(
        f"capture does not know the model {kind}; it takes models of {names} that give energies and forces, not "
        "compiled ones: capture before torch.compile, or leave it out"
    )


def why_not_captured(model: torch.nn.Module) -> list[str]:
    """Why models of known packages in a module tree cannot be captured."""
    reasons: dict[str, None] = {}
    for module in model.modules():
        if any(_is_of(package, module) for package in packages()):
            try:
                package_for(module)
            except UnsupportedError as reason:
                reasons[f"capture, because {reason}"] = None
    return list(reasons)


@functools.cache
def along_x(length: float) -> Tensor:
    """A vector, for ghosts."""
    return torch.tensor([length, 0.0, 0.0])


@functools.cache
def cube(width: float) -> Tensor:
    """A cubic cell, for ghosts."""
    return width * torch.eye(3)


def _is_of(package: Package, model: torch.nn.Module) -> bool:
    """Whether it is such a model, by the names of its classes."""
    return any(full_name(kind) in package.classes for kind in type(model).__mro__)


def _what_would_be_lost(model: torch.nn.Module, package: Package) -> str:
    """What the model does around the package's own step, in words; empty if nothing."""
    for method in package.methods:
        if method in model.__dict__:
            return f"this {type(model).__name__} has a {method} of its own"
        for kind in type(model).__mro__:
            own = vars(kind).get(method)
            if own is not None and not _is_known(kind, own, package.classes):
                return f"{kind.__module__}.{kind.__qualname__} has a {method} of its own"
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
    if any(not getattr(hook, "__module__", "").startswith("autotune.") for hook in hooks):
        return f"this {type(model).__name__} has hooks of its own"
    return ""


def _is_known(kind: type, method: Any, classes: tuple[str, ...]) -> bool:
    """Whether it is the method that torch, Equitune or the package wrote, and not one that took its place."""
    if kind.__module__.startswith("torch."):
        return True
    known = kind.__module__.startswith("autotune.") or full_name(kind) in classes
    return known and getattr(method, "__globals__", {}).get("__name__") == kind.__module__


# Whether a model is still the one that was captured.


class ModelState:
    """The memory of a model's tensors, its modules, their mode, and what was hung on them.

    A captured graph reads parameters and buffers where they were. So values written in place are seen, and a tensor in
    other memory, of another dtype, another module, hook or ``forward`` is a change. The memory is kept as long as this
    object: a step that was launched before it is asked reads what was there.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = list(model.modules())
        self._memory = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        self.facts = self._facts()

    def is_still(self) -> bool:
        """Compares every module and tensor."""
        return self._facts() == self.facts

    def _facts(self) -> list[Any]:
        facts: list[Any] = []
        for module in self.modules:
            own = module.__dict__
            facts += (
                type(module),
                module.training,
                "forward" in own,
                *own["_forward_hooks"],
                *own["_forward_pre_hooks"],
                own.get("rounds"),
            )
            # Written out, since every call asks all modules, of which most have no tensors or no children.
            if tensors := own["_parameters"]:
                for tensor in tensors.values():
                    if tensor is not None:
                        facts += (tensor.data_ptr(), tensor.dtype)
            if tensors := own["_buffers"]:
                for tensor in tensors.values():
                    if tensor is not None:
                        facts += (tensor.data_ptr(), tensor.dtype)
            if children := own["_modules"]:
                facts += map(id, children.values())
        return facts


# ``autotune.capture_training``: the gradients of a loss on energies and forces, one launch for each batch.
#
# As ``autotune.capture`` it pads batches with ghosts to steps of size. A loss must not see these: it says of which rows
# it takes the mean. Gradients are written to memory that stays, so that the optimizer, clipping and averages of weights
# are used as ever.

# Beside the model's own inputs: a label by its name, and ones for the real atoms.
_LABEL, _REAL = "label ", "real atoms"


class Real(NamedTuple):
    """The rows of padded results that are a batch's own. atoms [atoms]: 1 for them, 0 for ghosts. graphs: the first."""

    atoms: Tensor
    graphs: int

    def mean(self, values: Tensor, per: str) -> Tensor:
        """The mean of all elements in real rows of values ``[atoms, ...]`` or ``[graphs, ...]``; per: which of them."""
        if per not in ("atoms", "graphs"):
            raise InputError(f"per is {per!r}; expected 'atoms' or 'graphs'")
        if per == "graphs":
            return values[: self.graphs].mean()
        is_real = self.atoms.view(-1, *[1] * (values.dim() - 1)) > 0
        count = self.atoms.sum(dtype=values.dtype) * math.prod(values.shape[1:])
        return torch.where(is_real, values, 0.0).sum() / count


# Of the model's results, the labels and which rows are real.
Loss = Callable[[dict[str, Tensor], dict[str, Tensor], Real], Tensor]


def capture_training(model: torch.nn.Module, loss: Loss, *, growth: float = 1.25, kept: int = 4) -> CapturedTraining:
    """A module that computes a loss and leaves its gradients in the model's parameters, in one CUDA graph.

        >>> def loss(out, labels, real):
        ...     energies = (out["energy"] - labels["energy"]) / labels["atoms"]
        ...     forces = out["forces"] - labels["forces"]
        ...     return real.mean(energies.square(), "graphs") + 10 * real.mean(forces.square(), "atoms")
        >>> step = autotune.capture_training(model.train(), loss)
        >>> value = step(batch, {"energy": energy, "forces": forces, "atoms": numbers_of_atoms})
        >>> optimizer.step()                             # gradients are in the parameters, not added to older ones

    model: as of :func:`autotune.capture`, in training mode. loss: a scalar of the model's results, of labels and of
    :class:`Real`; results and labels have rows of ghosts too, in labels ones. It must not wait for the device. Labels
    have a row for each atom or each structure; their names are free.

    growth, kept: as of :func:`autotune.capture`; it says too when a capture is thrown away. What ``requires_grad`` says
    of a parameter is followed. The gradient by positions, which ``loss.backward()`` computes as well, is left out. On a
    CPU there is no graph: each call computes the padded batch.

    Raises UnsupportedError for models and inputs that a captured step does not know; InputError for a model in
    evaluation mode, labels of other lengths and a loss that is no scalar.
    """
    return CapturedTraining(model, loss, growth=growth, kept=kept)


class CapturedTraining(CapturedModel):
    """Made by :func:`capture_training`. captures, replays: of :class:`autotune.CapturedModel`."""

    step_results = {"loss": "graphs"}

    def __init__(self, model: torch.nn.Module, loss: Loss, *, growth: float, kept: int) -> None:
        super().__init__(model, growth=growth, kept=kept, outgrown="capture")
        self.loss = loss

    def _forget(self) -> None:
        super()._forget()
        self._gradients: dict[torch.nn.Parameter, Tensor] = {}
        self._unused: frozenset[torch.nn.Parameter] = frozenset()

    def forward(self, inputs: Mapping[str, Any], labels: Mapping[str, Tensor], **options: Any) -> Tensor:  # type: ignore[override]
        """The loss of a batch, detached; its gradients take the place of those in the parameters."""
        with self._lock:
            if not self.model.training:
                raise InputError("the model is in evaluation mode; call its train() first")
            self.follow_the_model()
            self._follow_weights()
            if (why := self.package.runs_eagerly(self.model, inputs, options)) not in ("", "training"):
                raise UnsupportedError(f"a captured training step does not know {why}; train without it, or uncaptured")
            fields, real = self.package.fields(self.model, inputs, self._cutoff)
            fields = {**fields, **_fields_of(labels, real, device_of(self.model, fields))}
            found = self._found(fields, real, inputs, self.package.training_options(options))
            assert found is not None
            for weight, gradient in self._gradients.items():
                weight.grad = None if weight in self._unused else gradient
        return found["loss"]

    def _follow_weights(self) -> None:
        """Memory for the gradients of the parameters that require them."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        are_these = list(map(id, self._gradients)) == list(map(id, weights))
        if not (are_these and all(_is_alike(*pair) for pair in self._gradients.items())):
            self._steps.clear()
            self._gradients = {weight: torch.zeros_like(weight) for weight in weights}

    def computing(self, options: Mapping[str, Any]) -> Compute:
        given_options, gradients = dict(options), self._gradients

        def compute(given: dict[str, Tensor], size: Counts) -> dict[str, Any]:
            names = [name for name in given if name.startswith(_LABEL)]
            labels = {name.removeprefix(_LABEL): given.pop(name) for name in names}
            real = Real(given.pop(_REAL), size.graphs - 1)
            out = self.package.compute(self.model, given, size, given_options)
            loss = self.loss(out, labels, real)
            if not isinstance(loss, Tensor) or loss.dim():
                shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise InputError(f"the loss is {shape}; expected a tensor without dimensions, such as a sum of means")
            found = torch.autograd.grad(loss, list(gradients), allow_unused=True)
            pairs = [(kept, new) for kept, new in zip(gradients.values(), found, strict=True) if new is not None]
            torch._foreach_copy_([kept for kept, _ in pairs], [new for _, new in pairs])
            self._unused = frozenset(weight for weight, new in zip(gradients, found, strict=True) if new is None)
            return {"loss": loss}

        return compute

    def _run(self, step: PaddedStep, fields: Fields, real: Counts, inputs: Mapping[str, Any]) -> dict[str, Any]:
        step.fill(fields, real)
        found = step.launch()
        step.check_asked(inputs)
        self.replays += 1
        return {"loss": found["loss"].clone()}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("_gradients", "_unused")}


def _is_alike(weight: Tensor, gradient: Tensor) -> bool:
    return (weight.shape, weight.dtype, weight.device) == (gradient.shape, gradient.dtype, gradient.device)


def _fields_of(labels: Mapping[str, Tensor], real: Counts, device: torch.device) -> dict[str, Field]:
    """Labels, by what their rows are, and the ones of the real atoms."""
    if real.atoms == real.graphs and labels:
        raise InputError(
            "the batch has as many structures as atoms, so that labels of both look alike; put single atoms in batches "
            "with larger structures"
        )
    found = {_REAL: Field(torch.ones(real.atoms, device=device), "atoms", 0.0)}
    for name, label in labels.items():
        rows = {real.graphs: "graphs", real.atoms: "atoms"}
        per = rows.get(label.shape[0]) if isinstance(label, Tensor) and label.dim() else None
        if per is None:
            given = tuple(label.shape) if isinstance(label, Tensor) else type(label).__name__
            raise InputError(
                f"label {name!r} is {given}; expected a tensor with {real.atoms} rows, one for each atom, or "
                f"{real.graphs}, one for each structure"
            )
        found[_LABEL + name] = Field(label.detach(), per, 1.0, each=tuple(label.shape[1:]))
    return found
