"""What `regard explain` prints: formula, paper, options and facts of a mechanism or model."""

import inspect
import re
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import regard
from regard import tasks
from regard.cli.console import fact_items
from regard.core.options import options as options_of
from regard.core.shape import Order
from regard.models.registry import Model, model_options
from regard.spec import REGISTRIES, Registry, Spec, describe, parse

# facts as sentences
PLACES = {
    "input": "added to the token vectors, so every mechanism takes it",
    "rotation": "turns queries and keys",
    "bias": "added to the scaled logits",
    "content": "a term of the logits that reads queries or keys",
}
# fact: (sentence if it holds, sentence if not); None: no sentence
SAYS = {
    "prefix_invariant": ("an output does not move when later tokens come", "an output may move when later tokens come"),
    "dynamic_length": (
        "torch.export can leave the length open",
        "torch.export takes a fixed length only",
    ),
    "split_invariant": (
        "decoding gives the same however the tokens are cut",
        "decoding depends on how the tokens are cut",
    ),
    "exact": ("computes its formula exactly", "a random or learned approximation of its target"),
    "signed": (
        "weights may be negative or not sum to one",
        "weights are at least zero and sum to one in each row that sees a key",
    ),
    "independent_heads": ("heads work apart from each other", "heads depend on each other"),
    "linear": (
        "an output is a row of the map times the values",
        "an output is more than a row of the map times the values",
    ),
    "pairs": ("weighs pairs of tokens one by one: takes an explicit mask, and attention dropout", None),
    "overflows": ("float16 overflows at large logits, for it has no denominator: use bfloat16 or float32", None),
    "random": ("draws numbers while it trains", None),
    "auxiliary_loss": ("trains an auxiliary loss", None),
    "stream": ("carries a second sequence from layer to layer", None),
}
COMPETES = {
    "token": "an answer depends on its token alone",
    "row": "tokens of a row compete",
    "earlier": "a token may be turned away because of tokens before it, in its row or in the rows before",
    "batch": "a token may be turned away or moved by any token of the batch, later ones too",
}


def print_explanation(console: Console, kind: str, registry: Registry, spec: Spec) -> None:
    cls = registry.find(spec.name)
    facts = regard.facts(spec, kind) if spec.parts or spec.options else cls.facts
    console.print(Text.assemble((str(spec), "bold cyan"), f"  {kind}, family {facts.family}"))
    console.print(facts.paper)
    console.print(_address(facts.link))
    if package := registry.source(spec.name):
        console.print(f"from the package {package}")
    if aliases := registry.aliases(spec.name):
        console.print(f"also written {', '.join(aliases)}")
    console.print()
    console.print(Padding(Text(facts.formula, style="bold"), (0, 2)))
    console.print()
    console.print(_flowing(inspect.getdoc(cls) or "-"))
    given = dict(spec.options)
    rows = []
    for option in registry.options(spec.name):
        default = "required" if option.required else repr(option.default)
        default += f" (here {given[option.name]!r})" if option.name in given else ""
        rows.append((option.name, describe(option.type), default, option.meaning))
    if getattr(cls, "nests", False):
        rows.append(("", "specs", "required", f"in parentheses, such as {cls.examples[0]}"))
    _print_options(console, rows)
    _print_facts(console, fact_sentences(facts, getattr(cls, "reduces_to", ())))
    lines = example_lines(kind, registry, spec)
    if lines:
        console.print("\nTo copy", style="bold")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)
    console.print()


def print_model(console: Console, model: Model) -> None:
    facts, first = model.facts, next(iter(model.forms.values()))
    console.print(Text.assemble((facts.name, "bold cyan"), f"  model, family {facts.family}"))
    console.print(facts.paper)
    console.print(_address(facts.link))
    console.print()
    # without the example lines at the end
    console.print(_flowing((inspect.getdoc(first.module) or "-").split("\n>>>")[0].strip()))
    options = [option for option in model_options(facts.name).values() if option.name != "kind"]
    _print_options(console, [(one.name, describe(one.type), repr(one.default), one.help) for one in options])
    sentences = []
    for predicts, form in model.forms.items():
        task = next((name for name in tasks.names() if tasks.find(name).predicts == predicts), None)
        where = f", in regard train {task}" if task else ""
        sentences.append(("predicts", f"{predicts}{where}: --model.preset {', '.join(form.presets)}"))
    _print_facts(console, sentences + _costs({"time": facts.time, "memory": facts.memory, "state": facts.state}))
    console.print("\nTo copy", style="bold")
    config = first.config.__name__
    fixed = "".join(f", {name}={value!r}" for name, value in first.fixed.items())
    data = "vocabulary=8000" if "vocabulary" in options_of(first.config) else "image=(32, 32), classes=10"
    console.print(f"  from regard.models import {config}, build", soft_wrap=True)
    console.print(f"  model = build({config}({data}{fixed}))\n", soft_wrap=True)


