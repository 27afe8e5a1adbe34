"""What :func:`autotune.accelerate` did to a model, as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One e3nn module: its name in the model, whether it was replaced, and with what or why not.

    kind: ``tensor products`` or ``spherical harmonics``.
    """

    name: str
    module: str
    replaced: bool
    detail: str
    kind: str = "tensor products"


@dataclass(frozen=True)
class Acceleration:
    """Every e3nn tensor product and spherical harmonics module of a model; prints as a table.

    note: a remark on the model, such as why no module was found.
    """

    places: tuple[Place, ...]
    note: str = ""

    @property
    def replaced(self) -> int:
        return sum(place.replaced for place in self.places)

    def __str__(self) -> str:
        counts = []
        for kind in dict.fromkeys(("tensor products", *(place.kind for place in self.places))):
            found = [place.replaced for place in self.places if place.kind == kind]
            counts.append(f"{sum(found)} of {len(found)} e3nn {kind}")
        lines = [f"{' and '.join(counts)} replaced{self.note and f': {self.note}'}"]
        width = max((len(place.name) for place in self.places), default=0)
        for place in self.places:
            lines.append(f"{place.name:{width}}  {'replaced' if place.replaced else 'kept':8}  {place.detail}")
        return "\n".join(lines)
