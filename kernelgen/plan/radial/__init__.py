"""Parts of the plan of a radial convolution, and its default schedules.

In: a spec, or its plan so far. Out: what ``radial_convolution`` beside this folder plans with. Read ``coupled`` (paths
whose gradients tensor cores form), and ``defaults`` (schedules of untuned convolutions).
"""
