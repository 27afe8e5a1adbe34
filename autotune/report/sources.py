"""Sources of a page's kernels, in one compressed block.

The present generator writes them from the problem, the schedule and the stored device facts, without compiling or a
device. If the source has changed since the row was measured, the page says so.

A page has hundreds of sources of a hundred kilobytes, which share most lines. So the block stores each line once, and a
source as copies from earlier sources: a twentieth of the size of separately deflated sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.report.markup import WAITING, Markup, block, join, tag
from autotune.text import direction_name
from kernelgen.errors import EquituneError
from kernelgen.version import GENERATOR_VERSION

KERNEL = ("problem", "operation", "dtype", "layout")
# Id of the element that the page's script unpacks.
BLOCK = "sources"
# Number of latest positions of a line at which to search for a longer copy.
CANDIDATES = 8


@dataclass(frozen=True)
class KernelSource:
    """One kernel's source. hash: as in database entries."""

    hash: str
    text: str


@dataclass(frozen=True)
class Sources:
    """The source of each kernel by key, or why there is none."""

    by_kernel: Mapping[str, KernelSource | str] = field(default_factory=dict)

    def of(self, record: Mapping[str, Any], schedules: Mapping[str, Any]) -> Markup | None:
        """A closed ``details`` for each direction of a row; ``schedules``: direction to knobs."""
        shown = [
            _opened(direction, self.by_kernel[key], record.get("generator"))
            for direction, knobs in schedules.items()
            if (key := _key(record, direction, knobs)) in self.by_kernel
        ]
        return join(shown) if shown else None

    def written(self, record: Mapping[str, Any], schedules: Mapping[str, Any]) -> bool:
        """Whether any direction of a row has a source."""
        found = (self.by_kernel.get(_key(record, *given)) for given in schedules.items())
        return any(isinstance(source, KernelSource) for source in found)

    def packed(self) -> Markup | None:
        """All sources in an inert element; None if there are none."""
        texts = {found.hash: found.text for found in self.by_kernel.values() if isinstance(found, KernelSource)}
        return block(BLOCK, pack(texts)) if texts else None


def pack(texts: Mapping[str, str]) -> dict[str, Any]:
    """Compress texts. ``lines``: new lines. ``copies``: for each name [back, count, back, count, ...], in order.

    Each pair of a text appends ``count`` lines: copied from ``back`` lines before the end of all texts so far, or, if
    ``back`` is 0, the next ones of ``lines``.
    """
    written: list[str] = []
    places: dict[str, list[int]] = {}
    lines: list[str] = []
    copies: dict[str, list[int]] = {}
    for name, text in texts.items():
        pairs = copies.setdefault(name, [])
        given, start = text.split("\n"), 0
        while start < len(given):
            count, place = _longest(given, start, written, places.get(given[start], ())[-CANDIDATES:])
            back, count = (len(written) - place, count) if count else (0, 1)
            if back == 0:
                lines.append(given[start])
            if back == 0 and pairs and pairs[-2] == 0:
                pairs[-1] += 1
            else:
                pairs += [back, count]
            for line in given[start : start + count]:
                places.setdefault(line, []).append(len(written))
                written.append(line)
            start += count
    return {"lines": lines, "copies": copies}


def _longest(given: Sequence[str], start: int, written: Sequence[str], places: Iterable[int]) -> tuple[int, int]:
    """Length and place of the longest match of the lines from ``start`` on, among ``places`` (the first if tied)."""
    best, found = 0, 0
    for place in places:
        count = 0
        while (
            start + count < len(given)
            and place + count < len(written)
            and (given[start + count] == written[place + count])
        ):
            count += 1
        if count > best:
            best, found = count, place
    return best, found


def write_sources(kernels: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], device: Mapping[str, Any]) -> Sources:
    """Sources of every (row, its schedules by direction); ``device``: record of the device that measured them."""
    found: dict[str, KernelSource | str] = {}
    for record, schedules in kernels:
        for direction, knobs in schedules.items():
            key = _key(record, direction, knobs)
            if key not in found:
                found[key] = _write(record, direction, knobs, device)
    return Sources(found)


def _key(record: Mapping[str, Any], direction: str, knobs: Any) -> str:
    kernel = (*(record.get(name) for name in KERNEL), record.get("deterministic") is True, direction, knobs)
    return json.dumps(kernel, sort_keys=True, default=str)


def _write(record: Mapping[str, Any], direction: str, knobs: Any, device: Mapping[str, Any]) -> KernelSource | str:
    from autotune.database.maintenance import facts_of_record, hash_of_text, source_text
    from autotune.workload.config import find_problem
    from autotune.workload.kinds.registry import kernel_kind

    named = [record.get(name) for name in KERNEL]
    if not all(isinstance(name, str) for name in named) or not isinstance(knobs, dict):
        return f"the row describes its kernel by {named} and the knobs {knobs}, which is not complete"
    problem, operation, dtype, layout = (str(name) for name in named)
    try:
        kind = kernel_kind(operation)
        if direction not in kind.directions:
            return f"direction {direction!r} is not among {tuple(kind.directions)}"
        kernel = (find_problem(problem), operation, direction, dtype, layout, record.get("deterministic") is True)
        text = source_text(*kernel, kind.read(knobs), facts_of_record(device))
    except EquituneError as error:
        return str(error)
    return KernelSource(hash_of_text(text), text)


def _opened(direction: str, source: KernelSource | str, measured: Any) -> Markup:
    what = f"Source, {direction_name(direction)}"
    if isinstance(source, str):
        reason = f"{what}: generator {GENERATOR_VERSION} cannot write it: {source}"
        return tag("p", reason, class_="hint")
    note = f"SHA-256 {source.hash}\N{HORIZONTAL ELLIPSIS}, written by generator {GENERATOR_VERSION}"
    if measured != GENERATOR_VERSION:
        note += f"; measured with generator {measured or 'unknown'}, whose text may differ"
    return tag(
        "details",
        tag("summary", f"{what}: {len(source.text.splitlines()):,} lines"),
        tag("p", note, class_="hint"),
        tag("pre", tag("code", WAITING), tabindex="0", aria_label=what),
        class_="source",
        data_source=source.hash,
    )
