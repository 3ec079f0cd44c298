"""The verb of classifiers, classify, and their part of evaluate."""

import argparse
import json
import sys
from itertools import islice
from typing import Any

from regard.tasks.command import AddVerb, EvaluationFlags, add_model, counted, few_warnings, notice, read_columns

# for `regard train --help`, which imports no PyTorch
ABOUT = "A classifier from texts and labels, from scratch or over a trained run of masked or language."
EXAMPLES = (
    "regard train classify --data.text reviews.csv --out runs/reviews",
    "regard train classify --data.text train.tsv --data.columns '[sentence, label]' --data.valid_text dev.tsv",
    "regard train classify --data.text texts.txt --data.labels labels.txt --model.attention performer",
    "regard train classify --data.text reviews.jsonl.xz --init runs/masked --out runs/tuned",
    "regard train classify --data.text reviews.csv --data.tokenizer bytes --model.preset perceiver",
)
EVALUATION = "accuracy, confusion, precision, recall and F1 of each class, macro and micro, average precision"


def add_verbs(verb: AddVerb) -> None:
    added = verb(
        "classify",
        classify,
        "the label of each line of standard input and its probability; as many lines out as in",
        [
            'echo "A fine film." | regard classify runs/classify',
            "regard classify runs/classify --recall 0.95 --positive spam < texts.txt > labels.tsv",
            "regard classify runs/classify --input texts.txt.xz --json",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--input", default="-", help="a file instead of standard input; .gz and .xz too")
    added.add_argument("--json", action="store_true", help="a JSON object a line, with the probability of each label")
    add_model(added)
    _add_threshold(added)


def _add_threshold(added: argparse.ArgumentParser | EvaluationFlags) -> None:
    told = "the threshold on the validation texts with the best {} that has at least this {}, such as {}"
    added.add_argument("--recall", type=float, help=told.format("precision", "recall", "0.95"))
    added.add_argument("--precision", type=float, help=told.format("recall", "precision", "0.9"))
    added.add_argument("--threshold", type=float, help="from this probability on the answer is --positive")
    added.add_argument("--positive", metavar="LABEL", help="of which label (default: of two labels, the second)")


def classify(arguments: argparse.Namespace) -> None:
    """regard classify"""
    from regard.data.text import opened, read_sentences, shown
    from regard.tasks.classify import Classifier

    classifier = Classifier.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    threshold, chosen = _threshold(classifier, arguments)
    if chosen is not None:
        notice(
            f"{threshold.label!r} from probability {threshold.value:.6g} on: recall {chosen.recall:.4f} and precision "
            f"{chosen.precision:.4f} on the validation texts of the run"
        )
    with opened(arguments.input) as stream, few_warnings() as warn:
        # a person at a terminal gets each answer at once
        at_once = 1 if stream.isatty() else 1024
        lines = read_sentences(stream, name=shown(arguments.input))
        number = 0
        while some := list(islice(lines, at_once)):
            for answer in classifier.classify(some, threshold=threshold, first=number + 1, warn=warn):
                if arguments.json:
                    print(json.dumps(None if answer is None else answer._asdict(), ensure_ascii=False))
                else:
                    print("" if answer is None else f"{answer.label}\t{answer.probability:.4f}")
            number += len(some)
            sys.stdout.flush()


def _threshold(classifier: Any, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The threshold that --threshold gives, or that --recall or --precision asks for; and what the latter does to the
    validation texts of the run, where it is chosen. None without any of the three."""
    from regard.tasks.classify import Threshold, read_valid

    wishes = {name: getattr(arguments, name) for name in ("threshold", "recall", "precision")}
    given = {name: wish for name, wish in wishes.items() if wish is not None}
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(f'--{name}' for name in given)}")
    if not given:
        if arguments.positive is not None:
            raise ValueError("--positive is the label of a threshold: give --recall, --precision or --threshold too")
        return None, None
    if "threshold" in given:
        if not 0 <= given["threshold"] <= 1:
            raise ValueError(f"--threshold is a probability, from 0 to 1, got {given['threshold']:g}")
        return Threshold(classifier.positive(arguments.positive), given["threshold"]), None
    return classifier.choose(read_valid(arguments.run), label=arguments.positive, **given)


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_argument("--data", help="texts and labels: .csv, .tsv, .jsonl (default: the run's validation texts)")
    flags.add_argument("--labels", help="file of the labels, line by line; --data is then texts, one per line")
    flags.add_columns()
    _add_threshold(flags)
    flags.add_argument("--plot", help="draw confusion matrix and precision-recall curve: .png, .svg or .pdf")
    flags.add_argument(
        "--baseline",
        action="store_true",
        help="train TF-IDF (1-2-grams) with logistic regression on the same texts, and print it beside the run",
    )


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: accuracy, confusion, precision, recall and F1, average precision, a threshold"""
    from regard.tasks.classify import Classifier, evaluation, read_valid

    if arguments.plot is not None:
        from regard import draw as pictures

        pictures.check(arguments.plot)
    classifier = Classifier.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    threshold, chosen = _threshold(classifier, arguments)
    if arguments.data is None:
        if arguments.labels is not None:
            raise ValueError("--labels needs --data, the texts they are of")
        if arguments.columns is not None:
            raise ValueError("--columns are those of --data: give that too")
        examples, name = read_valid(arguments.run), f"the validation texts of {arguments.run}"
        chosen = None  # on the very same texts
    else:
        from regard.data.labelled import read_labelled

        found = read_labelled(arguments.data, arguments.labels, columns=read_columns(arguments.columns or "text,label"))
        examples, name = list(zip(found.texts, found.labels, strict=True)), arguments.data
    with few_warnings() as warn:
        found = evaluation.evaluate(classifier, examples, name=name, threshold=threshold, chosen=chosen, warn=warn)
    if arguments.baseline:
        notice("training the baseline on the texts of the run ...")
        found = found._replace(baseline=evaluation.measure_baseline(arguments.run, examples, name))
    if arguments.plot is not None:
        note = f"{counted(examples, 'text')}: {name}"
        only = classifier.labels.index(threshold.label) if threshold else 1 if len(classifier.labels) == 2 else None
        title = f"{arguments.run}: what it answers, and what a threshold would do"
        picture = pictures.report_picture(found.report, title, note, only=only, chosen=found.reached)
        notice(f"picture: {pictures.save(picture, arguments.plot)}")
    if arguments.json:
        print(json.dumps({"run": arguments.run, "data": name} | found.to_json(), ensure_ascii=False))
        return
    print(f"{counted(examples, 'text')}: {name}")
    print("\n".join(found.lines()))
