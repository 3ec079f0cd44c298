"""The flags of evaluate for classifiers of images, and how `regard classify` answers for image files."""

import argparse
import json
import sys
from pathlib import Path

from regard.tasks.command import AddVerb, EvaluationFlags, check_picture, counted, notice, read_columns

# here, so that `regard train --help` does not import PyTorch
ABOUT = "A classifier of images, such as a Vision Transformer with any attention, from scratch or from another run."
EXAMPLES = (
    "regard train images --data.images photos --out runs/photos",
    "regard train images --data.images cifar-10-batches-bin --config cifar10-cct --out runs/cifar10",
    "regard train images --data.images train-images-idx3-ubyte.gz --model.attention performer",
    "regard train images --data.images photos/train --data.valid_images photos/val --data.size 64",
    "regard train images --data.images flowers.csv --init runs/photos --out runs/flowers",
    "regard train images --data.images pets --init cifar10 --out runs/pets",
)
EVALUATION = "accuracy, top-5 accuracy, confusion matrix, precision, recall and F1 (per class, macro, micro)"
BUNDLED = "cifar10"  # the bundled run: it answers where none is named, and --init names it


def add_verbs(verb: AddVerb) -> None:
    """None of its own: `regard classify` takes images too."""


def is_for_images(run: str) -> bool:
    """Whether the first argument of `regard classify` is a run of images, or an image itself."""
    from regard import tasks
    from regard.data.images.decode import SUFFIXES
    from regard.training.run import Run

    def is_image(file: Path) -> bool:
        return file.suffix.lower() in SUFFIXES

    if Path(run).is_dir():
        file = None if Run(run).exists() else next((one for one in Path(run).rglob("*") if is_image(one)), None)
        if file is not None:
            raise ValueError(
                f"{run} is a folder of images and no run: name the files, such as regard classify {file}; how a run "
                f"labels a folder of classes: regard evaluate RUN --data {run}"
            )
        return tasks.of(Run.open(run)).name == "images"
    if Path(run).is_file() and not is_image(Path(run)):
        raise ValueError(
            f"{run} is a file and no run folder: a picture for the bundled classifier ends in {', '.join(SUFFIXES)}"
        )
    return is_image(Path(run))


def classify(arguments: argparse.Namespace) -> int:
    """regard classify, for image files: one line for each, status 1 if some cannot be read"""
    from regard.data.images.decode import BadImage
    from regard.tasks.images.classifier import ImageClassifier, describe, is_unsure
    from regard.tasks.load import BUNDLED as FOLDER

    run, files = arguments.run, list(arguments.images)
    if not Path(run).is_dir():
        run, files = str(FOLDER / BUNDLED), [run, *files]
        if not Path(run).is_dir():
            raise ValueError(
                f"no classifier of images is bundled with this version of Regard: give a run folder before the images, "
                f"regard classify RUN {files[0]}; train one with regard train images"
            )
    for flag in ("recall", "precision", "threshold", "positive"):
        if getattr(arguments, flag) is not None:
            raise ValueError(f"--{flag} is for classifiers of texts, and {run} is one of images")
    if not files:
        raise ValueError(f"{run} classifies images: name some, regard classify {run} picture.jpg")
    classifier = ImageClassifier.load(run, which=arguments.checkpoint, device=arguments.device)
    if run != arguments.run and not arguments.json:  # JSON has every label
        known = classifier.labels
        notice(f"the bundled classifier knows {len(known)} classes and answers with one of them: {', '.join(known)}")
    broken = 0
    for file, answer in zip(files, classifier.classify(files), strict=True):
        if isinstance(answer, BadImage):
            broken += 1
            notice(str(answer))
        elif arguments.json:
            row = {"file": file} | answer._asdict() | {"unsure": is_unsure(answer)}
            print(json.dumps(row, ensure_ascii=False))
        elif is_unsure(answer):
            print(f"{file}\tunsure: {describe(answer)}")
        else:
            print(f"{file}\t{answer.label}\t{answer.probability:.4f}")
        sys.stdout.flush()
    return 1 if broken else 0


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_argument(
        "--data", help="labelled images in any form that training takes (default: the validation images)"
    )
    flags.add_columns()
    flags.add_argument("--plot", help="draw confusion matrix and precision-recall curve into a .png, .svg or .pdf file")


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: accuracy, top-5 accuracy, confusion, precision, recall and F1"""
    from regard.metrics.classification import report, top_accuracy
    from regard.tasks.classify.classifier import mean_loss
    from regard.tasks.classify.evaluation import Evaluation
    from regard.tasks.images.classifier import ImageClassifier
    from regard.tasks.images.corpus import labelled, read_valid

    if arguments.plot is not None:
        check_picture(arguments.plot)
    classifier = ImageClassifier.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    if arguments.data is None:
        if arguments.columns is not None:
            raise ValueError("--columns needs --data, the file with these columns")
        images, name = read_valid(arguments.run), f"the validation images of {arguments.run}"
    else:
        from regard.data.images.read import read_images

        columns = read_columns(arguments.columns or "path,label")
        form = {"size": classifier.size, "channels": classifier.channels}
        found = read_images(arguments.data, columns=columns, **form, part="test")
        images, name = labelled(found, classifier.labels, arguments.data), arguments.data
    truth, probabilities = images.labels.numpy(), classifier.probabilities(images.pixels)
    measured = report(truth.tolist(), probabilities, classifier.labels)
    top5 = top_accuracy(truth, probabilities, 5) if len(classifier.labels) > 5 else None
    found = Evaluation(mean_loss(truth, probabilities), measured, None, None, None, top5=top5)
    if arguments.plot is not None:
        from regard import draw

        title = f"{arguments.run}: its answers, and what a threshold would do"
        only = 1 if len(classifier.labels) == 2 else None
        picture = draw.report_picture(measured, title, f"{counted(images.names, 'image')}: {name}", only=only)
        notice(f"picture: {draw.save(picture, arguments.plot)}")
    if arguments.json:
        print(json.dumps({"run": arguments.run, "data": name} | found.to_json(), ensure_ascii=False))
        return
    print(f"{counted(images.names, 'image')}: {name}")
    print("\n".join(found.lines()))
