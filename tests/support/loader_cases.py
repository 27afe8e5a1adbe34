"""A dataset whose items a module computes, for the workers of a data loader."""

from __future__ import annotations

import torch
from module_cases import conv_inputs, random_graph
from torch.utils.data import Dataset

from autotune.modules.convolution import TensorProductConv


class Convolved(Dataset):
    """Item n is the convolution of a graph of 10 + n edges."""

    def __init__(self, conv: TensorProductConv) -> None:
        self.conv = conv

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> torch.Tensor:
        inputs = conv_inputs(self.conv, 10 + n, 7)
        return self.conv(*inputs, *random_graph(10 + n, 7, 7))
