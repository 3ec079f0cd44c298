"""Weights that can be exactly zero, with a shape of their own for each head."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from regard.core.numeric import to_wide
from regard.core.reference import Row, add_up
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import entmax as kernel
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached

# Steps of Newton's to double precision, with some to spare: about log2(keys) at alpha near 2 (12 for 16,384 keys), and
# fewer below (7 at 1.5). A fixed number, so that no query's last bit depends on another's.
STEPS, FEW_STEPS = 16, 10


class Entmax(Cached):
    """Correia et al. 2019, the Adaptively Sparse Transformer: alpha-entmax (Peters et al. 2019) in place of softmax,

        p_j = [(alpha - 1) z_j - tau]_+^(1 / (alpha - 1)),  tau such that sum_j p_j = 1,  z_j = q . k_j / sqrt(D),

    which is softmax at alpha = 1 and sparsemax (Martins and Astudillo 2016) at alpha = 2; keys far below the best get
    weight 0. Learned: alpha = 1 + sigmoid(a) with one a for each head. With beta = alpha - 1 and tau = beta t - 1, p_j
    is [1 + beta (z_j - t)]_+^(1/beta), well-behaved down to beta = 0; t is found by Newton's method. The gradients are
    those of the exact solution. Time N^2, memory N: a few queries at a time, computed again in the backward pass; with
    REGARD_KERNELS=triton in kernels without logits in memory. It is the weights that are sparse, not the work.
    """

    facts = Facts(
        name="entmax",
        paper="Correia et al. 2019, Adaptively Sparse Transformers",
        link="arXiv 1909.00015",
        family="scores",
        pairs=True,
        formula="o_i = sum_j p_ij v_j, p_ij = [(alpha - 1) q_i . k_j / sqrt(D) - tau_i]_+^(1 / (alpha - 1)), sum 1",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        positions=("rotation", "bias", "content"),
    )
    examples = ("entmax", "entmax(alpha=1.5)", "entmax(alpha=2.0)", "entmax(alpha=1.2)", "entmax(alpha=1)")
    independent_queries = True
    reduces_to = (("entmax(alpha=1)", "softmax"),)

    def __init__(
        self,
        shape: Shape,
        *,
        alpha: Annotated[
            float | Literal["learned"],
            "sparsity, from 1 (softmax) to 2 (sparsemax); 'learned': one alpha per head",
        ] = "learned",
    ):
        super().__init__(shape)
        if not isinstance(alpha, str) and not 1 <= alpha <= 2:
            raise ValueError(
                f"option 'alpha' of 'entmax' must be from 1 (softmax) to 2 (sparsemax), or 'learned', got {alpha}"
            )
        self.alpha: float | Literal["learned"] = alpha
        if alpha == "learned":
            self.a = nn.Parameter(torch.randn(shape.heads))

    def alphas(self) -> Tensor:
        """The alpha of each head, [H]."""
        beta = self._beta()
        return 1 + beta.flatten() if isinstance(beta, Tensor) else torch.full((self.shape.heads,), float(self.alpha))

    def _beta(self) -> Tensor | float:
        """alpha - 1: a number, or [H, 1, 1]."""
        if not isinstance(self.alpha, str):
            return self.alpha - 1.0
        # an alpha this close to 1 is softmax, and its gradient vanishes: no division by zero then
        return torch.sigmoid(to_wide(self.a)).clamp(min=1e-4)[:, None, None]

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        beta = self._beta()
        if isinstance(beta, float) and beta == 0:
            return self.product(mask, q, k, v, self.scale)
        bias, content = self.scheme("bias"), self.scheme("content")
        if mask.T > 1 and kernel.takes(q, k, v, self.unfused(mask)):
            betas = beta.flatten() if isinstance(beta, Tensor) else torch.full((q.shape[1],), beta, device=q.device)
            return kernel.attend(q, k, v, betas, mask.visible(), self.scale)

        def read(q: Tensor, part: Mask) -> Tensor:
            keys, values = k[:, :, : part.S], v[:, :, : part.S]
            if content is not None:
                logits = content.scores(q, keys, part, self.scale)
            else:
                logits = to_wide(q) * self.scale @ to_wide(keys).mT
            if bias is not None:
                logits = logits + bias.biases(part)
            weights = self.drop_weights(entmax(logits, beta, part.dense()))
            o = weights.to(v.dtype) @ values
            added = None if content is None else content.values(weights, part)
            return o if added is None else o + added.to(v.dtype)

        return self.in_pieces(mask, q, read)

    def plain(self, row: Row) -> Tensor:
        alpha = 1 + 1 / (1 + torch.exp(-self.a[row.head])) if isinstance(self.alpha, str) else self.alpha
        outs = []
        for i in range(row.T):
            logits = [self.scale * row.product(i, j) + row.bias(i, j) for j in row.past(i)]
            values = [row.value(i, j) for j in row.past(i)]
            outs.append(add_up(p * v for p, v in zip(_bisected(torch.stack(logits), alpha), values, strict=True)))
        return torch.stack(outs)


def entmax(logits: Tensor, beta: Tensor | float, visible: Tensor | None = None) -> Tensor:
    """alpha-entmax over the last axis, in float32 or better, of the visible logits; alpha = 1 + beta, 0 < beta <= 1, a
    number or broadcastable to the logits. A row that sees none is all zeros."""
    logits = to_wide(logits)
    if visible is None:
        return _Entmax.apply(logits, beta)
    logits = torch.where(visible, logits, torch.finfo(logits.dtype).min)
    return torch.where(visible, _Entmax.apply(logits, beta), 0)


class _Entmax(torch.autograd.Function):
    """P = sum_j p_j falls in t, and P^beta is convex in it, as the (1/beta)-norm of convex terms that are not negative:
    Newton on P^beta - 1 from a t that is too small never goes too far. From t = max z, where P >= 1, it takes one step
    where all logits are equal, one step in the limit of softmax, and as sparsemax is Michelot's method, which ends."""

    @staticmethod
    def forward(ctx, logits: Tensor, beta: Tensor | float) -> Tensor:
        z = logits - logits.amax(-1, keepdim=True)
        t = torch.zeros_like(z[..., :1])
        for _ in range(FEW_STEPS if isinstance(beta, float) and beta <= 0.5 else STEPS):
            p, slope = _powers(z - t, beta)
            P = p.sum(-1, keepdim=True)
            # P (1 - P^-beta) / beta, which at beta = 0 is P log P
            t = t - P * torch.expm1(-beta * P.log()) / (beta * slope.sum(-1, keepdim=True))
        p, _ = _powers(z - t, beta)
        p = p / p.sum(-1, keepdim=True)
        ctx.fixed = None if isinstance(beta, Tensor) else beta
        ctx.save_for_backward(p, *([beta] if isinstance(beta, Tensor) else []))
        return p

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        """With s_j = p_j^(1 - beta) on the support: dz = s (grad - m), m = (s . grad) / sum s. At a fixed t, d p_j /
        d beta = p_j (1 - p_j^-beta - beta log p_j) / beta^2, and t moves so that the sum stays 1: the same m."""
        (grad,), (p, *rest) = grads, ctx.saved_tensors
        beta = rest[0] if rest else ctx.fixed
        logs = p.clamp(min=torch.finfo(p.dtype).tiny).log()
        s = torch.where(p > 0, torch.exp((1 - beta) * logs), 0)
        centred = grad - (s * grad).sum(-1, keepdim=True) / s.sum(-1, keepdim=True)
        if not rest:
            return s * centred, None
        at_fixed = p * (-torch.expm1(-beta * logs) - beta * logs) / beta**2
        return s * centred, (at_fixed * centred).sum_to_size(beta.shape)


