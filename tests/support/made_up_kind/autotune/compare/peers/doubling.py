"""A peer of a made-up kind."""

from __future__ import annotations

from autotune.compare.peers.peer import Adapter, Product

ADAPTERS = (
    Adapter(
        *("torch", ("cpu", "cuda"), lambda device: None, lambda task: Product(lambda x: 2 * x)),
        module="torch", operations=("doubling",),
    ),
)  # fmt: skip
