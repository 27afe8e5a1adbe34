"""The share of a multiprocessor that a kernel's blocks can take, by hand, and for a kernel of each family."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.measure.kinds import space_of
from autotune.workload.config import load_config
from kernelgen.device import cuda_facts
from kernelgen.kernels.dispatch import launch_rule
from kernelgen.runtime.kernel import occupancy

H200 = cuda_facts("sm_90")


def plan_of(config: str, **knobs: Any) -> Any:
    workload = load_config(config, "cuda").workloads[0]
    space = space_of(workload, workload.directions[0], H200)
    return space.plan(dataclasses.replace(space.default, **knobs))


@pytest.mark.parametrize(
    ("resources", "share"),
    [
        ({"registers": 32}, 1.0),
        ({"registers": 33}, 12 / 16),  # 40 registers a thread: 12 blocks of 65,536
        ({"registers": 255}, 2 / 16),
        ({"registers": 32, "shared_bytes": 56 * 1024}, 4 / 16),  # 57 kB a block of 228
        ({}, None),
    ],
)
def test_the_scarcest_of_threads_registers_and_shared_memory_counts(
    resources: dict[str, int], share: float | None
) -> None:
    plan = plan_of("mace-mp-medium", block_size=128, edge_operand="inline", prefetch="none")
    assert launch_rule(plan).threads == 128 and launch_rule(plan).shared == 0
    assert occupancy(plan, resources) == ({} if share is None else {"occupancy": pytest.approx(share, abs=1e-3)})


@pytest.mark.parametrize("config", ["quick", "harmonics", "vectors", "contraction", "radial"])
def test_every_family_has_one(config: str) -> None:
    assert 0 < occupancy(plan_of(config), {"registers": 128, "shared_bytes": 0})["occupancy"] <= 1
