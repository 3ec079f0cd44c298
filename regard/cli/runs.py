"""The verbs over runs of any task: train, resume, evaluate, average, swap, compact, import, export."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard import tasks
from regard.tasks.command import AddVerb, EvaluationFlags, add_checkpoint, add_model, add_run, counted, notice
from regard.training.changes import NAMES, OLD_NAMES

# what `regard swap` exchanges
SWAPPED = {
    "attention": "spec of the new attention, or a list repeated over the layers",
    "decoder_attention": "spec of the decoder's own attention, if it is to differ from --attention",
    "cross_attention": "spec of the attention from target to source",
    "position": "spec of new positions, for an attention that cannot take those of the run",
}


def add_verbs(verb: AddVerb) -> None:
    """Adds the verbs over runs, those of the tasks between the others."""
    _add_training(verb)
    for name in tasks.names():
        if (own := tasks.verbs(name)) is not None:
            with _leaving_out(name):
                own.add_verbs(verb)
    _add_evaluate(verb)
    _add_keeping(verb)
    _add_exchange(verb)


@contextmanager
def _leaving_out(name: str) -> Iterator[None]:
    """A task of another package whose verbs fail must not take ours with it."""
    try:
        yield
    except Exception as error:
        if name in tasks.TASKS:
            raise
        tasks.PLUGINS.refuse(name, error)


def _add_training(verb: AddVerb) -> None:
    verb(
        "train",
        lambda arguments: train([]),
        "train a model on your own data",
        [
            "regard train translate --data.source a.en --data.target a.de --model.attention performer",
            "regard train translate --help",
        ],
    )
    added = verb(
        "resume",
        resume,
        "continue a run exactly where it stopped, or train it further, also with some settings changed",
        [
            "regard resume runs/translate",
            "regard resume runs/translate --steps 20000",
            "regard resume runs/translate --training.minutes 60 --training.learning_rate 0.0005",
        ],
    )
    add_run(added)
    added.add_argument("--steps", type=int, help="short for --training.steps")
    about = "The run records the changes. All other settings are fixed: to change them, begin a new run."
    group = added.add_argument_group("settings that may change", about)
    for name, help in NAMES.items():
        group.add_argument(f"--{name}", dest=name, metavar="VALUE", help=help)
    for name, now in OLD_NAMES.items():
        group.add_argument(f"--{name}", dest=now, help=argparse.SUPPRESS)


def _add_keeping(verb: AddVerb) -> None:
    added = verb(
        "average",
        average,
        "average the newest checkpoints of a run into one, which other verbs then use; or the weights of several runs "
        "into a new run (a model soup)",
        [
            "regard average runs/translate --last 5",
            "regard average runs/tuned-1 runs/tuned-2 runs/tuned-3 --soup greedy --out runs/soup",
            "regard average runs/tuned-* --soup uniform --out runs/soup",
        ],
    )
    added.add_argument("runs", metavar="RUN", nargs="+", help="run folder; several for a soup")
    added.add_argument("--last", type=int, help="number of checkpoints of one run to average (default: 5)")
    about = "A soup is the mean of runs that were fine-tuned from one run, with --init."
    group = added.add_argument_group("soups", about)
    about = (
        "uniform: all runs; greedy: from the best to the worst, those with which the validation metric does not fall"
    )
    group.add_argument("--soup", choices=("uniform", "greedy"), help=about)
    group.add_argument("--out", metavar="FOLDER", help="new run folder to write")
    about = "validation metric, such as accuracy or loss (default: training.metric of the runs)"
    group.add_argument("--metric", help=about)
    about = (
        "checkpoint of each run: best, last, average or a step (default: the average if there is one, else the best)"
    )
    group.add_argument("--checkpoint", help=about)
    group.add_argument("--device", help="device: cpu, cuda ... (default: a GPU if there is one)")

    added = verb(
        "swap",
        swap,
        "write a run with the weights of another and a different attention: queries, keys, values and outputs are kept",
        [
            'regard swap runs/smollm2 --attention "local(window=256)" --out runs/window',
            'regard swap runs/smollm2 --attention "[local(window=256), softmax]" --out runs/every-second',
            "regard swap runs/smollm2 --attention linear --position none --out runs/linear",
            "regard train language --init runs/window --data.text mine/ --out runs/tuned",
        ],
    )
    add_run(added)
    added.add_argument("--out", metavar="FOLDER", required=True, help="new run folder to write")
    for name, what in SWAPPED.items():
        added.add_argument(f"--{name.replace('_', '-')}", metavar="SPEC", help=what)
    add_checkpoint(added)

    added = verb(
        "compact",
        compact,
        "write a small copy of a run to share: one checkpoint, its matrices in 8 bits",
        ["regard compact runs/translate --out english-german"],
    )
    add_run(added)
    added.add_argument("--out", metavar="FOLDER", required=True, help="new folder to write")
    add_checkpoint(added)


def _add_exchange(verb: AddVerb) -> None:
    added = verb(
        "import",
        import_model,
        "turn a published model into a run: GPT-2, BERT, RoBERTa, DistilBERT, Marian, Llama and similar, also from "
        "GGUF and llama2.c files; of images ViT, DeiT and Swin, also those of timm",
        [
            "regard import models/gpt2 --out runs/gpt2",
            "regard import models/opus-mt-en-de",
            "regard import SmolLM2-135M-Instruct.Q4_1.gguf --out runs/smollm2",
            "regard import stories260K.bin --tokenizer tok512.bin --out runs/stories",
            "regard import models/vit-base-patch16-224 --out runs/vit",
            "regard import vit_tiny_patch16_224.safetensors --heads 3",
        ],
    )
    about = "Hugging Face or timm folder (config.json, safetensors), safetensors file of timm, GGUF or llama2.c file"
    added.add_argument("source", metavar="FOLDER", help=about)
    added.add_argument("--out", metavar="RUN", help="run folder to write (default: runs/ and the name of the source)")
    added.add_argument(
        "--tokenizer", metavar="FOLDER", help="folder of the tokenizer (default: FOLDER); llama2.c: the tok*.bin file"
    )
    about = "safetensors file of a ViT of timm: number of heads (default: that of timm's models of its width)"
    added.add_argument("--heads", type=int, help=about)

    added = verb(
        "export",
        export_run,
        "write a run as a Hugging Face folder or as ONNX files, a translator also for CTranslate2, a model of images "
        "also for timm",
        [
            "regard export runs/gpt2 --format huggingface --out models/mine",
            "regard export runs/gpt2 --format onnx --length 1024 --out models/anywhere",
            "regard export runs/translate --format ctranslate2 --out models/fast",
            "regard export runs/images --format timm --out models/vit",
        ],
    )
    add_run(added)
    added.add_argument(
        "--format", choices=("huggingface", "ctranslate2", "timm", "onnx"), required=True, help="format to write"
    )
    added.add_argument("--out", metavar="FOLDER", required=True, help="new folder to write")
    added.add_argument("--family", help="huggingface: gpt2, bert, marian, llama, vit ... (default: the one that fits)")
    about = "onnx: tokens of the longest text, for which a decoder keeps room (default: those of the training)"
    added.add_argument("--length", type=int, help=about)
    add_checkpoint(added)


def _add_evaluate(verb: AddVerb) -> None:
    added = verb(
        "evaluate",
        evaluate,
        "measure how good a model is, by the metrics of its task",
        [
            "regard evaluate runs/translate",
            "regard evaluate runs/translate --source test.en --target test.de --beam 5 --out test.out",
            "regard evaluate runs/classify --data test.csv --recall 0.95 --plot report.png",
            "regard evaluate runs/language --text test.txt.xz --stride 64",
        ],
    )
    add_run(added)
    added.add_argument("--json", action="store_true", help="print one JSON object")
    add_model(added)
    known: dict[str, argparse.Action] = {}
    flags = {}
    for name in tasks.names():
        if (own := tasks.verbs(name)) is not None:
            with _leaving_out(name):
                group = EvaluationFlags(added, name, own.EVALUATION, known)
                own.add_evaluation(group)
                flags[name] = group.actions
    added.set_defaults(flags=flags)


def train(argv: list[str]) -> int:
    """regard train TASK --config FILE --section.key value ..."""
    if not argv or argv[0] in ("-h", "--help"):
        known = {name: tasks.describe(name) for name in tasks.names()}
        print("usage: regard train TASK [--config FILE] [--section.key VALUE ...]\n\ntasks:")
        for name, (about, _) in known.items():
            print(f"  {name:<12} {about}")
        print("\nexamples:\n  " + "\n  ".join(examples[0] for _, examples in known.values()))
        print("\nRecipes, settings bundled with Regard: --config NAME, see 'regard list --recipes'")
        print("\nAll settings of a task: " + ", ".join(f"regard train {name} --help" for name in tasks.names()))
        return 0
    from regard import recipes
    from regard.config import parse
    from regard.tasks.train import train
    from regard.training.display import Display

    task = tasks.find(argv[0])
    description = f"{task.about}\n\nexamples:\n  " + "\n  ".join(task.examples)
    known = [f"{recipe.name}: {recipe.about}" for recipe in recipes.recipes(task.name)]
    description += "\n\nrecipes, for --config:\n  " + "\n  ".join(known)
    config = parse(task.config, recipes.with_paths(argv[1:], task.name), f"regard train {task.name}", description)
    if (status := _launch(config.training, ["train", *argv])) is not None:
        return status
    events = Path(config.out) / "tensorboard" if config.training.tensorboard else None
    return _finish(lambda: train(task, config, Display(tensorboard=events)), config.out)


def _launch(training: Any, argv: list[str]) -> int | None:
    """Starts the processes that the settings ask for, and returns their exit status; None: this is the one, or one of
    them."""
    from regard.training.distributed.world import is_launched

    if training.processes == 1 or is_launched():
        return None
    from regard.training.distributed.launch import launch

    return launch(training.processes, argv, restarts=training.restarts)


def resume(arguments: argparse.Namespace) -> int:
    """regard resume"""
    from regard.tasks.train import read_training, resume
    from regard.training.display import Display
    from regard.training.run import Run

    run = Run.open(arguments.run)
    requests = {name: _value(text) for name in NAMES if (text := getattr(arguments, name)) is not None}
    if arguments.steps is not None:
        requests["training.steps"] = arguments.steps
    training = read_training(run, requests)
    if (status := _launch(training, arguments.argv)) is not None:
        return status
    display = Display(tensorboard=run.folder / "tensorboard" if training.tensorboard else None)
    return _finish(lambda: resume(arguments.run, display, changes=requests), arguments.run)


def _value(text: str) -> Any:
    """The value of a flag: a number, true, false, null, or text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _finish(work: Callable[[], Any], run: str) -> int:
    """Trains, and returns the exit status: 0 done, 128 + signal if stopped, 1 if training itself failed, 75 if another
    process was lost."""
    from regard.training.distributed.status import LOST
    from regard.training.distributed.world import EndedElsewhere, LostProcess, is_main_process
    from regard.training.loop import Stopped, TrainingError

    says = is_main_process()
    try:
        state = work()
    except Stopped as stopped:
        if says:
            print(f"regard: {stopped}; continue with: regard resume {run}", file=sys.stderr)
        return stopped.code
    except TrainingError as error:
        print(f"regard: {error}", file=sys.stderr)
        return 1
    except LostProcess as error:
        print(f"regard: {error}", file=sys.stderr)
        return LOST
    except EndedElsewhere:
        return 0  # the status of the run is that of the process which reports the error
    if not says:
        return 0
    best = f"; best at step {state.best_step}: {state.best:.4g}" if state.best is not None else ""
    steps = "1 step" if state.step == 1 else f"{state.step} steps"
    print(f"done after {steps}{best}; {_describe_use(run)}", file=sys.stderr)
    return 0


