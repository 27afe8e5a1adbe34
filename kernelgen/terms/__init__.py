"""The arithmetic of a problem as data: which sums of products a kernel computes.

In: a problem and a direction (value, first or second derivatives). Out: terms and statements, the same for all devices.
Read ``clebsch_gordan`` (the form of a product, and the coefficients of a path), ``directions`` (its derivatives), then
``path_statements`` (a path as statements). For spherical harmonics: ``scalar_statements``, ``harmonics_statements``.
For symmetric contractions: ``contraction_couplings`` (polynomials as couplings of irreps), ``cheapest_couplings`` (a
basis of them), ``equivariant_polynomials`` (its polynomials), ``contraction_statements`` with ``coupled_statements``.
"""
