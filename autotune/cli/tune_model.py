"""``equitune tune --model`` and ``--misses``, and ``equitune show --misses``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from autotune.cli.options import Interrupts, print_next

if TYPE_CHECKING:
    from autotune.tune.model import ModelTuning

FROM_MODEL = "A model instead of a config"

Model = Annotated[
    str | None,
    typer.Option(
        help="A file of MACE, NequIP or SevenNet, the name of a published model, or module:function, which returns a "
        "model, or a model and its inputs.",
        rich_help_panel=FROM_MODEL,
    ),
]
Structure = Annotated[
    str | None,
    typer.Option(
        help="The atoms on which it runs: a file that ase reads, or a name such as mof.", rich_help_panel=FROM_MODEL
    ),
]
Training = Annotated[bool, typer.Option("--training", help="Also tune a training step.", rich_help_panel=FROM_MODEL)]
Dtype = Annotated[
    str | None,
    typer.Option(help="Run the model in float32 or float64. Default: as in the file.", rich_help_panel=FROM_MODEL),
]
Misses = Annotated[
    bool,
    typer.Option("--misses", help="Tune what running models asked for and did not find.", rich_help_panel=FROM_MODEL),
]


class ModelRun(NamedTuple):
    """What ``--model`` and its options say."""

    model: str
    structure: str | None
    dtype: str | None
    training: bool


def check_choice(
    config: str | None,
    model: str | None,
    only_with_model: Mapping[str, Any],
    misses: bool,
    only_with_config: Mapping[str, Any],
) -> None:
    """ConfigError unless exactly one thing says what to tune, and all options fit it; they are given by name."""
    from autotune.errors import ConfigError

    chosen = [text for text, given in (("CONFIG", config), ("--model", model), ("--misses", misses)) if given]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "nothing"
        raise ConfigError(f"{found} says what to tune; expected one of CONFIG, --model MODEL and --misses")
    for options, needed in ((only_with_model, "--model"), (only_with_config, "CONFIG")):
        wrong = [name for name, value in options.items() if value]
        if wrong and chosen != [needed]:
            raise ConfigError(f"{wrong[0]} goes with {needed}, not with {chosen[0]}; leave it out")


def tune_from_model(
    run: ModelRun, device: str, seconds: float | None, results: Path, search: Mapping[str, Any]
) -> tuple[ModelTuning, bool]:
    """The printed result, and whether the user interrupted the run. search: options of ``run.tune``."""
    import time

    begin = time.monotonic()
    from autotune.tune.model import DEFAULT_BUDGET_S, tune_passes
    from autotune.tune.model_passes import open_named

    opened = open_named(run.model, run.structure, device, run.dtype, run.training)
    if opened.replaced:
        print(opened.replaced, flush=True)
    left = (seconds or DEFAULT_BUDGET_S) - (time.monotonic() - begin)
    with Interrupts() as interrupts:
        found = tune_passes(
            *(opened.model, opened.passes, left, search, results),
            name=opened.name,
            graph=opened.graph,
            stopped=lambda: interrupts.seen,
            on_found=_say_what_is_left,
        )
    print(found, flush=True)
    return found, interrupts.seen


def tune_from_misses(
    device: str, seconds: float | None, results: Path, search: Mapping[str, Any]
) -> tuple[ModelTuning, bool]:
    """As :func:`tune_from_model`."""
    from autotune.tune.model import DEFAULT_BUDGET_S, tune_misses

    with Interrupts() as interrupts:
        found = tune_misses(device, seconds or DEFAULT_BUDGET_S, search, results, on_found=_say_what_is_left)
    print(found, flush=True)
    return found, interrupts.seen


def show_misses(device: str) -> None:
    """Print what running models missed on a device."""
    from autotune.database.misses import misses_path
    from autotune.tune.model import ModelTuning, missed
    from kernelgen.device import device_facts

    facts = device_facts(device)
    needs = missed(facts)
    if not needs:
        print(f"no model missed a tuned kernel on {facts.name} ({misses_path(facts.slug)})")
        return
    print(ModelTuning("missed by models", facts.name, needs, needs, {}))
    print_next("equitune tune --misses")


def _say_what_is_left(found: ModelTuning) -> None:
    print(f"{found.name}: {len(found.before)} kernels, {found.left} not tuned on {found.device}", flush=True)
