"""The problem of a tensor product, in e3nn's terms: irreps and instructions as one frozen, hashable value.

Also that of a convolution whose edge weights are products ``h @ matrix``, formed where they are used; and what the
speed of a kernel depends on.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen.compat import o3
from kernelgen.errors import ProblemError
from kernelgen.problem.irreps import MODES, Block, Instruction, Irreps, Mode, blocks_of, parse_irreps

NORMALIZATIONS = {"irrep": ("component", "norm", "none"), "path": ("element", "path", "none")}


@dataclass(frozen=True)
class Path:
    """One resolved path: ``coefficient`` is e3nn's path and irrep normalisation, ``weight_offset`` its first weight.

    mul: channels of the first input. mode, has_weight: from the instruction.
    """

    index: int
    in1: int
    in2: int
    out: int
    mul: int
    coefficient: float
    weight_offset: int
    mode: str = "uvu"
    has_weight: bool = True


@dataclass(frozen=True)
class TensorProductProblem:
    """A tensor product of any of e3nn's connection modes (``kernelgen.problem.irreps``).

    Fields are canonical texts and tuples, so equal problems compare and hash equal. ``key`` is a stable text;
    :meth:`from_key` reads it back.
    """

    irreps_in1: str
    irreps_in2: str
    irreps_out: str
    instructions: tuple[Instruction, ...]
    shared_weights: bool = False
    irrep_normalization: str = "component"
    path_normalization: str = "element"

    def __post_init__(self) -> None:
        operands = {}
        for name in ("in1", "in2", "out"):
            operands[name] = parse_irreps(getattr(self, f"irreps_{name}"), f"irreps_{name}")
            object.__setattr__(self, f"irreps_{name}", str(operands[name]))
        for kind, value in (("irrep", self.irrep_normalization), ("path", self.path_normalization)):
            if value not in NORMALIZATIONS[kind]:
                raise ProblemError(f"{kind}_normalization is {value!r}; expected one of {NORMALIZATIONS[kind]}")
        for instruction in self.instructions:
            self._check(instruction, operands)

    @staticmethod
    def _check(instruction: Instruction, operands: Mapping[str, o3.Irreps]) -> None:
        picked = []
        for name, blocks in operands.items():
            index = getattr(instruction, name)
            if not 0 <= index < len(blocks):
                raise ProblemError(
                    f"{instruction}: {name} index {index} is outside the {len(blocks)} blocks of {blocks}"
                )
            picked.append(blocks[index])
        (mul1, ir1), (mul2, ir2), (mul3, ir3) = picked
        if ir3 not in ir1 * ir2:
            allowed = ", ".join(str(ir) for ir in ir1 * ir2)
            raise ProblemError(f"{instruction}: {ir1} x {ir2} does not contain {ir3}; selection rules allow {allowed}")
        mode = MODES.get(instruction.mode)
        if mode is None:
            raise ProblemError(f"{instruction}: mode is {instruction.mode!r}; expected one of {tuple(MODES)}")
        if not mode.fits(mul1, mul2, mul3):
            raise ProblemError(
                f"{instruction}: mode {mode.name} needs {mode.rule}; in1 has {mul1} copies, in2 {mul2}, out {mul3}"
            )
        if not instruction.has_weight and (mode.needs_weight or (mode.result == "w" and mul3 != 1)):
            raise ProblemError(f"{instruction}: mode {mode.name} needs weights (has_weight=True)")

    @classmethod
    def from_instructions(
        cls,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps,
        instructions: Iterable[Sequence[Any]],
        *,
        shared_weights: bool = False,
        irrep_normalization: str | None = "component",
        path_normalization: str | None = "element",
    ) -> TensorProductProblem:
        """The problem of e3nn's instructions ``(in1, in2, out, mode, has_weight[, path_weight])``."""
        parsed = []
        for given in instructions:
            given = tuple(given)
            if not 5 <= len(given) <= 6:
                raise ProblemError(f"instruction {given}: expected (in1, in2, out, mode, has_weight[, path_weight])")
            in1, in2, out, mode, has_weight = given[:5]
            path_weight = float(given[5]) if len(given) == 6 else 1.0
            parsed.append(Instruction(int(in1), int(in2), int(out), path_weight, str(mode), bool(has_weight)))
        return cls(
            str(parse_irreps(irreps_in1, "irreps_in1")),
            str(parse_irreps(irreps_in2, "irreps_in2")),
            str(parse_irreps(irreps_out, "irreps_out")),
            tuple(parsed),
            shared_weights,
            irrep_normalization or "component",
            path_normalization or "element",
        )

    @classmethod
    def channelwise(
        cls,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        filter_irreps_out: Irreps,
        *,
        shared_weights: bool = False,
    ) -> TensorProductProblem:
        """Every allowed uvu path whose output irrep is in the filter; each path has its own output block, sorted.

        This is the convolution of MACE, NequIP and SevenNet (MACE's ``tp_out_irreps_with_instructions``).
        """
        first = parse_irreps(irreps_in1, "irreps_in1")
        second = parse_irreps(irreps_in2, "irreps_in2")
        keep = {ir for _, ir in parse_irreps(filter_irreps_out, "filter_irreps_out")}
        found = [
            (i, j, mul, ir)
            for i, (mul, ir1) in enumerate(first)
            for j, (_, ir2) in enumerate(second)
            for ir in ir1 * ir2
            if ir in keep
        ]
        if not found:
            raise ProblemError(f"no path from {first} x {second} reaches the filter {filter_irreps_out}")
        irreps_out, order, _ = o3.Irreps([(mul, ir) for _, _, mul, ir in found]).sort()
        instructions = sorted(
            (Instruction(i, j, order[k]) for k, (i, j, _, _) in enumerate(found)), key=lambda ins: ins.out
        )
        return cls(str(first), str(second), str(irreps_out), tuple(instructions), shared_weights)

    @classmethod
    def fully_connected(
        cls,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps,
        *,
        shared_weights: bool = False,
    ) -> TensorProductProblem:
        """Every allowed path of mode ``uvw``, in e3nn's order (by in1, in2, out)."""
        operands = (("irreps_in1", irreps_in1), ("irreps_in2", irreps_in2), ("irreps_out", irreps_out))
        first, second, out = (parse_irreps(text, what) for what, text in operands)
        paths = [
            Instruction(i, j, k, mode="uvw")
            for (i, (_, a)), (j, (_, b)), (k, (_, c)) in itertools.product(*map(enumerate, (first, second, out)))
            if c in a * b
        ]
        if not paths:
            raise ProblemError(f"no path from {first} x {second} reaches {out}")
        return cls(str(first), str(second), str(out), tuple(paths), shared_weights)

    @property
    def key(self) -> str:
        """Stable text form, equal for equal problems, readable by :meth:`from_key`."""
        paths = ",".join(instruction.text for instruction in self.instructions)
        weights = "shared" if self.shared_weights else "per-edge"
        return "|".join(
            [self._kind, self.irreps_in1, self.irreps_in2, self.irreps_out, paths, weights]
            + [self.irrep_normalization, self.path_normalization]
        )

    @property
    def _kind(self) -> str:
        return "uvu" if all(ins.mode == "uvu" and ins.has_weight for ins in self.instructions) else "tp"

    @classmethod
    def from_key(cls, key: str) -> TensorProductProblem:
        """Inverse of :attr:`key`; ProblemError if the text is not a key."""
        parts = key.split("|")
        if len(parts) != 8 or parts[0] not in ("uvu", "tp") or parts[5] not in ("shared", "per-edge"):
            raise ProblemError(f"{key!r} is not a problem key; expected 'uvu|in1|in2|out|paths|weights|norm|norm'")
        try:
            instructions = [Instruction.from_text(text) for text in filter(None, parts[4].split(","))]
        except ValueError as error:
            raise ProblemError(
                f"{key!r} has a malformed path list; expected 'in1.in2.out[:mode[-]][*weight],...'"
            ) from error
        return cls(parts[1], parts[2], parts[3], tuple(instructions), parts[5] == "shared", parts[6], parts[7])

    @functools.cached_property
    def in1(self) -> tuple[Block, ...]:
        return blocks_of(self.irreps_in1)

    @functools.cached_property
    def in2(self) -> tuple[Block, ...]:
        return blocks_of(self.irreps_in2)

    @functools.cached_property
    def out(self) -> tuple[Block, ...]:
        return blocks_of(self.irreps_out)

    @functools.cached_property
    def dim_in1(self) -> int:
        return sum(block.mul * block.dim for block in self.in1)

    @functools.cached_property
    def dim_in2(self) -> int:
        return sum(block.mul * block.dim for block in self.in2)

    @functools.cached_property
    def dim_out(self) -> int:
        return sum(block.mul * block.dim for block in self.out)

    @functools.cached_property
    def weight_numel(self) -> int:
        """Weights in a row: those of all weighted paths, in instruction order."""
        return sum(self.weights_of(ins) for ins in self.instructions)

    @functools.cached_property
    def is_channelwise(self) -> bool:
        """Whether every path is a weighted ``uvu`` with one copy of the second input, as in MACE and NequIP."""
        return all(ins.mode == "uvu" and ins.has_weight and self.in2[ins.in2].mul == 1 for ins in self.instructions)

    def mode(self, path: Path | Instruction) -> Mode:
        return MODES[path.mode]

    def muls(self, path: Path | Instruction) -> tuple[int, int, int]:
        """Multiplicities of the three blocks of a path."""
        return self.in1[path.in1].mul, self.in2[path.in2].mul, self.out[path.out].mul

    def weights_of(self, ins: Path | Instruction) -> int:
        """Number of weights of one path."""
        return math.prod(MODES[ins.mode].shape(*self.muls(ins))) if ins.has_weight else 0

    @functools.cached_property
    def paths(self) -> tuple[Path, ...]:
        """Resolved paths with e3nn's normalisation, in instruction order."""
        resolved, offset = [], 0
        for index, (ins, coefficient) in enumerate(zip(self.instructions, self._path_weights(), strict=True)):
            mul = self.in1[ins.in1].mul
            kind = (ins.mode, ins.has_weight)
            resolved.append(Path(index, ins.in1, ins.in2, ins.out, mul, coefficient, offset, *kind))
            offset += self.weights_of(ins)
        return tuple(resolved)

    @property
    def e3nn_instructions(self) -> list[tuple[int, int, int, str, bool, float]]:
        """The instructions as e3nn takes them."""
        return [(i.in1, i.in2, i.out, i.mode, i.has_weight, i.path_weight) for i in self.instructions]

    def reference(self, **options: Any) -> o3.TensorProduct:
        """The same product as an ``e3nn.o3.TensorProduct`` with external weights; options go to its constructor.

        It is built in float64, because e3nn rounds coefficients to the default dtype at construction;
        ``.to(torch.float32)`` gives the float32 product.
        """
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self._product(**options)
        finally:
            torch.set_default_dtype(default)

    def _product(self, **options: Any) -> o3.TensorProduct:
        return o3.TensorProduct(
            self.irreps_in1,
            self.irreps_in2,
            self.irreps_out,
            self.e3nn_instructions,
            shared_weights=self.shared_weights,
            internal_weights=False,
            irrep_normalization=self.irrep_normalization,
            path_normalization=self.path_normalization,
            **options,
        )

    def _path_weights(self) -> list[float]:
        """As e3nn computes them, in Python's floats: torch's default dtype, which all threads share, stays as it is."""
        if not self.instructions:
            return []
        product = self._product(compile_left_right=False, compile_right=False)
        return [float(instruction.path_weight) for instruction in product.instructions]


