"""Configs: what is in the repository loads; what a user gets wrong is one clear line with the nearest valid name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from autotune import paths
from autotune.errors import ConfigError
from autotune.workload.config import by_problem, load_all, load_config, load_graphs, load_problems, problems_from
from autotune.workload.graphs import Bulk, Crystal, Molecule, StructureFile, build_graph
from autotune.workload.toml_tables import check_problem_name, config_path, known_configs, parse_duration
from kernelgen.errors import EquituneError
from kernelgen.problem.product import TensorProductProblem

SHIPPED = known_configs()

# Paths, weights a row and output dimension of the published models.
SIZES = {
    "mace-mp-first": (4, 512, 2048),
    "mace-mp-medium": (10, 1280, 5120),
    "mace-mp-large": (17, 2176, 9088),
    "nequip-water": (10, 320, 704),
    "nequip-lips": (30, 960, 3264),
    "nequip-benzene": (68, 4352, 19968),
    "nequip-oam-l": (23, 1312, 5472),
    "sevennet-0": (15, 960, 3136),
    "sevennet-l3i5": (34, 1760, 7776),
    "batmobile-l3": (34, 1088, 4992),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config_loads(name: str, backend: str) -> None:
    config = load_config(name, backend)
    assert config.workloads
    assert config.path == paths.configs_dir() / f"{name}.toml"


def test_the_default_config_picks_its_graph_by_backend() -> None:
    assert [w.graph.name for w in load_config("mace-mp-medium", "cpu").workloads] == ["mof"]
    assert [w.graph.name for w in load_config("mace-mp-medium", "cuda").workloads] == ["carbon"]
    workload = load_config("mace-mp-medium", "cpu").workloads[0]
    assert (workload.operation, workload.dtype, workload.layout) == ("conv", "float32", "mul_ir")
    assert workload.directions == ("forward", "backward", "double_backward")
    assert load_config("mace-mp-medium", "cpu").budget_s == 240.0


def test_the_published_config_tunes_every_problem_where_graphs_differ_most() -> None:
    workloads = load_config("h200", "cuda").workloads
    for kind in ("carbon", "spike", "aspirin", "iron"):
        assert {w.label for w in workloads if w.graph.name == kind and w.dtype == "float32"} == set(SIZES)
    assert all(w.layout == "ir_mul" for w in workloads)


@pytest.mark.parametrize("name", SIZES)
def test_problem_has_its_published_size(name: str) -> None:
    problem = load_problems()[name]
    assert (len(problem.paths), problem.weight_numel, problem.dim_out) == SIZES[name]


def test_suite_covers_every_published_problem() -> None:
    for backend in ("cpu", "cuda"):
        config = load_config("suite", backend)
        assert {w.label for w in config.workloads} == set(SIZES)
        assert config.passes == ("forward", "backward", "force_step")
        assert all(w.layout == "ir_mul" for w in config.workloads)


def test_suite_on_a_gpu_has_the_rows_that_it_is_judged_by() -> None:
    workloads = load_config("suite", "cuda").workloads
    rows = Counter((w.operation, w.dtype, w.graph.name) for w in workloads if not w.deterministic)
    for graph in ("carbon", "water", "protein", "spike", "aspirin"):
        assert rows.pop(("conv", "float32", graph)) == len(SIZES)
        assert rows.pop(("conv", "float64", graph)) == 3
    assert rows == {("plain", "float32", "iron"): len(SIZES)}
    assert sum(w.deterministic for w in workloads) == 2


def test_iron_has_fifty_thousand_edges() -> None:
    assert build_graph(load_graphs()["iron"]).num_edges == 50_000


def test_graphs_file_describes_every_kind_of_source() -> None:
    graphs = load_graphs()
    assert isinstance(graphs["mof"].source, Crystal)
    assert isinstance(graphs["carbon"].source, Bulk)
    assert isinstance(graphs["molecule"].source, Molecule)


def test_config_path_finds_names_and_paths(tmp_path: Path) -> None:
    expected = paths.configs_dir() / "quick.toml"
    assert config_path("quick") == config_path("quick.toml") == config_path(str(expected)) == expected
    own = write(tmp_path, 'problem = "tiny"\ngraph = "molecule"\n')
    assert config_path(own) == own


def test_installed_package_finds_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "autotune"
    package.mkdir(parents=True)
    monkeypatch.setattr(paths, "PACKAGE", package)
    assert paths.configs_dir() == package / "_data" / "configs"
    assert paths.results_dir() == package / "_data" / "results"


def test_user_data_dir_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path))
    assert paths.user_data_dir() == tmp_path


def test_inline_problem_and_graph(tmp_path: Path) -> None:
    text = """
