"""SevenNet's ``IrrepsConvolution`` with gather, product and sum as one convolution; models that compile as a whole."""

from __future__ import annotations

from typing import Any, cast

import sevenn._keys as KEY
import torch
from sevenn.nn.convolution import IrrepsConvolution
from sevenn.nn.sequential import AtomGraphSequential
from torch import Tensor

from autotune.models.padding import Counts
from autotune.models.sevennet.package import PACKAGE, forces_and_stress, with_energies
from kernelgen.compat import run_eagerly
from kernelgen.errors import UnsupportedError


class FusedIrrepsConvolution(IrrepsConvolution):
    """``convolution`` is an :class:`autotune.models.stand_ins.AcceleratedConvolution`."""

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        """As SevenNet's, from ``data`` to ``data`` with new node features."""
        weight = self.weight_nn(data[self.key_weight_input])
        x = data[self.key_x]
        if self.is_parallel:
            x = torch.cat([x, data[KEY.NODE_FEATURE_GHOST]])
        receiver, sender = data[self.key_edge_idx][0], data[self.key_edge_idx][1]
        x = x.div(self.denominator)  # the input, which is narrower than the sum
        x = self.convolution(x, data[self.key_filter], weight, sender, receiver)
        if self.is_parallel:
            x = torch.tensor_split(x, data[KEY.NLOCAL])[0]
        data[self.key_x] = x
        return data


class CompilableSequential(AtomGraphSequential):
    """A model that ``torch.compile`` takes as one graph, energies, forces and stress inside, for any number of atoms.

    SevenNet's own forward has ``requires_grad_``, ``item`` and ``autograd.grad``, each of which ends a graph.
    """

    def forward(self, input: Any) -> Any:
        """As SevenNet's; compiled, it adds the results to ``input`` and nothing that was computed on the way."""
        if torch.compiler.is_dynamo_compiling():
            return _around(self, input)
        return super().forward(input)

    def compiled_step(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Energies, forces and stress, from the fields of a graph whose vectors need gradients."""
        size = Counts(given["x"].shape[0], given["edge_vec"].shape[0], given["cell_volume"].shape[0])
        data = with_energies(self, given, size.graphs)
        by_edge = _gradient(data[KEY.PRED_TOTAL_ENERGY].sum(), given["edge_vec"])
        data |= forces_and_stress(self, data, by_edge, size)
        found = {name: data[name] for name in PACKAGE.results if name in data}
        # Without a result that needs gradients torch compiles no backward pass of the forces.
        return found if self.training else {name: value.detach() for name, value in found.items()}


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _around(model: Any, data: Any) -> Any:
    """This runs eagerly, and of what it calls the step is compiled."""
    given = _fields(model, data)
    if given is None:
        return cast(Any, type(model).__mro__[1]).forward(model, data)
    with torch.enable_grad():
        found = model.compiled_step(given)
    return _with_results(model, data, found)


@run_eagerly("it reads a graph's fields")
def _fields(model: Any, data: Any) -> dict[str, Tensor] | None:
    """What the step takes, with vectors that need gradients; None for a model that it does not know."""
    try:
        PACKAGE.check_captured(model)
    except UnsupportedError:
        return None
    fields, _ = PACKAGE.fields(model, data, PACKAGE.cutoff(model))
    given, vectors = {name: field.tensor for name, field in fields.items()}, data[KEY.EDGE_VEC]
    return {**given, KEY.EDGE_VEC: vectors if vectors.requires_grad else vectors.detach().requires_grad_()}


@run_eagerly("it adds results to a graph")
def _with_results(model: Any, data: Any, found: dict[str, Tensor]) -> Any:
    for name, value in PACKAGE.answer(model, {}, found).items():
        data[name] = value
    return data


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _gradient(energy: Tensor, vectors: Tensor) -> Tensor:
    """[edges, 3]. Dynamo does not look into it; torch's tracing of derivatives does."""
    return torch.autograd.grad(energy, vectors, create_graph=True)[0]
