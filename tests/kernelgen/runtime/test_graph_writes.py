"""Index tensors written, freed, aliased and reused between calls: never a wrong number without an error.

The tests draw random sequences of operations. They compare every value and gradient with e3nn's for the indices at the
time of the call. A gradient may be refused, as torch does, if an index was written after its forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from module_cases import normal, small_conv
from reference import e3nn_module

from autotune.modules.convolution import TensorProductConv
from autotune.modules.rows import SphericalHarmonics, SphericalHarmonicsConv
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.runtime import graph as known_graphs
from kernelgen.runtime.graph import edge_order

NODES, EDGES, SEQUENCES = 5, 12, 150
# "counted": tensors of the CPU, recognised as those of a GPU are.
DEVICES = ["cpu", "counted", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS = ("default", "atomics", "unfused", "deterministic", "order", "vectors", "compiled")
COUNTED = ("copy_", "index", "add", "base", "resize")
# What torch does not count is seen on the CPU alone, but for memory that torch does not own.
UNCOUNTED = {"cpu": ("data", "numpy", "dlpack", "storage"), "counted": (), "cuda": ()}


@functools.cache
def convolution(form: str, device: str) -> Callable[..., torch.Tensor]:
    """Of node features, edge attributes or vectors, weights, sender and receiver."""
    schedule = HostSchedule if device == "cpu" else CudaSchedule
    given = {"atomics": schedule(accumulate="atomics"), "unfused": schedule(fuse=False)}.get(form)
    options = {"schedule": given, "deterministic": form == "deterministic", "device": device, "dtype": torch.float64}
    if form == "vectors":
        harmonics = SphericalHarmonics([0, 1], normalize=True, normalization="component")
        return SphericalHarmonicsConv("8x0e+8x1o", harmonics, filter_irreps_out="0e+1o", fuse=True, **options)
    conv = small_conv(**options)
    if form == "order":
        return lambda x, y, w, s, r: conv(x, y, w, s, r, order=edge_order(r, NODES, sender=s))
    if form == "compiled":
        torch._dynamo.reset()
        return torch.compile(conv, backend="aot_eager", dynamic=False)
    return conv


@functools.cache
def e3nn_product(device: str) -> torch.nn.Module:
    return e3nn_module(small_conv().problem).to(device)


def e3nn_value(vectors: bool, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *edges: torch.Tensor) -> torch.Tensor:
    from e3nn import o3

    sender, receiver = edges
    if vectors:
        y = o3.spherical_harmonics([0, 1], y, normalize=True, normalization="component")
    messages = e3nn_product(x.device.type)(x[sender], y, w)
    return messages.new_zeros(NODES, messages.shape[1]).index_add(0, receiver, messages)


class Trial:
    """The tensors and unfinished gradients of one sequence."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seed = 0
        conv: TensorProductConv = small_conv()
        self.inputs = [normal(NODES, conv.irreps_in1.dim), normal(EDGES, 4), normal(EDGES, conv.weight_numel)]
        self.indices = [self.fresh(), self.fresh()]
        self.forget()

    def forget(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.wanted = [torch.zeros_like(tensor) for tensor in self.inputs]
        self.leaves = [tensor.to(self.device).requires_grad_() for tensor in self.inputs]
        self.written = False

    def fresh(self) -> torch.Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, NODES, (EDGES,), generator=generator).to(self.device)

    def view(self, place: int, how: int) -> None:
        """Put a view of an index tensor in its place, as model packages do in each layer."""
        index = self.indices[place]
        self.indices[place] = (index[:], index.view(-1), index.detach(), index.view(2, -1).flatten())[how]

    def new_tensor(self, place: int, how: int) -> None:
        """Free one index tensor and put another in its place, most likely in the same memory."""
        if how < 5:
            self.indices[place] = torch.empty(0)
        else:
            self.backward()  # torch itself would not notice what comes between forward and backward
        fresh = self.fresh()
        if how == 1:  # rows of one tensor, as in most packages
            self.indices = list(torch.stack((fresh, self.fresh())))
        elif how == 2 and self.device == "cpu":
            self.indices[place] = torch.from_numpy(fresh.numpy().copy())
        elif how == 3:
            self.indices[place] = torch.from_dlpack(fresh)
        elif how == 4:
            self.indices[place] = torch.stack((fresh, self.fresh()), 1)[:, 0]
        elif how == 5:
            self.indices[place].set_(fresh)
        elif how == 6:
            self.indices[place].data = fresh
        else:
            self.indices[place] = fresh

    def write(self, place: int, how: str) -> None:
        index, new = self.indices[place], self.fresh()
        if how == "copy_":
            index.copy_(new)
        elif how == "index":
            index[place::2] = new[place::2]
        elif how == "add":
            index.add_(1).remainder_(NODES)
        elif how == "base":
            base = index if index._base is None else index._base
            base.copy_(torch.randint(0, NODES, base.shape, generator=torch.Generator().manual_seed(self.seed)))
        elif how == "resize":
            if index._base is None:
                index.resize_(0)
                index.resize_(EDGES)
            index.copy_(new)
        elif how == "data":
            index.data.copy_(new)
        elif how == "numpy":
            np.copyto(index.numpy(), new.numpy())
        elif how == "dlpack":
            torch.from_dlpack(index).copy_(new)
        elif index.untyped_storage().nbytes() == new.untyped_storage().nbytes():
            index.untyped_storage().copy_(new.untyped_storage())
        self.written = True

    def forward(self, form: str) -> None:
        self.seed += 1
        vectors = form == "vectors"
        x, y, w = self.leaves
        out = convolution(form, self.device)(x, y[:, 1:] if vectors else y, w, *self.indices)
        plain = [tensor.clone().requires_grad_() for tensor in self.inputs]
        on_device = [tensor.to(self.device) for tensor in plain]
        edges = [index.clone() for index in self.indices]
        of_edges = on_device[1][:, 1:] if vectors else on_device[1]
        wanted = e3nn_value(vectors, on_device[0], of_edges, on_device[2], *edges)
        cotangent = normal(*out.shape, seed=self.seed).to(self.device)
        assert_close(out, wanted)
        self.losses.append((out * cotangent).sum())
        grads = torch.autograd.grad((wanted * cotangent).sum(), plain)
        self.wanted = [total + grad for total, grad in zip(self.wanted, grads, strict=True)]

    def backward(self) -> None:
        if not self.losses:
            return
        try:
            grads = torch.autograd.grad(torch.stack(self.losses).sum(), self.leaves)
        except RuntimeError as error:
            assert self.written and "modified by an inplace operation" in str(error), error
        else:
            for found, wanted in zip(grads, self.wanted, strict=True):
                assert_close(found.cpu(), wanted)
        self.forget()


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    scale = max(1.0, float(wanted.detach().abs().max()))
    assert float((found - wanted).detach().abs().max()) <= 1e-10 * scale


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.sampled_from(FORMS)),
        st.tuples(st.just("write"), st.integers(0, 1), st.sampled_from(COUNTED)),
        st.tuples(st.just("uncounted"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("new"), st.integers(0, 1), st.integers(0, 6)),
        st.tuples(st.just("view"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("backward")),
    ),
    min_size=2,
    max_size=8,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=SEQUENCES, deadline=None, suppress_health_check=list(HealthCheck))
