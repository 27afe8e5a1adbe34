"""Host C++ of a channelwise plan.

Loops over the graph, layouts and locks are hand-written templates (``include/host*.hpp``, copied into the text). This
module emits their parameter ``Form``: constants, blocks, and one function for each path group, which loops over the
group's channels with vectors of ``channel_block`` channels. One worker runs all groups of an edge, so the host does not
need ``plan.exclusive_in1`` and ``exclusive_out``: the first path that writes a block of an edge's own row starts it
from zero, and later ones add to it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from kernelgen.arithmetic.couplings import PathTerms, path_terms
from kernelgen.arithmetic.directions import OPERANDS
from kernelgen.arithmetic.product import PathBody, path_body
from kernelgen.kernels.product.channelwise import Group, Plan
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.kernels.source import Source, included
from kernelgen.kernels.spec import BUFFERS, INDENT, host_entry
from kernelgen.kernels.spherical_harmonics import inside
from kernelgen.problem.irreps import Block

HEADERS = ("host_vectors.hpp", "host.hpp")
C_TYPES = {"float32": "float", "float64": "double", "int32": "std::int32_t", "int64": "std::int64_t"}
# Fewer remaining channels than this are computed one by one: narrower vectors only add code.
LEAST_VECTOR = 4


def emit_host(plan: Plan) -> Source:
    """The kernel's source; it exports one ``extern "C"`` function with the pointers of ``BUFFERS``."""
    emitter = _HostEmitter(plan)
    math = ["#include <math.h>"] if plan.spec.harmonics is not None else []
    parts = [_preamble(plan), *math, *map(included, HEADERS), *emitter.form(), *_entry()]
    return Source("\n".join(parts) + "\n", "c++")


def _preamble(plan: Plan) -> str:
    spec = plan.spec
    return (
        f"// Equitune host kernel, {spec.operation}, {spec.dtype}, {spec.layout}, {spec.index} indices\n"
        f"// problem:   {spec.problem.key}\n"
        f"// direction: {spec.direction.text}\n"
        f"// schedule:  {spec.schedule.key}\n"
    )


def _indented(lines: Iterable[str], depth: int = 1) -> Iterator[str]:
    return (INDENT * depth + line for line in lines)


def _components(stem: str, block: int, dim: int) -> list[str]:
    return [f"{stem}{block}_{m}" for m in range(dim)]


