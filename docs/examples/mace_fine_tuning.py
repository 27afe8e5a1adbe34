"""Fine-tune a MACE model in a loop of your own, on energies and forces. The saved file is a stock model."""

from __future__ import annotations

import numpy as np
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from mace import data, tools
from mace.tools import torch_geometric
from small_mace import crystal, small_mace

from autotune import accelerate, restore

model = small_mace()
structures = []
for seed in range(8):  # yours come from a file with energies and forces
    atoms = crystal()
    atoms.rattle(0.03, seed=seed)
    random = np.random.default_rng(seed)
    atoms.calc = SinglePointCalculator(atoms, energy=-24.0, forces=0.1 * random.normal(size=(len(atoms), 3)))
    atoms.info["REF_energy"], atoms.arrays["REF_forces"] = atoms.get_potential_energy(), atoms.get_forces()
    structures.append(atoms)

table = tools.AtomicNumberTable([int(number) for number in model.atomic_numbers])
keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
graphs = [
    data.AtomicData.from_config(data.config_from_atoms(atoms, key_specification=keys), z_table=table, cutoff=4.0)
    for atoms in structures
]
loader = torch_geometric.dataloader.DataLoader(graphs, batch_size=4, shuffle=False)

print(str(accelerate(model)).splitlines()[0])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(5):
    total = 0.0
    for batch in loader:
        out = model(batch.to_dict(), training=True)
        loss = (out["energy"] - batch.energy).square().mean() + 10 * (out["forces"] - batch.forces).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    losses.append(total)
print(f"the loss fell in every epoch: {losses == sorted(losses, reverse=True)}")

restore(model)
torch.save(model, "tuned.model")
print(f"the file holds {type(torch.load('tuned.model', weights_only=False)).__name__}")
