"""``equitune bench --models``: whole models by stock, the packages' own fast paths, and Equitune.

In: models, structures and a device. Out: rows of ``results/models/DEVICE.json`` and a table. Read ``run`` (the loop),
``contenders`` (who takes part), ``session`` (what a contender's process does), ``measuring`` and ``values`` (one
figure, one comparison), ``rows`` and ``text``; ``largest`` and ``largest_rows``: the largest crystal that fits.
"""
