"""Draws small faults, puts each into a copy of the code, and says which of them no test notices. Run by hand:

    python tests/tools/mutants.py --seed 44 --count 200 --out mutants.jsonl  # hours on one core; resumes
    python tests/tools/mutants.py --seed 44 --count 200 --out mutants.jsonl --report
    python tests/tools/mutants.py --only autotune/measure/timing.py --list       # what there is to draw from
    python tests/tools/mutants.py --tests smaller.txt --out smaller.jsonl        # the same mutants, other tests
    python tests/tools/mutants.py --slow none --out quick.jsonl                  # by what `make test` runs alone

A survivor is equivalent (say why) or shows a test that is missing. Only ``AREAS`` are mutated; ``TESTS`` says which
tests answer for a file. Tests that pin texts by hashes are not among them: they notice every change. Of a survivor in
the generator it is noted whether the pinned texts are still the same.

Each mutant is a process forked from one that has imported the large packages; it imports the changed copy and runs the
tests of its file up to the first failure. The copies are in a temporary folder, as is their cache of kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutations import Mutation, is_valid, mutations_of

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = ("torch", "torch._dynamo", "numpy", "scipy", "e3nn.o3", "e3nn.nn", "hypothesis", "optuna")

# What is mutated, by area; the draw takes from each area in turn.
AREAS: dict[str, tuple[str, ...]] = {
    "generator": ("kernelgen/arithmetic", "kernelgen/kernels"),
    "lookup": (
        "autotune/database/lookup.py",
        "autotune/database/nearest.py",
        "autotune/database/model_of_time.py",
        "autotune/database/predicted.py",
        "autotune/database/store.py",
        "autotune/workload/workload.py",
    ),
    "timing": (
        "autotune/measure/timing.py",
        "autotune/tune/publish.py",
        "autotune/compare/comparison.py",
    ),
    "padding": (
        "autotune/models/padding.py",
        "kernelgen/runtime/graph.py",
    ),
}
# Drawn from only where ``--only`` names them: of the headers many run on a GPU alone, and models need their package.
ON_REQUEST: dict[str, tuple[str, ...]] = {
    "headers": ("kernelgen/kernels/include",),
    "captured models": (
        "autotune/models/capture.py",
        "autotune/models/mace/package.py",
        "autotune/models/nequip/package.py",
        "autotune/models/sevennet/package.py",
    ),
}
# Files whose strings are C text.
C_TEXT = (
    *("kernelgen/arithmetic", "kernelgen/kernels/source", "kernelgen/kernels/spherical_harmonics"),
    *("kernelgen/kernels/symmetric_contraction", "kernelgen/kernels/pairs/emit"),
    *(f"kernelgen/kernels/product/{name}" for name in ("cuda", "group", "memory", "host")),
    *(f"kernelgen/kernels/radial/{name}" for name in ("emit", "group", "coupled", "warpgroup")),
)

_EMIT, _TERMS, _RUNTIME = "tests/kernelgen/emit/", "tests/kernelgen/terms/", "tests/kernelgen/runtime/"
_DATABASE = "tests/autotune/database/"
_LANES = _EMIT + "test_emit_cuda.py::test_lanes_compute_what_e3nn_computes"
_HOST = (
    "tests/kernelgen/ops/test_operators.py::test_agrees_with_e3nn_through_autograd",
    _EMIT + "test_emit_host.py",
)
_CUDA = (
    _LANES + "[staged-False-double_backward]",
    _LANES + "[atomics-True-backward]",
    _LANES + "[quarter-warps-False-joint_backward]",
    _LANES + "[plain-staged-True-double_backward]",
    _LANES + "[basis-small-teams-False-double_backward]",
    _LANES + "[by-sender-False-backward]",
    _LANES + "[by-sender-staged-False-backward]",
    _LANES + "[ahead-False-forward]",
    _LANES + "[split-nodes-False-backward]",
    _LANES + "[split-nodes-unrolled-by-sender-False-backward]",
    _LANES + "[ring-by-sender-False-double_backward]",
    _LANES + "[ring-of-half-warps-False-forward]",
    _LANES + "[odd-True-backward]",
    _EMIT + "test_emit_cuda.py::test_lanes_exchange_what_they_write[staged-backward-ir_mul]",
    _EMIT + "test_emit_cuda.py::test_owners_write_what_e3nn_computes_into_memory_that_held_anything",
    _EMIT + "test_emit_cuda.py::test_a_ring_says_what_it_cannot_hold",
    _EMIT + "test_emit_cuda.py::test_owners_say_what_they_cannot_do",
    _EMIT + "test_cut_rows.py::test_against_e3nn[waves-7-hubs-given-True]",
)
_CONTRACTION = (
    _TERMS + "test_equivariant_polynomials.py",
    _TERMS + "test_contraction_statements.py::test_the_contraction_of_mace",
    _TERMS + "test_contraction_statements.py::test_drawn_irreps_and_correlation",
    "tests/kernelgen/plan/test_contraction_plan.py",
    _EMIT + "test_contraction_kernel.py::test_host_kernels",
    _EMIT + "test_contraction_kernel.py::test_lane_by_lane",
)
_HARMONICS = (
    *(
        _TERMS + f"test_harmonics.py::test_values_and_both_derivatives_are_those_of_e3nn[{key}]"
        for key in ("sh|2,0,3,2,1,1|component|normalize", "sh|7|component|raw", "sh|0,1,2,3,4,5,6|integral|normalize")
    ),
    _EMIT + "test_harmonics_kernel.py::test_limits_are_said",
    _EMIT + "test_harmonics_kernel.py::test_one_warp_goes_through_all_tiles",
    _EMIT + "test_harmonics_kernel.py::test_a_constant_lane_by_lane",
    _EMIT + "test_harmonics_kernel.py::test_the_default_of_a_gpu_is_legal_and_staged_where_two_blocks_fit",
)
_RADIAL = (
    _EMIT + "test_radial_kernel.py::test_lane_by_lane",
    _EMIT + "test_radial_kernel.py::test_what_has_no_such_kernel",
    _EMIT + "test_warpgroup_products.py::test_in_tf32_shared_memory_has_one_half_of_each_value",
    _EMIT + "test_coupled_cotangents.py::test_which_paths_are_coupled",
    _EMIT + "test_coupled_cotangents.py::test_all_groups_stage_fewer_edges_where_one_has_no_room",
    _EMIT + "test_whole_rows.py::test_the_matrix_is_loaded_at_once_if_it_fits_into_registers",
    _EMIT + "test_coupled_cotangents.py::test_some_gradients[deep-xy]",
    _EMIT + "test_coupled_cotangents.py::test_some_gradients[uneven-yw]",
    _EMIT + "test_coupled_cotangents.py::test_a_group_without_coupled_paths",
    _EMIT + "test_whole_rows.py::test_against_e3nn[one-part-hubs-ir_mul]",
    _EMIT + "test_whole_rows.py::test_against_e3nn[two-tiles-hubs-last-mul_ir]",
    _EMIT + "test_whole_rows.py::test_against_e3nn[groups-whole-shares-ir_mul]",
    _EMIT + "test_whole_rows.py::test_gradients_are_added_to_zeros",
)
_WARPGROUPS = (
    _EMIT + "test_warpgroup_products.py::test_where_it_is_legal",
    _EMIT + "test_warpgroup_products.py::test_default_where_there_are_such_products",
    _EMIT + "test_warpgroup_products.py::test_some_gradients[uneven-yw]",
    _EMIT + "test_warpgroup_products.py::test_some_gradients[deep-xy]",
    _EMIT + "test_warpgroup_products.py::test_a_warp_goes_from_receiver_to_receiver",
    _EMIT + "test_warpgroup_values.py::test_what_has_no_such_kernel",
    _EMIT + "test_warpgroup_values.py::test_a_step_of_few_edges_takes_half_of_four_tiles",
    _EMIT + "test_warpgroup_values.py::test_against_e3nn[small-one-tile-ir_mul-100-4]",
    _EMIT + "test_warpgroup_values.py::test_against_e3nn[uneven-two-tiles-mul_ir-100-4]",
    _EMIT + "test_warpgroup_values.py::test_against_e3nn[groups-two-ahead-ir_mul-100-4]",
)
_PAIRS = (
    _EMIT + "test_pairs.py::test_every_direction_of_every_mode",
    _EMIT + "test_pairs.py::test_convolutions",
    _EMIT + "test_pairs.py::test_limits_are_said",
    _EMIT + "test_pairs.py::test_lane_by_lane[mixed-ir_mul-conv-backward]",
    _EMIT + "test_pairs.py::test_lane_by_lane[uvv-mul_ir-plain-double_backward]",
    _EMIT + "test_pairs.py::test_small_teams_lane_by_lane[single-conv-8-joint_backward]",
    _EMIT + "test_pairs.py::test_small_teams_lane_by_lane[uvw-plain-4-backward]",
    _EMIT + "test_pairs.py::test_shared_weights_lane_by_lane[2-1]",
)
_SPACE = ("tests/autotune/search/test_space.py",)
# Of captured models: skipped where their package is not installed.
_CAPTURED = "tests/models/test_captured.py"
_CAPTURED_MACE = (_CAPTURED, "tests/models/test_mace_captured.py")
# The tests that answer for a file, by the beginning of its path: the longest counts.
TESTS: dict[str, tuple[str, ...]] = {
    "kernelgen/arithmetic": (*_HOST, *_CUDA),
    "kernelgen/arithmetic/contraction": _CONTRACTION,
    "kernelgen/arithmetic/harmonics": _HARMONICS,
    "kernelgen/kernels": (*_HOST, *_CUDA),
    "kernelgen/kernels/product": (
        *_SPACE,
        "tests/kernelgen/plan/test_registers.py",
        *_HOST,
        _EMIT + "test_ahead.py",
        *_CUDA,
    ),
    "kernelgen/kernels/product/emit.py": (*_HOST, *_CUDA),
    "kernelgen/kernels/product/group.py": _CUDA,
    "kernelgen/kernels/product/memory.py": _CUDA,
    "kernelgen/kernels/product/plan.py": (
        *_SPACE,
        "tests/kernelgen/plan/test_registers.py",
        *_HOST,
        *_CUDA,
        _DATABASE + "test_lookup.py",
        _DATABASE + "test_skew.py",
    ),
    "kernelgen/kernels/product/channelwise.py": (_EMIT + "test_ahead.py", *_CUDA),
    "kernelgen/kernels/pairs": _PAIRS,
    "kernelgen/kernels/pairs/plan.py": (*_PAIRS, *_SPACE),
    "kernelgen/kernels/spherical_harmonics.py": (
        _EMIT + "test_cut_rows.py::test_harmonics_inside",
        _RUNTIME + "test_zeros.py::test_harmonics_formed_inside",
        *_HARMONICS,
    ),
    "kernelgen/kernels/symmetric_contraction.py": _CONTRACTION,
    "kernelgen/kernels/radial": _RADIAL,
    "kernelgen/kernels/radial/plan.py": (*_RADIAL, *_WARPGROUPS, "tests/autotune/workload/test_radial_kind.py"),
    "kernelgen/kernels/radial/warpgroup": _WARPGROUPS,
    "kernelgen/problem/product.py": ("tests/kernelgen/ops/test_size_class.py",),
    "autotune/database": (
        _DATABASE + "test_lookup.py",
        _DATABASE + "test_legal_form.py",
        _DATABASE + "test_shapes.py",
        _DATABASE + "test_layouts.py",
        _DATABASE + "test_skew.py",
        *(
            _DATABASE + f"test_prediction.py::test_{name}"
            for name in (
                "it_is_the_same_every_time_and_for_every_size_near_a_recorded_one",
                "the_reason_says_what_it_costs_and_where_that_is_from",
                "a_schedule_that_failed_here_is_passed_over",
                "a_kept_choice_is_believed_if_its_times_are_times",
                "an_unreadable_table_is_ignored_with_a_warning",
                "trees_ask_one_question_a_level",
                "features_have_their_names_and_tell_knobs_apart",
                "work_counts_traffic_and_additions_by_hand",
                "the_numbers_that_stored_trees_were_fitted_to_stay_as_they_are",
                "the_largest_of_two_groups_by_hand",
                "blocks_that_a_multiprocessor_holds_by_hand",
                "blocks_of_one_group_hold_less_code_than_several_small_ones",
                "what_models_disagree_about_counts_as_slower",
                "a_shortlist_has_likely_schedules_that_divide_the_work_in_other_ways_and_the_rules",
                "the_runtime_offers_legal_others_and_the_rules",
            )
        ),
        *_SPACE,
        "tests/autotune/modules/test_first_runs.py",
        "tests/autotune/tune/test_recheck.py",
    ),
    "autotune/database/nearest.py": (
        _DATABASE + "test_legal_form.py",
        "tests/autotune/portability/test_portability.py::test_every_entry_is_served_where_shared_memory_is_smallest",
        "tests/autotune/portability/test_portability.py::test_what_is_prefetched_fits_into_a_smaller_l2",
        "tests/autotune/portability/test_portability.py::test_the_form_for_less_shared_memory_keeps_what_a_team_does",
        "tests/autotune/portability/test_portability.py::test_a_limit_of_registers_is_left_to_blackwells_compiler",
        _DATABASE + "test_lookup.py",
    ),
    "autotune/database/store.py": (
        _DATABASE + "test_lookup.py",
        _DATABASE + "test_database.py",
        _DATABASE + "test_database_fuzz.py",
    ),
    "autotune/workload/workload.py": (
        "tests/autotune/workload/test_graphs.py",
        _DATABASE + "test_lookup.py",
        _DATABASE + "test_skew.py",
    ),
    "autotune/measure/timing.py": (
        "tests/autotune/measure/test_measure.py",
        "tests/autotune/measure/test_intervals.py",
        "tests/autotune/measure/test_conditions.py",
        "tests/autotune/tune/test_publish.py",
    ),
    "autotune/tune/publish.py": (
        "tests/autotune/tune/test_publish.py",
        "tests/autotune/tune/test_objectives.py",
        "tests/autotune/tune/test_recheck.py",
    ),
    "autotune/compare/comparison.py": (
        "tests/autotune/compare/test_sampling.py",
        "tests/autotune/compare/test_baselines.py",
        "tests/autotune/tune/test_budgets.py",
    ),
    "autotune/models/padding.py": ("tests/autotune/captured", "tests/models/test_captured_training.py"),
    "autotune/models/capture.py": ("tests/autotune/captured", *_CAPTURED_MACE),
    "autotune/models/sevennet/package.py": (_CAPTURED, "tests/models/test_sevennet_captured.py"),
    "autotune/models/nequip/package.py": (_CAPTURED, "tests/models/test_nequip_captured.py"),
    "autotune/models/mace/package.py": _CAPTURED_MACE,
    "kernelgen/runtime": (
        _RUNTIME + "test_graph.py",
        _RUNTIME + "test_graph_writes.py",
        _RUNTIME + "test_index_checks.py",
        _RUNTIME + "test_known_graphs.py",
    ),
}
KILLED, SURVIVED, BROKEN, TIMEOUT = "killed", "survived", "does not import", "timeout"
TEXTS = ("the pinned texts",)
# Beside three times what the tests take without a fault.
GRACE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mutation of one file; ``name`` stays the same while the file does."""

    area: str
    path: str
    mutation: Mutation
    name: str

    @property
    def place(self) -> str:
        return f"{self.path}:{self.mutation.line}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """root: of the code. tests: selections of pytest by the beginning of a file's path. preloaded: imported once.

    slow: which of the slow tests run too: those ``named`` in ``tests``, ``none`` or ``all``.
    """

    root: Path
    areas: dict[str, tuple[str, ...]]
    tests: dict[str, tuple[str, ...]]
    preloaded: tuple[str, ...] = PRELOADED
    grace_s: float = GRACE_S
    slow: str = "named"

    def files(self, area: str) -> list[str]:
        found: set[Path] = set()
        endings = (".cuh", ".hpp") if area == "headers" else (".py",)
        for path in (self.root / each for each in self.areas[area]):
            found |= {file for file in (path, *path.rglob("*")) if file.suffix in endings}
        return sorted(path.relative_to(self.root).as_posix() for path in found if path.name != "__init__.py")

    def selection(self, path: str) -> tuple[str, ...]:
        """The tests that answer for a file: those of the longest prefix of its path."""
        known = [prefix for prefix in self.tests if path.startswith(prefix)]
        if not known:
            raise SystemExit(f"no tests answer for {path}; add it to TESTS in {Path(__file__).name}")
        return self.tests[max(known, key=len)]


def draw(setting: Setting, seed: int, only: Sequence[str] = ()) -> Iterator[Mutant]:
    """All mutants, areas in turn, in each its groups of operators. A smaller draw is the beginning of a larger one."""
    return _in_turn(_of_area(setting, area, random.Random(f"{seed} {area}"), only) for area in setting.areas)


def _in_turn(generators: Iterable[Iterator[Mutant]]) -> Iterator[Mutant]:
    left = list(generators)
    while left:
        for generator in list(left):
            mutant = next(generator, None)
            if mutant is None:
                left.remove(generator)
            else:
                yield mutant


def _of_area(setting: Setting, area: str, chance: random.Random, only: Sequence[str]) -> Iterator[Mutant]:
    groups: dict[str, list[Mutant]] = defaultdict(list)
    sources = {}
    for path in setting.files(area):
        if only and not any(path.startswith(each) for each in only):
            continue
        sources[path] = (setting.root / path).read_text()
        holds_c = any(path.startswith(each) for each in C_TEXT)
        for mutation in mutations_of(sources[path], c_text=holds_c, python=path.endswith(".py")):
            text = f"{path} {mutation.start} {mutation.after} {sources[path]}"
            name = hashlib.sha256(text.encode()).hexdigest()[:12]
            groups[mutation.group].append(Mutant(area, path, mutation, name))
    for _, group in sorted(groups.items()):
        chance.shuffle(group)
    yield from _in_turn(
        (mutant for mutant in group if is_valid(sources[mutant.path], mutant.mutation, mutant.path.endswith(".py")))
        for _, group in sorted(groups.items())
    )


class Tree:
    """A copy of the code in a temporary folder, with at most one mutant in it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self._clock = folder, int(time.time()) - 10**7
        made = ("reports", "build", "dist", "packs")

        def unwanted(directory: str, names: list[str]) -> set[str]:
            hidden = {name for name in names if name[0] == "." or name == "__pycache__"}
            return hidden | (set(made) & set(names) if Path(directory) == root else set())

        shutil.copytree(root, folder, ignore=unwanted)

    def write(self, path: str, text: str) -> None:
        """Python tells compiled files from stale ones by the second and the size, so each text gets its own second."""
        self._clock += 1
        (self.folder / path).write_text(text)
        os.utime(self.folder / path, (self._clock, self._clock))


