"""The verbs over runs, from train to export. cli.py calls them; nothing else does."""

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
from typing import Any

from regard.training.changes import NAMES

Verb = Callable[[str, Any, str, list[str]], argparse.ArgumentParser]


def train(argv: list[str]) -> int:
    """regard train TASK --config FILE --section.key value ..."""
    from regard import recipes
    from regard import task as tasks
    from regard.config import parse
    from regard.training.display import Display

    if not argv or argv[0] in ("-h", "--help"):
        print("usage: regard train TASK [--config FILE] [--section.key VALUE ...]\n\ntasks:")
        for task in map(tasks.find, tasks.TASKS):
            print(f"  {task.name:<12} {task.about}")
        print("\nexamples:\n  " + "\n  ".join(tasks.find(name).examples[0] for name in tasks.TASKS))
        print("\nSettings that come with Regard: --config NAME, for the names of 'regard list --recipes'")
        print("\nAll keys of a task: " + ", ".join(f"regard train {name} --help" for name in tasks.TASKS))
        return 0
    task = tasks.find(argv[0])
    description = f"{task.about}\n\nexamples:\n  " + "\n  ".join(task.examples)
    known = [f"{recipe.name}: {recipe.about}" for recipe in recipes.recipes(task.name)]
    description += "\n\nrecipes, for --config:\n  " + "\n  ".join(known)
    config = parse(task.config, recipes.with_paths(argv[1:], task.name), f"regard train {task.name}", description)
    events = Path(config.out) / "tensorboard" if config.training.tensorboard else None
    return _finish(lambda: tasks.train(task, config, Display(tensorboard=events)), config.out)


def resume(arguments: argparse.Namespace) -> int:
    """regard resume"""
    from regard import task as tasks
    from regard.training.display import Display
    from regard.training.run import Run

    run = Run.open(arguments.run)
    events = run.folder / "tensorboard" if tasks.read_config(run).training.tensorboard else None
    display = Display(tensorboard=events)
    wishes = {name: _value(text) for name in NAMES if (text := getattr(arguments, name)) is not None}
    return _finish(lambda: tasks.resume(arguments.run, display, arguments.steps, wishes), arguments.run)


def _value(text: str) -> Any:
    """What a flag says: a number, true, false, null, or text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _finish(work: Callable[[], Any], run: str) -> int:
    """Trains, and says how it ended: 0 done, 128 + signal when stopped, 1 when training itself failed."""
    from regard.training.loop import Stopped, TrainingError

    try:
        state = work()
    except Stopped as stopped:
        print(f"regard: {stopped}; go on with: regard resume {run}", file=sys.stderr)
        return stopped.code
    except TrainingError as error:
        print(f"regard: {error}", file=sys.stderr)
        return 1
    best = f"; best at step {state.best_step}: {state.best:.4g}" if state.best is not None else ""
    steps = "1 step" if state.step == 1 else f"{state.step} steps"
    print(f"done after {steps}{best}; {_use(run)}", file=sys.stderr)
    return 0


def _use(run: str) -> str:
    """What to do with a run."""
    from regard import task as tasks
    from regard.training.run import Run

    return tasks.of(Run.open(run)).use.format(run=run)


def translate(arguments: argparse.Namespace) -> None:
    """regard translate"""
    from regard.translation import Translator

    inputs = _inputs(arguments)
    translator = Translator.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    decoding = _decoding(arguments)
    done = 0  # lines of the files before
    with _written_whole(arguments.out, inputs) as write, _few_warnings() as warn:
        for path in inputs:
            named = partial(_say_where, warn, path) if len(inputs) > 1 else warn
            done += _translate_file(translator, decoding, path, done, arguments, write, named)


def _translate_file(
    translator: Any,
    decoding: Any,
    path: str,
    done: int,
    arguments: argparse.Namespace,
    write: Callable[[str], Any],
    warn: Callable[[str], None],
) -> int:
    """Translates the lines of a file, and gives their number."""
    from regard.data.text import opened, read_sentences, shown

    number = 0
    with opened(path) as stream:
        # a person at a terminal gets each answer at once
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
    return number


def _say_where(warn: Callable[[str], None], path: str, message: str) -> None:
    from regard.data.text import shown

    warn(f"{shown(path)}: {message}")


def _inputs(arguments: argparse.Namespace) -> list[str]:
    """The files to translate. A first argument that is a file is text for the model bundled with Regard."""
    run, files = arguments.run, list(arguments.files)
    if run is not None and (run == "-" or Path(run).is_file()):
        arguments.run, files = None, [run, *files]
    if arguments.input is not None and files:
        raise ValueError(f"give the text once: got --input {arguments.input} and {', '.join(files)}")
    files = [arguments.input] if arguments.input is not None else files or ["-"]
    if files.count("-") > 1:
        raise ValueError("standard input (-) can be read once only")
    return files


@contextmanager
def _written_whole(out: str | None, inputs: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """What writes a text: to standard output, or into a file that is there as a whole when all went well, and otherwise
    stays as it was. Packed where its name ends in .gz or .xz."""
    if out is None or out == "-":
        yield _write
        return
    path = Path(out).resolve()
    if path.is_dir():
        raise ValueError(f"--out {out} is a folder: give the name of a file")
    if any(name != "-" and Path(name).resolve() == path for name in inputs):
        raise ValueError(f"--out {out} is the text to translate: give another file, so that it is kept")
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


def _links(translator: Any, pairs: list[tuple[str, str]]) -> list[str]:
    """Word links of each pair; none where a side is empty or was cut."""
    from regard.alignment import align

    fits = [len(translator.encode(source)) <= translator.longest for source, _ in pairs]
    real = [index for index, pair in enumerate(pairs) if fits[index] and pair[0].strip() and pair[1].strip()]
    both = translator.source, translator.target
    found = align(translator.model, *both, [pairs[index] for index in real])
    links = [""] * len(pairs)
    for index, part in zip(real, found, strict=True):
        links[index] = str(part)
    return links


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: the function of the run's task, after the flags of other tasks are refused"""
    from regard import task as tasks
    from regard.training.run import Run

    name = tasks.of(Run.open(arguments.run)).name
    own = arguments.flags[name]
    for other, flags in arguments.flags.items():
        for flag in flags:
            if flag not in own and getattr(arguments, flag.dest) != flag.default:
                raise ValueError(f"{flag.option_strings[0]} is for runs of {other!r}; {arguments.run} is of {name!r}")
    EVALUATIONS[name](arguments)


