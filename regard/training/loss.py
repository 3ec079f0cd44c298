"""What training minimises: cross entropy with label smoothing, summed over the real target tokens.

The output layer and the loss are one function here. The logits of a translator are its largest tensor by far, so they
are written once, read while a few rows of them are still in the cache, and overwritten by their own gradient. Only real
tokens are projected.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, LinearHead, Model
from regard.core.parallel import batch_rows
from regard.core.rows import pack
from regard.kernels.compiling import run_eagerly
from regard.kernels.cross_entropy import IGNORED, cross_entropy


class Loss(NamedTuple):
    """Sums over the real target tokens: divide by `tokens`. `plain` carries no gradient."""

    total: Tensor  # with label smoothing: what is minimised
    plain: Tensor  # -log p(token), without label smoothing: what perplexity is computed from
    tokens: Tensor  # their number
    auxiliary_loss: Tensor | None = None  # of the layers, already a mean
    statistics: dict[str, Tensor] | None = None  # of the layers, by name, without gradient


def translation_loss(model: Model, batch: Any, label_smoothing: float = 0.0) -> Loss:
    """The loss of a sequence-to-sequence model on a batch (source, source_keep, target_in, target_out, target_keep)."""
    options = {"keep": batch.source_keep, "target_keep": batch.target_keep}
    return _loss(model, (batch.source, batch.target_in), options, batch.target_out, batch.target_keep, label_smoothing)


def next_token_loss(
    model: Model,
    batch: Any,
    label_smoothing: float = 0.0,
    *,
    ignores: bool = False,
    prefix: int | Tensor | None = None,
) -> Loss:
    """The loss of a language model on a batch (tokens, target, keep). `ignores`: some targets are IGNORED. `prefix` is
    for models that predict the last tokens of a row only (Perceiver AR): the number of tokens of each row that are only
    read; None: all but as many as there are latents."""
    keep, target, options = batch.keep, batch.target, {"keep": batch.keep}
    latents: int | None = getattr(model, "predicts_last", None)
    if latents is not None:
        options["prefix"] = prefix
        if prefix is None:
            target, ignores = ignore_all_but_last(target, keep, latents), True
    return _loss(model, (batch.tokens,), options, target, keep, label_smoothing, ignores)


def ignore_all_but_last(target: Tensor, keep: Tensor | None, count: int) -> Tensor:
    """Targets [B, T], padded on the right, with all but the last `count` real ones of each row IGNORED."""
    places = torch.arange(target.shape[1], device=target.device)
    lengths = target.shape[1] if keep is None else keep.sum(1, keepdim=True)
    return torch.where(places < lengths - count, IGNORED, target)


def masked_token_loss(model: Model, batch: Any, label_smoothing: float = 0.0) -> Loss:
    """The loss of a masked language model on a batch (tokens, keep, places, targets): only these places are projected.
    Rows are padded on the right."""
    _check_label_smoothing(label_smoothing)
    head = cast(LinearHead, model)
    x, auxiliary, statistics = head.hidden(batch.tokens, keep=batch.keep)
    x = x.gather(1, batch.places[..., None].expand(-1, -1, x.shape[2])).flatten(0, 1)
    target, ignores = batch.targets.flatten(), x.is_cuda
    if not ignores:
        counted = target != IGNORED
        x, target = x[counted], target[counted]
    total, plain = projected_cross_entropy(
        x, head.output.weight, target, label_smoothing, head.output.bias, ignores=ignores
    )
    return Loss(total, plain, _count_targets(batch.targets, None), auxiliary, statistics)


def caption_loss(
    model: Model, batch: Any, label_smoothing: float = 0.0, *, captioning: float = 2.0, contrastive: float = 1.0
) -> Loss:
    """The loss of a captioner on a batch (images, tokens, target, keep), a caption for each of different pictures: a
    weighted sum of the loss of its words and of the contrastive loss, both means, times the number of words. `plain`
    is that of the words alone."""
    _check_label_smoothing(label_smoothing)
    captioner: Any = model
    words, pictures, captions = captioner.read(batch.images, batch.tokens, keep=batch.keep)
    scale = captioner.scale()
    loss = _project(captioner.output, words, batch.target, batch.keep, label_smoothing)
    contrast = contrastive_loss(batch_rows(pictures), batch_rows(captions), scale)
    total = captioning * loss.total + contrastive * contrast * loss.tokens
    statistics = {"contrastive.loss": contrast.detach(), "contrastive.scale": scale.detach()}
    return loss._replace(total=total, statistics=(loss.statistics or {}) | statistics)


def contrastive_loss(pictures: Tensor, captions: Tensor, scale: Tensor | float) -> Tensor:
    """Radford et al. 2021 (arXiv 2103.00020): vectors [B, E] of length 1, of which row i belongs to row i and to no
    other. The mean cross entropy of finding the caption of each picture, and the picture of each caption, among the
    rows of the batch by similarities times `scale`."""
    with torch.autocast(pictures.device.type, enabled=False):
        similarity = scale * _wide(pictures) @ _wide(captions).T
        own = torch.arange(len(similarity), device=similarity.device)
        return (F.cross_entropy(similarity, own) + F.cross_entropy(similarity.T, own)) / 2


def _loss(
    model: Model,
    inputs: tuple[Tensor, ...],
    options: dict[str, Any],
    target_ids: Tensor,
    keep: Tensor | None,
    label_smoothing: float,
    ignores: bool = False,
) -> Loss:
    """Of a model with a linear head only the logits of real tokens are computed; other models give all of them."""
    _check_label_smoothing(label_smoothing)
    if not hasattr(model, "hidden"):
        logits, auxiliary, statistics = model(*inputs, **options)
        real = target_ids.flatten() if keep is None else target_ids[keep]
        flat = logits.flatten(0, 1) if keep is None else logits[keep]
        total, plain = smoothed_cross_entropy(flat, real, label_smoothing)
        return Loss(total, plain, _count_targets(target_ids, keep), auxiliary, statistics)
    head = cast(LinearHead, model)
    return _project(head.output, head.hidden(*inputs, **options), target_ids, keep, label_smoothing, ignores)


def _project(
    output: nn.Linear,
    hidden: Hidden,
    target_ids: Tensor,
    keep: Tensor | None,
    label_smoothing: float,
    ignores: bool = False,
) -> Loss:
    """The loss of what the output layer reads; of real tokens only."""
    x, auxiliary, statistics = hidden
    x, target = x.flatten(0, 1), target_ids.flatten()
    if keep is not None:
        packed, rows = pack(target_ids[..., None], keep)
        target, real = packed.flatten(), rows.real()
        if real is not None and x.is_cuda:
            # all positions: to select the real ones, the host would have to wait for their number
            target, ignores = torch.where(real.flatten(), target, IGNORED), True
        elif real is not None:
            x, target = x[real.flatten()], target[real.flatten()]
    if ignores and not x.is_cuda:
        counted = target != IGNORED
        x, target, ignores = x[counted], target[counted], False
    total, plain = projected_cross_entropy(x, output.weight, target, label_smoothing, output.bias, ignores=ignores)
    return Loss(total, plain, _count_targets(target_ids, keep), auxiliary, statistics)


def smoothed_cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Logits [N, V], target [N] -> two sums over N, both in float32 (or better): of
    (1 - label_smoothing) * -log p(target) + label_smoothing * mean of -log p, and of -log p(target)."""
    _check_label_smoothing(label_smoothing)
    wide = _wide(logits)
    total = F.cross_entropy(wide, target, reduction="sum", label_smoothing=label_smoothing, ignore_index=IGNORED)
    with torch.no_grad():
        plain = (
            total.detach()
            if label_smoothing == 0
            else F.cross_entropy(wide.detach(), target, reduction="sum", ignore_index=IGNORED)
        )
    return total, plain


