"""The command line: `regard VERB`. Nothing imports this package."""

from regard.cli.program import main

__all__ = ["main"]
