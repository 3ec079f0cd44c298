"""A page for each mechanism, feed-forward layer, position scheme and model, from what the code declares."""

import inspect
import re
import textwrap
from typing import Any

import torch

import regard
from regard import tasks
from regard.cli.explanation import example_lines, fact_sentences
from regard.core.options import options
from regard.models import registry as models
from regard.recipes import recipes
from regard.spec import REGISTRIES, Registry, describe, parse
from regard.survey import SYSTEMS, differs, here

TITLES = {"attention": "Attention", "feedforward": "Feed-forward layers", "position": "Position schemes"}
ABOUT = {
    "attention": "Every mechanism takes the same calls: `regard.attention(NAME, ...)` builds a layer, "
    '`--model.attention NAME` trains with it. Roles: "self" reads the whole sequence, "causal" only earlier tokens and '
    'decodes token by token, "cross" another sequence, the memory. Cost is given in the length N. '
    "[Layers in Python](../layers.md) shows the calls.",
    "feedforward": "The feed-forward half of a Transformer layer: `regard.feedforward(NAME, ...)` builds one, "
    "`--model.feedforward NAME` trains with it.",
    "position": "The kind says where a scheme acts: added to the token vectors (input), rotating queries and keys "
    "(rotation), added to the logits (bias), or a term of the logits that reads queries or keys (content). "
    '`regard.attention(..., position="NAME")`, `--model.position NAME`.',
}


def layer_pages() -> dict[str, str]:
    """Pages of everything in the registries, and of the models."""
    pages = {}
    for kind, registry in REGISTRIES.items():
        pages[f"{kind}/index.md"] = _index(kind, registry)
        for name in registry.names():
            pages[f"{kind}/{name}.md"] = _layer(kind, registry, name)
    pages["models/index.md"] = _models()
    for name in models.entries():
        pages[f"models/{name}.md"] = _model(name)
    pages["attention/survey.md"] = _survey()
    pages["recipes.md"] = _recipes()
    return pages


def drawn_specs(kind: str, name: str) -> dict[str, dict[str, Any]]:
    """What is drawn for a layer: the name of the file without its suffix, and the arguments of regard.draw.measure."""
    cls = REGISTRIES[kind].find(name)
    if kind == "attention":
        spec = cls.examples[0]
        roles = [role for role in regard.facts(spec).roles if role != "cross"] or ["cross"]
        return {f"{name}-{role}": {"spec": spec, "length": 32, "role": role} for role in roles}
    if kind == "position" and cls.facts.kind != "input":
        return {f"{name}-causal": {"spec": "softmax", "length": 32, "role": "causal", "position": cls.examples[0]}}
    return {}


def _index(kind: str, registry: Registry) -> str:
    lines = [f"# {TITLES[kind]}", "", ABOUT[kind], ""]
    if kind == "attention":
        lines += [
            "The table of the efficient-Transformer survey, with the costs that are counted here: [survey](survey.md).",
            "",
        ]
    families: dict[str, list[str]] = {}
    for name in registry.names():
        families.setdefault(registry.find(name).facts.family, []).append(name)
    for family, names in families.items():
        lines += [f"## {family.capitalize()}", ""] if len(families) > 1 else []
        if kind == "position":
            lines += ["| name | kind | roles | paper |", "|---|---|---|---|"]
        else:
            keeps = ["decoding keeps"] if kind == "attention" else []
            lines += [_row("name", "time", "memory", *keeps, "roles", "paper"), _row(*["---"] * (5 + len(keeps)))]
        for name in names:
            facts = registry.find(name).facts
            cells = [f"[`{name}`]({name}.md)"]
            if kind == "position":
                cells += [facts.kind]
            else:
                cells += [facts.time.text, facts.memory.text]
            if kind == "attention":
                cells += [facts.state.text if facts.state else "does not decode"]
            lines.append(_row(*cells, ", ".join(facts.roles), facts.paper))
        lines.append("")
    return "\n".join(lines)


