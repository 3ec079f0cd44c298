"""The task of language modelling: predicting the next token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regard.core.model import Model
from regard.data.documents import Blocks, Documents, Pieces, Text, stream
from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig
from regard.tasks import base
from regard.tasks.language import page
from regard.tasks.language.config import LanguageConfig
from regard.tasks.language.language_model import LanguageModel
from regard.tasks.language.verbs import ABOUT, EXAMPLES
from regard.tasks.load import read_parts
from regard.tasks.opened import Opened
from regard.tasks.text import FILE, TextTask
from regard.training.loss import Loss, next_token_loss
from regard.training.run import Run

SAMPLE = 100  # tokens shown at each evaluation


class Task(TextTask):
    """Predicts the next token of a text."""

    name = "language"
    about, examples = ABOUT, EXAMPLES
    use = "continue a text: regard generate {run} 'Once upon a time'"
    config = LanguageConfig
    predicts = "next token"
    metrics = ("loss",)

    def __init__(self, config: LanguageConfig, data: Documents, tokenizers: dict[str, Tokenizer], model: Model):
        self.model, self.data, self.unit = model, data, config.data.documents
        # in a single document the end token occurs once, and means nothing to the model
        several = config.data.apart or len(data.train) > 1
        tokenizer, length = tokenizers[FILE], config.data.length
        start = tokenizer.eos if several else None
        if config.init is not None:
            start = read_parts(Run.open(config.init)).facts.get("start")
        self.language = LanguageModel(model, tokenizer, length, start, config.data.apart)
        self.prefix: int | None = None  # of each row, only read; None: the choice of the model
        sizes: dict[str, Any] = {
            "length": length,
            "tokens": base.batch_tokens(config.training),
            "seed": config.training.seed,
        }
        if config.data.apart:
            # pieces of documents begin at the same places in every epoch: all of their tokens have to be predicted
            self.prefix = 0
            # few shapes, so that few CUDA graphs are captured
            multiple = 8 if config.training.graphs and next(model.parameters()).is_cuda else 1
            ids = [tokenizer.encode_text(text) for text in data.train]
            self.batches = Pieces(ids, tokenizer.eos, multiple=multiple, **sizes)
            self.count = sum(map(len, ids))
        else:
            ids = stream(data.train, tokenizer)
            self.batches, self.count = Blocks(ids, **sizes), len(ids)

    def loss(self, batch: Text, label_smoothing: float) -> Loss:
        return next_token_loss(self.model, batch, label_smoothing, prefix=self.prefix)

    def count_tokens(self, batch: Text) -> int:
        latents = getattr(self.model, "predicts_last", None)
        if latents is None or self.prefix is not None:
            return batch.target.numel() if batch.keep is None else int(batch.keep.sum())
        lengths = torch.tensor(batch.target.shape[1]) if batch.keep is None else batch.keep.sum(1)
        return int(lengths.clamp(max=latents).expand(len(batch.target)).sum())

    def evaluate(self, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        found = self.language.measure(self.data.valid, check=check)
        samples = []
        if self.language.decodes:
            decoding = DecodingConfig(sample=True, maximum=SAMPLE)
            with torch.autocast(self.language.device.type, enabled=False):
                (text,) = self.language.generate("", decoding, slide=True)
            samples = [{"sample": line} for line in text.text.strip("\n").split("\n")]
        return {name: value for name, value in found._asdict().items() if isinstance(value, float)}, samples

    @classmethod
    def open_for_page(cls, folder: str | Path, device: str) -> Opened:
        return page.open_run(folder, device)

    def facts(self) -> dict[str, Any]:
        language = self.language
        unit = {"length": language.length, "start": language.start, "apart": language.apart}
        return unit | {"documents": self.unit}

    def notes(self) -> list[str]:
        return [self.describe_data(f"{self.count:,} tokens", self.language.tokenizer)]
