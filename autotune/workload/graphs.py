"""Build the graphs to tune on, from a description (atoms and a cutoff) to sorted edges.

:func:`build_graph` makes a :class:`Graph` from a :class:`GraphSpec`. Real structures matter, because the degrees of a
graph and the locality of its senders decide which schedule wins.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from autotune import paths
from autotune.errors import ConfigError

if TYPE_CHECKING:
    from ase import Atoms

# Most atoms (with periodic images) and edges of a graph: a few gigabytes each.
MOST_ATOMS, MOST_EDGES = 2**26, 2**27


class AtomSource(Protocol):
    """A frozen description of atoms; equal descriptions give equal atoms."""

    def atoms(self) -> Atoms: ...


@dataclass(frozen=True)
class Crystal:
    """A crystal from its space group, cell (lengths in angstrom, angles in degrees) and asymmetric unit."""

    spacegroup: int
    cell: tuple[float, ...]
    sites: tuple[tuple[str, float, float, float], ...]

    def atoms(self) -> Atoms:
        from ase.spacegroup import crystal

        symbols = [site[0] for site in self.sites]
        basis = [site[1:] for site in self.sites]
        return crystal(symbols, basis=basis, spacegroup=self.spacegroup, cellpar=list(self.cell))


@dataclass(frozen=True)
class Bulk:
    """``ase.build.bulk``: an elemental or simple compound crystal."""

    name: str
    crystalstructure: str
    a: float
    cubic: bool = True

    def atoms(self) -> Atoms:
        from ase.build import bulk

        return bulk(self.name, self.crystalstructure, a=self.a, cubic=self.cubic)


@dataclass(frozen=True)
class Molecule:
    """``ase.build.molecule``: a molecule of the G2 set by its formula or name."""

    name: str

    def atoms(self) -> Atoms:
        from ase.build import molecule

        try:
            return molecule(self.name)
        except KeyError as error:
            raise ConfigError(f"molecule {self.name!r} is not one that ase.build.molecule knows") from error


@dataclass(frozen=True)
class Points:
    """Uniformly random points in a periodic cube; ``density`` in points per cubic angstrom."""

    number: int
    density: float
    seed: int = 0

    def atoms(self) -> Atoms:
        from ase import Atoms

        _require_fewer("points", "atoms", self.number, MOST_ATOMS, "number")
        side = (self.number / self.density) ** (1 / 3)
        positions = np.random.default_rng(self.seed).uniform(0.0, side, (self.number, 3))
        return Atoms(numbers=[1] * self.number, positions=positions, cell=[side] * 3, pbc=True)


@dataclass(frozen=True)
class StructureFile:
    """A file that ase can read: in ``$EQUITUNE_STRUCTURES``, then in ``folder`` (the config's), then shipped."""

    path: str
    folder: str = "."

    def atoms(self) -> Atoms:
        import ase.io

        atoms = ase.io.read(self.find())
        return atoms[-1] if isinstance(atoms, list) else atoms

    def find(self) -> Path:
        """The file, or ConfigError with the places searched."""
        places = [Path(folder) for folder in (os.environ.get("EQUITUNE_STRUCTURES"), self.folder) if folder]
        for place in places:
            if (place / self.path).is_file():
                return place / self.path
        shipped = paths.structures_dir() / f"{self.path}.gz"
        if shipped.is_file():
            return shipped
        tried = " or ".join(str(place) for place in places)
        raise ConfigError(f"structure file {self.path!r} is not in {tried}; set EQUITUNE_STRUCTURES to its folder")


@dataclass(frozen=True)
class RandomNeighbours:
    """Exactly ``num_edges`` edges between random points in a periodic cube, the shortest ones.

    For a graph of which only the size is known: degrees vary and senders are near, as in a liquid.
    """

    num_nodes: int
    num_edges: int

    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Receivers, senders, and vectors from sender to receiver."""
        side = self.num_nodes ** (1 / 3)
        points = np.random.default_rng(0).uniform(0.0, side, (self.num_nodes, 3))
        cutoff = (3 * (1 + self.num_edges / self.num_nodes) / (4 * math.pi)) ** (1 / 3)
        while True:
            cutoff *= 1.1
            receiver, sender, vectors = neighbours(points, side * np.eye(3), np.ones(3, bool), cutoff)
            if len(receiver) >= self.num_edges:
                nearest = np.argsort(np.linalg.norm(vectors, axis=1), kind="stable")[: self.num_edges]
                return receiver[nearest], sender[nearest], vectors[nearest]


@dataclass(frozen=True)
class EdgesAlone:
    """A number of edges without nodes, for operations that work edge by edge."""

    number: int


@dataclass(frozen=True)
class NodesAlone:
    """A number of nodes without edges, for operations that work node by node.

    elements: rows of the table of weights. occurring: how many of them the nodes have, about equally often and in
    random order, as far as there are nodes.
    """

    number: int
    elements: int = 89
    occurring: int = 3

    def rows(self) -> torch.Tensor:
        """The row of each node, [number] int64; always the same."""
        generator = torch.Generator().manual_seed(0)
        occurring = torch.randperm(self.elements, generator=generator)[: self.occurring]
        return occurring[torch.randperm(self.number, generator=generator) % len(occurring)]


@dataclass(frozen=True)
class GraphSpec:
    """Description of a graph: atoms, repeated along the cell's vectors, connected within ``cutoff`` (angstrom).

    Edges or nodes alone, and sources of edges, have neither cutoff nor repeat.
    """

    name: str
    source: AtomSource | GivenEdges | DegreeLaw | RandomNeighbours | EdgesAlone | NodesAlone
    cutoff: float = 0.0
    repeat: tuple[int, int, int] = (1, 1, 1)

    @property
    def has_nodes(self) -> bool:
        return not isinstance(self.source, EdgesAlone | NodesAlone)


@dataclass(frozen=True, eq=False)
class Graph:
    """Directed edges, in both directions, sorted by receiver, then sender (int64, CPU).

    ``vectors`` [edges, 3] point from the sender (its nearby periodic image) to the receiver, in angstrom. Of nodes
    alone each is an "edge": ``sender`` is its row in the table of weights, ``num_nodes`` counts the rows that occur.
    """

    name: str
    sender: torch.Tensor
    receiver: torch.Tensor
    vectors: torch.Tensor
    num_nodes: int

    @property
    def num_edges(self) -> int:
        return self.sender.shape[0]


@functools.lru_cache(maxsize=32)
def build_graph(spec: GraphSpec) -> Graph:
    """Build a graph; the same description always gives the same edges in the same order."""
    if isinstance(spec.source, EdgesAlone):
        nowhere = torch.zeros(1, dtype=torch.long).expand(spec.source.number)
        return Graph(spec.name, nowhere, nowhere, torch.zeros(1, 3).expand(spec.source.number, 3), 0)
    if isinstance(spec.source, NodesAlone):
        rows = spec.source.rows()
        return Graph(spec.name, rows, rows, torch.zeros(1, 3).expand(len(rows), 3), len(rows.unique()))
    if isinstance(spec.source, GivenEdges | DegreeLaw):
        given = spec.source
        # No vectors are known of edges alone, and no kernel's time depends on them.
        return Graph(spec.name, *given.edges(), torch.zeros(1, 3).expand(given.num_edges, 3), given.num_nodes)
    if isinstance(spec.source, RandomNeighbours):
        return _graph(spec.name, *spec.source.edges(), spec.source.num_nodes)
    cell_atoms = spec.source.atoms()
    _require_fewer(f"graph {spec.name!r}", "atoms", len(cell_atoms) * math.prod(spec.repeat), MOST_ATOMS, "repeat")
    atoms = cell_atoms.repeat(spec.repeat)
    positions, cell = atoms.get_positions(), np.asarray(atoms.get_cell())
    if len(positions) == 0 or not 0 < spec.cutoff < math.inf:
        raise ConfigError(
            f"graph {spec.name!r} has {len(positions)} atoms and cutoff {spec.cutoff}; both must be positive and finite"
        )
    try:
        receiver, sender, vectors = neighbours(positions, cell, np.asarray(atoms.get_pbc()), spec.cutoff)
    except ConfigError as error:
        raise ConfigError(f"graph {spec.name!r}, cutoff {spec.cutoff:g}: {error}") from error
    return _graph(spec.name, receiver, sender, vectors, len(positions))


def _graph(name: str, receiver: np.ndarray, sender: np.ndarray, vectors: np.ndarray, num_nodes: int) -> Graph:
    order = np.lexsort((sender, receiver))
    senders, receivers, rows = (torch.from_numpy(array[order]) for array in (sender, receiver, vectors))
    return Graph(name, senders, receivers, rows, num_nodes)


def neighbours(
    positions: np.ndarray, cell: np.ndarray, periodic: np.ndarray, cutoff: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every ordered pair closer than ``cutoff``: receivers, senders, vectors from sender to receiver.

    Periodic images are generated explicitly, as far as the cutoff reaches beyond the atoms, and a k-d tree finds the
    pairs. So memory grows with the number of edges only; cell lists of numpy arrays need too much at 20,000 atoms.
    Raises ConfigError, before it allocates memory, if there would be too many images or edges.
    """
    from scipy.spatial import cKDTree

    images, shifts = _images(positions, cell, periodic, cutoff)
    points = (positions[None, :, :] + shifts[:, None, :]).reshape(-1, 3)
    low, high = positions.min(axis=0) - cutoff, positions.max(axis=0) + cutoff
    near = np.flatnonzero(((points >= low) & (points <= high)).all(axis=1))
    tree, others = cKDTree(positions), cKDTree(points[near])
    if len(positions) * len(near) > MOST_EDGES:
        _require_fewer("it", "edges", int(tree.count_neighbors(others, cutoff)), MOST_EDGES, "cutoff")
    found = tree.sparse_distance_matrix(others, cutoff, output_type="ndarray")
    receiver = found["i"].astype(np.int64)
    point = near[found["j"]]
    keep = (found["v"] < cutoff) & ~((point % len(positions) == receiver) & (images == point // len(positions)))
    receiver, point = receiver[keep], point[keep]
    return receiver, (point % len(positions)).astype(np.int64), positions[receiver] - points[point]


def _images(positions: np.ndarray, cell: np.ndarray, periodic: np.ndarray, cutoff: float) -> tuple[int, np.ndarray]:
    """The index of the unshifted image, and the shift [images, 3] of every image that may contain a neighbour."""
    reach = [0, 0, 0]
    if periodic.any():
        full = cell.copy()
        full[~periodic] = np.eye(3)[~periodic]
        if abs(np.linalg.det(full)) < 1e-9:
            raise ConfigError("its periodic cell has no volume; expected three vectors that span space")
        inverse = np.linalg.inv(full)
        fractions = positions @ inverse
        spread = fractions.max(axis=0) - fractions.min(axis=0)
        # A distance d spans at most d * |reciprocal vector| cells.
        reach = [
            math.ceil(spread[k] + cutoff * float(np.linalg.norm(inverse[:, k]))) if periodic[k] else 0 for k in range(3)
        ]
    _require_fewer("it", "periodic images of atoms", len(positions) * math.prod(2 * n + 1 for n in reach), MOST_ATOMS)
    steps = np.array(list(itertools.product(*(range(-n, n + 1) for n in reach))))
    return len(steps) // 2, steps @ cell


def _require_fewer(what: str, of: str, number: int, most: int, key: str = "cutoff") -> None:
    if number > most:
        count = f"{number:.2g}" if number < 10**18 else "more than 10^18"  # some do not fit a float
        raise ConfigError(f"{what} would have {count} {of}; at most {most:.2g} fit, so choose a smaller {key}")


# Quantiles of edges a node between the least and the most, by the law's name.
LAWS = ("power", "lognormal", "hubs")
# Nodes with most edges, of "hubs".
HUBS = 0.01


@dataclass(frozen=True)
class GivenEdges:
    """Edges, and the number of nodes. Make it with :meth:`of`.

    digest: of the edges; two sources with the same one are equal. packed: int32 receivers and senders, compressed, so
    that a worker process gets all it needs with the source.
    """

    num_nodes: int
    num_edges: int
    digest: str
    packed: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, sender: torch.Tensor, receiver: torch.Tensor, num_nodes: int) -> GivenEdges:
        """sender, receiver [edges], in any order; senders beyond ``num_nodes`` (ghosts) count as earlier nodes."""
        senders = sender.detach().cpu().numpy().astype(np.int64) % max(1, num_nodes)
        receivers = receiver.detach().cpu().numpy().astype(np.int64)
        order = np.lexsort((senders, receivers))
        data = np.stack([receivers[order], senders[order]]).astype("<i4").tobytes()
        digest = hashlib.sha256(f"{num_nodes} ".encode() + data).hexdigest()[:12]
        return cls(num_nodes, len(order), digest, zlib.compress(data, 1))

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """sender and receiver [edges] int64, sorted by receiver, then sender."""
        both = np.frombuffer(zlib.decompress(self.packed), "<i4").reshape(2, self.num_edges).astype(np.int64)
        return torch.from_numpy(both[1]), torch.from_numpy(both[0])


@dataclass(frozen=True)
class DegreeLaw:
    """The configuration model: edges from ``least`` to ``most`` a node, joined at random; senders have equal degrees.

    law: ``power``: the number of nodes with k edges falls as 1/k^2; ``lognormal``: logarithms are normally
    distributed between the two; ``hubs``: one node in a hundred has the most, all others the least.
    """

    num_nodes: int
    law: str
    least: int
    most: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ConfigError(f"law of degrees is {self.law!r}; expected one of {LAWS}")
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"degrees go from {self.least} to {self.most}; expected at least 1, in ascending order")

    @property
    def num_edges(self) -> int:
        return int(self.degrees().sum())

    def degrees(self) -> torch.Tensor:
        """Edges of each node, [num_nodes] int64, in random order."""
        counts = torch.tensor([self._quantile((i + 0.5) / self.num_nodes) for i in range(self.num_nodes)])
        return counts[torch.randperm(self.num_nodes, generator=torch.Generator().manual_seed(self.seed))]

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """sender and receiver [edges] int64, sorted by receiver, then sender."""
        receiver = torch.arange(self.num_nodes).repeat_interleave(self.degrees())
        generator = torch.Generator().manual_seed(self.seed + 1)
        sender = receiver[torch.randperm(len(receiver), generator=generator)]
        order = torch.argsort(receiver * self.num_nodes + sender, stable=True)
        return sender[order], receiver[order]

    def _quantile(self, share: float) -> int:
        """Edges of the node that stands at this share of all nodes, by ascending degree."""
        least, most = self.least, self.most
        if self.law == "hubs":
            return most if share > 1 - HUBS else least
        if self.law == "power":
            return round(1 / (1 / least - share * (1 / least - 1 / most)))
        widest = NormalDist().inv_cdf(1 - 0.5 / self.num_nodes) or 1.0
        middle, width = math.log(least * most) / 2, math.log(most / least) / 2
        return round(math.exp(middle + width * NormalDist().inv_cdf(share) / widest))


# The gas-phase molecule (angstrom, degrees), and the volume of a molecule in the liquid at 298 K (0.997 g/cm^3).
OH, HOH, VOLUME = 0.9572, 104.52, 30.0


@dataclass(frozen=True)
class Water:
    """``side``^3 water molecules in a periodic cube, randomly turned, each oxygen near a site of a cubic lattice.

    The density and the number of neighbours are the liquid's; the arrangement is not equilibrated.
    """

    side: int
    seed: int = 0

    def atoms(self) -> Atoms:
        from ase import Atoms

        random, spacing = np.random.default_rng(self.seed), VOLUME ** (1 / 3)
        sites = np.stack(np.meshgrid(*[np.arange(self.side)] * 3, indexing="ij"), -1).reshape(-1, 3)
        oxygens = spacing * (sites + 0.5) + random.normal(0.0, 0.15, sites.shape)
        half = np.radians(HOH / 2)
        molecule = OH * np.array(
            [[0.0, 0.0, 0.0], [np.sin(half), 0.0, np.cos(half)], [-np.sin(half), 0.0, np.cos(half)]]
        )
        # Uniformly random rotations: the orthogonal part of random matrices.
        turns, upper = np.linalg.qr(random.normal(size=(len(sites), 3, 3)))
        turns *= np.sign(np.einsum("nii->ni", upper))[:, None, :]
        positions = oxygens[:, None] + np.einsum("nij,mj->nmi", turns, molecule)
        return Atoms("OHH" * len(sites), positions=positions.reshape(-1, 3), cell=[self.side * spacing] * 3, pbc=True)
