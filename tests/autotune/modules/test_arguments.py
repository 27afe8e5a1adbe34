"""Arguments of the wrong kind are refused where they are given, with what to give instead."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from module_cases import conv_inputs, e3nn_conv, normal, random_graph, small_conv

from autotune.modules.product import FullyConnectedTensorProduct, TensorProduct
from autotune.modules.rows import SphericalHarmonics, SphericalHarmonicsConv
from kernelgen.errors import InputError, ProblemError, ToolMissingError, UnsupportedError
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.ops.product import build


def small_product(**options: object) -> TensorProduct:
    return FullyConnectedTensorProduct("2x0e+1o", "0e+1o", "2x0e", **options)


@pytest.mark.parametrize("given", [20.0, "7", [7], torch.tensor(7.0)], ids=repr)
def test_a_number_of_nodes_that_is_no_integer_is_refused(given: object) -> None:
    conv = small_conv()
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    conv(*inputs, sender, receiver, num_nodes=20)
    told = re.escape(f"num_nodes is {given!r}; expected an integer")
    with pytest.raises(InputError, match=told):
        conv(*inputs, sender, receiver, num_nodes=given)
    operator = build(conv.problem, dtype=torch.float64)
    with pytest.raises(InputError, match=told.replace("num_nodes", "num_out")):
        operator(*inputs, sender, receiver, num_out=given)


@pytest.mark.parametrize("seven", [np.int64(7), np.array(7), torch.tensor(7)], ids=["int64", "array", "tensor"])
def test_whatever_is_an_integer_may_be_the_number_of_nodes(seven: object) -> None:
    conv = small_conv()
    sender, receiver = random_graph(39, 7, 7)
    inputs = conv_inputs(conv, 39, 7)
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(conv(*inputs, sender, receiver, num_nodes=seven), wanted)
    torch.testing.assert_close(
        build(conv.problem, dtype=torch.float64)(*inputs, sender, receiver, num_out=seven), wanted
    )


@pytest.mark.parametrize("options", [{}, {"check_indices": True}, {"schedule": HostSchedule(fuse=False)}], ids=repr)
@pytest.mark.parametrize("kind", ["list", "ndarray"])
@pytest.mark.parametrize("name", ["sender", "receiver"])
def test_indices_that_are_no_tensors_are_refused(name: str, kind: str, options: dict) -> None:
    conv = small_conv(**options)
    edges = dict(zip(("sender", "receiver"), random_graph(38, 7, 7), strict=True))
    edges[name] = edges[name].tolist() if kind == "list" else edges[name].numpy()
    with pytest.raises(InputError, match=rf"{name} is of type {kind}; expected a tensor .* torch\.as_tensor\({name}"):
        conv(*conv_inputs(conv, 38, 7), **edges)


@pytest.mark.parametrize("make", [small_product, small_conv])
def test_an_unknown_layout_is_refused_at_construction(make: Callable) -> None:
    with pytest.raises(ProblemError, match=r"layout is 'channel_last'; expected one of \('mul_ir', 'ir_mul'\)"):
        make(layout="channel_last")


@pytest.mark.parametrize("make", [small_product, small_conv])
def test_a_gpu_that_torch_does_not_have_is_refused(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built, told in ((False, r"torch \S+ is built without CUDA, install one"), (True, "install an NVIDIA driver")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=built: built)
        for device in ("cuda", torch.device("cuda", 1)):
            with pytest.raises(ToolMissingError, match=told):
                make(device=device)


@pytest.mark.parametrize("options", [{"device": "gpu"}, {"device": 3.5}, {"dtype": "float32"}], ids=repr)
def test_what_is_no_device_or_dtype_is_refused(options: dict) -> None:
    ((name, value),) = options.items()
    with pytest.raises(InputError, match=re.escape(f"{name} is {value!r}") + "; expected .*torch"):
        small_product(**options)


class Called(torch.nn.Module):
    """A model that calls a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)


def test_tracing_by_torchscript_is_told_what_to_do() -> None:
    conv, harmonics = small_conv(), SphericalHarmonics([0, 1], True)
    fused = SphericalHarmonicsConv("2x0e", harmonics, filter_irreps_out="0e")
    edges, vectors = random_graph(12, 5, 5), normal(12, 3)
    given = {
        small_product(): (normal(4, 5), normal(4, 4)),
        conv: (*conv_inputs(conv, 12, 5), *edges),
        harmonics: (vectors,),
        fused: (normal(5, 2), vectors, normal(12, fused.weight_numel), *edges),
    }
    for module, inputs in given.items():
        for model in (module, Called(module)):
            with pytest.raises(UnsupportedError, match=r"take torch\.compile or torch\.export"):
                torch.jit.trace(model, inputs)
        assert module.double()(*inputs).shape[0] in (4, 5, 12)
