"""The baseline that a classifier has to beat: TF-IDF of words and pairs of words, with logistic regression.

Two lines of scikit-learn that train in seconds. The one hyperparameter, C, is chosen by the accuracy on the validation
texts, as the checkpoint of a Transformer is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.data.labelled import Example, class_numbers
from regard.metrics.classification import Report, report

STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # values of C to try, the strongest regularisation first
ITERATIONS = 1000


class Baseline(NamedTuple):
    """A trained baseline, and its accuracy on the texts that C was chosen on."""

    vectorizer: Any
    model: Any
    labels: list[str]
    strength: float  # C
    validation: float  # accuracy

    def report(self, examples: Sequence[Example], name: str = "the data") -> Report:
        """All measures of its answers to some examples."""
        truth = class_numbers([label for _, label in examples], self.labels, name)
        known = self.model.predict_proba(self.vectorizer.transform([text for text, _ in examples]))
        # the model does not know labels that no training text has
        probabilities = np.zeros((len(examples), len(self.labels)))
        probabilities[:, self.model.classes_] = known
        return report(truth, probabilities, self.labels)


def fit(train: Sequence[Example], valid: Sequence[Example], labels: Sequence[str]) -> Baseline:
    """Trains on `train` and chooses C on `valid`; of equally good values the smallest."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = TfidfVectorizer(ngram_range=(1, 2))
    try:
        x = vectorizer.fit_transform([text for text, _ in train])
    except ValueError as error:
        raise ValueError(
            f"the baseline needs words of two letters or more, and the training texts have none: {error}"
        ) from error
    y = class_numbers([label for _, label in train], labels, "the training data")
    valid_x = vectorizer.transform([text for text, _ in valid])
    valid_y = class_numbers([label for _, label in valid], labels, "the validation data")

    def fit_with(strength: float) -> Baseline:
        model = LogisticRegression(C=strength, max_iter=ITERATIONS).fit(x, y)
        accuracy = float((model.predict(valid_x) == np.array(valid_y)).mean())
        return Baseline(vectorizer, model, list(labels), strength, accuracy)

    # of equals `max` takes the first
    return max(map(fit_with, STRENGTHS), key=lambda baseline: baseline.validation)
