"""Small problems of every connection mode: with and without weights, several copies, shared output blocks."""

from __future__ import annotations

from kernelgen.problem.product import TensorProductProblem

MODES = {
    "uvw": (
        ("3x0e+5x1o", "2x0e+3x1o", "4x0e+7x1o+2x1e"),
        [(0, 0, 0, True), (0, 1, 1, True), (1, 0, 1, True, 0.5), (1, 1, 0, True), (1, 1, 2, True)],
    ),
    "uvu": (("3x0e+5x1o", "2x0e+3x1o", "3x0e+5x1o+5x1e"), [(0, 0, 0, True), (1, 0, 1, False), (1, 1, 2, True)]),
    "uvv": (("3x0e+5x1o", "2x0e+3x1o", "2x0e+3x1o+3x1e"), [(0, 0, 0, True), (0, 1, 1, False), (1, 1, 2, True)]),
    "uuw": (("3x0e+5x1o", "3x1o+5x1o", "4x1o+2x0e+1x1e"), [(0, 0, 0, True), (1, 1, 1, True), (1, 1, 2, False)]),
    "uuu": (("3x0e+5x1o", "3x1o+5x1o", "3x1o+5x0e+5x1e"), [(0, 0, 0, True), (1, 1, 1, False), (1, 1, 2, True)]),
    "uvuv": (("3x0e+5x1o", "2x0e+3x1o", "6x0e+15x1o+15x1e"), [(0, 0, 0, True), (1, 1, 2, False)]),
    "uvu<v": (
        ("4x0e+5x1o", "4x1o+5x1o", "6x1o+10x0e+10x1e"),
        [(0, 0, 0, True), (1, 1, 1, False), (1, 1, 2, True)],
    ),
    "u<vw": (("4x0e+5x1o", "4x1o+5x1o", "3x1o+2x0e+33x1e"), [(0, 0, 0, True), (1, 1, 1, True), (1, 1, 2, True)]),
}


def of_mode(mode: str, shared: bool = False) -> TensorProductProblem:
    """The problem of one mode; two paths of ``uvw`` share their output, and 0e of ``uvuv`` pairs only with 0e."""
    irreps, paths = MODES[mode]
    instructions = [(*path[:3], mode, *path[3:]) for path in paths]
    return TensorProductProblem.from_instructions(*irreps, instructions, shared_weights=shared)


def mixed() -> TensorProductProblem:
    """Several modes in one product, with an output block and an input block that no path uses."""
    return TensorProductProblem.from_instructions(
        "4x0e+4x1o+2x2e",
        "1x0e+4x1o",
        "4x1o+6x0e+4x0e+3x2e",
        [(0, 1, 0, "uuu", True), (1, 0, 0, "uvu", True), (1, 1, 1, "uvu<v", False), (1, 1, 2, "uvu", True, 2.0)],
    )


def single() -> TensorProductProblem:
    """Mostly paths of one pair, with more and with fewer columns than lanes; the last path's pair is (0, 1)."""
    instructions = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 2), (2, 1, 2), (2, 2, 3)]
    return TensorProductProblem.from_instructions(
        *("1x0e+1x1o+2x1o", "1x0e+1x1o+2x1e", "40x0e+7x1o+3x1e+2x2o"),
        [(*blocks, "uvw" if blocks != (2, 2, 3) else "u<vw", True) for blocks in instructions],
    )


def direct() -> TensorProductProblem:
    """Paths without weights whose output copies are one pair each, for all three kinds of pairs."""
    return TensorProductProblem.from_instructions(
        *("3x1o+4x1o", "2x1o+4x2e+1x0e", "6x1e+4x2o+6x1o+4x1o"),
        [(0, 0, 0, "uvuv", False), (1, 1, 1, "uuu", False), (1, 1, 2, "uvu<v", False), (1, 2, 3, "uvuv", False)],
    )


def equal_channels(mul: int = 32, shared: bool = False) -> TensorProductProblem:
    """Paths of mode ``uuu`` with one multiplicity, one without weights; a block of the output has no path."""
    irreps = [f"{mul}x0e+{mul}x1o+{mul}x2e", f"{mul}x1o+{mul}x0e", f"{mul}x0e+{mul}x1o+{mul}x1e+{mul}x2o"]
    paths = [(0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 1), (2, 0, 1), (1, 0, 2)]
    instructions = [(*blocks, "uuu", blocks != (1, 1, 1)) for blocks in paths]
    return TensorProductProblem.from_instructions(*irreps, instructions, shared_weights=shared)
