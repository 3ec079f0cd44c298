"""The contract of an attention mechanism: the file to read first.

Letters of the whole project: B batch, T queries, S keys, E model width, H heads, G key/value heads, D head width,
R rank or features, C capacity. `[B, T, E]` between layers, `[B, H, T, D]` inside. `keep` is the only word for padding:
boolean, True = real token.

Padding is met once. The public methods (`forward`, `start`, `extend`, `weights`) move the real tokens of each row to
the left, zero the rest, call the mechanism and put the answer back; a mechanism only ever sees rows that are real from
the left. Positions count real tokens.

A mechanism is one file with one class on one of these:

    Attention             the contract itself
      Heads               projections named by `inputs`, heads, positions; its map by unit vectors as values
        Cached            keeps every key and value; writes `attend`                       (softmax, strided, sparse)
          Scored          writes `score`, the logits                                       (additive, location)
        Tailed            keeps the last `reach` tokens and the first `front`; `attend`    (local, longformer)
        Digested          turns all keys and values into a fixed digest; `digest`, `consult`   (linformer)
          Scanned         a digest that also grows token by token; `zero`, `scan`          (linear, performer)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core.reference import Row
from regard.kernels.dropout import dropped
from regard.kernels.runs import Where
from regard.layers.attention.draws import generator
from regard.layers.position.base import Position
from regard.spec import POSITIONS

Role = Literal["self", "causal", "cross"]


class Order(NamedTuple):
    """A cost: in words, and the exponent of the length that the suite counts."""

    text: str
    exponent: float


@dataclass(frozen=True)
class Facts:
    """What a mechanism declares of itself. Each line is tested, also where it says no."""

    name: str
    paper: str
    link: str
    family: str
    formula: str
    time: Order
    memory: Order
    state: Order | None = None  # None: no decoding
    roles: tuple[Role, ...] = ("self", "causal", "cross")
    refusals: tuple[tuple[str, str], ...] = ()  # (role, why not)
    positions: tuple[str, ...] = ()  # kinds of position scheme it takes besides "input"
    prefix: bool = True  # causal: the output at i does not move when later tokens come
    split: bool = True  # extend gives the same however the tokens are cut
    exact: bool = True  # False: a random or learnt approximation of its target
    apart: bool = True  # heads work apart from each other: heads(a, a) = a
    linear: bool = True  # the output is the map times the values; False: the mechanism writes its own map
    signed: bool = False  # weights may be negative or not sum to one
    pairs: bool = False  # weighs pairs of tokens one by one: takes an explicit mask, and attention dropout
    overflows: bool = False  # without a denominator, float16 cannot hold its output at logits of 1e4
    columns: Literal["tokens", "slots"] = "tokens"  # what the columns of the map are
    padding: Literal["any", "none"] = "any"
    loss: bool = False  # trains a second loss
    stream: bool = False  # carries a second sequence from layer to layer


@dataclass(frozen=True)
class Shape:
    """The sizes and the role every mechanism is built with; `of` fills in what is left open and checks the rest."""

    width: int
    heads: int
    role: Role
    kv_heads: int
    head_width: int
    memory_width: int
    out_width: int
    bias: bool | Literal["inputs"] = False
    position: str | None = None
    dropout: float = 0.0  # of the attention weights, in training
    first_head: int = 0  # where these heads stand among `all_heads`, inside heads(...)
    all_heads: int = 0
    pace: int | None = None  # role "cross": the queries stand among the keys, this many apart; None: two sequences

    @classmethod
    def of(
        cls,
        *,
        width: int,
        heads: int,
        role: Role = "self",
        kv_heads: int | None = None,
        head_width: int | None = None,
        memory_width: int | None = None,
        out_width: int | None = None,
        bias: bool | Literal["inputs"] = False,
        position: str | None = None,
        dropout: float = 0.0,
        pace: int | None = None,
    ) -> "Shape":
        sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_width": head_width}
        sizes |= {"memory_width": memory_width, "out_width": out_width}
        for name, size in sizes.items():
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        if role not in ("self", "causal", "cross"):
            raise ValueError(f"role must be 'self', 'causal' or 'cross', got {role!r}")
        if head_width is None and width % heads:
            raise ValueError(
                f"width {width} is not divisible by heads {heads}: choose heads that divide it, or give head_width"
            )
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(
                f"heads {heads} is not divisible by kv_heads {kv_heads}: each must serve equally many heads"
            )
        if not isinstance(bias, bool) and bias != "inputs":
            raise ValueError(f"bias must be True, False or 'inputs' (not of the projection behind), got {bias!r}")
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")
        if memory_width is not None and role != "cross":
            raise ValueError(f"memory_width is for role 'cross'; role {role!r} has no memory")
        return cls(
            width=width,
            heads=heads,
            role=role,
            kv_heads=kv_heads or heads,
            head_width=head_width or width // heads,
            memory_width=memory_width or width,
            out_width=out_width or width,
            bias=bias,
            position=position,
            dropout=float(dropout),
            all_heads=heads,
            pace=pace,
        )

    @property
    def input_bias(self) -> bool:
        return self.bias is not False

    @property
    def output_bias(self) -> bool:
        return self.bias is True


class Rows(NamedTuple):
    """Where the tokens of a call stand: row b holds `count[b]` real tokens on the left, the first at `start[b]`."""

    start: Tensor  # [B]
    count: Tensor  # [B]
    T: int
    at: int | None  # the host knows: no padding, and every row starts here
    allowed: Tensor | None = None  # [1 or B, T, T] which pairs may meet, beside what the role says

    @classmethod
    def full(cls, x: Tensor) -> "Rows":
        B, T = x.shape[:2]
        return cls(x.new_zeros(B, dtype=torch.long), x.new_full((B,), T, dtype=torch.long), T, 0)

    def real(self) -> Tensor | None:
        """[B, T], or None where the host knows that all are real."""
        return None if self.at is not None else torch.arange(self.T, device=self.count.device) < self.count[:, None]

    def positions(self) -> Tensor:
        """[1 or B, T]"""
        steps = torch.arange(self.T, device=self.start.device)[None]
        return steps + (self.start[:, None] if self.at is None else self.at)


class Memory(NamedTuple):
    """What cross-attention reads: [B, S, E] and how many of each row are real (None: all); and the stream of the layers
    it comes from."""

    x: Tensor
    count: Tensor | None
    stream: Tensor | None = None
    allowed: Tensor | None = None  # [1 or B, T, S] which queries may read which tokens

    def rows(self) -> Rows:
        """Where its tokens stand."""
        full = Rows.full(self.x)
        return full if self.count is None else full._replace(count=self.count, at=None)


class Mask(NamedTuple):
    """Which key slots a query sees: query t of row b is at q0[b]+t, slot s at k0[b]+s; real: 0 <= position < end[b]."""

    q0: Tensor  # [B]
    k0: Tensor  # [B]
    end: Tensor  # [B]
    T: int
    S: int
    causal: bool
    full: bool  # the host knows: every slot is real
    shift: int | None  # the host knows: q0 - k0, the same in every row
    allowed: Tensor | None = None  # [1 or B, T, >= S] an explicit mask

    @property
    def aligned(self) -> bool:
        """The queries are the keys' own tokens: query t is slot t. Causal kernels then need no mask for padding."""
        return self.shift == 0 and self.T == self.S

    @property
    def count(self) -> Tensor | None:
        """[B] real slots on the left (for k0 = 0), or None where all are."""
        return None if self.full else self.end - self.k0

    def real(self) -> Tensor:
        """[B, S]"""
        at = self.k0[:, None] + torch.arange(self.S, device=self.k0.device)
        return (at >= 0) & (at < self.end[:, None])

    def gap(self) -> Tensor:
        """Position of the key minus position of the query: [T, S], or [B, T, S] where rows differ."""
        device = self.k0.device
        steps = torch.arange(self.S, device=device) - torch.arange(self.T, device=device)[:, None]
        return steps - self.shift if self.shift is not None else steps + (self.k0 - self.q0)[:, None, None]

    def dense(self) -> Tensor | None:
        """What is visible, broadcastable to [B, 1, T, S]; None where all is."""
        visible = None if self.full else self.real()[:, None, None, :]
        if self.causal and not (self.T == 1 and self.shift == self.S - 1):
            # positions compared, not subtracted: a table of differences takes many times as long to make
            device = self.k0.device
            queries, keys = torch.arange(self.T, device=device), torch.arange(self.S, device=device)
            if self.shift is not None:
                past = (keys <= (queries + self.shift)[:, None])[None, None]
            else:
                at = (self.q0 - self.k0)[:, None] + queries  # [B, T]
                past = (keys <= at[..., None])[:, None]
            visible = past if visible is None else visible & past
        if self.allowed is not None:
            allowed = self.allowed[:, None, :, : self.S]
            visible = allowed if visible is None else visible & allowed
        return visible

    def safe(self) -> tuple[Tensor | None, Tensor | None]:
        """`dense`, where a query that an explicit mask leaves without keys sees all instead, and which queries see some
        [B, 1, T, 1] (None: no explicit mask): no kernel then divides by zero."""
        visible = self.dense()
        if self.allowed is None:
            return visible, None
        some = visible.any(-1, keepdim=True)
        return visible | ~some, some

    def sdpa(self) -> tuple[Tensor | None, bool]:
        """(attn_mask, is_causal): the cheapest legal form. In an aligned row, padding lies behind every real query."""
        return (None, True) if self.causal and self.aligned and self.allowed is None else (self.dense(), False)

    def where(self, first: int = 0) -> Where:
        """For kernels that compare positions, of which real keys have at least `first`."""
        if self.aligned:
            # no causal query sees what stands behind it
            return Where(end=None if self.full or self.causal else self.count, first=first)
        return Where(q0=self.q0, k0=self.k0, end=self.end, first=first)

    def pieces(self, size: int) -> "Iterator[tuple[slice, Mask]]":
        """The mask of `size` queries at a time."""
        for first in range(0, self.T, size):
            T = min(size, self.T - first)
            shift = None if self.shift is None else self.shift + first
            allowed = None if self.allowed is None else self.allowed[:, first : first + T]
            yield slice(first, first + T), self._replace(q0=self.q0 + first, T=T, shift=shift, allowed=allowed)


