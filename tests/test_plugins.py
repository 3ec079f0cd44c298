"""What installed packages bring: found by their entry points, refused in words where they cannot be used."""

import importlib.metadata
import math
import sys
import types
import warnings
from dataclasses import replace

import pytest

import regard
from regard import plugins
from regard.compare import learn, measure, run
from regard.compare.filling import fill_quality
from regard.compare.jobs import run_cell
from regard.compare.plan import CostPlan
from regard.compare.quality import QualityPlan
from regard.compare.results import Results
from regard.compare.run import Environment, fill_costs
from regard.compare.store import Folder
from regard.layers.attention.cached import Cached
from regard.layers.attention.softmax import Softmax
from regard.layers.feedforward.dense import Dense
from regard.layers.position.alibi import Alibi
from regard.plugins import PluginWarning
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, packages_of


class Package:
    """Stands for the installed package that an entry point comes from."""

    def __init__(self, name: str, version: str):
        self.name, self.version = name, version


def renamed(cls: type, word: str, **more) -> type:
    """A class of ours under another word."""
    return type(word.title(), (cls,), {"facts": replace(cls.facts, name=word), "examples": (word,), **more})


@pytest.fixture
def installed(monkeypatch):
    """Entry points of a module `theirs`, by group: word -> (value, package)."""
    module = types.ModuleType("theirs")
    monkeypatch.setitem(sys.modules, "theirs", module)
    registries = (ATTENTION, FEEDFORWARD, POSITIONS)

    def install(values: dict[str, object], *points: tuple[str, str, str, str]) -> None:
        vars(module).update(values)
        found = {}
        for group, word, value, package in points:
            point = importlib.metadata.EntryPoint(word, value, group)
            vars(point)["dist"] = Package(package, "1.2")
            found.setdefault(group, []).append(point)
        monkeypatch.setattr(plugins, "entry_points", lambda group: found.get(group, []))

    for registry in registries:
        registry.plugins.forget()
    yield install
    monkeypatch.undo()
    for registry in registries:
        registry.plugins.forget()


def test_every_kind_is_found(installed):
    installed(
        {"Warm": renamed(Softmax, "warm"), "Wide": renamed(Dense, "wide"), "Slow": renamed(Alibi, "slow")},
        ("regard.attention", "warm", "theirs:Warm", "warmth"),
        ("regard.feedforward", "wide", "theirs:Wide", "warmth"),
        ("regard.position", "slow", "theirs:Slow", "warmth"),
    )
    layer = regard.attention("heads(warm, softmax)", width=8, heads=2, role="causal", position="slow")
    assert layer.parts[0].facts.name == "warm"
    assert regard.feedforward("wide", width=8, inner=8).facts.name == "wide"
    assert "warm" in regard.names()
    assert "slow" in regard.names("position")
    assert ATTENTION.source("warm") == "warmth 1.2"
    assert ATTENTION.source("softmax") is None
    config = regard.ModelConfig(kind="decoder", attention=["softmax", "heads(warm, local)"], feedforward="wide")
    assert packages_of(config) == {"attention": {"warm": "warmth 1.2"}, "feedforward": {"wide": "warmth 1.2"}}
    assert packages_of(regard.ModelConfig()) == {}


def test_nothing_is_loaded_before_it_is_named(installed):
    installed({}, ("regard.attention", "warm", "no_such_module:Warm", "warmth"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regard.attention("local(window=4)", width=8, heads=2, position="rotary")


def test_a_broken_one_is_left_out_with_one_warning(installed):
    installed(
        {"Warm": renamed(Softmax, "warm")},
        ("regard.attention", "cold", "no_such_module:Cold", "frost"),
        ("regard.attention", "warm", "theirs:Warm", "warmth"),
    )
    reason = "ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.warns(PluginWarning) as said:
        names, _ = ATTENTION.names(), ATTENTION.names()
    assert [str(one.message) for one in said] == [f"attention 'cold' of the package frost 1.2 is left out: {reason}"]
    assert "warm" in names
    assert "cold" not in names
    with pytest.raises(ValueError, match=r"attention 'cold' of the package frost 1\.2 .* cannot be used: " + reason):
        regard.attention("cold", width=8, heads=2)


class NoFacts(Cached):
    examples = ("warm",)


class NoAttend(Cached):
    facts = replace(Softmax.facts, name="warm")
    examples = ("warm",)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (NoFacts, "NoFacts has no facts: what it declares of itself"),
        (renamed(Softmax, "warm", examples=()), "has no examples: small specs for the suite"),
        (NoAttend, "NoAttend does not write attend"),
        (renamed(Softmax, "tepid"), "name it 'tepid', not 'warm': both must agree"),
        (renamed(Softmax, "warm", examples=("softmax",)), "an example of Warm names another: 'softmax'"),
        (renamed(Dense, "warm"), r"expected a class that is built on regard\.layers\.attention\.base\.Attention"),
        (12, "expected a class that is built on .* got 12"),
    ],
)
def test_what_is_wrong_is_said(installed, value, words):
    installed({"Warm": value}, ("regard.attention", "warm", "theirs:Warm", "warmth"))
    with pytest.raises(ValueError, match=words):
        ATTENTION.find("warm")


