"""Edge values that several paths share: what is stored, and the factors by which it gives each path's values."""

from __future__ import annotations

import pytest
import torch
from e3nn.o3 import _wigner
from torch import Tensor

from autotune.workload.config import load_problems
from kernelgen.arithmetic.couplings import couplings_digest, edge_slots, normalized_slots, path_terms

PROBLEMS = load_problems()


@pytest.mark.parametrize("name", ["mace-mp-medium", "mace-mp-large", "sevennet-l3i5", "nequip-lips"])
def test_a_factor_of_each_path_gives_its_values(name: str) -> None:
    terms = path_terms(PROBLEMS[name])
    stored, slots, factors = normalized_slots(terms)
    for of_path in terms:
        factor = factors[of_path.path.index]
        for k, value in enumerate(of_path.values):
            found = {component: factor * c for component, c in stored[slots[of_path.path.index, k]].terms}
            assert found == pytest.approx(dict(value.terms), rel=1e-8)
    # Fewer than without any sharing, more than if lanes scaled each value.
    assert len(edge_slots(terms, True)[0]) <= len(stored) < len(edge_slots(terms, False)[0])


def test_equal_paths_share_all_values() -> None:
    """Another coefficient of a path changes its factor alone."""
    (one, *_) = path_terms(PROBLEMS["mace-mp-medium"])
    stored, _, factors = normalized_slots([one])
    assert len(stored) == len(one.values) and factors[one.path.index] > 0


def test_couplings_first_seen_inside_of_a_transform_are_plain_tensors() -> None:
    """e3nn keeps them for the process, and a transform's tensors could not be used after it."""
    _wigner._so3_clebsch_gordan.cache_clear()

    def inside(x: Tensor) -> Tensor:
        assert couplings_digest.__wrapped__(PROBLEMS["mace-mp-medium"])
        return x.sum()

    torch.func.grad(inside)(torch.ones(2))
    kept = [_wigner._so3_clebsch_gordan(degree, degree, 0) for degree in (0, 1)]
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, kept))
