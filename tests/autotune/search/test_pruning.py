"""What is skipped unmeasured, held against every trial that was ever measured on a GPU and kept in results/."""

from __future__ import annotations

import functools
from typing import Any

from places import ROOT

from autotune.database.trials import SUFFIX, read_device
from autotune.search.loop import SPILL_BYTES, spill_limit, why_hopeless
from autotune.workload.config import load_problems
from kernelgen.device import DeviceFacts, cuda_facts, representative

H200 = representative("sm_90")
TRIALS = ROOT / "results" / "trials"
Lines = list[dict[str, Any]]


@functools.cache
def every() -> dict[str, dict[str, Lines]]:
    """The studies of each device, by name. Read by the first test that asks, not when tests are collected."""
    slugs = [archive.name.removesuffix(SUFFIX) for archive in sorted(TRIALS.glob(f"*{SUFFIX}"))]
    return {slug: read_device(TRIALS / slug)[0] for slug in slugs}


def of_gpus() -> dict[str, Lines]:
    return {
        name: lines for slug, found in every().items() if slug.startswith("nvidia-") for name, lines in found.items()
    }


def timed(lines: Lines) -> Lines:
    """Trials of the generator that wrote last that were timed or pruned, in their order."""
    last = lines[-1]["generator"]
    return [line for line in lines if line["state"] in ("ok", "pruned") and line["generator"] == last]


def is_fused(line: dict[str, Any]) -> bool:
    """Schedules of spherical harmonics, of which nothing is summed, have no such choice."""
    return bool(line["schedule"].get("fuse", True))


def in_full(lines: Lines) -> Lines:
    return sorted(
        (line for line in lines if line["state"] == "ok" and not line["cut"]), key=lambda line: line["time_us"]
    )


def pruned_in_order(lines: Lines) -> Lines:
    """What a search that meets these trials in this order would not have measured."""
    skipped, best = [], None
    for line in lines:
        if line["state"] == "pruned" or why_hopeless(line["resources"], best["resources"] if best else None, H200):
            skipped.append(line)
        elif not line["cut"] and (best is None or line["time_us"] < best["time_us"]):
            best = line
    return skipped


def near_and_pruned(study: Lines) -> set[int]:
    """Trials near the best that a search would have skipped on its way, or once the best is known."""
    lines = timed(study)
    best = in_full(lines)[0]
    near = {line["number"] for line in lines if line["state"] == "ok" and line["time_us"] <= 1.1 * best["time_us"]}
    settled = [line for line in lines if why_hopeless(line["resources"], best["resources"], H200)]
    return near & {line["number"] for line in (*pruned_in_order(lines), *settled)}


def test_nothing_near_the_best_is_pruned() -> None:
    assert len(of_gpus()) >= 400
    assert {name: found for name, lines in of_gpus().items() if (found := near_and_pruned(lines))} == {}


def test_a_good_share_is_pruned() -> None:
    """Of the kernels that may spill at all: those of pairs keep an edge's rows in shared memory.

    Searches that go on from earlier winners propose few that spill.
    """
    studies = [timed(lines) for lines in of_gpus().values()]
    spilling = [lines for lines in studies if any(line["resources"].get("spill_bytes") for line in lines)]
    fused = [line for lines in spilling for line in lines if is_fused(line)]
    skipped = [line for lines in spilling for line in pruned_in_order(lines) if is_fused(line)]
    assert len(spilling) >= 12
    assert len(skipped) > 0.04 * len(fused)


def behind(study: Lines) -> list[float]:
    """How many times the fastest schedule's time the fastest unfused one takes; empty where none was measured."""
    lines = timed(study)
    unfused = [line["time_us"] for line in lines if line["state"] == "ok" and not is_fused(line)]
    return [min(unfused) / in_full(lines)[0]["time_us"]] if unfused else []


def test_unfused_never_came_near_but_for_pairs() -> None:
    """Why fusion is no knob: on every device the fastest unfused schedule of a channelwise product is far behind.

    Kernels of pairs add to the rows of nodes in memory in any case, so unfused may be as fast: it is a probe of each.
    """
    pairs = tuple(f"{label}-" for label, problem in load_problems().items() if not problem.is_channelwise)
    studies = [study for found in every().values() for study in found.items()]
    channelwise = [ratio for name, lines in studies if not name.startswith(pairs) for ratio in behind(lines)]
    assert len(channelwise) >= 20
    assert min(channelwise) > 1.1
    of_pairs = [lines for name, lines in studies if name.startswith(pairs) and "-conv-" in name]
    assert len(of_pairs) >= 20
    assert sum(bool(behind(lines)) for lines in of_pairs) > 0.8 * len(of_pairs), "some end before it, by their budget"


def test_limit_follows_what_the_fastest_spills() -> None:
    assert why_hopeless({"spill_bytes": 10**6}, None, H200) is None, "the first schedule is always measured"
    assert why_hopeless({"spill_bytes": SPILL_BYTES}, {"spill_bytes": 0}, H200) is None
    reason = why_hopeless({"spill_bytes": SPILL_BYTES + 1}, {"spill_bytes": 0}, H200)
    assert reason is not None and f"{SPILL_BYTES + 1} bytes" in reason
    assert why_hopeless({"spill_bytes": 4000}, {"spill_bytes": 2000}, H200) is None
    assert why_hopeless({"spill_bytes": 4001}, {"spill_bytes": 2000}, H200)
    assert why_hopeless({"code_bytes": 10**6}, {"code_bytes": 10}, H200) is None, "a host compiler reports no spills"


def test_a_smaller_l1_cache_has_a_smaller_limit() -> None:
    assert [spill_limit(representative(arch)) for arch in ("sm_80", "sm_89", "sm_90", "sm_120")] == [480, 320, 640, 320]
    old = DeviceFacts("cuda", "NVIDIA H200", "sm_90", 132, 232448, 233472)
    assert spill_limit(old) == SPILL_BYTES, "a record from before L1 was noted is of an H200"
    assert why_hopeless({"spill_bytes": 321}, {"spill_bytes": 0}, cuda_facts("sm_86"))
    assert why_hopeless({"spill_bytes": 321}, {"spill_bytes": 0}, H200) is None
