"""Image Transformer: along a line against `local-attention`, on an image against dense masks made cell by cell."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import regard


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("block", "T"), [(4, 40), (8, 40), (8, 37)])
def test_lines_with_a_memory_as_long_as_a_block_are_local_attention(causal, padded, block, T):
    """Also where the last block is not full: theirs fills it up and is told so by its mask."""
    local_attention = importlib.import_module("local_attention")
    torch.manual_seed(0)
    theirs = local_attention.LocalAttention(
        window_size=block,
        causal=causal,
        look_backward=1,
        look_forward=0 if causal else 1,
        use_rotary_pos_emb=False,
        autopad=True,
    )
    q, k, v = (torch.randn(3, 2, T, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keep = torch.arange(T) < torch.tensor([T, 9, 27] if padded else [T, T, T])[:, None]
    mine = regard.attend(f"image(block={block}, memory={block})", q, k, v, keep=keep if padded else None, causal=causal)
    other = theirs(q, k, v, mask=keep)
    real = keep[:, None, :, None].expand_as(mine)
    assert_close(mine[real], other[real])
    toward = torch.randn_like(mine)
    grads = [torch.autograd.grad((y * toward)[real].sum(), (q, k, v)) for y in (mine, other)]
    for own, peer in zip(*grads, strict=True):
        assert_close(own, peer)


def memory_of(
    cell: tuple[int, int], block: tuple[int, int], flange: tuple[int, int], size: tuple[int, int], causal: bool
):
    """The cells that `cell` sees, as tensor2tensor cuts them out: the strip above the block, the one to its left, and
    the block up to the cell; or all around."""
    (r, c), (h, w), (f_h, f_w), (H, W) = cell, block, flange, size
    top, left = r // h * h, c // w * w
    across = range(max(0, left - f_w), min(W, left + w + f_w))
    if not causal:
        return {(y, x) for y in range(max(0, top - f_h), min(H, top + h + f_h)) for x in across}
    above = {(y, x) for y in range(max(0, top - f_h), top) for x in across}
    beside = {(y, x) for y in range(top, top + h) for x in range(max(0, left - f_w), left)}
    own = {(y, x) for y in range(top, top + h) for x in range(left, left + w) if (y, x) <= (r, c)}
    return above | beside | own


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("block", "flange"), [((2, 4), (1, 3)), ((3, 2), (4, 0)), ((2, 2), (0, 5)), ((1, 8), (2, 8)), ((6, 8), (0, 0))]
)
def test_images_are_dense_attention_with_a_mask_for_each_cell(causal, block, flange):
    torch.manual_seed(0)
    H, W = 6, 8
    cells = [(r, c) for r in range(H) for c in range(W)]
    visible = torch.zeros(H * W, H * W, dtype=torch.bool)
    for i, cell in enumerate(cells):
        for r, c in memory_of(cell, block, flange, (H, W), causal):
            visible[i, r * W + c] = True
    q, k, v = (torch.randn(2, 2, H * W, 8, dtype=torch.float64) for _ in range(3))
    spec = f"image(block={list(block)}, memory={list(flange)}, width={W})"
    order = regard.attention(spec, width=16, heads=2).order(H)
    o = regard.attend(spec, *(part[:, :, order] for part in (q, k, v)), causal=causal)
    assert_close(o, F.scaled_dot_product_attention(q, k, v, attn_mask=visible)[:, :, order])


def test_what_it_refuses():
    for spec, words in (
        ("image(block=[2, 3], memory=[1, 2])", "'image' takes block=l_q"),
        ("image(block=4, memory=[1, 2])", "'image' takes block=l_q"),
        ("image(block=[2, 3], memory=[1, 2], width=8)", "must be a multiple of the columns of a block"),
        ("image(block=[2, 3, 4], memory=[1, 2], width=6)", "rows and columns"),
        ("image(block=0)", "at least 1 token"),
    ):
        with pytest.raises(ValueError, match=words):
            regard.attention(spec, width=16, heads=4)
    for spec, height in (("image", 4), ("image(block=[2, 3], memory=[1, 2], width=6)", 5)):
        with pytest.raises(ValueError, match="order is for an image"):
            regard.attention(spec, width=16, heads=4).order(height)
