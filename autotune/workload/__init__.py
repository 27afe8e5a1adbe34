"""What is tuned: problems on graphs, in a direction, dtype and layout.

In: a TOML config, or names. Out: workloads and their tensors. Read ``graphs``, ``kind`` (how a kind of kernel is
chosen) with ``known_kinds``, ``workload`` (with classes of graphs, passes that a comparison times, and tensors),
``config`` with ``toml_tables``, ``objective`` (what a search minimises).
"""
