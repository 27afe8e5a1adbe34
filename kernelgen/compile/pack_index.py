"""Checks the index of a pack once, when it is opened, so that its readers need not doubt a field.

``kernelgen/packs/cpp/index_rules.hpp`` says what each field is, and how to read that; the C++ library checks the same
rules. Beyond them, kernels lie inside of the file, and what a call names by dtype and target is a kernel of that target
that says how it is run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from kernelgen.json_data import parse_json

_RULES = Path(__file__).resolve().parents[1] / "packs" / "cpp" / "index_rules.hpp"
_MOST = (1 << 53) - 1
_INDICES = ("int32", "int64")
# Places that are valid, by what they are in.
Counts = dict[str, int]


def check_index(index: Any, code_bytes: int) -> None:
    """Raise ValueError that names the place unless the index obeys the rules. code_bytes: of all kernels together."""
    counts = {name: len(_list(index, f"{name}s")) for name in ("kernel", "operator")}
    _check(index, _rules(), "the index", counts)
    for place, kernel in enumerate(index["kernels"]):
        if kernel["offset"] + kernel["size"] > code_bytes:
            raise ValueError(f"kernel {place} is not whole")
    if len({operator["text"] for operator in index["operators"]}) < len(index["operators"]):
        raise ValueError("an operator is there twice")
    for operator in index["operators"]:
        if ("members" in operator) != ("classes" in operator):
            raise ValueError("an operator has members without classes, or classes without members")
        for part in (part for parts in operator["calls"].values() for part in parts):
            for name, place in [*part["kernels"].items(), *part["permuted"].items()]:
                _check_runnable(name, index["kernels"][place])


def _check_runnable(name: str, kernel: dict[str, Any]) -> None:
    """name: dtype of the indices and target, such as ``int64 cpu``."""
    dtype, _, target = name.partition(" ")
    rule = "threads" if target == "cpu" else "launch"
    if dtype not in _INDICES or target != kernel["target"] or rule not in kernel:
        raise ValueError(f"{name!r} of a call is a kernel for {kernel['target']!r}, or one without {rule!r}")


@functools.cache
def _rules() -> Any:
    text = _RULES.read_text(encoding="utf-8")
    return parse_json(text[text.index("(\n{") + 1 : text.rindex("}\n)") + 1])


def _check(value: Any, rule: Any, where: str, counts: Counts) -> None:
    if isinstance(rule, list):
        given = _typed(value, list, where)
        if len(given) < (rule[1] if len(rule) > 1 else 0):
            raise ValueError(f"{where} has {len(given)} items; expected at least {rule[1]}")
        for place, item in enumerate(given):
            _check(item, rule[0], f"{where}[{place}]", counts)
    elif isinstance(rule, dict):
        if "null or" not in rule:
            _check_table(_typed(value, dict, where), rule, where, counts)
        elif value is not None:
            _check(value, rule["null or"], where, counts)
    elif not _is_plain(value, rule, counts):
        raise ValueError(f"{where} is {value!r:.60}; expected {rule}")


def _check_table(table: dict[str, Any], rule: dict[str, Any], where: str, counts: Counts) -> None:
    own = counts | {"member": len(_list(table, "members"))} if "members?" in rule else counts
    known: set[str] = set()
    for names, inner in rule.items():
        optional = names.endswith("?")
        fields = sorted(set(table) - known) if names == "*" else names.removesuffix("?").split("|")
        for name in fields:
            if name in table:
                _check(table[name], inner, f"{where}.{name}", own)
            elif not optional:
                raise ValueError(f"{where} lacks {name!r}")
        known |= set(fields)
    if unknown := sorted(set(table) - known):
        raise ValueError(f"{where} has {unknown[0]!r:.60}, which is unknown")


def _is_plain(value: Any, rule: str, counts: Counts) -> bool:
    kind, _, rest = rule.partition(" ")
    if kind in counts or kind == "whole":
        least, most = (*map(int, rest.split()), _MOST)[:2] if kind == "whole" else (0, counts[kind] - 1)
        return type(value) is int and least <= value <= most
    if kind in ("any", "boolean"):
        return kind == "any" or isinstance(value, bool)
    if not isinstance(value, str):
        return False
    if kind == "letters":
        return set(value) <= set(rest)
    return kind == "text" or value in rest.removeprefix("of ").split("|")


def _typed(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {value!r:.60}; expected a {'list' if kind is list else 'table'}")
    return value


def _list(table: Any, name: str) -> list[Any]:
    """A list of a table, as far as it is one: what is not is found by the rules."""
    found = table.get(name) if isinstance(table, dict) else None
    return found if isinstance(found, list) else []
