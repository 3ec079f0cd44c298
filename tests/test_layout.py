"""Where tests stand: each folder is that of the package it tests, or one of the few that are about all of them."""

from folders import ROOT, TESTS

OTHERS = {"conformance", "peers", "bench", "docs"}


def test_folders_mirror_the_package():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    strangers = [str(f) for f in folders if not (ROOT / "regard" / f / "__init__.py").exists() and str(f) not in OTHERS]
    assert not strangers, f"no package of regard has these names: {', '.join(strangers)}"
