"""The calls of Equitune's operators in an exported model, read from its file without loading it.

A package of AOTInductor names them in the JSON of the calls that it leaves to torch's dispatcher; a program of
``torch.export.save`` names them in its graph. Both are zip archives, and both write a call as a ``target`` and its
``inputs`` by name.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernelgen.errors import PackError, cause_of
from kernelgen.json_data import parse_json
from kernelgen.packs.calls import Call

_TANGENTS = ("tx", "ty", "tw")


def calls_in(path: str | os.PathLike) -> list[Call]:
    """The different calls of a ``.pt2`` file, in their order. PackError if it is none, or has no such calls."""
    found: dict[Call, None] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    found |= dict.fromkeys(_calls(parse_json(archive.read(name))))
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise PackError(
            f"{Path(path)} cannot be read ({cause_of(error)}); expected a .pt2 file of torch.export.save or "
            "torch._inductor.aoti_compile_and_package"
        ) from error
    if not found:
        raise PackError(f"{Path(path)} calls no operator of Equitune; export the model after accelerate(model)")
    return list(found)


def _calls(data: Any) -> Iterator[Call]:
    """All calls in the JSON of a file, at whatever depth."""
    if isinstance(data, list):
        for one in data:
            yield from _calls(one)
    elif isinstance(data, dict):
        target = data.get("target")
        if isinstance(target, str) and "equitune" in target and isinstance(data.get("inputs"), list):
            yield _call(target, data["inputs"])
        else:
            for one in data.values():
                yield from _calls(one)


def _call(target: str, inputs: list[dict[str, Any]]) -> Call:
    """The call of ``torch.ops.equitune.tp_forward.default`` or ``equitune::tp_forward``."""
    op = target.replace("::", ".").split("equitune.")[-1].split(".")[0]
    arguments = {given["name"]: given["arg"] for given in inputs}
    tangents = "".join(name[1] for name in _TANGENTS if _is_given(arguments.get(name)))
    outputs = arguments.get("outputs", {}).get("as_string", "")
    return Call(op, arguments["spec"]["as_string"], tangents, outputs)


def _is_given(argument: dict[str, Any] | None) -> bool:
    """Whether an optional tensor is there: neither left out nor None."""
    if argument is None or "as_none" in argument:
        return False
    inner = argument.get("as_optional_tensor")
    return inner is None or "as_none" not in inner
