"""Makes Equitune's docstrings ready for the site: a griffe extension, which mkdocstrings calls for each object.

In: a docstring whose lines ``name: what it is`` tell of parameters or fields, with references such as ``:func:`name```.
Out: those lines as a list, and the references as code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

REFERENCE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`~?([^`]+)`")
TOLD = re.compile(r"^(\w+(?:, \w+)*): ")
# After another one on the same line; and what a list of them ends with.
LATER = re.compile(r"(?<=\. )(?:(\w+(?:, \w+)*): |Raises )")
POWER = re.compile(r"(?<=\d)\*\*(?=\d)")


class Docstrings(griffe.Extension):
    """Rewrites the docstring of each function and class."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        rewrite(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        init = cls.members.get("__init__")
        names = {parameter.name for parameter in init.parameters} if isinstance(init, griffe.Function) else set()
        names |= {name for name, member in cls.members.items() if member.is_attribute}
        text = cls.docstring.value if cls.docstring else ""
        # The constructor of a base is not known yet: names with an underscore are those of its parameters.
        rewrite(cls, names if init else names | {name for name in re.findall(r"\w+", text) if "_" in name})

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        rewrite(attr, set())

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        rewrite(mod, set())


def rewrite(thing: griffe.Object, names: set[str]) -> None:
    if thing.docstring is not None:
        thing.docstring.value = markdown_of(thing.docstring.value, names)


def markdown_of(text: str, names: set[str]) -> str:
    """A docstring as Markdown; ``names`` are those of parameters and fields."""
    lines: list[str] = []
    is_listed = False
    for line in POWER.sub("^", REFERENCE.sub(r"`\1`", text)).splitlines():
        if not line.strip():
            is_listed = False
        for part in parts_of(line, names):
            found = TOLD.match(part)
            if found and told_names(found[1]) <= names:
                if lines and lines[-1].strip() and not is_listed:
                    lines.append("")
                part = f"- **{found[1]}**: {part[found.end() :]}"
                is_listed = True
            elif is_listed and part.startswith("Raises "):
                lines.append("")
                is_listed = False
            elif is_listed and part.strip():
                part = f"  {part}"
            lines.append(part)
    return "\n".join(lines)


def parts_of(line: str, names: set[str]) -> list[str]:
    """A line, cut before each parameter that is told of after another one, and before what is raised."""
    if line.startswith(" "):
        return [line]
    parts, begin = [], 0
    for found in LATER.finditer(line):
        if found[1] is None or told_names(found[1]) <= names:
            parts.append(line[begin : found.start()].rstrip())
            begin = found.start()
    return [*parts, line[begin:]]


def told_names(text: str) -> set[str]:
    return set(text.split(", "))
