"""The verbs of translators, translate and align, and their flags of evaluate."""

import argparse
import gzip
import json
import lzma
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.tasks.command import (
    AddVerb,
    EvaluationFlags,
    add_model,
    add_run,
    check_picture,
    check_writable,
    counted,
    few_warnings,
    notice,
    notice_empty,
    read_columns,
    write_out,
)

if TYPE_CHECKING:
    from regard.decoding import DecodingConfig
    from regard.tasks.translate import Translator

# here, so that `regard train --help` does not import PyTorch
ABOUT = "A translator, trained on pairs of sentences: Transformer or recurrent, with any attention."
EXAMPLES = (
    "regard train translate --data.generated 20000 --training.minutes 3",
    "regard train translate --data.source a.en --data.target a.de --out runs/a --model.attention performer",
    "regard train translate --data.source pairs.tsv --model.attention '[\"local(window=16)\", softmax]'",
    "regard train translate --config runs/a/config.yaml --out runs/b --training.seed 2",
    "regard train translate --model.preset lstm --model.attention additive --data.generated 20000",
)
EVALUATION = "BLEU and chrF with their sacreBLEU signatures, exact match, loss"


def add_verbs(verb: AddVerb) -> None:
    _add_translate(verb)
    _add_align(verb)


def _add_translate(verb: AddVerb) -> None:
    added = verb(
        "translate",
        translate,
        "translate files or standard input, line by line; without RUN from English to German",
        [
            'echo "Where is the station?" | regard translate',
            "regard translate letter.txt -o brief.txt",
            "regard translate runs/translate in.en -o out.de",
            "regard translate runs/translate < in.en > out.de",
            "regard translate runs/translate --beam 8 --nbest 3 --scores --alignments < in.en",
            "regard translate runs/a runs/b runs/c in.en -o out.de",
            "regard translate runs/translate --sample --temperature 0.8 --top-p 0.9 --seed 7 < in.en",
        ],
    )
    added.add_argument(
        "run", metavar="RUN", nargs="?", help="run folder (default: the English-German model bundled with Regard)"
    )
    added.add_argument(
        "files",
        metavar="RUN or FILE",
        nargs="*",
        help="further run folders, whose probabilities are averaged with those of RUN; then text files, plain, .gz or "
        ".xz (default: standard input)",
    )
    added.add_argument("--input", metavar="FILE", help="another way to name one file")
    added.add_argument(
        "-o", "--out", metavar="FILE", help="file to write, complete or not at all, also .gz or .xz (default: print)"
    )
    add_model(added)
    _add_mean(added)
    _add_decoding(added)
    _add_unknown(added)
    added.add_argument(
        "--nbest", type=int, help="number of translations per line, each after its line number and a tab"
    )
    added.add_argument(
        "--scores", action="store_true", help="add a column: log probability divided by the length penalty"
    )
    added.add_argument(
        "--alignments", action="store_true", help="add a column: word alignment, source-target pairs from 0"
    )
    added.add_argument("--sample", action="store_true", help="sample tokens instead of beam search")
    added.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default: 1)")
    added.add_argument("--top-k", type=int, help="sample from the k most probable tokens")
    added.add_argument("--top-p", type=float, help="sample from the fewest tokens that have this probability together")
    added.add_argument("--seed", type=int, default=0, help="random seed of the sampling (default: 0)")


def _add_align(verb: AddVerb) -> None:
    added = verb(
        "align",
        align_pairs,
        "align the words of sentence pairs, one line per pair, as source-target pairs from 0",
        [
            "regard align runs/en-de --source a.en --target a.de > a.links",
            "regard align runs/en-fr --reverse runs/fr-en --source a.en --target a.fr --gold a.gold > a.links",
            "regard align runs/en-de --picture alignment.png --sentence 3",
        ],
    )
    add_run(added)
    added.add_argument(
        "--source", metavar="FILE", help="source sentences, or a TSV file of pairs (default: the validation pairs)"
    )
    added.add_argument("--target", metavar="FILE", help="translations, one per line of --source")
    added.add_argument("--columns", help="columns of source and target in a TSV file, from 0 (default: 0,1)")
    added.add_argument("--reverse", metavar="RUN", help="run of the opposite direction, to combine both alignments")
    methods = ("intersection", "union", "grow-diagonal", "grow-diagonal-final-and", "agreement")
    added.add_argument("--symmetrise", choices=methods, help="how to combine (default: grow-diagonal)")
    added.add_argument(
        "--layer",
        help="layer of the decoder, from 0; average; or aligner (default: the aligner if there is one, else the last "
        "but one, or with --reverse those that agree best)",
    )
    added.add_argument("--head", default="average", help="head of the layer, from 0, or average (default: average)")
    added.add_argument(
        "--read",
        choices=("consume", "predict"),
        default="predict",
        help="attention of the step that predicts a target token, or of the one that reads it (default: predict)",
    )
    added.add_argument(
        "--gold",
        metavar="FILE",
        help="gold alignments, from 1, sure as S-T and possible as SpT: prints the alignment error rate",
    )
    added.add_argument("--picture", metavar="FILE", help="draw one sentence into a .png, .svg or .pdf file")
    added.add_argument("--sentence", type=int, help="number of the sentence to draw, from 1 (default: 1)")
    add_model(added)


