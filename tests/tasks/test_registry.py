"""The registry of tasks: ours, and those of somebody else's package."""

import importlib.metadata
import sys
import types

import pytest
from verbs import refused, told

from regard import models, tasks
from regard import plugins as plugin_packages
from regard.core.options import Range, check_options, options
from regard.models import registry
from regard.tasks.language import LanguageConfig
from regard.tasks.language.task import Task as LanguageTask
from regard.tasks.masked import MaskedOptions
from regard.tasks.translate import TranslatorOptions


@pytest.fixture
def plugins(monkeypatch):
    """Entry points as an installed package would have them: a task, and a model."""
    package = types.ModuleType("elsewhere")
    package.Task = type("Task", (LanguageTask,), {"name": "elsewhere", "about": "Somebody else's task."})
    model = registry.find("feedback")
    package.model = registry.Model(
        registry.ModelFacts(**vars(model.facts) | {"name": "theirs"}),
        {"next token": model.forms["next token"]._replace(presets={"theirs": {"width": 8, "heads": 2, "layers": 1}})},
    )
    monkeypatch.setitem(sys.modules, "elsewhere", package)
    point = importlib.metadata.EntryPoint
    points = {
        tasks.GROUP: [point("elsewhere", "elsewhere", tasks.GROUP), point("language", "elsewhere", tasks.GROUP)],
        registry.GROUP: [point("theirs", "elsewhere:model", registry.GROUP)],
    }
    monkeypatch.setattr(plugin_packages, "entry_points", lambda group: points.get(group, []))

    def forget():
        for plugins in (tasks.PLUGINS, registry.PLUGINS):
            plugins.forget()
        for cache in (registry.entries, models.kinds):
            cache.cache_clear()

    forget()
    with pytest.warns(plugin_packages.PluginWarning, match=r"task 'language' .* the word is Regard's own"):
        tasks.names()
    yield
    monkeypatch.undo()
    forget()


def test_a_task_of_somebody_else(plugins, tmp_path, monkeypatch, capsys):
    assert tasks.names() == [*tasks.TASKS, "elsewhere"]
    assert tasks.find("language") is LanguageTask, "the names of ours are taken"
    (tmp_path / "a.txt").write_text("one two three four five six seven\n" * 20)
    words = ["--data.text", str(tmp_path / "a.txt"), "--data.tokenizer", "words", "--data.length", "4"]
    words += ["--training.steps", "1", "--training.device", "cpu", "--training.tensorboard", "false"]
    told(monkeypatch, capsys, "train", "elsewhere", *words, "--out", str(tmp_path / "run"))
    assert "Somebody else's task." in told(monkeypatch, capsys, "train")[0]
    assert "has no verbs.py" in refused(capsys, "evaluate", str(tmp_path / "run"))
    assert "no task 'elsewere'" in refused(capsys, "train", "elsewere")


def test_a_model_of_somebody_else(plugins, monkeypatch, capsys):
    assert list(registry.entries())[-1] == "theirs"
    assert "theirs" in told(monkeypatch, capsys, "list", "--kind", "model")[0]
    assert "--model.preset theirs" in told(monkeypatch, capsys, "explain", "theirs")[0]
    assert registry.presets("next token")["theirs"].values["width"] == 8


def test_options_are_those_of_the_models():
    """Nothing of a model is written down a second time: names, types, help and bounds come from its config."""
    translator, own = options(TranslatorOptions), options(models.ModelConfig)
    assert {"width", "aligner", "decoder_layers", "hidden", "input_feeding", "bottleneck"} <= set(translator)
    assert not {"kind", "vocabulary", "stems", "pooler", "cell"} & set(translator)
    assert translator["dropout"].range == own["dropout"].range == Range(0, below=1)
    assert translator["position"].help == own["position"].help
    assert translator["hidden"].help.startswith("lstm and gru: ")
    assert {"latents", "queries_only", "learner_inner"} <= set(options(MaskedOptions))
    assert not {"pooling", "aligner", "decoder_attention"} & set(options(MaskedOptions))
    for predicts in ("translation", "next token", "hidden tokens", "class"):
        for name, preset in registry.presets(predicts).items():
            given = {field for field in preset.values if field not in preset.form.fixed}
            assert given <= set(preset.form.options()), name


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TranslatorOptions(width=0), r"model\.width must be at least 1, got 0"),
        (lambda: TranslatorOptions(dropout=1.0), r"model\.dropout must be at least 0 and below 1, got 1.0"),
        (lambda: TranslatorOptions(width=2**30), r"model\.width must be at most 1,048,576"),
        (lambda: models.ModelConfig(width=0), r"^width must be at least 1, got 0"),
        (lambda: models.PerceiverARConfig(latents=1), r"^latents must be at least 2, got 1"),
        (lambda: models.FunnelConfig(layers=(1, 0)), r"^layers must be at least 1, got 0"),
        (lambda: models.RecurrentConfig(dropout=float("nan")), r"^dropout must be at least 0 and below 1, got nan"),
        (lambda: models.ModelConfig(heads="8"), r"^heads must be a number, got '8'"),
    ],
)
def test_bounds_are_checked_where_a_config_is_made(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_every_option_has_help():
    for name in tasks.TASKS:
        for section in options(tasks.find(name).config).values():
            for option in (
                options(section.type).values() if hasattr(section.type, "__dataclass_fields__") else [section]
            ):
                assert option.help, f"{name}: {option.name}"
                assert not option.help.startswith("of ") or option.help.startswith("of pma"), option.help
    check_options(LanguageConfig().training)
