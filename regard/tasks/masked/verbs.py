"""The verbs of masked language models, fill and embed, and their flags of evaluate."""

import argparse
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from regard.tasks.command import (
    AddVerb,
    EvaluationFlags,
    add_model,
    add_run,
    check_writable,
    counted,
    evaluated_documents,
    few_warnings,
    notice_empty,
)

if TYPE_CHECKING:
    from regard.tasks.masked import Filled

# here, so that `regard train --help` does not import PyTorch
ABOUT = "A masked language model (BERT), trained on running text: an encoder with any attention."
EXAMPLES = (
    "regard train masked --data.text books/ --model.preset bert-small --out runs/masked",
    "regard train masked --data.text lines.txt.xz --data.documents line --data.apart true --data.whole_words true",
    "regard train masked --data.text book.txt --data.tokenizer characters --model.attention 'local(window=64)'",
    "regard train masked --config runs/masked/config.yaml --out runs/b --training.seed 2",
    "regard train masked --init runs/bert --data.text mine/ --training.learning_rate 3e-5 --out runs/mine",
)
EVALUATION = "loss, perplexity and accuracy of the masked tokens"


def add_verbs(verb: AddVerb) -> None:
    _add_fill(verb)
    _add_embed(verb)


def _add_fill(verb: AddVerb) -> None:
    added = verb(
        "fill",
        fill,
        "fill the gaps of a text: an argument, or each line of standard input",
        [
            'regard fill runs/masked "I took my [mask] for a walk"',
            'regard fill runs/masked "The [mask] of the [mask] was cold." --top 10',
            "regard fill runs/masked < gaps.txt > filled.txt",
        ],
    )
    add_run(added)
    added.add_argument("text", metavar="TEXT", nargs="?", help="text with [mask] in it (default: standard input)")
    added.add_argument("--top", type=int, default=5, help="candidates to show for each gap (default: 5)")
    added.add_argument("--mark", default="[mask]", help="text that marks a gap (default: [mask])")
    added.add_argument(
        "--json", action="store_true", help="print a JSON object per text, with candidates and probabilities"
    )
    add_model(added)


def _add_embed(verb: AddVerb) -> None:
    added = verb(
        "embed",
        embed,
        "turn each line of standard input into a vector, by an encoder such as BERT",
        [
            "regard embed runs/minilm < sentences.txt > vectors.jsonl",
            "regard embed runs/minilm --input sentences.txt --out vectors.npy",
        ],
    )
    add_run(added)
    added.add_argument("--input", default="-", metavar="FILE", help="file to read, plain, .gz or .xz (default: stdin)")
    added.add_argument("--out", metavar="FILE", help=".npy file to write, [lines, width] (default: print JSON lists)")
    added.add_argument(
        "--pooling", choices=("mean", "first", "pooler"), default="mean", help="pooling over the tokens (default: mean)"
    )
    added.add_argument("--raw", action="store_true", help="do not normalize the vectors to length one")
    add_model(added)


def fill(arguments: argparse.Namespace) -> None:
    """regard fill"""
    from regard.data.text import BREAKS, opened, read_sentences, shown
    from regard.tasks.masked import Filled, MaskedModel

    masked = MaskedModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    options: dict[str, Any] = {"top": arguments.top, "mark": arguments.mark}
    if arguments.text is not None:
        found = masked.fill(arguments.text, **options)
        if arguments.json:
            print(json.dumps(_filled(found), ensure_ascii=False))
            return
        for number, gap in enumerate(found.gaps, 1):
            print(f"{arguments.mark} {number}" if len(found.gaps) > 1 else arguments.mark)
            for candidate in gap:
                print(f"  {candidate.probability:.4f}  {candidate.text}")
        print(found.text)
        return
    with opened("-") as stream, few_warnings() as warn:
        for number, line in enumerate(read_sentences(stream, name=shown("-")), 1):
            found = Filled(line, [])
            if arguments.mark in line:
                try:
                    found = masked.fill(line, **options)
                except ValueError as error:
                    warn(f"line {number}: {error}; it is printed unchanged")
            print(json.dumps(_filled(found), ensure_ascii=False) if arguments.json else BREAKS.sub(" ", found.text))


def _filled(found: "Filled") -> dict[str, Any]:
    gaps = [[{"text": one.text, "probability": one.probability} for one in gap] for gap in found.gaps]
    return {"text": found.text, "gaps": gaps}


def embed(arguments: argparse.Namespace) -> None:
    """regard embed"""
    import numpy as np

    from regard.data.text import opened, read_sentences, shown
    from regard.tasks.masked import Embedder

    if arguments.out is not None:
        if not arguments.out.endswith(".npy"):
            raise ValueError(f"--out must be a .npy file, got {arguments.out!r}")
        check_writable(arguments.out)
    embedder = Embedder.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    options: dict[str, Any] = {"pooling": arguments.pooling, "normalized": not arguments.raw}
    parts, number = [], 1
    with opened(arguments.input) as stream, few_warnings() as warn:
        lines = read_sentences(stream, name=shown(arguments.input))
        while some := list(islice(lines, 1024)):
            vectors = embedder.embed(some, first=number, warn=warn, **options)
            number += len(some)
            if arguments.out is not None:
                parts.append(vectors)
                continue
            for vector in vectors:
                print(json.dumps([round(float(value), 7) for value in vector]))
        notice_empty(arguments.input, number - 1)
    if arguments.out is not None:
        width = embedder.model.config.width
        np.save(arguments.out, np.concatenate([np.zeros((0, width), np.float32), *parts]))


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_text()


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: loss, perplexity and accuracy of masked tokens"""
    from regard.data.masking import Masking
    from regard.tasks.load import read_parts
    from regard.tasks.masked import MaskedModel
    from regard.training.run import Run

    masked = MaskedModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    what, documents = evaluated_documents(arguments)
    facts = read_parts(Run.open(arguments.run)).facts
    masking = Masking(masked.tokenizer, facts.get("masked", 0.15), whole_words=bool(facts.get("whole_words")))
    found = masked.measure(documents, masking)
    if arguments.json:
        print(json.dumps({"documents": len(documents), **found._asdict()}))
        return
    print(f"{counted(documents, 'document')}, {found.tokens:,} masked tokens: {what}")
    print(f"loss = {found.loss:.4f} per masked token, perplexity = {found.perplexity:.2f}")
    print(f"accuracy = {found.accuracy:.2f} %")
