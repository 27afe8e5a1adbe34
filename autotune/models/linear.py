"""``e3nn.o3.Linear`` in layout ``ir_mul``: one matrix product for each pair of blocks and component, without copies."""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotune.models.stand_ins import NodeStandIn
from autotune.modules.base import autocast
from autotune.modules.product import check_last
from kernelgen.compat import is_autocast, o3, run_eagerly, runs_eagerly, without_autocast
from kernelgen.errors import InputError, UnsupportedError
from kernelgen.ops.library import will_run
from kernelgen.ops.node_kernels import BlockProduct, MatrixPath
from kernelgen.problem.irreps import Block, blocks_of

# Sums over blocks of features, linear in features, weights and results, differentiable any number of times.
#
# With T(x, w, y) = sum of c x w y over all paths, the result of (x, w) is dT/dy. Its gradients are dT/dx of (w, y) and
# dT/dw of (x, y), with the result's gradient for y. So these three are each other's derivatives.

# Layers to fewer channels are never multiplied in TF32: they give energies, and have nothing to gain.
LEAST_IN_TF32 = 16
# Of what each derivative of T is made.
FACTORS = {"y": ("x", "w"), "x": ("w", "y"), "w": ("x", "y")}


class Trilinear(ABC):
    """One such T. Features x and y are ``[nodes, dim]`` in layout ``ir_mul``, w is a row of weights."""

    @abstractmethod
    def derivative(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        """dT/d``wanted`` of its two factors, written in place block by block; not recorded by autograd."""

    @abstractmethod
    def traceable(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        """The same in operations that torch can trace, transform and differentiate."""

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        return _derivative(self, "y", x, w)


def _derivative(form: Trilinear, wanted: str, first: Tensor, second: Tensor) -> Tensor:
    if is_autocast(first):
        with without_autocast(first):
            return _derivative(form, wanted, first, second)
    if not runs_eagerly(first, second):
        return form.traceable(wanted, first, second)
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return _Derivative.apply(form, wanted, first, second)
    return form.derivative(wanted, first, second)


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Trilinear, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        ctx.form, ctx.wanted = form, wanted
        # The gradient by one needs the other: where weights have none, features need not be kept.
        by_first, by_second = ctx.needs_input_grad[2:]
        ctx.save_for_backward(first if by_second else None, second if by_first else None)
        return form.derivative(wanted, first, second)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take traceable forms")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        names = (*FACTORS[ctx.wanted], ctx.wanted)
        given = dict(zip(names, (*ctx.saved_tensors, *gradients), strict=True))
        # Forces need no gradients of the weights, which nodes of a training step's first backward pass could give.
        found = [
            _derivative(ctx.form, name, *(given[factor] for factor in FACTORS[name]))
            if needed and will_run(node[0])
            else None
            for name, needed, node in zip(names, ctx.needs_input_grad[2:], ctx.next_functions, strict=False)
        ]
        return (None, None, *found)


def components(features: Tensor, offset: int, dim: int, mul: int) -> Tensor:
    """A block of features as ``[dim, nodes, mul]``; a view if channels are next to each other in memory."""
    return features.narrow(1, offset, dim * mul).reshape(features.shape[0], dim, mul).transpose(0, 1)


def component_rows(features: Tensor, offset: int, dim: int, mul: int) -> Tensor:
    """The same of features :func:`with_rows`, always a view, by one operation, not recorded by autograd.

    Host time limits small structures, and most operations of a linear layer made views.
    """
    shape, strides = (dim, features.shape[0], mul), (mul, features.stride(0), 1)
    return features.as_strided(shape, strides, features.storage_offset() + offset)


def with_rows(features: Tensor) -> Tensor:
    """The same with channels next to each other in memory, as BLAS needs them."""
    return features if features.stride(1) == 1 or features.shape[1] == 1 else features.contiguous()


def joined(found: dict[int, Tensor], dim: int, like: Tensor) -> Tensor:
    """Blocks by their offsets as one row a node, zeros between them."""
    parts, end = [], 0
    for offset in sorted(found):
        if offset > end:
            parts.append(like.new_zeros(like.shape[0], offset - end))
        parts.append(found[offset])
        end = offset + found[offset].shape[1]
    if dim > end or not parts:
        parts.append(like.new_zeros(like.shape[0], dim - end))
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class Path:
    """A block of x times a matrix, added to a block of y. x, y, w: offsets; rows and columns: channels of x and y."""

    x: int
    y: int
    w: int
    rows: int
    columns: int
    dim: int
    coefficient: float

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Run:
    """``count`` neighbouring blocks of x times neighbouring matrices, added to one block of y."""

    first: Path
    count: int

    @property
    def rows(self) -> int:
        return self.count * self.first.rows

    @property
    def end(self) -> int:
        return self.first.x + self.first.dim * self.rows

    def of_x(self, x: Tensor) -> Tensor:
        """The blocks as one, ``[dim, nodes, rows]``: a view of a single one, else a copy."""
        blocks = self._view(x)
        return blocks[0] if self.count == 1 else blocks.permute(1, 2, 0, 3).flatten(2)

    def write(self, x: Tensor, values: Tensor, adds: bool) -> None:
        """Write, or add, values ``[dim, nodes, rows]`` to the blocks of x."""
        target = self._view(x)
        values = values.unflatten(2, (self.count, self.first.rows)).permute(2, 0, 1, 3)
        (target.add_ if adds else target.copy_)(values)

    def _view(self, x: Tensor) -> Tensor:
        """``[count, dim, nodes, rows of one]``."""
        dim, rows = self.first.dim, self.first.rows
        shape, strides = (self.count, dim, x.shape[0], rows), (dim * rows, rows, x.stride(0), 1)
        return x.as_strided(shape, strides, x.storage_offset() + self.first.x)


class BlockMatrices(Trilinear):
    """Products of blocks of features with matrices, ``y = sum of c x w``.

    dims: widths of x and y. In y, and in the gradient by x, every block is written where it belongs.
    """

    def __init__(self, paths: Sequence[Path], dims: tuple[int, int]) -> None:
        self.paths, self.dims = tuple(paths), {"x": dims[0], "y": dims[1]}
        self.weight_numel = sum(path.numel for path in paths)
        self.merged = _merged(self.paths)
        self.singles = tuple(Run(path, 1) for path in self.merged)
        self.runs = _runs(self.merged)
        in_one = (MatrixPath(p.x, p.y, p.w, p.columns, 0, p.rows, p.columns, p.dim, p.coefficient) for p in self.merged)
        self.kernel = BlockProduct(list(in_one), dims, self.weight_numel)

    def derivative(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        if wanted == "w":
            return self._of_weights(with_rows(first), with_rows(second))
        features, weights = (first, second) if wanted == "y" else (second, first)
        features, weights = with_rows(features), weights.contiguous()
        if self.kernel.takes(features):
            return self.kernel.rows(wanted, features, weights)
        # Zeros if no path writes some block.
        reached = {getattr(path, wanted): path.dim * _mul(path, wanted) for path in self.merged}
        is_whole = sum(reached.values()) == self.dims[wanted]
        found = (features.new_empty if is_whole else features.new_zeros)(features.shape[0], self.dims[wanted])
        written: set[int] = set()
        for run in self.runs if joins_blocks(features) else self.singles:
            path, at = run.first, getattr(run.first, wanted)
            shape, strides = (path.dim, run.rows, path.columns), (0, path.columns, 1)
            matrix = weights.as_strided(shape, strides, weights.storage_offset() + path.w)
            scales = {"beta": float(at in written), "alpha": path.coefficient}
            if wanted == "y":
                _rows(found, path, "y").baddbmm_(run.of_x(features), matrix, **scales)
            elif run.count == 1:
                _rows(found, path, "x").baddbmm_(_rows(features, path, "y"), matrix.mT, **scales)
            else:
                values = torch.bmm(_rows(features, path, "y"), matrix.mT)
                run.write(found, values.mul_(path.coefficient), at in written)
            written.add(at)
        return found

    def _of_weights(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kernel.takes(x):
            return self.kernel.weights(x, y)
        found = x.new_empty(self.weight_numel)
        if joins_blocks(x):
            for run in self.runs:
                path = run.first
                target = found.narrow(0, path.w, run.count * path.numel).view(run.rows, path.columns)
                # One sum over components and nodes, which is split among a GPU's blocks; one a component is not.
                left, right = run.of_x(x).flatten(0, 1), _rows(y, path, "y").flatten(0, 1)
                target.addmm_(left.t(), right, beta=0.0, alpha=path.coefficient)
            return found
        for path in self.merged:
            target = found.narrow(0, path.w, path.numel).view(path.rows, path.columns)
            pairs = _rows(x, path, "x").mT, _rows(y, path, "y")
            for component, (rows, columns) in enumerate(zip(*pairs, strict=True)):
                target.addmm_(rows, columns, beta=float(component > 0), alpha=path.coefficient)
        return found

    def traceable(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        if wanted == "w":
            parts = [
                path.coefficient
                * torch.matmul(_block(first, path, "x").transpose(1, 2), _block(second, path, "y"))
                .sum(0)
                .reshape(path.numel)
                for path in sorted(self.paths, key=lambda path: path.w)
            ]
            return torch.cat(parts)
        features, weights = (first, second) if wanted == "y" else (second, first)
        found: dict[int, Tensor] = {}
        for path in self.paths:
            matrix = path.coefficient * weights.narrow(0, path.w, path.numel).view(path.rows, path.columns)
            source = _block(features, path, "x" if wanted == "y" else "y")
            values = torch.matmul(source, matrix if wanted == "y" else matrix.t()).transpose(0, 1)
            values = values.reshape(features.shape[0], path.dim * _mul(path, wanted))
            at = getattr(path, wanted)
            found[at] = found[at] + values if at in found else values
        return joined(found, self.dims[wanted], features)


def _mul(path: Path, side: str) -> int:
    return path.rows if side == "x" else path.columns


def _block(features: Tensor, path: Path, side: str) -> Tensor:
    return components(features, getattr(path, side), path.dim, _mul(path, side))


def _rows(features: Tensor, path: Path, side: str) -> Tensor:
    return component_rows(features, getattr(path, side), path.dim, _mul(path, side))


def _merged(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Neighbouring blocks of scalars that go to one block, and there alone, become one product."""
    uses = Counter(path.x for path in paths)
    found: list[Path] = []
    for path in sorted(paths, key=lambda path: path.w):
        last = found[-1] if found else None
        if (
            last is not None
            and path.dim == last.dim == 1
            and uses[path.x] == uses[last.x] == 1
            and (path.y, path.columns, path.coefficient) == (last.y, last.columns, last.coefficient)
            and path.x == last.x + last.rows
            and path.w == last.w + last.numel
        ):
            found[-1] = dataclasses.replace(last, rows=last.rows + path.rows)
        else:
            found.append(path)
    return tuple(found)


def joins_blocks(features: Tensor) -> bool:
    """Whether runs of blocks are copied and multiplied as one: a GPU is slow at many small products, above all at
    gradients by weights, where a few results are sums over all nodes. On a CPU a copy costs more than it saves.
    """
    return features.is_cuda


def _runs(paths: Sequence[Path]) -> tuple[Run, ...]:
    """Neighbouring blocks of x with neighbouring matrices for one block of y become one run."""
    found: list[Run] = []
    for path in sorted(paths, key=lambda path: path.w):
        last = found[-1] if found else None
        if last is not None:
            first, count = last.first, last.count
            at = {"x": first.x + count * first.dim * first.rows, "w": first.w + count * first.numel}
            if path == dataclasses.replace(first, **at):
                found[-1] = Run(first, count + 1)
                continue
        found.append(Run(path, 1))
    ends: dict[int, set[int]] = {}
    for run in found:
        ends.setdefault(run.first.x, set()).add(run.end)
    spans = sorted((begin, *reached) for begin, reached in ends.items())
    # A gradient by x is written by the first run of a place, and the others add to it: they must have the same blocks.
    are_apart = all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    return tuple(found) if are_apart and all(len(span) == 2 for span in spans) else tuple(Run(one, 1) for one in paths)


class AcceleratedLinear(NodeStandIn, o3.Linear):
    """Replaces one ``e3nn.o3.Linear`` with weights of its own; is one, for code that looks for them (LoRA).

    irreps_in: the irreps of what it is given, if the layer's are these with neighbours joined; then it says so, and its
    ``instructions`` are those of these blocks. The weights are the same.
    ``AcceleratedLinear(irreps_in, irreps_out, ...)``, as of e3nn's class, is a new layer in layout ``ir_mul``.
    """

    original: Any
    detail = "matrix products in layout ir_mul"

    def __init__(self, original: Any, irreps_out: Any = None, *, irreps_in: str | None = None, **options: Any) -> None:
        torch.nn.Module.__init__(self)
        if irreps_out is not None:
            original = o3.Linear(original, irreps_out, **options)
        if not (original.internal_weights and original.shared_weights) or original.weight.dim() > 1:
            raise UnsupportedError("its weights are not one row of its own")
        given = o3.Irreps(str(irreps_in or original.irreps_in)).remove_zero_multiplicities()
        parts = _parts_of_blocks(str(given), str(original.irreps_in))
        paths = _paths_of(original, parts)
        self.__dict__["form"] = BlockMatrices(paths, (original.irreps_in.dim, original.irreps_out.dim))
        # Offset and length of the blocks with a bias, in the order of the biases.
        outputs = blocks_of(str(original.irreps_out))
        blocks = (outputs[step.i_out] for step in original.instructions if step.i_in < 0)
        self.__dict__["biased"] = tuple((block.offset, block.mul) for block in blocks)
        self._take_place_of(original)
        self.__dict__["irreps_in"], self.__dict__["instructions"] = given, _instructions(original, parts)

    def forward(self, features: Tensor) -> Tensor:
        """``[..., irreps_in.dim]`` -> ``[..., irreps_out.dim]``."""
        rows, weight = autocast(features if features.dim() == 2 else features.flatten(0, -2), self.weight)
        form: BlockMatrices = self.form
        if form.paths:
            check_last("features", rows, form.dims["x"])
            found = form(rows, weight)
        else:  # e3nn looks at no features then, and MACE gives it too few
            found = rows.new_zeros(len(rows), form.dims["y"])
        if self.biased:
            biases = self.bias.split([mul for _, mul in self.biased])
            blocks = {offset: bias[None] for (offset, _), bias in zip(self.biased, biases, strict=True)}
            found = found + joined(blocks, found.shape[1], found[:1])[0]
        return found.reshape(*features.shape[:-1], found.shape[1])

    @property
    def block_products(self) -> tuple[BlockProduct, ...]:
        """The kernels that a user's choice of precision is for."""
        form: BlockMatrices = self.form
        is_wide = form.paths and all(path.columns >= LEAST_IN_TF32 for path in form.paths)
        return (form.kernel,) if is_wide else ()

    def __getstate__(self) -> dict[str, Any]:
        # e3nn's looks for generated code among the children.
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)


def _paths_of(linear: Any, parts: list[list[Block]]) -> list[Path]:
    """parts: for each block of the input, those that it is given in."""
    outputs = blocks_of(str(linear.irreps_out))
    found, at = [], 0
    for step in linear.instructions:
        if step.i_in < 0 or 0 in step.path_shape:  # biases have no input block
            continue
        last, coefficient = outputs[step.i_out], float(step.path_weight)
        for part in parts[step.i_in]:
            found.append(Path(part.offset, last.offset, at, part.mul, last.mul, last.dim, coefficient))
            at += found[-1].numel
    return found


def _instructions(linear: Any, parts: list[list[Block]]) -> list[Any]:
    """The layer's instructions as those of its parts, which have neighbouring rows of its matrices."""
    first = list(itertools.accumulate(map(len, parts), initial=0))
    found = []
    for step in linear.instructions:
        if step.i_in < 0:  # a bias
            found.append(step)
            continue
        for number, part in enumerate(parts[step.i_in], first[step.i_in]):
            found.append(step._replace(i_in=number, path_shape=(part.mul, *step.path_shape[1:])))
    return found


def _parts_of_blocks(given: str, joined_irreps: str) -> list[list[Block]]:
    """For each block of irreps, the blocks that are neighbours in ``given`` and make it up."""
    left = [block for block in blocks_of(given) if block.mul]
    found = []
    for whole in blocks_of(joined_irreps):
        parts: list[Block] = []
        irrep = whole.text.split("x")[1]
        while sum(part.mul for part in parts) < whole.mul and left and left[0].text.split("x")[1] == irrep:
            parts.append(left.pop(0))
        if sum(part.mul for part in parts) != whole.mul:
            raise UnsupportedError(f"it takes {joined_irreps}, and is given {given}")
        found.append(parts)
    return found


# Vectors times matrices of few kinds (a cell, a strain), one for each structure, as models read them at every edge.
#
# ``cell[batch]`` and a batched product of its rows are what packages write. On a GPU both are slow. The gradient by the
# cell is a sum over all edges of a structure into one row, and a batched product of 3 by 3 matrices takes some 6
# nanoseconds an edge with its gradients (H200: 2.6 ms of 51 for 443,000 edges, where the sum took another 1.5).

# Rows that are summed one after the other.
_TOGETHER = 256


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` for a table of few rows; its gradient is summed by parts of the index, then over parts.

    Not by an index in brackets: that gradient sorts, and adds up row by row.
    """
    if index.dim() != 1:  # would be broadcast, or not looked at
        raise InputError(f"batch has shape {tuple(index.shape)}; expected the structure of each atom, [atoms]")
    count = table.shape[0]
    if count == 1:
        return table.expand(index.shape[0], *table.shape[1:])
    parts = -(-index.shape[0] // _TOGETHER)
    copies = table.expand(parts, *table.shape).flatten(0, 1)
    return copies.index_select(0, torch.arange(index.shape[0], device=index.device) // _TOGETHER * count + index)


def times_matrices(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Each row [n, 3] times its matrix [n, 3, 3], as ``einsum("be,bec->bc")``, without a batched matrix product."""
    return (vectors.unsqueeze(-1) * matrices).sum(-2)
