"""Weights made without comparing queries and keys."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core.numeric import to_wide
from regard.core.reference import Row, add_up, blend
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels.compiling import exporting, is_dynamic
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached

Kind = Literal["dense", "random", "factorised-dense", "factorised-random", "dot"]


class Synthesizer(Cached):
    """Tay et al. 2020: Y = softmax(sum_s alpha_s S_s(X)) G(X), G(X) our values, where the kinds S of logits are

        dense              S_i  = W_2 relu(W_1 x_i + b_1) + b_2, one number for each of the l positions
        random             S_ij = R_ij, R [l, l]
        factorised-dense   S_ij = A_i[floor(j / b)] B_i[j mod b], A = F_A(x_i) in R^a, B = F_B(x_i) in R^b, a b = l
        factorised-random  S_ij = R1_i . R2_j, R1 and R2 [l, k]
        dot                S_ij = q_i . k_j / sqrt(D), the paper's "vanilla"

    and the alphas of a mixture a softmax of learned numbers. All tables are those of a head; l is `longest`, k `rank`,
    W_1 maps to the D numbers of a head, and so do the linear F_A and F_B first (any linear maps where a + b <= D).
    The authors' code (Mesh TensorFlow) reads keys as values where no products are mixed in, and mixes by sigmoids.
    Time N^2, memory N, and N^2 where a random R is trained: its gradient.
    """

    facts = Facts(
        name="synthesizer",
        paper="Tay et al. 2020, Synthesizer: Rethinking Self-Attention for Transformer Models",
        link="arXiv 2005.00743",
        family="scores",
        pairs=True,
        formula="o_i = sum_j softmax_j(sum_s alpha_s S_s,ij) v_j, S_s,ij of x_i and j, or of i and j, or q_i . k_j",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        positions=("bias",),
    )
    examples = (
        "synthesizer(longest=256)",
        "synthesizer(kinds=('random',), longest=256)",
        "synthesizer(kinds=('random', 'factorised-random'), longest=256, trained=False)",
        "synthesizer(kinds=('factorised-dense',), longest=300)",
        "synthesizer(kinds=('factorised-random',), longest=256, rank=3)",
        "synthesizer(kinds=('dense', 'dot'), longest=256)",
        "synthesizer(kinds=('dense', 'random', 'factorised-dense', 'factorised-random', 'dot'), longest=256, rank=2)",
    )
    reduces_to = (("synthesizer(kinds=('dot',))", "softmax"),)
    independent_queries = True
    piece = 64
    # parameters, or buffers where the random kinds are not trained
    dense: Tensor  # W_2 [H, l, D]
    random: Tensor  # R [H, l, l]
    coarse: Tensor  # F_A [H, a, D]
    fine: Tensor  # F_B [H, b, D]
    left: Tensor  # R1 [H, l, k]
    right: Tensor  # R2 [H, l, k]

    def __init__(
        self,
        shape: Shape,
        *,
        kinds: Annotated[tuple[Kind, ...], "kinds of logits; several are mixed by learned weights"] = ("dense",),
        longest: Annotated[int, "maximum input length in tokens (l in the paper)"] = 1024,
        rank: Annotated[int, "rank of 'factorised-random' (k in the paper)"] = 8,
        trained: Annotated[bool, "False: the tables of the random kinds stay as they are drawn"] = True,
    ):
        for name, size in (("longest", longest), ("rank", rank)):
            if size < 1:
                raise ValueError(f"option {name!r} of 'synthesizer' must be at least 1, got {size}")
        if not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(f"option 'kinds' of 'synthesizer' must name each kind once and at least one, got {kinds}")
        if "random" in kinds and trained:
            self.facts = replace(self.facts, memory=Order("N^2", 2))
        if {"random", "factorised-random"} & set(kinds):
            why = "a random table has a row for each place of a query, and a query of another sequence has none"
            self.facts = replace(self.facts, roles=("self", "causal"), refusals=(("cross", why),))
        names = {"dense": "h", "factorised-dense": "f", "dot": "q"}
        self.inputs = {names[kind]: "query" for kind in kinds if kind in names}
        self.inputs |= {"k": "key", "v": "value"} if "dot" in kinds else {"v": "value"}
        super().__init__(shape)
        self.mixture, self.longest = tuple(kinds), longest
        H, D = shape.heads, shape.head_width

        def draw(name: str, *size: int, deviation: float, trained: bool = True) -> None:
            drawn = torch.empty(size).normal_(std=deviation)
            if trained:
                self.register_parameter(name, nn.Parameter(drawn))
            else:
                self.register_buffer(name, drawn)

        # the logits of unit inputs start with variance 1
        if "dense" in kinds:
            draw("dense", H, longest, D, deviation=D**-0.5)
            self.hidden_offset = nn.Parameter(torch.zeros(H, D))
            self.dense_offset = nn.Parameter(torch.zeros(H, longest))
        if "random" in kinds:
            draw("random", H, longest, longest, deviation=1.0, trained=trained)
        if "factorised-dense" in kinds:
            # about the root, and a power of two: then few lengths leave a part of the last block over
            a = 2 ** (((longest - 1).bit_length() + 1) // 2)
            draw("coarse", H, a, D, deviation=D**-0.5)
            draw("fine", H, -(-longest // a), D, deviation=D**-0.5)
        if "factorised-random" in kinds:
            draw("left", H, longest, rank, deviation=rank**-0.25, trained=trained)
            draw("right", H, longest, rank, deviation=rank**-0.25, trained=trained)
        if len(kinds) > 1:
            self.mixing = nn.Parameter(torch.zeros(len(kinds)))

    def attend(
        self,
        mask: Mask,
        v: Tensor,
        h: Tensor | None = None,
        f: Tensor | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> Tensor:
        if self.longest < mask.S and self.mixture != ("dot",):
            raise ValueError(
                f"'synthesizer' got {mask.S} tokens to attend to (padding included), expected at most "
                f"longest={self.longest}: build it with longest={mask.S} or more, or shorten the input"
            )
        features = self._as_product(mask, h, q, k)
        if features is not None:
            return self._joined(mask, *features, v)
        size = self.piece_size(v, mask.S)
        tables = {
            name: self._rows(getattr(self, name), mask, size) for name in ("random", "left") if hasattr(self, name)
        }
        outs: list[Tensor] = []
        for piece, (at, part) in enumerate(mask.pieces(size)):
            if part.causal and part.shift is not None:
                # the host knows that no query of the piece sees the keys behind its last one
                part = part._replace(S=min(part.S, part.shift + part.T))
            queries = {name: x[:, :, at] for name, x in (("h", h), ("f", f), ("q", q)) if x is not None}
            queries |= {name: rows[piece] for name, rows in tables.items()}
            if torch.is_grad_enabled() and not exporting():
                out = checkpoint(
                    self._read, part, queries, k, v, use_reentrant=False, preserve_rng_state=self.has_dropout
                )
            else:
                out = self._read(part, queries, k, v)
            outs.append(out)
        return torch.cat(outs, 2)

    def _as_product(
        self, mask: Mask, h: Tensor | None, q: Tensor | None, k: Tensor | None
    ) -> tuple[Tensor, Tensor, float] | None:
        """Vectors of the queries and of the places, [B or 1, H, T or S, n], whose products times a factor are the
        logits, where a single kind is one: then the fused kernels of softmax read them. None where it is not."""
        if self.mixture == ("dense",) and h is not None:
            # b_2 is one number more, times one
            hidden = F.pad(torch.relu(h + self.hidden_offset[:, None]), (0, 1), value=1.0)
            places = torch.cat([self.dense[:, : mask.S], self.dense_offset[:, : mask.S, None]], -1)
            return hidden, places[None], 1.0
        if self.mixture == ("factorised-random",):
            (left,) = self._rows(self.left, mask, mask.T)
            return left if left.dim() == 4 else left[None], self.right[None, :, : mask.S], 1.0
        if self.mixture == ("dot",) and q is not None and k is not None:
            return q, k, self.scale
        return None

    def _joined(self, mask: Mask, q: Tensor, k: Tensor, scale: float, v: Tensor) -> Tensor:
        """Attention of vectors as wide as they are, where kernels take one width, a multiple of 8."""
        width = max(q.shape[-1], v.shape[-1])
        width += -width % 8
        q, k, padded = (F.pad(x, (0, width - x.shape[-1])).expand(len(v), -1, -1, -1) for x in (q, k, v))
        if v.device.type == "cuda":
            # not every kernel reads one table for all rows of a batch
            q, k = q.contiguous(), k.contiguous()
        dtype = v.dtype
        return self.product(mask, q.to(dtype), k.to(dtype), padded, scale)[..., : v.shape[-1]]

    def _rows(self, table: Tensor, mask: Mask, size: int) -> Sequence[Tensor]:
        """The rows of a table for the queries, a piece at a time: [H, t, n], or [B, H, t, n] where they differ."""
        if mask.shift is not None:
            # cut once and then split: the gradient of each cut is as large as what was cut from
            rows = table[:, mask.shift : mask.shift + mask.T]
            return [rows] if exporting() else rows.split(size, 1)
        at = mask.q0[:, None] + torch.arange(mask.T, device=table.device)
        return [table[:, part].transpose(0, 1) for part in at.split(size, 1)]

    def _read(self, part: Mask, queries: dict[str, Tensor], k: Tensor | None, v: Tensor) -> Tensor:
        scores = [self._score(kind, part.S, queries, k) for kind in self.mixture]
        logits = scores[0]
        if len(scores) > 1:
            alphas = torch.softmax(to_wide(self.mixing), 0)
            logits = functools.reduce(torch.add, (alpha * score for alpha, score in zip(alphas, scores, strict=True)))
        return self.softmax_average(part, logits, v[:, :, : part.S])

    def _score(self, kind: Kind, S: int, queries: dict[str, Tensor], k: Tensor | None) -> Tensor:
        """The logits of one kind, [B, H, t, S] or [H, t, S]."""
        if kind == "dense":
            hidden = torch.relu(to_wide(queries["h"] + self.hidden_offset[:, None]))
            return hidden @ to_wide(self.dense[:, :S]).mT + self.dense_offset[:, None, :S]
        if kind == "random":
            return to_wide(queries["random"][..., :S])
        if kind == "factorised-random":
            return to_wide(queries["left"]) @ to_wide(self.right[:, :S]).mT
        if kind == "factorised-dense":
            f, b = to_wide(queries["f"]), self.fine.shape[1]
            # enough blocks for all slots, and never a single one, for which a compiler would make a graph of its own
            blocks = self.coarse.shape[1] if is_dynamic(S) else S // b + 2
            coarse, fine = f @ to_wide(self.coarse[:, :blocks]).mT, f @ to_wide(self.fine).mT
            return (coarse[..., None] * fine[..., None, :]).flatten(-2)[..., :S]
        assert k is not None, "products have keys"
        return to_wide(queries["q"]) * self.scale @ to_wide(k[:, :, :S]).mT

    def plain(self, row: Row) -> Tensor:
        alphas: Iterable[Tensor | float] = [1.0]
        outs = []
        if len(self.mixture) > 1:
            alphas = torch.exp(self.mixing) / torch.exp(self.mixing).sum()

        def score(kind: Kind, i: int, j: int) -> Tensor:
            if kind == "dense":
                hidden = (row.values["h"][i] + self.hidden_offset[row.head]).clamp(min=0)
                return self.dense[row.head, j] @ hidden + self.dense_offset[row.head, j]
            if kind == "random":
                return self.random[row.head, i, j]
            if kind == "factorised-random":
                return add_up(self.left[row.head, i, r] * self.right[row.head, j, r] for r in range(self.left.shape[2]))
            if kind == "factorised-dense":
                b, x = self.fine.shape[1], row.values["f"][i]
                return (self.coarse[row.head, j // b] @ x) * (self.fine[row.head, j % b] @ x)
            return self.scale * (row.q[i] @ row.k[j])

        for i in range(row.T):
            logits = []
            for j in row.past(i):
                mixed = sum(alpha * score(kind, i, j) for alpha, kind in zip(alphas, self.mixture, strict=True))
                logits.append(mixed + row.bias(i, j))
            outs.append(blend(torch.stack(logits), [row.v[j] for j in row.past(i)]))
        return torch.stack(outs)
