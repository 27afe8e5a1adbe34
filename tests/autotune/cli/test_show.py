"""What ``equitune show`` says of a lookup: schedules, origins and figures, for people."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from database_samples import GPU, PROBLEM, entry, store

from autotune.cli import show
from autotune.database.store import DatabaseWarning, database_path
from autotune.errors import ConfigError
from autotune.workload.config import find_problem, load_graphs
from autotune.workload.workload import Workload
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import ProblemError
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.problem.product import TensorProductProblem
from kernelgen.version import GENERATOR_VERSION


def test_show_tells_schedule_origin_and_figures(shipped: Path) -> None:
    here = device_facts("cpu")
    schedule = HostSchedule(path_groups=2, channel_block=8)
    store(shipped, here, entry(schedule), entry(direction="backward", graph_class="conv-e17-d6"))
    text = show.show(PROBLEM.key, graph_class="conv-e14-d5")
    blocks = text.split("\n\n")
    origins = {"forward": "exact", "backward": "nearest"}
    assert [block.splitlines()[0] for block in blocks[1:-1]] == [
        f"{name.replace('_', ' ')}: {origins.get(name, 'default')}" for name in DIRECTIONS
    ]
    forward, default_block = blocks[1], blocks[3]
    for told in (
        "channel_block=8",
        "mof, 11,872 edges, 424 nodes",
        "1.50 ms (quartiles 1.40 ms to 1.70 ms)",
        "3.00 ms, 2.00 times the tuned time; its knobs: path_groups=",
        "e3nn: 45.0 ms, 30.00 times",
        "OpenEquivariance: not installed",
        "g 3.0e-07",
        "0.1.0+0123456789",
    ):
        assert told in forward.replace("\N{NO-BREAK SPACE}", " "), told
    assert "not measured" in default_block
    assert here.name in blocks[0] and str(shipped) in blocks[0] and "2 entries" in blocks[0]


@pytest.mark.parametrize(("tuned", "command"), [(False, "tune"), (True, "bench")])
def test_show_ends_with_the_next_command(shipped: Path, tuned: bool, command: str) -> None:
    problem = find_problem("tiny")
    if tuned:
        store(shipped, device_facts("cpu"), entry(HostSchedule(path_groups=2), problem=problem.key))
    assert show.show("tiny").splitlines()[-1] == f"next: equitune {command} quick"
    assert show.show("sevennet-l3i5").splitlines()[-1] == "next: equitune tune suite"
    assert "[problems.NAME]" in show.show(PROBLEM).splitlines()[-1], "of a problem that no config has"


def test_three_irreps_are_a_problem() -> None:
    irreps = ["8x0e+8x1o", "0e+1o", "0e+1o"]
    assert show.problem_given(irreps) == PROBLEM
    connected = show.problem_given(irreps, fully_connected=True)
    assert isinstance(connected, TensorProductProblem) and connected.irreps_out == "1x0e+1x1o"
    for words, connected in ((irreps[:2], False), (["tiny"], True)):
        with pytest.raises(ConfigError, match=f"^{len(words)} texts name the problem; expected a name, a key"):
            show.problem_given(words, connected)


def test_the_command_that_shows_what_was_tuned(shipped: Path, tmp_path: Path) -> None:
    graph = load_graphs()["molecule"]
    named = Workload("tiny", find_problem("tiny"), "conv", graph)
    assert show.show_command(named, None, shipped) == "equitune show tiny"
    changed = dataclasses.replace(named, operation="plain", layout="ir_mul", dtype="float64")
    options = "--operation plain --dtype float64 --layout ir_mul --device cpu"
    assert show.show_command(changed, "cpu", shipped) == f"equitune show tiny {options}"
    own = Workload("tiny", PROBLEM, "conv", graph)
    assert show.show_command(own, None, tmp_path / "x y") == (
        f"EQUITUNE_DATABASE='{tmp_path}/x y' equitune show '{PROBLEM.key}'"
    ), "a name of its config alone means another problem elsewhere"


def test_show_names_a_damaged_database(shipped: Path) -> None:
    shipped.mkdir()
    database_path(shipped, device_facts("cpu").slug).write_text("{")
    with pytest.warns(DatabaseWarning):
        assert "not valid JSON" in show.show(PROBLEM.key)


def test_show_knows_problems_by_name_and_suggests_the_nearest(shipped: Path) -> None:
    assert "128x0e+128x1o" in show.show("mace-mp-medium")
    with pytest.raises(ConfigError, match="mace-mp-medium"):
        find_problem("mace-mp-mediun")
    with pytest.raises(ProblemError):
        find_problem("uvu|not a key")


def test_show_has_all_that_the_database_of_another_device_has(shipped: Path) -> None:
    store(
        shipped,
        GPU,
        entry(CudaSchedule(), peers={}, gain={"ratio": 2.0, "low": 1.9, "high": 2.1, "level": 0.95}),
        entry(
            CudaSchedule(),
            layout="ir_mul",
            graph_class="conv-e17-d7",
            conditions={"noise": "throttled"},
            peers={"e3nn": {"time_us": 4500.0, "q1_us": 4400.0, "q3_us": 4600.0, "low": 2.8, "high": 3.2}},
        ),
        entry(CudaSchedule(), dtype="float64"),
    )
    with pytest.raises(ConfigError, match=r"device 'h300' is not known; expected cpu, .* a database: nvidia-test$"):
        show.device_named("h300")
    facts = show.device_named("test")
    assert facts == show.device_named("nvidia-test") and isinstance(facts, DeviceFacts) and facts.name == GPU.name
    blocks = show.show(PROBLEM.key, device=facts).split("\n\n")
    assert blocks[0].splitlines()[-1] == "tuned for  ir_mul conv-e17-d7; mul_ir conv-e14-d5"
    assert [block.splitlines()[0] for block in blocks[1:3]] == [
        "forward: tuned, ir_mul, conv-e17-d7",
        "forward: tuned, mul_ir, conv-e14-d5",
    ]
    assert "3.00 times the tuned time (2.80 to 3.20)" in blocks[1]
    assert "2.00 times the tuned time (1.90 to 2.10)" in blocks[2]
    assert "throttled" in blocks[1] and "faster than the default by the medians; this older entry" in blocks[1]
    assert "2.00x (1.90 to 2.10)" in blocks[2] and "none were timed beside it" in blocks[2]
    assert "machine  not recorded" in blocks[2] and "the figures may not hold" in blocks[2]
    one = show.show(PROBLEM.key, device=facts, layout="mul_ir")
    assert "tuned, mul_ir" in one and "tuned, ir_mul" not in one
    with pytest.raises(
        ConfigError, match="radial-e17-d7 is of another kind; expected one of conv, such as conv-e17-d7"
    ):
        show.show(PROBLEM.key, device=facts, graph_class="radial-e17-d7")
    large = show.show(PROBLEM.key, device=facts, graph_class="conv-e17-d7").split("\n\n")
    assert "wanted     conv, float32, any layout, graph conv-e17-d7\n" in large[0]
    assert large[1].startswith("forward: tuned, ir_mul, conv-e17-d7") and large[2].startswith("backward: ")
    assert "mul_ir" in large[2].splitlines()[0], "a lookup's"


def test_show_says_whether_the_default_was_confirmed(shipped: Path) -> None:
    runner_up = {"ratio": 1.02, "low": 0.9, "high": 1.1, "level": 0.95}
    proof = {"bitwise": True, "equivariance": 2e-7, "edges": 100}
    rest = {"certificate": proof, "conditions": {"load": 0.1}, "generator": GENERATOR_VERSION}
    store(shipped, device_facts("cpu"), entry(HostSchedule(), runner_up=runner_up, **rest))
    forward = show.show(PROBLEM.key, graph_class="conv-e14-d5").split("\n\n")[1]
    assert "verdict  unclear, so the default stays; the runner-up 1.02x (0.90 to 1.10) as fast" in forward
    assert "2.0e-07 under a rotation; two runs gave the same bits, 100 edges checked" in forward
    assert "machine  at rest" in forward and forward.endswith(f"generator {GENERATOR_VERSION}")
