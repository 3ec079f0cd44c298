"""The command line: a verb is a function here, and nothing imports this file.

Heavy libraries are imported by the verbs that need them.
"""

import argparse
import dataclasses
import difflib
import inspect
import json
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import regard
from regard import __version__, runs
from regard.aliases import ALIASES, SETTINGS
from regard.core.allocator import keep_memory
from regard.spec import REGISTRIES, Registry, Spec, describe, parse

HOME = Path(__file__).resolve().parent
MEMORY, SOFTWARE = 1, 70  # exit statuses: too little memory; an error of Regard itself, as sysexits.h has it


def main(argv: list[str] | None = None) -> int:
    """Runs one verb. Bad input ends the program with status 2 and one line on stderr, what nobody foresaw with status
    70. --debug, anywhere, adds the traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without é gets ? and no traceback
    given = sys.argv[1:] if argv is None else argv
    words = [word for word in given if word != "--debug"]
    if argv is None and words[:1] != ["show"]:
        # the process is our own; the page's server, which lives long, gives back what it does not need
        keep_memory()
    parser = _parser()
    try:
        parser, work = _choose(parser, words)
        code = work()
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # the reader (head, less) has seen enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if len(words) < len(given):
            traceback.print_exc()
        if isinstance(error, ValueError | OSError):
            _end(parser, _in_words(error, words))
        return _last_resort(parser, error, words)


def _choose(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.ArgumentParser, Callable[[], Any]]:
    """The parser of the verb, whose help is the one that helps, and what the verb does."""
    if argv[:1] == ["train"]:
        # its flags are generated from the config of the task
        parser.prog = "regard train"
        return parser, lambda: runs.train(argv[1:])
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.verb is None:
        return parser, parser.print_help
    return arguments.parser, lambda: arguments.verb(arguments)


def _in_words(error: Exception, argv: list[str]) -> str:
    """What was wrong with the input; a text file comes with the flag that names it."""
    if isinstance(error, UnicodeEncodeError):
        for index, word in enumerate(argv):
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                raw = os.fsencode(word)
                flag = argv[index - 1] if index and argv[index - 1].startswith("--") else f"argument {index + 1}"
                return f"{flag} is not UTF-8: {raw!r}; is it Windows-1252 (cp1252) or Latin-1? Give it as UTF-8"
    file = str(getattr(error, "file", ""))
    for flag, word in pairwise([part for given in argv for part in given.split("=", 1)]):
        if file and flag.startswith("--") and (file == word or file.startswith(f"{word}{os.sep}")):
            return f"{flag} {error}"
    return str(error)


def _last_resort(parser: argparse.ArgumentParser, error: BaseException, argv: list[str]) -> int:
    """Says what happened, over which files, and how to report it, where nothing better was foreseen."""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, MemoryError) or re.search(r"out of memory|can't allocate memory|not enough memory", what):
        print(f"{parser.prog}: there is not enough memory: {what}", file=sys.stderr)
        print("Take less at a time: fewer tokens or texts, a smaller beam, length or model.", file=sys.stderr)
        return MEMORY
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(HOME)]
    place = f" at regard/{Path(frames[-1].filename).relative_to(HOME)}:{frames[-1].lineno}" if frames else ""
    files = [part for word in argv for part in word.split("=", 1) if os.path.exists(part)]
    lines = [
        f"{parser.prog}: an error that Regard did not foresee{place}: {what}",
        *([f"The files it was given: {', '.join(dict.fromkeys(files))}"] if files else []),
        f"Please report it to whoever gave you Regard, with the output of the same command and --debug; this is Regard "
        f"{__version__}, Python {platform.python_version()}, {platform.system()}.",
    ]
    print("\n".join(lines), file=sys.stderr)
    return SOFTWARE


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
    rows = [row for kind, registry in _registries(arguments.kind) for row in _rows(kind, registry)]
    families = sorted({row["family"] for row in rows})
    if arguments.family is not None:
        if arguments.family not in families:
            raise ValueError(f"no family {arguments.family!r}{_near(arguments.family, families)}; {_known(families)}")
        rows = [row for row in rows if row["family"] == arguments.family]
    if arguments.json:
        for row in rows:
            print(json.dumps(row, default=str))
    else:
        _print_table(rows)


def _print_aliases(as_json: bool) -> None:
    """Other names that a spec may be written with."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in ("alias", "kind", "stands for"):
        table.add_column(title, no_wrap=True)
    for kind, names in ALIASES.items():
        for alias, spec in names.items():
            if as_json:
                print(json.dumps({"alias": alias, "kind": kind, "spec": spec}))
            table.add_row(Text(alias, style="bold cyan"), Text(kind), Text(spec))
    if not as_json:
        _console(10_000).print(table)


