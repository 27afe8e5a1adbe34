"""A small MACE model with random weights, so that the examples need no download. Yours is trained: take that.

``python small_mace.py my.model`` writes it to a file. Its energies mean nothing; what runs is what runs with yours.
"""

from __future__ import annotations

import sys
import warnings

from mace import modules  # isort: skip  # before e3nn: 0.4, which MACE asks for, cannot be imported alone

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from e3nn import o3

warnings.filterwarnings("ignore", "The TorchScript type system doesn't support instance-level annotations")
ELEMENTS = (14, 32)  # silicon and germanium


def small_mace() -> torch.nn.Module:
    """Two layers of eight channels, in float64, always with the same weights."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return modules.ScaleShiftMACE(
        r_max=4.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=len(ELEMENTS),
        hidden_irreps=o3.Irreps("8x0e+8x1o"),
        MLP_irreps=o3.Irreps("8x0e"),
        atomic_energies=np.array([-1.0, -2.0]),
        avg_num_neighbors=16.0,
        atomic_numbers=list(ELEMENTS),
        correlation=2,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )


def crystal() -> Atoms:
    """Sixteen atoms of silicon and germanium, a little off their places."""
    atoms = bulk("SiGe", "zincblende", a=5.54, cubic=True) * (2, 1, 1)
    atoms.rattle(0.05, seed=0)
    return atoms


if __name__ == "__main__":
    torch.save(small_mace(), sys.argv[1])
