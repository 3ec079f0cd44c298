"""What a classifier of texts has to beat: TF-IDF of words and pairs of words, with logistic regression.

Two lines of scikit-learn that learn in seconds. The one number to choose, C, is chosen by the accuracy on the
validation texts, as the checkpoint of a Transformer is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.data.labelled import Example, class_numbers
from regard.metrics.classification import Report, report

STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # values of C that are tried, the strongest regularisation first
ITERATIONS = 1000


class Baseline(NamedTuple):
    """What was learned from texts, and how it did on those that C was chosen on."""

    vectorizer: Any
    model: Any
    labels: list[str]
    strength: float  # C
    validation: float  # accuracy

    def report(self, examples: Sequence[Example], name: str = "the data") -> Report:
        """Everything about the answers to some examples."""
        truth = class_numbers([label for _, label in examples], self.labels, name)
        found = self.model.predict_proba(self.vectorizer.transform([text for text, _ in examples]))
        # a label that no training text has is never answered
        probabilities = np.zeros((len(examples), len(self.labels)))
        probabilities[:, self.model.classes_] = found
        return report(np.array(truth), probabilities, self.labels)


def fit(train: Sequence[Example], valid: Sequence[Example], labels: Sequence[str]) -> Baseline:
    """Learns from `train` and chooses C on `valid`; of equally good ones the smallest."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = TfidfVectorizer(ngram_range=(1, 2))
    try:
        x = vectorizer.fit_transform([text for text, _ in train])
    except ValueError as error:
        raise ValueError(
            f"the baseline finds no words of two letters or more in the training texts: {error}"
        ) from error
    y = class_numbers([label for _, label in train], labels, "the training data")
    valid_x = vectorizer.transform([text for text, _ in valid])
    valid_y = class_numbers([label for _, label in valid], labels, "the validation data")
    best: Baseline | None = None
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=ITERATIONS).fit(x, y)
        accuracy = float((model.predict(valid_x) == np.array(valid_y)).mean())
        if best is None or accuracy > best.validation:
            best = Baseline(vectorizer, model, list(labels), strength, accuracy)
    return best