def _print_recipes(as_json: bool) -> None:
    """The settings that come with Regard, for `regard train TASK --config NAME`."""
    from regard.recipes import recipes

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in ("name", "task", "what it is for"):
        table.add_column(title, overflow="fold", no_wrap=title != "what it is for")
    for recipe in recipes():
        if as_json:
            print(json.dumps(recipe._asdict(), default=str))
        table.add_row(Text(recipe.name, style="bold cyan"), Text(recipe.task), Text(recipe.about))
    if not as_json:
        console = _console(10_000)
        console.print(table)
        console.print("\nTo train by one: regard train TASK --config NAME, and the data")


def _print_survey(as_json: bool) -> None:
    """The published table, with what the tests count beside it."""
    from regard.survey import SYSTEMS, differs, here

    notes: list[str] = []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in ("system", "class", "published", "decodes", "here", "kind", "time", "memory", "decodes", ""):
        table.add_column(title, overflow="fold")
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
        console = _console(120)
        console.print(table)
        console.print()
        for number, note in enumerate(notes, 1):
            console.print(f"[{number}] {note}")
        console.print("A feed-forward layer stands beside softmax attention, whose exponents these are.")


def explain(arguments: argparse.Namespace) -> None:
    """regard explain"""
    from regard.models import KINDS, ModelConfig

    registries = _registries(arguments.kind)
    models = {kind: pair for kind, pair in KINDS.items() if pair[0] is not ModelConfig}
    if arguments.spec in models and arguments.kind is None:
        _print_model(_console(100), arguments.spec, *models[arguments.spec])
        return
    spec = parse(arguments.spec)
    found = [(kind, registry) for kind, registry in registries if registry.canonical(spec).name in registry.names()]
    if not found:
        if spec.name in SETTINGS:
            raise ValueError(f"nothing is called {spec.name!r}: {SETTINGS[spec.name]}")
        names = [name for kind, registry in registries for name in (*registry.names(), *ALIASES[kind])]
        names += models if arguments.kind is None else ()
        raise ValueError(f"nothing is called {spec.name!r}{_near(spec.name, names)}; 'regard list' shows what there is")
    console = _console(100)
    for kind, registry in found:
        _print_explanation(console, kind, registry, registry.canonical(spec))


def draw(arguments: argparse.Namespace) -> None:
    """regard draw"""
    from regard import draw as pictures

    name = REGISTRIES["attention"].canonical(arguments.spec).name
    place = REGISTRIES["position"].canonical(arguments.spec).name
    if place in REGISTRIES["position"].names() and name not in REGISTRIES["attention"].names():
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
        print(f"At this length it sees all there is; smaller options show the pattern, such as {cls.examples[0]}")


def show(arguments: argparse.Namespace) -> None:
    """regard show"""
    from regard.page import verb

    verb.show(arguments)


