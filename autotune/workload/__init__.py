"""What is tuned: problems on graphs, in a direction, dtype and layout.

In: a TOML config, or names. Out: workloads and their tensors. Read ``graphs``, ``kinds`` (how a kind of kernel is
chosen), ``workload`` (with classes of graphs, passes that a comparison times, and tensors), ``config`` with
``toml_tables``, ``objective`` (what a search minimises).
"""
