"""The task of masked language modelling: predicting masked tokens from both sides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.core.model import Model
from regard.data.documents import Documents
from regard.data.masking import Hidden, MaskedBatches, Masking
from regard.data.tokenizer import Tokenizer
from regard.tasks import base
from regard.tasks.load import set_stems
from regard.tasks.masked import page
from regard.tasks.masked.config import MaskedConfig
from regard.tasks.masked.masked_model import MaskedModel
from regard.tasks.masked.verbs import ABOUT, EXAMPLES
from regard.tasks.opened import Opened
from regard.tasks.text import FILE, TextTask
from regard.training.graphs import few_lengths
from regard.training.loss import IGNORED, Loss, masked_token_loss


class Task(TextTask):
    """Predicts the masked tokens of a text."""

    name = "masked"
    about, examples = ABOUT, EXAMPLES
    use = "fill a gap: regard fill {run} 'I took my [mask] for a walk'"
    config = MaskedConfig
    predicts = "hidden tokens"
    metrics = ("loss", "accuracy")
    epochs = 40  # more than of other tasks: only one token in seven is predicted

    def __init__(self, config: MaskedConfig, data: Documents, tokenizers: dict[str, Tokenizer], model: Model):
        self.model, self.data, options = model, data, config.data
        set_stems(model, tokenizers[FILE])
        self.unit = options.documents
        self.masked = MaskedModel(model, tokenizers[FILE], options.length, options.apart)
        self.masking = Masking(tokenizers[FILE], options.masked, whole_words=options.whole_words)
        # few shapes, so that few CUDA graphs are captured
        uses_cuda_graphs = config.training.graphs and next(model.parameters()).is_cuda
        multiple = few_lengths(options.length) if uses_cuda_graphs else 1
        rows = self.masked.rows(
            data.train, tokens=base.batch_tokens(config.training), seed=config.training.seed, multiple=multiple
        )
        self.batches = MaskedBatches(rows, self.masking)

    def loss(self, batch: Hidden, label_smoothing: float) -> Loss:
        return masked_token_loss(self.model, batch, label_smoothing)

    def count_tokens(self, batch: Hidden) -> int:
        return max(1, int((batch.targets != IGNORED).sum()))

    def count_tokens_read(self, batch: Hidden) -> int:
        return batch.tokens.numel() if batch.keep is None else int(batch.keep.sum())

    def evaluate(self, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        found = self.masked.measure(self.data.valid, self.masking, check=check)
        metrics = {name: value for name, value in found._asdict().items() if isinstance(value, float)}
        return metrics, self.masked.samples(self.data.valid, self.masking)

    @classmethod
    def open_for_page(cls, folder: str | Path, device: str) -> Opened:
        return page.open_run(folder, device)

    def facts(self) -> dict[str, Any]:
        return {
            "length": self.masked.length,
            "documents": self.unit,
            "apart": self.masked.apart,
            "masked": self.masking.share,
            "whole_words": self.masking.edges is not None,
        }

    def notes(self) -> list[str]:
        return [self.describe_data(f"{len(self.batches):,} rows", self.masked.tokenizer)]
