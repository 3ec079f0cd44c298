"""The suite in pytest: `-p regard.testing.plugin` adds the option --regard-mechanism."""

import os
import sys

import pytest

# Some virtual machines advertise AMX without granting it; bf16 matrix products then die with an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
MODULES = "cases compiled counting decoding feedforward gradients maps masking precision values"
# a failed assert shows its values, unless the module was imported before pytest came
for _name in MODULES.split():
    if f"regard.testing.{_name}" not in sys.modules:
        pytest.register_assert_rewrite(f"regard.testing.{_name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("regard", "Regard's conformance suite").addoption(
        "--regard-mechanism",
        action="append",
        default=[],
        metavar="NAME",
        help="check this: a word of 'regard list', module:Class, or all that a module defines; may be given again",
    )


def pytest_configure(config: pytest.Config) -> None:
    """What cannot be found is said before anything is collected."""
    names = config.getoption("--regard-mechanism")
    if names:
        # PyTorch is imported only where something is checked
        from regard.testing.finding import find

        try:
            for name in names:
                find(name)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
