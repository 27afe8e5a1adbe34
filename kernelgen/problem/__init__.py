"""What is computed, in e3nn's terms: frozen, hashable values with a stable text form.

In: irreps, instructions, degrees, as a user gives them. Out: a checked problem, whose ``key`` any process can read
back. Read ``irreps``, then ``product``. ``other_kinds`` has the problems of harmonics (and of products with harmonics
of edge vectors) and of contractions.
"""
