"""Shared weights as a matrix product: the same function, derivatives and module as edge by edge."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from e3nn import o3
from reference import float64, relative_error

from autotune.models.accelerate import accelerate
from autotune.modules.product import MATRIX_WEIGHTS, FullyConnectedTensorProduct, TensorProduct, by_matrix, pairs_of
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import cuda_facts
from kernelgen.errors import InputError, ProblemError
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem

# Blocks that several paths share, one that none reaches, and several copies on both sides.
IRREPS = ("3x0e+4x1o+2x2e", "2x0e+3x1o", "5x0e+3x1o+2x1e+2x3e+1x4e")
LARGE = ("64x0e+64x1o", "8x0e", "64x0e+64x1o")


def both(layout: str = "mul_ir", **options: Any) -> tuple[o3.TensorProduct, TensorProduct]:
    with float64():
        theirs = o3.FullyConnectedTensorProduct(*IRREPS, **options)
    ours = FullyConnectedTensorProduct(*IRREPS, **options, contraction="matrix", layout=layout, dtype=torch.float64)
    ours.weight.data.copy_(theirs.weight.data)
    return theirs, ours


def gradients(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """The value, first gradients, and gradients of a function of those."""
    out = module(x, y)
    inputs = [x, y, module.weight]
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)
    return [out, *first, *second]


@pytest.mark.parametrize("normalization", [{}, {"irrep_normalization": "norm", "path_normalization": "path"}])
def test_all_derivatives_are_e3nns(normalization: dict[str, str]) -> None:
    theirs, ours = both(**normalization)
    torch.manual_seed(0)
    x = torch.randn(7, theirs.irreps_in1.dim, dtype=torch.float64, requires_grad=True)
    y = torch.randn(7, theirs.irreps_in2.dim, dtype=torch.float64, requires_grad=True)
    for found, wanted in zip(gradients(ours, x, y), gradients(theirs, x, y), strict=True):
        assert relative_error(found, wanted) < 1e-10


def test_it_is_the_other_layout_too() -> None:
    from autotune.workload.workload import relayout

    theirs, ours = both("ir_mul")
    x, y = torch.randn(3, 5, theirs.irreps_in1.dim).double(), torch.randn(1, 5, theirs.irreps_in2.dim).double()
    found = ours(relayout(x, IRREPS[0], "mul_ir", "ir_mul"), y)
    assert relative_error(found, relayout(theirs(x, y), IRREPS[2], "mul_ir", "ir_mul")) < 1e-10


def test_it_is_a_module_like_any() -> None:
    theirs, ours = both(compile_right=True)
    x, y = torch.randn(4, theirs.irreps_in1.dim).double(), torch.randn(4, theirs.irreps_in2.dim).double()
    wanted = theirs(x, y)
    assert set(ours.state_dict()) == set(theirs.state_dict()) and [name for name, _ in ours.named_modules()] == [""]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert relative_error(other(x, y), wanted) < 1e-10
    assert relative_error(copy.deepcopy(ours).float()(x.float(), y.float()), wanted) < 1e-5
    assert ours(x[:0], y[:0]).shape == (0, theirs.irreps_out.dim)
    assert relative_error(ours.right(y), theirs.right(y)) < 1e-10
    assert ours.tuning["forward"].schedule.backend == "cpu"
    with pytest.raises(InputError, match="expected the same"):
        ours(x, y, ours.weight.float())


@pytest.mark.filterwarnings("ignore")
def test_compiled_without_a_break_or_one_for_each_size() -> None:
    theirs, ours = both()
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for rows in (5, 9, 31, 12):
        x, y = torch.randn(rows, theirs.irreps_in1.dim).double(), torch.randn(rows, theirs.irreps_in2.dim).double()
        assert relative_error(compiled(x, y), theirs(x, y)) < 1e-10
        frames.append(counter.frame_count)
    assert frames[1:] == [frames[1]] * 3 and frames[1] <= 2


def test_under_autocast_it_stays_in_float32() -> None:
    ours = both()[1].float()
    x, y = torch.randn(4, ours.irreps_in1.dim), torch.randn(4, ours.irreps_in2.dim)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(x, y)
        assert ours(x.bfloat16(), y.bfloat16()).dtype is torch.float32
    assert found.dtype is torch.float32 and relative_error(found.detach(), ours(x, y).detach().double()) < 1e-6


def test_auto_takes_it_for_many_weights() -> None:
    small = TensorProductProblem.fully_connected(*IRREPS, shared_weights=True)
    large = TensorProductProblem.fully_connected(*LARGE, shared_weights=True)
    assert small.weight_numel < MATRIX_WEIGHTS <= large.weight_numel
    assert not by_matrix(small, "auto") and by_matrix(small, "matrix")
    assert by_matrix(large, "auto") and not by_matrix(large, "edge")
    assert not by_matrix(TensorProductProblem.fully_connected(*LARGE), "auto"), "weights an edge are no matrix"
    assert len(pairs_of(large).paths) == len(large.paths)
    given = FullyConnectedTensorProduct(*LARGE, schedule=HostSchedule(accumulate="atomics"))
    assert given._matrix is None, "a schedule is one of the whole product"


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ProblemError, match="'auto', 'edge', 'matrix'"):
        FullyConnectedTensorProduct(*IRREPS, contraction="tensor")
    with pytest.raises(ProblemError, match="layout is 'ir'"):
        FullyConnectedTensorProduct(*IRREPS, contraction="matrix", layout="ir")
    with pytest.raises(ProblemError, match="needs shared weights"):
        FullyConnectedTensorProduct(*IRREPS, shared_weights=False, contraction="matrix")


def test_accelerate_takes_it_even_where_pairs_are_many() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([o3.FullyConnectedTensorProduct("64x0e+64x1o", "60x0e+10x1o", "8x0e+8x1o")])
    x, y = torch.randn(6, 256), torch.randn(6, 90)
    wanted = model[0](x, y)
    assert accelerate(model).replaced == 1
    assert model[0]._matrix is not None
    assert relative_error(model[0](x, y), wanted) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pairs_of_any_number_fit_a_gpu(direction: str, dtype: str) -> None:
    pairs = pairs_of(
        TensorProductProblem.fully_connected("128x0e+128x1o", "89x0e", "128x0e+128x1o", shared_weights=True)
    )
    fixed = (pairs, DIRECTIONS[direction])
    rest = ("plain", dtype, "ir_mul", "int64", cuda_facts("sm_90"))
    schedule = default_schedule(Spec(*fixed, CudaSchedule(), *rest))
    assert schedule.block_size == 128


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    theirs, ours = both()
    ours = copy.deepcopy(ours).to("cuda", dtype)
    torch.manual_seed(0)
    given = [torch.randn(50, dim, dtype=torch.float64) for dim in (theirs.irreps_in1.dim, theirs.irreps_in2.dim)]
    wanted = gradients(theirs, *(tensor.requires_grad_() for tensor in given))
    found = gradients(ours, *(tensor.detach().to("cuda", dtype).requires_grad_() for tensor in given))
    for ours_, theirs_ in zip(found, wanted, strict=True):
        assert relative_error(ours_.cpu(), theirs_) < (1e-10 if dtype == torch.float64 else 1e-5)
