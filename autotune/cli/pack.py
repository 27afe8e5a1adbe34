"""``equitune pack``: writes kernels to a file, for machines without a compiler, a writable cache or Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autotune.cli.options import examples, print_next

if TYPE_CHECKING:
    from kernelgen.packs.write import Written

PACK_EXAMPLES = examples(
    "equitune pack model.pt2 --out model.pack",
    "equitune pack mace-mp-medium --out medium.pack",
    "equitune pack --model my.model --structure mof --out my.pack",
    "equitune pack --suite --arch sm_80,sm_90 --out packs",
    "equitune pack --library libequitune.so",
)
RUNNING = "A model that runs in Python"


def pack(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]",
            help="A .pt2 file of torch.export.save or AOTInductor; a name of configs/problems.toml; or a problem key.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: WHAT with the ending .pack.")] = None,
    cpu: Annotated[
        str | None,
        typer.Option(
            help="Processors to compile for: x86-64-v3, x86-64-v4, armv8-a or native. Default: the first. Of a suite "
            "some, with commas between them; default: all of this machine's type."
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="Architectures of GPUs, with commas between them: sm_80,sm_90. With --model on a GPU."),
    ] = None,
    index: Annotated[list[str] | None, typer.Option(help="Dtype of edge indices; may be given twice.")] = None,
    library: Annotated[
        Path | None, typer.Option(help="Build the library with Equitune's operators for C++ programs, at this path.")
    ] = None,
    suite: Annotated[
        bool,
        typer.Option(
            "--suite", help="A folder of packs of the suite's problems (or of one, WHAT), for EQUITUNE_PACKS."
        ),
    ] = False,
    model: Annotated[str | None, typer.Option(help="As of equitune tune.", rich_help_panel=RUNNING)] = None,
    structure: Annotated[str | None, typer.Option(help="As of equitune tune.", rich_help_panel=RUNNING)] = None,
    training: Annotated[bool, typer.Option("--training", help="Also what training needs.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 (default of a problem) or float64.")] = None,
    operation: Annotated[Literal["conv", "plain"], typer.Option(help="Of a problem: over a graph, or plain.")] = "conv",
    layout: Annotated[Literal["mul_ir", "ir_mul"], typer.Option(help="Of a problem's features.")] = "mul_ir",
) -> None:
    """Write compiled kernels to one file, which needs neither compiler, cache nor Python to run."""
    from autotune.errors import ConfigError

    archs = tuple(filter(None, (arch or "").split(",")))
    if suite and not (model or library):
        _suite(out or Path("packs"), archs, cpu, what, training)
        return
    given = [text for text in (what, model, library and str(library), suite and "--suite") if text]
    if len(given) != 1:
        raise ConfigError(f"{len(given)} things say what to write; expected one of WHAT, --model, --library, --suite")
    if library is not None:
        from kernelgen.packs.library import build_library

        print(f"{build_library(library)}: operators of Equitune for torch 2.10 and later")
        return
    indices = tuple(index or ("int64",))
    if model is not None:
        from autotune.cli.packing import write_of_model

        path = out or Path(model.replace(":", "-")).with_suffix(".pack")
        written = write_of_model(model, structure, path, dtype=dtype, training=training, cpu=cpu, archs=archs)
    else:
        assert what is not None
        path = out or Path(Path(what).name if what.endswith(".pt2") else what.replace("|", "-")).with_suffix(".pack")
        written = _of_file_or_problem(
            what, path, cpu, archs, indices, (operation, dtype or "float32", layout), training
        )
    told = f"{written.kernels} kernels ({written.certified} with a certificate)"
    print(f"{written.path}: {told}, {written.size / 1024:.0f} KiB")
    print_next(f"EQUITUNE_PACK={written.path} before your program")


def _suite(folder: Path, archs: tuple[str, ...], cpu: str | None, name: str | None, training: bool) -> None:
    import platform

    from autotune.cli.packing import suite, write_suite
    from kernelgen.compile.host import LEVELS

    levels = cpu.split(",") if cpu else list(LEVELS.get(platform.machine(), ["native"]))
    size = kernels = 0
    for path, count in write_suite(folder, suite(name), archs, levels, training):
        size, kernels = size + path.stat().st_size, kernels + count
        print(f"{path.name}: {count} kernels, {path.stat().st_size / 1024:.0f} KiB", flush=True)
    print(f"{folder}: {kernels} kernels, {size / 1024**2:.1f} MiB")
    print_next(f"EQUITUNE_PACKS={folder} before your program; a wheel that is built beside a folder packs carries it")


def _of_file_or_problem(
    what: str,
    path: Path,
    cpu: str | None,
    archs: tuple[str, ...],
    indices: tuple[str, ...],
    of_problem: tuple[str, str, str],
    training: bool,
) -> Written:
    from autotune.cli.packing import certificates
    from kernelgen.packs.write import write_calls

    nodes: tuple[str, ...] = ()
    if what.endswith(".pt2") or Path(what).is_file():
        from kernelgen.packs.write import calls_in

        calls = calls_in(what)
    else:
        from autotune.cli.packing import calls_of

        calls = calls_of(what, *of_problem, archs=archs, training=training)
        nodes = (of_problem[1],)
    return write_calls(calls, path, cpu=cpu, archs=archs, indices=indices, certificates=certificates(), nodes=nodes)
