"""The table of weights from a few of its rows and columns."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import masked_softmax, wide_dtype
from regard.core.reference import Row, add_up, blend
from regard.core.rows import Rows
from regard.core.shape import Order, Shape
from regard.kernels.compiling import is_dynamic, surely_at_most
from regard.layers.attention.base import Facts
from regard.layers.attention.projected import Projected


class Nystrom(Projected):
    """Xiong et al. 2021, Nyströmformer: with landmarks q~, k~, the means of m segments of the queries and of the keys,

        softmax(Q K~^T) A^+ softmax(Q~ K^T) V + DWConv(V),   A = softmax(Q~ K~^T),   each product / sqrt(D),

    where A^+ takes `iterations` steps of Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from Z = A^T / (|A|_1
    |A|_inf), |A|_inf being 1. The norms are those of the matrix itself; the authors take the largest of all heads and
    rows of the batch, on which an output then depends. Token i of n belongs to segment floor(i m / n), so the segments
    differ by at most one token (authors: m must divide n), and padding counts in no mean. An input of m tokens or fewer
    gets the softmax itself, as with the authors at n = m. Time N m + m^3, memory N.
    """

    facts = Facts(
        name="nystrom",
        paper="Xiong et al. 2021, Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
        link="arXiv 2102.03902",
        family="low rank",
        formula="O = softmax(Q K~^T / sqrt(D)) softmax(Q~ K~^T / sqrt(D))^+ softmax(Q~ K^T / sqrt(D)) V + conv(V), Q~ "
        "and K~ means of segments",
        time=Order("N landmarks", 1),
        memory=Order("N", 1),
        roles=("self",),
        refusals=(
            ("causal", "the landmarks are means over all positions, so each would tell a query of its future"),
            ("cross", "the landmarks of the queries are means over all of them, and a decoder has one at a time"),
        ),
        exact=False,
        signed=True,
    )
    examples = (
        "nystrom(landmarks=8, kernel=5)",
        "nystrom(landmarks=3, kernel=0)",
        "nystrom(landmarks=4, kernel=3, iterations=2)",
    )
    reduces_to = (("nystrom(landmarks=33, kernel=0)", "softmax"),)

    def __init__(
        self,
        shape: Shape,
        *,
        landmarks: Annotated[int, "number of landmarks, the means of segments (m in the paper)"] = 64,
        kernel: Annotated[int, "kernel size of the convolution of the values that is added, odd; 0: none"] = 33,
        iterations: Annotated[int, "number of iterations of the pseudo-inverse"] = 6,
    ):
        super().__init__(shape)
        for name, size in (("landmarks", landmarks), ("iterations", iterations)):
            if size < 1:
                raise ValueError(f"option {name!r} of 'nystrom' must be at least 1, got {size}")
        if kernel and kernel % 2 == 0:
            raise ValueError(
                f"option 'kernel' of 'nystrom' must be odd, as many tokens before as behind, or 0 for none, "
                f"got {kernel}: give {kernel + 1}"
            )
        self.landmarks, self.kernel, self.iterations = landmarks, kernel, iterations
        if kernel:
            self.filter = nn.Parameter(torch.empty(shape.heads, kernel).uniform_(-(kernel**-0.5), kernel**-0.5))

    def attend_self(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: None
    ) -> tuple[Tensor, None]:
        q, source, real = query["q"], self.repeat_heads(source), rows.real()
        k, v = source["k"], source["v"]
        if real is not None:
            # zero vectors in the padding still have values: the biases
            v = torch.where(real[:, None, :, None], v, 0)
        m, T = self.landmarks, rows.T
        if is_dynamic(T) and not surely_at_most(m + 1, T):
            # a row that may have fewer tokens than there are landmarks: padded, it is one of those
            q, k, v = (F.pad(x, (0, 0, 0, m)) for x in (q, k, v))
            rows = rows._replace(T=T + m, uniform_start=None)
            real = rows.real()
        if surely_at_most(rows.T, m):
            o = self._exact(q, k, v, real)
        else:
            with torch.autocast(q.device.type, enabled=False):
                o = self._approximate(q, k, v, rows)
            if real is not None:
                few = self._exact(q[:, :, :m], k[:, :, :m], v[:, :, :m], real[:, :m])
                o = torch.where((rows.count <= m)[:, None, None, None], F.pad(few, (0, 0, 0, rows.T - m)), o)
        if self.kernel:
            o = o + convolve(v, self.filter)
        return o[:, :, :T], None

    def _exact(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        visible = None if real is None else real[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)

    def _approximate(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """For rows of more tokens than landmarks; any numbers for the others."""
        # an inverse magnifies what was rounded before
        dtype, wide = v.dtype, wide_dtype(v.dtype)
        q, k, v = q.to(wide) * self.scale, k.to(wide), v.to(wide)
        q_mean, k_mean = self._means(q, rows), self._means(k, rows)
        A = torch.softmax(q_mean @ k_mean.mT, -1)
        visible, real = None, rows.real()
        if real is not None:
            visible = real[:, None, None]
            short = (rows.count <= self.landmarks)[:, None, None, None]
            A = torch.where(short, torch.eye(self.landmarks, dtype=wide, device=A.device), A)
        read = _attend(q_mean, k, v, visible)  # [B, H, m, D]
        return _attend(q, k_mean, self._inverse(A) @ read).to(dtype)

    def _means(self, x: Tensor, rows: Rows) -> Tensor:
        """[B, H, T, D] -> [B, H, m, D], of each segment of the real tokens."""
        m = self.landmarks
        if rows.uniform_start is not None and not is_dynamic(rows.T) and rows.T % m == 0:
            return x.unflatten(2, (m, -1)).mean(3)
        count = rows.count[:, None].clamp(min=1) if rows.uniform_start is None else rows.T
        at = torch.arange(rows.T, device=x.device)[None]
        # padding falls behind the last segment
        inside = at * m // count == torch.arange(m, device=x.device)[:, None, None]  # [m, B or 1, T]
        inside = inside.transpose(0, 1)[:, None].to(x.dtype)
        return inside @ x / inside.sum(-1, keepdim=True).clamp(min=1)

    def _inverse(self, A: Tensor) -> Tensor:
        Z = A.mT / A.sum(-2, keepdim=True).amax(-1, keepdim=True)
        eye = torch.eye(self.landmarks, dtype=A.dtype, device=A.device)
        for _ in range(self.iterations):
            AZ = A @ Z
            Z = Z @ (13 * eye - AZ @ (15 * eye - AZ @ (7 * eye - AZ))) / 4
        return Z

    def plain(self, row: Row) -> Tensor:
        N, m = row.T, self.landmarks
        outs = []
        if m < N:
            members = [[i for i in range(N) if i * m // N == s] for s in range(m)]
            queries, keys = ([add_up(x[i] for i in group) / len(group) for group in members] for x in (row.q, row.k))
            A = torch.stack([blend(self._plain_logits(query, keys), list(torch.eye(m).to(query))) for query in queries])
            Z = A.T / (max(A[:, s].sum() for s in range(m)) * max(A[s].sum() for s in range(m)))
            for _ in range(self.iterations):
                cubic = 7 * A @ Z - A @ Z @ A @ Z
                Z = (13 * Z - Z @ (15 * A @ Z - A @ Z @ cubic)) / 4
            read = [blend(self._plain_logits(query, list(row.k)), list(row.v)) for query in queries]
            values = [add_up(Z[s, r] * read[r] for r in range(m)) for s in range(m)]
        else:
            keys, values = list(row.k), list(row.v)
        for i in range(N):
            o = blend(self._plain_logits(row.q[i], keys), values)
            for tap in range(self.kernel):
                j = i + tap - self.kernel // 2
                if 0 <= j < N:
                    o = o + self.filter[row.head, tap] * row.v[j]
            outs.append(o)
        return torch.stack(outs)

    def _plain_logits(self, query: Tensor, keys: list[Tensor]) -> Tensor:
        return torch.stack([query @ key * self.shape.head_width**-0.5 for key in keys])


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """softmax(q k^T) v in float32, of which one side is short. On a GPU by products: the fused kernels of float32 go
    over few queries, or few keys, many times slower."""
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=1.0)
    return masked_softmax(q @ k.mT, visible) @ v


def convolve(v: Tensor, taps: Tensor) -> Tensor:
    """v [B, H, T, D] convolved over tokens with the taps [H, n] of each head, zeros around: [B, H, T, D].

    On a GPU a block of tokens is a band matrix times the tokens around it, which matrix units do many times faster than
    a depthwise convolution."""
    n = taps.shape[1]
    if v.device.type != "cuda":
        return F.conv2d(v, taps[:, None, :, None].to(v.dtype), padding=(n // 2, 0), groups=len(taps))
    return convolve_blocks(v, taps)


def convolve_blocks(v: Tensor, taps: Tensor, block: int = 128) -> Tensor:
    T, n = v.shape[2], taps.shape[1]
    reach = n // 2
    block = max(block, reach)
    padded = F.pad(v.transpose(0, 1), (0, 0, block, block + -T % block)).unflatten(2, (-1, block))  # [H, B, m, b, D]
    before, here, after = padded[:, :, :-2, block - reach :], padded[:, :, 1:-1], padded[:, :, 2:, :reach]
    around = torch.cat([before, here, after], 3).permute(0, 3, 1, 2, 4)  # [H, b + 2 reach, B, m, D]
    steps = torch.arange(block + 2 * reach, device=v.device) - torch.arange(block, device=v.device)[:, None]
    inside = (steps >= 0) & (steps < n)
    band = torch.where(inside, taps[:, steps.clamp(0, n - 1)], 0).to(v.dtype)  # [H, b, b + 2 reach]
    o = band @ around.flatten(2)
    return o.unflatten(2, around.shape[2:]).permute(2, 0, 3, 1, 4).flatten(2, 3)[:, :, :T]
