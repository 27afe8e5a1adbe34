"""Text of products whose paths pair copies of both inputs, for CUDA and for the host.

In: a plan of ``kernelgen.plan.pairs``. Out: the text of its kernel. Read ``kernel`` (the frame), ``path_steps`` (the
three steps of a path), ``weights`` (the step that multiplies pairs by weights).
"""
