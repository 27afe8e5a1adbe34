from autotune import *
from kernelgen import *

def main() -> None: ...
