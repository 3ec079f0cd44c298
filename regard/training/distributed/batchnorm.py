"""Batch norms whose statistics are those of the whole batch, however many processes share it."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from regard.core.parallel import batch_sum, is_spread


def synchronise_batch_norms(model: nn.Module) -> None:
    """Makes the batch norms of a model count the rows of all processes: on a GPU they become PyTorch's SyncBatchNorm,
    which needs one, elsewhere ours. Names and tensors stay."""
    for name, part in model.named_children():
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            kind = nn.SyncBatchNorm if next(part.parameters()).is_cuda else SpreadBatchNorm
            setattr(model, name, _turned_into(kind, part))
        else:
            synchronise_batch_norms(part)


def _turned_into(kind: type[_BatchNorm], norm: _BatchNorm) -> nn.Module:
    made = kind(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    made._parameters, made._buffers, made.training = norm._parameters, norm._buffers, norm.training
    return made


class SpreadBatchNorm(_BatchNorm):
    """Ioffe and Szegedy 2015 (arXiv 1502.03167), over the rows of all processes, on any device."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected [batch, channels, ...], got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and is_spread()):
            return super().forward(input)
        over = [0, *range(2, input.dim())]
        shape = (1, -1, *[1] * (input.dim() - 2))
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        each = x.numel() / x.shape[1]
        count = batch_sum(torch.full((), each, dtype=x.dtype, device=x.device))
        mean = batch_sum(x.sum(over)) / count
        centred = x - mean.view(shape)
        variance = batch_sum(centred.square().sum(over)) / count
        with torch.no_grad():
            assert self.running_mean is not None, "it tracks its statistics"
            assert self.running_var is not None, "it tracks its statistics"
            assert self.num_batches_tracked is not None, "it tracks its statistics"
            self.num_batches_tracked += 1
            step = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), step)
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), step)
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            y = torch.addcmul(self.bias.view(shape), y, self.weight.view(shape))
        return y.to(input.dtype)
