"""The callers of the search: an encoder-decoder that reads a source, a captioner that reads pictures, a decoder that
reads a prompt."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.core.numeric import take_tokens
from regard.decoding import captured
from regard.decoding.base import Coverage, DecodingConfig, Hypothesis
from regard.decoding.beam import Report, beam
from regard.decoding.greedy import Watch, search_greedily

# as in regard.data.tokenizer, of which decoding needs nothing else
PAD, BOS, EOS = 0, 2, 3
LONGEST_CAPTION = 50  # in tokens, where no maximum is set


@torch.inference_mode()
def decode(
    model: Any,
    source: Tensor,
    keep: Tensor | None = None,
    config: DecodingConfig | None = None,
    *,
    bos: int = BOS,
    eos: int = EOS,
    forbidden: tuple[int, ...] = (PAD, BOS),
    needed: list[int] | None = None,
    report: Report | None = None,
) -> list[list[Hypothesis]]:
    """Source ids [B, S] -> the n best outputs of each row, best first (fewer where there are not that many).

    A sentence gets the same output alone and in any batch; samples too, which depend on the seed and the sentence.
    `needed` are the numbers of outputs of a beam, where some sentences need fewer than the n best and are done earlier.
    `report(row, outputs)` is called as soon as a row is done, by a beam.

    >>> [[best]] = decode(model.eval(), source[:1], config=DecodingConfig(beam=4))
    """
    config = config or DecodingConfig()
    lengths, keep = _lengths(model, source, keep, "source")
    if not lengths:
        return []
    limits = [config.limit(length) for length in lengths]
    state = model.start(len(source), memory=model.encode(source, keep=keep), capacity=max(limits) + 1)
    first, coverage = torch.full_like(source[:, :1], bos), None
    if config.coverage:
        if not hasattr(model, "extend_with_attention"):
            raise ValueError("coverage needs a model with attention to its source: leave coverage at 0")
        logits, state, weights = model.extend_with_attention(first, state)
        steps, ends = torch.arange(weights.shape[1]), torch.tensor(lengths)
        coverage = Coverage(weights, (steps < ends[:, None]).to(weights.device))
    else:
        logits, state = model.extend(first, state)
    options = {"eos": eos, "forbidden": forbidden, "coverage": coverage, "needed": needed, "report": report}
    options["draws"] = uniform_draws(_real(source, keep), limits, config).to(source.device) if config.sample else None
    return search(model, logits[:, -1], state, limits, config, **options)


@torch.inference_mode()
def caption(
    model: Any,
    images: Tensor,
    config: DecodingConfig | None = None,
    *,
    bos: int = BOS,
    eos: int = EOS,
    forbidden: tuple[int, ...] = (PAD, BOS),
) -> list[list[Hypothesis]]:
    """Pictures [B, C, h, w] -> the n best captions of each, as `decode` gives them. A picture says nothing about the
    length of its caption: `maximum` bounds it, 50 tokens by default.

    >>> [[best], [other]] = caption(captioner.eval(), images, DecodingConfig(beam=4, maximum=20))
    """
    config = config or DecodingConfig()
    _check_eval(model)
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(f"images must be fractions [batch, channels, h, w], got {images.dtype} {list(images.shape)}")
    if config.coverage:
        raise ValueError("coverage is for translations: a caption need not name all of a picture; leave it at 0")
    if not len(images):
        return []
    limits = [max(config.maximum or LONGEST_CAPTION, config.minimum)] * len(images)
    state = model.start(len(images), memory=model.encode(images), capacity=limits[0] + 1)
    first = torch.full((len(images), 1), bos, device=images.device)
    logits, state = model.extend(first, state)
    draws = None
    if config.sample:
        keys = [hashlib.sha256(image.float().cpu().numpy().tobytes()).hexdigest() for image in images]
        draws = uniform_draws(keys, limits, config).to(images.device)
    return search(model, logits[:, -1], state, limits, config, eos=eos, forbidden=forbidden, draws=draws)


@torch.inference_mode()
def generate(
    model: Any,
    prompt: Tensor,
    keep: Tensor | None = None,
    config: DecodingConfig | None = None,
    *,
    eos: int = EOS,
    forbidden: tuple[int, ...] = (PAD, BOS),
    watch: Watch | None = None,
) -> list[list[Hypothesis]]:
    """Prompt ids [B, T], with any padding -> the n best continuations of each row, as `decode` gives them. The limits
    take the prompt for the source, so set `maximum`. `watch(row, sample, token)` is called for each token as soon as it
    is chosen, and ends the output where it returns True: to show text as it comes, and to stop at a word."""
    config = config or DecodingConfig()
    lengths, keep = _lengths(model, prompt, keep, "prompt")
    if not lengths:
        return []
    if not min(lengths):
        raise ValueError(f"prompt {lengths.index(0)} is empty: begin every prompt with bos at least")
    limits = [config.limit(length) for length in lengths]
    state = model.start(len(prompt), capacity=prompt.shape[1] + max(limits))
    logits, state = read_prompt(model, prompt, state, keep)
    known = prompt if keep is None else torch.where(keep, prompt, prompt.gather(1, _last(keep)[:, None]))
    draws = uniform_draws(_real(prompt, keep), limits, config).to(prompt.device) if config.sample else None
    used = torch.zeros_like(logits, dtype=torch.bool)
    used.scatter_(1, known, True)
    options = {"eos": eos, "forbidden": forbidden, "draws": draws, "used": used, "watch": watch}
    return search(model, logits, state, limits, config, **options)


@torch.inference_mode()
def search(
    model: Any,
    logits: Tensor,
    state: Any,
    limits: list[int],
    config: DecodingConfig,
    *,
    eos: int = EOS,
    forbidden: tuple[int, ...] = (PAD, BOS),
    draws: Tensor | None = None,
    used: Tensor | None = None,
    watch: Watch | None = None,
    coverage: Coverage | None = None,
    needed: list[int] | None = None,
    report: Report | None = None,
) -> list[list[Hypothesis]]:
    """The search itself, from the logits [B, V] of the first token and the state that gave them, one row per sentence.
    `limits` are the maximum numbers of tokens; `draws` [B, nbest, max(limits) + 1] in [0, 1) decide the samples; `used`
    [B, V] are the tokens of the prompt; `coverage` is that of the first token; `needed` are numbers of hypotheses of a
    beam, at most nbest; `report` is told the hypotheses of each sentence that a beam is done with."""
    V = logits.shape[1]
    if eos in forbidden or not all(0 <= token < V for token in (eos, *forbidden)):
        raise ValueError(f"eos {eos} and forbidden {forbidden} must be different ids from 0 to {V - 1}")
    if config.sample != (draws is not None):
        raise ValueError("draws are needed for sampling, and only there")
    if config.sample or config.beam == 1:
        fixed = config.graphs and max(limits) > captured.EVERY and captured.refusal(model, logits) is None
        way = captured.search_greedily if fixed else search_greedily
        pool = way(model, logits, state, limits, config, eos, forbidden, draws, used, watch)
    else:
        if watch is not None:
            raise ValueError("watch sees tokens that stay: use sample=True or beam=1")
        pool = beam(model, logits, state, limits, config, eos, forbidden, coverage, needed, report)
        if needed is not None:
            return [found[:count] for found, count in zip(pool.lists(), needed, strict=True)]
    return pool.lists()


def read_prompt(model: Any, prompt: Tensor, state: Any, keep: Tensor | None) -> tuple[Tensor, Any]:
    """The logits [B, V] of the token after each prompt, and the state there."""
    if hasattr(model, "prefill"):
        return model.prefill(prompt, state, keep=keep)
    logits, state = model.extend(prompt, state, keep=keep)
    return logits[:, -1] if keep is None else take_tokens(logits, _last(keep)[:, None])[:, 0], state


def _last(keep: Tensor) -> Tensor:
    """[B]: where the last real token of each row stands."""
    return torch.where(keep, torch.arange(keep.shape[1], device=keep.device), 0).amax(1)


def _lengths(model: Any, ids: Tensor, keep: Tensor | None, name: str) -> tuple[list[int], Tensor | None]:
    """The number of real tokens of each row, and `keep` where there is any padding."""
    _check_eval(model)
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(f"{name} must be whole numbers [batch, tokens], got {ids.dtype} {list(ids.shape)}")
    if keep is None:
        return [ids.shape[1]] * len(ids), None
    if keep.dtype != torch.bool or keep.shape != ids.shape:
        expected = list(ids.shape)
        raise ValueError(f"keep must be boolean {expected}, True = real token, got {keep.dtype} {list(keep.shape)}")
    lengths = keep.sum(1).tolist()
    return lengths, None if all(length == ids.shape[1] for length in lengths) else keep


def _check_eval(model: Any) -> None:
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes outputs random: call model.eval() first")


def uniform_draws(keys: Sequence[Any], limits: list[int], config: DecodingConfig) -> Tensor:
    """Uniform numbers [B, nbest, L] from a generator of each sentence, seeded by the seed and a key: its tokens."""
    draws = torch.zeros(len(keys), config.nbest, max(limits) + 1)
    for row, (key, limit) in enumerate(zip(keys, limits, strict=True)):
        digest = hashlib.blake2b(repr((config.seed, key)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        draws[row, :, : limit + 1] = torch.rand(config.nbest, limit + 1, generator=generator)
    return draws


def _real(ids: Tensor, keep: Tensor | None) -> list[list[int]]:
    """The real tokens of each row."""
    keep = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep
    rows = zip(ids.tolist(), keep.tolist(), strict=True)
    return [[token for token, is_real in zip(*row, strict=True) if is_real] for row in rows]
