"""Checks edge indices on a GPU with a small kernel, without synchronisation."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernelgen.emit.source import Source, included
from kernelgen.runtime.kernel import FixedKernel

ENTRY = "equitune_index_check"
_THREADS, _MOST_BLOCKS = 256, 1024
_TYPES = {torch.int32: "int", torch.int64: "long long"}


@functools.cache
def source(index: torch.dtype) -> Source:
    """The source of the kernel for indices of a dtype."""
    return Source(f"#define INDEX {_TYPES[index]}\n" + included("index_check.cuh"), "cuda", ENTRY)


def source_of(index: str) -> Source:
    """The same, by the name of a dtype."""
    return source(getattr(torch, index))


@functools.cache
def _kernel(index: torch.dtype) -> FixedKernel:
    return FixedKernel(source(index), 5, _THREADS)


def check_on_device(name: str, index: Tensor, count: int) -> None:
    """Stop the program with a device-side assertion if ``name`` (sender or receiver) is not in 0..count-1."""
    _launch(index, count, name == "receiver", False)


def check_ascending_on_device(receiver: Tensor) -> None:
    """Stop the program with a device-side assertion if ``receiver`` decreases anywhere."""
    _launch(receiver, 0, True, True)


def _launch(index: Tensor, count: int, is_receiver: bool, ascending: bool) -> None:
    index = index.contiguous()
    edges = index.shape[0]
    if edges:
        blocks = min(_MOST_BLOCKS, -(-edges // _THREADS))
        values = (index.data_ptr(), edges, count, int(is_receiver), int(ascending))
        _kernel(index.dtype).launch(index.get_device(), blocks, *values)
