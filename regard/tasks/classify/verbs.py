"""The verb of classifiers, classify, and their flags of evaluate."""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from regard.tasks.command import (
    AddVerb,
    EvaluationFlags,
    add_model,
    check_picture,
    counted,
    few_warnings,
    notice,
    notice_empty,
    read_columns,
)

if TYPE_CHECKING:
    from regard.metrics.classification import Choice
    from regard.tasks.classify import Classifier, Threshold

# here, so that `regard train --help` does not import PyTorch
ABOUT = "A classifier of texts, trained from scratch or from a run of masked or language."
EXAMPLES = (
    "regard train classify --data.text reviews.csv --out runs/reviews",
    "regard train classify --data.text train.tsv --data.columns '[sentence, label]' --data.valid_text dev.tsv",
    "regard train classify --data.text texts.txt --data.labels labels.txt --model.attention performer",
    "regard train classify --data.text reviews.jsonl.xz --init runs/masked --out runs/tuned",
    "regard train classify --data.text reviews.csv --data.tokenizer bytes --model.preset perceiver",
)
EVALUATION = "accuracy, confusion matrix, precision, recall and F1 (per class, macro, micro), average precision"


def add_verbs(verb: AddVerb) -> None:
    added = verb(
        "classify",
        classify,
        "label each line of standard input, or image files, with the probability; one line out for each",
        [
            'echo "A fine film." | regard classify runs/classify',
            "regard classify runs/classify --recall 0.95 --positive spam < texts.txt > labels.tsv",
            "regard classify runs/classify --input texts.txt.xz --json",
            "regard classify runs/images cat.jpg dog.png",
            'regard classify runs/captions --labels "a dog,a cat" picture.jpg',
            "regard classify picture.jpg",
        ],
    )
    about = "run folder; without one, the first image: the classifier bundled with Regard labels it"
    added.add_argument("run", metavar="RUN", help=about)
    added.add_argument("images", metavar="IMAGE", nargs="*", help="image files, for a run of images or captions")
    added.add_argument("--labels", metavar="A,B", help="run of captions: texts to choose from, with commas between")
    added.add_argument("--input", default="-", metavar="FILE", help="file to read, plain, .gz or .xz (default: stdin)")
    added.add_argument(
        "--json", action="store_true", help="print a JSON object per line, with the probability of each label"
    )
    add_model(added)
    _add_threshold(added)


def _add_threshold(added: argparse.ArgumentParser | EvaluationFlags) -> None:
    about = "choose the threshold that has at least this {} and the best {} on the validation texts, such as {}"
    added.add_argument("--recall", type=float, help=about.format("recall", "precision", "0.95"))
    added.add_argument("--precision", type=float, help=about.format("precision", "recall", "0.9"))
    added.add_argument("--threshold", type=float, help="least probability at which the answer is --positive")
    added.add_argument("--positive", metavar="LABEL", help="label of the threshold (default: the second of two labels)")


def classify(arguments: argparse.Namespace) -> int | None:
    """regard classify"""
    from regard.data.text import opened, read_sentences, shown
    from regard.tasks.captions import verbs as captions
    from regard.tasks.classify import Classifier
    from regard.tasks.classify.evaluation import few_positives
    from regard.tasks.images import verbs as images
    from regard.training.run import Run

    is_for_images = images.is_for_images(arguments.run)
    if (arguments.labels is not None or arguments.images) and not is_for_images:
        # lest a missing folder be taken for a run of texts
        Run.open(arguments.run)
    if captions.is_for_captions(arguments.run):
        return captions.classify(arguments)
    if arguments.labels is not None:
        classifier = arguments.run if Path(arguments.run).is_dir() else "the bundled classifier"
        raise ValueError(f"--labels is for runs of captions: {classifier} has labels of its own")
    if is_for_images:
        return images.classify(arguments)
    if arguments.images:
        raise ValueError(f"{arguments.run} is no run of images: it labels lines of standard input, or of --input FILE")
    classifier = Classifier.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    threshold, chosen = _threshold(classifier, arguments)
    if threshold is not None and chosen is not None:
        notice(
            f"{threshold.label!r} at a probability of at least {threshold.value:.6g}: recall {chosen.recall:.4f} and "
            f"precision {chosen.precision:.4f} on the validation texts of the run"
        )
        for remark in few_positives(chosen, threshold.label):
            notice(remark)
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
        notice_empty(arguments.input, number)


def _threshold(classifier: "Classifier", arguments: argparse.Namespace) -> "tuple[Threshold | None, Choice | None]":
    """The threshold of --threshold, or the one that --recall or --precision asks for with what it achieves on the
    validation texts of the run. None without any of the three flags."""
    from regard.tasks.classify import Threshold, read_valid

    values = {name: getattr(arguments, name) for name in ("threshold", "recall", "precision")}
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"give only one of {', '.join(f'--{name}' for name in given)}")
    if not given:
        if arguments.positive is not None:
            raise ValueError("--positive needs a threshold: give --recall, --precision or --threshold too")
        return None, None
    if "threshold" in given:
        if not 0 <= given["threshold"] <= 1:
            raise ValueError(f"--threshold must be a probability, from 0 to 1, got {given['threshold']:g}")
        return Threshold(classifier.positive(arguments.positive), given["threshold"]), None
    return classifier.choose(read_valid(arguments.run), label=arguments.positive, **given)


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_argument(
        "--data",
        help="file of texts and labels: .csv, .tsv, .jsonl; of images and captions, what training takes (default: what "
        "the run validates on)",
    )
    flags.add_argument("--labels", help="file of labels, one per line of --data, which has texts alone")
    flags.add_columns()
    _add_threshold(flags)
    flags.add_argument("--plot", help="draw confusion matrix and precision-recall curve into a .png, .svg or .pdf file")
    flags.add_argument(
        "--baseline",
        action="store_true",
        help="also train TF-IDF (1- and 2-grams) with logistic regression on the training texts, and compare",
    )


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: accuracy, confusion, precision, recall and F1, average precision, a threshold"""
    from regard.tasks.classify import Classifier, evaluation, read_valid

    if arguments.plot is not None:
        check_picture(arguments.plot)
    classifier = Classifier.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    threshold, chosen = _threshold(classifier, arguments)
    if arguments.data is None:
        if arguments.labels is not None:
            raise ValueError("--labels needs --data, the texts of these labels")
        if arguments.columns is not None:
            raise ValueError("--columns needs --data, the file with these columns")
        examples, name = read_valid(arguments.run), f"the validation texts of {arguments.run}"
        chosen = None  # it was chosen on these texts
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
        from regard import draw

        note = f"{counted(examples, 'text')}: {name}"
        only = classifier.labels.index(threshold.label) if threshold else 1 if len(classifier.labels) == 2 else None
        title = f"{arguments.run}: its answers, and what a threshold would do"
        picture = draw.report_picture(found.report, title, note, only=only, chosen=found.reached)
        notice(f"picture: {draw.save(picture, arguments.plot)}")
    if arguments.json:
        print(json.dumps({"run": arguments.run, "data": name} | found.to_json(), ensure_ascii=False))
        return
    print(f"{counted(examples, 'text')}: {name}")
    print("\n".join(found.lines()))
