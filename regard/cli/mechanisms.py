"""The verbs over mechanisms and models: list, explain, draw."""

import argparse
import inspect
import json
from typing import Any

from rich.text import Text

from regard.aliases import ALIASES, SETTINGS
from regard.cli.console import fact_items, list_known, open_console, plain_table, print_table
from regard.keywords import did_you_mean
from regard.spec import REGISTRIES, Registry, Spec, describe, parse
from regard.tasks.command import AddVerb

MODEL = "model"  # the kind of the registry of models, whose entries are not specs


def add_verbs(verb: AddVerb) -> None:
    added = verb(
        "list",
        list_mechanisms,
        "list every mechanism and model: paper, family, cost, roles, size of the decoding state",
        [
            "regard list",
            "regard list --family scores",
            "regard list --kind model",
            "regard list --kind position --json",
            "regard list --recipes",
        ],
    )
    added.add_argument("--kind", help="only this kind: attention, feedforward, position or model")
    added.add_argument("--family", help="only this family, such as scores or patterns")
    added.add_argument("--json", action="store_true", help="print all facts and options, one JSON object per line")
    added.add_argument("--aliases", action="store_true", help="list other names that specs can be written with")
    added.add_argument(
        "--recipes", action="store_true", help="list bundled settings, for regard train TASK --config NAME"
    )
    added.add_argument(
        "--survey", action="store_true", help='compare with the table of "Efficient Transformers: A Survey"'
    )

    added = verb(
        "explain",
        explain,
        "explain a mechanism or model: formula, paper, options, facts, a line to copy",
        ["regard explain softmax", 'regard explain "heads(softmax, softmax)"', "regard explain perceiver"],
    )
    added.add_argument("spec", metavar="NAME", help="name from 'regard list', or a spec with options")
    added.add_argument("--kind", help="only this kind, if several have the name")
    _add_draw(verb)


def _add_draw(verb: AddVerb) -> None:
    added = verb(
        "draw",
        draw,
        "draw which keys each query attends to, as the layer computes it",
        [
            'regard draw "local(window=8)" --role causal --out local.png',
            'regard draw "heads(local(window=8), strided(stride=8))" --length 64 --heads 8 --out pattern.svg',
            "regard draw softmax --position alibi --role causal --weights --heads 4 --out weights.pdf",
        ],
    )
    added.add_argument("spec", metavar="SPEC", help='mechanism with its options, such as "local(window=8)"')
    added.add_argument("--length", type=int, default=64, help="number of tokens (default: 64)")
    added.add_argument("--heads", type=int, help="number of heads (default: 8, or a number that heads(...) divides)")
    added.add_argument(
        "--role", choices=("self", "causal", "cross"), help="role of the layer (default: the first it can take)"
    )
    added.add_argument("--keys", type=int, help="role cross: tokens of the memory (default: as many as --length)")
    added.add_argument("--position", help="spec of the positions, such as rotary")
    added.add_argument(
        "--weights", action="store_true", help="draw the weights, one panel per head, instead of the pattern"
    )
    added.add_argument("--seed", type=int, default=0, help="random seed of weights and tokens (default: 0)")
    added.add_argument(
        "--out", metavar="FILE", default="pattern.png", help=".png, .svg or .pdf file (default: pattern.png)"
    )


def list_mechanisms(arguments: argparse.Namespace) -> None:
    """regard list"""
    if arguments.survey:
        _print_survey(arguments.json)
        return
    if arguments.recipes:
        _print_recipes(arguments.json)
        return
    if arguments.aliases:
        _print_aliases(arguments.json)
        return
    rows = [row for kind, registry in find_registries(arguments.kind) for row in registry_rows(kind, registry)]
    rows += model_rows() if arguments.kind in (None, MODEL) else []
    families = sorted({row["family"] for row in rows})
    if arguments.family is not None:
        if arguments.family not in families:
            raise ValueError(
                f"no family {arguments.family!r}{did_you_mean(arguments.family, families)}; {list_known(families)}"
            )
        rows = [row for row in rows if row["family"] == arguments.family]
    if arguments.json:
        for row in rows:
            print(json.dumps(row, default=str))
    else:
        print_table(rows)


def _print_aliases(as_json: bool) -> None:
    """Other names that a spec may be written with."""
    table = plain_table("alias", "kind", "stands for")
    for kind, names in ALIASES.items():
        for alias, spec in names.items():
            if as_json:
                print(json.dumps({"alias": alias, "kind": kind, "spec": spec}))
            table.add_row(Text(alias, style="bold cyan"), Text(kind), Text(spec))
    if not as_json:
        open_console(10_000).print(table)


def _print_recipes(as_json: bool) -> None:
    """The settings bundled with Regard, for `regard train TASK --config NAME`."""
    from regard.recipes import recipes

    table = plain_table("name", "task", "what it is for", wrapped=["what it is for"])
    for recipe in recipes():
        if as_json:
            print(json.dumps(recipe._asdict(), default=str))
        table.add_row(Text(recipe.name, style="bold cyan"), Text(recipe.task), Text(recipe.about))
    if not as_json:
        console = open_console(10_000)
        console.print(table)
        console.print("\nTo train with one: regard train TASK --config NAME, and your data")


