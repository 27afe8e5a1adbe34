"""What is computed, in e3nn's terms: frozen, hashable values with a stable text form.

In: irreps, instructions, degrees, as a user gives them. Out: a problem, checked, whose ``key`` any process reads back.
Read ``irreps``, ``connection_modes``, then ``tensor_product``; ``spherical_harmonics`` and ``edge_vectors`` (a product
of harmonics of vectors) are the other two problems, and ``from_e3nn`` takes a module of e3nn.
"""
