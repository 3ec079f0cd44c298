"""Big Bird against Hugging Face's layer, with its random blocks put in the place of ours; and what ours are."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import BigBirdConfig, BigBirdModel
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

import regard
from regard.kernels import parts

WIDTH, HEADS, SEED = 24, 3, 5


def pair(block: int, random: int) -> tuple:
    torch.manual_seed(0)
    config = BigBirdConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, block_size=block, num_random_blocks=random, use_bias=True
    )
    # in eval mode theirs reads the first block `random` times more instead of random blocks
    theirs = BigBirdBlockSparseAttention(config, seed=SEED).double().train()
    spec = f"bigbird(block={block}, random={random})"
    ours = regard.attention(spec, width=WIDTH, heads=HEADS, bias=True).double()
    with torch.no_grad():
        for name, word in (("q", "query"), ("k", "key"), ("v", "value")):
            ours.project[name].load_state_dict(getattr(theirs, word).state_dict())
        ours.output.weight.copy_(torch.eye(WIDTH))
        ours.output.bias.zero_()
    return ours, theirs


def their_blocks(theirs, n: int, block: int, random: int) -> torch.Tensor:
    """[H, blocks, r], -1 for the global blocks."""
    np.random.seed(SEED)
    lengths, counts = theirs._get_rand_attn_plan(n * block, block, random)
    rows = theirs._bigbird_block_rand_mask_with_head(n * block, n * block, block, block, HEADS, lengths, counts)
    drawn = torch.from_numpy(np.stack(rows)).long()
    return torch.nn.functional.pad(drawn, (0, 0, 1, 1), value=-1)


@pytest.mark.parametrize("chunk", [1, parts.CHUNK])
@pytest.mark.parametrize("last", [0, 3])
@pytest.mark.parametrize(("blocks", "block", "random"), [(20, 4, 2), (12, 8, 3), (11, 5, 1)])
def test_same_blocks(blocks, block, random, last, chunk, monkeypatch):
    """`last`: how many tokens the last block lacks."""
    monkeypatch.setattr(parts, "CHUNK", chunk)
    ours, theirs = pair(block, random)
    drawn = their_blocks(theirs, blocks, block, random)
    # theirs may draw a near block again, and then counts it twice
    near = torch.arange(blocks)[:, None]
    assert not ((drawn >= 0) & ((drawn - near).abs() <= 1)).any()
    assert not (drawn == blocks - 1).any()
    monkeypatch.setattr(ours, "draw", lambda end, n: drawn.expand(len(end), -1, -1, -1))

    x = torch.randn(2, blocks * block, WIDTH, dtype=torch.float64)
    keep = (torch.arange(x.shape[1]) < x.shape[1] - last).expand(2, -1)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    cut, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(keep.double(), block)
    z = theirs(other, band, rows, columns, cut, cut)[0]
    y = ours(mine, keep=keep if last else None)
    assert_close(y[keep], z[keep])
    toward = torch.randn_like(y[keep])
    (y[keep] * toward).sum().backward()
    (z[keep] * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    for name, word in (("q", "query"), ("k", "key"), ("v", "value")):
        assert_close(ours.project[name].weight.grad, getattr(theirs, word).weight.grad)


def test_draw():
    """Random blocks are distinct and legal, as many as there are, and each legal one is as likely as any other; a row
    of fewer blocks than fit draws among its own."""
    layer = regard.attention("bigbird(block=1, window=3, globals=3, random=4)", width=64, heads=64)
    n, counts = 30, torch.tensor([30, 17, 8, 5, 1])
    hits = torch.zeros(len(counts), n, n)
    for seed in range(40):
        layer.seeds.copy_(64 * seed + torch.arange(64))
        wide, index = layer.plan(counts, n)
        for row, count in enumerate(counts.tolist()):
            assert wide[row, :2].tolist() == [0, 1]
            for u in range(2, count - 1):
                legal = torch.tensor([2 <= c < count - 1 and abs(c - u) > 1 for c in range(n)])
                far = index[row, :, u, -4:]
                chosen = torch.zeros(64, n).scatter_add(1, far.clamp(min=0), (far >= 0).float())
                assert (chosen <= legal).all()
                assert (chosen.sum(1) == min(4, legal.sum())).all()
                hits[row, u] += chosen.sum(0)
    # 2560 draws of 4 out of 23 to 25: five standard deviations are a quarter of the mean
    for u in range(2, 29):
        found = hits[0, u][hits[0, u] > 0]
        assert len(found) >= 23
        assert (found / found.mean() - 1).abs().max() < 0.25


def test_redraw():
    torch.manual_seed(0)
    layer = regard.attention("bigbird(block=2, random=2)", width=WIDTH, heads=HEADS)
    x = torch.randn(1, 60, WIDTH)
    y = layer(x)
    assert_close(layer(x), y, rtol=0, atol=0)
    seeds = layer.seeds.clone()
    layer.redraw()
    assert (layer(x) - y).abs().max() > 1e-3
    layer.seeds.copy_(seeds)
    assert_close(layer(x), y, rtol=0, atol=0)


def test_layers_and_heads_differ():
    layers = [regard.attention("bigbird(block=2)", width=WIDTH, heads=HEADS) for _ in range(2)]
    assert len(torch.cat([layer.seeds for layer in layers]).unique()) == 2 * HEADS
