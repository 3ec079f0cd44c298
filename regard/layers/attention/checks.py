"""Bad input to a layer, refused in words at the public methods: what, got, expected, what to do."""

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.core.rows import check_pairs
from regard.core.shape import Shape
from regard.core.state import same_form, state_form


class Layer(Protocol):
    """What is asked of an attention layer here."""

    facts: Any
    shape: Shape

    def parameters(self) -> Iterator[Tensor]: ...

    def start(self, batch: int, *, memory: Tensor | None = None) -> Any: ...


# the form of a layer's states, once it was asked for
_FORMS: WeakKeyDictionary[Layer, tuple] = WeakKeyDictionary()


def check_inputs(
    layer: Layer, x: Tensor, keep: Tensor | None, memory: Tensor | None, memory_keep: Tensor | None
) -> None:
    check_tokens(layer, x, keep, "x", "keep", layer.shape.width)
    if layer.shape.role == "cross":
        check_memory(layer, memory, memory_keep, len(x))
    elif memory is not None or memory_keep is not None:
        refuse_memory(layer)


def allowed_pairs(layer: Layer, mask: Tensor | None, B: int, T: int, S: int) -> Tensor | None:
    """An explicit mask as [1 or B, T, S], or words for why there can be none."""
    if mask is None:
        return None
    if not layer.facts.pairs:
        raise ValueError(
            f"attention {layer.facts.name!r} takes no mask: it does not weigh pairs of tokens one by one; say what "
            "is padding with keep, or use one that does, such as softmax"
        )
    return check_pairs(mask, B, T, S)


def check_memory(layer: Layer, memory: Tensor | None, keep: Tensor | None, batch: int) -> None:
    if memory is None:
        raise ValueError("role 'cross' needs memory=[B, S, E], the sequence to attend to")
    check_tokens(layer, memory, keep, "memory", "memory_keep", layer.shape.memory_width)
    if len(memory) != batch:
        raise ValueError(f"memory has {len(memory)} rows, expected {batch}, as many as the queries")


def refuse_memory(layer: Layer) -> None:
    advice = " Build it with role='cross'." if "cross" in layer.facts.roles else " It has no cross-attention."
    raise ValueError(
        f"memory was given to attention {layer.facts.name!r} of role {layer.shape.role!r}: it reads x only.{advice}"
    )


def check_tokens(layer: Layer, x: Tensor, keep: Tensor | None, name: str, keep_name: str, width: int) -> None:
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width or 0 in x.shape:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be [batch >= 1, tokens >= 1, {width}], got {got}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must hold floating-point vectors, got {x.dtype}: embed token ids first")
    # a mixer may have no parameters, and then takes every type
    dtype = next((parameter.dtype for parameter in layer.parameters()), x.dtype)
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{name} is {x.dtype} and the layer {dtype}: convert one with .to(...)")
    if keep is None:
        return
    if layer.facts.padding == "none":
        raise ValueError(f"attention {layer.facts.name!r} cannot skip padding: leave {keep_name} out")
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise ValueError(
            f"{keep_name} must be boolean, True = real token, got {got}: write {keep_name}={keep_name} != 0"
        )
    if keep.shape != x.shape[:2]:
        raise ValueError(f"{keep_name} must be {list(x.shape[:2])}, one flag a token of {name}, got {list(keep.shape)}")


def check_state(layer: Layer, state: Any, batch: int) -> None:
    progress = getattr(state, "progress", None)
    own = getattr(state, "count", None) if layer.shape.role == "cross" else getattr(progress, "length", None)
    if not isinstance(own, Tensor):
        raise ValueError(
            f"expected a state from start() of a layer of role {layer.shape.role!r}, got {type(state).__name__}"
        )
    if layer.shape.role == "cross" and batch % len(own):
        raise ValueError(f"x has {batch} rows and the state {len(own)}: a cross state of B rows serves k * B queries")
    if layer.shape.role != "cross" and batch != len(own):
        raise ValueError(f"x has {batch} rows and the state {len(own)}: use select(state, rows) to match them")
    check_form(layer, state)


def check_form(layer: Layer, state: Any) -> None:
    """Refuses the state of a mechanism that keeps other things; compiled code has none of that."""
    if torch.compiler.is_compiling():
        return
    form = _FORMS.get(layer)
    if form is None:
        size = (1, 1, layer.shape.memory_width)
        memory = next(layer.parameters()).new_zeros(size) if layer.shape.role == "cross" else None
        form = _FORMS[layer] = state_form(layer.start(1, memory=memory))
    found = state_form(state)
    if not same_form(found, form):
        whose = f"a {found[0].__name__}" + (f" of {found[1]!r}" if found[1] else "")
        raise ValueError(
            f"the state is not one of attention {layer.facts.name!r}, which keeps a {form[0].__name__}, but {whose}: "
            f"take the state from start() of this layer"
        )


def check_decodes(layer: Layer) -> None:
    if layer.shape.role == "self":
        raise ValueError("role 'self' sees the whole sequence and has no state: build with role='causal' to decode")
