"""Modules in the workers of a data loader, which get a copy of them."""

from __future__ import annotations

import pytest
import torch
from loader_cases import Convolved
from module_cases import small_conv
from torch.utils.data import DataLoader


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_compute_what_this_process_does(start: str, users_flags: None) -> None:
    items = Convolved(small_conv(dtype=torch.float64))
    here = [items[n] for n in range(len(items))]
    there = list(DataLoader(items, batch_size=None, num_workers=1, multiprocessing_context=start))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
