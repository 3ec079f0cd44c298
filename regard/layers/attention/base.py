"""The contract of an attention mechanism: the file to read first.

Letters of the whole project: B batch, T queries, S keys, E model width, H heads, G key/value heads, D head width,
R rank or features, C capacity. `[B, T, E]` between layers, `[B, H, T, D]` inside. `keep` is the only word for padding:
boolean, True = real token.

Padding is met once. The public methods (`forward`, `start`, `extend`, `weights`) move the real tokens of each row to
the left, zero the rest, call the mechanism and put the answer back; a mechanism only ever sees rows that are real from
the left. Positions count real tokens.

A mechanism is one file with one class on one of these, each in the file of its name in lower case:

    Attention             the contract itself
      Projected           projections named by `inputs`, heads, positions; its map by unit vectors as values
        Attending         reads keys and values one by one; `attend`
          Cached          keeps every key and value: a KV cache                            (softmax, strided, sparse)
            Scored        writes `score`, the logits (in cached.py)                        (additive, location)
          Tailed          keeps the last `reach` tokens and the first `front`              (local, longformer)
        Digested          turns all keys and values into a fixed digest; `digest`, `consult`   (linformer)
          Scanned         a digest that also grows token by token; `zero`, `scan`          (linear, performer)

What they speak (`Rows`, `Mask`, `Memory`, `Shape`, `Out`, states) is in `regard.core`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, final

import torch
from torch import Tensor, nn

from regard.core.rows import Memory, Rows, blank, pack, pack_memory, pack_pairs, unpack
from regard.core.shape import Order, Role, Shape, check_role
from regard.core.state import Initial, Out, fix_bound, trim
from regard.layers.attention import checks


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
    prefix_invariant: bool = True  # causal: the output at i does not move when later tokens come
    split_invariant: bool = True  # extend gives the same however the tokens are cut
    exact: bool = True  # False: a random or learned approximation of its target
    independent_heads: bool = True  # no head reads what another one does: heads(a, a) = a
    linear: bool = True  # the output is the map times the values; False: the mechanism writes its own map
    signed: bool = False  # weights may be negative or not sum to one
    pairs: bool = False  # weighs pairs of tokens one by one: takes an explicit mask and attention dropout
    overflows: bool = False  # without a denominator, float16 cannot hold its output at logits of 1e4
    columns: Literal["tokens", "slots"] = "tokens"  # what the columns of the map are
    padding: Literal["any", "none"] = "any"
    dynamic_length: bool = True  # torch.export can leave the length open; False: it takes a fixed one
    auxiliary_loss: bool = False  # returns one in training, to be added to the loss of the model
    stream: bool = False  # carries a second sequence from layer to layer


class Attention(nn.Module, ABC):
    """The contract. `facts`, `examples` (small specs the suite builds) and `reduces_to` (spec -> the spec it equals)
    belong to each mechanism; options may change `facts` on the instance. A method is abstract (a mechanism, or the base
    it is built on, writes it), final (none does), or a default that some override: the docstring says which."""

    facts: Facts
    examples: tuple[str, ...]
    reduces_to: tuple[tuple[str, str], ...] = ()
    nests = False
    redraw_every = 0  # training steps from one random draw to the next; 0: one draw for good

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        check_role("attention", self.facts, shape.role, "the mechanism is not defined for it")
        if shape.dropout and not self.facts.pairs:
            raise ValueError(
                f"attention {self.facts.name!r} has no attention dropout: it forms no weights of single pairs to drop; "
                "leave dropout out and drop its output instead"
            )

    # the user's side: any padding

    @final
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
        checks.check_inputs(self, x, keep, memory, memory_keep)
        B, T = x.shape[:2]
        allowed = checks.allowed_pairs(self, mask, B, T, T if memory is None else memory.shape[1])
        if memory is not None:
            packed = pack_memory(memory, memory_keep, allowed)
            if keep is not None and self.facts.auxiliary_loss:
                # what learns from its queries must know which are real
                queries, rows = pack(x, keep)
                return unpack(self.forward_packed(queries, rows, memory=packed).y, keep)
            y = self.forward_packed(blank(x, keep), Rows.full(x), memory=packed).y
            return blank(y, keep)
        if keep is None:
            return self.forward_packed(x, Rows.full(x)._replace(allowed=allowed)).y
        packed, rows = pack(x, keep)
        return unpack(self.forward_packed(packed, rows._replace(allowed=pack_pairs(allowed, keep))).y, keep)

    @final
    def start(
        self,
        batch: int,
        *,
        memory: Tensor | None = None,
        memory_keep: Tensor | None = None,
        capacity: int | None = None,
    ) -> Any:
        """The state before the first token. `capacity` reserves room for that many tokens at once."""
        checks.check_decodes(self)
        for name, size in (("batch", batch), ("capacity", capacity)):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        if self.shape.role == "cross":
            checks.check_memory(self, memory, memory_keep, batch)
        elif memory is not None or memory_keep is not None:
            checks.refuse_memory(self)
        weight = next(self.parameters())
        device = weight.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        packed = None if memory is None else pack_memory(memory, memory_keep)
        return self.initial_state(batch, memory=packed, capacity=capacity, dtype=dtype, device=device).state

    @final
    def extend(self, x: Tensor, state: Any, *, keep: Tensor | None = None) -> tuple[Tensor, Any]:
        """Reads n >= 1 new tokens per row. It consumes the state: continue with the one it returns; `select` first to
        branch."""
        checks.check_decodes(self)
        checks.check_tokens(self, x, keep, "x", "keep", self.shape.width)
        B, T = x.shape[:2]
        checks.check_state(self, state, B)
        if self.shape.role == "cross":
            rows = len(state.count)
            # beams of one sentence share its memory: they fold into the queries
            x = blank(x, keep).reshape(rows, B // rows * T, -1)
            y = self.forward_packed(x, Rows.full(x), state=state).y
            return blank(y.reshape(B, T, -1), keep), state
        if keep is None:
            out = self.forward_packed(x, state.progress.place(Rows.full(x)), state=state)
            return out.y, out.state
        packed, rows = pack(x, keep)
        out = self.forward_packed(packed, state.progress.place(rows), state=state)
        return unpack(out.y, keep), trim(out.state)

    @final
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
            if memory is not None or memory_keep is not None:
                raise ValueError("a state holds the memory already: leave memory and memory_keep out")
            return self._weights_of_state(x, keep, state)
        checks.check_inputs(self, x, keep, memory, memory_keep)
        B, T = x.shape[:2]
        allowed = checks.allowed_pairs(self, mask, B, T, T if memory is None else memory.shape[1])
        if memory is not None:
            maps = self.map(blank(x, keep), memory=pack_memory(memory, memory_keep, allowed))
            maps = blank(maps, None if keep is None else keep[:, None])
            if memory_keep is None or self.facts.columns == "slots":
                return maps
            return unpack(maps, memory_keep[:, None, None], dim=3)
        if keep is None:
            return self.map(x, Rows.full(x)._replace(allowed=allowed))
        packed, rows = pack(x, keep)
        maps = unpack(self.map(packed, rows._replace(allowed=pack_pairs(allowed, keep))), keep[:, None], dim=2)
        return unpack(maps, keep[:, None, None], dim=3) if self.facts.columns == "tokens" else maps

    @final
    def _weights_of_state(self, x: Tensor, keep: Tensor | None, state: Any) -> Tensor:
        checks.check_tokens(self, x, keep, "x", "keep", self.shape.width)
        checks.check_state(self, state, len(x))
        if self.shape.role == "cross":
            fold = len(x) // len(state.count)
            maps = self.map(blank(x, keep).reshape(len(state.count), -1, x.shape[2]), state=state)
            maps = maps.unflatten(2, (fold, x.shape[1])).transpose(1, 2).flatten(0, 1)
            return blank(maps, None if keep is None else keep[:, None])
        packed, rows = (x, Rows.full(x)) if keep is None else pack(x, keep)
        maps = self.map(packed, state.progress.place(rows), state=state)
        return maps if keep is None else unpack(maps, keep[:, None], dim=2)

    # the mechanism's side: rows that are real from the left; what a model calls

    @abstractmethod
    def forward_packed(
        self,
        x: Tensor,
        rows: Rows | None = None,
        *,
        state: Any = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> Out:
        """[B, T, E] -> Out. With a state it reads and extends it; without, the tokens are the whole sequence."""

    def initial_state(
        self,
        batch: int,
        *,
        memory: Memory | None = None,
        stream: Tensor | None = None,
        capacity: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Initial:
        """The state (and stream) before the first token, of roles "causal" and "cross". Default: there is none."""
        self.not_written("initial_state")

    def fixed_state(self, state: Any, capacity: int) -> Any:
        """A state of role "causal" in a form whose tensors keep their sizes while one token at a time is added, up to
        `capacity` in all, and from which the host reads nothing: for steps that are captured as a CUDA graph. It may be
        of another kind than `start` gives."""
        return fix_bound(state, capacity)

    def map(
        self,
        x: Tensor,
        rows: Rows | None = None,
        *,
        state: Any = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """[B, H, T, S]; never consumes the state. Default: `apply_map` of unit vectors."""
        if state is not None:
            raise ValueError(
                f"attention {self.facts.name!r} does not keep its tokens one by one, so a state has no map: call "
                f"weights(...) on the whole"
            )
        S = x.shape[1] if memory is None else memory.x.shape[1]
        unit = torch.eye(S, dtype=x.dtype, device=x.device).expand(len(x), 1, -1, -1)
        return self.apply_map(unit, x, rows, memory=memory, stream=stream)

    @abstractmethod
    def apply_map(
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

    def slots(self, x: Tensor, rows: Rows | None = None, *, memory: Memory | None = None) -> Tensor:
        """[B, H, slots, D]: the values that the columns of a map stand for, where facts.columns is "slots". Default:
        there are none."""
        self.not_written("slots")

    def link_layers(self, first: "Attention | None", fed: bool, read: bool, pre: bool = False) -> None:
        """A model calls it once for each layer: `first` is the layer to share parameters with, `fed` says whether a
        stream comes in, `read` whether the next layer reads it, `pre` whether the model's norms stand before its
        layers. Default: nothing is shared."""

    def projections(self) -> dict[str, Tensor]:
        """The parameters that a layer of another mechanism can take over: q.weight [H D, E], k.weight and v.weight
        [G D, E], output.weight [E, H D], and their biases where there are some. Default: it has none of the kind."""
        return {}

    def take_projections(self, given: Mapping[str, Tensor]) -> set[str]:
        """Copies the `projections` of a layer of the same shape. Returns the names of the parameters that now have
        trained values. Default: the mechanism has no queries, keys and values."""
        raise ValueError(
            f"attention {self.facts.name!r} has no queries, keys and values of the usual kind that trained ones could "
            "be put into: choose one that has them, such as local, longformer, sparse, performer, or heads(...) of them"
        )

    @classmethod
    def grid_option(cls, options: Mapping[str, Any]) -> str | None:
        """The option that takes the number of columns, where these options make tokens the cells of a grid: a model of
        images knows it, and fills it in. Default: tokens stand in a line."""
        return None

    def grid_order(self, rows: int) -> Tensor | None:
        """The cells of a grid with this number of rows, numbered row by row, in the order in which the layer reads them
        as tokens. Default: row by row, None."""
        return None

    @abstractmethod
    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """One unpadded sequence [T, E] -> [T, E]: the formula in loops."""

    def reference_loss(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """The auxiliary loss of one unpadded sequence, in loops. Default: there is none, as the facts say."""
        self.not_written("reference_loss")

    @final
    def not_written(self, method: str) -> NoReturn:
        """For defaults that are called only where a mechanism declares something, and must then be overridden."""
        raise NotImplementedError(
            f"attention {self.facts.name!r} of role {self.shape.role!r} does not write {method!r}, though its facts "
            "ask for it"
        )
