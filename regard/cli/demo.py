"""`regard demo`: mechanisms at work on one sentence, a translator trained on the spot, and the bundled one."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from regard.cli.console import open_console, print_table
from regard.cli.mechanisms import registry_rows
from regard.spec import REGISTRIES
from regard.tasks.command import AddVerb

if TYPE_CHECKING:
    from regard.tasks.translate import Translator


def add_verbs(verb: AddVerb) -> None:
    added = verb(
        "demo",
        demo,
        "see the mechanisms on a sentence, train a translator in minutes, and use the bundled one",
        ["regard demo", 'regard demo --part mechanisms --sentence "a rose is a rose is a rose" --out /tmp'],
    )
    added.add_argument("--out", default="demo", metavar="FOLDER", help="folder for pictures and run (default: demo)")
    added.add_argument("--sentence", help="your own sentence for the mechanisms")
    added.add_argument("--part", choices=("mechanisms", "translate"), help="only this part")


def demo(arguments: argparse.Namespace) -> None:
    """regard demo"""
    from regard.cli import demo_content as content

    words = content.words_of(arguments.sentence)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    console = open_console(100)
    if arguments.part != "translate":
        _demo_mechanisms(console, words, folder)
    if arguments.part != "mechanisms":
        _demo_translator(console, folder)
    # the path of the program, since an environment in this folder need not be active
    program = Path(sys.executable).with_name("regard")
    called = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else "regard"
    run = "" if arguments.part == "mechanisms" else f" {folder / 'translator'}"
    console.print(f"\nSee what attends to what, on a page: {called} show{run}", soft_wrap=True)


def _demo_mechanisms(console: Console, words: list[str], folder: Path) -> None:
    from regard.cli import demo_content as content

    console.print("The mechanisms of Regard\n", style="bold")
    print_table([row for kind, registry in REGISTRIES.items() for row in registry_rows(kind, registry)])
    console.print("\nOne sentence through some of them\n", style="bold")
    console.print(f"{' '.join(words)}\n", style="italic")
    maps = content.run(words)
    for spec, part in maps.items():
        console.print(f"{spec}: {content.reading(words, part)}")
    console.print(f"\n{content.WHAT}\n\nThe picture: {content.draw(words, maps, folder)}")


def _demo_translator(console: Console, folder: Path) -> None:
    """The part of `regard demo` that translates."""
    from regard.cli import demo_content as content
    from regard.tasks.train import train
    from regard.tasks.translate import Task, Translator, read_valid
    from regard.training.display import Display

    console.print(
        "\nA translator of numbers, dates, times and amounts, trained now on generated sentences\n", style="bold"
    )
    config = content.small_translator(folder / "translator")
    train(Task, config, Display())
    translator = Translator.load(config.out)
    pairs = read_valid(config.out)
    best = [found[0].text for found in translator.translate(source for source, _ in pairs)]
    scores = translator.scores(best, [target for _, target in pairs])
    console.print(f"\nOn {len(pairs)} sentences it has not seen: {scores['exact'].text}")
    console.print(f"{scores['bleu'].text}\n", soft_wrap=True)
    for source in content.SENTENCES:
        console.print(f"  {source}\n    {translator(source)}", soft_wrap=True)
    _draw_alignment(console, folder, translator, content.SENTENCES[0])
    console.print("\nThe English-German translator bundled with Regard\n", style="bold")
    bundled = Translator.load()
    for source in content.ANYTHING:
        console.print(f"  {source}\n    {bundled(source)}", soft_wrap=True)
    console.print("\nYour own: echo 'Good morning!' | regard translate; your own data: regard train translate --help")


def _draw_alignment(console: Console, folder: Path, translator: "Translator", source: str) -> None:
    """folder/alignment.png, of a source and its translation."""
    from regard import draw as pictures
    from regard.tasks.translate import align

    target = translator(source)
    if not target:
        console.print("\nNo word alignment is drawn: there was too little time to learn to translate.")
        return
    (found,) = align(translator.model, translator.source, translator.target, [(source, target)])
    note = "By the aligner, which was trained beside the translator. Ringed: the word alignment."
    picture = pictures.alignment_picture(
        found.matrix, found.source, found.target, found.links, "Which English words each German word comes from", note
    )
    console.print(f"\nIts word alignment: {pictures.save(picture, folder / 'alignment.png')}")
