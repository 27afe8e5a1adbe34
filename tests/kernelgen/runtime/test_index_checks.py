"""Indices out of range, and receivers in no order, are told: by modules, in compiled code, by a GPU's own check."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from module_cases import conv_inputs, random_graph, small_conv
from places import SUPPORT

from kernelgen import InputError
from kernelgen.compile.compiler import compile_source
from kernelgen.device import cuda_facts
from kernelgen.ops.product import build
from kernelgen.runtime.graph import CHECK, assert_indices, check_indices


@pytest.mark.parametrize("form", ["eager", "order", "compiled", "vmap"])
def test_indices_out_of_range_are_told_by_default_on_the_cpu(form: str) -> None:
    conv = small_conv(dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    call = torch.compile(conv, backend="eager") if form == "compiled" else conv
    order = build(conv.problem).order(sender, receiver, 7, 7) if form == "order" else None
    call(*inputs, sender, receiver, order=order)
    sender[3] = 7
    with pytest.raises(InputError, match=r"sender\[3\] is 7, outside 0..6"):
        if form == "vmap":
            torch.vmap(lambda x: conv(x, *inputs[1:], sender, receiver))(inputs[0][None])
        else:
            call(*inputs, sender, receiver, order=order)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_are_told_exactly(dtype: torch.dtype) -> None:
    """A lone index below 0 or at the count is told, with its edge; the first and the last node are not."""
    least, most = torch.tensor([[0, 1, 2], [6, 3, 0]], dtype=dtype)
    check_indices(least, most, 3, 7)
    check_indices(least[:0], most[:0], 0, 0)
    for sender, receiver, told in (
        ([0, -1, 2], [6, 3, 0], r"sender\[1\] is -1, outside 0..2 \(1 of 3 edges are\)"),
        ([0, 1, 2], [6, 3, -1], r"receiver\[2\] is -1, outside 0..6 \(1 of 3 edges are\)"),
        ([3, 1, 3], [6, 3, 0], r"sender\[0\] is 3, outside 0..2 \(2 of 3 edges are\)"),
        ([0, 1, 2], [6, 7, 0], r"receiver\[1\] is 7, outside 0..6 \(1 of 3 edges are\)"),
    ):
        with pytest.raises(InputError, match=told):
            check_indices(torch.tensor(sender, dtype=dtype), torch.tensor(receiver, dtype=dtype), 3, 7)


def test_a_list_is_no_index() -> None:
    with pytest.raises(InputError, match=r"receiver is of type list; expected a tensor"):
        check_indices(torch.tensor([0]), [0], 3, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [-1, 7])
def test_a_lone_index_out_of_range_is_told_by_a_call(index: int) -> None:
    conv = small_conv(dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    receiver[39] = index
    with pytest.raises(InputError, match=rf"receiver\[39\] is {index}, outside 0..6"):
        conv(*conv_inputs(conv, 40, 7), sender, receiver)


def test_every_neighbour_is_compared_in_a_traced_check() -> None:
    in_range = torch.tensor([0, 0, 0, 0])
    assert_indices(in_range, torch.tensor([0, 1, 1, 3]), 1, 4, True)
    for receiver in ([0, 2, 1, 3], [1, 0, 2, 3], [0, 1, 3, 2]):
        with pytest.raises(RuntimeError, match="receiver is not ascending"):
            assert_indices(in_range, torch.tensor(receiver), 1, 4, True)
        assert_indices(in_range, torch.tensor(receiver), 1, 4, False)
    for sender, receiver in (([0, -1], [0, 0]), ([0, 1], [0, 0]), ([0, 0], [4, 0]), ([0, 0], [0, -1])):
        with pytest.raises(RuntimeError, match="sender has" if any(sender) else "receiver has"):
            assert_indices(torch.tensor(sender), torch.tensor(receiver), 1, 4, False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checks_that_were_asked_for_stay_in_compiled_graphs(backend: str) -> None:
    conv = small_conv(check_indices=True, dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    compiled = torch.compile(conv, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*inputs, sender, receiver), conv(*inputs, sender, receiver))
    with pytest.raises(RuntimeError, match="receiver is not ascending"):
        compiled(*inputs, sender, receiver, edges_sorted=True)
    receiver[0] = 7
    with pytest.raises(RuntimeError, match="receiver has an index"):
        compiled(*inputs, sender, receiver)


def test_checks_that_were_asked_for_stay_in_exported_programs() -> None:
    conv = small_conv(check_indices=True, dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    program = torch.export.export(conv, (*inputs, sender, receiver)).module()
    assert torch.equal(program(*inputs, sender, receiver), conv(*inputs, sender, receiver))
    sender[0] = -1
    with pytest.raises(RuntimeError, match="sender has an index"):
        program(*inputs, sender, receiver)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_check_of_a_gpu_compiles(index: torch.dtype) -> None:
    for arch in ("sm_80", "sm_90"):
        assert compile_source(CHECK.source(index), cuda_facts(arch)).resources["registers"] > 0


GPU_PROGRAM = """
import torch
from module_cases import conv_inputs, random_graph, small_conv
conv = small_conv(device="cuda", dtype=torch.float64)
sender, receiver = (index.cuda(){dtype} for index in random_graph(40, 7, 7))
inputs = [tensor.cuda() for tensor in conv_inputs(conv, 40, 7)]
conv(*inputs, sender, receiver)
torch.cuda.synchronize()
print("in range")
{change}
conv(*inputs, sender, receiver{options})
torch.cuda.synchronize()
print("not told")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "dtype", "options", "told"),
    [
        ("sender[3] = 7", "", "", "sender[edge] < num_in"),
        ("receiver[39] = -1", ".int()", "", "receiver[edge] < num_out"),
        ("receiver[0] = 6", "", ", edges_sorted=True", "receiver is ascending"),
    ],
)
def test_a_gpu_stops_at_what_the_cpu_tells(change: str, dtype: str, options: str, told: str) -> None:
    """In a separate process, because the assertion makes the GPU unusable in it."""
    program = GPU_PROGRAM.format(change=change, dtype=dtype, options=options)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=SUPPORT, check=False)
    assert ran.returncode != 0 and "in range" in ran.stdout and "not told" not in ran.stdout
    assert told in ran.stderr + ran.stdout and "device-side assert" in ran.stderr
