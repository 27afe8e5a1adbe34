"""The problem of spherical harmonics: degrees, normalization, and whether the vector is normalized first."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.errors import ProblemError

NORMALIZATIONS = ("integral", "component", "norm")
MAX_DEGREE = 12  # e3nn's


@dataclass(frozen=True)
class HarmonicsProblem:
    """The harmonics ``e3nn.o3.spherical_harmonics(degrees, v, normalize, normalization)``.

    degrees: l of each output block, each 0..12, in any order, repeats allowed. normalization: a block's length on the
    sphere is sqrt(2l+1) (``component``), 1 (``norm``) or sqrt((2l+1) / 4 pi) (``integral``). normalize: divide v by its
    length first. Raises ProblemError for any other value.
    """

    degrees: tuple[int, ...]
    normalization: str
    normalize: bool

    def __post_init__(self) -> None:
        degrees = tuple(self.degrees) if isinstance(self.degrees, tuple | list) else ()
        if not degrees or not all(type(degree) is int and 0 <= degree <= MAX_DEGREE for degree in degrees):
            raise ProblemError(
                f"degrees is {self.degrees!r}; expected one or more integers of 0..{MAX_DEGREE}, for example (0, 1, 2)"
            )
        object.__setattr__(self, "degrees", degrees)
        if self.normalization not in NORMALIZATIONS:
            raise ProblemError(f"normalization is {self.normalization!r}; choose one of {NORMALIZATIONS}")
        if not isinstance(self.normalize, bool):
            raise ProblemError(f"normalize is {self.normalize!r}; pass True (unit vectors) or False (raw vectors)")

    @property
    def dim_out(self) -> int:
        """Components of a row: the sum of 2l+1."""
        return sum(2 * degree + 1 for degree in self.degrees)

    @property
    def l_max(self) -> int:
        return max(self.degrees)

    @property
    def key(self) -> str:
        """Stable text such as ``sh|0,1,2|component|normalize`` (or ``|raw``), readable by :meth:`from_key`."""
        mode = "normalize" if self.normalize else "raw"
        return f"sh|{','.join(map(str, self.degrees))}|{self.normalization}|{mode}"

    @classmethod
    def from_key(cls, key: str) -> HarmonicsProblem:
        """Inverse of :attr:`key`; ProblemError if the text is not a key."""
        parts = key.split("|")
        if len(parts) == 4 and all(degree.isdecimal() for degree in parts[1].split(",")):
            problem = cls(tuple(map(int, parts[1].split(","))), parts[2], parts[3] == "normalize")
            if problem.key == key:
                return problem
        raise ProblemError(
            f"{key!r} is not a key of harmonics; expected 'sh|0,1,2|normalization|normalize' or '...|raw'"
        )
