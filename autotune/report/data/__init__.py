"""Read the data of a page from results: databases, bench rows, trials.

In: a results folder. Out: frozen data of one device. Read ``device_data``, ``suite_rows``, ``knob_importance``.
"""
