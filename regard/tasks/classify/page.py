"""What the page shows of a classifier."""

from pathlib import Path

from regard.tasks.classify.classifier import Classifier
from regard.tasks.classify.corpus import read_valid
from regard.tasks.opened import Opened, of_reader

EXAMINED = 2000  # validation texts to show


def open_run(folder: str | Path, device: str) -> Opened:
    """Opens a run folder."""
    classifier = Classifier.load(folder, device=device)
    try:
        labelled = tuple(read_valid(folder)[:EXAMINED])
    except ValueError:
        labelled = ()
    place = "decoder" if getattr(classifier.model.config, "causal", False) else "encoder"
    found = of_reader("classify", classifier, place, classifier.longest, classifier.longest + 2)
    found.examples = tuple(text[:300] for text, _ in labelled[:4])
    found.begins, found.ends = (classifier.tokenizer.bos,), (classifier.tokenizer.eos,)
    found.classifier, found.labelled = classifier, labelled
    return found