# Converts an ``e3nn.o3.TensorProduct`` to the TensorProductProblem that it solves.

# Path weights within this relative difference are equal.
_SAME = 1e-9


def problem_of(module: o3.TensorProduct) -> TensorProductProblem:
    """The problem that an e3nn product solves; UnsupportedError if no kernel can be generated for it.

    e3nn keeps only the normalised coefficients. Because tuned schedules are stored by normalisation, this tries which
    one gives these coefficients. If none does (variances, path weights), the problem has no normalisation, and the
    squared coefficients as path weights.
    """
    irreps = (str(module.irreps_in1), str(module.irreps_in2), str(module.irreps_out))
    coefficients = [i.path_weight for i in module.instructions]

    def problem(weights: list[float], irrep: str, path: str) -> TensorProductProblem:
        paths = [
            (i.i_in1, i.i_in2, i.i_out, i.connection_mode, i.has_weight, weight)
            for i, weight in zip(module.instructions, weights, strict=True)
        ]
        return TensorProductProblem.from_instructions(
            *(*irreps, paths),
            shared_weights=module.shared_weights,
            irrep_normalization=irrep,
            path_normalization=path,
        )

    for normalization in itertools.product(NORMALIZATIONS["irrep"], NORMALIZATIONS["path"]):
        candidate = problem([1.0] * len(coefficients), *normalization)
        found = [i.path_weight for i in candidate.reference(compile_left_right=False, compile_right=False).instructions]
        if all(abs(a - b) <= _SAME * abs(b) for a, b in zip(found, coefficients, strict=True)):
            return candidate
    return problem([c * c for c in coefficients], "none", "none")