def demo(arguments: argparse.Namespace) -> None:
    """regard demo"""
    from regard import demo as show

    words = show.words_of(arguments.sentence)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    console = _console(100)
    if arguments.part != "translate":
        _demo_mechanisms(console, words, folder)
    if arguments.part != "mechanisms":
        runs.demo(console, folder)
    # as it is called from here: an environment in this folder need not be active
    program = Path(sys.executable).with_name("regard")
    called = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else "regard"
    run = "" if arguments.part == "mechanisms" else f" {folder / 'translator'}"
    console.print(f"\nSee what attends to what, on a page: {called} show{run}", soft_wrap=True)


def _demo_mechanisms(console: Console, words: list[str], folder: Path) -> None:
    from regard import demo as show

    console.print("The mechanisms of Regard\n", style="bold")
    _print_table([row for kind, registry in REGISTRIES.items() for row in _rows(kind, registry)])
    console.print("\nOne sentence through some of them\n", style="bold")
    console.print(f"{' '.join(words)}\n", style="italic")
    maps = show.run(words)
    for spec, part in maps.items():
        console.print(f"{spec}: {show.reading(words, part)}")
    console.print(f"\n{show.WHAT}\n\nThe picture: {show.draw(words, maps, folder)}")


# what is printed


def _rows(kind: str, registry: Registry) -> list[dict[str, Any]]:
    """All that a registry knows, a plain dictionary a name."""
    rows = []
    for name in registry.names():
        cls = registry.find(name)
        facts = {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in _fields(cls.facts)}
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
        row["examples"] = getattr(cls, "examples", ())
        row["summary"] = inspect.getdoc(cls)
        rows.append(row)
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    """One line a row where there is room, and always into a pipe; in a narrow terminal cells are stacked."""
    titles = ("name", "kind", "family", "time", "memory", "state", "causal", "cross", "decodes", "paper")
    stacked = ("name", "paper", "kind\nfamily", "time", "memory", "state", "does")
    whole, narrow = [], []
    for row in rows:
        costs = [row[cost]["text"] if row.get(cost) else "-" for cost in ("time", "memory", "state")]
        flags = [{True: "yes", False: "no", None: "-"}[row[flag]] for flag in ("causal", "cross", "decodes")]
        does = " ".join(flag for flag in ("causal", "cross", "decodes") if row[flag])
        citation = re.match(r".*?\b\d{4}\b|.*", row["paper"])[0]
        whole.append((row["name"], row["kind"], row["family"], *costs, *flags, row["paper"]))
        narrow.append((row["name"], citation, f"{row['kind']}\n{row['family']}", *costs, does or "self"))
    console = _console(10_000)
    # all but the papers, which may wrap into 32 columns
    room = sum(2 + max(map(len, column)) for column in list(zip(titles, *whole, strict=True))[:-1]) + 32
    wide = room <= console.width
    gap = (0, 1, 0, 0) if wide else 0
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=gap, pad_edge=False, header_style="bold")
    for title in titles if wide else stacked:
        most = None if wide or title not in ("time", "memory", "state") else 8
        table.add_column(title, no_wrap=title == "name" or (wide and title != "paper"), overflow="fold", max_width=most)
    for name, *cells in whole if wide else narrow:
        table.add_row(Text(name, style="bold cyan"), *map(Text, cells))
    console.print(table)