class _Watcher:
    """Leaves slow tests out that do not begin with ``kept``; writes the first failure down as soon as it is known."""

    def __init__(self, answer: Path, kept: Sequence[str]) -> None:
        self.answer, self.kept, self.known = answer, tuple(kept), False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item for item in items if item.nodeid.startswith(self.kept) or item.get_closest_marker("slow") is None
        ]

    def _note(self, state: str, report: Any) -> None:
        if not self.known:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(crash.message if crash else report.longrepr).strip().splitlines()
            self.answer.write_text(json.dumps({"state": state, "test": report.nodeid, "error": (message or [""])[0]}))
            self.known = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._note(KILLED, report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._note(BROKEN, report)


def _in_child(tree: Tree, setting: Setting, job: Sequence[str], answer: Path) -> None:
    """Run tests, or write down the hashes of the pinned texts; never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir(tree.folder)
        log = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        ours = [str(tree.folder), str(tree.folder / "tests" / "support")]
        hidden = str(setting.root)
        sys.path[:] = [*ours, *(each for each in sys.path if each and not each.startswith(hidden + "/tests"))]
        sys.path[:] = [each for each in sys.path if each != hidden]
        os.environ |= {"PYTHONPATH": os.pathsep.join(ours), "EQUITUNE_CACHE": str(tree.folder.parent / "cache")}
        if job == TEXTS:
            golden = importlib.import_module("golden_texts")
            answer.write_text(json.dumps({"state": "texts", "hashes": golden.hashes()}))
            code = 0
        else:
            named = [name for name in job if "::" in name]
            kept = {"none": [], "named": named, "all": [""]}[setting.slow]
            # Cases that are named may be slow now: the test's others stand for them.
            run = dict.fromkeys(name.partition("[")[0] for name in job) if setting.slow == "none" else job
            chosen = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *run)
            code = int(pytest.main(list(chosen), plugins=[_Watcher(answer, kept)]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


Finish = Callable[[dict[str, Any], float], None]


@dataclasses.dataclass
class _Child:
    """A process that runs tests. finish: what to do with its outcome and its seconds."""

    pid: int
    tree: Tree
    answer: Path
    start: float
    limit_s: float
    finish: Finish

    def outcome(self) -> dict[str, Any] | None:
        """What became of it, or None while it runs."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            return _answer(self.answer, status)
        if time.monotonic() - self.start < self.limit_s:
            return None
        self.end()
        return _answer(self.answer, None)

    def end(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Run:
    """Mutants one after the other, or some at a time; answers go to a file of JSON lines as they come."""

    def __init__(self, setting: Setting, out: Path, jobs: int = 1, again: Sequence[str] = ()) -> None:
        self.setting, self.out, self.jobs = setting, out, jobs
        if out.exists():  # without a line that an interrupt cut short
            out.write_text(out.read_text().rpartition("\n")[0] + "\n")
        self.known = {line["name"]: line for line in read(out) if line["state"] not in again}

    def over(self, mutants: Iterable[Mutant]) -> None:
        for name in self.setting.preloaded:
            importlib.import_module(name)
        left = [mutant for mutant in mutants if mutant.name not in self.known]
        with tempfile.TemporaryDirectory(prefix="equitune-mutants-") as folder:
            trees = [Tree(self.setting.root, Path(folder) / f"tree{number}") for number in range(self.jobs)]
            texts = [self._texts] if any(each.area == "generator" for each in left) else []
            self._side_by_side(trees, [*texts, *self._baselines(left)])
            self._side_by_side(trees, [functools.partial(self._mutant, mutant) for mutant in left])

    def _side_by_side(self, trees: list[Tree], jobs: list[Callable[[Tree], _Child | None]]) -> None:
        free, left, running = list(trees), list(jobs), list[_Child]()
        try:
            while left or running:
                while left and free:
                    if (child := left.pop(0)(free[-1])) is not None:
                        running.append(child)
                        free.pop()
                for child in list(running):
                    if (found := child.outcome()) is not None:
                        running.remove(child)
                        child.finish(found, round(time.monotonic() - child.start, 1))
                        free.append(child.tree)
                time.sleep(0.05)
        finally:
            for child in running:
                child.end()

    def _texts(self, tree: Tree) -> _Child | None:
        """Write down the hashes of the pinned texts without a fault."""
        if "texts" in self.known:
            return None
        return self._begin(tree, TEXTS, "texts", math.inf, lambda found, _: self._write({"name": "texts", **found}))

    def _baselines(self, mutants: Iterable[Mutant]) -> list[Callable[[Tree], _Child | None]]:
        """Each selection of tests without a fault: they must pass, and fill the cache of kernels."""
        chosen = {_baseline_name(tests): tests for tests in (self.setting.selection(each.path) for each in mutants)}
        return [functools.partial(self._baseline, *each) for each in chosen.items() if each[0] not in self.known]

    def _baseline(self, name: str, selection: tuple[str, ...], tree: Tree) -> _Child:
        file = name.replace(" ", "-")

        def finish(found: dict[str, Any], seconds: float) -> None:
            if found["state"] != SURVIVED:
                log = _log(tree.folder.parent / f"{file}.json")
                raise SystemExit(f"without a fault, {' '.join(selection)}: {found}\n{log}")
            self._write({"name": name, "state": "baseline", "seconds": seconds, "tests": selection})
            print(f"without a fault {seconds:5.0f} s  {' '.join(selection)}", flush=True)

        return self._begin(tree, selection, file, math.inf, finish)

    def _mutant(self, mutant: Mutant, tree: Tree) -> _Child:
        original, selection = (self.setting.root / mutant.path).read_text(), self.setting.selection(mutant.path)
        tree.write(mutant.path, mutant.mutation.apply(original))
        limit_s = 3 * self.known[_baseline_name(selection)]["seconds"] + self.setting.grace_s

        def finish(found: dict[str, Any], seconds: float) -> None:
            if found["state"] == SURVIVED and mutant.area == "generator":
                hashes = self._wait(tree, TEXTS, mutant.name).get("hashes")
                same = hashes == self.known["texts"]["hashes"]
                found["texts"] = "same" if same else "changed" if hashes else "none"
            tree.write(mutant.path, original)
            before, after = mutant.mutation.lines(original)
            line = {"name": mutant.name, "area": mutant.area, "place": mutant.place}
            line |= {"operator": mutant.mutation.operator, "before": before, "after": after, "seconds": seconds}
            self._write(line | found)
            print(f"{found['state']:9} {seconds:5.0f} s  {mutant.place}  {mutant.mutation.operator}", flush=True)

        return self._begin(tree, selection, mutant.name, limit_s, finish)

    def _begin(self, tree: Tree, job: Sequence[str], name: str, limit_s: float, finish: Finish) -> _Child:
        answer = tree.folder.parent / f"{name}.json"
        answer.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            _in_child(tree, self.setting, tuple(job), answer)
        return _Child(pid, tree, answer, time.monotonic(), limit_s, finish)

    def _wait(self, tree: Tree, job: Sequence[str], name: str) -> dict[str, Any]:
        child = self._begin(tree, job, name, math.inf, lambda *_: None)
        try:
            _, status = os.waitpid(child.pid, 0)
        except BaseException:  # an interrupt: its group is its own
            os.killpg(child.pid, signal.SIGKILL)
            raise
        return _answer(child.answer, status)

    def _write(self, line: dict[str, Any]) -> None:
        self.known[line["name"]] = line
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _baseline_name(selection: Sequence[str]) -> str:
    return "baseline " + hashlib.sha256(" ".join(selection).encode()).hexdigest()[:12]


def _answer(answer: Path, status: int | None) -> dict[str, Any]:
    """What became of a child, from what it wrote and how it ended (None: its time was up)."""
    if answer.exists():
        return json.loads(answer.read_text())
    if status is None:
        return {"state": TIMEOUT}
    if status == 0:
        return {"state": SURVIVED}
    if os.WIFSIGNALED(status):
        return {"state": KILLED, "error": f"ended by signal {os.WTERMSIG(status)}"}
    return {"state": BROKEN, "error": f"pytest ended with {os.waitstatus_to_exitcode(status)}: {_log(answer)[-300:]}"}


def _log(answer: Path) -> str:
    log = answer.with_suffix(".log")
    return log.read_text(errors="replace") if log.exists() else ""


def read(out: Path) -> list[dict[str, Any]]:
    """The lines of a file of answers."""
    return [json.loads(line) for line in out.read_text().splitlines() if line] if out.exists() else []


def report(lines: Iterable[dict[str, Any]], names: Iterable[str]) -> str:
    """A table of the drawn mutants in Markdown, survivors first, and the counts by area."""
    known, wanted = {line["name"]: line for line in lines}, list(names)
    rows = [known[name] for name in wanted if name in known]
    rows.sort(key=lambda row: (row["state"] != SURVIVED, row["area"], row["place"]))
    counts = Counter((row["area"], row["state"] + _texts(row)) for row in rows)
    text = [f"{len(rows)} of {len(wanted)} drawn mutants were run.", ""]
    text += [f"- {area}: {state} {count}" for (area, state), count in sorted(counts.items())]
    text += ["", "| mutant | place | before | after | outcome |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (f"`{_cell(row[name])}`" for name in ("before", "after"))
        by = f"killed by {row['test']}" if "test" in row and row["state"] == KILLED else row["state"] + _texts(row)
        text.append(f"| {row['name']} {row['operator']} | {row['place']} | {' | '.join(cells)} | {by} |")
    return "\n".join(text).replace("C text: || to &&", "C text: or to and")


def _texts(row: dict[str, Any]) -> str:
    return f", texts {row['texts']}" if "texts" in row else ""


def _cell(text: str) -> str:
    return re.sub(r"\|", r"\\|", text if len(text) < 160 else text[:157] + "...")


def _meets(only: str, paths: Iterable[str]) -> bool:
    return any(only.startswith(path) or path.startswith(only) for path in paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=44)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", action="append", default=[], help="files or folders, as from the root")
    parser.add_argument("--tests", type=Path, help="a file of test selections, one a line, in place of the table's")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="answers; what it has is not run again")
    parser.add_argument("--again", action="append", default=[], help="run those of this state again, as: survived")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--slow", choices=("named", "none", "all"), default="named", help="which slow tests run too")
    parser.add_argument("--list", action="store_true", help="print the mutants that are drawn, and run nothing")
    parser.add_argument("--report", action="store_true", help="print the table of what was run, and run nothing")
    given = parser.parse_args()
    tests = {"": tuple(given.tests.read_text().split("\n"))} if given.tests else TESTS
    asked = {area: paths for area, paths in ON_REQUEST.items() if any(_meets(each, paths) for each in given.only)}
    setting = Setting(ROOT, AREAS | asked, {prefix: tuple(filter(None, each)) for prefix, each in tests.items()})
    setting = dataclasses.replace(setting, slow=given.slow)
    mutants = [mutant for mutant, _ in zip(draw(setting, given.seed, given.only), range(given.count), strict=False)]
    if given.list:
        for mutant in mutants:
            before, after = mutant.mutation.lines((ROOT / mutant.path).read_text())
            print(f"{mutant.name}  {mutant.place}  {mutant.mutation.operator}\n    {before}\n    {after}")
        return
    if not given.report:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        Run(setting, given.out, given.jobs, given.again).over(mutants)
    print(report(read(given.out), [mutant.name for mutant in mutants]))


if __name__ == "__main__":
    main()
