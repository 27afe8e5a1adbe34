"""The convolution on edge vectors: what a force field calls, against harmonics and convolution one after the other."""

from __future__ import annotations

import pytest
import torch
from reference import copied, relative_error

from autotune.modules.convolution import TensorProductConv
from autotune.modules.rows import SphericalHarmonics, SphericalHarmonicsConv
from kernelgen.ops.harmonics import HarmonicProduct

HARMONICS = SphericalHarmonics([0, 1, 2], True, "component")


def conv(**options: object) -> SphericalHarmonicsConv:
    return SphericalHarmonicsConv("4x0e+4x1o", HARMONICS, filter_irreps_out="0e+1o", **options)  # type: ignore[arg-type]


def graph(edges: int = 30, nodes: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(edges)
    width = conv().weight_numel
    shapes = ((nodes, 16), (edges, 3), (edges, width))
    rows = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return *rows, *torch.randint(0, nodes, (2, edges), generator=generator)


def energy_forces_and_loss(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    x, v, w, *edges = given
    leaves = [tensor.clone().requires_grad_() for tensor in (x, v, w)]
    energy = module(*leaves, *edges).square().sum()
    (forces,) = torch.autograd.grad(energy, leaves[1], create_graph=True)
    return [energy, forces, *torch.autograd.grad(energy + forces.square().sum(), leaves)]


@pytest.mark.parametrize("fuse", [True, False])
def test_energy_forces_and_training_on_both(fuse: bool) -> None:
    module = conv(fuse=fuse)
    apart = TensorProductConv("4x0e+4x1o", HARMONICS.irreps_out, filter_irreps_out="0e+1o")
    wanted = energy_forces_and_loss(lambda x, v, *rest: apart(x, HARMONICS(v), *rest), graph())  # type: ignore[arg-type]
    for made in (module, copied(module, "deepcopy"), copied(module, "pickle")):
        for one, other in zip(energy_forces_and_loss(made, graph()), wanted, strict=True):
            assert relative_error(one, other) < 1e-12
    assert module.state_dict() == {}
    assert [bool(built.run.inside) for by in module._operators.values() for built in by.values()] == [fuse]


def test_harmonics_are_not_written_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("harmonics by a kernel of their own")

    module, (x, v, w, *edges) = conv(), graph()
    monkeypatch.setattr("kernelgen.ops.harmonics.HarmonicsOperator.run", never)
    with torch.no_grad():
        module(x, v, w, *edges)
    v.requires_grad_()
    torch.autograd.grad(module(x, v, w, *edges).sum(), v)


def test_compiled_without_a_break_for_any_number_of_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    module = conv()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(HarmonicProduct, "run_on", None)
    for edges in (30, 41):
        x, v, w, *ends = graph(edges)
        wanted = TensorProductConv("4x0e+4x1o", HARMONICS.irreps_out, filter_irreps_out="0e+1o")(
            x, HARMONICS(v), w, *ends
        )
        assert relative_error(compiled(x, v, w, *ends), wanted) < 1e-12