def evaluate_translator(arguments: argparse.Namespace) -> None:
    """BLEU, chrF, exact match, loss"""
    import math

    from regard.translation import Translator

    translator = Translator.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    pairs = _pairs(arguments)
    if arguments.out is not None:
        _check_writable(arguments.out)
    what = "validation pairs of the run" if arguments.source is None else arguments.source
    with _few_warnings() as warn:
        found = translator.translate((source for source, _ in pairs), _decoding(arguments), warn=warn)
        hypotheses = [best[0].text for best in found]
    if arguments.out is not None:
        Path(arguments.out).write_text("".join(line + "\n" for line in hypotheses), encoding="utf-8")
    scores = translator.scores(hypotheses, [target for _, target in pairs])
    loss = translator.loss(translator.batches(pairs, 4096, warn=_warn))
    if arguments.json:
        values = {name: {"value": score.value, "signature": score.signature} for name, score in scores.items()}
        print(json.dumps({"pairs": len(pairs), "loss": loss, "perplexity": math.exp(min(loss, 50.0)), **values}))
        return
    print(f"{_counted(pairs, 'pair')}: {what}")
    for score in scores.values():
        print(score.text)
    print(f"loss = {loss:.4f} a token, perplexity = {math.exp(min(loss, 50.0)):.2f}")


def evaluate_classifier(arguments: argparse.Namespace) -> None:
    """Accuracy, confusion, precision, recall and F1, average precision, a threshold"""
    from regard import classification

    if arguments.plot is not None:
        from regard import draw as pictures

        pictures.check(arguments.plot)
    classifier = classification.Classifier.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    threshold, chosen = _threshold(classifier, arguments)
    if arguments.data is None:
        if arguments.labels is not None:
            raise ValueError("--labels needs --data, the texts they are of")
        if arguments.columns is not None:
            raise ValueError("--columns are those of --data: give that too")
        examples, name = classification.read_valid(arguments.run), f"the validation texts of {arguments.run}"
        chosen = None  # on the very same texts
    else:
        from regard.data.labelled import read_labelled

        found = read_labelled(arguments.data, arguments.labels, columns=_columns(arguments.columns or "text,label"))
        examples, name = list(zip(found.texts, found.labels, strict=True)), arguments.data
    with _few_warnings() as warn:
        found = classification.evaluate(classifier, examples, name=name, threshold=threshold, chosen=chosen, warn=warn)
    if arguments.baseline:
        _warn("training the baseline on the texts of the run ...")
        found = found._replace(baseline=classification.measure_baseline(arguments.run, examples, name))
    if arguments.plot is not None:
        note = f"{_counted(examples, 'text')}: {name}"
        only = classifier.labels.index(threshold.label) if threshold else 1 if len(classifier.labels) == 2 else None
        title = f"{arguments.run}: what it answers, and what a threshold would do"
        picture = pictures.report_picture(found.report, title, note, only=only, chosen=found.reached)
        _warn(f"picture: {pictures.save(picture, arguments.plot)}")
    if arguments.json:
        print(json.dumps({"run": arguments.run, "data": name} | found.to_json(), ensure_ascii=False))
        return
    print(f"{_counted(examples, 'text')}: {name}")
    print("\n".join(found.lines()))