class Out(NamedTuple):
    """What a mechanism returns, always."""

    y: Tensor | None
    state: Any = None
    stream: Tensor | None = None
    loss: Tensor | None = None
    statistics: dict[str, Tensor] | None = None  # what to log of it, by name


class Attention(nn.Module):
    """The contract. `facts`, `examples` (small specs the suite builds) and `reduces_to` (spec -> the spec it equals)
    belong to each mechanism; options may change `facts` on the instance."""

    facts: Facts
    examples: tuple[str, ...]
    reduces_to: tuple[tuple[str, str], ...] = ()
    nests = False
    redraw_every = 0  # training steps from one random draw to the next; 0: one draw for good
    _form: tuple | None = None  # of a state, once it was asked for

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        if shape.role not in self.facts.roles:
            why = dict(self.facts.refusals).get(shape.role, "the mechanism is not defined for it")
            raise ValueError(
                f"attention {self.facts.name!r} cannot take role {shape.role!r}: {why}; "
                f"it takes {' and '.join(repr(role) for role in self.facts.roles)}"
            )
        if shape.dropout and not self.facts.pairs:
            raise ValueError(
                f"attention {self.facts.name!r} has no attention dropout: it forms no weights of single pairs to drop; "
                "leave dropout out and drop its output instead"
            )

    # the user's side: any padding, final

    def forward(
        self,
        x: Tensor,
        *,
        keep: Tensor | None = None,
        memory: Tensor | None = None,
        memory_keep: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """[B, T, E] -> [B, T, E]; padded positions give zeros. `mask` [T, S] or [B, T, S] is True where a query may
        read a key, beside what the role and the padding say; a query that may read none gives zeros (and the bias of
        the output). Mechanisms that form no single pairs refuse it."""
        self._check(x, keep, memory, memory_keep)
        allowed = self.allowed(mask, *x.shape[:2], x.shape[1] if memory is None else memory.shape[1])
        if self.shape.role == "cross":
            packed = pack_memory(memory, memory_keep, allowed)
            if keep is not None and self.facts.loss:
                # what learns from its queries must know which are real
                queries, rows = pack(x, keep)
                return unpack(self.run(queries, rows, memory=packed).y, keep)
            y = self.run(blank(x, keep), Rows.full(x), memory=packed).y
            return blank(y, keep)
        if keep is None:
            return self.run(x, Rows.full(x)._replace(allowed=allowed)).y
        packed, rows = pack(x, keep)
        return unpack(self.run(packed, rows._replace(allowed=pack_pairs(allowed, keep))).y, keep)

    def start(
        self,
        batch: int,
        *,
        memory: Tensor | None = None,
        memory_keep: Tensor | None = None,
        capacity: int | None = None,
    ) -> Any:
        """The state before the first token. `capacity` reserves room for that many tokens at once."""
        self._check_decodes()
        for name, size in (("batch", batch), ("capacity", capacity)):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        if self.shape.role == "cross":
            self._check_memory(memory, memory_keep, batch)
        elif memory is not None or memory_keep is not None:
            self._refuse_memory()
        weight = next(self.parameters())
        device = weight.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        packed = None if memory is None else pack_memory(memory, memory_keep)
        return self.begin(batch, memory=packed, capacity=capacity, dtype=dtype, device=device).state

    def extend(self, x: Tensor, state: Any, *, keep: Tensor | None = None) -> tuple[Tensor, Any]:
        """Reads n >= 1 new tokens a row and consumes the state: go on with the one returned (`select` to branch)."""
        self._check_decodes()
        self._check_tokens(x, keep, "x", "keep", self.shape.width)
        B, T = x.shape[:2]
        self._check_state(state, B)
        if self.shape.role == "cross":
            rows = len(state.count)
            # beams of one sentence share its memory: they fold into the queries
            x = blank(x, keep).reshape(rows, B // rows * T, -1)
            y = self.run(x, Rows.full(x), state=state).y
            return blank(y.reshape(B, T, -1), keep), state
        if keep is None:
            rows = Rows(state.seen, torch.full_like(state.seen, T), T, state.top if state.even else None)
            out = self.run(x, rows, state=state)
            return out.y, out.state
        packed, rows = pack(x, keep)
        out = self.run(packed, rows._replace(start=state.seen), state=state)
        return unpack(out.y, keep), trim(out.state)

    def weights(
        self,
        x: Tensor,
        *,
        keep: Tensor | None = None,
        memory: Tensor | None = None,
        memory_keep: Tensor | None = None,
        state: Any = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """How much of each key's value reaches each query, [B, H, T, S]. With a state, which is left untouched, the
        columns are positions (cross: the real tokens of the memory)."""
        if state is not None:
            if mask is not None:
                raise ValueError("mask is for whole sequences: leave it out where a state is given")
            self._check_tokens(x, keep, "x", "keep", self.shape.width)
            self._check_state(state, len(x))
            if memory is not None or memory_keep is not None:
                raise ValueError("a state holds the memory already: leave memory and memory_keep out")
            if self.shape.role == "cross":
                fold = len(x) // len(state.count)
                maps = self.map(blank(x, keep).reshape(len(state.count), -1, x.shape[2]), state=state)
                maps = maps.unflatten(2, (fold, x.shape[1])).transpose(1, 2).flatten(0, 1)
                return blank(maps, None if keep is None else keep[:, None])
            packed, rows = (x, Rows.full(x)) if keep is None else pack(x, keep)
            even = keep is None and state.even
            maps = self.map(packed, rows._replace(start=state.seen, at=state.top if even else None), state=state)
            return maps if keep is None else unpack(maps, keep[:, None], dim=2)
        self._check(x, keep, memory, memory_keep)
        allowed = self.allowed(mask, *x.shape[:2], x.shape[1] if memory is None else memory.shape[1])
        if self.shape.role == "cross":
            maps = self.map(blank(x, keep), memory=pack_memory(memory, memory_keep, allowed))
            maps = blank(maps, None if keep is None else keep[:, None])
            plain = memory_keep is None or self.facts.columns == "slots"
            return maps if plain else unpack(maps, memory_keep[:, None, None], dim=3)
        if keep is None:
            return self.map(x, Rows.full(x)._replace(allowed=allowed))
        packed, rows = pack(x, keep)
        maps = unpack(self.map(packed, rows._replace(allowed=pack_pairs(allowed, keep))), keep[:, None], dim=2)
        return unpack(maps, keep[:, None, None], dim=3) if self.facts.columns == "tokens" else maps

    # the mechanism's side: rows that are real from the left; what a model calls

    def run(
        self,
        x: Tensor,
        rows: Rows | None = None,
        *,
        state: Any = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> Out:
        """[B, T, E] -> Out. With a state it reads and extends it; without, the tokens are the whole sequence."""
        raise NotImplementedError

    def begin(
        self,
        batch: int,
        *,
        memory: Memory | None = None,
        stream: Tensor | None = None,
        capacity: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Out:
        """The state (and stream) before the first token."""
        raise NotImplementedError

    def map(
        self,
        x: Tensor,
        rows: Rows | None = None,
        *,
        state: Any = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """[B, H, T, S]; never consumes the state."""
        if state is not None:
            raise ValueError(
                f"attention {self.facts.name!r} does not keep its tokens one by one, so a state has no map: call "
                f"weights(...) on the whole"
            )
        S = x.shape[1] if memory is None else memory.x.shape[1]
        unit = torch.eye(S, dtype=x.dtype, device=x.device).expand(len(x), 1, -1, -1)
        return self.carry(unit, x, rows, memory=memory, stream=stream)

    def carry(
        self,
        values: Tensor,
        x: Tensor,
        rows: Rows | None = None,
        *,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """The map times values [B, 1 or H, S, n]: [B, H, T, n], without the map being held. Linear in the values, so
        unit vectors give columns of the map, and gradients rows."""
        raise NotImplementedError

    def slots(self, x: Tensor, rows: Rows | None = None, *, memory: Memory | None = None) -> Tensor:
        """[B, H, slots, D]: the values that the columns of a map stand for, where facts.columns is "slots"."""
        raise NotImplementedError

    def settle(self, first: "Attention | None", fed: bool, read: bool, pre: bool = False) -> None:
        """A stack of layers says once: the layer to share with, whether a stream comes in, whether it is read, whether
        the norms of the model stand before its layers."""

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """One unpadded sequence [T, E] -> [T, E]: the formula in loops."""
        raise NotImplementedError

    def reference_loss(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """The second loss of one unpadded sequence, in loops; of a mechanism whose facts say that it trains one."""
        raise NotImplementedError

    # bad input

    def _check(self, x: Tensor, keep: Tensor | None, memory: Tensor | None, memory_keep: Tensor | None) -> None:
        self._check_tokens(x, keep, "x", "keep", self.shape.width)
        if self.shape.role == "cross":
            self._check_memory(memory, memory_keep, len(x))
        elif memory is not None or memory_keep is not None:
            self._refuse_memory()

    def allowed(self, mask: Tensor | None, B: int, T: int, S: int) -> Tensor | None:
        """An explicit mask as [1 or B, T, S], or words for why there can be none."""
        if mask is None:
            return None
        if not self.facts.pairs:
            raise ValueError(
                f"attention {self.facts.name!r} takes no mask: it does not weigh pairs of tokens one by one; say what "
                "is padding with keep, or use one that does, such as softmax"
            )
        return check_pairs(mask, B, T, S)

    def _check_memory(self, memory: Tensor | None, keep: Tensor | None, batch: int) -> None:
        if memory is None:
            raise ValueError("role 'cross' needs memory=[B, S, E], the sequence to attend to")
        self._check_tokens(memory, keep, "memory", "memory_keep", self.shape.memory_width)
        if len(memory) != batch:
            raise ValueError(f"memory has {len(memory)} rows, expected {batch}, as many as the queries")

    def _refuse_memory(self) -> None:
        advice = " Build it with role='cross'." if "cross" in self.facts.roles else " It has no cross-attention."
        raise ValueError(
            f"memory was given to attention {self.facts.name!r} of role {self.shape.role!r}: it reads x only.{advice}"
        )

    def _check_tokens(self, x: Tensor, keep: Tensor | None, name: str, keep_name: str, width: int) -> None:
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width or 0 in x.shape:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be [batch >= 1, tokens >= 1, {width}], got {got}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must hold floating-point vectors, got {x.dtype}: embed token ids first")
        # a mixer may have no parameters, and then takes every type
        dtype = next((parameter.dtype for parameter in self.parameters()), x.dtype)
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{name} is {x.dtype} and the layer {dtype}: convert one with .to(...)")
        if keep is None:
            return
        if self.facts.padding == "none":
            raise ValueError(f"attention {self.facts.name!r} cannot skip padding: leave {keep_name} out")
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
            raise ValueError(
                f"{keep_name} must be boolean, True = real token, got {got}: write {keep_name}={keep_name} != 0"
            )
        if keep.shape != x.shape[:2]:
            raise ValueError(
                f"{keep_name} must be {list(x.shape[:2])}, one flag a token of {name}, got {list(keep.shape)}"
            )

    def _check_state(self, state: Any, batch: int) -> None:
        own = getattr(state, "count" if self.shape.role == "cross" else "seen", None)
        if not isinstance(own, Tensor):
            raise ValueError(
                f"expected a state from start() of a layer of role {self.shape.role!r}, got {type(state).__name__}"
            )
        if self.shape.role == "cross" and batch % len(own):
            raise ValueError(
                f"x has {batch} rows and the state {len(own)}: a cross state of B rows serves k * B queries"
            )
        if self.shape.role != "cross" and batch != len(own):
            raise ValueError(f"x has {batch} rows and the state {len(own)}: use select(state, rows) to match them")
        self.check_form(state)

    def check_form(self, state: Any) -> None:
        """Refuses the state of a mechanism that keeps other things; compiled code has none of that."""
        if torch.compiler.is_compiling():
            return
        if self._form is None:
            size = (1, 1, self.shape.memory_width)
            memory = next(self.parameters()).new_zeros(size) if self.shape.role == "cross" else None
            self._form = state_form(self.start(1, memory=memory))
        if state_form(state) != self._form:
            raise ValueError(
                f"the state is not one of attention {self.facts.name!r}, which keeps a {self._form[0].__name__}, but a "
                f"{type(state).__name__}: take the state from start() of this layer"
            )

    def _check_decodes(self) -> None:
        if self.shape.role == "self":
            raise ValueError("role 'self' sees the whole sequence and has no state: build with role='causal' to decode")


class CrossState(NamedTuple):
    """The memory as projected once; it never grows."""

    parts: tuple[Tensor, ...]
    count: Tensor  # [B] real tokens of the memory
    full: bool
    S: int
    allowed: Tensor | None = None  # of a whole sequence with an explicit mask; decoding has none

    def select(self, rows: Tensor) -> "CrossState":
        return self._replace(parts=tuple(part[rows] for part in self.parts), count=self.count[rows])


class Heads(Attention):
    """Projections, heads and positions. `inputs` names what a mechanism reads and its kind: "query" (H heads of the
    tokens), "key" and "value" (G heads of the tokens or the memory), "gate" (a number for each head and source token).
    The probe for the map replaces every "value"."""

    inputs: dict[str, Literal["query", "key", "value", "gate"]] = {"q": "query", "k": "key", "v": "value"}
    grouped = False  # True: takes keys and values of G heads; otherwise they are repeated to H

    def __init__(self, shape: Shape):
        super().__init__(shape)
        sizes = {"query": shape.heads * shape.head_width, "gate": shape.heads}
        self.project = nn.ModuleDict()
        for name, kind in self.inputs.items():
            wide = shape.width if kind == "query" or shape.role != "cross" else shape.memory_width
            out = sizes.get(kind, shape.kv_heads * shape.head_width)
            self.project[name] = nn.Linear(wide, out, bias=shape.input_bias or kind == "gate")
        self.output = nn.Linear(shape.heads * shape.head_width, shape.out_width, bias=shape.output_bias)
        for linear in [*self.project.values(), self.output]:
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.position: Position | None = None
        if shape.position is not None:
            self.position = POSITIONS.build(shape.position, shape)
            kind = self.position.facts.kind
            if kind not in ("input", *self.facts.positions):
                takes = [n for n, c in POSITIONS.classes.items() if c.facts.kind in ("input", *self.facts.positions)]
                raise ValueError(
                    f"attention {self.facts.name!r} cannot take position {self.position.facts.name!r}: it has no "
                    f"{'plain query-key product to rotate' if kind == 'rotation' else 'table of logits to add to'}; "
                    f"it takes {', '.join(takes)}"
                )

    @property
    def scale(self) -> float:
        return self.shape.head_width**-0.5

    # what the kinds of mechanism write

    def own(self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: Any) -> tuple[Tensor, Any]:
        """Roles "self" and "causal": [B, H, T, D] and the new state (None without one)."""
        raise NotImplementedError

    def fix(self, source: dict[str, Tensor], memory: Memory) -> CrossState:
        """Role "cross": what is kept of the memory."""
        raise NotImplementedError

    def look(self, query: dict[str, Tensor], state: CrossState) -> Tensor:
        """Role "cross": [B, H, T, D] of the queries over it."""
        raise NotImplementedError

    def learn(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], memory: Memory | None
    ) -> Tensor | None:
        """In training, after the output of a call: what is learnt without gradients, and the second loss."""

    def probed(self, state: Any, first: int) -> Any:
        """A copy of the state whose values are the unit vectors of the positions from `first` on."""
        raise ValueError(
            f"attention {self.facts.name!r} keeps sums, not tokens, so a state has no map: call weights(x) on the whole"
        )

    # final

    def run(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        query, source = self.read(x, rows, memory)
        o, state = self.mix(rows, query, source, state, memory)
        y = self.output(o.transpose(1, 2).flatten(2))
        if self.shape.role == "cross" and self.output.bias is not None:
            y = torch.where(state.count[:, None, None] > 0, y, 0)
        return Out(y, state, loss=self.learn(rows, query, source, memory) if self.training else None)

    def begin(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Out:
        if self.shape.role == "cross" and self.position is not None and self.position.facts.kind != "input":
            raise ValueError("queries that stand among their keys are read as a whole: call the layer, not start")
        if self.shape.role == "cross":
            # tokens of a head side by side: read at every step, laid out once
            source = {name: part.contiguous() for name, part in self.sources(memory.x).items()}
            return Out(None, self.fix(source, memory))
        return Out(None, self.empty(batch, capacity, dtype, device))

    def empty(self, batch: int, capacity: int | None, dtype: torch.dtype, device: torch.device) -> Any:
        """The state of role "causal" before the first token."""
        raise NotImplementedError

    def mix(self, rows, query, source, state=None, memory=None) -> tuple[Tensor, Any]:
        """From projected inputs to [B, H, T, D]: all that `regard.attend` needs of a mechanism."""
        if self.shape.role != "cross":
            return self.own(rows, query, source, state)
        state = self.fix(source, memory) if state is None else state
        return self.look(query, state), state

    def map(self, x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
        if state is None:
            return super().map(x, rows, memory=memory, stream=stream)
        rows = rows or Rows.full(x)
        query, source = self.read(x, rows, None)
        S = state.S if self.shape.role == "cross" else rows.T + state.top

        def probe(first: int) -> Tensor:
            if source:
                source.update({name: self.unit(rows.positions(), first, len(x)) for name in self.kinds("value")})
            return self.mix(rows, query, source, self.probed(state, first))[0]

        maps = torch.cat([probe(first) for first in range(0, S, self.shape.head_width)], -1)[..., :S]
        if self._adds_to_values:
            nothing = probe(S + self.shape.head_width)
            maps = maps - nothing.repeat(1, 1, 1, -(-S // nothing.shape[-1]))[..., :S]
        return maps

    def carry(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        query, source = self.read(x, rows, memory)
        names = self.kinds("value")
        return self.in_widths(
            values, lambda v: self.mix(rows, query, source | dict.fromkeys(names, v), None, memory)[0]
        )

    def in_widths(self, values: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """`read` of values [B, 1 or H, S, n], where it takes [B, G, S, D] and gives [B, H, T, D]."""
        G, D = self.shape.kv_heads, self.shape.head_width
        times, outs = self.shape.heads // G, []
        nothing = read(values.new_zeros(len(values), G, values.shape[2], D)) if self._adds_to_values else None
        for part in values.split(D, 3):
            wide = F.pad(part, (0, D - part.shape[3]))
            if len(wide[0]) == 1:
                o = read(wide.expand(-1, G, -1, -1).contiguous())
            else:
                # heads that share values are told apart by reading for one of each group at a time
                some = [read(wide[:, member::times])[:, member::times] for member in range(times)]
                o = torch.stack(some, 2).flatten(1, 2)
            outs.append((o if nothing is None else o - nothing)[..., : part.shape[3]])
        return torch.cat(outs, 3)

    @property
    def _adds_to_values(self) -> bool:
        """A scheme that adds to the values makes the output affine in them: what is there without any is taken away."""
        return self.position is not None and self.position.facts.kind == "content"

    def unit(self, at: Tensor, first: int, batch: int) -> Tensor:
        """[B, G, n, D]: 1 where the position [1 or B, n] is first + d."""
        columns = torch.arange(first, first + self.shape.head_width, device=at.device)
        hits = (at[..., None] == columns).to(next(self.parameters()).dtype)
        return hits[:, None].expand(batch, self.shape.kv_heads, -1, -1).contiguous()

    def kinds(self, *kinds: str) -> list[str]:
        """The names of the inputs of these kinds, in order."""
        return [name for name, kind in self.inputs.items() if kind in kinds]

    def read(self, x: Tensor, rows: Rows, memory: Memory | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The projected queries, and the projected sources (none where a cross state holds them already)."""
        turn = self.position is not None and self.position.facts.kind == "rotation"
        if self.position is not None and self.position.facts.kind == "input":
            x = self.position.add(x, rows)
        query = {name: self.split(name, x) for name in self.kinds("query")}
        crosses = self.shape.role == "cross"
        if crosses and memory is None:
            return query, {}
        source = self.sources(memory.x if crosses else x)
        if turn:
            slots = rows.positions()
            at = stand = self.position.places(slots)
            if crosses:
                at = self.position.places(slots, self.position.pace)
                stand = self.position.places(torch.arange(memory.x.shape[1], device=x.device)[None])
            query = {name: self.position.rotate(part, at) for name, part in query.items()}
            source |= {name: self.position.rotate(source[name], stand) for name in self.kinds("key")}
        return query, source

    def sources(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self.split(name, x) for name in self.kinds("key", "value", "gate")}

    def split(self, name: str, x: Tensor) -> Tensor:
        """[B, n, E] -> [B, H or G, n, D], a gate [B, H, n]"""
        projected = self.project[name](x)
        if self.inputs[name] == "gate":
            return projected.transpose(1, 2)
        return projected.unflatten(2, (-1, self.shape.head_width)).transpose(1, 2)

    def repeated(self, source: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keys and values of G heads as H, for mechanisms that do not group."""
        times = self.shape.heads // self.shape.kv_heads
        if self.grouped or times == 1:
            return source
        return {n: part.repeat_interleave(times, 1) if part.dim() == 4 else part for n, part in source.items()}

    def weigh(self, mask: Mask, logits: Tensor, v: Tensor) -> Tensor:
        """Softmax of logits [B, H, T, S] over what is visible, times v, with the position scheme put in."""
        kind = None if self.position is None else self.position.facts.kind
        if kind == "bias":
            logits = logits + self.position.biases(mask)
        weights = self.drop(masked_softmax(logits, mask.dense()))
        o = weights.to(v.dtype) @ v
        if kind == "content":
            added = self.position.values(weights, mask)
            o = o if added is None else o + added.to(v.dtype)
        return o

    @property
    def drops(self) -> bool:
        return self.training and self.shape.dropout > 0

    def drop(self, weights: Tensor) -> Tensor:
        """Attention dropout, in training."""
        return dropped(weights, self.shape.dropout) if self.drops else weights

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        outs = [self.plain(self.plain_row(head, x, memory)) for head in range(self.shape.heads)]
        y = torch.cat(outs, -1) @ self.output.weight.T
        return y if self.output.bias is None else y + self.output.bias

    def plain_row(self, head: int, x: Tensor, memory: Tensor | None = None) -> Row:
        """What a head reads of one unpadded sequence."""
        placed = x if self.position is None else self.position.plain_add(x)
        source = memory if self.shape.role == "cross" else placed
        values = {name: self._plain(name, kind, head, placed, source) for name, kind in self.inputs.items()}
        return Row(head, self.shape.role == "causal", len(x), len(source), values, self.position)

    def plain(self, row: Row) -> Tensor:
        """The formula for one head of one unpadded sequence, in loops: [T, D]."""
        raise NotImplementedError

    def _plain(self, name: str, kind: str, head: int, x: Tensor, source: Tensor) -> Tensor:
        D, linear = self.shape.head_width, self.project[name]
        if kind == "gate":
            return source @ linear.weight[head] + linear.bias[head]
        slot = head if kind == "query" else head * self.shape.kv_heads // self.shape.heads
        part = (x if kind == "query" else source) @ linear.weight[slot * D : slot * D + D].T
        if linear.bias is not None:
            part = part + linear.bias[slot * D : slot * D + D]
        if self.position is not None and kind in ("query", "key"):
            part = torch.stack([self.position.plain_rotate(vector, i) for i, vector in enumerate(part)])
        return part


class Attending(Heads):
    """Mechanisms that attend to keys and values one by one: cross-attention keeps them as they are."""

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, D]; the arguments after the mask are the mechanism's `inputs` by name."""
        raise NotImplementedError

    alone = False  # True: what a query reads depends on no other query, so `attend` may be given some of them
    piece = 64  # queries at a time where logits are made
    few = 8  # queries for which two products beat the CPU's fused kernel, as in decoding

    def product(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """softmax(scale q K^T) V with the position scheme put in; keys and values may have G heads."""
        kind, gqa = None if self.position is None else self.position.facts.kind, q.shape[1] != k.shape[1]
        if kind == "content":
            times = q.shape[1] // k.shape[1]
            k, v = (part.repeat_interleave(times, 1) if gqa else part for part in (k, v))

            def read(q: Tensor, part: Mask) -> Tensor:
                return self.weigh(part, self.position.scores(q, k[:, :, : part.S], part, scale), v[:, :, : part.S])

            return self.in_pieces(mask, q, read)
        if kind == "bias":

            def read(q: Tensor, part: Mask) -> Tensor:
                bias, (visible, some) = self.position.biases(part).to(q.dtype), part.safe()
                bias = bias if visible is None else torch.where(visible, bias, -torch.inf)
                seen = k[:, :, : part.S], v[:, :, : part.S]
                if self.drops:
                    wide = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in seen)
                    return self.weigh(part, q * scale @ next(wide).mT, next(wide))
                o = F.scaled_dot_product_attention(q, *seen, attn_mask=bias, scale=scale, enable_gqa=gqa)
                return o if some is None else torch.where(some, o, 0)

            return self.in_pieces(mask, q, read)
        if self.drops and q.device.type == "cpu":
            # drawn a piece at a time and cheaply: PyTorch's own takes 18 times as long on a CPU
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
            return self.in_pieces(
                mask, q, lambda q, part: self.weigh(part, q * scale @ k[:, :, : part.S].mT, v[:, :, : part.S])
            )
        p = self.shape.dropout if self.drops else 0.0
        if mask.allowed is not None:
            visible, some = mask.safe()
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=p, scale=scale, enable_gqa=gqa)
            return torch.where(some, o, 0)
        if self.few >= mask.T and not gqa and _plain_cpu(q):
            return self.weigh(mask, q * scale @ k.transpose(2, 3), v)
        attn_mask, is_causal = mask.sdpa()
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=p, is_causal=is_causal, scale=scale, enable_gqa=gqa
        )

    def in_pieces(self, mask: Mask, q: Tensor, read: Callable[[Tensor, Mask], Tensor]) -> Tensor:
        """`read` for a few queries at a time, and again in the backward pass: nothing of size T x S is kept."""
        outs = []
        for piece, (_, part) in zip(q.split(self.piece, 2), mask.pieces(self.piece), strict=True):
            if part.causal and part.shift is not None:
                # the host knows that no query of the piece sees the keys behind its last one
                part = part._replace(S=min(part.S, part.shift + part.T))
            if torch.is_grad_enabled():
                outs.append(checkpoint(read, piece, part, use_reentrant=False, preserve_rng_state=self.drops))
            else:
                outs.append(read(piece, part))
        return torch.cat(outs, 2)

    def fix(self, source, memory):
        B, S = memory.x.shape[:2]
        count = torch.full((B,), S, device=memory.x.device) if memory.count is None else memory.count
        return CrossState(tuple(source.values()), count, memory.count is None, S, memory.allowed)

    def look(self, query, state):
        zero = torch.zeros_like(state.count)
        T = next(iter(query.values())).shape[2]
        mask = Mask(zero, zero, state.count, T, state.S, False, state.full, 0, state.allowed)
        source = dict(zip(self.kinds("key", "value", "gate"), state.parts, strict=True))
        return self.attend(mask, **query, **self.repeated(source))

    def probed(self, state, first):
        state = state.select(torch.arange(len(state.count if self.shape.role == "cross" else state.seen)))
        names = self.kinds("key", "value", "gate")
        if self.shape.role == "cross":
            at = torch.arange(state.S, device=state.count.device)[None]
            return state._replace(parts=self._swap(names, state.parts, at, first))
        return self.probed_own(state, names, first)

    def probed_own(self, state: Any, names: list[str], first: int) -> Any:
        """`probed` for role "causal"."""
        raise NotImplementedError

    def _swap(self, names: list[str], parts: tuple[Tensor, ...], at: Tensor, first: int) -> tuple[Tensor, ...]:
        values = self.kinds("value")
        return tuple(
            self.unit(at, first, len(part)) if name in values else part for name, part in zip(names, parts, strict=True)
        )

    def aligned(self, rows: Rows) -> Mask:
        """The mask of a whole sequence over itself."""
        causal = self.shape.role == "causal"
        end, full = rows.start + rows.count, rows.at is not None
        return Mask(rows.start, rows.start, end, rows.T, rows.T, causal, full, 0, rows.allowed)


class CacheState(NamedTuple):
    """Every key and value so far: slot = position. Slots from `seen` on are not read."""

    parts: tuple[Tensor, ...]  # [B, G, C, D]
    seen: Tensor  # [B]
    top: int  # the largest `seen`, or a bound of it
    even: bool  # the host knows: every row has seen `top`

    def select(self, rows: Tensor) -> "CacheState":
        parts = []
        for part in self.parts:
            copy = part.new_empty((len(rows), *part.shape[1:]))
            filled = part[:, :, : self.top]
            if torch.is_grad_enabled():
                copy[:, :, : self.top] = filled[rows]
            else:
                # without a copy in between
                torch.index_select(filled, 0, rows, out=copy[:, :, : self.top])
            parts.append(copy)
        return self._replace(parts=tuple(parts), seen=self.seen[rows])


class Cached(Attending):
    """State: all keys and values."""

    def own(self, rows, query, source, state):
        if state is None:
            return self.attend(self.aligned(rows), **query, **self.repeated(source)), None
        S, seen = state.top + rows.T, state.seen + rows.count
        parts = tuple(grow(old, new, rows, state.top) for old, new in zip(state.parts, source.values(), strict=True))
        # before the first token every row starts at 0, ragged or not
        shift = 0 if state.top == 0 else rows.at
        state = CacheState(parts, seen, S, state.even and rows.at is not None)
        mask = Mask(rows.start, torch.zeros_like(seen), seen, rows.T, S, True, state.even, shift)
        filled = dict(zip(source, (part[:, :, :S] for part in parts), strict=True))
        return self.attend(mask, **query, **self.repeated(filled)), state

    def empty(self, batch, capacity, dtype, device):
        G, D, C = self.shape.kv_heads, self.shape.head_width, capacity or 0
        sizes = {"gate": (batch, self.shape.heads, C)}
        parts = (
            torch.zeros(sizes.get(self.inputs[name], (batch, G, C, D)), dtype=dtype, device=device)
            for name in self.kinds("key", "value", "gate")
        )
        return CacheState(tuple(parts), torch.zeros(batch, dtype=torch.long, device=device), 0, True)

    def probed_own(self, state, names, first):
        at = torch.arange(state.parts[0].shape[2], device=state.seen.device)[None]
        return state._replace(parts=self._swap(names, state.parts, at, first))


def _plain_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.is_grad_enabled()


def grow(buffer: Tensor, new: Tensor, rows: Rows, top: int) -> Tensor:
    """New tokens written behind the old ones of each row: in place, or as a new tensor where gradients flow."""
    need = top + rows.T
    # with gradients on, what was read before must stay as it was, also where only the queries are trained
    if torch.is_grad_enabled():
        if rows.at is not None:
            return torch.cat([buffer[:, :, :top], new], 2)
        buffer = F.pad(buffer[:, :, :top], (0, 0) * (buffer.dim() - 3) + (0, rows.T))
        return _write(buffer, new, rows)
    if buffer.shape[2] < need:
        room = buffer.new_empty((*buffer.shape[:2], max(need, 2 * buffer.shape[2], 64), *buffer.shape[3:]))
        room[:, :, :top] = buffer[:, :, :top]
        buffer = room
    if rows.at is not None:
        buffer[:, :, rows.at : need] = new
        return buffer
    # shorter rows leave new slots unwritten, which are masked later and must hold numbers until then
    buffer[:, :, top:need] = 0
    # padded tokens land behind the real ones of their row, where the next token overwrites them
    batch = torch.arange(len(new), device=new.device)[:, None]
    buffer.transpose(1, 2)[batch, rows.positions()] = new.transpose(1, 2)
    return buffer


def _write(buffer: Tensor, new: Tensor, rows: Rows) -> Tensor:
    batch = torch.arange(len(new), device=new.device)[:, None]
    return buffer.transpose(1, 2).index_put((batch, rows.positions()), new.transpose(1, 2)).transpose(1, 2)


class Scored(Cached):
    """A mechanism that writes the logits of a few queries at a time, with nothing random in them; softmax, masks and
    positions are done here."""

    alone = True

    def score(self, mask: Mask, q: Tensor, k: Tensor) -> Tensor:
        """Logits [B, H, T, S]; the arguments after the mask are the inputs by name, without the values."""
        raise NotImplementedError

    def attend(self, mask, q, v, **keys):
        def read(q: Tensor, part: Mask) -> Tensor:
            seen = {name: key[:, :, : part.S] for name, key in keys.items()}
            return self.weigh(part, self.score(part, q=q, **seen), v[:, :, : part.S])

        return self.in_pieces(mask, q, read)


class TailState(NamedTuple):
    """The last tokens of each row, newest at the right, at most `reach`; and the first `front`, slot = position."""

    tail: tuple[Tensor, ...]  # [B, G, <= reach, D]
    front: tuple[Tensor, ...]  # [B, G, front + 1, D]; the last slot takes what belongs nowhere
    seen: Tensor  # [B]
    top: int
    even: bool

    def select(self, rows: Tensor) -> "TailState":
        tail, front = (tuple(part[rows] for part in parts) for parts in (self.tail, self.front))
        return self._replace(tail=tail, front=front, seen=self.seen[rows])


class Tailed(Attending):
    """State: the last `reach` tokens and the first `front`. With front > 0, `attend` also gets `front_k`, `front_v`
    (one for each key and value): the first tokens of the sequence, [B, G, <= front, D], slot = position, real while the
    slot < mask.end. The keys of a call with a state are the tail followed by the new tokens."""

    reach: int
    front: int = 0

    def own(self, rows, query, source, state):
        if state is None:
            front = {f"front_{name}": part[:, :, : self.front] for name, part in source.items()} if self.front else {}
            mask = self.aligned(rows)
            return self.attend(mask, **query, **self.repeated(source), **self.repeated(front)), None
        seen, even = state.seen + rows.count, state.even and rows.at is not None
        joined = {name: torch.cat([old, source[name]], 2) for name, old in zip(source, state.tail, strict=True)}
        front = {
            f"front_{name}": self._fill(old, source[name], rows) for name, old in zip(source, state.front, strict=False)
        }
        shift = state.tail[0].shape[2]
        S = shift + rows.T
        mask = Mask(rows.start, rows.start - shift, seen, rows.T, S, True, even, shift)
        seen_front = {name: part[:, :, : self.front] for name, part in front.items()}
        o = self.attend(mask, **query, **self.repeated(joined), **self.repeated(seen_front))
        W = min(self.reach, S)
        if even:
            # a copy, lest a window hold on to a whole prompt
            tail = tuple(part[:, :, S - W :].clone() for part in joined.values())
        else:
            at = (shift + rows.count[:, None] - W + torch.arange(W, device=seen.device)).clamp(min=0)[:, None, :, None]
            tail = tuple(part.gather(2, at.expand(-1, part.shape[1], -1, part.shape[3])) for part in joined.values())
        return o, TailState(tail, tuple(front.values()), seen, state.top + rows.T, even)

    def _fill(self, front: Tensor, new: Tensor, rows: Rows) -> Tensor:
        if rows.at is not None and rows.at >= self.front:
            return front
        # padded tokens land behind the real ones of their row, where the next token overwrites them
        at = rows.positions().clamp(max=self.front).expand(len(new), -1)
        batch = torch.arange(len(new), device=new.device)[:, None]
        return front.transpose(1, 2).index_put((batch, at), new.transpose(1, 2)).transpose(1, 2)

    def empty(self, batch, capacity, dtype, device):
        def zeros(slots: int) -> tuple[Tensor, ...]:
            size = (batch, self.shape.kv_heads, slots, self.shape.head_width)
            return tuple(torch.zeros(size, dtype=dtype, device=device) for _ in self.kinds("key", "value"))

        front = zeros(self.front + 1) if self.front else ()
        return TailState(zeros(0), front, torch.zeros(batch, dtype=torch.long, device=device), 0, True)

    def probed_own(self, state, names, first):
        device = state.seen.device
        at = state.seen[:, None] + torch.arange(-state.tail[0].shape[2], 0, device=device)
        front = torch.arange(self.front + 1, device=device)[None]
        fronts = self._swap(names, state.front, front, first) if state.front else ()
        return state._replace(tail=self._swap(names, state.tail, at, first), front=fronts)


class Digested(Heads):
    """A mechanism that turns all keys and values into tensors of fixed size and reads its queries against those."""

    def digest(self, real: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The fixed tensors; `real` [B, S] or None where all are; the other arguments are the sources by name."""
        raise NotImplementedError

    def consult(self, digest: tuple[Tensor, ...], q: Tensor) -> Tensor:
        """[B, H, T, D]; a digest of no real token gives zeros."""
        raise NotImplementedError

    def own(self, rows, query, source, state):
        return self.consult(self.digest(rows.real(), **self.repeated(source)), **query), None

    def fix(self, source, memory):
        B, S = memory.x.shape[:2]
        count = torch.full((B,), S, device=memory.x.device) if memory.count is None else memory.count
        real = None if memory.count is None else torch.arange(S, device=count.device) < count[:, None]
        return CrossState(self.digest(real, **self.repeated(source)), count, memory.count is None, S)

    def look(self, query, state):
        return self.consult(state.parts, **query)


class ScanState(NamedTuple):
    """Running sums."""

    sums: tuple[Tensor, ...]
    seen: Tensor  # [B]
    top: int
    even: bool

    def select(self, rows: Tensor) -> "ScanState":
        return self._replace(sums=tuple(part[rows] for part in self.sums), seen=self.seen[rows])


class Scanned(Digested):
    """A digest that grows token by token: causal attention is a scan, decoding keeps the sums."""

    def zero(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The sums before the first token, batch first."""
        raise NotImplementedError

    def scan(
        self, real: Tensor | None, sums: tuple[Tensor, ...] | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """[B, H, T, D] and the sums after the last real token; padded tokens leave the sums alone. Without sums a
        sequence begins here, and nobody asks for those at its end."""
        raise NotImplementedError

    def own(self, rows, query, source, state):
        if self.shape.role == "self":
            return super().own(rows, query, source, state)
        sums = None if state is None else state.sums
        o, sums = self.scan(rows.real(), sums, **query, **self.repeated(source))
        if state is None:
            return o, None
        even = state.even and rows.at is not None
        return o, ScanState(sums, state.seen + rows.count, state.top + rows.T, even)

    def empty(self, batch, capacity, dtype, device):
        seen = torch.zeros(batch, dtype=torch.long, device=device)
        return ScanState(self.zero(batch, dtype, device), seen, 0, True)


def pack(x: Tensor, keep: Tensor) -> tuple[Tensor, Rows]:
    """The real tokens of each row moved to the left, zeros behind."""
    count = keep.sum(1)
    order = torch.argsort(keep.logical_not(), dim=1, stable=True)
    moved = x.gather(1, order[..., None].expand_as(x))
    real = torch.arange(x.shape[1], device=x.device) < count[:, None]
    rows = Rows(torch.zeros_like(count), count, x.shape[1], None)
    return torch.where(real[..., None], moved, 0), rows


def pack_memory(memory: Tensor, keep: Tensor | None, allowed: Tensor | None = None) -> Memory:
    if keep is None:
        return Memory(memory, None, allowed=allowed)
    packed, rows = pack(memory, keep)
    return Memory(packed, rows.count, allowed=pack_pairs(allowed, None, keep))


def pack_pairs(allowed: Tensor | None, keep: Tensor | None, keys: Tensor | None = None) -> Tensor | None:
    """A mask of pairs [1 or B, T, S] moved with the tokens of either side; `keys` None: both sides are the same."""
    if allowed is None:
        return None
    for axis, real in ((1, keep), (2, keep if keys is None else keys)):
        if real is not None:
            order = torch.argsort(real.logical_not(), dim=1, stable=True)
            allowed = allowed.expand(len(order), -1, -1)
            at = order[:, :, None] if axis == 1 else order[:, None, :]
            allowed = allowed.gather(axis, at.expand_as(allowed))
    return allowed


def check_pairs(mask: Tensor, B: int, T: int, S: int) -> Tensor:
    """An explicit mask [T, S] or [B, T, S] as [1 or B, T, S]."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be boolean, True = may attend, got {got}")
    if tuple(mask.shape) not in ((T, S), (B, T, S)):
        raise ValueError(f"mask must be [{T}, {S}] or [{B}, {T}, {S}], queries by keys, got {list(mask.shape)}")
    return mask if mask.dim() == 3 else mask[None]


def unpack(y: Tensor, keep: Tensor, dim: int = 1) -> Tensor:
    """The inverse of `pack` along `dim`, where `keep` has its last axis: zeros where nothing was kept."""
    at = (keep.cumsum(-1) - 1).clamp(min=0)
    shape = (*keep.shape, *([1] * (y.dim() - keep.dim())))
    moved = y.gather(dim, at.view(shape).expand_as(y))
    return torch.where(keep.view(shape), moved, 0)


def blank(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zeros where nothing is kept: selected, so that not even NaN gets through."""
    return x if keep is None else torch.where(keep.view(*keep.shape, *([1] * (x.dim() - keep.dim()))), x, 0)


def masked_softmax(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax in float32 (or better) over the visible keys; a row that sees none is all zeros, gradients finite."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if visible is None:
        return torch.softmax(wide, -1)
    wide = torch.where(visible, wide, torch.finfo(wide.dtype).min)
    return torch.where(visible, torch.softmax(wide, -1), 0)


def trim(state: Any) -> Any:
    """The same state with the bound `top` brought down to the longest row, so that padding takes no room."""
    if not isinstance(state, tuple):
        return state
    parts = [trim(part) for part in state]
    if not hasattr(state, "_fields"):
        return tuple(parts)
    state = type(state)(*parts)
    return state._replace(top=int(state.seen.max())) if "top" in state._fields else state


def state_form(state: Any) -> tuple:
    """Of what kind a state is, and those inside it."""
    return type(state), *(state_form(part) for part in getattr(state, "parts", ()) if hasattr(part, "_fields"))


def select(state: Any, rows: Tensor) -> Any:
    """A copy of the rows of a state, in the order and as often as asked: to branch, to reorder beams. Rows that the
    state does not have are refused, but on a GPU, where looking would take a synchronisation."""
    check_rows(rows, state)
    return take_rows(state, rows)


def check_rows(rows: Any, state: Any) -> None:
    """Refuses what are no rows of a state."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.long, torch.int):
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
        raise ValueError(f"rows must be a tensor of row numbers [n], int64 or int32, got {got}")
    count = _rows_of(state)
    if count is not None and len(rows) and rows.device.type == "cpu" and not torch.compiler.is_compiling():
        least, most = rows.aminmax()
        if least < 0 or most >= count:
            wrong = int(least) if least < 0 else int(most)
            raise ValueError(f"the state has the rows 0 to {count - 1}, got {wrong}")


def _rows_of(state: Any) -> int | None:
    """How many rows a state has, where it says so."""
    named = [getattr(state, name, None) for name in ("seen", "count")]
    found = [part for part in (state, *named) if isinstance(part, Tensor)]
    return len(found[0]) if found else None


def take_rows(state: Any, rows: Tensor) -> Any:
    """`select` without looking at the rows."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return state[rows]
    if hasattr(state, "select"):
        return state.select(rows)
    return type(state)(take_rows(part, rows) for part in state)


def redraw(model: nn.Module, *, seed: int, step: int) -> None:
    """Draws anew what the layers of a model draw at this training step. Call it before each step of a training loop of
    your own; `regard train` does. What is drawn depends on the seed, the step and the place of the layer alone."""
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    for place, layer in enumerate(layers):
        if layer.redraw_every and step % layer.redraw_every == 0:
            layer.redraw(generator(seed, step, place))


def drawn(model: nn.Module) -> list[str]:
    """The names of the tensors in the state dict of a model that are drawn anew while it trains."""
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, Attention))
    return [
        f"{name}.{buffer}" if name else buffer
        for name, layer in layers
        if layer.redraw_every
        for buffer, _ in layer.named_buffers(recurse=False)
    ]


def detach(state: Any) -> Any:
    """The same state with its history of gradients cut, between the segments of truncated training."""
    if isinstance(state, Tensor):
        return state.detach()
    if isinstance(state, tuple):
        parts = [detach(part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state
