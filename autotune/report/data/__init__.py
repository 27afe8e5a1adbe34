"""Read the data of a page from results: databases, rows of kernels and models, trials.

In: a results folder. Out: frozen data of one device, and the rows of all. Read ``device_data``, ``suite_rows``,
``model_rows``, ``devices``, ``knob_importance``.
"""
