"""Runs that are served: what a run can be asked follows from its task."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from regard import tasks
from regard.core.allocator import hand_back_memory
from regard.decoding import DecodingConfig
from regard.http.refused import Refused
from regard.serve.gathering import Compute, Gatherer, Ready
from regard.serve.generating import Deliver, Generator, GeneratorLimits
from regard.serve.limits import Limits
from regard.tasks.classify.classifier import Classifier
from regard.tasks.language.language_model import LanguageModel
from regard.tasks.load import BUNDLED
from regard.tasks.masked.embedder import Embedder
from regard.tasks.masked.masked_model import MaskedModel
from regard.tasks.translate.translator import Translation, Translator
from regard.training.run import Run

Ability = Literal["complete", "translate", "classify", "fill", "embed"]
DEFAULT = (BUNDLED / "english-german", BUNDLED / "english")


Model = LanguageModel | Translator | Classifier | MaskedModel
LOADERS: dict[str, type[Model]] = {
    "language": LanguageModel,
    "translate": Translator,
    "classify": Classifier,
    "masked": MaskedModel,
}


class Served:
    """A run that answers requests: with a generator of texts, or with gatherers by what they compute."""

    def __init__(self, name: str, model: Model, limits: Limits, deliver: Deliver):
        self.name = name
        self.task = next(task for task, kind in LOADERS.items() if isinstance(model, kind))
        self.created = int(time.time())
        self.generator: Generator | None = None
        computes: dict[Ability, Compute] = {}
        threads = limits.threads or None
        if isinstance(model, LanguageModel):
            sizes = GeneratorLimits(
                rows=limits.rows,
                waiting=limits.queue,
                state_bytes=limits.memory,
                prefix_bytes=limits.prefix_memory,
                context=limits.context,
                threads=limits.threads,
            )
            self.generator = Generator(model, sizes, deliver)
        elif isinstance(model, Translator):
            computes["translate"] = translating(model)
        elif isinstance(model, Classifier):
            computes["classify"] = classifying(model)
        else:
            if model.fills:
                computes["fill"] = filling(model)
            if hasattr(model.model, "encode"):
                computes["embed"] = embedding(Embedder(model.model, model.tokenizer, model.length))
        self.gatherers: dict[Ability, Gatherer] = {
            ability: Gatherer(compute, waiting=limits.queue, texts=limits.texts, threads=threads)
            for ability, compute in computes.items()
        }

    @property
    def abilities(self) -> list[Ability]:
        continues: list[Ability] = ["complete"] if self.generator is not None else []
        return [*continues, *self.gatherers]

    @property
    def workers(self) -> list[Generator | Gatherer]:
        return [*([] if self.generator is None else [self.generator]), *self.gatherers.values()]


class Runs:
    """All runs that are served, by name."""

    def __init__(self, served: Sequence[Served]):
        self.by_name = {one.name: one for one in served}

    @property
    def workers(self) -> list[Generator | Gatherer]:
        return [worker for one in self.by_name.values() for worker in one.workers]

    def can(self, ability: Ability) -> list[str]:
        return [one.name for one in self.by_name.values() if ability in one.abilities]

    def find(self, name: str | None, ability: Ability) -> Served:
        """The run that a request names; None: the only one that has the ability."""
        able = self.can(ability)
        if name is None:
            if len(able) != 1:
                which = f"name one of {', '.join(able)}" if able else f"no run that is served here can {ability}"
                raise Refused(400 if able else 404, f"the request has no model: {which}", param="model")
            return self.by_name[able[0]]
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            why = f"there is no model {name[:100]!r} here; there are {known}"
            raise Refused(404, why, param="model", code="model_not_found")
        if name not in able:
            others = f"; {', '.join(able)} can" if able else ""
            why = f"the model {name!r} is a run of the task {self.by_name[name].task!r} and cannot {ability}{others}"
            raise Refused(400, why, param="model")
        return self.by_name[name]


def open_runs(folders: Sequence[str | Path], device: str, limits: Limits, deliver: Deliver) -> Runs:
    """Opens run folders; none: those that are bundled with Regard. A run is called as its folder."""
    served: dict[str, Served] = {}
    places: dict[str, str | Path] = {}
    for folder in folders or DEFAULT:
        name = Path(folder).resolve().name
        if name in served:
            raise ValueError(f"{folder} and {places[name]} have one name, {name!r}: rename one of the folders")
        served[name], places[name] = Served(name, _load(folder, device), limits, deliver), folder
    return Runs(list(served.values()))


def _load(folder: str | Path, device: str) -> Model:
    task = tasks.of(Run.open(folder)).name
    if task not in LOADERS:
        raise ValueError(
            f"{folder} is a run of the task {task!r}, which is not served: give runs of {', '.join(LOADERS)}"
        )
    return LOADERS[task].load(folder, device=device)


def translating(translator: Translator) -> Compute:
    def answer(best: Sequence[Translation]) -> list[dict[str, Any]]:
        return [{"text": one.text, "score": one.score} for one in best]

    def compute(texts: list[str], decoding: DecodingConfig, check: Callable[[], None], ready: Ready) -> Sequence[Any]:
        def tell(number: int, best: list[Translation]) -> None:
            ready(number, answer(best))

        found = list(map(answer, translator.translate(texts, decoding, first=0, check=check, ready=tell)))
        hand_back_memory()
        return found

    return compute


def classifying(classifier: Classifier) -> Compute:
    def compute(texts: list[str], settings: None, check: Callable[[], None], ready: Ready) -> Sequence[Any]:
        answers = map(classifier.answer, classifier.probabilities(texts, check=check))
        return [{"label": one.label, "probabilities": one.probabilities} for one in answers]

    return compute


def filling(masked: MaskedModel) -> Compute:
    def compute(texts: list[str], top: int, check: Callable[[], None], ready: Ready) -> Sequence[Any]:
        found = []
        for text in texts:
            check()
            filled = masked.fill(text, top=top)
            gaps = [[{"token": one.text, "probability": one.probability} for one in gap] for gap in filled.gaps]
            found.append({"text": filled.text, "gaps": gaps})
        return found

    return compute


def embedding(embedder: Embedder) -> Compute:
    def compute(texts: list[str], settings: None, check: Callable[[], None], ready: Ready) -> Sequence[Any]:
        lengths = [min(len(ids), embedder.length - 2) for ids in embedder.tokenizer.encode_batch(texts)]
        return list(zip(embedder.embed(texts), lengths, strict=True))

    return compute
