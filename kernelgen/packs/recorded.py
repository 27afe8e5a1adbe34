"""A pack of the kernels that this process compiles or finds while it records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelgen.compile.compiler import RECORDERS
from kernelgen.compile.pack_file import target_of
from kernelgen.device import DeviceFacts
from kernelgen.emit.source import Source
from kernelgen.errors import InputError
from kernelgen.packs.content import Content
from kernelgen.packs.make import Written, write_content


class Recording:
    """``written``: what :func:`recording` wrote at its end."""

    written: Written


@contextmanager
def recording(
    path: str | os.PathLike, *, cpu: str | None = None, certificates: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Recording]:
    """Write a pack of the kernels for the CPU that are loaded inside of the ``with``.

        with recording("my.pack"):
            model(batch)

    Kernels that the process loaded before are not in it: record in a new process. cpu: as of ``equitune pack``.
    certificates: see ``kernelgen.packs.content.Content``. Raises
    InputError if no kernel was loaded, and what ``write_calls`` raises.
    """
    content, recorded = Content(certificates=certificates or {}), Recording()

    def note(source: Source, facts: DeviceFacts) -> None:
        if facts.backend == "cpu":
            content.kernel(source, target_of(facts))

    RECORDERS.append(note)
    try:
        yield recorded
    finally:
        RECORDERS.remove(note)
    if not content.kernels:
        raise InputError("no kernel for the CPU was loaded: run the model inside of recording, in a new process")
    recorded.written = write_content(content, Path(path), cpu)