def _describe_use(run: str) -> str:
    """What to do with a finished run."""
    from regard.training.run import Run

    return tasks.of(Run.open(run)).use.format(run=run)


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: calls that of the run's task; refuses flags of other tasks"""
    from regard.training.run import Run

    name = tasks.of(Run.open(arguments.run)).name
    own = arguments.flags.get(name, [])
    for other, flags in arguments.flags.items():
        for flag in flags:
            if flag not in own and getattr(arguments, flag.dest) != flag.default:
                raise ValueError(
                    f"{flag.option_strings[0]} is for runs of {other!r}, and {arguments.run} is of {name!r}"
                )
    own_verbs = tasks.verbs(name)
    if own_verbs is None:
        raise ValueError(f"the task {name!r} of {arguments.run} has no verbs.py, so its runs cannot be evaluated")
    own_verbs.evaluate(arguments)


def average(arguments: argparse.Namespace) -> None:
    """regard average"""
    if arguments.soup is not None:
        return _average_runs(arguments)
    if len(arguments.runs) > 1:
        raise ValueError(f"{len(arguments.runs)} runs: give --soup uniform or --soup greedy to average several runs")
    for flag in ("out", "metric", "checkpoint", "device"):
        if getattr(arguments, flag) is not None:
            raise ValueError(f"--{flag} is for soups: give --soup uniform or --soup greedy with it")
    from regard.training.averaging import average_run
    from regard.training.run import Run

    run = Run.open(arguments.runs[0])
    asked = 5 if arguments.last is None else arguments.last
    with run.writing("regard average"):
        names = average_run(run, asked)
    if len(names) < asked:
        notice(
            f"{run.folder} has only {counted(names, 'checkpoint')} instead of {asked}: --training.save_every and "
            "--training.keep say how many a training leaves"
        )
    print(f"averaged {counted(names, 'checkpoint')} ({names[0]} to {names[-1]}) into {run.folder}/checkpoints/average")


