"""``equitune certify``: whether each way to run a model is the same potential as stock in float64.

In: a checkpoint or a module, structures or none, names of paths. Out: a certificate: each path's figures, limits and
verdicts, and the smallest structure that shows a fault. Read ``structures`` (what is drawn from a model's elements),
``observations`` (what a path is asked about a structure), ``checks`` (figures, their units and limits), ``table`` (the
record in words) and ``certificate`` (paths, verdicts, the record).
"""