def _print_explanation(console: Console, kind: str, registry: Registry, spec: Spec) -> None:
    import regard

    cls = registry.find(spec.name)
    facts = regard.facts(spec, kind) if spec.parts or spec.options else cls.facts
    console.print(Text.assemble((str(spec), "bold cyan"), f"  {kind}, family {facts.family}"))
    console.print(facts.paper)
    console.print(re.sub(r"^arXiv (\S+)$", r"https://arxiv.org/abs/\1", facts.link))
    if aliases := registry.aliases(spec.name):
        console.print(f"also written {', '.join(aliases)}")
    console.print()
    console.print(Padding(Text(facts.formula, style="bold"), (0, 2)))
    console.print()
    console.print(_flowing(inspect.getdoc(cls) or "-"))
    console.print("\nOptions", style="bold")
    options = registry.options(spec.name)
    given = dict(spec.options)
    table = Table(box=None, padding=(0, 2), show_header=bool(options))
    for title in ("name", "type", "default", "meaning"):
        table.add_column(title, style="cyan" if title == "name" else None, no_wrap=title == "name")
    for option in options:
        default = "needed" if option.required else repr(option.default)
        default += f" (here {given[option.name]!r})" if option.name in given else ""
        table.add_row(*map(Text, (option.name, describe(option.type), default, option.meaning)))
    if getattr(cls, "nests", False):
        table.add_row("", "specs", "needed", f"in parentheses, such as {cls.examples[0]}")
    elif not options:
        table.add_row("none")
    console.print(table)
    console.print("\nFacts", style="bold")
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for title, sentence in _sentences(facts, getattr(cls, "reduces_to", ())):
        table.add_row(Text(title), Text(sentence))
    console.print(table)
    lines = example_lines(kind, registry, spec)
    if lines:
        console.print("\nTo copy", style="bold")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)
    console.print()


def _print_model(console: Console, kind: str, config: type, cls: type) -> None:
    console.print(Text.assemble((kind, "bold cyan"), "  model"))
    # the lines to copy stand at the end
    console.print(_flowing(inspect.getdoc(cls).split("\n>>>")[0].strip()))
    console.print("\nOptions", style="bold")
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for field in dataclasses.fields(config):
        if field.name != "kind":
            table.add_row(Text(field.name), Text(repr(field.default)))
    console.print(table)
    console.print("\nTo copy", style="bold")
    console.print(f"  from regard.models import {config.__name__}, build", soft_wrap=True)
    console.print(f"  model = build({config.__name__}(vocabulary=8000))\n", soft_wrap=True)


def example_lines(kind: str, registry: Registry, spec: Spec) -> list[str]:
    """A line of Python and a line of shell that work as they stand."""
    cls = registry.find(spec.name)
    small = spec
    if not (spec.parts or spec.options):
        # the defaults are for long texts: a picture shows more with the small options of the tests
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


