"""The packages' blocks as one convolution, for packages whose own ``forward`` gathers and sums.

In: the arguments of the package's block. Out: its results. Each file imports its package, and holds subclasses of its
blocks. Read ``nequip``, the shortest.
"""
