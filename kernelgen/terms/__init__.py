"""The arithmetic of a problem as data: which sums of products a kernel computes.

In: a problem and a direction (value, first or second derivatives). Out: terms and statements, the same for all devices.
Read ``directions``, ``clebsch_gordan`` (the coefficients of a path), ``path_statements`` (a product's path as
statements); ``scalar_statements`` and ``harmonics_statements`` do the same for spherical harmonics.
"""