def _sentences(facts: Any, reduces_to: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """The facts in words. A fact this function has no words for is printed as it is."""
    known = dict(_fields(facts))
    for shown in ("name", "paper", "link", "family", "formula"):
        known.pop(shown, None)
    roles = known.pop("roles", ())
    lines = [("roles", ", ".join(roles))]
    lines += [(f"not {role}", why) for role, why in known.pop("refusals", ())]
    for key in ("time", "memory"):
        if key in known:
            order = known.pop(key)
            lines.append((key, f"{order.text}; twice the length takes {2**order.exponent:.3g} times as much"))
    if "state" in known:
        state = known.pop("state")
        growth = "does not grow with the length" if state and state.exponent == 0 else "grows with the length"
        none = "none: it does not decode token by token"
        lines.append(("state", f"{state.text}; what decoding keeps {growth}" if state else none))
    if "positions" in known:
        kinds = ("input", *known.pop("positions"))
        schemes = [name for name, cls in REGISTRIES["position"].classes.items() if cls.facts.kind in kinds]
        lines.append(("positions", f"{', '.join(kinds)}" + (f": {', '.join(schemes)}" if schemes else "")))
    if "kind" in known:
        places = {
            "input": "added to the token vectors, so every mechanism takes it",
            "rotation": "turns queries and keys",
            "bias": "added to the scaled logits",
            "content": "a term of the logits that reads queries or keys",
        }
        place = known.pop("kind")
        lines.append(("place", f"{place}: {places.get(place, place)}"))
    # (fact, if so, if not); None: nothing to say
    says = {
        "prefix": ("an output does not move when later tokens come", "an output may move when later tokens come"),
        "split": ("decoding gives the same however the tokens are cut", "decoding depends on how the tokens are cut"),
        "exact": ("computes its formula exactly", "a random or learnt approximation of its target"),
        "signed": (
            "weights may be negative or not sum to one",
            "weights are at least zero and sum to one in each row that sees a key",
        ),
        "apart": ("heads work apart from each other", "heads depend on each other"),
        "linear": (
            "an output is a row of the map times the values",
            "an output is more than a row of the map times the values",
        ),
        "pairs": ("weighs pairs of tokens one by one: takes an explicit mask, and attention dropout", None),
        "overflows": ("float16 overflows at large logits, for it has no denominator: use bfloat16 or float32", None),
        "random": ("draws numbers while it trains", None),
        "loss": ("trains a second loss", None),
        "stream": ("carries a second sequence from layer to layer", None),
    }
    for key, (yes, no) in says.items():
        if key in known:
            holds = known.pop(key)
            sentence = yes if holds else no
            causal_only = key in ("prefix", "split") and "causal" not in roles
            if sentence is not None and not causal_only:
                title = "prefix-invariant" if key == "prefix" else key
                lines.append((title, f"{'yes' if holds else 'no'}: {sentence}"))
    competes = {
        "token": "an answer depends on its token alone",
        "row": "tokens of a row compete",
        "earlier": "a token may be turned away because of tokens before it, in its row or in the rows before",
        "batch": "a token may be turned away or moved by any token of the batch, later ones too",
    }
    for key in ("training", "evaluation"):
        if key in known:
            lines.append((key, competes[known.pop(key)]))
    columns = {"tokens": "a column of the map is a token", "slots": "a column of the map is a slot of its own"}
    if "columns" in known:
        lines.append(("columns", columns[known.pop("columns")]))
    if known.pop("padding", "any") == "none":
        lines.append(("padding", "cannot skip padding"))
    lines += [(f"{key}", str(value)) for key, value in known.items()]
    lines += [("equals", f"{other}, as {spec} on the 33 tokens of the tests") for spec, other in reduces_to]
    return lines


def _flowing(doc: str) -> str:
    """A docstring without the breaks that only its own width asked for: where the next word would not have fitted."""
    lines = doc.splitlines()
    text = lines[0]
    for last, line in pairwise(lines):
        wrapped = line[:1].strip() and len(last) + len(line.split()[0]) > 110
        text += (" " if wrapped else "\n") + line
    return text


class _Pipe(Console):
    """A console that leaves a closed pipe to `main`."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def _console(wide: int) -> Console:
    """As wide as the terminal, or as COLUMNS says; `wide` where the output goes elsewhere."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _Pipe(width=None if known else wide, highlight=False, markup=False, emoji=False)


def _registries(kind: str | None) -> list[tuple[str, Registry]]:
    if kind is not None and kind not in REGISTRIES:
        raise ValueError(f"no kind {kind!r}{_near(kind, list(REGISTRIES))}; {_known(list(REGISTRIES))}")
    return [(name, registry) for name, registry in REGISTRIES.items() if kind in (None, name)]


def _fields(facts: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(facts, field.name)) for field in dataclasses.fields(facts)]


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _known(names: list[str]) -> str:
    return f"known: {', '.join(names)}"


