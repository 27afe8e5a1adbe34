"""A small equivariant potential of a made-up package, in plain e3nn, and faults that are planted into it.

Each fault makes of a right model a wrong one, as a path of ``autotune.certify`` does; ``FAULTS`` says which checks find
it. The faults of the model packages themselves are in ``tests/models/test_certificates.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list
from e3nn import o3

from autotune.models.package import Outputs, Package, converted, default_dtype, dtype_of
from autotune.models.whole_model import WholeModel

CUTOFF = 3.5
SPECIES = (1, 6, 8, 14)
HIDDEN, HARMONICS = o3.Irreps("4x0e+4x1o+4x2e"), o3.Irreps("0e+1o+2e")


class Layer(torch.nn.Module):
    """Gathers, multiplies and sums; a node's own features pass by a matrix of its species."""

    def __init__(self, irreps_in: o3.Irreps) -> None:
        super().__init__()
        paths, outputs = [], []
        for i, (count, ir_in) in enumerate(irreps_in):
            for j, (_, ir_edge) in enumerate(HARMONICS):
                for ir_out in ir_in * ir_edge:
                    if ir_out in HIDDEN:
                        paths.append((i, j, len(outputs), "uvu", True))
                        outputs.append((count, ir_out))
        self.product = o3.TensorProduct(
            irreps_in, HARMONICS, o3.Irreps(outputs), paths, shared_weights=False, internal_weights=False
        )
        self.radial = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, self.product.weight_numel)
        )
        self.linear = o3.Linear(self.product.irreps_out.simplify(), HIDDEN)
        self.own = o3.Linear(irreps_in, HIDDEN)

    def forward(self, x: torch.Tensor, harmonics: torch.Tensor, lengths: torch.Tensor, edges: torch.Tensor) -> Any:
        sender, receiver = edges
        messages = self.product(x[sender], harmonics, self.radial(lengths) * lengths[:, :1])
        sums = torch.zeros(len(x), messages.shape[1], dtype=x.dtype).index_add(0, receiver, messages)
        return self.linear(sums) + self.own(x)


