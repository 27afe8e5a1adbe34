"""A made-up kind: rows of so many elements, doubled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Doubling:
    size: int

    @property
    def key(self) -> str:
        return f"doubling|{self.size}"

    @classmethod
    def from_key(cls, key: str) -> Doubling:
        return cls(int(key.split("|")[1]))
