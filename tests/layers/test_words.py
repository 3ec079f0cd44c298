"""The help of options, which `regard explain`, the site and the page show: each is a phrase that stands alone."""

from regard.spec import REGISTRIES

# words that readers stumbled over, or that are spelled otherwise here
WORDS = ("learnt", "so many", "second loss")


def faults(help: str) -> list[str]:
    faults = [] if help else ["there is none"]
    faults += ["it begins with 'of'"] if help.startswith("of ") else []
    faults += ["it ends with a full stop"] if help.endswith(".") else []
    return faults + [f"it says {word!r}" for word in WORDS if word in help]


def test_the_help_of_every_option_stands_alone():
    options = {
        f"{kind} {name}.{option.name}": option.meaning
        for kind, registry in REGISTRIES.items()
        for name in registry.names()
        for option in registry.options(name)
    }
    assert len(options) > 100
    assert {option: faults(help) for option, help in options.items() if faults(help)} == {}


def test_what_does_not_stand_alone_is_found():
    assert faults("") == ["there is none"]
    assert faults("of so many tokens.") == ["it begins with 'of'", "it ends with a full stop", "it says 'so many'"]
