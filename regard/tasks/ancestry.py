"""Where the weights of runs come from. The mean of two models is a model only if both were trained from the same
weights: from different random ones, each has its features in other places, and the mean has neither."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.tasks import of
from regard.tasks.load import read_config
from regard.training import checkpoint
from regard.training.run import Run

DEEPEST = 20  # runs in a row, each begun with the next


class Origin(NamedTuple):
    """What is known of where the weights of a run come from."""

    run: Run
    weights: frozenset[str]  # digests of its own and of those it was trained from, or folders of runs
    words: str | None  # what it began with; None: that is not recorded
    seed: int | None = None  # of random weights


def check_ancestors(runs: Sequence[Run], warn: Callable[[str], None]) -> None:
    """Refuses runs that were not trained from the same weights; `warn` is told where that is not known."""
    first, *others = map(find_origin, runs)
    for other in others:
        if first.weights & other.weights:
            continue
        for origin in (first, other):
            if origin.words is None:
                warn(
                    f"{origin.run.folder} does not record what it began with: only runs that were trained from the "
                    "same weights have a mean that is a model"
                )
        if first.words is None or other.words is None:
            continue
        if first.seed is not None and first.seed == other.seed:
            warn(
                f"{first.run.folder} and {other.run.folder} began with the same random weights (seed {first.seed}), "
                "not with a trained model: their mean may be a poor one"
            )
            continue
        raise ValueError(
            f"{first.run.folder} and {other.run.folder} were not trained from the same weights: the first began with "
            f"{first.words}, the other with {other.words}, so their mean is no model; train both with --init of one run"
        )


def find_origin(run: Run) -> Origin:
    """What run.json and config.yaml of a run, and of those before it, say of its weights."""
    facts = run.read_json("run.json")
    weights = _own_weights(run, facts)
    words, seed, before = None, None, None
    if isinstance(facts.get("init"), dict):
        words, before = str(facts["init"].get("run")), facts["init"].get("sha256")
        weights.add(str(before))
    elif run.has("config.yaml"):
        config = read_config(run)
        if (words := of(run).init_folder(config)) is None:
            seed = config.training.seed
            words = f"random weights (seed {seed})"
        else:
            weights.add(str(Path(words).resolve()))
    if words is not None and seed is None:
        weights |= _weights_before(words, before)
    return Origin(run, frozenset(weights), words, seed)


def _own_weights(run: Run, facts: dict[str, Any]) -> set[str]:
    """The weights of all checkpoints of a run, and its folder: what another run began with may be any of them."""
    names = [*checkpoint.names(run.checkpoints), "average"]
    found = {str(run.folder.resolve())}
    for name in names:
        if checkpoint.exists(run.checkpoints / name):
            found.add(checkpoint.listed_digest(run.checkpoints / name))
    soup = facts.get("soup")
    ingredients = soup.get("ingredients") if isinstance(soup, dict) else None
    if isinstance(ingredients, list):
        found |= {str(part["sha256"]) for part in ingredients if isinstance(part, dict) and part.get("used")}
    return found


def _weights_before(folder: str, digest: str | None) -> set[str]:
    """The weights of the run that another began with, and of those before it, as far as the folders still are there.
    `digest` is that of the weights it began with: a folder that no longer has them may be another run."""
    found: set[str] = set()
    for _ in range(DEEPEST):
        run = Run(folder)
        if not (run.folder / "run.json").is_file():
            break
        facts = run.read_json("run.json")
        own = _own_weights(run, facts)
        if digest is not None and digest not in own:
            break
        found |= own
        init = facts.get("init")
        if not isinstance(init, dict):
            break
        folder, digest = str(init.get("run")), init.get("sha256")
        found.add(str(digest))
    return found