# The problem of a convolution whose edge weights are products ``h @ matrix``, formed where they are used.

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


# What the speed of a kernel depends on: the shape of its problem, and the size class of its graph. So a schedule tuned
# for one serves its likes.


@functools.lru_cache(maxsize=4096)
def shape_of(key: str) -> str:
    """A problem's ``key`` without parities, and with its paths sorted by output; equal for problems of equal shape.

    Parities change no arithmetic. The order of paths is only that of their weights: MACE and SevenNet sort them by
    output, NequIP by input.
    """
    parts = key.split("|")
    if len(parts) != 8 or parts[0] not in ("uvu", "tp"):
        return key
    irreps = [re.sub(r"(\d)[eo]", r"\1", text) for text in parts[1:4]]
    return "|".join([parts[0], *irreps, ",".join(sorted(parts[4].split(","), key=_by_output)), *parts[5:]])


def _by_output(path: str) -> tuple[int, str]:
    blocks = re.match(r"\d+\.\d+\.(\d+)", path)
    return (int(blocks[1]) if blocks else -1, path)


def size_class(num_edges: int, num_nodes: int) -> tuple[int, int]:
    """Rounded log2 of the number of edges, and of the edges a node; both at least 0. ``num_nodes``: destinations.

    >>> size_class(460_710, 5184)
    (19, 6)
    """
    edges, nodes = num_edges or 1, num_nodes if num_nodes > 0 else 1
    square = edges * edges
    # bit_length is 1 + floor(log2), so for a square half of it is the rounded log2 of its root.
    return square.bit_length() >> 1, (square // (nodes * nodes)).bit_length() >> 1
