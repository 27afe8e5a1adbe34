"""Peers of spherical harmonics: each agrees with e3nn in every pass, or says what it is not compared in."""

from __future__ import annotations

import pytest

from autotune.compare.peers import peer_names, peers_for
from autotune.compare.peers.peer import Peer
from autotune.errors import PeerError
from autotune.workload.graphs import EdgesAlone, GraphSpec
from autotune.workload.workload import Workload
from kernelgen.arithmetic.directions import HARMONICS_DIRECTIONS
from kernelgen.problem.other_kinds import HarmonicsProblem

L2 = HarmonicsProblem((0, 1, 2), "component", True)


def peers(problem: HarmonicsProblem, dtype: str = "float32") -> list[Peer]:
    return peers_for(Workload("sh", problem, "harmonics", GraphSpec("few", EdgesAlone(300)), dtype), "cpu")


@pytest.mark.parametrize("name", ["e3nn", "cuequivariance-naive", "sphericart"])
def test_peers_agree_in_every_pass(name: str) -> None:
    pytest.importorskip("cuequivariance_torch")
    pytest.importorskip("sphericart")
    assert peer_names("cpu", operation="harmonics") == ("e3nn", "e3nn-compiled", "cuequivariance-naive", "sphericart")
    for dtype in ("float32", "float64"):
        peer = next(peer for peer in peers(L2, dtype) if peer.name == name)
        passes = peer.prepare()
        for which in ("forward", "backward", "double_backward", "forward_backward"):
            getattr(passes, which)()
        assert {key: "".join(errors) for key, errors in passes.errors.items()} == {
            key: direction.outputs for key, direction in HARMONICS_DIRECTIONS.items()
        }
        assert all(error < 1e-5 for errors in passes.errors.values() for error in errors.values()), passes.errors


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("normalization", ["component", "norm", "integral"])
def test_sphericart_in_every_convention(normalization: str, normalize: bool) -> None:
    """Its axes, order and factors are not e3nn's; what is converted is not timed."""
    pytest.importorskip("sphericart")
    problem = HarmonicsProblem((0, 1, 2, 3), normalization, normalize)
    passes = next(peer for peer in peers(problem, "float64") if peer.name == "sphericart").prepare()
    passes.double_backward()
    passes.backward()
    assert set(passes.errors) == {"forward", "backward", "double_backward"}
    assert all(error < 1e-12 for errors in passes.errors.values() for error in errors.values()), passes.errors
    some = peers(HarmonicsProblem((1, 3), normalization, normalize))
    with pytest.raises(PeerError, match=r"all degrees up to one, in order, not \[1, 3\]"):
        next(peer for peer in some if peer.name == "sphericart").prepare()


def test_cuequivariance_is_compared_where_it_is_the_same() -> None:
    pytest.importorskip("cuequivariance_torch")
    for problem in (HarmonicsProblem((0, 1), "integral", True), HarmonicsProblem((1, 0), "component", True)):
        peer = next(peer for peer in peers(problem) if peer.name == "cuequivariance-naive")
        with pytest.raises(PeerError, match="distinct rising degrees in normalization 'component'"):
            peer.prepare()
