"""Zero-, one- and few-shot tasks (Brown et al. 2020, arXiv 2005.14165): a description, some solved examples and a query
become one prompt, and the answer is the most probable choice, or the generated text.

    description: Is the review good or bad?
    prompt: "Review: {text}\\nAnswer:"
    answer: " {label}"
    choices: [good, bad]
    examples: [{text: What a film!, label: good}, {text: I fell asleep., label: bad}]
    queries: test.jsonl        # one JSON object per line; or a list, as above
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from regard.config import from_json
from regard.core.files import parse_json, parse_yaml
from regard.data.text import open_lines
from regard.decoding import DecodingConfig
from regard.tasks.language.language_model import LanguageModel

MOST_DRAWS = 100_000
FIELD = re.compile(r"\{(\w+)\}")
Row = dict[str, str]


@dataclass(frozen=True)
class PromptTask:
    """A task file. `{name}` in prompt and answer stands for a field of the example or query."""

    queries: str | list[dict]  # rows, or a file of JSON objects, one per line
    examples: str | list[dict] = field(default_factory=list)
    description: str = ""  # at the beginning of the prompt
    prompt: str = "{text}\n"  # the text before an answer
    answer: str = "{label}"
    separator: str = "\n\n"  # between description, examples and query
    label: str = "label"  # the field that is the answer
    choices: list[str] | None = None  # its possible values
    score: Literal["likelihood", "generation"] = "likelihood"
    normalise: Literal["none", "tokens", "characters", "prior"] = (
        "none"  # a log probability is divided by the number of these, or has that without the prompt subtracted
    )
    stop: list[str] = field(default_factory=lambda: ["\n"])  # generation ends before any of these
    maximum: int = 32  # most tokens to generate

    def __post_init__(self) -> None:
        if self.score == "likelihood" and not self.choices:
            raise ValueError("score 'likelihood' needs choices, the possible answers")
        if self.choices is not None and len(set(self.choices)) < max(2, len(self.choices)):
            raise ValueError(f"choices must be at least two different answers, got {self.choices}")
        if self.label not in FIELD.findall(self.answer):
            raise ValueError(f"answer must contain {{{self.label}}}, the field that is the answer, got {self.answer!r}")
        if self.label in FIELD.findall(self.prompt):
            raise ValueError(f"prompt must not contain {{{self.label}}}, the answer: move it to answer")
        if self.maximum < 1:
            raise ValueError(f"maximum must be at least 1, got {self.maximum}")
        if not all(self.stop):
            raise ValueError("a stop string must not be empty")


class Loaded(NamedTuple):
    """A task with its rows read."""

    task: PromptTask
    examples: list[Row]
    queries: list[Row]

    @property
    def majority(self) -> float:
        """The accuracy of whoever always gives the most frequent answer to the queries."""
        answers = Counter(row[self.task.label] for row in self.queries)
        return answers.most_common(1)[0][1] / len(self.queries)


class Accuracy(NamedTuple):
    """The share of right answers with one number of shots, for each draw of the examples."""

    shots: int
    draws: list[float]

    @property
    def mean(self) -> float:
        return sum(self.draws) / len(self.draws)

    @property
    def spread(self) -> float:
        """Standard deviation over the draws."""
        return float(np.std(self.draws, ddof=1)) if len(self.draws) > 1 else 0.0


def load(path: str | Path) -> Loaded:
    """Reads a task file and the files of rows it names, which are relative to it."""
    values = parse_yaml("\n".join(open_lines(path)), path)
    try:
        task = from_json(PromptTask, values)
    except (TypeError, ValueError) as error:
        # the one field without a default
        missing = "queries is missing" if isinstance(error, TypeError) else error
        raise ValueError(f"{path}: {missing}") from error
    needed = set(FIELD.findall(task.prompt + task.answer))
    examples, queries = (_rows(part, Path(path), needed) for part in (task.examples, task.queries))
    if not queries:
        raise ValueError(f"{path}: queries must have at least one row")
    for number, row in enumerate(examples + queries, 1):
        if task.choices is not None and row[task.label] not in task.choices:
            raise ValueError(f"{path}: row {number} has the answer {row[task.label]!r}, expected one of {task.choices}")
    return Loaded(task, examples, queries)


def _rows(source: str | list[dict], path: Path, needed: set[str]) -> list[Row]:
    if isinstance(source, str):
        name = str(path.parent / source)
        lines = enumerate(open_lines(name), 1)
        rows = [parse_json(line, f"{name}:{number}") for number, line in lines if line.strip()]
    else:
        name, rows = str(path), source
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not needed <= set(row):
            missing = ", ".join(sorted(needed - set(row if isinstance(row, dict) else ())))
            raise ValueError(f"{name}: row {number} has no {missing}")
    return [{key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows]


def fill(template: str, row: Row) -> str:
    """Replaces each {field} of a template by its value in the row."""
    return FIELD.sub(lambda found: row[found[1]], template)


def prompt(task: PromptTask, shots: Sequence[Row], query: Row) -> str:
    """The whole text before the answer to a query."""
    solved = [fill(task.prompt, row) + fill(task.answer, row) for row in shots]
    return task.separator.join([*filter(None, [task.description]), *solved, fill(task.prompt, query)])


def run(
    language: LanguageModel, loaded: Loaded, shots: Sequence[int], *, draws: int = 5, seed: int = 0
) -> list[Accuracy]:
    """The accuracy for each number of examples before the query. A draw is one choice of examples, the same for all
    queries; without examples there is one draw."""
    if not 1 <= draws <= MOST_DRAWS:
        raise ValueError(f"--draws must be from 1 to {MOST_DRAWS:,}, got {draws:,}")
    for count in shots:
        if not 0 <= count <= len(loaded.examples):
            raise ValueError(f"{count} shots need as many examples; the task has {len(loaded.examples)}")
    found = []
    for count in shots:
        accuracies = []
        for draw in range(draws if count else 1):
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, count, draw])))
            order = np.argsort(generator.random(len(loaded.examples)), kind="stable")[:count]
            prompts = [prompt(loaded.task, [loaded.examples[at] for at in order], query) for query in loaded.queries]
            answers = (choose if loaded.task.score == "likelihood" else write)(language, loaded, prompts)
            right = [fill(loaded.task.answer, query).strip() for query in loaded.queries]
            accuracies.append(sum(map(str.__eq__, answers, right)) / len(right))
        found.append(Accuracy(count, accuracies))
    return found


def choose(language: LanguageModel, loaded: Loaded, prompts: Sequence[str]) -> list[str]:
    """The most probable of the choices after each prompt."""
    task = loaded.task
    choices = task.choices or []
    options = [[fill(task.answer, query | {task.label: choice}) for choice in choices] for query in loaded.queries]
    pairs = [(before, text) for before, texts in zip(prompts, options, strict=True) for text in texts]
    likely = language.likelihoods(pairs)
    prior = language.likelihoods([("", text) for _, text in pairs]) if task.normalise == "prior" else None
    scores = []
    for place, ((logp, tokens), (_, text)) in enumerate(zip(likely, pairs, strict=True)):
        size = {"tokens": tokens, "characters": len(text)}.get(task.normalise, 1)
        scores.append(logp / size - (prior[place][0] if prior else 0.0))
    answers = []
    for number, texts in enumerate(options):
        own = scores[number * len(texts) : (number + 1) * len(texts)]
        if not all(map(math.isfinite, own)):
            raise ValueError(f"the probabilities for query {number + 1} are not finite: are the weights damaged?")
        answers.append(texts[own.index(max(own))].strip())
    return answers


def write(language: LanguageModel, loaded: Loaded, prompts: Sequence[str]) -> list[str]:
    """What the model generates after each prompt, the most probable token each time."""
    decoding = DecodingConfig(beam=1, minimum=0, maximum=loaded.task.maximum)
    return [language.generate(text, decoding, stop=loaded.task.stop)[0].text.strip() for text in prompts]


def report(found: Sequence[Accuracy]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{"shots": part.shots, "accuracy": part.mean, "spread": part.spread, "draws": part.draws} for part in found]
