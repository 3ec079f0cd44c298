"""The blocks of the Set Transformer (Lee et al. 2019, equations 6 to 11) on PyTorch's attention, to compare with."""

import torch
from torch import Tensor, nn


class MAB(nn.Module):
    """MAB(X, Y) = LN(H + rFF(H)), H = LN(X + Multihead(X, Y, Y))."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, keep: Tensor | None = None) -> Tensor:
        read, _ = self.attention(x, y, y, key_padding_mask=None if keep is None else ~keep, need_weights=False)
        h = self.norms[0](x + read)
        return self.norms[1](h + torch.relu(self.feed(h)))


class ISAB(nn.Module):
    """ISAB(X) = MAB(X, MAB(I, X)), I learned."""

    def __init__(self, width: int, heads: int, points: int):
        super().__init__()
        self.points = nn.Parameter(torch.randn(points, width))
        self.gather, self.spread = MAB(width, heads), MAB(width, heads)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.spread(x, self.gather(self.points.expand(len(x), -1, -1), x, keep))


class PMA(nn.Module):
    """PMA(Z) = MAB(S, rFF(Z)), S learned."""

    def __init__(self, width: int, heads: int, seeds: int):
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(seeds, width))
        self.feed, self.block = nn.Linear(width, width), MAB(width, heads)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.block(self.seeds.expand(len(x), -1, -1), torch.relu(self.feed(x)), keep)


def copy_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    """The weights of PyTorch's attention into ours."""
    parts = zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
    for name, weight, bias in parts:
        ours.project[name].weight.copy_(weight)
        ours.project[name].bias.copy_(bias)
    ours.output.load_state_dict(theirs.out_proj.state_dict())
