"""Where tests stand: each folder is that of the package it tests, or one of the few that are about all of them. And
warnings: those of ours are errors."""

import warnings

import pytest
from folders import HELPERS, ROOT, TESTS

OTHERS = {"conformance", "peers", "bench", "docs"}


def test_folders_mirror_the_package():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    strangers = [str(f) for f in folders if not (ROOT / "regard" / f / "__init__.py").exists() and str(f) not in OTHERS]
    assert not strangers, f"no package of regard has these names: {', '.join(strangers)}"


@pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, ResourceWarning])
def test_warnings_of_ours_are_errors(category):
    ours = ["regard", "regard.spec", "regard.layers.attention.local", __name__, "conftest"]
    for module in (*ours, *(path.stem for path in HELPERS.glob("*.py"))):
        with pytest.raises(category):
            warnings.warn_explicit("of ours", category, "file.py", 1, module=module)
    with warnings.catch_warnings(record=True):
        warnings.warn_explicit("of others", category, "file.py", 1, module="regardless.spec")