budget = "1h30m"
trials = 7
sampler = "random"
dtype = "float64"
directions = "forward"
[problems.mine]
in1 = "3x0e+3x1o"
in2 = "0e+1o"
filter = "0e+1o"
[problems.by-hand]
in1 = "3x1o"
in2 = "1o"
out = "3x1e+3x0e"
instructions = [[0, 0, 0, "uvu", true], [0, 0, 1, "uvu", true, 0.5]]
shared_weights = true
[graphs.near]
cutoff = 3.0
structure = "atoms.xyz"
"""
    config = load_config(write(tmp_path, text), "cpu")
    mine, by_hand = config.workloads
    assert (config.budget_s, config.trials, config.sampler) == (5400.0, 7, "random")
    assert mine.problem == TensorProductProblem.channelwise("3x0e+3x1o", "0e+1o", "0e+1o")
    assert by_hand.problem.shared_weights and by_hand.problem.irreps_out == "3x1e+3x0e"
    assert by_hand.problem.instructions[1].path_weight == 0.5
    assert mine.directions == ("forward",) and mine.dtype == "float64"
    assert mine.graph.source == StructureFile("atoms.xyz", str(tmp_path))


def test_workload_tables_override_the_top(tmp_path: Path) -> None:
    text = """
layout = "ir_mul"
graph = "molecule"
[[workload]]
problem = ["tiny", "nequip-water"]
[[workload]]
problem = "tiny"
operation = "plain"
layout = "mul_ir"
"""
    workloads = load_config(write(tmp_path, text), "cpu").workloads
    assert [(w.label, w.operation, w.layout) for w in workloads] == [
        ("tiny", "conv", "ir_mul"),
        ("nequip-water", "conv", "ir_mul"),
        ("tiny", "plain", "mul_ir"),
    ]


def test_patience_and_record_are_read(tmp_path: Path) -> None:
    text = 'problem = "tiny"\ngraph = "molecule"\npatience = 40\n[record.cpu]\nthreads = [0]'
    found = load_config(write(tmp_path, text), "cpu")
    assert (found.patience, found.trials) == (40, None)
    assert found.record["cpu"].choices("forward") == {"threads": (0,)}


def test_a_workload_table_may_have_its_own_trials(tmp_path: Path) -> None:
    text = """