# flags


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, where argparse would print its usage too."""

    def error(self, message: str) -> NoReturn:
        _end(self, f"{message}; see {self.prog} --help")


def _end(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    parser.exit(2, f"{parser.prog}: {' '.join(message.split())}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="regard",
        description="Every attention, one Transformer: train it, run it, see it, compare it.",
        epilog="Try it: regard demo. A verb's own help: regard draw --help.",
    )
    parser.set_defaults(verb=None)
    parser.add_argument("--version", action="version", version=f"regard {__version__}")
    parser.add_argument("--debug", action="store_true", help="with any verb: show the traceback of an error")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=_Parser)

    def verb(name: str, function: Any, about: str, examples: list[str]) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(verb=function, parser=added)
        return added

    added = verb(
        "list",
        list_mechanisms,
        "every mechanism: paper, family, cost, roles, what decoding keeps",
        ["regard list", "regard list --family scores", "regard list --kind position --json", "regard list --recipes"],
    )
    added.add_argument("--kind", help="only this kind, such as attention, feedforward or position")
    added.add_argument("--family", help="only this family, such as scores or patterns")
    added.add_argument("--json", action="store_true", help="all facts and options, one JSON object a line")
    added.add_argument("--aliases", action="store_true", help="other names that a spec may be written with")
    added.add_argument(
        "--recipes", action="store_true", help="settings to train by, for regard train TASK --config NAME"
    )
    added.add_argument("--survey", action="store_true", help="the survey's table of efficient Transformers beside ours")

    added = verb(
        "explain",
        explain,
        "what a mechanism is: formula, paper, options, facts, a line to copy",
        ["regard explain softmax", 'regard explain "heads(softmax, softmax)"', "regard explain perceiver"],
    )
    added.add_argument("spec", metavar="NAME", help="a name of 'regard list', or a spec with options")
    added.add_argument("--kind", help="only this kind, where several have the name")

    added = verb(
        "draw",
        draw,
        "a picture of the keys that each query sees, from the layer that runs",
        [
            'regard draw "local(window=8)" --role causal --out local.png',
            'regard draw "heads(local(window=8), strided(stride=8))" --length 64 --heads 8 --out pattern.svg',
            "regard draw softmax --position alibi --role causal --weights --heads 4 --out weights.pdf",
        ],
    )
    added.add_argument("spec", metavar="SPEC", help='a mechanism with its options, such as "local(window=8)"')
    added.add_argument("--length", type=int, default=64, help="tokens (default: 64)")
    added.add_argument("--heads", type=int, help="heads (default: 8, or what the parts of heads(...) divide)")
    added.add_argument("--role", choices=("self", "causal", "cross"), help="default: the first the mechanism takes")
    added.add_argument("--keys", type=int, help="role cross: tokens of the memory (default: as many as --length)")
    added.add_argument("--position", help="a position scheme, such as rotary")
    added.add_argument("--weights", action="store_true", help="how much, and not only whether: a panel a head")
    added.add_argument("--seed", type=int, default=0, help="of the random projections and tokens (default: 0)")
    added.add_argument("--out", default="pattern.png", help="a .png, .svg or .pdf file (default: pattern.png)")

    added = verb(
        "demo",
        demo,
        "the mechanisms at work on a sentence, a translator trained in minutes, and the one that comes with Regard",
        ["regard demo", 'regard demo --part mechanisms --sentence "a rose is a rose is a rose" --out /tmp'],
    )
    added.add_argument("--out", default="demo", help="folder of pictures and run, made if needed (default: demo)")
    added.add_argument("--sentence", help="your own words for the mechanisms")
    added.add_argument("--part", choices=("mechanisms", "translate"), help="only this part")

    added = verb(
        "show",
        show,
        "a local page: translate and see what attends to what, step by step, head by head, mechanism by mechanism",
        [
            "regard show",
            "regard show runs/translate runs/other --port 8000",
            'regard show runs/translate --text "Where is the station?" --out page.html',
        ],
    )
    added.add_argument("runs", metavar="RUN", nargs="*", help="run folders, beside the model that comes with Regard")
    added.add_argument("--text", help="what to read first")
    added.add_argument("--out", help="write one HTML file that opens without a server, and serve nothing")
    added.add_argument("--place", choices=("encoder", "decoder", "cross", "aligner"), help="which attention, for --out")
    added.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    added.add_argument("--port", type=int, default=8642, help="0 takes a free one (default: 8642)")
    added.add_argument("--device", default="cpu", help="cpu, cuda ... (default: cpu)")
    added.add_argument("--no-browser", action="store_true", help="print the address and open nothing")

    runs.add_verbs(verb)
    return parser
