"""A window of neighbours, and summaries of everything that depend on what is there."""

import math
from dataclasses import replace
from typing import Annotated, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core.numeric import masked_softmax
from regard.core.reference import blend, plain_layer_norm
from regard.core.rows import Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress
from regard.kernels import runs, summaries
from regard.kernels.band import band_parts
from regard.kernels.compiling import count_blocks, exporting, is_dynamic
from regard.kernels.parts import Part, Runs, union
from regard.kernels.runs import Bound, Far, Pass, Where
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.cached import write_slots
from regard.layers.attention.checks import input_position
from regard.layers.position.base import angles, rates


class LongShortState(NamedTuple):
    """The last tokens of each row, newest at the right, and the summaries of the chunks that are complete."""

    tail: tuple[Tensor, Tensor, Tensor]  # k, v [B, H, w - 1, D] and p [B, H, w - 1, r]
    long: tuple[Tensor, Tensor]  # k, v [B, H, C, D], r slots per chunk, in order
    progress: Progress


class LongShort(Attention):
    """Zhu et al. 2021: each query attends, in one softmax, to r summaries of the sequence and to a window of it,

        P = softmax over positions of X W_P [N, r] for each head,    K' = P^T K, V' = P^T V,
        o_i = softmax(q_i [LN_G(K'); LN_L(K_window)]^T / sqrt(D)) [LN_G(V'); LN_L(V_window)].

    DualLN: the two norms are over all heads of a token or summary at once, one of them for summaries (LN_G), one for
    tokens (LN_L); norm=False leaves them out. Role "self": the row is cut into windows of w from its start; a query
    sees its own and w / 2 tokens on either side of it. Role "causal": a query sees the last w tokens, itself among
    them, and r summaries of each chunk of c tokens that was complete before its own chunk began.

    Of two forms in the authors' code this is that of the paper: summaries are made of keys and values as projected, and
    then normed. lra=True is the other one, of their code for the Long Range Arena (there role "self" only): of tokens
    normed already, K' = P^T LN_L(K), which LN_G norms again. Their class token and convolution are not here.

    relative=True (causal only) is their language model. With the sinusoids R of a distance, the logit of a token is
    (q_i / sqrt(D) + u) . k_j + (q_i / sqrt(D) + w) . W_R R_(i-j), and that of summary s of the n that a query sees
    q_i / sqrt(D) . (k'_s + b + W_S R_(n-1-s)). What their model keeps of earlier segments it summarises before it
    projects; here all tokens are projected first, however a row is cut.

    The map gives a summary's weight to the tokens that it is made of. Time N (w + r), causal N (w + r N / c).
    """

    facts = Facts(
        name="longshort",
        paper="Zhu et al. 2021, Long-Short Transformer: Efficient Transformers for Language and Vision",
        link="arXiv 2107.02192",
        family="low rank",
        formula="o_i = softmax(q_i [LN(P^T K); LN(K_near)]^T / sqrt(D)) [LN(P^T V); LN(V_near)], P = softmax(X W_P)",
        time=Order("N (w + r), causal N (w + r N / c)", 1),
        memory=Order("N", 1),
        state=Order("w + r N / c", 1),
        roles=("self", "causal"),
        refusals=(("cross", "the window is around a query's own place, and a memory is another sequence"),),
        exact=False,
        independent_heads=False,
        linear=False,
    )
    examples = (
        "longshort(window=4, rank=2, chunk=2)",
        "longshort(window=5, rank=3, chunk=4)",
        "longshort(window=3, rank=1, chunk=1, norm=False)",
        "longshort(window=4, rank=2, chunk=3, lra=True)",
        "longshort(window=5, rank=2, chunk=3, relative=True)",
        "longshort(window=4, rank=0, norm=False, relative=True)",
    )
    piece = 64  # queries at a time where logits are made
    reduces_to = (("longshort(window=66, rank=0, norm=False)", "softmax"),)
    inputs = {"q": "query", "k": "key", "v": "value"}
    rates: Tensor  # of the sinusoids

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, "window size in tokens (w in the paper); causal: the last w, the query's own too"] = 128,
        rank: Annotated[
            int, "number of summaries per head: of the row, or (causal) of each chunk (r in the paper)"
        ] = 8,
        chunk: Annotated[
            int, "causal: chunk size, tokens that are summarised together (l in the paper), at most window"
        ] = 64,
        norm: Annotated[bool, "DualLN: a norm for the tokens and one for the summaries"] = True,
        lra: Annotated[bool, "summaries of normed tokens, as in the authors' code for the Long Range Arena"] = False,
        relative: Annotated[bool, "causal: the relative positions of the authors' language model"] = False,
    ):
        if relative:
            why = "its relative positions are distances to what came before: build it with relative=False"
            self.facts = replace(self.facts, roles=("causal",), refusals=(*self.facts.refusals, ("self", why)))
        super().__init__(shape)
        for name, size, least in (("window", window, 1), ("rank", rank, 0), ("chunk", chunk, 1)):
            if size < least:
                raise ValueError(f"option {name!r} of 'longshort' must be at least {least}, got {size}")
        causal = shape.role == "causal"
        if causal and rank and window < chunk:
            raise ValueError(
                f"window must be at least chunk, got window={window}, chunk={chunk}: a query would see neither all "
                f"tokens of its chunk nor a summary of them"
            )
        if lra and not norm:
            raise ValueError("lra=True makes summaries of normed tokens: it needs norm=True")
        self.window, self.rank, self.chunk, self.lra, self.relative = window, rank, chunk, lra, relative
        self.facts = replace(self.facts, independent_heads=not norm, linear=not norm)
        if causal and rank:
            self.facts = replace(self.facts, time=Order("N (w + r N / c)", 2))
        if causal and not rank:
            self.facts = replace(self.facts, state=Order("w", 0))
        self.position = input_position("longshort", shape, "a summary of many tokens has no distance to a query")
        H, G, D = shape.heads, shape.kv_heads, shape.head_width
        widths = {"q": H * D, "k": G * D, "v": G * D}
        linears = {name: nn.Linear(shape.width, width, bias=shape.input_bias) for name, width in widths.items()}
        self.project = nn.ModuleDict(linears)
        # a bias would be the same at every position, and leave the softmax over positions as it is
        self.summary = nn.Linear(shape.width, H * rank, bias=False) if rank else None
        self.output = nn.Linear(H * D, shape.out_width, bias=shape.output_bias)
        for linear in filter(None, (*linears.values(), self.summary, self.output)):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.near_norm = nn.LayerNorm(H * D) if norm else None
        self.long_norm = nn.LayerNorm(H * D) if norm and rank else None
        if relative:
            self.near_place = nn.Linear(shape.width, H * D, bias=False)  # W_R
            self.long_place = nn.Linear(shape.width, H * D) if rank else None  # W_S and b
            for linear in filter(None, (self.near_place, self.long_place)):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            self.u, self.w = (nn.Parameter(0.02 * torch.randn(H, D)) for _ in range(2))
            self.register_buffer("rates", rates(shape.width, 10000.0), persistent=False)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        q, k, v, p = self._read(x, rows)
        after = None if state is None else self._extended(rows, state, k, v, p)
        if self.shape.role == "self":
            o = self._whole(rows, q, k, v, p)
        elif state is None or after is None or state.progress.longest == 0:
            # before the first token every row starts at 0, ragged or not
            o = self._past(q, k, v, p)
        else:
            o = self._later(rows, state.tail, after.long, q, k, v)
        return Out(self.output(o.transpose(1, 2).flatten(2)), after)

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        def zeros(slots: int, width: int) -> Tensor:
            return torch.zeros(batch, self.shape.heads, slots, width, dtype=dtype, device=device)

        D, W, slots = self.shape.head_width, self.window - 1, -(-(capacity or 0) // self.chunk) * self.rank
        tail, long = (zeros(W, D), zeros(W, D), zeros(W, self.rank)), (zeros(slots, D), zeros(slots, D))
        return Initial(LongShortState(tail, long, Progress.initial(batch, device)))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        q, k, _, p = self._read(x, rows)
        values = values.expand(-1, self.shape.heads, -1, -1)
        if self.shape.role == "self":
            return self._whole(rows, q, k, values, p, probe=True)
        return self._past(q, k, values, p, probe=True)

    def _read(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v [B, H, T, D], lra: normed, and the logits p of the summaries, [B, H, T, r]."""
        x = x if self.position is None else self.position.add(x, rows)
        q, k, v = (self.project_heads(name, x) for name in "qkv")
        if (times := self.shape.heads // self.shape.kv_heads) > 1:
            k, v = (part.repeat_interleave(times, 1) for part in (k, v))
        if self.lra:
            k, v = (self._norm(self.near_norm, part) for part in (k, v))
        if self.summary is None:
            return q, k, v, q[..., :0]
        return q, k, v, self.summary(x).unflatten(2, (-1, self.rank)).transpose(1, 2)

    def project_heads(self, name: str, x: Tensor) -> Tensor:
        """[B, n, E] -> [B, H or G, n, D]"""
        return self.project[name](x).unflatten(2, (-1, self.shape.head_width)).transpose(1, 2)

    def _norm(self, norm: nn.LayerNorm | None, part: Tensor) -> Tensor:
        """A norm over all heads of [B, H, n, D]."""
        if norm is None:
            return part
        return norm(part.transpose(1, 2).flatten(2)).unflatten(2, (self.shape.heads, -1)).transpose(1, 2)

    def _tokens(self, k: Tensor, v: Tensor, probe: bool = False) -> tuple[Tensor, Tensor]:
        """The keys and values of the window; those that probe for a map are no values to norm."""
        norm = None if self.lra else self.near_norm
        return self._norm(norm, k), v if probe else self._norm(norm, v)

    def _summaries(
        self, k: Tensor, v: Tensor, p: Tensor, real: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, Tensor]:
        """r of each of m groups of n tokens: [B, H, m, n, D], p [B, H, m, n, r] -> keys and values [B, H, m r, D]."""
        shares = masked_softmax(p.mT, None if real is None else real[:, None, None, None]).to(k.dtype)
        k, v = ((shares @ part).flatten(2, 3) for part in (k, v))
        return self._norm(self.long_norm, k), v if probe else self._norm(self.long_norm, v)

    def _whole(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, p: Tensor, probe: bool = False) -> Tensor:
        """Role "self"."""
        T, w, r = rows.T, self.window, self.rank
        side = max(w // 2, 1)
        keys, values = self._summaries(k[:, :, None], v[:, :, None], p[:, :, None], rows.real(), probe)
        if not probe and T > 1 and runs.takes(q, k, v):
            low = Bound(every=w, times=w, plus=-side)
            near = Pass(low, low._replace(plus=w + side), Far(r) if r else None)
            where = Where(end=None if rows.uniform_start is not None else rows.count)
            return self._in_runs(near, where, q, *self._tokens(k, v), keys, values)
        n = -(-T // w)
        k, v = (F.pad(part, (0, 0, side, n * w - T + side)) for part in self._tokens(k, v, probe))
        at = torch.arange(-r - side, n * w + side, device=q.device)
        real = (at < -side) | ((at >= 0) & (at < rows.count[:, None]))
        parts = [Part(Runs(0, n * w), Runs(0, r)), Part(Runs(0, w, n, w), Runs(r, w + 2 * side, n, w))]
        q = F.pad(q, (0, 0, 0, n * w - T))
        k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return union(q, k, v, parts, scale=self.scale, real=real)[:, :, :T]

    def _past(self, q: Tensor, k: Tensor, v: Tensor, p: Tensor, probe: bool = False) -> Tensor:
        """Role "causal" from the first token on: what is padded lies behind every real query."""
        T, c, r = q.shape[2], self.chunk, self.rank
        n = 0 if not r else count_blocks(T, c) if is_dynamic(T) else T // c
        parts, in_runs = [], not probe and T > 1 and runs.takes(q, k, v)
        long = None
        if n and in_runs and summaries.takes(k, v, p, c):
            keys, values = summaries.summarise(k, v, p, c)
            long = self._norm(self.long_norm, keys), self._norm(self.long_norm, values)
        elif n:
            # the last chunk may be short of a dynamic length: no query sees its summaries
            tokens = (k, v, p) if not is_dynamic(T) else (F.pad(part, (0, 0, 0, n * c - T)) for part in (k, v, p))
            chunk_k, chunk_v, chunk_p = (part[:, :, : n * c].unflatten(2, (n, c)) for part in tokens)
            long = self._summaries(chunk_k, chunk_v, chunk_p, probe=probe)
            # the queries at one place of their chunks, the first chunk left out, see a summary more each
            rows = Runs(c, n, c, 1, c)
            parts = [] if in_runs else [Part(rows, Runs(i, n, c, 0, r), causal=True) for i in range(r)]
        k, v = self._tokens(k, v, probe)
        if self.relative:
            k, v = (F.pad(part, (0, 0, self.window - 1, 0)) for part in (k, v))
            keys, values = (k[:, :, :0], v[:, :, :0]) if long is None else long
            return self._by_distance(torch.zeros_like(q[:, 0, 0, 0], dtype=torch.long), q, k, v, keys, values)
        if in_runs:
            keys, values = (None, None) if long is None else long
            return self._in_runs(self._window(n * r), Where(), q, k, v, keys, values)
        if long is not None:
            q = F.pad(q, (0, 0, 0, n * c + c - T))
            k, v = torch.cat([long[0], k], 2), torch.cat([long[1], v], 2)
        return union(q, k, v, parts + self._band(T, 0, n * r, q.device), scale=self.scale)[:, :, :T]

    def _later(
        self,
        rows: Rows,
        tail: tuple[Tensor, Tensor, Tensor],
        long: tuple[Tensor, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Role "causal" after the tokens of `tail`, with the summaries up to those of the new tokens."""
        T, W, slots = rows.T, self.window - 1, long[0].shape[2]
        k, v = self._tokens(torch.cat([tail[0], k], 2), torch.cat([tail[1], v], 2))
        if self.relative:
            return self._by_distance(rows.start, q, k, v, *long)
        if T > 1 and runs.takes(q, k, v):
            where = Where(q0=rows.start, k0=rows.start - W)
            return self._in_runs(self._window(slots), where, q, k, v, *(long if slots else (None, None)))
        k, v = torch.cat([long[0], k], 2), torch.cat([long[1], v], 2)
        steps = torch.arange(T, device=q.device)
        complete = (rows.start[:, None] + steps) // self.chunk * self.rank  # [B, T]
        visible = torch.arange(slots, device=q.device) < complete[..., None]
        first = torch.arange(-slots - W, T, device=q.device)
        real = (first < -W) | (first >= -rows.start[:, None])
        parts = [Part(Runs(0, T), Runs(0, slots), mask=visible[:, None, None])]
        return union(q, k, v, parts + self._band(T, W, slots, q.device), scale=self.scale, real=real)

    def _by_distance(self, start: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Role "causal" with relative positions: queries from `start` [B] on, tokens from w - 1 before it on, and the
        summaries from the first one on; a few queries at a time, and again in the backward pass."""
        W, slots = self.window - 1, keys.shape[2]
        near = self._placed(self.near_place, W + 1)
        far = self._placed(self.long_place, slots) if slots and self.long_place is not None else near[:, :0]

        def read(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
            n, device = q.shape[2], q.device
            places, q = torch.arange(n, device=device)[:, None], q * self.scale
            away = places + W - torch.arange(n + W, device=device)  # of a query from the tokens, [n, n + W]
            at = start[:, None, None] + first + places  # [B, n, 1]
            seen = [(away >= 0) & (away <= W) & (away <= at)]
            place = ((q + self.w[:, None]) @ near.mT).gather(3, away.clamp(0, W).expand(*q.shape[:2], -1, -1))
            logits = [(q + self.u[:, None]) @ k.mT + place]
            if slots:
                behind = at // self.chunk * self.rank - 1 - torch.arange(slots, device=device)  # [B, n, slots]
                index = behind.clamp(0, slots - 1)[:, None].expand(-1, q.shape[1], -1, -1)
                logits.append(q @ keys.mT + (q @ far.mT).gather(3, index))
                seen.append(behind >= 0)
            weights = masked_softmax(torch.cat(logits, 3), torch.cat(seen, 2)[:, None]).to(v.dtype)
            return weights[..., : n + W] @ v + weights[..., n + W :] @ values

        if exporting():
            return read(q, k, v, 0)
        T, size = q.shape[2], min(self.piece, q.shape[2])
        n = -(-T // size)
        q, k, v = (F.pad(x, (0, 0, 0, n * size - T)) for x in (q, k, v))
        # views whose gradients are put together once, and not in a tensor of the whole length for each piece
        tokens = [x.unfold(2, size + W, size).mT.unbind(2) for x in (k, v)]
        outs: list[Tensor] = []
        for index, (some_q, some_k, some_v) in enumerate(zip(q.split(size, 2), *tokens, strict=True)):
            inputs = (some_q, some_k, some_v, index * size)
            if torch.is_grad_enabled():
                outs.append(checkpoint(read, *inputs, use_reentrant=False, preserve_rng_state=False))
            else:
                outs.append(read(*inputs))
        return torch.cat(outs, 2)[:, :, :T]

    def _placed(self, linear: nn.Linear, count: int) -> Tensor:
        """The sinusoids of the distances from 0 on as keys: [H, count, D]"""
        angle = angles(torch.arange(count, device=self.u.device), self.rates, self.u.dtype)
        R = torch.cat([angle.sin(), angle.cos()], -1)[:, : self.shape.width].to(self.u.dtype)
        return linear(R).unflatten(1, (self.shape.heads, -1)).transpose(0, 1)

    def _window(self, slots: int) -> Pass:
        """The last w tokens, and the summaries of the chunks before a query's own."""
        far = Far(slots, Bound(every=self.chunk, times=self.rank)) if slots else None
        return Pass(Bound(plus=1 - self.window), Bound(plus=1), far)

    def _in_runs(
        self, near: Pass, where: Where, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None
    ) -> Tensor:
        """Tokens k, v and summaries by kernels that compare positions."""
        far = (None, None) if near.far is None else (keys, values)
        return runs.attend(q, k, v, [near], scale=self.scale, where=where, far_k=far[0], far_v=far[1])

    def _band(self, T: int, shift: int, front: int, device: torch.device) -> list[Part]:
        """The window of T queries over tokens that stand behind `front` summaries and begin `shift` before them."""
        return band_parts(T, before=self.window - 1, after=0, shift=shift, front=front, device=device)

    def _extended(self, rows: Rows, state: LongShortState, k: Tensor, v: Tensor, p: Tensor) -> LongShortState:
        T, W, c, r = rows.T, self.window - 1, self.chunk, self.rank
        joined = [torch.cat([old, new], 2) for old, new in zip(state.tail, (k, v, p), strict=True)]
        batch, device = torch.arange(k.shape[0], device=k.device)[:, None], k.device

        def take(first: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
            """k, v and p of `length` tokens of each row from a slot of the joined ones on."""
            at = (first[:, None] + torch.arange(length, device=device)).clamp(max=W + T - 1)
            k, v, p = (part.transpose(1, 2)[batch, at].transpose(1, 2) for part in joined)
            return k, v, p

        keys, values = state.long
        if r:
            # from the chunk that the new tokens begin in; one that is not complete is seen by no query and made again
            m = (c - 1 + T) // c
            chunk_k, chunk_v, chunk_p = (part.unflatten(2, (m, c)) for part in take(W - rows.start % c, m * c))
            at = (rows.start // c * r)[:, None] + torch.arange(m * r, device=device)
            need = (state.progress.longest // c + m) * r
            new_keys, new_values = self._summaries(chunk_k, chunk_v, chunk_p)
            keys, values = write_slots(keys, new_keys, at, need), write_slots(values, new_values, at, need)
        return LongShortState(take(rows.count, W), (keys, values), state.progress.advance(rows))

    @property
    def scale(self) -> float:
        return self.shape.head_width**-0.5

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        H, D, T = self.shape.heads, self.shape.head_width, len(x)
        x = x if self.position is None else self.position.plain_add(x)
        q, k, v = ([self._plain(name, row) for row in x] for name in "qkv")
        near_k, near_v = ([_plain_norm(row, self.near_norm) for row in rows] for rows in (k, v))
        if self.lra:
            k, v = near_k, near_v
        groups = [range(T)]
        if self.shape.role == "causal":
            groups = [range(first, first + self.chunk) for first in range(0, T - self.chunk + 1, self.chunk)]
        long = [self._plain_summaries(group, x, k, v) for group in groups] if self.rank else []
        y = []
        for i in range(T):
            if self.shape.role == "causal":
                seen = range(max(0, i - self.window + 1), i + 1)
                known = [pair for pairs in long[: i // self.chunk] for pair in pairs]
            else:
                first, side = i // self.window * self.window, max(self.window // 2, 1)
                seen = range(max(0, first - side), min(T, first + self.window + side))
                known = [pair for pairs in long for pair in pairs]
            keys = [key for key, _ in known] + [near_k[j] for j in seen]
            values = [value for _, value in known] + [near_v[j] for j in seen]
            heads = []
            for h in range(H):
                head = slice(h * D, h * D + D)
                logits = torch.stack([self.scale * (q[i][head] @ key[head]) for key in keys])
                if self.relative:
                    tokens = [(i - j, near_k[j][head]) for j in seen]
                    logits = logits + self._plain_places(h, q[i][head], len(known), tokens)
                heads.append(blend(logits, [value[head] for value in values]))
            made = self.output.weight @ torch.cat(heads)
            y.append(made if self.output.bias is None else made + self.output.bias)
        return torch.stack(y)

    def _plain_places(self, head: int, q: Tensor, known: int, tokens: list[tuple[int, Tensor]]) -> Tensor:
        """What relative positions add to the logits of `known` summaries and of tokens, each with its distance."""
        E, D = self.shape.width, self.shape.head_width

        def place(linear: nn.Linear, distance: int) -> Tensor:
            angle = [distance / 10000 ** (2 * n / E) for n in range((E + 1) // 2)]
            R = torch.tensor(([math.sin(a) for a in angle] + [math.cos(a) for a in angle])[:E], dtype=q.dtype)
            key = linear.weight[head * D : head * D + D] @ R
            return key if linear.bias is None else key + linear.bias[head * D : head * D + D]

        q, u, w = q * self.scale, self.u[head], self.w[head]
        added: list[Tensor] = []
        if self.long_place is not None:
            added = [q @ place(self.long_place, known - 1 - s) for s in range(known)]
        return torch.stack(added + [u @ k + (q + w) @ place(self.near_place, away) for away, k in tokens])

    def _plain(self, name: str, row: Tensor) -> Tensor:
        """A projected token with H heads, one behind the other."""
        D, H = self.shape.head_width, self.shape.heads
        linear = cast(nn.Linear, self.project[name])  # a ModuleDict does not say what it holds
        made = linear.weight @ row
        made = made if linear.bias is None else made + linear.bias
        groups = len(made) // D
        return torch.cat([made[h * groups // H * D : h * groups // H * D + D] for h in range(H)])

    def _plain_summaries(
        self, group: range, x: Tensor, k: list[Tensor], v: list[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        assert self.summary is not None, "without a rank there are no summaries"
        D, W, summaries = self.shape.head_width, self.summary.weight, []
        for i in range(self.rank):
            keys, values = [], []
            for h in range(self.shape.heads):
                logits, head = torch.stack([W[h * self.rank + i] @ x[j] for j in group]), slice(h * D, h * D + D)
                keys.append(blend(logits, [k[j][head] for j in group]))
                values.append(blend(logits, [v[j][head] for j in group]))
            pair = (_plain_norm(torch.cat(keys), self.long_norm), _plain_norm(torch.cat(values), self.long_norm))
            summaries.append(pair)
        return summaries


def _plain_norm(vector: Tensor, norm: nn.LayerNorm | None) -> Tensor:
    return vector if norm is None else plain_layer_norm(vector, norm)
