"""Keys and values of any length mixed into a fixed number of slots."""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.reference import Row, add_up, blend
from regard.core.shape import Order, Shape
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.digested import Digested

Sharing = Literal["none", "headwise", "key-value", "layerwise"]


class Linformer(Digested):
    """Wang et al. 2020: softmax(Q (E K)^T / sqrt(d)) (F V) with learned E, F [k, n]; their k is R, n `longest`, d D.

    An input of S <= n tokens uses the first S columns of E and F, padded tokens count as zero vectors, and all R slots
    stay in the softmax however short the input is. (The authors' code mixes the inputs and then projects them,
    (E X) W + b: the same but for the bias.) Time N R, memory N.
    """

    facts = Facts(
        name="linformer",
        paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity",
        link="arXiv 2006.04768",
        family="low rank",
        formula="o_i = sum_r softmax_r(q_i . (E K)_r / sqrt(D)) (F V)_r, E and F [R, N]",
        time=Order("N", 1),
        memory=Order("N", 1),
        roles=("self", "cross"),
        refusals=(("causal", "every slot mixes all positions, so each would tell a query of its future"),),
        exact=False,
        signed=True,
    )
    examples = (
        "linformer(rank=4, longest=2048)",
        "linformer(rank=2, longest=2048, sharing='none')",
        "linformer(rank=4, longest=2048, sharing='key-value')",
        "linformer(rank=4, longest=2048, sharing='layerwise')",
    )
    grouped = True

    def __init__(
        self,
        shape: Shape,
        *,
        rank: Annotated[int, "number of slots that keys and values are projected to (k in the paper)"] = 256,
        longest: Annotated[int, "maximum input length in tokens (n in the paper)"] = 4096,
        sharing: Annotated[
            Sharing,
            "'none': E and F for each key/value head; 'headwise': one E and one F for all heads; "
            "'key-value': one E = F; 'layerwise': one E = F for all layers of a stack",
        ] = "headwise",
    ):
        super().__init__(shape)
        for name, size in (("rank", rank), ("longest", longest)):
            if size < 1:
                raise ValueError(f"option {name!r} of 'linformer' must be at least 1, got {size}")
        self.rank, self.longest, self.sharing = rank, longest, sharing
        size = (shape.kv_heads, rank, longest) if sharing == "none" else (rank, longest)
        # the size of a slot at the start depends on the tokens that are there, not on those there is room for
        self.mix_k = nn.Parameter(torch.empty(size).uniform_(-(rank**-0.5), rank**-0.5))
        if sharing in ("none", "headwise"):
            self.mix_v = nn.Parameter(torch.empty(size).uniform_(-(rank**-0.5), rank**-0.5))

    def link_layers(self, first: Attention | None, fed: bool, read: bool, pre: bool = False) -> None:
        if self.sharing != "layerwise" or not isinstance(first, Linformer) or first.sharing != "layerwise":
            return
        if first.mix_k.shape != self.mix_k.shape:
            raise ValueError(
                f"layers with sharing='layerwise' have one E: got rank={self.rank}, longest={self.longest} after "
                f"rank={first.rank}, longest={first.longest}; give them the same, or use sharing='key-value'"
            )
        self.mix_k = first.mix_k

    def digest(self, real: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        S = k.shape[2]
        if self.longest < S:
            raise ValueError(
                f"'linformer' got {S} tokens to attend to (padding included), expected at most longest={self.longest}: "
                f"build it with longest={S} or more, or shorten the input"
            )
        if real is not None:
            # zero vectors in the padding still have keys and values: the biases and positions
            k, v = (torch.where(real[:, None, :, None], part, 0) for part in (k, v))
        mix_v = self.mix_v if self.sharing in ("none", "headwise") else self.mix_k
        letters = "grs,bgsd->bgrd" if self.sharing == "none" else "rs,bgsd->bgrd"
        return torch.einsum(letters, self.mix_k[..., :S], k), torch.einsum(letters, mix_v[..., :S], v)

    def consult(self, digest: tuple[Tensor, ...], q: Tensor) -> Tensor:
        # a memory without a real token has slots of zeros only, and so gives zeros
        k, v = digest  # [B, G, R, D]
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])

    def plain(self, row: Row) -> Tensor:
        def slots(mixer: Tensor, vectors: Tensor) -> list[Tensor]:
            if self.sharing == "none":
                mixer = mixer[row.head * self.shape.kv_heads // self.shape.heads]
            return [add_up(mixer[r, j] * vectors[j] for j in range(row.S)) for r in range(self.rank)]

        keys, values = slots(self.mix_k, row.k), slots(getattr(self, "mix_v", self.mix_k), row.v)
        outs = []
        for i in range(row.T):
            logits = torch.stack([self.scale * (row.q[i] @ key) for key in keys])
            outs.append(blend(logits, values))
        return torch.stack(outs)