def test_a_module_that_ends_the_program(installed, tmp_path, monkeypatch):
    (tmp_path / "ends_here.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    installed({}, ("regard.attention", "warm", "ends_here:Warm", "warmth"))
    with pytest.raises(ValueError, match="cannot be used: SystemExit: 3"):
        ATTENTION.find("warm")


@pytest.mark.parametrize("word", ["softmax", "flash", "gqa"])
def test_no_word_of_ours_is_taken(installed, word):
    installed({"Warm": renamed(Softmax, word)}, ("regard.attention", word, "theirs:Warm", "warmth"))
    said = f"attention '{word}' of the package warmth 1.2 is left out: the word is Regard's own"
    with pytest.warns(PluginWarning, match=said):
        ATTENTION.names()
    assert ATTENTION.find("softmax") is Softmax


def test_two_packages_with_one_word(installed):
    installed(
        {"Warm": renamed(Softmax, "warm")},
        ("regard.attention", "warm", "theirs:Warm", "warmth"),
        ("regard.attention", "warm", "theirs:Warm", "frost"),
    )
    with pytest.raises(ValueError, match=r"two packages name it, frost 1\.2 and warmth 1\.2: uninstall one"):
        ATTENTION.find("warm")


@pytest.mark.parametrize("word", ["my-warm", "my.warm", "lambda"])
def test_a_name_is_one_word(installed, word):
    installed({}, ("regard.attention", word, "theirs:Warm", "warmth"))
    with pytest.warns(PluginWarning, match="a name is one word of letters, digits and underscores"):
        ATTENTION.names()


def test_a_spec_imports_nothing(installed):
    """Words are those of entry points; a path of a module is none."""
    installed({"Warm": renamed(Softmax, "warm")})
    for text in ("theirs.Warm", "theirs:Warm", "theirs", "os.system('true')"):
        with pytest.raises(ValueError, match=r"cannot read the spec|unknown attention"):
            regard.attention(text, width=8, heads=2)


def test_a_class_of_ones_own_for_this_process(installed, monkeypatch):
    installed({})
    monkeypatch.setattr(ATTENTION, "_added", {})
    warm = renamed(Softmax, "warm")
    ATTENTION.add(warm)
    ATTENTION.add(warm)
    assert regard.attention("warm", width=8, heads=2).facts.name == "warm"
    with pytest.raises(ValueError, match="attention 'warm' exists already"):
        ATTENTION.add(renamed(Softmax, "warm"))
    with pytest.raises(ValueError, match="attention 'softmax' exists already"):
        ATTENTION.add(renamed(Softmax, "softmax"))


class Contestant(measure.MeasuredLayer):
    """Takes its turns in this process, whose memory is not to be limited."""

    def __init__(self, setting: measure.Setting):
        super().__init__(replace(setting, room=math.inf))

    def close(self) -> None: ...


def test_it_is_compared(installed, tmp_path, monkeypatch):
    """In what it costs and in what it learns."""
    installed({"Tepid": renamed(Softmax, "tepid")}, ("regard.attention", "tepid", "theirs:Tepid", "warmth"))
    for module, name, less in ((measure, "WARM_UP_SECONDS", 0.0), (learn, "SCORED_ROWS", 8), (run, "MAX_ROUNDS", 9)):
        monkeypatch.setattr(module, name, less)
    costs = CostPlan(("tepid",), (64,), width=16, heads=2, threads=1)
    task = QualityPlan("recall", ("tepid",), width=16, heads=2, amount=2, rates=(0.003,), seeds=1)
    environment = Environment(contestant=Contestant, report=lambda line: None)
    fill_costs(costs, Folder(tmp_path), environment)
    fill_quality([task], Folder(tmp_path), environment, run_cell)
    results = Results(costs, Folder(tmp_path), [task])
    assert [(row["spec"], row["status"]) for row in results.rows] == [("softmax", "done"), ("tepid", "done")]
    # softmax under another word
    softmax, tepid = results.scores[0].rows
    assert (tepid["spec"], tepid["parameters"]) == ("tepid", softmax["parameters"])
    assert tepid["score"] == softmax["score"]


def test_a_class_without_a_file_is_not_compared(installed):
    """As in a notebook: no other process finds it."""
    cool = renamed(Softmax, "cool", __module__="theirs")
    installed({"Cool": cool}, ("regard.attention", "cool", "theirs:Cool", "warmth"))
    with pytest.raises(ValueError, match="'cool' is defined in no file, as in a notebook"):
        CostPlan(("cool",)).question("count", "cool", 64)
