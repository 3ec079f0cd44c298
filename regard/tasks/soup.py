"""Model soups (Wortsman et al. 2022): the mean of the weights of several runs that were fine-tuned from one run.

A uniform soup has all of them. A greedy soup begins with the best, tries the others from the next best to the worst,
and keeps those with which the validation metric does not fall. So it is never worse than its best ingredient on the
data it was chosen by, and there alone: figures to report are those of a test set.

All that is measured is measured on the validation data of one of the runs, which the others must share.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from regard import __version__
from regard.core.model import Model
from regard.tasks import of
from regard.tasks.ancestry import check_ancestors
from regard.tasks.base import Task
from regard.tasks.load import files_for_inference, read_config, read_parts, set_weights
from regard.tasks.train import open_to_evaluate, to_yaml
from regard.training import checkpoint
from regard.training.averaging import Mean
from regard.training.compact import expand
from regard.training.loop import is_better
from regard.training.run import MANIFEST, Run

How = Literal["uniform", "greedy"]
STATISTICS_BATCHES = 100  # at most, that the statistics of batch norms are a mean over
FREE = ("dropout", "drop_path", "stochastic_depth")  # options of a model that act in training only


class Ingredient(NamedTuple):
    """A checkpoint of a run."""

    run: Run
    path: Path
    digest: str  # of its weights
    step: int
    redrawn: tuple[str, ...]  # tensors that training draws anew

    def read(self) -> dict[str, Tensor]:
        """Its weights, in float32 where they are stored in 8 bits."""
        return expand(checkpoint.read(self.path, only=("model",)).tensors["model"])


class Measured(NamedTuple):
    """An ingredient with its validation metric, and whether it is in the soup."""

    ingredient: Ingredient
    value: float
    used: bool


class Soup(NamedTuple):
    """What was made: the metric, its value for the soup, and every ingredient from the best to the worst."""

    metric: str
    value: float
    measured: list[Measured]

    @property
    def used(self) -> list[Measured]:
        return [measured for measured in self.measured if measured.used]


def make_soup(
    folders: Sequence[str | Path],
    out: str | Path,
    how: How,
    *,
    metric: str | None = None,
    which: str | int | None = None,
    device: str = "auto",
    warn: Callable[[str], None],
) -> Soup:
    """Writes a run folder whose weights are the mean of those of several runs. `metric` is one of the task's (default:
    that of the runs), `which` the checkpoint of each run; `warn` is told what cannot be checked."""
    Run.vacant(out)
    ingredients = _open(folders, which)
    _check_alike(ingredients)
    check_ancestors([ingredient.run for ingredient in ingredients], warn)
    validation = _Validation(ingredients, how, metric, device, warn)
    measured = sorted(
        (Measured(part, validation.measure(part.read(), part.path)[0], False) for part in ingredients),
        key=lambda measured: validation.rank(measured.value),
    )
    measured, weights = validation.mix(measured)
    best = measured[0].ingredient
    value, metrics = validation.measure(weights, best.path)
    soup = Soup(validation.metric, value, measured)
    with Run.create(out, "regard average") as run:
        texts = {name: text.encode() for name, text in validation.task.files().items()}
        run.write_files(files_for_inference(best.run) | texts)
        run.write_text("config.yaml", to_yaml(dataclasses.replace(validation.config, out=str(out))))
        state = {"step": best.step, "averaged": [str(measured.ingredient.path) for measured in soup.used]}
        checkpoint.write(run.checkpoints, "average", {"model": weights}, state)
        run.append({"event": "average", "step": best.step, **metrics})
        facts = best.run.read_json("run.json")
        facts.pop("changes", None)
        facts |= {"manifest": MANIFEST, "regard": __version__, "data": validation.data, "soup": _recipe(soup, how)}
        run.write_json("run.json", facts)
    return soup


def _recipe(soup: Soup, how: How) -> dict[str, Any]:
    """What a soup is made of, for run.json."""
    return {
        "how": how,
        "metric": soup.metric,
        "value": _finite(soup.value),
        "ingredients": [
            {
                "run": str(measured.ingredient.run.folder),
                "checkpoint": measured.ingredient.path.name,
                "sha256": measured.ingredient.digest,
                "value": _finite(measured.value),
                "used": measured.used,
            }
            for measured in soup.measured
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _open(folders: Sequence[str | Path], which: str | int | None) -> list[Ingredient]:
    """The ingredients, in an order that does not depend on the one in which they are given: a sum in another order
    could be rounded to another number."""
    found = []
    for folder in folders:
        run = Run.open(folder)
        if any(run.folder.resolve() == other.run.folder.resolve() for other in found):
            raise ValueError(f"{folder} is given twice: a soup takes each run once")
        read = run.find(which)
        digest = checkpoint.listed_digest(read.path)
        found.append(Ingredient(run, read.path, digest, read.state["step"], tuple(read.state.get("drawn", ()))))
    return sorted(found, key=lambda ingredient: (ingredient.digest, str(ingredient.run.folder)))


def _check_alike(ingredients: Sequence[Ingredient]) -> None:
    """Refuses runs of different tasks, models, vocabularies or labels, by the name of the first tensor or setting that
    differs."""
    first, *others = ingredients
    task, parts = of(first.run).name, read_parts(first.run)
    form = Mean.of(first.read(), first.path)
    for other in others:
        pair = f"{other.run.folder}: cannot be averaged with {first.run.folder}"
        if (name := of(other.run).name) != task:
            raise ValueError(f"{pair}: it is a run of {name!r}, the other of {task!r}; average runs of one task")
        form.check(other.read(), other.path)
        facts = read_parts(other.run, task).facts
        for name in ("labels", "tokenizers", "mean", "deviation"):
            if facts.get(name) != parts.facts.get(name):
                raise ValueError(f"{pair}: they differ in their {name}; fine-tune both from one run, on the same data")
        ours, theirs = _settings(parts.facts["model"]), _settings(facts["model"])
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise ValueError(
                    f"{pair}: model.{name} is {theirs.get(name)!r} here, {ours.get(name)!r} there; average runs of one "
                    "model"
                )


def _settings(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The settings of a model by dotted name, without those that act in training only."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _settings(value, f"{before}{name}.")
        elif not name.endswith(FREE):
            found[before + name] = value
    return found


class _Validation:
    """The validation data of one of the runs, and a model to measure weights with."""

    def __init__(
        self,
        ingredients: Sequence[Ingredient],
        how: How,
        metric: str | None,
        device: str,
        warn: Callable[[str], None],
    ):
        self.how = how
        runs = [ingredient.run for ingredient in ingredients]
        trained = [run for run in runs if run.has("config.yaml")]
        if not trained:
            raise ValueError(
                "none of the runs has a config.yaml, which says what data to validate on: at least one of them must be "
                "a whole run, not a compact or an imported one"
            )
        for run in runs:
            if _data_digest(run) in (_data_digest(trained[0]), None):
                continue
            differs = (
                f"{run.folder} and {trained[0].folder} have different data: one may have trained on what the other"
            )
            if how == "greedy":
                raise ValueError(
                    f"{differs} validates on, so a greedy soup would be chosen by texts or images that it has learned. "
                    "Train all runs with the same data and the same validation data"
                )
            warn(f"{differs} validates on; the figures of some may be too good")
        self.config, self.data = read_config(trained[0]), trained[0].read_json("run.json").get("data", {})
        self.task, used = open_to_evaluate(trained[0], device)
        self.precision = used.training.precision
        self.metric = metric or _common_metric(trained)
        if self.metric not in self.task.metrics:
            known = ", ".join(self.task.metrics)
            raise ValueError(f"--metric must be one of {known} for runs of {self.task.name!r}, got {self.metric!r}")

    def rank(self, value: float) -> tuple[bool, float]:
        """A key to sort by, the best first."""
        return not math.isfinite(value), value if is_better(self.metric, 0, 1) else -value

    def measure(self, weights: dict[str, Tensor], path: Path) -> tuple[float, dict[str, float]]:
        """The metric of weights on the validation data, and all metrics."""
        model = self.task.model
        set_weights(model, weights, path)
        return self._measure(model)

    def _measure(self, model: Model) -> tuple[float, dict[str, float]]:
        model.eval()
        with torch.inference_mode(), self._autocast():
            metrics, _ = self.task.evaluate(lambda: None)
        return metrics[self.metric], metrics

    def _autocast(self) -> torch.autocast:
        device = next(self.task.model.parameters()).device.type
        half = self.precision != "float32"
        return torch.autocast(device, getattr(torch, self.precision) if half else torch.bfloat16, enabled=half)

    def mix(self, measured: list[Measured]) -> tuple[list[Measured], dict[str, Tensor]]:
        """The ingredients with what is used of them, and the weights of the soup. Counters and random draws are those
        of the best."""
        first, *others = measured
        best = first.ingredient.read()
        mean, value = Mean.of(best, first.ingredient.path, first.ingredient.redrawn), first.value
        done, weights = [first._replace(used=True)], best
        for other in others:
            ingredient = other.ingredient
            more = mean.plus(ingredient.read(), ingredient.path, ingredient.redrawn)
            used = self.how == "uniform"
            if not used:
                mixed = self._finish(more.tensors(best), ingredient.path)
                reached, _ = self._measure(self.task.model)
                used = math.isfinite(reached) and not is_better(self.metric, value, reached)
                if used:
                    value, weights = reached, mixed
            done.append(other._replace(used=used))
            mean = more if used else mean
        if self.how == "uniform" and others:
            weights = self._finish(mean.tensors(best), first.ingredient.path)
        return done, weights

    def _finish(self, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
        """The weights of a mean, which the model now has, with statistics of batch norms that belong to them: those of
        the ingredients are of other activations."""
        set_weights(self.task.model, weights, path)
        return weights | renew_statistics(self.task)


def renew_statistics(task: Task) -> dict[str, Tensor]:
    """Measures the statistics of all batch norms of a task's model anew, on the first training batches. Returns copies
    by their names in the state dict."""
    norms = {
        name: part
        for name, part in task.model.named_modules()
        if isinstance(part, _BatchNorm) and part.track_running_stats
    }
    if not norms:
        return {}
    device = next(task.model.parameters()).device
    momenta = {name: norm.momentum for name, norm in norms.items()}
    task.model.eval()
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # a mean over all batches
        norm.train()
    with torch.no_grad():
        for index in range(min(STATISTICS_BATCHES, task.batches.count(0))):
            task.loss(task.prepare(task.batches.get(0, index).to(device)), 0.0)
    for name, norm in norms.items():
        norm.momentum = momenta[name]
        norm.eval()
    return {f"{name}.{part}": value.cpu().clone() for name, norm in norms.items() for part, value in _buffers(norm)}


def _buffers(norm: nn.Module) -> list[tuple[str, Tensor]]:
    return list(norm.named_buffers(recurse=False))


def _data_digest(run: Run) -> Any:
    return run.read_json("run.json").get("data", {}).get("sha256")


def _common_metric(runs: Sequence[Run]) -> str:
    found = sorted({read_config(run).training.metric for run in runs})
    if len(found) > 1:
        raise ValueError(f"the runs were measured by different metrics, {', '.join(found)}: choose one with --metric")
    return found[0]
