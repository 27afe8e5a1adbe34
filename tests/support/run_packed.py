"""Runs Equitune's operators from its C++ library in a process that has torch alone.

    python run_packed.py LIBRARY CALLS RESULTS

CALLS: a list of (op, arguments) by torch.save. RESULTS gets a list of the outputs of each, or the text of its error.
"""

import sys

import torch


def main(library: str, calls: str, results: str) -> None:
    torch.ops.load_library(library)
    found = []
    for op, arguments in torch.load(calls):
        try:
            made = getattr(torch.ops.equitune, op)(*arguments)
            found.append([made] if isinstance(made, torch.Tensor) else list(made))
        except RuntimeError as error:
            found.append(str(error))
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"kernelgen", "autotune", "e3nn"}
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