# A compiler would unroll the chunks, anew for each number of tokens, and turn in-place writes into copies.
@run_eagerly
def projected_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    bias: Tensor | None = None,
    *,
    ignores: bool = False,
) -> tuple[Tensor, Tensor]:
    """`smoothed_cross_entropy` of the logits x [N, E] @ weight [V, E]^T + bias. `ignores`: some targets are IGNORED."""
    _check_label_smoothing(label_smoothing)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return cast(
        tuple[Tensor, Tensor],
        _ProjectedCrossEntropy.apply(x, weight, bias, target, label_smoothing, ignores, torch.is_grad_enabled()),
    )


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The logits become the loss, and in place their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        label_smoothing: float,
        ignores: bool,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, weight, bias)
        total, plain = cross_entropy(logits, target, label_smoothing, ignores=ignores, trains=trains)
        if trains:
            ctx.save_for_backward(x, weight, logits)
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        x, weight, slope = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            _scaled(slope @ weight, grad) if needs_x else None,
            _scaled(slope.t() @ x, grad) if needs_weight else None,
            _scaled(slope.sum(0), grad) if needs_bias else None,
            None,
            None,
            None,
            None,
        )


def _scaled(product: Tensor, factor: Tensor) -> Tensor:
    """Multiplied in the dtype of the factor: a loss scale can be too large for half precision."""
    return product.mul_(factor) if product.dtype == factor.dtype else (product.to(factor.dtype) * factor).to(product)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _count_targets(target: Tensor, keep: Tensor | None) -> Tensor:
    real = target != IGNORED
    return (real if keep is None else real & keep).sum()


def _check_label_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