def _add_decoding(added: argparse.ArgumentParser | EvaluationFlags) -> None:
    added.add_argument("--beam", type=int, default=5, help="beam size; 1: greedy (default: 5)")
    added.add_argument("--penalty", type=float, default=1.0, help="alpha of the GNMT length penalty (default: 1)")
    added.add_argument(
        "--coverage", type=float, default=0.0, help="beta of the GNMT coverage penalty (default: 0, none; GNMT: 0.2)"
    )
    added.add_argument("--minimum", type=int, default=1, help="fewest tokens of a translation (default: 1)")
    added.add_argument("--maximum", type=int, help="most tokens of a translation (default: 1.5 times the source + 10)")


def _add_mean(added: argparse.ArgumentParser | EvaluationFlags) -> None:
    added.add_argument(
        "--mean",
        choices=("arithmetic", "geometric"),
        default="arithmetic",
        help="several runs: mean of their probabilities (default), or of the logarithms",
    )


def _add_unknown(added: argparse.ArgumentParser | EvaluationFlags) -> None:
    added.add_argument(
        "--replace-unknown",
        metavar="FILE",
        nargs="?",
        const="",
        help="replace unknown words by the source word that they attend to most, or by what a TSV file of words and "
        "their translations has for it",
    )


def _load(arguments: argparse.Namespace, runs: "Sequence[str | None]") -> "Translator":
    """The translator of one run, or of several as an ensemble; None is the run bundled with Regard."""
    from regard.tasks.translate import ENGLISH_GERMAN, Translator

    folders = [ENGLISH_GERMAN if run is None else run for run in runs]
    options = {"which": arguments.checkpoint, "device": arguments.device, "mean": arguments.mean}
    return Translator.load_ensemble(folders, **options)


def _dictionary(path: str | None) -> dict[str, str] | None:
    """The words of --replace-unknown with their translations; None where unknown words are left as they are."""
    from regard.data.text import read_pairs

    if not path:
        return None if path is None else {}
    found = read_pairs(path)
    return dict(zip(found.source, found.target, strict=True))


def _decoding(arguments: argparse.Namespace) -> "DecodingConfig":
    from regard.decoding import DecodingConfig

    names = (
        "beam",
        "penalty",
        "coverage",
        "minimum",
        "maximum",
        "nbest",
        "sample",
        "temperature",
        "top_k",
        "top_p",
        "seed",
    )
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
    drawn = [f"--{name.replace('_', '-')}" for name in ("temperature", "top_k", "top_p") if given.get(name, 1.0) != 1.0]
    if drawn and not given.get("sample"):
        raise ValueError(f"{', '.join(drawn)} is for sampling: give --sample too")
    if not given.get("sample"):
        given["beam"] = max(given["beam"], given.get("nbest", given["beam"]))
    return DecodingConfig(**given)


def translate(arguments: argparse.Namespace) -> None:
    """regard translate"""
    runs, inputs = _inputs(arguments)
    translator = _load(arguments, runs)
    translator.dictionary = _dictionary(arguments.replace_unknown)
    decoding = _decoding(arguments)
    done = 0  # lines of the files before
    with _written_whole(arguments.out, inputs) as write, few_warnings() as warn:
        for path in inputs:
            named = partial(_say_where, warn, path) if len(inputs) > 1 else warn
            done += _translate_file(translator, decoding, path, done, arguments, write, named)


def _translate_file(
    translator: "Translator",
    decoding: "DecodingConfig",
    path: str,
    done: int,
    arguments: argparse.Namespace,
    write: Callable[[str], Any],
    warn: Callable[[str], None],
) -> int:
    """Translates the lines of a file, and returns their number."""
    from regard.data.text import opened, read_sentences, shown

    number = 0
    with opened(path) as stream:
        # a person at a terminal gets each answer immediately
        at_once = 1 if stream.isatty() else 1024
        lines = read_sentences(stream, name=shown(path))
        while some := list(islice(lines, at_once)):
            found = list(translator.translate(some, decoding, first=number + 1, warn=warn))
            pairs = [(line, best.text) for line, translations in zip(some, found, strict=True) for best in translations]
            links = iter(_links(translator, pairs) if arguments.alignments else ())
            rows = []
            for translations in found:
                number += 1
                for best in translations:
                    cells = [] if arguments.nbest is None else [str(done + number)]
                    cells += [best.text, *([f"{best.score:.4f}"] if arguments.scores else [])]
                    cells += [next(links)] if arguments.alignments else []
                    rows.append("\t".join(cells) + "\n")
            write("".join(rows))
    notice_empty(path, number)
    return number


