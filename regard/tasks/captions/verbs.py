"""The verbs of captioners, caption and retrieve, their flags of evaluate, and how `regard classify` answers for their
runs."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.tasks.command import (
    AddVerb,
    EvaluationFlags,
    add_model,
    add_run,
    check_writable,
    counted,
    few_warnings,
    notice,
)

if TYPE_CHECKING:
    import numpy as np

    from regard.data.captioned import Captioned
    from regard.data.images.decode import BadImage
    from regard.decoding import DecodingConfig
    from regard.tasks.captions import Captioner

# here, so that `regard train --help` does not import PyTorch
ABOUT = (
    "A captioner (CoCa), trained on pictures with captions: it writes captions, and pictures and texts find each other."
)
EXAMPLES = (
    "regard train captions --data.captions captions.csv --data.images photos --out runs/captions",
    "regard train captions --data.captions train.tsv --data.columns '[0, 1, 2]' --data.images train.npz",
    "regard train captions --data.captions a.jsonl --model.attention performer --model.cross_attention linear",
    "regard train captions --data.captions a.csv --contrastive 0 --training.metric cider",
)
EVALUATION = "BLEU-4, chrF, CIDEr-D, loss; recall@1, 5, 10 and median rank both ways, beside chance"


def add_verbs(verb: AddVerb) -> None:
    _add_caption(verb)
    _add_retrieve(verb)


def _add_caption(verb: AddVerb) -> None:
    added = verb(
        "caption",
        caption,
        "write captions of pictures, one line per picture",
        [
            "regard caption runs/captions dog.jpg",
            "regard caption runs/captions photos --beam 8 --nbest 3 --scores",
            "regard caption runs/captions dog.jpg --sample --top-p 0.9 --seed 7",
        ],
    )
    add_run(added)
    added.add_argument("pictures", metavar="PICTURE", nargs="+", help="picture files, or folders of them")
    added.add_argument("--json", action="store_true", help="print a JSON object per picture, with all captions")
    add_model(added)
    _add_decoding(added)
    added.add_argument("--nbest", type=int, help="number of captions per picture (default: 1)")
    added.add_argument(
        "--scores", action="store_true", help="add a column: log probability divided by the length penalty"
    )
    added.add_argument("--sample", action="store_true", help="sample tokens instead of beam search")
    added.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default: 1)")
    added.add_argument("--top-k", type=int, help="sample from the k most probable tokens")
    added.add_argument("--top-p", type=float, help="sample from the fewest tokens that have this probability together")
    added.add_argument("--seed", type=int, default=0, help="random seed of the sampling (default: 0)")


def _add_retrieve(verb: AddVerb) -> None:
    added = verb(
        "retrieve",
        retrieve,
        "find pictures by texts, or texts by pictures",
        [
            'regard retrieve runs/captions --pictures photos "a dog runs"',
            "regard retrieve runs/captions --texts captions.txt dog.jpg",
        ],
    )
    add_run(added)
    added.add_argument(
        "queries", metavar="QUERY", nargs="+", help="texts with --pictures; picture files or folders with --texts"
    )
    added.add_argument(
        "--pictures", metavar="PICTURE", action="append", help="folder or picture file to find some in; may be repeated"
    )
    added.add_argument("--texts", metavar="FILE", help="file of texts to find some in, one per line, plain, .gz or .xz")
    added.add_argument("--count", type=int, default=5, help="number of answers per query (default: 5)")
    added.add_argument("--json", action="store_true", help="print a JSON object per query")
    add_model(added)


def _add_decoding(added: argparse.ArgumentParser | EvaluationFlags) -> None:
    added.add_argument("--beam", type=int, default=5, help="beam size; 1: greedy (default: 5)")
    added.add_argument("--penalty", type=float, default=1.0, help="alpha of the GNMT length penalty (default: 1)")
    added.add_argument("--minimum", type=int, default=1, help="fewest tokens of a caption (default: 1)")
    added.add_argument("--maximum", type=int, help="most tokens of a caption (default: the longest it was trained on)")


def caption(arguments: argparse.Namespace) -> int:
    """regard caption"""
    from regard.tasks.captions import Captioner

    decoding, named = _decoding(arguments), _pictures(arguments.pictures)
    captioner = Captioner.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    _warn_untrained(arguments.run, "captioning")
    paths, pixels = _readable(captioner, named)
    for path, captions in zip(paths, captioner.caption(pixels, decoding), strict=True):
        if arguments.json:
            texts = [{"caption": best.text, "score": best.score} for best in captions]
            print(json.dumps({"picture": path, "captions": texts}, ensure_ascii=False))
            continue
        for best in captions:
            cells = ([path] if len(named) > 1 else []) + [best.text]
            print("\t".join(cells + ([f"{best.score:.4f}"] if arguments.scores else [])))
    return int(len(paths) < len(named))


def _warn_untrained(run: str, loss: str) -> None:
    """Says so where a run was trained without one of the two losses."""
    from regard.tasks.load import read_config
    from regard.training.run import Run

    opened = Run.open(run)
    if opened.has("config.yaml") and not getattr(read_config(opened), loss):
        what = {"captioning": "captions", "contrastive": "vectors of pictures and texts"}[loss]
        notice(f"{run} was trained with {loss} 0: its {what} were not learned")


def _decoding(arguments: argparse.Namespace) -> "DecodingConfig":
    from regard.decoding import DecodingConfig

    names = ("beam", "penalty", "minimum", "maximum", "nbest", "sample", "temperature", "top_k", "top_p", "seed")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
    drawn = [f"--{name.replace('_', '-')}" for name in ("temperature", "top_k", "top_p") if given.get(name, 1.0) != 1.0]
    if drawn and not given.get("sample"):
        raise ValueError(f"{', '.join(drawn)} is for sampling: give --sample too")
    if not given.get("sample"):
        given["beam"] = max(given["beam"], given.get("nbest", given["beam"]))
    return DecodingConfig(**given)


def _pictures(names: Sequence[str]) -> list[str]:
    """Picture files; of a folder, those in it that end as pictures do, by name."""
    from regard.data.images.decode import SUFFIXES, BadImage

    found = []
    for name in names:
        if not Path(name).is_dir():
            found.append(name)
            continue
        inside = [str(file) for file in sorted(Path(name).rglob("*")) if file.suffix.lower() in SUFFIXES]
        if not inside:
            raise BadImage(name, "is a folder without pictures", f": expected files that end in {', '.join(SUFFIXES)}")
        found += inside
    return found


def _readable(captioner: "Captioner", paths: Sequence[str]) -> tuple[list[str], "np.ndarray"]:
    """The picture files that can be read, and their pixels; of each other one a line says what is wrong. If none can be
    read, the first is raised."""
    broken: list[BadImage] = []
    kept, pixels = captioner.read_readable(paths, broken.append)
    if not kept:
        raise broken[0]
    for bad in broken:
        notice(str(bad))
    return [paths[number] for number in kept], pixels


def retrieve(arguments: argparse.Namespace) -> int:
    """regard retrieve"""
    from regard.tasks.captions import Captioner
    from regard.tasks.captions.captioner import nearest

    if (arguments.pictures is None) == (arguments.texts is None):
        got = "neither" if arguments.texts is None else "both"
        raise ValueError(f"give --pictures or --texts, what to find some in, got {got}")
    if arguments.count < 1:
        raise ValueError(f"--count must be at least 1, got {arguments.count}")
    if not all(query.strip() for query in arguments.queries):
        raise ValueError("a query is blank: give a text with --pictures, or a picture file with --texts")
    captioner = Captioner.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    _warn_untrained(arguments.run, "contrastive")
    with few_warnings() as warn:
        if arguments.pictures is not None:
            named, queries = _pictures(arguments.pictures), arguments.queries
            pictures, pixels = _readable(captioner, named)
            candidates, vectors = pictures, captioner.caption_vectors(queries, warn=warn)
            others = captioner.picture_vectors(pixels)
        else:
            named, candidates = _pictures(arguments.queries), _lines(arguments.texts)
            pictures, pixels = _readable(captioner, named)
            queries, vectors = pictures, captioner.picture_vectors(pixels)
            others = captioner.caption_vectors(candidates, warn=warn)
    several = len(queries if arguments.texts is None else named) > 1
    for query, matches in zip(queries, nearest(vectors, others, arguments.count), strict=True):
        answers = [(candidates[match.number], match.similarity) for match in matches]
        if arguments.json:
            found = [{"answer": answer, "similarity": value} for answer, value in answers]
            print(json.dumps({"query": query, "answers": found}, ensure_ascii=False))
            continue
        for answer, value in answers:
            print("\t".join(([query] if several else []) + [answer, f"{value:.4f}"]))
    return int(len(pictures) < len(named))


def is_for_captions(run: str) -> bool:
    """Whether the first argument of `regard classify` is a run of captions."""
    from regard import tasks
    from regard.training.run import Run

    return Path(run).is_dir() and tasks.of(Run.open(run)).name == "captions"


def classify(arguments: argparse.Namespace) -> int:
    """regard classify, for a run of captions: one line for each picture, the label whose text is nearest"""
    from regard.tasks.captions import Captioner

    if arguments.labels is None:
        raise ValueError(
            f'{arguments.run} is a run of captions, which knows no labels: give some, --labels "a dog,a cat"'
        )
    labels = [label.strip() for label in arguments.labels.split(",")]
    if len(labels) < 2 or not all(labels) or len(set(labels)) < len(labels):
        raise ValueError(f"--labels must be two or more different texts with commas between, got {arguments.labels!r}")
    if not arguments.images:
        raise ValueError(f"{arguments.run} classifies pictures: name some, regard classify {arguments.run} picture.jpg")
    named = _pictures(arguments.images)
    captioner = Captioner.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    _warn_untrained(arguments.run, "contrastive")
    paths, pixels = _readable(captioner, named)
    for path, row in zip(paths, captioner.probabilities(pixels, labels), strict=True):
        best = int(row.argmax())
        if arguments.json:
            every = dict(zip(labels, map(float, row), strict=True))
            answer = {"file": path, "label": labels[best], "probability": float(row[best]), "probabilities": every}
            print(json.dumps(answer, ensure_ascii=False))
        else:
            print(f"{path}\t{labels[best]}\t{row[best]:.4f}")
    return int(len(paths) < len(named))


def _lines(path: str) -> list[str]:
    """The texts of a file."""
    from regard.data.text import BadText, open_lines, shown

    found = [line.strip() for line in open_lines(path) if line.strip()]
    if not found:
        raise BadText(shown(path), None, "has no text")
    return found


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_argument(
        "--data", help="file of pictures and captions: .csv, .tsv, .jsonl (default: the validation ones)"
    )
    flags.add_argument(
        "--images", help="folder of the pictures of --data, or .npz file (default: the folder of --data)"
    )
    flags.add_argument("--columns", help="columns of picture and captions, by name or number from 0")
    flags.add_argument("--out", help="file to write the captions to")
    _add_decoding(flags)


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: BLEU, chrF, CIDEr-D, loss, recall both ways"""
    from regard.tasks.captions import Captioner, evaluation

    captioner = Captioner.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    data = _evaluated(captioner, arguments)
    if arguments.out is not None:
        check_writable(arguments.out)
    found = evaluation.evaluate(captioner, data.pixels, data.captions, _decoding(arguments))
    if arguments.out is not None:
        Path(arguments.out).write_text("".join(line + "\n" for line in found.hypotheses), encoding="utf-8")
    what = f"validation pictures of {arguments.run}" if arguments.data is None else arguments.data
    count = sum(map(len, data.captions))
    if arguments.json:
        values: dict[str, Any] = {"data": what, "pictures": len(data.names), "captions": count}
        print(json.dumps(values | found.to_json(), ensure_ascii=False))
        return
    print(f"{counted(data.names, 'picture')}, {count:,} captions: {what}")
    print("\n".join(found.lines()))


def _evaluated(captioner: "Captioner", arguments: argparse.Namespace) -> "Captioned":
    """The pictures of --data, or those that the run validates on."""
    from regard.data.captioned import COLUMNS, read_captioned
    from regard.tasks.captions import read_valid

    if arguments.data is None:
        for name in ("images", "columns"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} needs --data, the file of captions")
        return read_valid(arguments.run)
    columns: Sequence[str | int] = COLUMNS
    if arguments.columns is not None:
        parts = [part.strip() for part in arguments.columns.split(",")]
        columns = [int(part) for part in parts] if all(part.isdecimal() for part in parts) else parts
    options = {"size": captioner.size, "channels": captioner.model.config.channels}
    return read_captioned(arguments.data, arguments.images, columns=columns, **options)
