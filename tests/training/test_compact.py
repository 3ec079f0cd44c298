"""Weights in 8 bits."""

import torch

from regard.training.compact import compact, expand


def test_kernels_of_a_convolution_have_a_scale_for_each_channel():
    kernels, table = torch.randn(8, 96, 3, 3), torch.randn(64, 80)
    kernels[3] *= 100
    small = compact({"kernels": kernels, "table": table})
    assert (small["kernels/scale"].shape, small["table/scale"].shape) == ((8, 1, 1, 1), (64, 1))
    again = expand(small)
    for name, before, steps in (
        ("kernels", kernels, kernels.abs().amax((1, 2, 3), keepdim=True)),
        ("table", table, table.abs().amax(1, keepdim=True)),
    ):
        assert ((again[name] - before).abs() <= 0.51 * steps / 127).all()