def _average_runs(arguments: argparse.Namespace) -> None:
    """regard average --soup"""
    if arguments.last is not None:
        raise ValueError("--last is for the checkpoints of one run: leave it out with --soup")
    if arguments.out is None:
        raise ValueError("--soup writes a new run: give --out, a folder for it")
    from regard.tasks.soup import make_soup

    options = {"metric": arguments.metric, "which": arguments.checkpoint, "device": arguments.device or "auto"}
    soup = make_soup(arguments.runs, arguments.out, arguments.soup, **options, warn=notice)
    for part in soup.measured:
        used = "" if part.used else ", not used"
        print(f"{part.ingredient.run.folder}: {soup.metric} {part.value:.4g}{used}")
    made = f"{arguments.soup} soup of {len(soup.used)} of {counted(soup.measured, 'run')}"
    best = f"{soup.metric} {soup.value:.4g}, best run {soup.measured[0].value:.4g}"
    print(f"{arguments.out}: {made}; {best}; {_describe_use(arguments.out)}")


def swap(arguments: argparse.Namespace) -> None:
    """regard swap"""
    changes = {name: spec for name in SWAPPED if (spec := getattr(arguments, name)) is not None}
    if not changes:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in SWAPPED)
        raise ValueError(f"nothing is exchanged: give at least one of {flags}")
    from regard.tasks.swap import swap_attention

    found = swap_attention(arguments.run, arguments.out, changes, which=arguments.checkpoint)
    for note in found.notes:
        notice(note)
    task = tasks.of(found.run)
    words = ", ".join(f"{name.replace('_', ' ')} {spec}" for name, spec in changes.items())
    # others begin with runs of another task, or with none
    tunes = task.name in ("language", "masked", "images")
    use = f"tune it: regard train {task.name} --init {arguments.out}" if tunes else _describe_use(arguments.out)
    print(f"{arguments.out}: {words}; {use}")


