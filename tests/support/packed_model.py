"""Energies and forces of an accelerated model where there is no compiler and no cache.

    EQUITUNE_PACK=FILE python packed_model.py GIVEN RESULTS

GIVEN: a model and its batch, by torch.save. RESULTS gets the energies and the forces. Prints how many kernels were
asked for, and how many of them at nodes.
"""

import sys

import torch

from autotune.models.accelerate import accelerate
from kernelgen.compile.compiler import RECORDERS


def main(given: str, results: str) -> None:
    sys.modules["cuda.core"] = None  # type: ignore[assignment]  # NVRTC is found by it
    model, batch = torch.load(given, weights_only=False)
    entries: list[str] = []
    RECORDERS.append(lambda source, facts: entries.append(source.entry))
    accelerate(model)
    out = model(batch, training=False)
    torch.save([out["energy"].detach().cpu(), out["forces"].detach().cpu()], results)
    print(len(entries), entries.count("equitune_block_matrices") + entries.count("equitune_gate"))


if __name__ == "__main__":
    main(*sys.argv[1:])
