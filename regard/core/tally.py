"""Counts the work of whatever runs inside it: operations, elements written, the largest tensor."""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


def _flash_flops(q, k, v, *_, out_shape=None, **__):
    B, H, T, D = q
    return 2 * B * H * T * k[2] * (D + v[3])


def _flash_backward_flops(grad, q, k, v, *_, out_shape=None, **__):
    return 5 * _flash_flops(q, k, v) // 2


def _lstm_flops(x, weight_ih, weight_hh, *_, out_shape=None, **__):
    return _cudnn_flops(x, (weight_ih, weight_hh))


def _lstm_backward_flops(x, weight_ih, weight_hh, *_, out_shape=None, **__):
    return 2 * _lstm_flops(x, weight_ih, weight_hh)


def _cudnn_flops(x, weights, *_, out_shape=None, **__):
    # of each token every matrix is multiplied once
    return 2 * math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _cudnn_backward_flops(x, weights, *_, out_shape=None, **__):
    return 2 * _cudnn_flops(x, weights)


# the counter of torch does not know the CPU's kernel of attention, nor recurrent layers in one operator
FLASH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward_flops,
    torch.ops.aten.mkldnn_rnn_layer: _lstm_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: _lstm_backward_flops,
    torch.ops.aten._cudnn_rnn: _cudnn_flops,
    torch.ops.aten._cudnn_rnn_backward: _cudnn_backward_flops,
}
FLOPS = FlopCounterMode(display=False, custom_mapping=FLASH).flop_registry


@functools.cache
def _writes(function) -> str:
    """What an operator writes: "new" tensors, its "first" argument, or nothing, as a view."""
    returns = [result.alias_info for result in function._schema.returns]
    if all(alias is None for alias in returns):
        return "new"
    return "first" if any(alias is not None and alias.is_write for alias in returns) else ""


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors of a state, or of what an operator returns."""
    if isinstance(state, Tensor):
        return [state]
    return [tensor for part in state for tensor in tensors_of(part)] if isinstance(state, tuple) else []


class Tally(TorchDispatchMode):
    """Operations as torch's counter counts them, which is much slower; elements written by operators that are no views,
    and the largest single output in bytes."""

    def __init__(self):
        super().__init__()
        self.flops = 0
        self.written = 0
        self.largest = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        writes = _writes(function)
        if writes == "new":
            for tensor in tensors_of(tuple(out) if isinstance(out, list | tuple) else out):
                self.written += tensor.numel()
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        elif writes == "first":
            self.written += sum(tensor.numel() for tensor in tensors_of(tuple(args[:1])))
        formula = FLOPS.get(function.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out
