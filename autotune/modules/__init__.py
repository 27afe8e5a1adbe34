"""What a model imports: torch modules in the places of e3nn's, which load the best schedules known.

In: irreps and instructions, as e3nn's modules take them. Out: modules with the same parameters and results. Read
``base`` (lookup and build on first use), ``tensor_product``, ``spherical_harmonics``, ``spherical_harmonics_conv``,
``e3nn_products``; ``e3nn_replacement`` puts ``stand_ins`` into a finished model. Nothing here searches or measures.
"""
