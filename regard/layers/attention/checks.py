"""Bad input to a layer, refused in words at the public methods: what, got, expected, what to do."""

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.core.rows import check_pairs
from regard.core.shape import Shape
from regard.core.state import StateForm, same_form, state_form
from regard.layers.position.base import Position
from regard.spec import POSITIONS

if TYPE_CHECKING:
    from regard.layers.attention.base import Attention


# the form of a layer's states, once it was asked for
_FORMS: "WeakKeyDictionary[Attention, StateForm]" = WeakKeyDictionary()


def check_inputs(
    layer: "Attention", x: Tensor, keep: Tensor | None, memory: Tensor | None, memory_keep: Tensor | None
) -> None:
    """Refuses what `forward` cannot read. Behind it, a layer has a memory exactly where its role is "cross"."""
    check_tokens(layer, x, keep, "x", "keep", layer.shape.width)
    if layer.shape.role == "cross":
        check_memory(layer, memory, memory_keep, len(x))
    elif memory is not None or memory_keep is not None:
        refuse_memory(layer)


def allowed_pairs(layer: "Attention", mask: Tensor | None, B: int, T: int, S: int) -> Tensor | None:
    """An explicit mask as [1 or B, T, S], or words for why there can be none."""
    if mask is None:
        return None
    if not layer.facts.pairs:
        raise ValueError(
            f"attention {layer.facts.name!r} takes no mask: it does not weigh pairs of tokens one by one; say what "
            "is padding with keep, or use one that does, such as softmax"
        )
    return check_pairs(mask, B, T, S)


def check_memory(layer: "Attention", memory: Tensor | None, keep: Tensor | None, batch: int) -> None:
    if memory is None:
        raise ValueError("role 'cross' needs memory=[B, S, E], the sequence to attend to")
    check_tokens(layer, memory, keep, "memory", "memory_keep", layer.shape.memory_width)
    if len(memory) != batch:
        raise ValueError(f"memory has {len(memory)} rows, expected {batch}, as many as the queries")


def refuse_memory(layer: "Attention") -> None:
    advice = " Build it with role='cross'." if "cross" in layer.facts.roles else " It has no cross-attention."
    raise ValueError(
        f"memory was given to attention {layer.facts.name!r} of role {layer.shape.role!r}: it reads x only.{advice}"
    )


def check_tokens(layer: "Attention", x: Tensor, keep: Tensor | None, name: str, keep_name: str, width: int) -> None:
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
        raise ValueError(
            f"{keep_name} must be {list(x.shape[:2])}, one flag per token of {name}, got {list(keep.shape)}"
        )


def check_state(layer: "Attention", state: Any, batch: int) -> None:
    progress = getattr(state, "progress", None)
    lengths = getattr(state, "count", None) if layer.shape.role == "cross" else getattr(progress, "length", None)
    if not isinstance(lengths, Tensor):
        raise ValueError(
            f"expected a state from start() of a layer of role {layer.shape.role!r}, got {type(state).__name__}"
        )
    rows = len(lengths)
    if layer.shape.role == "cross" and batch % rows:
        raise ValueError(f"x has {batch} rows and the state {rows}: a cross state of B rows serves k * B queries")
    if layer.shape.role != "cross" and batch != rows:
        raise ValueError(f"x has {batch} rows and the state {rows}: use select(state, rows) to match them")
    check_form(layer, state)


def check_form(layer: "Attention", state: Any) -> None:
    """Refuses the state of another mechanism; compiled code skips the check."""
    if torch.compiler.is_compiling():
        return
    expected = _FORMS.get(layer)
    if expected is None:
        size = (1, 1, layer.shape.memory_width)
        memory = next(layer.parameters()).new_zeros(size) if layer.shape.role == "cross" else None
        expected = _FORMS[layer] = state_form(layer.start(1, memory=memory))
    form = state_form(state)
    if not same_form(form, expected):
        got = f"a {form.kind.__name__}" + (f" of {form.mechanism!r}" if form.mechanism else "")
        raise ValueError(
            f"the state is not one of attention {layer.facts.name!r}: got {got}, expected a {expected.kind.__name__}; "
            f"take the state from start() of this layer"
        )


def input_position(name: str, shape: Shape, why: str) -> Position | None:
    """The position scheme of a mechanism that can only add positions to its tokens; `why` is said of any other."""
    if shape.position is None:
        return None
    position = POSITIONS.build(shape.position, shape)
    if position.facts.kind != "input":
        raise ValueError(
            f"attention {name!r} cannot take position {position.facts.name!r}: {why}; use one that is added to the "
            "tokens, such as sinusoidal"
        )
    return position


def check_decodes(layer: "Attention") -> None:
    if layer.shape.role == "self":
        raise ValueError("role 'self' sees the whole sequence and has no state: build with role='causal' to decode")