@example(steps=[("forward", "default"), ("write", 0, "copy_"), ("backward",)])
@example(steps=[("forward", "atomics"), ("write", 1, "copy_"), ("backward",)])
@example(steps=[("forward", "unfused"), ("write", 1, "index"), ("backward",)])
@example(steps=[("forward", "vectors"), ("write", 0, "copy_"), ("backward",)])
@example(steps=[("forward", "default"), ("write", 0, "add"), ("forward", "default"), ("backward",)])
@example(steps=[("new", 1, 2), ("forward", "default"), ("uncounted", 1, 1), ("forward", "default")])
@example(steps=[("forward", "default"), ("backward",), ("uncounted", 1, 2), ("forward", "default")])
@example(steps=[("forward", "default"), ("backward",), ("uncounted", 1, 3), ("forward", "default")])
@given(steps=STEPS)
def test_no_sequence_gives_a_wrong_number_without_an_error(device: str, steps: list[tuple]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if device == "counted":
            patch.setattr(known_graphs, "_is_on_host", lambda index: False)
        follow(device, steps)


def follow(device: str, steps: list[tuple]) -> None:
    trial = Trial(device.replace("counted", "cpu"))
    for step, *how in steps:
        if step == "uncounted":
            trial.backward()  # what comes between forward and backward torch itself would not notice
            ways = UNCOUNTED[device]
            if ways:
                trial.write(how[0], ways[how[1]])
        else:
            getattr(trial, {"new": "new_tensor"}.get(step, step))(*how)
    trial.backward()


@pytest.mark.parametrize("form", FORMS)
def test_an_index_far_out_of_range_after_forward_is_refused(form: str) -> None:
    trial = Trial("cpu")
    trial.forward(form)
    trial.indices[0].fill_(2**40)
    trial.written = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(torch.stack(trial.losses).sum(), trial.leaves)


def test_the_graph_of_a_double_backward_is_saved_too() -> None:
    trial, conv = Trial("cpu"), convolution("default", "cpu")
    x, y, w = trial.leaves
    (of_y,) = torch.autograd.grad(conv(x, y, w, *trial.indices).square().sum(), y, create_graph=True)
    trial.indices[1].copy_(trial.fresh())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(of_y.square().sum(), w)


def test_indices_that_hooks_copied_are_those_of_the_forward_pass() -> None:
    """Saved-tensor hooks keep copies that torch does not compare with anything: the gradient takes the copies."""
    trial = Trial("cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy):
        trial.forward("default")
    trial.indices[0].copy_(trial.fresh())
    trial.backward()
