"""A training step on energies and forces with layers of e3nn in a model of your own, stock and accelerated."""

from __future__ import annotations

import torch
from e3nn import o3

from autotune import SphericalHarmonics, TensorProductConv, accelerate

torch.manual_seed(0)


class Layer(torch.nn.Module):
    """A message-passing layer: harmonics of edge vectors, a radial network, one convolution, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = SphericalHarmonics([0, 1, 2], normalize=True, normalization="component")
        self.conv = TensorProductConv("16x0e+16x1o", "0e+1o+2e", filter_irreps_out="0e+1o")
        self.radial = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.SiLU(), torch.nn.Linear(64, self.conv.weight_numel)
        )
        self.linear = o3.Linear(self.conv.irreps_out, "16x0e+16x1o")

    def forward(self, features: torch.Tensor, vectors: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor):
        lengths = vectors.norm(dim=1, keepdim=True)
        weights = self.radial(torch.exp(-(lengths - torch.linspace(0, 3, 8)).square()))
        return self.linear(self.conv(features, self.harmonics(vectors), weights, sender, receiver))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        # A product of e3nn, which `accelerate` replaces.
        self.square = o3.FullyConnectedTensorProduct("16x0e+16x1o", "16x0e+16x1o", "1x0e")

    def forward(self, positions: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor) -> torch.Tensor:
        vectors = positions[sender] - positions[receiver]
        features = torch.ones(len(positions), 64)
        features = self.second(self.first(features, vectors, sender, receiver), vectors, sender, receiver)
        return self.square(features, features).sum()


def forces_of(energy: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return -torch.autograd.grad(energy, positions, create_graph=True)[0]


model = Model()
positions = torch.rand(32, 3, dtype=torch.float32) * 4
sender, receiver = torch.nonzero((torch.cdist(positions, positions) < 3).fill_diagonal_(False), as_tuple=True)
positions.requires_grad_()
before = model(positions, sender, receiver).detach()

print(str(accelerate(model)).splitlines()[0])
after = model(positions, sender, receiver).detach()
print(f"the same energy: {torch.allclose(after, before, rtol=1e-4)}")

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(10):
    energy = model(positions, sender, receiver)
    loss = (energy / len(positions) + 1).square() + forces_of(energy, positions).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
print(f"the loss fell: {losses[-1] < losses[0]}")
