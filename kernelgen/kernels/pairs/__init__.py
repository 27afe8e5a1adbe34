"""Tensor products whose paths pair copies of both inputs, for CUDA and for the host.

In: a spec of a product. Out: a plan, and the text of its kernel. Read ``plan``, then ``emit`` (the frame, and the
three steps of a path); ``channels`` has products of equal channels, where a thread takes the place of a team.
"""
