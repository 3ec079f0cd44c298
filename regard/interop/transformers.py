"""Our attention inside Hugging Face models: `attn_implementation="regard:local(window=128)"`.

    from regard.interop.transformers import register

    register(["local(window=128)", "performer"])  # register() alone: every suitable mechanism, with its defaults
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="regard:local(window=128)")

Hugging Face projects queries, keys and values, puts positions in and keeps the cache; a mechanism only mixes. So those
suit that are a function of q, k and v, without parameters of their own. Positions count real tokens: padding on the
left, on the right or between changes nothing. With a cache the queries are the last tokens of the keys.

A mask function goes with each: without one Hugging Face hands over no mask at all, and padding would count. What cannot
be honoured is refused in words: windows and masks of the model's own, packed sequences, static caches, attention
dropout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard import api
from regard.spec import ATTENTION, parse

PREFIX = "regard:"


def register(specs: str | Sequence[str] | None = None) -> list[str]:
    """Makes mechanisms known to Hugging Face, and returns the names to give as `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    given = suitable() if specs is None else [specs] if isinstance(specs, str) else list(specs)
    names = []
    for spec in given:
        _check(spec)
        names.append(PREFIX + spec)
        AttentionInterface.register(names[-1], _attention(spec))
        AttentionMaskInterface.register(names[-1], keep_mask)
    return names


def suitable() -> list[str]:
    """The mechanisms that are a function of q, k and v and need no option."""
    found = []
    for name in ATTENTION.names():
        try:
            _check(name)
        except ValueError:
            continue
        found.append(name)
    return found


def _check(spec: str) -> None:
    """Refuses what is unknown, or has parameters that a model of theirs would not hold."""
    roles = api.facts(spec).roles
    heads = parse(spec).heads
    api._bare(str(parse(spec)), heads, heads, 8, roles[0], torch.float32, torch.device("cpu"))


def keep_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    # what Hugging Face also tells, of its own masks
    **rest: Any,
) -> Tensor | None:
    """What `create_causal_mask` and its like hand on to each layer: which keys are real, [B, S]; None: all."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "a Hugging Face model asks for a mask of its own (a sliding window, chunks, packed sequences) beside a "
            "mechanism of Regard, which brings its own pattern: take that out of the model's config, such as "
            "sliding_window=None, and give an attention_mask instead of packing"
        )
    seen = int(q_offset) + q_length
    if kv_offset or (mask_function is causal_mask_function and kv_length != seen):
        raise ValueError(
            f"the cache holds {kv_length} keys for {seen} tokens: only caches that grow with the text are honoured, "
            "such as DynamicCache, not static or sliding ones"
        )
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < kv_length:
        raise ValueError(
            f"attention_mask must be [batch, {kv_length}], 1 = real token, of all tokens so far; "
            f"got {list(attention_mask.shape)}"
        )
    return attention_mask[:, :kv_length].to(torch.bool)


def _attention(spec: str) -> Callable:
    roles = api.facts(spec).roles

    def regard_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        # what Hugging Face hands through all layers
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """[B, H, T, D], twice [B, G, S, D] -> [B, T, H, D]"""
        if dropout:
            raise ValueError(
                f"{PREFIX}{spec} has no dropout of attention weights: set the model's attention dropout to 0 to train"
            )
        for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
            if rest.get(name) is not None:
                raise ValueError(f"{PREFIX}{spec} does not know {name}: this model needs it, so it cannot run with it")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"{PREFIX}{spec} takes an attention_mask [batch, tokens], 1 = real token; "
                f"got {list(attention_mask.shape)}"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        cross = not causal and crosses(module)
        if cross and "cross" not in roles:
            raise ValueError(f"{PREFIX}{spec} has no cross-attention, which {type(module).__name__} asks for")
        if scaling is not None and scaling != query.shape[3] ** -0.5:
            query = query * (scaling * query.shape[3] ** 0.5)
        y = api.attend(spec, query, key, value, keep=attention_mask, causal=causal, cross=cross)
        return y.transpose(1, 2), None

    return regard_attention


def crosses(module: nn.Module) -> bool:
    """Whether a layer of theirs that is not causal reads another sequence than its own."""
    named = "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False)
    return bool(named or getattr(module, "is_decoder", False))