def _layer(kind: str, registry: Registry, name: str) -> str:
    cls = registry.find(name)
    facts, options = cls.facts, registry.options(name)
    also = f" Also written {_words(registry.aliases(name))}." if registry.aliases(name) else ""
    lines = [f"# {name}", "", f"{_sentence(facts.paper)} {_link(facts.link)}{also}", "", _formula(facts.formula), ""]
    lines += [prose(inspect.getdoc(cls) or ""), ""]
    for file, arguments in drawn_specs(kind, name).items():
        title = arguments["spec"] + (f", {arguments['position']}" if "position" in arguments else "")
        lines += [f"![What {title} attends to, role {arguments['role']}](pictures/{file}.png){{ width=440 }}"]
    lines += ["", "## Options", ""]
    if options:
        lines += ["| name | type | default | meaning |", "|---|---|---|---|"]
        for option in options:
            default = "required" if option.required else f"`{option.default!r}`"
            lines.append(_row(f"`{option.name}`", f"`{describe(option.type)}`", default, option.meaning))
    elif getattr(cls, "nests", False):
        lines.append(f"Specs in parentheses, such as `{cls.examples[0]}`.")
    else:
        lines.append("None.")
    if kind == "attention":
        lines += _kept(cls)
    lines += ["", "## Facts", "", "Each fact is tested, the negative ones too.", "", "| | |", "|---|---|"]
    lines += [_row(title, sentence) for title, sentence in fact_sentences(facts, getattr(cls, "reduces_to", ()))]
    copied = example_lines(kind, registry, parse(name))
    if copied:
        lines += ["", "## To copy", ""]
        lines += [f"```{'bash' if line.startswith('regard ') else 'python'}\n{line}\n```\n" for line in copied]
    lines += [f"The code is in `{cls.__module__.replace('.', '/')}.py`; the suite builds {_words(cls.examples)}.", ""]
    return "\n".join(lines)


