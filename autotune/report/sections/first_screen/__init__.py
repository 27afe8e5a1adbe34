"""The first screen of a device's page: one sentence for all rows, then the bars of the row that a reader picks.

In: the data of one device. Out: markup, models' rows first, else kernels'. Read ``screen``, ``models``, ``kernels``,
``reproduce``.
"""
