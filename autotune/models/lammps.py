"""Compiles energies of the atoms of one rank, and their gradient by the edges, for LAMMPS."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.models.package import require_device
from kernelgen.ops.library import exported_for
from kernelgen.packs.library import Exchange

# Edges and atoms of the graphs for which schedules are chosen, unless a caller says more: a rank with a full GPU.
TYPICAL_SIZE = (1 << 19, 1 << 13)


@dataclass(frozen=True)
class RankGraph:
    """The atoms of a rank, rows of other ranks' atoms after them, and the edges to its own atoms.

    vectors: [edges, 3], from receivers to senders, in Angstrom. elements: [rows], index in the model's list of
    elements. sender, receiver: [edges]; senders are any rows, receivers are own atoms and do not decrease. zeros:
    [own atoms], the only structure's number.
    """

    vectors: Tensor
    elements: Tensor
    sender: Tensor
    receiver: Tensor
    zeros: Tensor

    @property
    def atoms(self) -> int:
        return self.zeros.shape[0]

    @property
    def ghosts(self) -> int:
        return self.elements.shape[0] - self.atoms

    def exchange(self) -> Exchange:
        return Exchange(self.atoms, self.ghosts)


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

# Energies [atoms] or [atoms, 1] in eV.
Energies = Callable[[RankGraph], Tensor]


def ready_copy(model: torch.nn.Module, device: torch.device | str) -> Any:
    """A copy on a device for inference, without gradients of parameters."""
    require_device(device)
    return copy.deepcopy(model).to(device).eval().requires_grad_(False)


def compile_energies(
    energies: Energies,
    cutoff: float,
    elements: Sequence[str],
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    size: tuple[int, int] = TYPICAL_SIZE,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Trace energies with their gradient, and compile them by AOTInductor; on a CPU for one thread a rank.

    cutoff: in Angstrom. elements: their symbols, in the model's order. path: of the ``.pt2`` file. size: edges and
    atoms of a rank, for which a GPU's schedules are chosen. options: of torch's compiler.
    """
    device = torch.device(device)
    # Any graph will do: 4 atoms and 3 rows of other ranks, of which the last sends no edge.
    edges = torch.tensor([[1, 4, 0, 5, 3, 1, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3]], device=device)
    inputs = (
        torch.rand(8, 3, dtype=torch.float64, device=device),
        torch.zeros_like(edges[0, :7]),
        edges,
        torch.zeros_like(edges[0, :4]),
    )

    def step(vectors: Tensor, kinds: Tensor, edge_index: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        vectors = vectors.detach().requires_grad_()
        found = energies(RankGraph(vectors, kinds, edge_index[0], edge_index[1], zeros)).to(torch.float64).view(-1)
        (gradient,) = torch.autograd.grad(found.sum(), vectors)
        return found.detach(), gradient

    with exported_for(*size):
        traced = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    rows, count, atoms = (torch.export.Dim(name, min=2) for name in ("rows", "edges", "atoms"))
    program = torch.export.export(traced, inputs, dynamic_shapes=({0: count}, {0: rows}, {1: count}, {0: atoms}))
    products = [node.meta["val"] for node in program.graph.nodes if node.target in _PRODUCTS]
    wide = any(product.dtype == torch.float64 for product in products)
    facts = {"cutoff": repr(cutoff), "elements": " ".join(elements), "device": device.type}
    facts["products"] = "float64" if wide else "float32"
    chosen = {"cpp.threads": 1, "aot_inductor.metadata": facts} | dict(options or {})
    return write_package(program, Path(path), device, chosen)


def write_package(
    program: torch.export.ExportedProgram, path: Path, device: torch.device, options: Mapping[str, Any]
) -> Path:
    """Compile an exported program by AOTInductor. options: of torch's compiler."""
    if device.type != "cuda":
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(options))
        return path
    # Little runs on the host: no trials of its vector instructions, no optimisation of what launches kernels.
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp.vec_isa_ok": True} | dict(options)
    with driver_linked(path.parent):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=quick)
    return path


@contextlib.contextmanager
def driver_linked(folder: Path) -> Iterator[None]:
    """Have linkers find the CUDA driver: torch links what it compiles with ``-lcuda``, where it seldom is."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    driver = next((Path(words[-1]) for line in maps if "/libcuda.so" in (words := line.split())[-1]), None)
    known, link = os.environ.get("LIBRARY_PATH"), folder.absolute() / "libcuda.so"
    if driver is None or link.exists():
        yield
        return
    link.symlink_to(driver)
    os.environ["LIBRARY_PATH"] = os.pathsep.join([str(link.parent), *([known] if known else [])])
    try:
        yield
    finally:
        link.unlink()
        os.environ.pop("LIBRARY_PATH")
        if known is not None:
            os.environ["LIBRARY_PATH"] = known
