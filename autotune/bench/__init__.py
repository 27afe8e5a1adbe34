"""``equitune bench``: compare all workloads of a config with all peers.

In: a config and a device. Out: rows of ``results/bench`` and a table. Read ``run``, ``plans`` (what is compared),
``rows`` (how rows are stored), ``turns`` (what is measured next), ``text``, ``again`` (old rows anew) and ``orders``
(a figure that older rows lack).
"""
