"""What :func:`autotune.accelerate` did to a model, as a table."""

from __future__ import annotations

from dataclasses import dataclass

# In the order in which the table names them.
CONVOLUTIONS, CONTRACTIONS, PRODUCTS, LINEARS, RADIALS, ARRANGEMENTS, HARMONICS, CUTOFFS = KIND_NAMES = (
    *("convolutions", "symmetric contractions", "tensor products", "linear layers", "radial networks"),
    *("reshapes and gates", "spherical harmonics", "cutoffs"),
)
# What an accelerated model raises an UnsupportedError for, and stock does not.
REFUSED = "third derivatives, TorchScript"


@dataclass(frozen=True)
class Place:
    """One module of e3nn or a package: its name in the model, whether it was replaced, and with what or why not.

    kind: one of ``KIND_NAMES``.
    """

    name: str
    module: str
    replaced: bool
    detail: str
    kind: str = PRODUCTS


@dataclass(frozen=True)
class Acceleration:
    """Every tensor product and spherical harmonics module of a model, and what else changed; prints as a table.

    note: a remark on the model, such as why no module was found.
    """

    places: tuple[Place, ...]
    note: str = ""

    @property
    def replaced(self) -> int:
        return sum(place.replaced for place in self.places)

    def __str__(self) -> str:
        """How many of each kind, then the modules' names; those with one reason share it."""
        lines = [f"{self._counts()} replaced{self.note and f': {self.note}'}"]
        groups: dict[tuple[bool, str], list[str]] = {}
        for place in sorted(self.places, key=lambda place: (not place.replaced, KIND_NAMES.index(place.kind))):
            groups.setdefault((place.replaced, place.detail), []).append(place.name)
        for (replaced, detail), names in groups.items():
            lines += [f"{'replaced' if replaced else 'kept':8}  {', '.join(names)}", f"          {detail}"]
        if self.replaced:
            lines += [f"{'refused':8}  {REFUSED}", "          autotune.restore(model) makes the model stock again"]
        return "\n".join(lines)

    def _counts(self) -> str:
        """Such as ``2 of 2 convolutions and 1 of 2 tensor products``."""
        counts = []
        for kind in KIND_NAMES:
            found = [place.replaced for place in self.places if place.kind == kind]
            if found or (kind == PRODUCTS and not self.places):
                counts.append(f"{sum(found)} of {len(found)} {kind}")
        return " and ".join(filter(None, (", ".join(counts[:-1]), counts[-1])))
