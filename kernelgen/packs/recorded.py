"""A pack of the kernels that this process compiles or finds while it records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelgen.compile.compiler import RECORDERS
from kernelgen.compile.pack_file import target_of
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.emit.source import Source
from kernelgen.errors import InputError
from kernelgen.packs.content import Content
from kernelgen.packs.make import Written, arch_number, write_content


class Recording:
    """``written``: what :func:`recording` wrote at its end."""

    written: Written


@contextmanager
def recording(
    path: str | os.PathLike,
    *,
    cpu: str | None = None,
    archs: Sequence[str] = (),
    certificates: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Recording]:
    """Write a pack of the kernels that are loaded inside of the ``with``.

        with recording("my.pack"):
            model(batch)

    Kernels that the process loaded before are not in it: record in a new process. A GPU's kernels are compiled for its
    own architecture and for ``archs``, the newest also as PTX. Another card finds them if it would run the same
    schedules. cpu: as of ``equitune pack``. certificates: see ``kernelgen.packs.content.Content``. Raises
    InputError if no kernel was loaded, and what ``write_calls`` raises.
    """
    recorded = Recording()
    noted: list[tuple[Source, DeviceFacts]] = []

    def note(source: Source, facts: DeviceFacts) -> None:
        if not facts.is_hip:
            noted.append((source, facts))

    RECORDERS.append(note)
    try:
        yield recorded
    finally:
        RECORDERS.remove(note)
    if not noted:
        raise InputError("no kernel was loaded: run the model inside of recording, in a new process")
    own = {target_of(facts) for _, facts in noted if facts.backend == "cuda"}
    gpus = tuple(cuda_facts(arch) for arch in sorted({*archs, *own}, key=arch_number)) if own else ()
    content = Content(gpus=gpus, certificates=certificates or {})
    for source, facts in noted:
        if facts.backend == "cuda":
            content.on_gpus(source)
        else:
            content.kernel(source, target_of(facts))
    recorded.written = write_content(content, Path(path), cpu)
