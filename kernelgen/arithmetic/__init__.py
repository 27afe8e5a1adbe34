"""The arithmetic of a problem as data: which sums of products a kernel computes.

In: a problem and a direction (value, first or second derivatives). Out: terms and statements, the same for all devices.
Read ``couplings`` (the form of a product, the coefficients of a path, and the path as statements) and ``directions``
(its derivatives). ``harmonics`` has the statements of spherical harmonics, ``contraction`` those of
symmetric contractions, which ``contraction_couplings`` chooses.
"""
