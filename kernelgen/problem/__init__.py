"""What is computed, in e3nn's terms: frozen, hashable values with a stable text form.

In: irreps, instructions, degrees, as a user gives them. Out: a checked problem, whose ``key`` any process can read
back. Read ``irreps``, ``connection_modes``, then ``tensor_product``. The other problems are ``spherical_harmonics``,
``edge_vectors`` (products with harmonics of edge vectors), ``radial_convolution`` (products that form their weights)
and ``symmetric_contraction``. ``from_e3nn`` converts e3nn modules; ``shape`` is what a problem's speed depends on.
"""