class _HostEmitter:
    def __init__(self, plan: Plan) -> None:
        assert isinstance(plan.spec.schedule, HostSchedule)
        self.plan, self.spec, self.problem = plan, plan.spec, plan.spec.problem
        self.direction = plan.spec.direction
        self.block = plan.spec.schedule.channel_block
        self.started: set[str] = set()

    def form(self) -> Iterator[str]:
        """Types, group functions and the struct ``Form``, the parameter of the hand-written templates."""
        yield "namespace {"
        yield ""
        names = ("add", "lanes", "load", "load_ahead", "store", "stream")
        yield f"using {', '.join(f'equitune::{name}' for name in names)};"
        yield ""
        yield f"using T = {C_TYPES[self.spec.dtype]};"
        yield "template <int N>"
        yield "using Vec = equitune::Vec<T, N>;"
        yield "using Edge = equitune::Edge<T>;"
        yield ""
        if self.spec.harmonics is not None:
            yield "#define DEVICE static EQUITUNE_INLINE"
            yield "using Real = T;"
            yield inside(self.spec)
        for number, group in enumerate(self.plan.groups):
            yield from self._group(number, group)
            yield ""
        yield "struct Form {"
        yield from _indented(self._constants())
        if self.spec.harmonics is not None:
            yield f"{INDENT}static void harmonics(const T* v, T* y) {{ ::harmonics(v, y); }}"
            if "y" in self.direction.live_outputs:
                yield f"{INDENT}static void along_v(const T* v, const T* g, T* out) {{ ::along_v(v, g, out); }}"
        yield from _indented(self._blocks("in1_blocks", self.problem.in1, {p.in1 for p in self.problem.paths}))
        yield from _indented(self._blocks("out_blocks", self.problem.out, {p.out for p in self.problem.paths}))
        yield f"{INDENT}static void edge(const Edge& edge) {{"
        yield from _indented((f"group_{number}(edge);" for number in range(len(self.plan.groups))), 2)
        yield f"{INDENT}}}"
        yield "};"
        yield ""
        yield "}  // namespace"
        yield ""

    def _constants(self) -> Iterator[str]:
        problem, spec, direction = self.problem, self.spec, self.direction
        schedule = spec.schedule
        yield "using T = ::T;"
        yield f"using Index = {C_TYPES[spec.index]};"
        yield f"static constexpr int dim_in1 = {problem.dim_in1}, dim_in2 = {problem.dim_in2};"
        yield f"static constexpr int dim_out = {problem.dim_out}, weight_numel = {problem.weight_numel};"
        yield f"static constexpr int block = {self.block}, edges_per_chunk = {schedule.edges_per_chunk};"
        flags = {
            "conv": spec.operation == "conv",
            "owns_receiver": self.plan.owner == "receiver",
            "owns_sender": self.plan.owner == "sender",
            "mul_ir": spec.layout == "mul_ir",
            "shared_weights": problem.shared_weights,
            "y_are_vectors": spec.harmonics is not None,
            **{f"reads_{name}": name in direction.operands for name in OPERANDS},
            **{f"writes_{slot}": slot in direction.live_outputs for slot in "xywg"},
        }
        for name, value in flags.items():
            yield f"static constexpr bool {name} = {str(value).lower()};"
        yield ""

    def _blocks(self, name: str, blocks: tuple[Block, ...], used: set[int]) -> Iterator[str]:
        """A function that visits the blocks that some path uses; the caller zeroes the others."""
        yield "template <class Visit>"
        yield f"static EQUITUNE_INLINE void {name}(const Visit& visit) {{"
        for number in sorted(used):
            block = blocks[number]
            yield f"{INDENT}visit(equitune::Block<{block.offset}, {block.dim}, {block.mul}>{{}});  // {block.text}"
        yield f"{INDENT}(void)visit;"
        yield "}"
        yield ""

    def _group(self, number: int, group: Group) -> Iterator[str]:
        """The function of a group: edge values, then loops over channels, at full width and for the remainder."""
        terms = [path_terms(self.problem)[p] for p in group.paths]
        bodies = [path_body(t, self.direction) for t in terms]
        yield f"// Group {number}: {', '.join(self.problem.in1[b].text for b in group.in1)}; {len(terms)} paths."
        yield f"EQUITUNE_NOINLINE void group_{number}(const Edge& edge) {{"
        for term, body in zip(terms, bodies, strict=True):
            yield from _indented(self._edge_values(term, body))
        yield from _indented(["", "const auto channels = [&](auto zero, int begin, int end) EQUITUNE_LAMBDA {"])
        yield from _indented(self._channels(terms, bodies), 2)
        yield from _indented(["};"])
        yield from _indented(self._calls(group.mul))
        yield "}"

    def _calls(self, mul: int) -> Iterator[str]:
        width, begin = self.block, 0
        while begin < mul:
            if width < LEAST_VECTOR:
                width = 1
            end = mul - (mul - begin) % width
            if end > begin:
                yield f"channels({'T' if width == 1 else f'Vec<{width}>'}{{}}, {begin}, {end});"
            begin, width = end, width // 2

    def _edge_values(self, terms: PathTerms, body: PathBody) -> Iterator[str]:
        """Scalars of an edge: ``m3_1`` from y and ``tm3_1`` from ty."""
        for name in body.reads:
            match = re.fullmatch(r"(t?)m\d+_(\d+)", name)
            if match:
                value = terms.values[int(match[2])]
                total = " + ".join(f"T({c!r}) * edge.{match[1]}y[{component}]" for component, c in value.terms)
                yield f"const T {name} = {total};"

    def _channels(self, terms: list[PathTerms], bodies: list[PathBody]) -> Iterator[str]:
        yield "using V = decltype(zero);"
        sums = [name for body in bodies for name in body.accumulates if name.startswith("r")]
        yield from (f"V {name} = zero;" for name in sums)
        yield "for (int u = begin; u < end; u += lanes<V, T>) {"
        pairs = list(zip(terms, bodies, strict=True))
        for in1, run in itertools.groupby(pairs, key=lambda pair: pair[0].path.in1):
            yield from _indented(self._input_block(in1, list(run)))
        yield "}"
        if sums:
            for term, body in pairs:
                yield from self._add_out_y(term, body)

    def _input_block(self, in1: int, pairs: list[tuple[PathTerms, PathBody]]) -> Iterator[str]:
        """Consecutive paths of one block of x: its channels are loaded once, its gradient is written once."""
        block = self.problem.in1[in1]
        reads = {name for _, body in pairs for name in body.reads}
        yield f"{{  // {block.text}"
        for stem in ("x", "tx"):
            yield from _indented(
                self._load(stem, name, block, m)
                for m, name in enumerate(_components(stem, in1, block.dim))
                if name in reads
            )
        gradients = _components("ox", in1, block.dim) if "x" in self.direction.live_outputs else []
        yield from _indented(self._start("out_x", gradients, block, fresh=self.plan.owner != "sender"))
        for term, body in pairs:
            yield from _indented(self._path(term, body))
        yield from _indented(self._finish("out_x", gradients, block))
        yield "}"

    def _path(self, terms: PathTerms, body: PathBody) -> Iterator[str]:
        path, problem = terms.path, self.problem
        out = problem.out[path.out]
        weights = f"weights {path.weight_offset}..{path.weight_offset + path.mul - 1}"
        texts = f"{problem.in1[path.in1].text} x {problem.in2[path.in2].text} -> {out.text}"
        yield f"{{  // path {path.index}: {texts}, {weights}"
        for name in (f"w{path.index}", f"tw{path.index}"):
            if name in body.reads:
                row = f"edge.{name.rstrip('0123456789')} + {path.weight_offset} + u"
                value = f"load<V>({row})" if problem.shared_weights else f"load_ahead<V>({row}, edge.ahead)"
                yield f"{INDENT}const V {name} = {value};"
        for stem in ("g", "tg"):
            yield from _indented(
                self._load(stem, name, out, m)
                for m, name in enumerate(_components(stem, path.out, out.dim))
                if name in body.reads
            )
        sums = _components("og", path.out, out.dim) if "g" in self.direction.live_outputs else []
        yield from _indented(self._start("out_g", sums, out, fresh=self.spec.operation == "plain"))
        weight = f"ow{path.index}"
        if weight in body.accumulates:
            start = f"load<V>(edge.out_w + {path.weight_offset} + u)" if problem.shared_weights else "zero"
            yield f"{INDENT}V {weight} = {start};"
        yield from _indented(body.statements)
        if weight in body.accumulates:
            row = f"edge.out_w + {path.weight_offset} + u, {weight}"
            yield f"{INDENT}store({row});" if problem.shared_weights else f"{INDENT}stream({row}, edge.past_caches);"
        yield from _indented(self._finish("out_g", sums, out))
        yield "}"

    def _load(self, buffer: str, name: str, block: Block, m: int) -> str:
        return f"const V {name} = load<V>(edge.{buffer} + {block.offset + m * block.mul} + u);"

    def _start(self, buffer: str, names: list[str], block: Block, *, fresh: bool) -> Iterator[str]:
        """Define a block's accumulators; in ``fresh`` rows the edge's first path to write it starts from zero."""
        first = fresh and bool(names) and names[0] not in self.started
        self.started.update(names)
        for m, name in enumerate(names):
            start = "zero" if first else f"load<V>(edge.{buffer} + {block.offset + m * block.mul} + u)"
            yield f"V {name} = {start};"

    def _finish(self, buffer: str, names: list[str], block: Block) -> Iterator[str]:
        for m, name in enumerate(names):
            yield f"store(edge.{buffer} + {block.offset + m * block.mul} + u, {name});"

    def _add_out_y(self, terms: PathTerms, body: PathBody) -> Iterator[str]:
        """Add to dF/dy, by the transpose of the edge values: partial sums of a component, one lane a channel."""
        totals: dict[int, list[str]] = {}
        for number, value in enumerate(terms.values):
            name = f"r{terms.path.index}_{number}"
            if name in body.accumulates:
                for component, c in value.terms:
                    totals.setdefault(component, []).append(f"T({c!r}) * {name}")
        for component, products in sorted(totals.items()):
            yield f"add(edge.out_y + {component * self.block}, {' + '.join(products)});"


def _entry() -> Iterator[str]:
    yield from host_entry()
    yield f"{INDENT}using Index = const Form::Index*;"
    yield f"{INDENT}equitune::run<Form>({{"
    for name in BUFFERS:
        kind = "T*" if name.startswith("out_") else "const T*"
        kind = {"sender": "Index", "receiver": "Index"}.get(name, kind)
        kind = "const std::int32_t*" if name in ("spans", "perm") else kind
        yield f"{INDENT * 2}static_cast<{kind}>({name}),"
    yield f"{INDENT * 2}num_edges, num_in, num_out, threads}});"
    yield "}"
