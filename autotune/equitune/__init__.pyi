from autotune import *  # noqa: F403
from kernelgen import *  # noqa: F403

def main() -> None: ...
