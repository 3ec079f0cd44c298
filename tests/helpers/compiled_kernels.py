"""Kernels are compiled for a Hopper GPU that need not be there, in a process where they are not interpreted."""

import os
import subprocess
import sys
from pathlib import Path

from folders import SCRIPTS


def check_compiles(cache: Path, script: str, *words: str) -> None:
    """Runs a script of tests/helpers/scripts, with a cache of its own, so that all is compiled anew."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPTS / script), *words]
    done = subprocess.run(
        command, env=clean | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