def evaluate_masked(arguments: argparse.Namespace) -> None:
    """Loss, perplexity and accuracy of hidden tokens"""
    from regard.data.masking import Masking
    from regard.masked import MaskedModel
    from regard.task import read_parts
    from regard.training.run import Run

    masked = MaskedModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    what, documents = _documents(arguments)
    facts = read_parts(Run.open(arguments.run)).facts
    masking = Masking(masked.tokenizer, facts.get("masked", 0.15), whole_words=bool(facts.get("whole_words")))
    found = masked.measure(documents, masking)
    if arguments.json:
        print(json.dumps({"documents": len(documents), **found._asdict()}))
        return
    print(f"{_counted(documents, 'document')}, {found.tokens:,} hidden tokens: {what}")
    print(f"loss = {found.loss:.4f} a hidden token, perplexity = {found.perplexity:.2f}")
    print(f"accuracy = {found.accuracy:.2f} %")


def fill(arguments: argparse.Namespace) -> None:
    """regard fill"""
    from regard.data.text import BREAKS, opened, read_sentences, shown
    from regard.masked import Filled, MaskedModel

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
    with opened("-") as stream, _few_warnings() as warn:
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


def _threshold(classifier: Any, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The threshold that --threshold gives, or that --recall or --precision asks for; and what the latter does to the
    validation texts of the run, where it is chosen. None without any of the three."""
    from regard.classification import Threshold, read_valid

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


def _columns(text: str) -> tuple[str | int, str | int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--columns are two, such as text,label or 0,1, got {text!r}")
    first, second = (int(part) for part in parts) if all(part.isdecimal() for part in parts) else parts
    return first, second


def classify(arguments: argparse.Namespace) -> None:
    """regard classify"""
    from regard.classification import Classifier
    from regard.data.text import opened, read_sentences, shown

    classifier = Classifier.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    threshold, chosen = _threshold(classifier, arguments)
    if chosen is not None:
        _warn(
            f"{threshold.label!r} from probability {threshold.value:.6g} on: recall {chosen.recall:.4f} and precision "
            f"{chosen.precision:.4f} on the validation texts of the run"
        )
    with opened(arguments.input) as stream, _few_warnings() as warn:
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


def evaluate_language(arguments: argparse.Namespace) -> None:
    """Loss, perplexity, bits"""
    from regard.language import LanguageModel

    language = LanguageModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    what, documents = _documents(arguments)
    found = language.measure(documents, stride=arguments.stride)
    if arguments.json:
        print(json.dumps({"documents": len(documents), **found._asdict()}))
        return
    print(f"{_counted(documents, 'document')}, {found.characters:,} characters, {found.tokens:,} tokens: {what}")
    print(f"loss = {found.loss:.4f} a token, perplexity = {found.perplexity:.2f}")
    print(f"bits per character = {found.bits_per_character:.4f}, bits per byte = {found.bits_per_byte:.4f}")
    print(f"word perplexity = {found.word_perplexity:.2f} over {found.words:,} words and line ends")
    if found.unknown:
        _warn(f"{found.unknown:,} tokens are unknown to the model, and counted as one kind of token")


def _documents(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Those of --text, cut as the run was trained on, or what the run validates on; and their name."""
    from regard.data.documents import read_documents
    from regard.text_task import read_valid
    from regard.training.run import Run

    if arguments.text is None:
        return "the run's validation", read_valid(arguments.run)
    unit = Run.open(arguments.run).read_json("run.json").get("documents", "file")
    return ", ".join(arguments.text), read_documents(arguments.text, unit)[0]


EVALUATIONS = {
    "translate": evaluate_translator,
    "language": evaluate_language,
    "masked": evaluate_masked,
    "classify": evaluate_classifier,
}


def generate(arguments: argparse.Namespace) -> None:
    """regard generate"""
    from regard.data.text import opened, read_sentences, shown
    from regard.decoding import DecodingConfig
    from regard.language import LanguageModel

    language = LanguageModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    if arguments.prompt is not None and arguments.lines:
        raise ValueError("--lines takes the prompts from standard input: leave the prompt out")
    if arguments.n < 1:
        raise ValueError(f"--n must be at least 1, got {arguments.n}")
    if not arguments.temperature >= 0:
        raise ValueError(f"--temperature must be at least 0, which takes the best token, got {arguments.temperature}")
    greedy = arguments.temperature == 0
    if greedy and arguments.n > 1:
        raise ValueError("--temperature 0 always gives the same text: leave --n out")
    cuts = {name: getattr(arguments, name) for name in ("top_k", "top_p", "min_p")}
    if greedy and any(value is not None for value in cuts.values()):
        raise ValueError("--top-k, --top-p and --min-p cut draws: give a --temperature above 0")
    drawn = {"beam": 1} if greedy else {"sample": True, "temperature": arguments.temperature, **cuts}
    decoding = DecodingConfig(
        nbest=arguments.n,
        minimum=0,
        maximum=arguments.maximum,
        repetition=arguments.repetition,
        seed=arguments.seed,
        **drawn,
    )
    if arguments.prompt is not None:
        prompts = [arguments.prompt]
    else:
        with opened("-") as stream:
            lines = list(read_sentences(stream, name=shown("-"), longest=1 << 31))
        prompts = lines if arguments.lines else ["\n".join(lines)]
    # one text to one reader comes word by word
    live = arguments.n == 1 and not arguments.json and len(prompts) == 1
    for number, prompt in enumerate(prompts):
        before = [prompt]  # written with the first piece of text: a prompt that is refused is not

        def say(sample: int, text: str, before: list[str] = before) -> None:
            _write("".join(before) + text)
            before.clear()

        found = language.generate(
            prompt,
            decoding,
            stop=arguments.stop or (),
            slide=arguments.slide,
            say=say if live else None,
        )
        for part in found:
            if arguments.json:
                record = {"prompt": prompt, "text": part.text, "tokens": len(part.ids), "logprob": part.logprob}
                print(json.dumps(record | {"ended": part.ended}, ensure_ascii=False), flush=True)
            elif live:
                _write("".join(before) + "\n")
            else:
                print(("" if number == 0 and part is found[0] else "----\n") + prompt + part.text, flush=True)
            room = None if language.limit is None else language.limit - len(language.encode(prompt))
            if part.ended == "length" and room is not None and len(part.ids) == room < arguments.maximum:
                _warn(f"stopped at the last of the model's {language.limit} positions; --slide goes on")
        unknown = language.encode(prompt).count(language.tokenizer.unk)
        if unknown:
            _warn(f"{unknown:,} tokens of the prompt are unknown to the model, and read as one kind of token")


def prompt(arguments: argparse.Namespace) -> None:
    """regard prompt"""
    from regard import fewshot
    from regard.language import LanguageModel

    try:
        shots = [int(part) for part in arguments.shots.split(",")]
    except ValueError as error:
        raise ValueError(f"--shots are numbers of examples, such as 0,1,5, got {arguments.shots!r}") from error
    loaded = fewshot.load(arguments.task)
    language = LanguageModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    if arguments.show:
        most = max(shots)
        if not 0 <= most <= len(loaded.examples):
            raise ValueError(f"{most} shots need as many examples; the task has {len(loaded.examples)}")
        print(fewshot.prompt(loaded.task, loaded.examples[:most], loaded.queries[0]))
        return
    found = fewshot.run(language, loaded, shots, draws=arguments.draws, seed=arguments.seed)
    if arguments.json:
        print(json.dumps({"queries": len(loaded.queries), "results": fewshot.report(found)}))
        return
    print(f"{len(loaded.queries)} queries, by {loaded.task.score}\nshots  accuracy  spread over draws")
    for part in found:
        drawn = f"{100 * part.spread:6.2f}  of {len(part.draws)}" if len(part.draws) > 1 else "     -"
        print(f"{part.shots:>5}  {100 * part.mean:7.2f}%  {drawn}")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def align_pairs(arguments: argparse.Namespace) -> None:
    """regard align"""
    from regard import alignment
    from regard.metrics.alignment import error_rate, read_gold
    from regard.translation import Translator

    forward = Translator.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    if arguments.symmetrise is not None and arguments.reverse is None:
        raise ValueError("--symmetrise needs --reverse, a run of the opposite direction")
    pairs = _pairs(arguments)
    gold = None if arguments.gold is None else read_gold(arguments.gold)
    if gold is not None and len(gold) != len(pairs):
        raise ValueError(f"{arguments.gold} has gold links of {len(gold)} sentences, and there are {len(pairs)} pairs")
    sentence = 1 if arguments.sentence is None else arguments.sentence
    if arguments.picture is None and arguments.sentence is not None:
        raise ValueError("--sentence is the one that --picture draws: give that too")
    if arguments.picture is not None:
        from regard import draw as pictures

        pictures.check(arguments.picture)
        if not 1 <= sentence <= len(pairs):
            raise ValueError(f"--sentence must be from 1 to {len(pairs)}, got {sentence}")
    _refuse_long(forward, pairs)
    options = {"read": arguments.read, "head": _whole(arguments.head, "--head", "average")}
    layer = _whole(arguments.layer, "--layer", "average", "aligner")
    if arguments.reverse is None:
        found = alignment.align(forward.model, forward.source, forward.target, pairs, layer=layer, **options)
    else:
        backward = Translator.load(arguments.reverse, which=arguments.checkpoint, device=arguments.device)
        flipped = [(target, source) for source, target in pairs]
        learnt = alignment.has_aligner(forward.model) and alignment.has_aligner(backward.model)
        options["layer"] = layer if layer is not None else ("aligner" if learnt else "all")
        there = alignment.read_maps(forward.model, forward.source, forward.target, pairs, **options)
        back = alignment.read_maps(backward.model, backward.source, backward.target, flipped, **options)
        agreed = alignment.choose_layers(there, back)
        if len(agreed.rates) > 1:
            _warn(f"the layers that agree best: {agreed.forward} and {agreed.backward}")
        method = arguments.symmetrise or "grow-diagonal"
        found = alignment.align_both(there, back, layers=agreed[:2], method=method)
    for part in found:
        print(part)
    if arguments.picture is not None:
        chosen = found[sentence - 1]
        title, note = "Where each target word comes from", "Ringed: the word links."
        picture = pictures.alignment_picture(chosen.matrix, chosen.source, chosen.target, chosen.links, title, note)
        _warn(f"picture of sentence {sentence}: {pictures.save(picture, arguments.picture)}")
    if gold is not None:
        print(error_rate([part.links for part in found], gold), file=sys.stderr)


def _pairs(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Those of --source and --target, or what the run validates on."""
    from regard.data.text import read_pairs
    from regard.translation import read_valid

    if arguments.source is None:
        if arguments.target is not None:
            raise ValueError("--target needs --source, the sentences it translates")
        if arguments.columns is not None:
            raise ValueError("--columns are those of --source, a TSV of pairs: give that too")
        return read_valid(arguments.run)
    columns = _columns(arguments.columns or "0,1")
    if not all(isinstance(column, int) for column in columns):
        raise ValueError(f"--columns of a TSV of pairs are two numbers from 0, such as 0,1, got {arguments.columns!r}")
    found = read_pairs(arguments.source, arguments.target, columns=columns)
    return list(zip(found.source, found.target, strict=True))


def _refuse_long(translator: Any, pairs: list[tuple[str, str]]) -> None:
    """Attention between all words of a very long pair would not end."""
    for side, tokenizer in enumerate((translator.source, translator.target)):
        for number, ids in enumerate(tokenizer.encode_batch([pair[side] for pair in pairs]), 1):
            if len(ids) > 4 * translator.longest:
                raise ValueError(
                    f"pair {number} has {len(ids)} tokens, far more than the {translator.longest} the run was trained "
                    "for: split it into sentences"
                )


def average(arguments: argparse.Namespace) -> None:
    """regard average"""
    from regard.training.loop import average
    from regard.training.run import Run

    run = Run.open(arguments.run)
    with run.writing("regard average"):
        names = average(run, arguments.last)
    print(
        f"averaged {_counted(names, 'checkpoint')} ({names[0]} to {names[-1]}) into {arguments.run}/checkpoints/average"
    )


def demo(console: Any, folder: Path) -> None:
    """The part of `regard demo` that translates."""
    from regard import demo as show
    from regard import draw as pictures
    from regard.alignment import align
    from regard.task import train
    from regard.training.display import Display
    from regard.translation import Task, Translator, read_valid

    console.print(
        "\nA translator of numbers, dates, times and amounts, trained now on sentences made up here\n", style="bold"
    )
    config = show.small_translator(folder / "translator")
    train(Task, config, Display())
    translator = Translator.load(config.out)
    pairs = read_valid(config.out)
    best = [found[0].text for found in translator.translate(source for source, _ in pairs)]
    scores = translator.scores(best, [target for _, target in pairs])
    console.print(f"\nOn {len(pairs)} sentences it has not seen: {scores['exact'].text}")
    console.print(f"{scores['bleu'].text}\n", soft_wrap=True)
    for source in show.SENTENCES:
        console.print(f"  {source}\n    {translator(source)}", soft_wrap=True)
    source = show.SENTENCES[0]
    both = translator.source, translator.target
    (found,) = align(translator.model, *both, [(source, translator(source))])
    note = "What the aligner learnt beside the translator. Ringed: the word links."
    picture = pictures.alignment_picture(
        found.matrix, found.source, found.target, found.links, "Where each German word comes from", note
    )
    console.print(f"\nIts word alignment: {pictures.save(picture, folder / 'alignment.png')}")
    console.print("\nThe English-German translator that comes with Regard\n", style="bold")
    shipped = Translator.load()
    for source in show.ANYTHING:
        console.print(f"  {source}\n    {shipped(source)}", soft_wrap=True)
    console.print("\nYour own: echo 'Good morning!' | regard translate; your own data: regard train translate --help")


def compact(arguments: argparse.Namespace) -> None:
    """regard compact"""
    from regard.task import compact_run

    path = compact_run(arguments.run, arguments.out, arguments.checkpoint)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB of weights; {_use(arguments.out)}")


def embed(arguments: argparse.Namespace) -> None:
    """regard embed"""
    import numpy as np

    from regard.data.text import opened, read_sentences, shown
    from regard.embedding import Embedder

    if arguments.out is not None:
        if not arguments.out.endswith(".npy"):
            raise ValueError(f"--out is a .npy file, got {arguments.out!r}")
        _check_writable(arguments.out)
    embedder = Embedder.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    options = {"pooling": arguments.pooling, "normalized": not arguments.raw}
    parts, number = [], 1
    with opened(arguments.input) as stream, _few_warnings() as warn:
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


def import_model(arguments: argparse.Namespace) -> None:
    """regard import"""
    from regard import task as tasks
    from regard.interop.runs import import_model

    out = arguments.out or f"runs/{Path(arguments.source).resolve().stem}"
    found = import_model(arguments.source, out, arguments.tokenizer)
    for note in found.notes:
        _warn(note)
    vectors = found.config.kind == "encoder" and found.config.head == "none"
    use = "turn lines into vectors: regard embed {run}" if vectors else tasks.find(found.task).use
    use = use.format(run=out)
    print(f"{out}: a run of {found.task!r}, {found.parameters:,} parameters; {use}")


def export_run(arguments: argparse.Namespace) -> None:
    """regard export"""
    from regard.interop.runs import export_run

    options = {"which": arguments.checkpoint, "family": arguments.family}
    found = export_run(arguments.run, arguments.out, arguments.format, **options)
    for note in found.notes:
        _warn(note)
    print(f"{found.folder}: {found.family}, {sum(f.stat().st_size for f in found.folder.rglob('*')) / 1e6:.1f} MB")


def add_verbs(verb: Verb) -> None:
    """The flags of each verb."""
    verb(
        "train",
        None,
        "train a model on your own data: regard train --help",
        [
            "regard train translate --data.source a.en --data.target a.de --model.attention performer",
            "regard train translate --help",
        ],
    )
    added = verb(
        "resume",
        resume,
        "go on with a run exactly where it stopped, make it longer, or change what may change",
        [
            "regard resume runs/translate",
            "regard resume runs/translate --steps 20000",
            "regard resume runs/translate --training.minutes 60 --training.learning_rate 0.0005",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--steps", type=int, help="as --training.steps")
    about = "The run records what was changed. All else is as it was begun: for other settings begin a new run."
    group = added.add_argument_group("settings that may change", about)
    for name, help in NAMES.items():
        group.add_argument(f"--{name}", dest=name, metavar="VALUE", help=help)

    added = verb(
        "translate",
        translate,
        "translate files or standard input, line by line; without RUN by the English-German model bundled with Regard",
        [
            'echo "Where is the station?" | regard translate',
            "regard translate letter.txt -o brief.txt",
            "regard translate runs/translate in.en -o out.de",
            "regard translate runs/translate < in.en > out.de",
            "regard translate runs/translate --beam 8 --nbest 3 --scores --alignments < in.en",
            "regard translate runs/translate --sample --temperature 0.8 --top-p 0.9 --seed 7 < in.en",
        ],
    )
    added.add_argument("run", metavar="RUN", nargs="?", help="a run folder (default: the model bundled with Regard)")
    added.add_argument("files", metavar="FILE", nargs="*", help="text, .gz and .xz too (default: standard input)")
    added.add_argument("--input", help="the same for one file")
    added.add_argument(
        "-o", "--out", help="write here instead of standard output, whole or not at all; .gz and .xz too"
    )
    _add_model(added)
    _add_decoding(added)
    added.add_argument("--nbest", type=int, help="so many translations a line, each behind its line number and a tab")
    added.add_argument("--scores", action="store_true", help="add a column: log probability over the length penalty")
    added.add_argument("--alignments", action="store_true", help="add a column: word links, source-target from 0")
    added.add_argument("--sample", action="store_true", help="draw tokens instead of searching for the best")
    added.add_argument("--temperature", type=float, default=1.0, help="of the draws (default: 1)")
    added.add_argument("--top-k", type=int, help="draw among the k most probable tokens")
    added.add_argument("--top-p", type=float, help="draw among the fewest tokens with this much probability")
    added.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")

    added = verb(
        "evaluate",
        evaluate,
        "how good a model is, in the measures of its task",
        [
            "regard evaluate runs/translate",
            "regard evaluate runs/translate --source test.en --target test.de --beam 5 --out test.out",
            "regard evaluate runs/classify --data test.csv --recall 0.95 --plot report.png",
            "regard evaluate runs/language --text test.txt.xz --stride 64",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--json", action="store_true", help="one JSON object")
    _add_model(added)
    told = "of --source or --data, two names (text,label) or numbers from 0 (default: text,label; of pairs 0,1)"
    columns = added.add_argument("--columns", help=told)
    group = added.add_argument_group("translate", "BLEU and chrF with their sacreBLEU signatures, exact match, loss")
    flags = {
        "translate": [
            group.add_argument("--source", help="source sentences, or a TSV of pairs (default: the run's validation)"),
            group.add_argument("--target", help="file of references"),
            columns,
            group.add_argument("--out", help="write the translations to this file"),
            *_add_decoding(group),
        ]
    }
    about = "accuracy, confusion, precision, recall and F1 of each class, macro and micro, average precision"
    group = added.add_argument_group("classify", about)
    flags["classify"] = [
        group.add_argument("--data", help="texts and labels: .csv, .tsv, .jsonl (default: the run's validation)"),
        group.add_argument("--labels", help="file of the labels, line by line; --data is then texts, one a line"),
        columns,
        *_add_threshold(group),
        group.add_argument("--plot", help="draw confusion matrix and precision-recall curve: .png, .svg or .pdf"),
        group.add_argument(
            "--baseline",
            action="store_true",
            help="train TF-IDF (1-2-grams) with logistic regression on the same texts, and print it beside the run",
        ),
    ]
    group = added.add_argument_group("language", "loss, perplexity, bits per character and byte, word perplexity")
    flags["language"] = [
        group.add_argument(
            "--text", nargs="+", metavar="FILE", help="files, folders, - (default: the run's validation)"
        ),
        group.add_argument("--stride", type=int, help="blocks overlap, and the last so many tokens of each count"),
    ]
    added.add_argument_group("masked", "loss, perplexity and accuracy of hidden tokens; --text as of language")
    flags["masked"] = flags["language"][:1]
    added.set_defaults(flags=flags)

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
    _add_model(added)
    _add_threshold(added)

    added = verb(
        "generate",
        generate,
        "go on with a text; the prompt is an argument or standard input",
        [
            'regard generate runs/language "Once upon a time" --maximum 200 --temperature 0.8 --top-k 40',
            'regard generate runs/language "ROMEO:" --n 3 --seed 7 --min-p 0.05 --stop "JULIET:"',
            "regard generate runs/language < story.txt",
            "regard generate runs/language --lines --json < prompts.txt > texts.jsonl",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to go on with (default: standard input)")
    _add_model(added)
    added.add_argument("--maximum", type=int, default=256, help="most tokens (default: 256)")
    added.add_argument("--temperature", type=float, default=0.8, help="of the draws; 0: the best token (default: 0.8)")
    added.add_argument("--top-k", type=int, help="draw among the k most probable tokens")
    added.add_argument("--top-p", type=float, help="draw among the fewest tokens with this much probability")
    added.add_argument("--min-p", type=float, help="draw among tokens with this share of the best one's probability")
    added.add_argument(
        "--repetition", type=float, default=1.0, help="above 1: tokens that came before are less likely (default: 1)"
    )
    added.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )
    added.add_argument("--n", type=int, default=1, help="so many texts (default: 1)")
    added.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    added.add_argument(
        "--slide", action="store_true", help="where the positions end, go on from the last half of the text"
    )
    added.add_argument("--lines", action="store_true", help="every line of standard input is a prompt")
    added.add_argument("--json", action="store_true", help="one JSON object a text")

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
    _add_model(added)

    added = verb(
        "prompt",
        prompt,
        "how often a language model answers right, with so many solved examples before each question",
        [
            "regard prompt runs/language --task task.yaml --shots 0,1,5 --draws 10",
            "regard prompt runs/language --task task.yaml --shots 2 --show",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--task", required=True, help="a YAML file: prompt, answer, choices, examples, queries")
    added.add_argument("--shots", default="0", help="numbers of examples, such as 0,1,5 (default: 0)")
    added.add_argument("--draws", type=int, default=5, help="choices of examples for each number (default: 5)")
    added.add_argument("--seed", type=int, default=0, help="of the choices (default: 0)")
    added.add_argument("--show", action="store_true", help="print the prompt of the first query instead")
    added.add_argument("--json", action="store_true", help="one JSON object")
    _add_model(added)

    added = verb(
        "align",
        align_pairs,
        "word links of given pairs from the attention, one line a pair, source-target from 0",
        [
            "regard align runs/en-de --source a.en --target a.de > a.links",
            "regard align runs/en-fr --reverse runs/fr-en --source a.en --target a.fr --gold a.gold > a.links",
            "regard align runs/en-de --picture alignment.png --sentence 3",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--source", help="file of source sentences, or a TSV of pairs (default: the run's validation)")
    added.add_argument("--target", help="file of their translations")
    added.add_argument("--columns", help="of a TSV, source and target, from 0 (default: 0,1)")
    added.add_argument("--reverse", metavar="RUN", help="a run of the opposite direction: links of both become one")
    methods = ("intersection", "union", "grow-diagonal", "grow-diagonal-final-and", "agreement")
    added.add_argument("--symmetrise", choices=methods, help="how, with --reverse (default: grow-diagonal)")
    added.add_argument(
        "--layer", help="from 0, average or aligner (default: the aligner, the last but one, or by agreement)"
    )
    added.add_argument("--head", default="average", help="one head, from 0 (default: the average)")
    added.add_argument(
        "--read",
        choices=("consume", "predict"),
        default="predict",
        help="at the step that reads the target word, or the one that predicts it (default: predict)",
    )
    added.add_argument("--gold", help="links to compare with, S-S sure and SpS possible, from 1: AER on stderr")
    added.add_argument("--picture", help="draw one sentence into this .png, .svg or .pdf")
    added.add_argument("--sentence", type=int, help="which one to draw, from 1 (default: 1)")
    _add_model(added)

    added = verb(
        "average",
        average,
        "average the newest checkpoints of a run into one, which is then used",
        ["regard average runs/translate --last 5"],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--last", type=int, default=5, help="how many (default: 5)")

    added = verb(
        "compact",
        compact,
        "a small copy of a run to pass on: one checkpoint, its matrices in 8 bits",
        ["regard compact runs/translate --out english-german"],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--out", required=True, help="a new folder")
    added.add_argument("--checkpoint", help="best, last, average or a step (default: the average, or else the best)")

    added = verb(
        "import",
        import_model,
        "make a run of a published model: GPT-2, BERT, RoBERTa, DistilBERT, Marian, Llama and their like, llama2.c",
        [
            "regard import models/gpt2 --out runs/gpt2",
            "regard import models/opus-mt-en-de",
            "regard import stories260K.bin --tokenizer tok512.bin --out runs/stories",
        ],
    )
    kinds = "a Hugging Face folder (config.json, safetensors, tokenizer), or a llama2.c file"
    added.add_argument("source", metavar="FOLDER", help=kinds)
    added.add_argument("--out", metavar="RUN", help="the run folder (default: runs/ and the name of the source)")
    added.add_argument("--tokenizer", help="folder of the tokenizer (default: FOLDER); of llama2.c the tok*.bin file")

    added = verb(
        "export",
        export_run,
        "write a run for others: a Hugging Face folder, or a CTranslate2 folder of a translator",
        [
            "regard export runs/gpt2 --format huggingface --out models/mine",
            "regard export runs/translate --format ctranslate2 --out models/fast",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--format", choices=("huggingface", "ctranslate2"), required=True, help="who is to open it")
    added.add_argument("--out", metavar="FOLDER", required=True, help="a new folder")
    added.add_argument("--family", help="of huggingface: gpt2, bert, marian, llama ... (default: the one that fits)")
    added.add_argument("--checkpoint", help="best, last, average or a step (default: the average, or else the best)")

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
    _add_model(added)


def _add_model(added: argparse.ArgumentParser) -> None:
    added.add_argument("--checkpoint", help="best, last, average or a step (default: the average, or else the best)")
    added.add_argument("--device", default="auto", help="cpu, cuda ... (default: a GPU where there is one)")


def _add_decoding(added: Any) -> list[argparse.Action]:
    return [
        added.add_argument("--beam", type=int, default=5, help="hypotheses followed at a time; 1: greedy (default: 5)"),
        added.add_argument("--penalty", type=float, default=1.0, help="alpha of the GNMT length penalty (default: 1)"),
        added.add_argument("--minimum", type=int, default=1, help="fewest tokens (default: 1)"),
        added.add_argument("--maximum", type=int, help="most tokens (default: 1.5 times the source, and 10)"),
    ]


def _add_threshold(added: Any) -> list[argparse.Action]:
    told = "the threshold on the validation texts with the best {} that has at least this {}, such as {}"
    return [
        added.add_argument("--recall", type=float, help=told.format("precision", "recall", "0.95")),
        added.add_argument("--precision", type=float, help=told.format("recall", "precision", "0.9")),
        added.add_argument("--threshold", type=float, help="from this probability on the answer is --positive"),
        added.add_argument("--positive", metavar="LABEL", help="of which label (default: of two labels, the second)"),
    ]


def _decoding(arguments: argparse.Namespace) -> Any:
    from regard.decoding import DecodingConfig

    names = ("beam", "penalty", "minimum", "maximum", "nbest", "sample", "temperature", "top_k", "top_p", "seed")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
    drawn = [f"--{name.replace('_', '-')}" for name in ("temperature", "top_k", "top_p") if given.get(name, 1.0) != 1.0]
    if drawn and not given.get("sample"):
        raise ValueError(f"{', '.join(drawn)} changes how tokens are drawn: give --sample too")
    if not given.get("sample"):
        given["beam"] = max(given["beam"], given.get("nbest", given["beam"]))
    return DecodingConfig(**given)


def _check_writable(path: str) -> None:
    """Ends in words before the work, not after it; leaves no file."""
    is_new = not Path(path).exists()
    with Path(path).open("a"):
        pass
    if is_new:
        Path(path).unlink()


def _whole(text: str | None, flag: str, *words: str) -> int | str | None:
    """A number from 0, or one of the words."""
    if text is None or text in words:
        return text
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(f"{flag} must be a number from 0 or {' or '.join(map(repr, words))}, got {text!r}")
    return int(text)


def _counted(things: Sequence[Any], noun: str) -> str:
    return f"{len(things):,} {noun}" + ("" if len(things) == 1 else "s")


@contextmanager
def _few_warnings() -> Iterator[Callable[[str], None]]:
    """For warnings that any line may bring: the first few are said, and how many more there were."""
    from regard.data.text import WARNINGS

    count = 0

    def warn(message: str) -> None:
        nonlocal count
        count += 1
        if count <= WARNINGS:
            _warn(message)

    yield warn
    if count > WARNINGS:
        _warn(f"{count - WARNINGS} more such warnings")


def _warn(message: str) -> None:
    print(f"regard: {message}", file=sys.stderr, flush=True)
