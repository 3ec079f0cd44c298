"""Segments that read the ones before them, and of those before these a compressed form."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import wide_dtype
from regard.core.parallel import batch_sum
from regard.core.reference import Row, add_up, blend
from regard.core.rows import Mask, Memory, Rows
from regard.core.shape import Order, Shape
from regard.core.state import Progress
from regard.kernels.compiling import count_blocks, exporting, is_dynamic, surely_at_most
from regard.kernels.runs import Bound, Far, Pass, Where
from regard.layers.attention.base import Facts
from regard.layers.attention.segmented import Segmented, stretch

Function = Literal["conv", "dilated", "mean", "max", "used"]
Loss = Literal["attention", "autoencoding", "none"]
Parts = tuple[Tensor, ...]


class CompressiveState(NamedTuple):
    """The last tokens and the last compressed slots of each row, newest at the right: each as the layer read it, and
    where no gradients flow as key and value too."""

    tail: Parts  # x [B, 1, W, E], and perhaps k and v [B, G, W, D]
    slots: Parts  # the same of C slots
    usage: Tensor  # [B, n]: the weight that this segment has given to the oldest tokens of the memory
    progress: Progress


class Grid(NamedTuple):
    """The tokens of a call padded to whole segments, from the beginning of the one that the first stands in."""

    q: Tensor  # [B, H, m n, D], or the one query of a step
    tokens: Parts  # x, k and v of M + m n tokens, from M before that beginning on
    inside: Tensor  # [B] where in its segment the first token stands
    m: int
    step: bool
    joined: Parts = ()  # x, k and v of what the state kept, followed by what is new

    def places(self, rows: Rows, n: int) -> Tensor:
        """The positions of the queries, [B, m, n] or [B, 1, 1]."""
        if self.step:
            return rows.start[:, None, None]
        first = (rows.start - self.inside)[:, None] + n * torch.arange(self.m, device=self.q.device)
        return first[..., None] + torch.arange(n, device=self.q.device)


class Compressive(Segmented):
    """Rae et al. 2020: a row is cut into segments of n tokens. A segment that begins at a reads, causally, itself, the
    memory m of the n_m tokens before a, and the compressed memory cm of what is older than that: when a segment is
    over, the oldest n inputs of the layer in m become n / c slots, f_c(old), of which the last n_cm are kept. Keys and
    values come from [cm; m; h], and relative distances are counted in this sequence as if each slot were a token:

        o_i = softmax((q_i . [cm; m; h] W_K + positions) / sqrt(D)) [cm; m; h] W_V.

    f_c: "mean" and "max" over c tokens; "conv", a convolution of width and stride c; "dilated", the same with every
    second of 2 c tokens (the paper gives no width; zeros beyond the n tokens); "used", the n / c tokens that the
    segment's own queries gave most weight, summed over queries and heads, in order. Only the convolutions have anything
    to learn, and they learn from an auxiliary loss alone, a mean over the real tokens and the width that trains nothing
    else:

        "attention":     |attn(h, old) - attn(h, f_c(old))|^2 without positions, h the inputs of the segment,
        "autoencoding":  |old - g(f_c(old))|^2, g a transposed convolution;

    with "none" the gradients of the output go through them (the paper's BPTT). Segments are counted from the first
    token of a row, so the cut of `extend` does not matter; `regard.detach(state)` between segments is the paper's stop
    of gradients. No code of the authors was found. The map shares the weight of a slot among the tokens it stands for.
    Time N (n + n_m + n_cm), memory N.
    """

    facts = Facts(
        name="compressive",
        paper="Rae et al. 2020, Compressive Transformers for Long-Range Sequence Modelling",
        link="arXiv 1911.05507",
        family="recurrence",
        formula="o_i = softmax((q_i . K + positions) / sqrt(D)) V, K and V of [cm; m; h], cm <- f_c(old of m)",
        time=Order("N (segment + memory + compressed)", 1),
        memory=Order("N", 1),
        state=Order("segment + memory + compressed", 0),
        roles=("causal",),
        refusals=(
            ("self", "a segment reads those before it, so it has a direction"),
            ("cross", "what a segment reads beside itself are tokens of its own row"),
        ),
        positions=("bias", "content"),
        exact=False,
        linear=False,
    )
    examples = (
        "compressive(segment=4, memory=4, compressed=5, rate=2, loss='none')",
        "compressive(segment=4, memory=8, compressed=2, rate=4, function='mean', clamp=5)",
        "compressive(segment=6, memory=6, compressed=9, rate=3, function='max')",
        "compressive(segment=4, memory=4, compressed=5, rate=2, function='dilated', loss='none')",
        "compressive(segment=10, memory=10, compressed=3, rate=5, function='used')",
        "compressive(segment=4, memory=4, compressed=5, rate=2)",
        "compressive(segment=3, memory=6, compressed=5, rate=3, function='dilated', loss='autoencoding')",
    )
    reduces_to = (
        (
            "compressive(segment=4, memory=8, compressed=33, rate=1, function='mean', relative=False)",
            "softmax",
        ),
        (
            "compressive(segment=4, memory=4, compressed=8, rate=1, function='max', relative=False)",
            "xl(segment=4, memory=12, relative=False)",
        ),
    )

    def __init__(
        self,
        shape: Shape,
        *,
        segment: Annotated[int, "segment length in tokens (n_s in the paper)"] = 512,
        memory: Annotated[int, "memory length in tokens (n_m), a multiple of segment"] = 512,
        compressed: Annotated[int, "number of slots of the compressed memory (n_cm)"] = 512,
        rate: Annotated[int, "compression rate: tokens per slot (c), a divisor of segment"] = 4,
        function: Annotated[Function, "compression function (f_c)"] = "conv",
        loss: Annotated[
            Loss, "auxiliary loss that trains the convolutions; 'none': they learn from the output"
        ] = "attention",
        relative: Annotated[bool, "relative positions of Transformer-XL, unless the layer has another scheme"] = True,
        clamp: Annotated[int | None, "largest relative distance, to which others are clamped; None: no limit"] = None,
    ):
        sizes = (("segment", segment), ("memory", memory), ("compressed", compressed), ("rate", rate))
        for name, size in sizes:
            if size < 1:
                raise ValueError(f"option {name!r} of 'compressive' must be at least 1, got {size}")
        if memory % segment or segment % rate:
            raise ValueError(
                f"'compressive' moves whole segments through its memory and makes whole slots of them: memory must be "
                f"a multiple of segment and segment one of rate, got memory={memory}, segment={segment}, rate={rate}"
            )
        super().__init__(shape, segment=segment, memory=memory, relative=relative, clamp=clamp)
        self.compressed, self.rate, self.function, self.slots_per_segment = compressed, rate, function, segment // rate
        learns = function in ("conv", "dilated")
        self.loss: Loss = loss if learns else "none"
        free = function != "used"
        self.facts = replace(
            self.facts, auxiliary_loss=self.loss != "none", independent_heads=free, dynamic_length=free
        )
        E = shape.width
        self.squeeze = nn.Conv1d(E, E, rate, rate, dilation=1 + (function == "dilated")) if learns else None
        self.restore = nn.ConvTranspose1d(E, E, rate, rate) if self.loss == "autoencoding" else None

    def learn(
        self,
        rows: Rows,
        query: dict[str, Tensor],
        source: dict[str, Tensor],
        memory: Memory | None,
        state: CompressiveState | None,
    ) -> Tensor | None:
        if self.loss == "none":
            return None
        q, M, n, T = query["q"], self.memory, self.segment, rows.T
        if state is not None:
            grid = self._grid(rows, query, source, state)
            return self._loss(
                rows, grid.q, tuple(part[:, :, : grid.m * n] for part in grid.tokens), grid.places(rows, n)
            )
        if M >= T:
            # nothing leaves the memory of a row that is no longer than it
            return q.new_zeros(())
        m = count_blocks(T, n) - M // n  # segments behind which one leaves the memory
        q = F.pad(q, (0, 0, 0, M + m * n - T))[:, :, M:]
        places = torch.arange(M, M + m * n, device=q.device).unflatten(0, (m, n))[None]
        return self._loss(rows, q, tuple(part[:, :, : m * n] for part in source.values()), places)

    def attend_values(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], memory: Memory | None
    ) -> Tensor:
        return self._attend_grid(rows, self._grid(rows, query, source, None), source, None, probe=True)[0]

    def probe_state(self, state: Any, first: int) -> NoReturn:
        raise ValueError(
            "attention 'compressive' keeps slots, not tokens, so a state has no map: call weights(x) without a state, "
            "on the whole sequence"
        )

    def project_sources(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x[:, None]} | super().project_sources(x)

    def attend_self(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: CompressiveState | None
    ) -> tuple[Tensor, CompressiveState | None]:
        if "x" not in source:
            raise ValueError(
                "attention 'compressive' makes the keys of its slots by parameters of its own, so it is no plain "
                "function of q, k and v: build it with regard.attention('compressive', width=..., heads=...)"
            )
        if state is None and (o := self._in_one(rows, query["q"], source)) is not None:
            return o, None
        return self._attend_grid(rows, self._grid(rows, query, source, state), source, state)

    def _in_one(self, rows: Rows, q: Tensor, source: dict[str, Tensor]) -> Tensor | None:
        """Whole rows by one kernel, where it takes them: the slots are its far keys."""
        n, M, C, T = self.segment, self.memory, self.compressed, rows.T
        if self.function == "used" or exporting() or n + M >= T:
            return None
        each, m = self.slots_per_segment, count_blocks(T, n) - M // n - 1  # segments that leave the memory and are read

        def slots() -> tuple[Tensor, Tensor]:
            made = self._slots(source["x"][:, 0, : m * n].unflatten(1, (m, n)))
            return self.project_heads("k", made), self.project_heads("v", made)

        # what a query sees of the slots are the last C of the segments that left before its own began
        far = Far(m * each, Bound(-M, n, each), span=C, apart=n - each)
        near = Pass(Bound(every=n, times=n, plus=-M), Bound(plus=1), far)
        return self.in_runs(q, source["k"], source["v"], near, min(C, m * each) + M + n, far=slots)

    def empty_state(
        self, batch: int, capacity: int | None, dtype: torch.dtype, device: torch.device
    ) -> CompressiveState:
        def zeros(slots: int) -> Parts:
            return (torch.zeros(batch, 1, slots, self.shape.width, dtype=dtype, device=device),)

        usage = torch.zeros(batch, self.segment, dtype=wide_dtype(dtype), device=device)
        return CompressiveState(zeros(self.reach), zeros(self.compressed), usage, Progress.initial(batch, device))

    def _grid(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: CompressiveState | None
    ) -> Grid:
        q, M, n, T = query["q"], self.memory, self.segment, rows.T
        if state is None:
            m = count_blocks(T, n)
            room = m * n - T
            tokens = tuple(F.pad(part, (0, 0, M, room)) for part in source.values())
            return Grid(F.pad(q, (0, 0, 0, room)), tokens, rows.start, m, step=False)
        inside, m = rows.start % n, -(-(n - 1 + T) // n)
        joined = self._joined(state.tail, source.values())
        at = self._plain_step(rows)
        if at is not None:
            # of the segment as much as there is
            tokens = tuple(part[:, :, n - 1 - at % n :] for part in joined)
        else:
            tokens = tuple(stretch(part, n - 1 - inside, M + m * n) for part in joined)
        return Grid(q if T == 1 else stretch(q, -inside, m * n), tokens, inside, m, T == 1, joined)

    def _plain_step(self, rows: Rows) -> int | None:
        """The position of a step that needs no grid: see `step_position`."""
        return None if self.function == "used" else self.step_position(rows)

    def _joined(self, old: Parts, new: Iterable[Tensor]) -> Parts:
        """x, k and v of what a state keeps, followed by what is new."""
        return tuple(torch.cat(pair, 2) for pair in zip(self._full(old), new, strict=True))

    def _full(self, parts: Parts) -> Parts:
        if len(parts) == 3:
            return parts
        return (parts[0], *(self.project_heads(name, parts[0][:, 0]) for name in "kv"))

    def _attend_grid(
        self, rows: Rows, grid: Grid, source: dict[str, Tensor], state: CompressiveState | None, probe: bool = False
    ) -> tuple[Tensor, CompressiveState | None]:
        """`probe`: the values are those of a map, and the value of a slot is the mean of its tokens'."""
        n, C, T = self.segment, self.compressed, rows.T
        if state is None and surely_at_most(T, n + self.memory):
            # the first segment that reads a slot begins behind these
            return self.whole(rows, grid.q[:, :, :T], source["k"], source["v"]), None
        if state is None:
            slots = tuple(part.new_zeros(*part.shape[:2], C, part.shape[3]) for part in grid.tokens)
            usage = grid.q.new_zeros(len(grid.q), n, dtype=wide_dtype(grid.q.dtype))
        else:
            slots, usage = self._full(state.slots), state.usage
        usages = None
        if self.function == "used":
            o, slots, usages = self._one_by_one(rows, grid, slots, usage, probe)
        else:
            # most steps of decoding end no segment
            idle = grid.step and rows.uniform_start is not None and (rows.uniform_start + 1) % n != 0
            if torch.compiler.is_compiling() or not idle:
                slots = self._joined(slots, self._compressed(grid, probe))
            o = self._attend_segments(rows, grid, slots)
        if state is None:
            return o[:, :, :T], None
        over = (grid.inside + rows.count) // n  # segments that ended
        if usages is not None:
            usage = usages.gather(1, over[:, None, None].expand(-1, 1, n))[:, 0]
        new = rows.count
        if rows.uniform_start is not None:
            over, new = (rows.uniform_start % n + T) // n, T
        slots = tuple(stretch(part, over * self.slots_per_segment, C) for part in slots)
        tail = tuple(stretch(part, new, self.reach) for part in grid.joined)
        if torch.is_grad_enabled() and len(state.tail) == 1:
            tail, slots = tail[:1], slots[:1]
        state = CompressiveState(tail, slots, usage, state.progress.advance(rows))
        return o if grid.step else stretch(o, grid.inside, T), state

    def _attend_segments(self, rows: Rows, grid: Grid, slots: Parts) -> Tensor:
        """Each segment of the queries over its slots and tokens."""
        (M, n, C), m = (self.memory, self.segment, self.compressed), grid.m
        at = self._plain_step(rows)
        if at is not None:
            begin = max(0, at // n * n - M)
            old, new = min(begin // self.rate, C), at - begin + 1
            k, v = (
                torch.cat([older[:, :, C - old : C], newer[:, :, -new:]], 2) if old else newer[:, :, -new:]
                for older, newer in zip(slots[1:], grid.tokens[1:], strict=True)
            )
            return self.last(grid.q, k, v)
        q = self._folded(grid.q, m)
        k, v = (
            torch.cat([old.unfold(2, C, self.slots_per_segment)[:, :, :m], new.unfold(2, M + n, n)], 4)
            for old, new in zip(slots[1:], grid.tokens[1:], strict=True)
        )
        k, v = (part.permute(0, 2, 1, 4, 3).flatten(0, 1) for part in (k, v))  # [B m, G, C + M + n, D]
        first = grid.places(rows, n)[..., 0]  # [B, m]
        begin = first // n * n - M
        # slots are counted as places just before the memory, and places from the first that is visible
        lowest = begin.clamp(min=0) - (begin.clamp(min=0) // self.rate).clamp(max=C)
        end = (rows.start + rows.count)[:, None]
        q0, k0, end = ((place - lowest).flatten() for place in (first, begin - C, end))
        o = None
        if self.function != "used":
            o = self.in_runs(q, k, v, Pass(high=Bound(plus=1)), C + M + n, Where(q0, k0, end))
        if o is None:
            shift = None if grid.step else M + C
            mask = Mask(q0, k0, end, q.shape[2], C + M + n, causal=True, full=False, shift=shift)
            o = self.attend(mask, q, k, v)
        return o.unflatten(0, (-1, m)).transpose(1, 2).flatten(2, 3)

    def _one_by_one(
        self, rows: Rows, grid: Grid, slots: Parts, usage: Tensor, probe: bool
    ) -> tuple[Tensor, Parts, Tensor]:
        """For "used", where the slots of a segment depend on what the one before it attended to. The last result is the
        usage of each segment so far, [B, m + 1, n]."""
        M, n, C, q = self.memory, self.segment, self.compressed, grid.q
        if is_dynamic(grid.m):
            raise ValueError(
                "attention 'compressive' with function='used' cannot be exported with a dynamic length: it goes over "
                "the segments one by one, as each keeps what the one before it attended to; export it with a fixed "
                "length, or choose another function"
            )
        # of all that a segment reads, the n oldest tokens of the memory, which stand behind the slots
        oldest = torch.eye(M + n, n, dtype=q.dtype, device=q.device).expand(len(q), self.shape.kv_heads, -1, -1)
        nothing = oldest.new_zeros(*oldest.shape[:2], C, n)
        places, outs, usages, pieces = grid.places(rows, n), [], [], [slots]
        end = rows.start + rows.count
        asked = (places >= rows.start[:, None, None]) & (places < end[:, None, None])
        # split once: the gradient of each slice of a whole would be as large as the whole
        windows = zip(*(part.unfold(2, M + n, n).mT.unbind(2) for part in grid.tokens), strict=True)
        for i, (queries, tokens) in enumerate(zip(q.split(n, 2), windows, strict=True)):
            start = places[:, i, 0]
            at = rows._replace(start=start, count=end - start)
            part = grid._replace(q=queries, tokens=tokens, inside=start % n, m=1)
            outs.append(self._attend_segments(at, part, slots))
            with torch.no_grad():
                weights = self._read_units(at, part, slots, oldest, nothing).to(usage.dtype).mean(1)  # [B, n, n]
                weights = torch.where(asked[:, i, :, None], weights, 0).sum(1)
                usages.append(usage + weights if i == 0 else weights)
                chosen = usages[-1].topk(self.slots_per_segment, 1).indices.sort(1).values[:, None, :, None]
            kept = tuple(part.gather(2, chosen.expand(-1, part.shape[1], -1, part.shape[3])) for part in tokens)
            kept = kept if probe else self._full(kept[:1])
            pieces.append(kept)
            slots = tuple(part[:, :, self.slots_per_segment :] for part in self._joined(slots, kept))
        slots = tuple(torch.cat(parts, 2) for parts in zip(*pieces, strict=True))
        return torch.cat(outs, 2), slots, torch.stack([*usages, torch.zeros_like(usage)], 1)

    def _read_units(self, rows: Rows, grid: Grid, slots: Parts, units: Tensor, nothing: Tensor) -> Tensor:
        """What each query of a segment gives to each token that has a unit vector as its value."""

        def read(values: Tensor) -> Tensor:
            at = grid._replace(tokens=(*grid.tokens[:2], values))
            return self._attend_segments(rows, at, (*slots[:2], nothing[..., : values.shape[3]]))

        if self.position is None or self.position.facts.kind != "content":
            return read(units)
        # such a scheme may add a vector as wide as a head to what is read, whatever the values are
        D, n = self.shape.head_width, units.shape[3]
        nothing = nothing.new_zeros(*nothing.shape[:3], D)
        parts = F.pad(units, (0, -n % D)).split(D, 3)
        added = read(torch.zeros_like(parts[0]))
        return torch.cat([read(part) - added for part in parts], 3)[..., :n]

    def _compressed(self, grid: Grid, probe: bool) -> Parts:
        """x, k and v of the slots that the segments become which leave the memory."""
        x, _, v = (part[:, :, : part.shape[2] - self.memory] for part in grid.tokens)
        slots = self._slots(x[:, 0].unflatten(1, (grid.m, self.segment)))
        k, projected = (self.project_heads(name, slots) for name in "kv")
        return slots[:, None], k, v.unflatten(2, (-1, self.rate)).mean(3) if probe else projected

    def _slots(self, x: Tensor) -> Tensor:
        """What m segments become that leave the memory, [B, m, n, E] -> [B, m n / c, E]."""
        slots = self._squeezed(x).flatten(1, 2)
        return slots if self.loss == "none" else slots.detach()

    def _squeezed(self, x: Tensor) -> Tensor:
        """f_c: [B, m, n, E] -> [B, m, n / c, E]"""
        if self.squeeze is None:
            blocks = x.unflatten(2, (-1, self.rate))
            return blocks.mean(3) if self.function == "mean" else blocks.amax(3)
        if self.function == "conv":
            # the tokens of a slot are one vector: a matrix product, without moving channels to the front and back
            weight = self.squeeze.weight.transpose(1, 2).flatten(1)
            return F.linear(x.unflatten(2, (-1, self.rate)).flatten(3), weight, self.squeeze.bias)
        flat = F.pad(x.flatten(0, 1).mT, ((self.rate - 1) // 2, self.rate // 2))  # [B m, E, n + c - 1]
        return self.squeeze(flat).mT.unflatten(0, x.shape[:2])

    def _loss(self, rows: Rows, q: Tensor, tokens: Parts, places: Tensor) -> Tensor:
        """What is lost by compressing the segment that leaves the memory, for each query that is among the last to read
        it; only the compression learns from it. Queries [B, H, m n, D] (or of a step one) at `places` [1 or B, m, n],
        and x, k and v of the m segments of n tokens that leave when theirs is over."""
        n, m = self.segment, places.shape[1]
        x, k, v = (part.detach() for part in tokens)
        old = x[:, 0].unflatten(1, (m, n))
        slots = self._squeezed(old)
        if self.restore is not None:
            restored = self.restore(slots.flatten(0, 1).mT).mT.unflatten(0, (-1, m))
            lost = (restored - old).square().mean((2, 3))[..., None]  # [B, m, 1]
        else:
            new = []
            for name in "kv":
                linear, flat = self.linear_of(name), slots.flatten(1, 2)
                bias = None if linear.bias is None else linear.bias.detach()
                new.append(F.linear(flat, linear.weight.detach(), bias).unflatten(2, (-1, self.shape.head_width)))
            q, gqa, reads = self._folded(q.detach(), m), self.shape.heads != self.shape.kv_heads, []
            for pair in ((k, v), (part.transpose(1, 2) for part in new)):
                key, value = (self._folded(part, m) for part in pair)
                reads.append(F.scaled_dot_product_attention(q, key, value, scale=self.scale, enable_gqa=gqa))
            lost = (reads[0] - reads[1]).square().mean((1, 3)).unflatten(0, (-1, m))  # [B, m, n]
        asked = (places >= rows.start[:, None, None]) & (places < (rows.start + rows.count)[:, None, None])
        asked = asked & (places >= self.memory)
        return batch_sum(torch.where(asked, lost, 0).sum()) / batch_sum(asked.sum()).clamp(min=1)

    def _folded(self, part: Tensor, m: int) -> Tensor:
        """[B, H, m n, D] -> [B m, H, n, D]"""
        return part.unflatten(2, (m, -1)).transpose(1, 2).flatten(0, 1)

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)
        M, n, T, heads = self.memory, self.segment, len(x), range(self.shape.heads)
        tokens = [{name: self.plain_input(name, h, x, x) for name in self.inputs} for h in heads]
        slots, outs = [], [[] for _ in heads]
        for begin in range(0, T, n):
            known = slots[-self.compressed :]
            lowest, usage = max(0, begin - M) - len(known), [0.0] * n
            for h in heads:
                keys, values = (dict(enumerate(tokens[h][name])) for name in "kv")
                for j, slot in enumerate(known, start=lowest):
                    keys[j], values[j] = (self.plain_input(name, h, x, slot[None])[0] for name in "kv")
                # keys and values by their places, of which slots have some below 0: no tensor is indexed so
                sources = cast(dict[str, Tensor], {"q": tokens[h]["q"], "k": keys, "v": values})
                row = Row(h, True, T, T, sources, self.position)
                for i in range(begin, min(begin + n, T)):
                    seen = range(lowest, i + 1)
                    outs[h].append(row.attend(i, seen, self.scale))
                    if self.function != "used" or begin < M:
                        continue
                    logits = torch.stack([self.scale * row.product(i, j) + row.bias(i, j) for j in seen]).detach()
                    for place in range(n):
                        one = [torch.tensor(float(j == begin - M + place), dtype=x.dtype) for j in seen]
                        usage[place] += float(blend(logits, one))
            if begin >= M:
                made = self._plain_squeezed(x[begin - M : begin - M + n], usage)
                slots += made if self.loss == "none" else [slot.detach() for slot in made]
        y = torch.cat([torch.stack(out) for out in outs], -1) @ self.output.weight.T
        return y if self.output.bias is None else y + self.output.bias

    def reference_loss(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x, errors = x.detach() if self.position is None else self.position.plain_add(x.detach()), []
        for i in range(self.memory, len(x)):
            first = i // self.segment * self.segment - self.memory
            old = x[first : first + self.segment]
            slots = torch.stack(self._plain_squeezed(old, []))
            if self.restore is not None:
                # slot s gives the tokens s c + u
                made = torch.einsum("se,efu->suf", slots, self.restore.weight).flatten(0, 1)
                made = made if self.restore.bias is None else made + self.restore.bias
                errors.append(((made - old) ** 2).mean())
                continue
            lost = []
            for h in range(self.shape.heads):
                (q,) = self.plain_input("q", h, x[i : i + 1], x).detach()
                reads = []
                for source in (old, slots):
                    k, v = (self._frozen(name, h, source) for name in "kv")
                    reads.append(blend(torch.stack([self.scale * (q @ key) for key in k]), list(v)))
                lost.append(((reads[0] - reads[1]) ** 2).mean())
            errors.append(add_up(lost) / len(lost))
        return add_up(errors) / len(errors) if errors else x.new_zeros(())

    def _frozen(self, name: str, h: int, x: Tensor) -> Tensor:
        """Keys or values of a head, by a projection that does not learn."""
        D, linear = self.shape.head_width, self.linear_of(name)
        first = h * self.shape.kv_heads // self.shape.heads * D
        projected = x @ linear.weight.detach()[first : first + D].T
        return projected if linear.bias is None else projected + linear.bias.detach()[first : first + D]

    def _plain_squeezed(self, old: Tensor, usage: list[float]) -> list[Tensor]:
        c, n = self.rate, self.segment
        if self.function == "used":
            return [old[i] for i in sorted(sorted(range(n), key=lambda i: -usage[i])[: n // c])]
        slots = []
        for first in range(0, n, c):
            if self.function == "mean":
                slot = add_up(old[first + u] for u in range(c)) / c
            elif self.squeeze is None:
                slot = old[first : first + c].max(0).values
            else:
                step, left = (2, (c - 1) // 2) if self.function == "dilated" else (1, 0)
                places = [first + step * u - left for u in range(c)]
                weight, bias = self.squeeze.weight, self.squeeze.bias
                slot = add_up(weight[:, :, u] @ old[j] for u, j in enumerate(places) if 0 <= j < n)
                slot = slot if bias is None else slot + bias
            slots.append(slot)
        return slots
