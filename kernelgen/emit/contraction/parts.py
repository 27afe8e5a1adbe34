"""What the kernels of both backends have in common: the parts of the statements and the sums that these add to."""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.plan.symmetric_contraction import ContractionPlan
from kernelgen.terms.contraction_statements import Part

INDENT = "    "


def names(plan: ContractionPlan, stem: str) -> list[int]:
    """Numbers of a stem's names in all parts."""
    return sorted({number for part in plan.parts for number in part.uses(stem)})


def sums_of(plan: ContractionPlan) -> Iterator[tuple[str, str, int]]:
    """Stem, buffer and number of every sum but those of weights; zero if no statement adds to it."""
    outputs, problem = plan.spec.direction.outputs, plan.spec.problem
    forward = plan.spec.direction.name == "forward"
    if "g" in outputs:
        yield from (("y" if forward else "og", "out_g", o) for o in range(problem.dim_out))
    if "x" in outputs:
        yield from (("ox", "out_x", i) for i in range(problem.dim_in))


def part_text(plan: ContractionPlan, part: Part, weight: str) -> Iterator[str]:
    """A part in its scope. weight: the place of weight {r} in the buffer {buffer}."""
    yield f"{{  // {part.title}"
    for stem in ("w", "tw"):
        yield from (f"{INDENT}const V {stem}{r} = {weight.format(buffer=stem, r=r)};" for r in part.uses(stem))
    yield from (f"{INDENT}{statement}" for statement in part.statements)
    yield "}"
