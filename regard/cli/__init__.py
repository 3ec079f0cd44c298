"""The command line: `regard VERB`. Nothing imports this package."""

from regard.cli.main import main

__all__ = ["main"]
