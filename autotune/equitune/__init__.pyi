from autotune import *  # noqa: F403
from kernelgen import *  # noqa: F403
from kernelgen.version import __version__ as __version__

def main() -> None: ...
