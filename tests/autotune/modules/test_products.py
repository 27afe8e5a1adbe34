"""e3nn's ready-made products from generated kernels: same irreps, paths, weights, values and gradients."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing
from e3nn import o3
from reference import copied, float64

import autotune
from kernelgen.errors import InputError, ProblemError

SAME: list[tuple[str, tuple, dict]] = [
    ("FullyConnectedTensorProduct", ("4x0e+3x1o", "2x0e+1o", "5x0e+3x1o+2x1e"), {}),
    ("FullyConnectedTensorProduct", ("4x0e+3x1o", "0e+1o", "5x0e+3x1o", "norm", "path"), {"shared_weights": False}),
    ("FullyConnectedTensorProduct", ("2x0e", "1x0e", "3x1o"), {}),
    ("ElementwiseTensorProduct", ("5x1o+5x1e", "10x1e"), {}),
    ("ElementwiseTensorProduct", ("5x1o+3x0e", "8x1e", ["0e", "0o", "1e"]), {"irrep_normalization": "norm"}),
    ("FullTensorProduct", ("3x0e+2x1o", "2x1o+1x2e"), {}),
    ("FullTensorProduct", ("3x0e+2x1o", "2x1o", ["0e", "1e"], "norm"), {}),
]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


def inputs(module: torch.nn.Module, batch: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(*batch, module.irreps_in1.dim), (*batch, module.irreps_in2.dim)]
    if not module.internal_weights and module.weight_numel:
        sizes.append((module.weight_numel,) if module.shared_weights else (*batch, module.weight_numel))
    return [torch.randn(*size, generator=generator).requires_grad_() for size in sizes]


@pytest.mark.parametrize(("name", "arguments", "options"), SAME)
def test_is_e3nns(name: str, arguments: tuple, options: dict) -> None:
    theirs, ours = (getattr(home, name)(*arguments, **options) for home in (o3, autotune))
    for attribute in ("irreps_in1", "irreps_in2", "irreps_out", "instructions", "weight_numel", "shared_weights"):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert ours.internal_weights == theirs.internal_weights and repr(ours) == repr(theirs)
    assert {k: v.shape for k, v in ours.named_parameters()} == {k: v.shape for k, v in theirs.named_parameters()}
    ours.load_state_dict(theirs.state_dict())
    assert set(ours.state_dict()) == set(theirs.state_dict()) and torch.equal(ours.output_mask, theirs.output_mask)
    getattr(o3, name)(*arguments, **options).load_state_dict(ours.state_dict())
    given = inputs(theirs, (3, 2))
    found, wanted = ours(*given), theirs(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    if wanted.requires_grad:
        asked = [*given, *([theirs.weight] if theirs.internal_weights else [])]
        of_ours = [*given, *([ours.weight] if theirs.internal_weights else [])]
        g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
        for a, b in zip(torch.autograd.grad(found, of_ours, g), torch.autograd.grad(wanted, asked, g), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    views = [view.shape for view in ours.weight_views()] if theirs.internal_weights else []
    assert views == ([view.shape for view in theirs.weight_views()] if theirs.internal_weights else [])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how: str) -> None:
    module = autotune.FullyConnectedTensorProduct("4x0e+3x1o", "2x0e+1o", "5x0e+3x1o")
    given = inputs(module, (4,))
    twin = copied(module, how)
    torch.testing.assert_close(twin(*given), module(*given), rtol=0, atol=0)
    assert twin.weight is not module.weight


def test_no_rows() -> None:
    module = autotune.FullyConnectedTensorProduct("4x0e+3x1o", "2x0e+1o", "5x0e+3x1o")
    x, y = inputs(module, (0,))
    out = module(x, y)
    assert out.shape == (0, module.irreps_out.dim)
    assert torch.autograd.grad(out.sum(), module.weight)[0].abs().sum() == 0


def test_a_product_without_weights_has_none_to_show() -> None:
    module = autotune.FullTensorProduct("2x0e", "3x1o")
    assert module.weight_numel == 0 and not list(module.parameters()) and not list(module.weight_views())
    with pytest.raises(ValueError, match="instruction 0 has no weights"):
        module.weight_view_for_instruction(0)


def test_compiles_before_its_first_call_without_graph_breaks_and_not_once_a_size() -> None:
    module = autotune.FullyConnectedTensorProduct("4x0e+3x1o", "2x0e+1o", "5x0e+3x1o")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for rows in (5, 9, 31, 12, 77):
        x, y = inputs(module, (rows,))
        torch.testing.assert_close(compiled(x, y), module(x, y), rtol=0, atol=0)
        frames.append(counter.frame_count)
    # torch takes the sizes of the first call for fixed where code compares them, and leaves them open from the second.
    assert frames[1:] == [frames[1]] * 4 and frames[1] <= 2


@pytest.mark.parametrize("shared", [True, False])
def test_exports_saves_and_loads_with_the_number_of_rows_left_open(shared: bool) -> None:
    module = autotune.FullyConnectedTensorProduct("4x0e+3x1o", "2x0e+1o", "5x0e+3x1o", shared_weights=shared)
    dynamic = tuple({0: torch.export.Dim("rows", min=2)} for _ in inputs(module, (6,)))
    exported = torch.export.export(module, tuple(inputs(module, (6,))), dynamic_shapes=dynamic)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (6, 2, 31):
        given = inputs(module, (rows,))
        found, wanted = loaded(*given), module(*given)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        for a, b in zip(torch.autograd.grad(found.sum(), given), torch.autograd.grad(wanted.sum(), given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("option", ["irrep_normalization", "layout"])
def test_compiled_modules_are_not_taken_for_each_other(option: str) -> None:
    paths = [(0, 1, 1, "uvu", True), (1, 1, 0, "uvu", True)]
    values = {"irrep_normalization": ("component", "norm"), "layout": ("mul_ir", "ir_mul")}[option]
    modules = [autotune.TensorProduct("2x0e+2x1o", "0e+1o", "2x0e+2x1o", paths, **{option: v}) for v in values]
    torch._dynamo.reset()
    x, y = inputs(modules[0], (4,))
    for module in modules:
        found = torch.compile(module, fullgraph=True, backend="eager")(x, y)
        torch.testing.assert_close(found, module(x, y), rtol=0, atol=0)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ProblemError, match="irreps_in2"):
        autotune.FullyConnectedTensorProduct("4x0e", "3xq", "4x0e")
    with pytest.raises(ProblemError, match="ElementwiseTensorProduct"):
        autotune.ElementwiseTensorProduct("4x0e", "3x0e")
    with pytest.raises(ProblemError, match="filter_ir_out"):
        autotune.FullTensorProduct("4x0e", "3x0e", ["what"])
    module = autotune.FullyConnectedTensorProduct("4x0e", "2x0e", "5x0e")
    with pytest.raises(InputError, match="expected a last dimension of 2"):
        module(torch.ones(3, 4), torch.ones(3, 3))