def _kept(cls: type) -> list[str]:
    """What decoding keeps, read from a small layer: shapes after a short text and after a longer one."""
    spec = parse(cls.examples[0])
    if "causal" not in regard.facts(spec).roles:
        return []
    heads = -(-4 // spec.heads) * spec.heads
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        layer = regard.attention(spec, width=16 * heads, heads=heads, role="causal").eval()
        states = []
        for length in (8, 64):
            x, state = torch.randn(1, length, 16 * heads), layer.start(1, capacity=length)
            states.append(_shapes(layer.extend(x, state)[1]))
    lines = ["", "## What decoding keeps", ""]
    lines += [f"The state of `{spec}`: a batch of one, {heads} heads of width 16.", ""]
    lines += ["| | after 8 tokens | after 64 |", "|---|---|---|"]
    return lines + [
        _row(f"`{name}`", f"`{shape}`", f"`{states[1].get(name, '-')}`") for name, shape in states[0].items()
    ]


def _shapes(state: Any, name: str = "") -> dict[str, str]:
    """The tensors of a state by name; those of nested states have a dotted name."""
    if isinstance(state, torch.Tensor):
        return {name: str(list(state.shape))}
    if hasattr(state, "_fields"):
        parts = [(f"{name}.{field}".lstrip("."), getattr(state, field)) for field in state._fields]
    elif isinstance(state, tuple | list):
        parts = [(f"{name}.{index}".lstrip("."), part) for index, part in enumerate(state)]
    else:
        return {}
    return {key: shape for field, part in parts for key, shape in _shapes(part, field).items()}


def _models() -> str:
    lines = [
        "# Models",
        "",
        "Each model is made of the same layers. It is built from a config, `regard.models.build(config)`, and trained "
        "by its name or by one of its presets, `regard train TASK --model.preset NAME`.",
        "",
        "| name | family | predicts | time | memory | state | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, model in models.entries().items():
        facts = model.facts
        costs = [order.text if order else "-" for order in (facts.time, facts.memory, facts.state)]
        lines.append(_row(f"[`{name}`]({name}.md)", facts.family, ", ".join(model.predicts), *costs, facts.paper))
    return "\n".join(lines) + "\n"


def _model(name: str) -> str:
    model = models.find(name)
    lines = [f"# {name}", "", f"{model.facts.paper} ({model.facts.link})", ""]
    lines += ["| predicts | trained by | presets |", "|---|---|---|"]
    for predicts, form in model.forms.items():
        task = next((task for task in tasks.names() if tasks.find(task).predicts == predicts), None)
        lines.append(
            _row(
                predicts, f"`regard train {task}`" if task else "-", ", ".join(f"`{preset}`" for preset in form.presets)
            )
        )
    for form in {form.config: form for form in model.forms.values()}.values():
        config, cls = form.config, form.module
        named = f"from {config.__module__} import {config.__name__}\nfrom regard.models import build\n\n"
        lines += ["", f"## {cls.__name__}", "", prose(inspect.getdoc(cls) or ""), "", f"### {config.__name__}", ""]
        lines += [prose(inspect.getdoc(config) or ""), "", "| name | default | meaning |", "|---|---|---|"]
        lines += [_row(f"`{one.name}`", f"`{one.default!r}`", one.help) for one in options(config).values()]
        fixed = "".join(f", {field}={value!r}" for field, value in form.fixed.items())
        data = "vocabulary=8000" if "vocabulary" in options(config) else "image=(32, 32), classes=10"
        lines += ["", f"```python\n{named}model = build({config.__name__}({data}{fixed}))\n```", ""]
        lines += [f"The code is in `{cls.__module__.replace('.', '/')}.py`.", ""]
    return "\n".join(lines)


def _survey() -> str:
    lines = [
        "# The survey's table",
        "",
        prose(inspect.getdoc(inspect.getmodule(here)) or ""),
        "",
        _row("system", "class", "published", "decodes", "here", "time", "memory", "decodes here", ""),
        _row(*["---"] * 9),
    ]
    notes: list[str] = []
    for system in SYSTEMS:
        name, found = system.word or system.model or system.feedforward, here(system)
        folder = "../attention" if system.word else "../models" if system.model else "../feedforward"
        folder = "" if folder == "../attention" else folder + "/"
        if differs(system):
            notes.append(system.note)
        note = f"[{len(notes)}](#notes)" if differs(system) else ""
        decodes = ("yes" if system.decodes else "no", "yes" if found.decodes else "no")
        lines.append(
            _row(
                system.name,
                system.classes,
                system.complexity,
                decodes[0],
                f"[`{name}`]({folder}{name}.md)",
                f"N^{found.time:g}",
                f"N^{found.memory:g}",
                decodes[1],
                note,
            )
        )
    lines += [
        "",
        "The exponents of a feed-forward layer are those of the softmax attention with which it is used.",
        "",
        "## Notes",
        "",
    ]
    return "\n".join([*lines, *(f"{number}. {note}." for number, note in enumerate(notes, 1)), ""])


def _recipes() -> str:
    lines = [
        "# Recipes",
        "",
        "Settings of the runs in this documentation. `regard train TASK --config NAME` uses one.",
        "",
    ]
    for recipe in recipes():
        lines += [f"## {recipe.name}", "", f"Task {recipe.task}. {recipe.about}", ""]
        lines += [f"```\n{recipe.command}\n```", "", f"```yaml\n{_settings(recipe.path)}\n```", ""]
    return "\n".join(lines)


def _settings(path: Any) -> str:
    return "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))


def prose(doc: str) -> str:
    """A docstring as Markdown: its signs stand for themselves, indented lines and examples are code."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", doc.strip()):
        lines = block.splitlines()
        if lines[0].startswith(">>>"):
            code = "\n".join(line.removeprefix(">>> ").removeprefix("... ") for line in lines)
            blocks.append(f"```python\n{code}\n```")
        elif all(line.startswith("    ") for line in lines):
            blocks.append(_code(inspect.cleandoc("\n" + block)))
        else:
            blocks.append(escape(block))
    return "\n\n".join(blocks)


def escape(text: str) -> str:
    """Signs of formulas that Markdown would take for its own, outside `code`."""
    parts = re.split(r"(`[^`\n]*(?:\n[^`\n]+)*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[\]|\\])", r"\\\1", part) for part in parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    # links and code come as they are; a bar would end the cell
    known = re.fullmatch(r"-+|\[.*\]\(.*\)|`.*`", text)
    return (text if known else escape(text)).replace("\\|", "|").replace("|", "\\|").replace("\n", " ")


def _sentence(text: str) -> str:
    return escape(text.rstrip(".")) + "."


def _link(link: str) -> str:
    arxiv = re.fullmatch(r"arXiv (\S+)", link)
    if arxiv:
        return f"[{link}](https://arxiv.org/abs/{arxiv[1]})."
    return f"<{link}>." if link.startswith("http") else _sentence(link) if link else ""


def _words(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _formula(text: str) -> str:
    return _code("\n".join(textwrap.wrap(text, 76, subsequent_indent="    ", break_long_words=False)))


def _code(text: str) -> str:
    return f"```text\n{text}\n```"
