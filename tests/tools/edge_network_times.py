"""Times the hidden layers of radial networks on a GPU: one kernel, and layer by layer by tensor cores and by torch.

    python tests/tools/edge_network_times.py --out times.json

Device time of a value and of the gradient of its input, cold L2, medians in microseconds, for the radial networks of
MACE (three layers), SevenNet (two) and NequIP (one) on diamond's and water's numbers of edges. Errors are the largest
against float64, relative to the largest element; a form that is wrong is not timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from autotune.measure.timing import time_callable
from kernelgen.device import device_facts
from kernelgen.ops.edge_networks import hidden_features, is_one_kernel, layer_by_layer

NETWORKS = {"mace": (10, 64, 3), "sevennet": (8, 64, 2), "nequip": (8, 128, 1)}
EDGES = {"diamond": 158_000, "water": 460_710}
MOST_WRONG = 1e-6
Features = Callable[[Tensor, list[Tensor], list[float]], Tensor]


def by_torch(x: Tensor, matrices: list[Tensor], factors: list[float]) -> Tensor:
    for matrix, factor in zip(matrices, factors, strict=True):
        x = silu(x @ (matrix * factor))
    return x


FORMS: dict[str, Features] = {"one kernel": hidden_features, "layer by layer": layer_by_layer, "torch": by_torch}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def row(features: Features, x: Tensor, matrices: list[Tensor], g: Tensor) -> dict[str, float]:
    """Times and errors of a form."""
    factors, x = [1.0] * len(matrices), x.clone().requires_grad_()
    wide = x.detach().double().requires_grad_()
    exact = by_torch(wide, [matrix.double() for matrix in matrices], factors)
    (exact_gradient,) = torch.autograd.grad(exact, wide, g.double())
    h = features(x, matrices, factors)
    (gradient,) = torch.autograd.grad(h, x, g, retain_graph=True)
    found = {"error": error(h.detach(), exact.detach()), "gradient error": error(gradient, exact_gradient)}
    if max(found.values()) > MOST_WRONG:
        return found
    device = str(x.device)
    value = time_callable(lambda: features(x, matrices, factors), device)
    backward = time_callable(lambda: torch.autograd.grad(h, x, g, retain_graph=True), device)
    return found | {"value us": value.time_us, "gradient us": backward.time_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows, draw = [], torch.Generator("cuda").manual_seed(0)
    for network, (inputs, hidden, layers) in NETWORKS.items():
        widths = (inputs, *[hidden] * layers)
        sizes = list(zip(widths, widths[1:], strict=False))
        matrices = [1.7 * torch.randn(a, b, device="cuda", generator=draw) / a**0.5 for a, b in sizes]
        for graph, edges in EDGES.items():
            x = torch.randn(edges, inputs, device="cuda", generator=draw)
            g = torch.randn(edges, hidden, device="cuda", generator=draw)
            assert is_one_kernel(x, matrices)
            for name, features in FORMS.items():
                rows.append({"network": network, "graph": graph, "form": name} | row(features, x, matrices, g))
                print(rows[-1], flush=True)
                out.write_text(json.dumps({"device": device_facts("cuda").name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
