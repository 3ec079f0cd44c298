"""Blocks of queries that share one neighbourhood, along a line or on an image."""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.compiling import count_blocks, is_one
from regard.kernels.parts import Blocks, Part, Runs, union
from regard.kernels.runs import Bound, Pass
from regard.layers.attention.base import Facts
from regard.layers.attention.tailed import Tailed

ENDLESS = 1 << 40  # columns of a line


class Image(Tailed):
    """Parmar et al. 2018: tokens are cut into blocks that do not overlap, and all queries of a block see the block and
    the memory around it: o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over the j in the memory block of i.

    1-D: blocks of l_q tokens, and l_m tokens on either side of a block; causal: the past of those, so l_m tokens before
    the block and the block up to the query. Theirs are l_q = l_m = 256, and a causal row shorter than two blocks is
    read as a whole, which it is not here.

    2-D: blocks of h x w cells of an image, and f_h rows above and below them, f_w columns to the left and right. The
    tokens are the cells in the order of generation, block by block and row by row inside a block, for an image of any
    height; `order(height)` lists them. Causal: the past in that order, which is the memory above the block, with its
    corners, the memory to its left, and the block up to the query. On a small image all cells are compared. Time N
    (block + memory), memory N.
    """

    facts = Facts(
        name="image",
        paper="Parmar et al. 2018, Image Transformer",
        link="arXiv 1802.05751",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over the block of i and the memory around it",
        time=Order("N (block + memory)", 1),
        memory=Order("N", 1),
        state=Order("block + memory", 0),
        roles=("self", "causal"),
        refusals=(("cross", "the memory of a block is around its own place, not in another sequence"),),
        positions=("rotation",),
    )
    examples = (
        "image(block=4, memory=3)",
        "image(block=3, memory=5)",
        "image(block=[2, 3], memory=[1, 2], width=6)",
        "image(block=[1, 2], memory=[1, 1], width=4)",
    )
    reduces_to = (
        ("image(block=33, memory=0)", "softmax"),
        ("image(block=4, memory=64)", "softmax"),
        ("image(block=1, memory=5)", "local(window=5)"),
        ("image(block=[1, 6], memory=[2, 0], width=6)", "image(block=6, memory=12)"),
    )
    grouped = True

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int | tuple[int, ...], "query block: tokens (l_q), or [rows, columns]"] = 256,
        memory: Annotated[
            int | tuple[int, ...], "tokens seen on either side of a block (l_m), or [rows, columns]"
        ] = 256,
        width: Annotated[int | None, "width of the image, for a block of rows and columns"] = None,
    ):
        super().__init__(shape)
        if isinstance(block, int) and isinstance(memory, int) and width is None:
            # a line is an image of one row without end
            sizes, around, W = (1, block), (0, memory), ENDLESS
        elif not (isinstance(block, int) or isinstance(memory, int) or width is None):
            sizes, around, W = tuple(block), tuple(memory), width
        else:
            raise ValueError(
                f"'image' takes block=l_q, memory=l_m, or block=[h, w], memory=[f_h, f_w], width=W, got block={block}, "
                f"memory={memory}, width={width}"
            )
        if len(sizes) != 2 or len(around) != 2:
            raise ValueError(f"block and memory of 'image' are rows and columns, got block={block}, memory={memory}")
        if min(sizes) < 1 or min(around) < 0:
            raise ValueError(
                f"a block of 'image' has at least 1 token, and its memory 0 or more, got block={block}, memory={memory}"
            )
        if W != ENDLESS and (W < 1 or W % sizes[1]):
            raise ValueError(
                f"option 'width' of 'image' must be a multiple of the columns of a block, got width={width} and "
                f"block={block}: pad the image, or choose another block"
            )
        (h, w), (f_h, f_w) = sizes, (around[0], min(around[1], W))
        self.flat, self.block, self.memory, self.width = W == ENDLESS, (h, w), (f_h, f_w), W
        L = self.size
        first = (-f_h // h * (W // w) + -f_w // w) * L + -f_h % h * w + -f_w % w
        self.reach = L - 1 - first
        # what a block sees around it, by the distance to its upper left cell; causal: what comes before it
        causal, columns = shape.role == "causal", range(-f_w, w + f_w)
        self.beside: list[tuple[range, range]] = [(range(-f_h, 0), columns), (range(h), range(-f_w, 0))]
        self.beside += [] if causal else [(range(h), range(w, w + f_w)), (range(h, h + f_h), columns)]

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.block[0] * self.block[1]

    @property
    def _keys(self) -> int:
        """Tokens that a block and the memory around it have."""
        return self.size + sum(len(rows) * len(columns) for rows, columns in self.beside)

    def order(self, height: int) -> Tensor:
        """The cells of an image, numbered row by row, in the order of generation: x[:, order] makes them tokens."""
        (h, w), W = self.block, self.width
        if height % h or self.flat:
            raise ValueError(f"order is for an image whose height is a multiple of {h} rows of a block, got {height}")
        return torch.arange(height * W).view(height // h, h, W // w, w).transpose(1, 2).flatten()

    @classmethod
    def grid_option(cls, options: Mapping[str, Any]) -> str | None:
        return "width" if isinstance(options.get("block"), tuple | list) else None

    def grid_order(self, rows: int) -> Tensor | None:
        return None if self.flat else self.order(rows)

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flat and mask.T > 1 and runs.takes(q, k, v):
            (_, l), (_, m) = self.block, self.memory
            block = Bound(every=l, times=l, plus=-m)
            near = Pass(block, Bound(plus=1) if mask.causal else block._replace(plus=l + m))
            return runs.attend(q, k, v, [near], scale=self.scale, where=mask.where())
        if not mask.aligned:
            return self.attend_past(mask, q, k, v, self._sees)
        if not self.flat and self.takes_whole(mask, self._keys):
            return self.attend_whole(mask, q, k, v, self._sees)
        T, L = mask.T, self.size
        n = count_blocks(T, L)
        if is_one(n):
            return self.product(mask, q, k, v, self.scale)
        q, k, v = (F.pad(part, (0, 0, 0, n * L - T)) for part in (q, k, v))
        blocks, (around, inside) = Runs(0, L, n, L), self._around(n, q.device)
        parts = [
            Part(blocks, blocks, causal=mask.causal),
            Part(blocks, Blocks(around), mask=inside[:, None, None]),
        ]
        # what a causal query sees lies before it
        real = None if mask.causal else torch.arange(n * L, device=q.device) < mask.end[:, None]
        return union(q, k, v, parts, scale=self.scale, real=real)[:, :, :T]

    def _around(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tokens around n blocks that they see, [n, M], and which of them are inside the image."""
        (h, w), across = self.block, self.width // self.block[1]
        # made on the device, not copied to it: a CUDA graph may not copy from the host
        cells = [[torch.arange(side.start, side.stop, device=device) for side in part] for part in self.beside]
        down, right = torch.cat([torch.cartesian_prod(*part) for part in cells]).unbind(1)
        block = torch.arange(n, device=device)[:, None]
        row, column = block // across * h + down, block % across * w + right
        at = (row // h * across + column // w) * h * w + row % h * w + column % w
        inside = (row >= 0) & (column >= 0) & (column < self.width) & (at < n * h * w)
        return torch.where(inside, at, 0), inside

    def _sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether token j is in the memory of the block of i, or in the block."""
        (h, w), (f_h, f_w), across = self.block, self.memory, self.width // self.block[1]
        top, left = i // (h * w) // across * h, i // (h * w) % across * w
        row, column = j // (h * w) // across * h + j % (h * w) // w, j // (h * w) % across * w + j % w
        high = (row >= top - f_h) & (row < top + h + f_h)
        return high & (column >= left - f_w) & (column < left + w + f_w)

    def plain(self, row: Row) -> Tensor:
        (h, w), (f_h, f_w), cells = self.block, self.memory, []
        corner = [0, 0]
        while len(cells) < row.T:
            cells += [(corner[0] + r, corner[1] + c, *corner) for r in range(h) for c in range(w)]
            corner[1] += w
            if corner[1] == self.width:
                corner = [corner[0] + h, 0]
        outs = []
        for i in range(row.T):
            top, left = cells[i][2:]
            rows, columns = range(top - f_h, top + h + f_h), range(left - f_w, left + w + f_w)
            seen = [j for j in row.past(i) if cells[j][0] in rows and cells[j][1] in columns]
            outs.append(row.attend(i, seen, self.scale))
        return torch.stack(outs)
