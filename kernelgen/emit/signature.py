"""The signature that all kernels share, as C++ text: pointers (``BUFFERS`` of the spec), then sizes.

The text around it defines ``Real`` and ``index_t``.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.emit.source import ENTRY
from kernelgen.schedule.kernel_spec import BUFFERS

INDENT = "    "


def element(name: str) -> str:
    """The element type of a buffer, const if kernels only read it."""
    kind = "index_t" if name in ("sender", "receiver") else "int" if name in ("spans", "perm") else "Real"
    return f"{'' if name.startswith('out_') else 'const '}{kind}"


def buffers() -> list[str]:
    """The declaration of each buffer, without semicolon."""
    return [f"{element(name)}* __restrict__ {name}" for name in BUFFERS]


def buffers_struct(*more: str) -> str:
    """A struct ``Buffers`` of all buffers. more: declarations after them."""
    return "struct Buffers {\n" + "\n".join(f"{INDENT}{field};" for field in (*buffers(), *more)) + "\n};\n"


def buffers_line(*more: str) -> str:
    """The statement that defines the struct ``b`` of all buffers. more: names after them."""
    return f"{INDENT}const Buffers b = {{{', '.join((*BUFFERS, *more))}}};"


def gpu_entry(block_size: int, min_blocks: int, *more: str, entry: str = ENTRY) -> Iterator[str]:
    """The head of a kernel, up to its opening brace. more: declarations of extra arguments. entry: its name."""
    bounds = f"{block_size}, {min_blocks}" if min_blocks else f"{block_size}"
    yield f'extern "C" __global__ void __launch_bounds__({bounds}) {entry}('
    yield ",\n".join(f"{INDENT}{field}" for field in buffers()) + ","
    yield f"{INDENT}{', '.join(('long long num_edges, long long num_in, long long num_out', *more))})"
    yield "{"


def host_entry() -> Iterator[str]:
    """The head of a host function, with untyped pointers, up to its opening brace."""
    pointers = ", ".join(f"{'' if name.startswith('out_') else 'const '}void* {name}" for name in BUFFERS)
    yield f'extern "C" void {ENTRY}({pointers},'
    yield f"{INDENT}long long num_edges, long long num_in, long long num_out, int threads) {{"
