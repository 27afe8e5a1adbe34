"""A whole model without a model package: pairs of atoms, a weight, and energies that fall with the distance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.neighborlist import neighbor_list
from ase.stress import full_3x3_to_voigt_6_stress

from autotune.errors import PeerError
from autotune.models.package import Outputs, Package, converted, dtype_of
from autotune.models.replace import Exchange, ExchangedConvolution
from autotune.models.whole_model import WholeModel

CUTOFF = 3.0
# Of a diamond crystal, between those of 128 and of 256 atoms.
MOST_EDGES = 5000


class PairModel(torch.nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.strength = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
        self.factor = factor

    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        powers = torch.stack([torch.exp(-lengths), torch.exp(-2 * lengths)])
        return self.factor * (self.strength @ powers).sum()


class TinyPackage(Package):
    """Peers: ``same``, ``wrong`` (other values), ``refuses`` (says why), ``breaks`` and ``dies`` when they run.

    ``full`` has no memory for more than ``MOST_EDGES``; ``wraps`` computes something else there, ``slow`` takes long.

    ``same`` has a convolution that Equitune's can replace, by ``EXCHANGE``.
    """

    name = "tiny"
    modules = ("torch",)
    install = "torch"
    peers = ("same", "wrong", "refuses", "breaks", "dies", "full", "wraps", "slow")
    joined = ("same",)
    stress_is_apart = True
    neighbor_function = ("tiny_model", "neighbor_list")

    def build(self, parameters: Any, seed: int) -> torch.nn.Module:
        return PairModel()

    def load(self, path: Path) -> torch.nn.Module:
        raise NotImplementedError

    def owns(self, model: torch.nn.Module) -> bool:
        return isinstance(model, PairModel)

    def cutoff(self, model: torch.nn.Module) -> float:
        return CUTOFF

    def species(self, model: torch.nn.Module) -> tuple[int, ...]:
        return (1, 6, 7)

    def inputs(self, model: torch.nn.Module, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        (one,) = atoms
        sender, receiver, cells = neighbor_list("ijS", one, CUTOFF)
        edges = torch.stack([torch.from_numpy(sender), torch.from_numpy(receiver)])
        given = {"positions": one.positions, "shifts": cells @ one.cell.array, "volume": np.array(one.cell.volume)}
        tensors = {name: torch.from_numpy(values) for name, values in given.items()}
        return converted(tensors | {"edges": edges}, device, dtype_of(model))

    def evaluate(self, model: torch.nn.Module, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        positions = inputs["positions"].detach().requires_grad_()
        strain = torch.zeros(3, 3, dtype=positions.dtype, device=positions.device, requires_grad=True)
        sender, receiver = inputs["edges"]
        apart = positions[receiver] + inputs["shifts"] - positions[sender]
        energy = model((apart + apart @ (strain + strain.mT) / 2).norm(dim=1))
        gradient, virial = torch.autograd.grad(energy, (positions, strain), create_graph=training)
        return Outputs(energy.reshape(1), -gradient, virial[None] / inputs["volume"] if stress else None)

    def edges(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["edges"]

    def calculator(self, model: torch.nn.Module, device: str) -> TinyCalculator:
        return TinyCalculator(model, device)

    def accelerated(self, model: torch.nn.Module, peer: str, device: str) -> torch.nn.Module:
        if peer == "refuses":
            raise PeerError("refuses: it does not want to")
        kinds = {"same": Converted, "breaks": Breaking, "dies": Dying, "full": Full, "wraps": Wrapping, "slow": Slow}
        made = PairModel(1.5) if peer == "wrong" else kinds[peer]()
        made.load_state_dict(model.state_dict())
        return made.to(device, dtype_of(model))


class TinyCalculator(Calculator):
    implemented_properties = ["energy", "forces", "stress"]

    def __init__(self, model: Any, device: str) -> None:
        super().__init__()
        self.model, self.device = model, device

    def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        package = TinyPackage()
        inputs = package.inputs(self.model, [atoms], self.device)
        out = package.evaluate(self.model, inputs, training=False, stress=True)
        assert out.stress is not None
        stress = full_3x3_to_voigt_6_stress(out.stress[0].numpy())
        self.results = {"energy": float(out.energy), "forces": out.forces.numpy(), "stress": stress}


class TheirConvolution(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * y * weights)


class Converted(PairModel):
    """Sums over pairs by a convolution with one node."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution: torch.nn.Module = TheirConvolution()

    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        edges = torch.zeros(2, len(lengths), dtype=torch.long)
        node, ones = lengths.new_ones(1, 1), lengths.new_ones(len(lengths), 1)
        powers = [torch.exp(-power * lengths)[:, None] for power in (1, 2)]
        sums = [self.convolution(node, values, ones, edges)[0, 0] for values in powers]
        return self.strength @ torch.stack(sums)


class OurConvolution(ExchangedConvolution):
    def forward(self, x: Any, y: Any, weights: Any, edges: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, y, weights, edges[0], edges[1])


class TinyExchange(Exchange):
    product = "convolution"

    def library(self, block: torch.nn.Module) -> str:
        theirs = isinstance(block, Converted) and isinstance(block.convolution, TheirConvolution)
        return "same" if theirs else ""

    def stand_in(self, block: Any, **options: Any) -> ExchangedConvolution:
        arguments = {"irreps_in1": "1x0e", "irreps_in2": "1x0e", "filter_irreps_out": "1x0e"}
        return OurConvolution(block.convolution, **arguments, **options)

    def convolved(self, block: Any, x: Any, y: Any, weights: Any, edges: Any) -> torch.Tensor:
        return block.convolution(x, y, weights, edges)

    def fuse(self, block: torch.nn.Module) -> None:
        pass


EXCHANGE = TinyExchange()


class Breaking(PairModel):
    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of order")


class Dying(PairModel):
    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        import os

        os._exit(3)


class Full(PairModel):
    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        if len(lengths) > MOST_EDGES:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(lengths)


class Wrapping(PairModel):
    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        beyond = torch.arange(len(lengths)) >= MOST_EDGES
        return super().forward(torch.where(beyond, 0.5 * lengths, lengths))


class Slow(PairModel):
    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(30.0 if len(lengths) > MOST_EDGES else 0.0)
        return super().forward(lengths)


def tiny_model() -> WholeModel:
    return WholeModel("tiny", PairModel(), TinyPackage())


def nothing() -> str:
    return "no model"
