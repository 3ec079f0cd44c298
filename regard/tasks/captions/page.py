"""What the page shows of a captioner: its image encoder, and captions word by word with where each word looks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.captioned import Captioned
from regard.tasks.captions.captioner import Captioner
from regard.tasks.opened import CaptionedImage, OpenedImages, Sample
from regard.tasks.samples import FILE, MOST, read_samples, write_samples
from regard.training.run import Run


def open_run(folder: str | Path, device: str) -> OpenedImages:
    """Opens a run folder."""
    captioner = Captioner.load(folder, device=device)
    return opened(captioner, read_samples(Run.open(folder), captioner.size, captioner.model.config.channels))


def opened(captioner: Captioner, samples: tuple[Sample, ...] = ()) -> OpenedImages:
    """What the page shows of a captioner."""
    model: Any = captioner.model

    def caption(pixels: Tensor, text: str) -> CaptionedImage:
        return write_caption(captioner, pixels, text)

    return OpenedImages(
        "captions",
        model.encoder,
        captioner.size,
        model.config.channels,
        captioner.images,
        samples=samples,
        caption=caption,
    )


def write_caption(captioner: Captioner, pixels: Tensor, text: str) -> CaptionedImage:
    """How the caption of a picture, uint8 [1, C, h, w], is written token by token; without a text, the model's own."""
    model: Any = captioner.model
    tokenizer, images = captioner.tokenizer, captioner.images(pixels)
    ids = captioner.encode([text])[0][1:] if text.strip() else captioner.caption(pixels)[0][0].hypothesis.ids
    # the token before each is what looks when it is written
    tokens = torch.tensor([[tokenizer.bos, *ids]], device=images.device)
    maps = model.maps(images, tokens, place="patches")
    return CaptionedImage(captioner.text(ids), tokenizer.tokens([*ids, tokenizer.eos]), [part[0] for part in maps])


def kept_files(valid: Captioned) -> dict[str, str]:
    """What a run keeps to be shown with: its first validation pictures, each with one of its captions."""
    pairs = zip(valid.pixels[:MOST], valid.captions[:MOST], strict=True)
    return {FILE: write_samples([Sample(pixels, texts[0]) for pixels, texts in pairs])}
