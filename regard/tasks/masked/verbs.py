"""The verbs of masked language models: fill, embed, and their part of evaluate."""

import argparse
import json
from itertools import islice
from typing import Any

from regard.tasks.command import (
    AddVerb,
    EvaluationFlags,
    add_model,
    check_writable,
    counted,
    evaluated_documents,
    few_warnings,
)

# for `regard train --help`, which imports no PyTorch
ABOUT = "A model that names hidden words (BERT), from running text: an encoder with any attention."
EXAMPLES = (
    "regard train masked --data.text books/ --model.preset bert-small --out runs/masked",
    "regard train masked --data.text lines.txt.xz --data.documents line --data.apart true --data.whole_words true",
    "regard train masked --data.text book.txt --data.tokenizer characters --model.attention 'local(window=64)'",
    "regard train masked --config runs/masked/config.yaml --out runs/b --training.seed 2",
    "regard train masked --init runs/bert --data.text mine/ --training.learning_rate 3e-5 --out runs/mine",
)
EVALUATION = "loss, perplexity and accuracy of hidden tokens"


def add_verbs(verb: AddVerb) -> None:
    _add_fill(verb)
    _add_embed(verb)


def _add_fill(verb: AddVerb) -> None:
    added = verb(
        "fill",
        fill,
        "name the hidden words of a text, with their probabilities; the text is an argument or standard input",
        [
            'regard fill runs/masked "I took my [mask] for a walk"',
            'regard fill runs/masked "The [mask] of the [mask] was cold." --top 10',
            "regard fill runs/masked < gaps.txt > filled.txt",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("text", metavar="TEXT", nargs="?", help="with [mask] in it (default: each line of stdin)")
    added.add_argument("--top", type=int, default=5, help="candidates of each gap (default: 5)")
    added.add_argument("--mark", default="[mask]", help="what stands for a hidden token (default: [mask])")
    added.add_argument("--json", action="store_true", help="one JSON object a text, with candidates and probabilities")
    add_model(added)


def _add_embed(verb: AddVerb) -> None:
    added = verb(
        "embed",
        embed,
        "turn each line of standard input into a vector, by an encoder (BERT and its like)",
        [
            "regard embed runs/minilm < sentences.txt > vectors.jsonl",
            "regard embed runs/minilm --input sentences.txt --out vectors.npy",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--input", default="-", help="a file instead of standard input; .gz and .xz too")
    added.add_argument("--out", help="a .npy file, [lines, width] (default: a JSON list a line)")
    added.add_argument(
        "--pooling", choices=("mean", "first", "pooler"), default="mean", help="over the tokens of a line"
    )
    added.add_argument("--raw", action="store_true", help="vectors as they are, instead of length one")
    add_model(added)


def fill(arguments: argparse.Namespace) -> None:
    """regard fill"""
    from regard.data.text import BREAKS, opened, read_sentences, shown
    from regard.tasks.masked import Filled, MaskedModel

    masked = MaskedModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    options = {"top": arguments.top, "mark": arguments.mark}
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
                    warn(f"line {number}: {error}; it goes out as it came in")
            print(json.dumps(_filled(found), ensure_ascii=False) if arguments.json else BREAKS.sub(" ", found.text))


def _filled(found: Any) -> dict[str, Any]:
    gaps = [[{"text": one.text, "probability": one.probability} for one in gap] for gap in found.gaps]
    return {"text": found.text, "gaps": gaps}


def embed(arguments: argparse.Namespace) -> None:
    """regard embed"""
    import numpy as np

    from regard.data.text import opened, read_sentences, shown
    from regard.tasks.masked import Embedder

    if arguments.out is not None:
        if not arguments.out.endswith(".npy"):
            raise ValueError(f"--out is a .npy file, got {arguments.out!r}")
        check_writable(arguments.out)
    embedder = Embedder.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    options = {"pooling": arguments.pooling, "normalized": not arguments.raw}
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
    if arguments.out is not None:
        width = embedder.model.config.width
        np.save(arguments.out, np.concatenate([np.zeros((0, width), np.float32), *parts]))


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_text()


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: loss, perplexity and accuracy of hidden tokens"""
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
    print(f"{counted(documents, 'document')}, {found.tokens:,} hidden tokens: {what}")
    print(f"loss = {found.loss:.4f} a hidden token, perplexity = {found.perplexity:.2f}")
    print(f"accuracy = {found.accuracy:.2f} %")
