"""The arithmetic of a problem as data: which sums of products a kernel computes.

In: a problem and a direction (value, first or second derivatives). Out: terms and scalar statements, still without a
device. Read ``directions``, ``clebsch_gordan`` (the coefficients of a path), ``path_statements`` (a path of a product
as statements); ``scalar_statements`` and ``harmonics_statements`` do the same for spherical harmonics.
"""
