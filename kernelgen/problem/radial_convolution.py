"""The problem of a convolution whose edge weights are products ``h @ matrix``, formed where they are used."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.errors import ProblemError
from kernelgen.problem.tensor_product import TensorProductProblem

# Products of half precision by accuracy class: ``ieee`` takes three of high and low parts, ``tf32`` one.
PRODUCTS = {"ieee": 3, "tf32": 1}
_KIND = "rc"


@dataclass(frozen=True)
class RadialProblem:
    """A product with weights of each edge, the number of hidden features h, and the accuracy class of ``h @ matrix``.

    Raises ProblemError for another class, for no hidden features and for shared weights.
    """

    product: TensorProductProblem
    hidden: int
    accuracy: str = "ieee"

    def __post_init__(self) -> None:
        if self.accuracy not in PRODUCTS:
            raise ProblemError(f"accuracy is {self.accuracy!r}; expected one of {tuple(PRODUCTS)}")
        if type(self.hidden) is not int or self.hidden < 1:
            raise ProblemError(f"hidden is {self.hidden!r}; expected a positive integer, the width of h")
        if self.product.shared_weights:
            raise ProblemError("the product has shared weights; expected weights of each edge")

    @property
    def key(self) -> str:
        """Stable text such as ``rc|64|ieee|uvu|...``, readable by :meth:`from_key`."""
        return f"{_KIND}|{self.hidden}|{self.accuracy}|{self.product.key}"

    @classmethod
    def from_key(cls, key: str) -> RadialProblem:
        """Inverse of :attr:`key`; ProblemError if the text is not a key."""
        kind, hidden, accuracy, product = (*key.split("|", 3), "", "", "")[:4]
        if kind != _KIND or not hidden.isdecimal():
            raise ProblemError(f"{key!r} is not a key of a radial convolution; expected '{_KIND}|64|ieee|uvu|...'")
        return cls(TensorProductProblem.from_key(product), int(hidden), accuracy)

    @staticmethod
    def owns_key(key: str) -> bool:
        """Whether a text looks like a key of such a problem."""
        return key.startswith(f"{_KIND}|")