def _print_survey(as_json: bool) -> None:
    """The published table, with what the tests count beside it."""
    from regard.survey import SYSTEMS, differs, here

    notes: list[str] = []
    titles = ("system", "class", "published", "decodes", "here", "kind", "time", "memory", "decodes", "")
    table = plain_table(*titles, wrapped=titles)
    for system in SYSTEMS:
        name, found = system.word or system.model or system.feedforward, here(system)
        kind = "attention" if system.word else "model" if system.model else "feed-forward"
        cells = [name, kind, f"N^{found.time:g}", f"N^{found.memory:g}", "yes" if found.decodes else "no", ""]
        if differs(system):
            notes.append(system.note)
            cells[-1] = f"[{len(notes)}]"
        if as_json:
            published = {name: getattr(system, name) for name in ("name", "complexity", "decodes", "classes", "note")}
            ours = {"here": name, "kind": kind, "time": found.time, "memory": found.memory}
            print(json.dumps(published | ours | {"decodes_here": found.decodes}))
        published = (system.name, system.classes, system.complexity, "yes" if system.decodes else "no")
        table.add_row(*map(Text, (*published, *cells)))
    if not as_json:
        console = open_console(120)
        console.print(table)
        console.print()
        for number, note in enumerate(notes, 1):
            console.print(f"[{number}] {note}")
        console.print("A feed-forward layer is listed with the exponents of the softmax attention beside it.")


def explain(arguments: argparse.Namespace) -> None:
    """regard explain"""
    from regard.cli.explanation import print_explanation, print_model
    from regard.models import registry as models

    registries, kind = find_registries(arguments.kind), arguments.kind
    console, with_models = open_console(100), kind in (None, MODEL)
    if with_models and arguments.spec in models.entries():
        print_model(console, models.find(arguments.spec))
        # a layer may have the name of the model that it was made for
        for kind, registry in registries:
            if arguments.spec in registry:
                print_explanation(console, kind, registry, Spec(arguments.spec))
        return
    spec = parse(arguments.spec)
    found = [(kind, registry) for kind, registry in registries if registry.canonical(spec).name in registry]
    if not found:
        if spec.name in SETTINGS:
            raise ValueError(f"nothing is called {spec.name!r}: {SETTINGS[spec.name]}")
        names = [name for kind, registry in registries for name in (*registry.names(), *ALIASES[kind])]
        names += models.entries() if with_models else ()
        near = did_you_mean(spec.name, names)
        raise ValueError(f"nothing is called {spec.name!r}{near}; 'regard list' shows what there is")
    for kind, registry in found:
        print_explanation(console, kind, registry, registry.canonical(spec))


def draw(arguments: argparse.Namespace) -> None:
    """regard draw"""
    from regard import draw as pictures

    name = REGISTRIES["attention"].canonical(arguments.spec).name
    place = REGISTRIES["position"].canonical(arguments.spec).name
    if place in REGISTRIES["position"] and name not in REGISTRIES["attention"]:
        name = place
        raise ValueError(f"{name!r} is a position scheme: draw it with a mechanism, softmax --position {name}")
    out = pictures.check(arguments.out)
    drawn = pictures.measure(
        arguments.spec,
        length=arguments.length,
        heads=arguments.heads,
        role=arguments.role,
        position=arguments.position,
        keys=arguments.keys,
        seed=arguments.seed,
    )
    picture = pictures.weights_picture(drawn) if arguments.weights else pictures.pattern_picture(drawn)
    print(f"{drawn.title}: {pictures.save(picture, out)}")
    cls = REGISTRIES["attention"].find(name)
    if drawn.dense and cls.facts.family == "patterns" and not cls.nests:
        print(
            f"At this length every query attends to all keys; smaller options show a pattern, such as {cls.examples[0]}"
        )


def registry_rows(kind: str, registry: Registry) -> list[dict[str, Any]]:
    """All entries of a registry, as plain dictionaries."""
    rows = []
    for name in registry.names():
        cls = registry.find(name)
        facts = {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in fact_items(cls.facts)}
        roles = facts.get("roles", ())
        row = {"name": name, "kind": kind, "causal": "causal" in roles, "cross": "cross" in roles}
        row["decodes"] = facts["state"] is not None if "state" in facts else None
        if "kind" in facts:
            row["place"] = facts.pop("kind")  # where a position scheme acts
        row |= facts
        row["options"] = [
            {
                "name": option.name,
                "type": describe(option.type),
                "default": None if option.required else option.default,
                "required": option.required,
                "meaning": option.meaning,
            }
            for option in registry.options(name)
        ]
        row["aliases"] = registry.aliases(name)
        row["package"] = registry.source(name)
        row["examples"] = getattr(cls, "examples", ())
        row["summary"] = inspect.getdoc(cls)
        rows.append(row)
    return rows


def model_rows() -> list[dict[str, Any]]:
    """All entries of the registry of models, as plain dictionaries."""
    from regard.models import registry

    rows = []
    for name, model in registry.entries().items():
        facts = {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in fact_items(model.facts)}
        row = {"name": name, "kind": MODEL, "decodes": facts["state"] is not None}
        row["cross"] = "translation" in model.forms
        row["causal"] = row["cross"] or "next token" in model.forms
        row |= facts | {"predicts": model.predicts, "aliases": [], "package": registry.PLUGINS.package(name)}
        row["presets"] = [preset for form in model.forms.values() for preset in form.presets]
        row["options"] = [
            {
                "name": option.name,
                "type": describe(option.type),
                "default": option.default,
                "required": False,
                "meaning": option.help,
            }
            for option in registry.model_options(name).values()
        ]
        row["summary"] = inspect.getdoc(next(iter(model.forms.values())).module)
        rows.append(row)
    return rows


def find_registries(kind: str | None) -> list[tuple[str, Registry]]:
    """The registries of specs of a kind, or all."""
    if kind not in (None, MODEL, *REGISTRIES):
        kinds = [*REGISTRIES, MODEL]
        raise ValueError(f"no kind {kind!r}{did_you_mean(kind, kinds)}; {list_known(kinds)}")
    return [(name, registry) for name, registry in REGISTRIES.items() if kind in (None, name)]
