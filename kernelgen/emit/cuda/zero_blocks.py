"""The first blocks of a kernel that write zeros to what its others add to, as C++ text.

With ``zeros="inside"`` that is all of an output, with ``"cut"`` some of its rows. Fixed code is in
``kernelgen/emit/include/zero_outputs.hpp`` and, for rows, in ``cut_rows.hpp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Extra arguments of such a kernel, and what its other blocks need of them.
ZEROS = ("unsigned long long* written", "unsigned long long launch")
WAITING = ("const unsigned long long* ready", "unsigned long long launch")
HEADER = "zero_outputs.hpp"
# With ``zeros="cut"``: what runs of edges need besides, and the header for rows.
WAITING_FOR_ROWS = (*WAITING, "long long num_edges")
HEADER_OF_ROWS = "cut_rows.hpp"
# Threads of all blocks that write zeros, and bytes that a thread writes before another block is used: a single block
# signals at once, while several have to wait for each other.
ZERO_THREADS, ZEROS_A_THREAD = 4096, 256


def zero_blocks(zeros: str, block_size: int) -> int:
    """The number of blocks, first in the grid, that write zeros. zeros: the knob."""
    return max(1, ZERO_THREADS // block_size) if zeros != "apart" else 0


def zero_lines(
    blocks: int, block_size: int, element_bytes: int, sizes: Mapping[str, str], asked: Sequence[str] = ()
) -> list[str]:
    """Code of the first blocks, which return. sizes: elements to zero by array. asked: lines of all first blocks."""
    each = block_size * ZEROS_A_THREAD // element_bytes
    count = " + ".join(sizes.values())
    return [
        f"    if (blockIdx.x < {blocks}) {{",
        f"        const int writers = int(min(({count} + {each - 1}ll) / {each}, {blocks}ll));",
        "        if (blockIdx.x < writers) {",
        "            ask_line(written);",
        *(f"            write_zeros({array}, {size}, writers);" for array, size in sizes.items()),
        "            tell_of_zeros(written, launch, writers);",
        "        }",
        *(f"    {line}" for line in asked),
        "        return;",
        "    }",
    ]


def cut_row_lines(blocks: int, width: int, elements: int, asked: Sequence[str] = ()) -> list[str]:
    """As :func:`zero_lines`, of the rows of values that runs of ``each`` edges do not store.

    elements: of a row. width: elements that are written at a time.
    """
    return [
        f"    if (blockIdx.x < {blocks}) {{",
        "        ask_line(written);",
        f"        zero_cut_rows<{width}>(b.out_g, {elements}, b.spans, num_out, each, {blocks});",
        f"        tell_of_zeros(written, launch, {blocks});",
        *(f"    {line}" for line in asked),
        "        return;",
        "    }",
    ]