def _powers(u: Tensor, beta: Tensor | float) -> tuple[Tensor, Tensor]:
    """p = [1 + beta u]_+^(1 / beta), and its derivative in u, p^(1 - beta)."""
    if isinstance(beta, float) and beta == 1:
        p = (1 + u).relu()
        return p, p.sign()
    if isinstance(beta, float) and beta == 0.5:
        root = (1 + u / 2).relu()
        return root * root, root
    steep = (beta * u).clamp(min=-1)
    p = torch.exp(torch.log1p(steep) / beta)
    return p, torch.where(p > 0, p / (1 + steep), 0)


def _bisected(z: Tensor, alpha: Tensor | float) -> Tensor:
    """The definition for one query: tau by halving, and one step of Newton's for its gradient."""
    if not isinstance(alpha, Tensor) and alpha == 1:
        return torch.exp(z - z.max()) / torch.exp(z - z.max()).sum()

    def above(tau: Tensor | float) -> tuple[Tensor, Tensor]:
        # a key outside has no share in any gradient: p is 0 around it, and 1 stands in for what it is a power of
        inside = (alpha - 1) * z - tau > 0
        return inside, torch.where(inside, (alpha - 1) * z - tau, 1)

    def powers(tau: Tensor | float) -> Tensor:
        inside, base = above(tau)
        return torch.where(inside, base ** (1 / (alpha - 1)), 0)

    with torch.no_grad():
        # in plain numbers, of which it takes thousands; 60 halvings of an interval of 1 are beyond double precision
        beta = float(alpha) - 1
        logits = [beta * number for number in z.tolist()]
        low, high = max(logits) - 1, max(logits)
        for _ in range(60):
            middle = (low + high) / 2
            total = sum((number - middle) ** (1 / beta) for number in logits if number > middle)
            low, high = (middle, high) if total > 1 else (low, middle)
        inside, base = above(low)
        fall = torch.where(inside, base ** ((2 - alpha) / (alpha - 1)), 0).sum() / (alpha - 1)
    return powers(low + (powers(low).sum() - 1) / fall)
