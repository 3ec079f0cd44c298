"""`torch.nn.MultiheadAttention` to a layer of ours and back, with the same outputs."""

import torch
from torch import Tensor, nn

from regard.api import facts
from regard.core.shape import Role, Shape
from regard.layers.attention.base import Attention
from regard.layers.attention.projected import Projected
from regard.layers.attention.softmax import Softmax
from regard.spec import ATTENTION, Spec


def from_torch(
    module: nn.MultiheadAttention, *, attention: str | Spec = "softmax", role: Role | None = None
) -> Attention:
    """A layer with the weights of a `torch.nn.MultiheadAttention`.

    Args:
        module: the layer to read; it stays as it is. Its attention dropout is taken over where the mechanism has any.
        attention: the mechanism to put the weights into; with "softmax" the outputs are those of `module`.
        role: "self" (query, key and value are one sequence), "causal" (with a causal mask) or "cross" (keys and values
            are a memory). By default "self", or "cross" where the module has a `kdim` of its own.

    The layer takes [B, T, width] whatever the module's `batch_first`, and `keep` (True = real token) where the module
    takes `key_padding_mask` (True = padding).

    >>> layer = regard.from_torch(nn.MultiheadAttention(512, 8, batch_first=True), role="causal")
    >>> layer = regard.from_torch(module, attention="local(window=256)")
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise ValueError(f"from_torch reads a torch.nn.MultiheadAttention, got {type(module).__name__}")
    _check(module)
    wide = module.kdim != module.embed_dim
    role = role or ("cross" if wide else "self")
    if wide and role != "cross":
        raise ValueError(f"kdim {module.kdim} beside embed_dim {module.embed_dim} is for role 'cross', got {role!r}")
    shape = Shape.of(
        width=module.embed_dim,
        heads=module.num_heads,
        role=role,
        memory_width=module.kdim if role == "cross" else None,
        bias=module.in_proj_bias is not None,
        dropout=module.dropout if facts(attention).pairs else 0.0,
    )
    layer = ATTENTION.build(attention, shape)
    if not isinstance(layer, Projected) or set(layer.project) != {"q", "k", "v"}:
        raise ValueError(
            f"attention {str(attention)!r} has other projections than queries, keys and values: "
            "choose one that has these, such as softmax, local or linear"
        )
    layer = layer.to(module.out_proj.weight).train(module.training)
    layer.take_projections(_parts(module))
    return layer


def to_torch(layer: Attention, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """A `torch.nn.MultiheadAttention` with the weights of a softmax layer. Give it `is_causal=True` with a causal mask
    where the layer is causal, and `key_padding_mask=~keep`.

    >>> module = regard.to_torch(regard.attention("softmax", width=512, heads=8, bias=True))
    """
    if not isinstance(layer, Softmax):
        got = layer.facts.name if isinstance(layer, Attention) else type(layer).__name__
        raise ValueError(f"to_torch writes attention 'softmax', the only one PyTorch's layer has; got {got!r}")
    shape = layer.shape
    refused = {
        "kv_heads": shape.kv_heads != shape.heads,
        "head_width": shape.head_width * shape.heads != shape.width,
        "out_width": shape.out_width != shape.width,
        "position": layer.position is not None,
        f"bias={shape.bias!r}": not isinstance(shape.bias, bool),
    }
    for name, so in refused.items():
        if so:
            raise ValueError(f"torch.nn.MultiheadAttention has no {name}: build the layer without, or keep it here")
    memory_width = shape.memory_width if shape.memory_width != shape.width else None
    module = nn.MultiheadAttention(
        shape.width,
        shape.heads,
        dropout=shape.dropout,
        bias=shape.bias is True,
        kdim=memory_width,
        vdim=memory_width,
        batch_first=batch_first,
    )
    module = module.to(layer.output.weight).train(layer.training)
    own = layer.projections()
    with torch.no_grad():
        for name, part in _parts(module).items():
            part.copy_(own[name])
    return module


def _check(module: nn.MultiheadAttention) -> None:
    if module.bias_k is not None:
        raise ValueError("add_bias_kv=True adds a learned key and value to each sequence, which no layer of Regard has")
    if module.add_zero_attn:
        raise ValueError("add_zero_attn=True adds a key of zeros to each sequence, which no layer of Regard has")
    if module.kdim != module.vdim:
        raise ValueError(
            f"kdim {module.kdim} and vdim {module.vdim} differ: a layer of Regard reads keys and values from one memory"
        )


def _parts(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """The weights and the biases by our names, as views of what the module holds."""
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.detach().chunk(3)
    parts = {f"{name}.weight": weight for name, weight in zip("qkv", weights, strict=True)}
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.detach().chunk(3)
        parts |= {f"{name}.bias": bias for name, bias in zip("qkv", biases, strict=True)}
        parts["output.bias"] = module.out_proj.bias
    return parts | {"output.weight": module.out_proj.weight}
