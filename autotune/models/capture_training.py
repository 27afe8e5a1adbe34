"""``autotune.capture_training``: the gradients of a loss on energies and forces, one launch for each batch.

As ``autotune.capture`` it pads batches with ghosts to steps of size. A loss must not see these: it says of which rows
it takes the mean. Gradients are written to memory that stays, so that the optimizer, clipping and averages of weights
are used as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotune.models.capture import CapturedModel, device_of
from autotune.models.padding import Compute, Counts, Field, Fields, PaddedStep
from kernelgen.errors import InputError, UnsupportedError

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