def _say_where(warn: Callable[[str], None], path: str, message: str) -> None:
    from regard.data.text import shown

    warn(f"{shown(path)}: {message}")


def _inputs(arguments: argparse.Namespace) -> tuple[list[str | None], list[str]]:
    """The runs to translate with, and the files to translate. Folders behind the first run are runs as well. If the
    first argument is a file, it is text for the model bundled with Regard."""
    runs: list[str | None] = [arguments.run]
    files = list(arguments.files)
    if arguments.run is not None and (arguments.run == "-" or Path(arguments.run).is_file()):
        runs[0], files = None, [arguments.run, *files]
    elif arguments.run is not None:
        while files and Path(files[0]).is_dir():
            runs.append(files.pop(0))
    if arguments.input is not None and files:
        raise ValueError(f"give the text once: got --input {arguments.input} and {', '.join(files)}")
    files = [arguments.input] if arguments.input is not None else files or ["-"]
    if files.count("-") > 1:
        raise ValueError("standard input (-) can be read once only")
    return runs, files


@contextmanager
def _written_whole(out: str | None, inputs: Sequence[str]) -> Iterator[Callable[[str], Any]]:
    """A function that writes text: to standard output, or into a file, which appears only when all is written and stays
    as it was if anything fails. A name that ends in .gz or .xz is compressed."""
    if out is None or out == "-":
        yield write_out
        return
    path = Path(out).resolve()
    if path.is_dir():
        raise ValueError(f"--out {out} is a folder: give the name of a file")
    if any(name != "-" and Path(name).resolve() == path for name in inputs):
        raise ValueError(f"--out {out} is the text to translate: give another file")
    if path.exists() and not path.is_file():
        # a device or a pipe cannot be replaced
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file.write
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        file = opener(part, "wt", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {(error.strerror or str(error)).lower()}") from error
    try:
        with file:
            yield file.write
        with part.open("rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _links(translator: "Translator", pairs: list[tuple[str, str]]) -> list[str]:
    """The word alignment of each pair; empty if a side is blank or was cut."""
    from regard.tasks.translate import align

    fits = [len(translator.encode(source)) <= translator.longest for source, _ in pairs]
    real = [index for index, pair in enumerate(pairs) if fits[index] and pair[0].strip() and pair[1].strip()]
    both = translator.source, translator.target
    found = align(translator.model, *both, [pairs[index] for index in real])
    links = [""] * len(pairs)
    for index, part in zip(real, found, strict=True):
        links[index] = str(part)
    return links


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_argument(
        "--source", help="file of source sentences, or a TSV file of pairs (default: the validation pairs)"
    )
    flags.add_argument("--target", help="file of references, one per line of --source")
    flags.add_columns()
    flags.add_argument("--out", help="file to write the translations to")
    flags.add_argument(
        "--per-sentence",
        action="store_true",
        help="with --json: BLEU's counts of each sentence too (matches of 1 to 4 tokens, length, length of the "
        "reference), for a paired bootstrap",
    )
    flags.add_argument("--ensemble", nargs="+", metavar="RUN", help="further runs, averaged with RUN")
    _add_unknown(flags)
    _add_mean(flags)
    _add_decoding(flags)


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: BLEU, chrF, exact match, loss"""
    import math

    translator = _load(arguments, [arguments.run, *(arguments.ensemble or ())])
    translator.dictionary = _dictionary(arguments.replace_unknown)
    pairs = _pairs(arguments)
    if arguments.out is not None:
        check_writable(arguments.out)
    what = "validation pairs of the run" if arguments.source is None else arguments.source
    with few_warnings() as warn:
        found = translator.translate((source for source, _ in pairs), _decoding(arguments), warn=warn)
        hypotheses = [best[0].text for best in found]
    if arguments.out is not None:
        Path(arguments.out).write_text("".join(line + "\n" for line in hypotheses), encoding="utf-8")
    references = [target for _, target in pairs]
    scores = translator.scores(hypotheses, references)
    loss = translator.loss(translator.batches(pairs, 4096, warn=notice))
    if arguments.json:
        values: dict[str, dict[str, Any]] = {
            name: {"value": score.value, "signature": score.signature} for name, score in scores.items()
        }
        if arguments.per_sentence:
            values["bleu"]["sentences"] = translator.bleu_counts(hypotheses, references)
        print(json.dumps({"pairs": len(pairs), "loss": loss, "perplexity": math.exp(min(loss, 50.0)), **values}))
        return
    print(f"{counted(pairs, 'pair')}: {what}")
    for score in scores.values():
        print(score.text)
    print(f"loss = {loss:.4f} per token, perplexity = {math.exp(min(loss, 50.0)):.2f}")


def align_pairs(arguments: argparse.Namespace) -> None:
    """regard align"""
    from regard.metrics.alignment import error_rate, read_gold
    from regard.tasks.translate import Translator, alignment

    forward = Translator.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    if arguments.symmetrise is not None and arguments.reverse is None:
        raise ValueError("--symmetrise needs --reverse, a run of the opposite direction: give that too")
    pairs = _pairs(arguments)
    gold = None if arguments.gold is None else read_gold(arguments.gold)
    if gold is not None and len(gold) != len(pairs):
        raise ValueError(f"{arguments.gold} has gold alignments of {len(gold)} sentences, expected {len(pairs)}")
    sentence = 1 if arguments.sentence is None else arguments.sentence
    if arguments.picture is None and arguments.sentence is not None:
        raise ValueError("--sentence needs --picture, the file to draw it into")
    if arguments.picture is not None:
        check_picture(arguments.picture)
        if not 1 <= sentence <= len(pairs):
            raise ValueError(f"--sentence must be from 1 to {len(pairs)}, got {sentence}")
    _refuse_long(forward, pairs)
    options: dict[str, Any] = {"read": arguments.read, "head": _whole(arguments.head, "--head", "average")}
    layer: Any = _whole(arguments.layer, "--layer", "average", "aligner")
    if arguments.reverse is None:
        found = alignment.align(forward.model, forward.source, forward.target, pairs, layer=layer, **options)
    else:
        backward = Translator.load(arguments.reverse, which=arguments.checkpoint, device=arguments.device)
        flipped = [(target, source) for source, target in pairs]
        have_aligners = alignment.has_aligner(forward.model) and alignment.has_aligner(backward.model)
        options["layer"] = layer if layer is not None else ("aligner" if have_aligners else "all")
        there = alignment.read_maps(forward.model, forward.source, forward.target, pairs, **options)
        back = alignment.read_maps(backward.model, backward.source, backward.target, flipped, **options)
        agreed = alignment.choose_layers(there, back)
        if len(agreed.rates) > 1:
            notice(f"the layers that agree best: {agreed.forward} and {agreed.backward}")
        method = arguments.symmetrise or "grow-diagonal"
        found = alignment.align_both(there, back, layers=agreed[:2], method=method)
    for part in found:
        print(part)
    if arguments.picture is not None:
        from regard import draw

        chosen = found[sentence - 1]
        title, note = "Which source words each target word attends to", "Ringed: the word alignment."
        picture = draw.alignment_picture(chosen.matrix, chosen.source, chosen.target, chosen.links, title, note)
        notice(f"picture of sentence {sentence}: {draw.save(picture, arguments.picture)}")
    if gold is not None:
        print(error_rate([part.links for part in found], gold), file=sys.stderr)


def _pairs(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The pairs of --source and --target, or the validation pairs of the run."""
    from regard.data.text import read_pairs
    from regard.tasks.translate import read_valid

    if arguments.source is None:
        if arguments.target is not None:
            raise ValueError("--target needs --source, the sentences it translates: give that too")
        if arguments.columns is not None:
            raise ValueError("--columns needs --source, a TSV file of pairs: give that too")
        return read_valid(arguments.run)
    first, second = read_columns(arguments.columns or "0,1")
    if not isinstance(first, int) or not isinstance(second, int):
        raise ValueError(f"--columns must be two numbers from 0 for pairs, such as 0,1, got {arguments.columns!r}")
    found = read_pairs(arguments.source, arguments.target, columns=(first, second))
    return list(zip(found.source, found.target, strict=True))


def _refuse_long(translator: "Translator", pairs: list[tuple[str, str]]) -> None:
    """Refuses pairs whose attention would take too long."""
    for side, tokenizer in enumerate((translator.source, translator.target)):
        for number, ids in enumerate(tokenizer.encode_batch([pair[side] for pair in pairs]), 1):
            if len(ids) > 4 * translator.longest:
                raise ValueError(
                    f"pair {number} has {len(ids)} tokens, far more than the {translator.longest} that the run was "
                    "trained on: split it into sentences"
                )


def _whole(text: str | None, flag: str, *words: str) -> int | str | None:
    """A number from 0, or one of the words."""
    if text is None or text in words:
        return text
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(f"{flag} must be a number from 0 or {' or '.join(map(repr, words))}, got {text!r}")
    return int(text)
