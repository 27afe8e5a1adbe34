"""Models exported with energies and forces inside, compiled by AOTInductor and run by a C++ program without Python."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ase import Atoms
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.models.lammps import write_package
from kernelgen.packs.library import build_library, source_folder, with_plain_sums
from kernelgen.packs.write import calls_in, write_calls

Tensors = tuple[torch.Tensor, ...]


def export(function: Callable[..., Any], inputs: Tensors, shapes: Sequence[dict], path: Path) -> None:
    """Trace a function that differentiates inside, and compile it.

    shapes: dynamic dimensions of each input.
    """
    traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*(t.clone() for t in inputs))
    program = torch.export.export(with_plain_sums(traced), inputs, dynamic_shapes=tuple(shapes))
    write_package(program, path, inputs[0].device, {})


# The dynamic dimension of an input by its name: which axis has atoms, or edges.
Dimensions = Mapping[str, int]


class ExportedModel:
    """A model's energies and forces, traced with their differentiation inside, and compiled by AOTInductor.

    step: of tensors, the energies and forces. inputs: the tensors of a structure, by name in a fixed order. atoms,
    edges: the axis of some inputs that has atoms, or edges. path: of the package.
    """

    def __init__(
        self,
        folder: Path,
        step: Callable[[Mapping[str, torch.Tensor]], Tensors],
        inputs: Callable[[Atoms], Mapping[str, torch.Tensor]],
        example: Atoms,
        atoms: Dimensions,
        edges: Dimensions,
    ) -> None:
        self._step, self._inputs, self.path = step, inputs, folder / "model.pt2"
        self.names = tuple(inputs(example))
        dims = {
            **dict.fromkeys(atoms, torch.export.Dim("atoms", min=2)),
            **dict.fromkeys(edges, torch.export.Dim("edges", min=2)),
        }
        axes = {**atoms, **edges}
        shapes = [{axes[name]: dims[name]} if name in dims else {} for name in self.names]
        export(self.step, self.inputs(example), shapes, self.path)

    def inputs(self, atoms: Atoms) -> Tensors:
        return tuple(tensor.detach() for tensor in self._inputs(atoms).values())

    def step(self, *tensors: torch.Tensor) -> Tensors:
        return self._step(dict(zip(self.names, tensors, strict=True)))


def built(source: str, folder: Path) -> Path:
    """A program of ``kernelgen/packs/cpp`` that links torch."""
    home, program = Path(torch.__file__).parent, folder / source.removesuffix(".cpp")
    command = [
        *(*shlex.split(os.environ.get("CXX", "g++")), "-std=c++20", "-O1"),
        *(str(source_folder() / source), "-o", str(program)),
        *(f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"),
        # Compiled models ask for libtorch.so by name, to which the program itself refers nowhere; nor to the GPU's.
        *(f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"),
        # A compiler that links its own C++ library and unwinder statically would end the program by a signal: the model
        # goes through two copies of std::locale, and the first error has no text.
        *("-lc10", "-ldl", "-l:libstdc++.so.6", "-lgcc_s"),
    ]
    if torch.version.cuda:  # its own libraries are found when it is loaded
        command += ["-ltorch_cuda", "-Wl,--allow-shlib-undefined"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    require_no_python(program)
    return program


def require_no_python(program: Path) -> None:
    """It links no Python, and has no C++ library of its own for others to find."""
    linked = subprocess.run(["ldd", str(program)], check=True, capture_output=True, text=True).stdout
    assert "libpython" not in linked and "libtorch_python" not in linked
    names = ["nm", "--dynamic", "--defined-only", "--demangle", str(program)]
    shared = subprocess.run(names, check=True, capture_output=True, text=True).stdout
    assert "std::locale" not in shared


def without_caches(folder: Path, pack: Path) -> dict[str, str]:
    """The environment of a program that finds kernels in a pack, no compiler, and no folder to write to.

    Home and cache would be under a file, so that root cannot make them either, nor the CUDA driver its own cache.
    """
    (folder / "nowhere").touch()
    nowhere = str(folder / "nowhere" / "cache")
    return {"PATH": "", "HOME": nowhere, "EQUITUNE_CACHE": nowhere, "EQUITUNE_PACK": str(pack)}


class Program:
    """The example program and the library, built in a folder; ``run`` runs a model there that was exported to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, build_library(folder / "libequitune.so")
        built("run_model.cpp", folder)

    def run(self, model: Path, inputs: Tensors, pack: Path | None = None) -> list[torch.Tensor]:
        """Outputs of a model whose kernels come from a pack. No cache can be written, and there is no compiler.

        On a GPU if the inputs are there.
        """
        on_gpu = inputs[0].is_cuda
        archs = ["sm_{}{}".format(*torch.cuda.get_device_capability())] if on_gpu else []
        pack = pack or write_calls(calls_in(model), model.with_suffix(".pack"), archs=archs).path
        torch.save([tensor.cpu() for tensor in inputs], self.folder / "inputs.pt")
        environment = without_caches(self.folder, pack)
        if on_gpu and "LD_LIBRARY_PATH" in os.environ:  # where the driver may be
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        command = [str(self.folder / "run_model"), str(model), str(self.library), "inputs.pt", "outputs.pt"]
        command += ["cuda:0"] if on_gpu else []
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        # A signal ends it without a word: then the code is negative, and what was printed says how far it came.
        assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
        assert "Python absent" in done.stdout, done.stdout
        print(done.stdout.strip(), "with", pack.stat().st_size >> 10, "KiB of kernels")
        return torch.load(self.folder / "outputs.pt", weights_only=False)


def check_without_python(
    folder: Path, export: Callable[[], ExportedModel], structures: Sequence[Atoms], tolerance: float
) -> None:
    """Energies and forces of a program without Python are Python's; tolerance: of the largest energy, and force.

    export: writes the model, while the program is built.
    """
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(Program, folder)
        exported, program = export(), building.result()
    for structure in structures:
        inputs = exported.inputs(structure)
        found = program.run(exported.path, inputs)
        for name, a, b in zip(("energy", "forces"), found, exported.step(*inputs), strict=True):
            error = float((a - b.cpu()).abs().max() / b.abs().max())
            print(f"{inputs[0].device} {a.dtype} {len(structure)} atoms: {name} differs by {error:.1e}")
            assert a.shape == b.shape and error <= tolerance, name


def have_the_compiler_link_its_own_library(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let ``g++`` link its C++ library and unwinder statically, as compilers that are newer than the system do."""
    compiler, program = shutil.which("g++"), folder / "bin" / "g++"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -c "*|*c++-header*|*" -E "*) exec ' + f'{compiler} "$@";; esac\n'
        f'exec {compiler} -static-libstdc++ -static-libgcc "$@"\n'
    )
    program.chmod(0o755)
    patch.delenv("CXX", raising=False)
    patch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))


def check_errors_are_said(folder: Path) -> None:
    """An operator's error reaches the program, in a folder of :func:`check_without_python`.

    Where model and program have unwinders of their own, the program would be aborted, without a word.
    """
    command = ["./run_model", "model.pt2", "./libequitune.so", "inputs.pt", "outputs.pt"]
    environment = without_caches(folder, folder / "none.pack")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "none.pack cannot be read" in done.stderr, (done.returncode, done.stderr)
