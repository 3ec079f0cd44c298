"""Token mixing by a small network over the tokens of each channel."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.rows import Rows
from regard.core.shape import Order, Shape
from regard.core.state import Out
from regard.layers.attention.base import Facts
from regard.layers.attention.mixing import Mixing


class TokenMixer(Mixing):
    """Tolstikhin et al. 2021, token mixing of the MLP-Mixer: every channel c of X, a column of numbers, goes through
    one and the same network,

        Y_c = W_2 GELU(W_1 X_c + b_1) + b_2,    W_1 [D_S, n], W_2 [n, D_S].

    n is `longest`, D_S `inner`. The norm before it, the residual and the mixing of channels are those of a Transformer
    layer with norm="pre". In the paper every input has n tokens (patches of an image); here a shorter one uses the
    first columns of W_1 and rows of W_2 and b_2, and a padded token counts as zeros. GELU is the exact one (the
    authors' code has its tanh form). The network is not linear: the map of a head is dY_ic / dX_jc, the mean over its
    channels c. Time N D_S, memory N.
    """

    facts = Facts(
        name="mixer",
        paper="Tolstikhin et al. 2021, MLP-Mixer: An all-MLP Architecture for Vision",
        link="arXiv 2105.01601",
        family="mixers",
        formula="Y_c = W_2 GELU(W_1 X_c + b_1) + b_2 over the tokens of each channel c, W_1 [D_S, N], W_2 [N, D_S]",
        time=Order("N", 1),
        memory=Order("N", 1),
        roles=("self",),
        refusals=(
            ("causal", "each hidden unit mixes all tokens, so it would tell a token of its future"),
            ("cross", "its weights belong to the places of one sequence"),
        ),
        signed=True,
    )
    examples = ("mixer(longest=256, inner=5)",)

    def __init__(
        self,
        shape: Shape,
        *,
        longest: Annotated[int, "maximum input length in tokens (S patches in the paper)"] = 1024,
        inner: Annotated[int, "hidden size of the network over tokens (D_S in the paper)"] = 256,
    ):
        super().__init__(shape)
        for name, size in (("longest", longest), ("inner", inner)):
            if size < 1:
                raise ValueError(f"option {name!r} of 'mixer' must be at least 1, got {size}")
        self.longest, self.kept_channels = longest, self.channels()
        self.gather = nn.Parameter(torch.empty(inner, longest).normal_(std=longest**-0.5))
        self.gather_offset = nn.Parameter(torch.zeros(inner))
        self.spread = nn.Parameter(torch.empty(longest, inner).normal_(std=inner**-0.5))
        self.spread_offset = nn.Parameter(torch.zeros(longest))

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        hidden = F.gelu(self._hidden(x, rows))
        y = self.spread[: rows.T] @ hidden + self.spread_offset[: rows.T, None]
        return Out(F.pad(y, (self.kept_channels.start, self.shape.width - self.kept_channels.stop)))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        hidden = self._hidden(x, rows)
        normal = torch.distributions.Normal(0.0, 1.0)
        slopes = normal.cdf(hidden) + hidden * normal.log_prob(hidden).exp()  # [B, D_S, E]
        means = [part.sum(-1) / max(part.shape[-1], 1) for part in slopes.tensor_split(self.shape.heads, -1)]
        through = torch.stack(means, 1)[..., None] * (self.gather[:, : rows.T] @ values)  # [B, H, D_S, n]
        return self.spread[: rows.T] @ through

    def _hidden(self, x: Tensor, rows: Rows) -> Tensor:
        """[B, D_S, E] before the GELU."""
        self.check_length(rows.T, self.longest)
        x = self.placed(x, rows)[..., self.kept_channels]
        real = rows.real()
        x = x if real is None else torch.where(real[..., None], x, 0)
        return self.gather[:, : rows.T] @ x + self.gather_offset[:, None]

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)
        columns = []
        for c in range(x.shape[1]):
            if not self.kept_channels.start <= c < self.kept_channels.stop:
                columns.append(torch.zeros_like(x[:, c]))
                continue
            units = []
            for r in range(len(self.gather)):
                h = sum(self.gather[r, j] * x[j, c] for j in range(len(x))) + self.gather_offset[r]
                units.append(h * (1 + torch.erf(h / 2**0.5)) / 2)
            made = [
                sum(self.spread[i, r] * unit for r, unit in enumerate(units)) + self.spread_offset[i]
                for i in range(len(x))
            ]
            columns.append(torch.stack(made))
        return torch.stack(columns, 1)
