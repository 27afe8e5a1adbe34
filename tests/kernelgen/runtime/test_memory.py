"""Allocated tensors equal those of torch's public functions, whichever functions allocate."""

from __future__ import annotations

import pytest
import torch

from kernelgen.runtime import call as memory

SHAPES = [(0,), (7,), (3, 5), (0, 5), (3, 0), (4, 3, 2), (1025, 1024)]


@pytest.fixture(params=["quick", "public"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the functions of torch's compiled graphs, and as in a torch without them."""
    for name in ("_empty_cpu", "_empty_cuda", "_reinterpret"):
        if request.param == "public":
            monkeypatch.setattr(memory, name, None)
        else:
            assert getattr(memory, name) is not None, "this torch has them: look where they went"


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_torch_allocates(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.ones(2, dtype=dtype)
    for made, expected in (
        (memory.empty(shape, like), like.new_empty(shape)),
        (memory.zeros(shape, like), like.new_zeros(shape)),
    ):
        assert (made.dtype, made.device, made.shape) == (expected.dtype, expected.device, expected.shape)
        assert made.stride() == expected.stride()
        assert made.is_contiguous()
        assert not made.requires_grad
    assert torch.equal(memory.zeros(shape, like), torch.zeros(shape, dtype=dtype))


@pytest.mark.usefixtures("functions")
def test_parts_lie_side_by_side_and_change_apart() -> None:
    flat = memory.zeros((30,), torch.ones(1))
    first, second = memory.part(flat, (4, 5), 0), memory.part(flat, (5, 2), 20)
    first.fill_(1)
    second.fill_(2)
    assert torch.equal(flat, torch.tensor([1.0] * 20 + [2.0] * 10))
    versions = first._version, second._version
    first.add_(1)
    assert first._version == versions[0] + 1
    assert second._version == versions[1], "else autograd would take a change of one for a change of the other"
    assert not first._is_view()


@pytest.mark.gpu
@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_gpu(shape: tuple[int, ...]) -> None:
    like = torch.ones(2, dtype=torch.float64, device=f"cuda:{torch.cuda.device_count() - 1}")
    for made in (memory.empty(shape, like), memory.zeros(shape, like)):
        assert (made.dtype, made.device, made.shape) == (like.dtype, like.device, torch.Size(shape))
        assert made.stride() == like.new_empty(shape).stride()
    assert not memory.zeros(shape, like).any()
