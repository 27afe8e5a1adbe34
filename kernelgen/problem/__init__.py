"""What is computed, in e3nn's terms: frozen, hashable values with a stable text form.

In: irreps, instructions, degrees, as a user gives them. Out: a checked problem, whose ``key`` any process can read
back. Read ``irreps``, ``connection_modes``, then ``tensor_product``; ``spherical_harmonics`` and ``edge_vectors``
(products with harmonics of edge vectors) are the other problems; ``from_e3nn`` converts e3nn modules.
"""
