"""What Equitune knows of each model package, one file each.

In: a module of a model. Out: whether it is a block of the package that gathers, multiplies and sums, and how it calls a
convolution (``BLOCKS``). No file imports its package: a model of a package that nobody imported cannot be there. Read
``mace``, whose blocks can call a convolution, then ``nequip``.
"""
