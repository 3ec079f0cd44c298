"""Our attention inside Hugging Face models: `attn_implementation="regard:local(window=128)"`.

    from regard.interop.transformers import register

    register(["local(window=128)", "performer"])  # register() alone: every suitable mechanism, with its defaults
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="regard:local(window=128)")

Hugging Face projects queries, keys and values, applies positions and keeps the cache. A mechanism only attends, so it
must be a function of q, k and v without parameters of its own. Positions count real tokens: padding on the left, on the
right or between them changes nothing. With a cache the queries are the last tokens of the keys.

A mask function is registered with each mechanism: without one Hugging Face passes no mask at all, and padding would
count. What a mechanism cannot honour is refused: the model's own windows and masks, packed sequences, static caches,
attention dropout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard import api
from regard.spec import ATTENTION, parse

PREFIX = "regard:"


def register(specs: str | Sequence[str] | None = None) -> list[str]:
    """Registers mechanisms with Hugging Face. Returns their names for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    chosen = suitable() if specs is None else [specs] if isinstance(specs, str) else list(specs)
    names = []
    for spec in chosen:
        _check(spec)
        names.append(PREFIX + spec)
        AttentionInterface.register(names[-1], _attention(spec))
        AttentionMaskInterface.register(names[-1], keep_mask)
    return names


def suitable() -> list[str]:
    """The mechanisms that are a function of q, k and v and need no option."""
    names = []
    for name in ATTENTION.names():
        try:
            _check(name)
        except ValueError:
            continue
        names.append(name)
    return names


def _check(spec: str) -> None:
    """Refuses an unknown mechanism, and one with parameters, which a Hugging Face model would not hold."""
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
    # further arguments for the masks of Hugging Face
    **rest: Any,
) -> Tensor | None:
    """The mask that `create_causal_mask` and its like pass to each layer: the real keys [B, S]; None: all."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "this Hugging Face model has a mask of its own (a sliding window, chunks, packed sequences), and a Regard "
            "mechanism cannot combine it with its pattern: remove it from the model's config, for example by "
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
        # further arguments that Hugging Face passes through all layers
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """query [B, H, T, D], key and value [B, G, S, D] -> [B, T, H, D]"""
        if dropout:
            raise ValueError(
                f"{PREFIX}{spec} has no attention dropout: set the dropout of the model's attention to 0 to train"
            )
        for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
            if rest.get(name) is not None:
                raise ValueError(
                    f"{PREFIX}{spec} does not support {name}, which this model needs: choose another model"
                )
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
    """Whether a Hugging Face layer that is not causal reads another sequence than its own."""
    named = "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False)
    return bool(named or getattr(module, "is_decoder", False))