def _print_options(console: Console, rows: list[tuple[str, str, str, str]]) -> None:
    """Name, type, default and meaning of each option."""
    console.print("\nOptions", style="bold")
    table = Table(box=None, padding=(0, 2), show_header=bool(rows))
    for title in ("name", "type", "default", "meaning"):
        table.add_column(title, style="cyan" if title == "name" else None, no_wrap=title == "name")
    for row in rows or [("none",)]:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_facts(console: Console, sentences: list[tuple[str, str]]) -> None:
    """Titles and sentences."""
    console.print("\nFacts", style="bold")
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for title, sentence in sentences:
        table.add_row(Text(title), Text(sentence))
    console.print(table)


def _address(link: str) -> str:
    return re.sub(r"^arXiv (\S+)$", r"https://arxiv.org/abs/\1", link)


def example_lines(kind: str, registry: Registry, spec: Spec) -> list[str]:
    """A line of Python and a line of shell to copy and run."""
    cls = registry.find(spec.name)
    small = spec
    if not (spec.parts or spec.options):
        # the defaults are for long texts: the small options of the tests make better pictures
        small = parse(cls.examples[0])
        if getattr(cls, "nests", False) or any(option.required for option in registry.options(spec.name)):
            spec = small
    built, drawn = (str(part).replace('"', "'") for part in (spec, small))
    role = regard.facts(spec, kind).roles[0]
    if kind == "attention":
        heads = -(-8 // spec.heads) * spec.heads
        return [
            f'layer = regard.attention("{built}", width={64 * heads}, heads={heads}, role="{role}")',
            f'regard draw "{drawn}" --length 32 --heads {heads} --role {role} --out {spec.name}.png',
        ]
    if kind == "position":
        return [
            f'layer = regard.attention("softmax", width=512, heads=8, role="{role}", position="{built}")',
            f'regard draw softmax --position "{drawn}" --length 32 --role {role} --weights --out {spec.name}.png',
        ]
    if kind == "feedforward":
        decoder = "" if "causal" in regard.facts(spec, kind).roles else " --model.decoder_feedforward dense"
        return [
            f'layer = regard.feedforward("{built}", width=512, inner=2048, role="{role}")',
            f'regard train translate --data.generated 5000 --model.feedforward "{built}"{decoder} '
            f"--out runs/{spec.name}",
        ]
    return []


def fact_sentences(facts: Any, reduces_to: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """The facts in sentences. A fact without a sentence here is printed as it is."""
    known = dict(fact_items(facts))
    for shown in ("name", "paper", "link", "family", "formula"):
        known.pop(shown, None)
    roles = known.pop("roles", ())
    lines = [("roles", ", ".join(roles))]
    lines += [(f"not {role}", why) for role, why in known.pop("refusals", ())]
    lines += _costs({key: known.pop(key) for key in ("time", "memory", "state") if key in known})
    if "positions" in known:
        kinds = ("input", *known.pop("positions"))
        schemes = [name for name, cls in REGISTRIES["position"].classes.items() if cls.facts.kind in kinds]
        lines.append(("positions", f"{', '.join(kinds)}" + (f": {', '.join(schemes)}" if schemes else "")))
    if "kind" in known:
        place = known.pop("kind")
        lines.append(("place", f"{place}: {PLACES.get(place, place)}"))
    for key, (yes, no) in SAYS.items():
        if key in known:
            holds = known.pop(key)
            sentence = yes if holds else no
            causal_only = key in ("prefix_invariant", "split_invariant") and "causal" not in roles
            if sentence is not None and not causal_only:
                lines.append((key.replace("_", "-"), f"{'yes' if holds else 'no'}: {sentence}"))
    for key in ("training", "evaluation"):
        if key in known:
            lines.append((key, COMPETES[known.pop(key)]))
    columns = {"tokens": "a column of the map is a token", "slots": "a column of the map is a slot of its own"}
    if "columns" in known:
        lines.append(("columns", columns[known.pop("columns")]))
    if known.pop("padding", "any") == "none":
        lines.append(("padding", "cannot skip padding"))
    lines += [(f"{key}", str(value)) for key, value in known.items()]
    lines += [("equals", f"{other}, as {spec} on the 33 tokens of the tests") for spec, other in reduces_to]
    return lines


def _costs(orders: dict[str, Order | None]) -> list[tuple[str, str]]:
    lines = [
        (key, f"{order.text}; twice the length takes {2**order.exponent:.3g} times as much")
        for key, order in orders.items()
        if key != "state" and order is not None
    ]
    if "state" in orders:
        state = orders["state"]
        growth = "does not grow with the length" if state and state.exponent == 0 else "grows with the length"
        none = "none: it does not decode token by token"
        lines.append(("state", f"{state.text}; what decoding keeps {growth}" if state else none))
    return lines


def _flowing(doc: str) -> str:
    """A docstring without the line breaks that only its width required: the next word would not have fitted."""
    lines = doc.splitlines()
    text = lines[0]
    for last, line in pairwise(lines):
        wrapped = line[:1].strip() and len(last) + len(line.split()[0]) > 110
        text += (" " if wrapped else "\n") + line
    return text