class Net(torch.nn.Module):
    """Energies of nodes from edge vectors, which are periodic images already."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(len(SPECIES), 4)
        self.harmonics = o3.SphericalHarmonics(HARMONICS, normalize=True, normalization="component")
        self.layers = torch.nn.ModuleList([Layer(o3.Irreps("4x0e")), Layer(HIDDEN)])
        self.readout = o3.Linear(HIDDEN, "4x0e")
        self.final = torch.nn.Linear(4, 1)
        self.alone = torch.nn.Embedding(len(SPECIES), 1)

    def forward(self, kinds: torch.Tensor, vectors: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x, lengths = self.embedding(kinds), vectors.norm(dim=1, keepdim=True)
        inside = (1 - (lengths / CUTOFF) ** 2).clamp(min=0) ** 3
        radial = inside * torch.cat([torch.exp(-power * lengths / 2) for power in range(4)], 1)
        harmonics = self.harmonics(vectors)
        for layer in self.layers:
            x = layer(x, harmonics, radial, edges)
        return (self.final(torch.nn.functional.silu(self.readout(x))) + self.alone(kinds)).squeeze(1)


class NetPackage(Package):
    name = "made-up"
    modules = ("torch",)
    install = "torch"
    neighbor_function = ("certified_net", "neighbor_list")

    def build(self, parameters: Any, seed: int) -> torch.nn.Module:
        return Net()

    def load(self, path: Path) -> torch.nn.Module:
        raise NotImplementedError

    def owns(self, model: torch.nn.Module) -> bool:
        return isinstance(model, Net)

    def cutoff(self, model: torch.nn.Module) -> float:
        return CUTOFF

    def species(self, model: torch.nn.Module) -> tuple[int, ...]:
        return SPECIES

    def inputs(self, model: torch.nn.Module, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        found: dict[str, list[np.ndarray]] = {}
        first = 0
        for place, one in enumerate(atoms):
            sender, receiver, cells = neighbor_list("ijS", one, CUTOFF)
            given = {
                "kinds": np.array([SPECIES.index(number) for number in one.numbers]),
                "positions": one.positions,
                "structure": np.full(len(one), place),
                "edges": first + np.stack([sender, receiver], 1).reshape(-1, 2),
                "shifts": (cells @ one.cell.array).reshape(-1, 3),
                "volume": np.array([one.cell.volume if one.pbc.all() else 1.0]),
            }
            first += len(one)
            for name, value in given.items():
                found.setdefault(name, []).append(value)
        tensors = {name: torch.from_numpy(np.concatenate(values)) for name, values in found.items()}
        return converted(tensors, device, dtype_of(model))

    def evaluate(self, model: Any, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        positions, structure = inputs["positions"].detach().requires_grad_(), inputs["structure"]
        strain = torch.zeros(len(inputs["volume"]), 3, 3, dtype=positions.dtype, requires_grad=True)
        sender, receiver = inputs["edges"].mT
        apart = positions[receiver] + inputs["shifts"] - positions[sender]
        symmetric = (strain + strain.mT)[structure[sender]] / 2
        vectors = apart + (symmetric @ apart[:, :, None]).squeeze(2)
        nodes = model(inputs["kinds"], vectors, torch.stack([sender, receiver]))
        energy = torch.zeros(len(inputs["volume"]), dtype=nodes.dtype).index_add(0, structure, nodes)
        # A structure without edges has no gradients.
        total = energy.sum() + 0 * (positions.sum() + strain.sum())
        gradient, virial = torch.autograd.grad(total, (positions, strain), create_graph=training)
        found = virial / inputs["volume"][:, None, None] if stress else None
        return Outputs(energy, -gradient, found, nodes)

    def edges(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["edges"].mT

    def calculator(self, model: torch.nn.Module, device: str) -> Any:
        raise NotImplementedError


def net(dtype: torch.dtype = torch.float64) -> WholeModel:
    with default_dtype(torch.float64):
        model = Net().to(dtype).eval()
    return WholeModel("made-up net", model, NetPackage())


def net_for_commands() -> WholeModel:
    """For ``equitune certify certified_net:net_for_commands``."""
    return net(torch.float32)


# Faults. A hook changes what a part of the model gives; a package changes what goes in or comes out.

Plant = Callable[[WholeModel], WholeModel]


def after(part: Callable[[Net], torch.nn.Module], change: Callable[[Any], Any]) -> Plant:
    """``change`` is made to what a part of the model gives."""

    def plant(model: WholeModel) -> WholeModel:
        part(model.module).register_forward_hook(lambda module, given, out: change(out))  # type: ignore[arg-type]
        return model

    return plant


def around(change: Callable[..., Outputs]) -> Plant:
    """``change(evaluate, inputs, stress)`` takes the place of the package's evaluation."""

    def plant(model: WholeModel) -> WholeModel:
        class Changed(NetPackage):
            def evaluate(self, model: Any, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
                def right(given: dict[str, Any]) -> Outputs:
                    return NetPackage.evaluate(self, model, given, training=training, stress=stress)

                return change(right, inputs)

        return dataclasses.replace(model, package=Changed())

    return plant


def _columns(path: int, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The weights of one path of the second layer, four columns each, times a factor."""

    def change(weights: torch.Tensor) -> torch.Tensor:
        changed = weights.clone()
        changed[:, 4 * path : 4 * path + 4] *= factor
        return changed

    return change


def _mantissa(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounded to so many bits, with the gradient of the unrounded."""

    def change(values: torch.Tensor) -> torch.Tensor:
        fraction, exponent = torch.frexp(values.detach())
        rounded = torch.ldexp(torch.round(fraction * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)
        return values + (rounded - values.detach())

    return change


def _chirality(x: torch.Tensor) -> torch.Tensor:
    """Scalars get the triple product of three vectors, which changes its sign in a mirror."""
    first, second, third, _ = x[:, 4:16].reshape(-1, 4, 3).unbind(1)
    triple = (torch.linalg.cross(first, second) * third).sum(1)
    return torch.cat([x[:, :4] + 1e-3 * triple[:, None], x[:, 4:]], 1)


def _swapped_species(model: WholeModel) -> WholeModel:
    weights: Any = model.module.embedding.weight  # type: ignore[union-attr]
    with torch.no_grad():
        weights.copy_(weights[[0, 1, 3, 2]])
    return model


def _stale(model: WholeModel) -> WholeModel:
    """Keeps the edges of a structure by its number of atoms."""
    kept: dict[int, dict[str, Any]] = {}

    def change(right: Any, inputs: dict[str, Any]) -> Outputs:
        count = len(inputs["positions"])
        kept.setdefault(count, {name: inputs[name] for name in ("edges", "shifts")})
        return right(inputs | kept[count])

    return around(change)(model)


def _of_edges(keep: Callable[[dict[str, Any]], torch.Tensor]) -> Plant:
    def change(right: Any, inputs: dict[str, Any]) -> Outputs:
        kept = keep(inputs)
        return right(inputs | {name: inputs[name][kept] for name in ("edges", "shifts")})

    return around(change)


def _lengths(inputs: dict[str, Any]) -> torch.Tensor:
    sender, receiver = inputs["edges"].mT
    return (inputs["positions"][receiver] + inputs["shifts"] - inputs["positions"][sender]).norm(dim=1)


def _without_the_last(inputs: dict[str, Any]) -> torch.Tensor:
    return torch.arange(len(inputs["edges"])) < max(len(inputs["edges"]) - 1, 1)


def _outputs(**changes: Callable[[Outputs, dict[str, Any]], Any]) -> Plant:
    def change(right: Any, inputs: dict[str, Any]) -> Outputs:
        out = right(inputs)
        return dataclasses.replace(out, **{name: make(out, inputs) for name, make in changes.items()})

    return around(change)


def _refuses_no_edges(right: Any, inputs: dict[str, Any]) -> Outputs:
    if not len(inputs["edges"]):
        raise IndexError("index 0 is out of bounds")
    return right(inputs)


def _batch_of_one(right: Any, inputs: dict[str, Any]) -> Outputs:
    """The first atom of the second structure counts to the first."""
    structure = inputs["structure"].clone()
    if len(inputs["volume"]) > 1:
        structure[int((structure == 0).sum())] = 0
    return right(inputs | {"structure": structure})


def _second_layer(model: Net) -> Any:
    return model.layers[1]


# By name: the fault, and the checks of which at least one finds it.
FAULTS: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "a coupling's sign": (after(lambda net: _second_layer(net).radial, _columns(4, -1.0)), ("energy",)),
    "a dropped path": (after(lambda net: _second_layer(net).radial, _columns(9, 0.0)), ("energy",)),
    "a stale graph": (_stale, ("changed graph",)),
    "a wrong species weight": (_swapped_species, ("energy",)),
    "forces without one layer's gradient": (
        after(lambda net: net.layers[0], torch.Tensor.detach),  # type: ignore[arg-type]
        ("slope of the energy",),
    ),
    "TF32": (after(lambda net: _second_layer(net).product, _mantissa(10)), ("forces",)),
    "one component of a harmonic": (
        after(lambda net: net.harmonics, lambda out: out * (1 + 1e-4 * (torch.arange(9) == 2))),
        ("rotation",),
    ),
    "a chiral energy": (after(_second_layer, _chirality), ("inversion",)),
    "forces that are no gradient": (
        _outputs(forces=lambda out, inputs: out.forces * (1 + 1e-4 * out.forces.norm(dim=1, keepdim=True))),
        ("conservative", "slope of the energy"),
    ),
    "a lost edge": (_of_edges(_without_the_last), ("permutation", "energy")),
    "noise": (
        _outputs(forces=lambda out, inputs: out.forces * (1 + 1e-4 * torch.randn(len(out.forces), 1))),
        ("determinism",),
    ),
    "a batch's second structure": (around(_batch_of_one), ("batch",)),
    "no self-images": (_of_edges(lambda inputs: inputs["edges"][:, 0] != inputs["edges"][:, 1]), ("energy",)),
    "a shorter cutoff": (_of_edges(lambda inputs: _lengths(inputs) < 0.9 * CUTOFF), ("forces",)),
    "stress of half the strain": (
        _outputs(stress=lambda out, _: out.stress / 2 if out.stress is not None else None),
        ("stress",),
    ),
    "energies of the wrong atoms": (_outputs(node_energy=lambda out, _: out.node_energy.flip(0)), ("node energies",)),
    "images on the other side": (
        around(lambda right, inputs: right(inputs | {"shifts": -inputs["shifts"]})),
        ("energy",),
    ),
    "an energy of the place": (
        _outputs(energy=lambda out, inputs: out.energy + 1e-4 * inputs["positions"][:, 0].sum()),
        ("translation",),
    ),
}
CRASHES = {"no edges": around(_refuses_no_edges)}
