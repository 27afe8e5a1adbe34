"""What is tuned: problems on graphs, in a direction, dtype and layout.

In: a TOML config, or names. Out: workloads and their tensors. Read ``graphs``, ``kinds`` (how a kind of kernel is
chosen), ``graph_class``, ``workload``, ``tensors``; ``passes`` (what a comparison times), ``config`` with
``config_tables``, ``toml_tables`` and ``restriction``.
"""
