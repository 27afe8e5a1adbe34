"""A box of water that anyone can make: no file, and the number density of the liquid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ase import Atoms

# The gas-phase molecule (angstrom, degrees), and the volume of a molecule in the liquid at 298 K (0.997 g/cm^3).
OH, HOH, VOLUME = 0.9572, 104.52, 30.0


@dataclass(frozen=True)
class Water:
    """``side``^3 water molecules in a periodic cube, randomly turned, each oxygen near a site of a cubic lattice.

    The density and the number of neighbours are the liquid's; the arrangement is not equilibrated.
    """

    side: int
    seed: int = 0

    def atoms(self) -> Atoms:
        from ase import Atoms

        random, spacing = np.random.default_rng(self.seed), VOLUME ** (1 / 3)
        sites = np.stack(np.meshgrid(*[np.arange(self.side)] * 3, indexing="ij"), -1).reshape(-1, 3)
        oxygens = spacing * (sites + 0.5) + random.normal(0.0, 0.15, sites.shape)
        half = np.radians(HOH / 2)
        molecule = OH * np.array(
            [[0.0, 0.0, 0.0], [np.sin(half), 0.0, np.cos(half)], [-np.sin(half), 0.0, np.cos(half)]]
        )
        # Uniformly random rotations: the orthogonal part of random matrices.
        turns, upper = np.linalg.qr(random.normal(size=(len(sites), 3, 3)))
        turns *= np.sign(np.einsum("nii->ni", upper))[:, None, :]
        positions = oxygens[:, None] + np.einsum("nij,mj->nmi", turns, molecule)
        return Atoms("OHH" * len(sites), positions=positions.reshape(-1, 3), cell=[self.side * spacing] * 3, pbc=True)
