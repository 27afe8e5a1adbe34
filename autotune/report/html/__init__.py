"""Parts of a page: markup that escapes its content, figures, folded tables and sources.

In: plain values. Out: markup. Read ``markup``, ``packed``, ``frame`` (a whole document), ``bars``, ``figures`` and
``suite_figures`` with ``svg``, ``samples``, ``sources`` and ``knobs``.
"""