trials = 25
graph = "molecule"
[[workload]]
problem = "tiny"
trials = 60
[[workload]]
problem = ["tiny", "nequip-water"]
"""
    found = load_config(write(tmp_path, text), "cpu")
    tiny, water = found.workloads
    assert found.trials == 25 and found.workload_trials == {tiny: 60}, "of a workload named twice the first counts"
    assert water.label == "nequip-water"


def test_problems_stay_together_in_the_order_given(tmp_path: Path) -> None:
    text = 'graph = ["molecule", "mof"]\n[[workload]]\nproblem = ["nequip-water", "tiny"]\n'
    text += '[[workload]]\nproblem = "tiny"\noperation = "plain"'
    ordered = by_problem(load_config(write(tmp_path, text), "cpu").workloads)
    names = [(w.label, w.graph.name, w.operation) for w in ordered]
    assert names[:2] == [("nequip-water", "molecule", "conv"), ("nequip-water", "mof", "conv")]
    assert [name[1:] for name in names[2:]] == [
        ("molecule", "conv"),
        ("mof", "conv"),
        ("molecule", "plain"),
        ("mof", "plain"),
    ]


MISTAKES = {
    'problem = "tiny"\ngraph = "molecule"\n[[workload]]\ntrials = 0': "workload.trials is 0; expected a positive",
    'problem = "tiny"\ngraph = "molecule"\npatience = 0': "patience is 0; expected a positive integer",
    'problem = "tiny"\ngraph = "molecule"\n[record.cpu]\nthread = [0]': "did you mean 'threads'",
    'problem = "tiny"\ngraph = "molecule"\nbudgett = "1m"': "did you mean 'budget'",
    'problem = "tyni"\ngraph = "molecule"': "did you mean 'tiny'",
    'problem = "tiny"\ngraph = "molecul"': "did you mean 'molecule'",
    'problem = "tiny"\ngraph = { cpu = "molecule", gpu = "carbon" }': "unknown key 'gpu'",
    'problem = "tiny"\ngraph = { cuda = "carbon" }': "missing cpu",
    'problem = "tiny"': "no graph is given",
    'graph = "molecule"': "no problem is given",
    'problem = "tiny"\ngraph = "molecule"\nbudget = "soon"': "is not a duration",
    'problem = "tiny"\ngraph = "molecule"\ntrials = 0': "expected a positive integer",
    'problem = "tiny"\ngraph = "molecule"\nsampler = "tpee"': "did you mean 'tpe'",
    'problem = "tiny"\ngraph = "molecule"\ndtype = "float16"': "dtype is 'float16'",
    'problem = "tiny"\ngraph = "molecule"\ndirections = ["sideways"]': "directions are",
    'problem = "tiny"\ngraph = "molecule"\npasses = ["force_stop"]': "did you mean 'force_step'",
    'problem = "tiny"\ngraph = "molecule"\ndirections = ["forward"]\npasses = ["backward"]': "needs the directions",
    'problem = "tiny"\ngraph = "molecule"\ndeterministic = "yes"': "expected true or false",
    'problem = "tiny"\ngraph = "molecule"\n[[workload]]\nlayuot = "ir_mul"': "did you mean 'layout'",
    '[problems.a]\nin1 = "4x0q"\nin2 = "0e"\nfilter = "0e"': "is not an irreps string",
    '[problems.a]\nin1 = "4x0e"\nin2 = "0e"\nfiltre = "0e"': "did you mean 'filter'",
    '[problems.a]\nin1 = "4x0e"\nin2 = "0e"': "missing filter",
    'problem = "tiny"\n[graphs.a]\ncutoff = 3.0': "exactly one of",
    'problem = "tiny"\n[graphs.a]\ncutoff = -3.0\nmolecule = "H2O"': "expected a positive number",
    'problem = "tiny"\n[graphs.a]\ncutoff = 3.0\nrepeat = [1, 0, 1]\nmolecule = "H2O"': "three positive integers",
    'problem = "tiny"\n[graphs.a]\nnodes = 0': "graph 'a': nodes is 0; expected a positive integer",
    'problem = "tiny"\n[graphs.a]\nnodes = 5\nedges = 5': "unknown key 'nodes'",
    'problem = "tiny"\n[graphs.a]\nnodes = 5\nelements = 2': "3 elements occur; expected at most its 2 elements",
    'problem = "tiny"\n[graphs.a]\nnodes = 5': "needs nodes",
    'problem = "mace-mp-contraction-0e"\ngraph = "carbon"': "graph 'carbon' has edges",
    'problem = "mace-mp-contraction-0e"\ngraph = "21-nodes"\ndeterministic = true': "use_deterministic_algorithms",
    'graph = "21-nodes"\n[contractions.a]\nirreps_in = "0e"': "missing irreps_out, correlation, channels",
    'graph = "21-nodes"\n[contractions.a]\nirreps_in = "2x0e"\nirreps_out = "0e"\ncorrelation = 2\nchannels = 4': (
        "expected irreps of one channel"
    ),
    "problem = ": "is not valid TOML",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items())
def test_mistake_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, "cpu")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_config_suggests_a_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mace-mp-medium'"):
        load_config("mace-mp-mediun", "cpu")


def test_config_errors_are_equitune_errors() -> None:
    with pytest.raises(EquituneError, match="expected a table"):
        problems_from({"problems": {"x": 3}})


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("6m", 360.0), ("1h30m", 5400.0), (12, 12.0), ("2.5m", 150.0)]
)
def test_durations(text: str | int, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_a_duration_in_a_text_needs_a_unit() -> None:
    with pytest.raises(ConfigError, match="^'10' has no unit; type 10m for minutes or 10s for seconds$"):
        parse_duration("10")


@pytest.mark.parametrize("text", ["problem = \n", "problm = 1\n"])
def test_an_error_names_the_config_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(path, "cpu")
    assert str(raised.value).count(str(path)) == 1


def test_names_of_problems_are_known_without_their_kinds() -> None:
    for name in load_all():
        check_problem_name(name)
    with pytest.raises(ConfigError, match="unknown problem 'harmonics'; expected one of.* sh-l1"):
        check_problem_name("harmonics")
