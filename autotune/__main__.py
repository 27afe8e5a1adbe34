"""``python -m autotune``: the ``equitune`` command for a checkout that is not installed."""

from autotune.cli import main

if __name__ == "__main__":
    main()
