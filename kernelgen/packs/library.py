"""Builds the shared library with the operators ``equitune::*``, which C++ programs load instead of Python."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path

import torch

from kernelgen.compile.host import COMPILE_LIMIT_S, build, find_host_compiler
from kernelgen.errors import PackError, UnsupportedError, cause_of

# The first torch whose stable ABI has what the library uses; one that is built for it runs with all later ones.
OLDEST_TORCH = (2, 10)


def source_folder() -> Path:
    """The folder of the library's C++ sources."""
    return Path(str(resources.files("kernelgen.packs").joinpath("cpp")))


def build_library(path: str | os.PathLike) -> Path:
    """Compile the library against the installed torch's headers, with torch's stable ABI of 2.10.

    Raises UnsupportedError for an older torch, ToolMissingError without a C++ compiler, CompileError with its log, and
    PackError if the file cannot be written.
    """
    found = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in torch.__version__.split(".")[:2])
    if found < OLDEST_TORCH:
        raise UnsupportedError(f"torch is {torch.__version__}; the library needs the headers of torch 2.10 or later")
    compiler, home = find_host_compiler(), Path(torch.__file__).parent
    version = OLDEST_TORCH[0] << 56 | OLDEST_TORCH[1] << 48
    flags = (
        *compiler.arguments,
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        *(f"-DTORCH_TARGET_VERSION={version:#x}ULL", f"-I{source_folder()}"),
        *(f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"),
        # Errors are thrown through torch's code, so both need one unwinder. A C++ library that the compiler links
        # statically must stay private: mixed with the process's own it ends it.
        *(f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-lgcc_s", "-Wl,--exclude-libs,ALL"),
    )
    text = (source_folder() / "operators.cpp").read_text()
    data = build(compiler, text, "operators.cpp", "libequitune.so", flags, limit_s=COMPILE_LIMIT_S)
    out = Path(path)
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as fresh:
            fresh.write(data)
        Path(fresh.name).chmod(0o755)
        shutil.move(fresh.name, out)
    except OSError as error:
        raise PackError(f"{out} cannot be written ({cause_of(error)}); name another file") from error
    return out
