"""python -m regard.testing NAME... [FLAGS OF PYTEST]"""

import sys

from regard.testing import __doc__ as about


def main(words: list[str]) -> int:
    """Runs the suite on what is named; flags of pytest may follow the names."""
    first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    names, flags = words[:first], words[first:]
    if not names:
        print(about)
        return 0 if {"-h", "--help"} & {*flags} else 2
    try:
        import pytest
    except ModuleNotFoundError:
        print("regard.testing needs pytest: pip install 'regard[testing]'", file=sys.stderr)
        return 2
    named = [part for name in names for part in ("--regard-mechanism", name)]
    return pytest.main(["-p", "regard.testing.plugin", "--pyargs", "regard.testing", *named, *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