def compact(arguments: argparse.Namespace) -> None:
    """regard compact"""
    from regard.tasks.load import compact_run

    path = compact_run(arguments.run, arguments.out, arguments.checkpoint)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB of weights; {_describe_use(arguments.out)}")


def import_model(arguments: argparse.Namespace) -> None:
    """regard import"""
    from regard.interop.runs import import_model

    out = arguments.out or f"runs/{Path(arguments.source).resolve().stem}"
    found = import_model(arguments.source, out, arguments.tokenizer, arguments.heads)
    for note in found.notes:
        notice(note)
    use = tasks.find(found.task).use
    if found.config.kind == "encoder" and found.config.head == "none":
        use = "turn lines into vectors: regard embed {run}"
    elif found.task == "images" and found.config.classes is None:
        use = "it has no classes, begin with it: regard train images --init {run}"
    use = use.format(run=out)
    print(f"{out}: a run of {found.task!r}, {found.parameters:,} parameters; {use}")


def export_run(arguments: argparse.Namespace) -> None:
    """regard export"""
    from regard.interop.runs import export_run

    options = {"which": arguments.checkpoint, "family": arguments.family, "length": arguments.length}
    found = export_run(arguments.run, arguments.out, arguments.format, **options)
    for note in found.notes:
        notice(note)
    print(f"{found.folder}: {found.family}, {sum(f.stat().st_size for f in found.folder.rglob('*')) / 1e6:.1f} MB")
