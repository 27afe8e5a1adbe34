"""Training on several devices, by torchrun and DistributedDataParallel: every package, two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from captured_cases import PACKAGES
from model_cases import needs

SCRIPT = Path(__file__).parent.parent / "support" / "distributed_training.py"
RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]


# A run takes half a minute of a processor: one package shows on a CPU what all show on GPUs.
WHERE = [("mace", "cpu"), *((one, "cuda") for one in PACKAGES)]


@pytest.mark.parametrize(
    ("package", "device"),
    [pytest.param(*one, marks=[needs(one[0]), *[pytest.mark.gpu] * (one[1] == "cuda")]) for one in WHERE],
)
@pytest.mark.slow
def test_gradients_are_one_processs_and_kernels_are_chosen_and_compiled_once(
    package: str, device: str, tmp_path: Path
) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    paths = os.pathsep.join([str(SCRIPT.parent), *sys.path])
    env = os.environ | {"PYTHONPATH": paths, "EQUITUNE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*RUN, package, device, str(tmp_path / "found.json")], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    one, other = json.loads((tmp_path / "found.json").read_text())
    assert max(one["error"], other["error"]) < 1e-10
    assert one["chosen"] == other["chosen"]
    assert len(set(one["compiled"] + other["compiled"])) == len(one["compiled"] + other["compiled"]) > 0
