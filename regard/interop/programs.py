"""What is exported of a model: programs from named tensors to named tensors, as `torch.export` records them.

A model that reads a whole input is one program. A decoder is two: `Prefill` (or, of a translator, `Encoder`) makes the
state, `Step` takes a token and the state and gives the next one. States keep their sizes (`fixed_state`), so that a
step is one graph. Each tensor of a state has a name: `state.NAME` where it is read, `next.NAME` where a step changes
it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.model import Model
from regard.core.rows import unpack
from regard.core.state import Progress
from regard.data.images.augment import normalise
from regard.models.transformer import Transformer

BATCH, LENGTH, SOURCE, SLOTS = "batch", "length", "source_length", "slots"  # the sizes that may stay open
ROWS = 3  # of the inputs that a program is recorded from
Tensors = dict[str, Tensor]


class Program(nn.Module):
    """A function of named tensors. `axes` are the open sizes of each input: dimension and name."""

    name: str  # of its file
    axes: dict[str, dict[int, str]]

    def __init__(self, model: Model):
        super().__init__()
        self.model: Any = model

    def compute(self, given: Tensors) -> Tensors:
        raise NotImplementedError

    def example(self, rows: int, lengths: Mapping[str, int], draw: torch.Generator) -> Tensors:
        """Random inputs with these open sizes."""
        raise NotImplementedError

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """`compute` in the form that is recorded: inputs and outputs in their order."""
        return list(self.compute(dict(zip(self.axes, tensors, strict=True))).values())


class TextProgram(Program):
    """Reads token ids [B, T] and `keep` [B, T], True = real token; no `keep` where a mechanism takes no padding."""

    tokens, keep, axis = "tokens", "keep", LENGTH

    def __init__(self, model: Model, padding: bool = True):
        super().__init__(model)
        names = (self.tokens, self.keep)[: 1 + padding]
        self.axes = {name: {0: BATCH, 1: self.axis} for name in names}

    def example(self, rows: int, lengths: Mapping[str, int], draw: torch.Generator) -> Tensors:
        size = (rows, lengths[self.axis])
        made = {self.tokens: torch.randint(0, self.model.config.vocabulary, size, generator=draw)}
        if self.keep in self.axes:
            made[self.keep] = _random_padding(size, draw)
        return made


def _random_padding(size: tuple[int, int], draw: torch.Generator) -> Tensor:
    """[B, T]: the first row without padding, the second with some at the end, the others with holes."""
    keep = torch.rand(size, generator=draw) < 0.8
    keep[:1] = True
    keep[1:2] = torch.arange(size[1]) < max(1, size[1] * 2 // 3)
    keep[:, 0] |= ~keep.any(1)
    return keep


class TextClassifier(TextProgram):
    """Logits [B, classes] of a text."""

    name = "model"

    def compute(self, given: Tensors) -> Tensors:
        return {"logits": self.model(given["tokens"], keep=given.get("keep")).logits}


class TextEncoder(TextProgram):
    """Vectors [B, T, E] of the tokens, logits [B, T, V] where the model has an output layer, and what a pooler makes of
    the first token [B, E]."""

    name = "model"

    def compute(self, given: Tensors) -> Tensors:
        tokens, keep = given["tokens"], given.get("keep")
        if not isinstance(self.model, Transformer):
            return {"logits": self.model(tokens, keep=keep).logits}
        x = self.model.encode(tokens, keep=keep).x
        made = {"vectors": x}
        if self.model.output is not None:
            made["logits"] = self.model.output(self.model.transform(x))
        if keep is not None:
            made = {name: unpack(part, keep) for name, part in made.items()}
        if self.model.pooler is not None:
            made["pooled"] = torch.tanh(self.model.pooler(x[:, 0]))
        return made


class ImageClassifier(Program):
    """Logits [B, classes] of pixels as a file has them: uint8 [B, C, height, width]."""

    name = "model"
    axes = {"pixels": {0: BATCH}}
    mean: Tensor
    deviation: Tensor

    def __init__(self, model: Model, mean: list[float], deviation: list[float]):
        super().__init__(model)
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))

    def compute(self, given: Tensors) -> Tensors:
        return {"logits": self.model(normalise(given["pixels"], self.mean, self.deviation)).logits}

    def example(self, rows: int, lengths: Mapping[str, int], draw: torch.Generator) -> Tensors:
        size = (rows, self.model.config.channels, *self.model.config.image)
        return {"pixels": torch.randint(0, 256, size, generator=draw).to(torch.uint8)}


class StateProgram(TextProgram):
    """Reads what stands before the first step of a decoder, and makes its state: room for `capacity` tokens."""

    def __init__(self, model: Model, capacity: int, padding: bool = True):
        super().__init__(model, padding)
        self.capacity = capacity
        self.vocabulary = getattr(model.config, "target_vocabulary", None) or model.config.vocabulary  # that it writes

    def read(self, given: Tensors) -> tuple[Tensors, Any]:
        """Outputs beside the state, and the state."""
        raise NotImplementedError

    def compute(self, given: Tensors) -> Tensors:
        made, state = self.read(given)
        return made | {f"state.{name}": part for name, part in state_tensors(state).items()}


class Prefill(StateProgram):
    """Reads a prompt: logits [B, V] of the token behind it, and the state."""

    name = "prefill"

    def read(self, given: Tensors) -> tuple[Tensors, Any]:
        tokens, keep = given["tokens"], given.get("keep")
        state = self.model.start(tokens.shape[0], capacity=self.capacity)
        logits, state = self.model.extend(tokens, state, keep=keep)
        return {"logits": last_real(logits, keep)}, self.model.fixed_state(state, self.capacity)


class Encoder(StateProgram):
    """Reads a source: the state of the decoder before the first token of a translation."""

    name = "encoder"
    tokens, keep, axis = "source", "source_keep", SOURCE

    def read(self, given: Tensors) -> tuple[Tensors, Any]:
        memory = self.model.encode(given["source"], keep=given.get("source_keep"))
        state = self.model.start(given["source"].shape[0], memory=memory, capacity=self.capacity)
        return {}, self.model.fixed_state(state, self.capacity)


class Step(Program):
    """A token of each row [B] and the state -> logits [B, V] of the token behind it, and what changed of the state."""

    name = "step"

    def __init__(self, reader: StateProgram, lengths: Mapping[str, int]):
        """`reader` makes the state, for an example from inputs of these sizes."""
        super().__init__(reader.model)
        self.vocabulary = reader.vocabulary
        draw = torch.Generator().manual_seed(0)
        longer = {name: 2 * size for name, size in lengths.items()}
        (_, self.form), (_, other) = (reader.read(reader.example(ROWS, sizes, draw)) for sizes in (lengths, longer))
        self.given = state_tensors(self.form)
        self.axes = {"token": {0: BATCH}}
        for (name, part), wider in zip(self.given.items(), state_tensors(other).values(), strict=True):
            grows = {at for at in range(1, part.dim()) if part.shape[at] != wider.shape[at]}
            # a mechanism may keep a vector for several tokens of a source
            named = {at: SOURCE if part.shape[at] == lengths.get(SOURCE) else SLOTS for at in grows}
            self.axes[f"state.{name}"] = {0: BATCH} | named
        self.changing = self._changing()

    def _changing(self) -> set[str]:
        """The names of the tensors that a step changes, in place or not: memory that was projected once stays."""
        before = {name: part.clone() for name, part in self.given.items()}
        written = {name: part._version for name, part in before.items()}
        _, after = self._extend(torch.zeros(ROWS, dtype=torch.long), before)
        kept = {name for name, part in after.items() if part is before[name] and part._version == written[name]}
        return set(after) - kept

    def _extend(self, token: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        logits, after = self.model.extend(token[:, None], with_tensors(self.form, tensors))
        return logits[:, 0], state_tensors(after)

    def compute(self, given: Tensors) -> Tensors:
        # a step may write into its state, and inputs must stay as they are
        state = {name: given[f"state.{name}"].clone() for name in self.given}
        logits, after = self._extend(given["token"], state)
        return {"logits": logits} | {f"next.{name}": part for name, part in after.items() if name in self.changing}

    def example(self, rows: int, lengths: Mapping[str, int], draw: torch.Generator) -> Tensors:
        token = torch.randint(0, self.vocabulary, (ROWS,), generator=draw)
        return {"token": token} | {f"state.{name}": part for name, part in self.given.items()}


def last_real(logits: Tensor, keep: Tensor | None) -> Tensor:
    """[B, T, V] -> [B, V], at the last real token of each row."""
    if keep is None:
        return logits[:, -1]
    last = (keep * torch.arange(keep.shape[1], device=keep.device)).argmax(1)
    return logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[2]))[:, 0]


def state_tensors(state: Any) -> Tensors:
    """The tensors of a state by their places in it, each with a first dimension of B. All parts of a state have read
    the same tokens: one `length`."""
    length = state.progress.length
    # a state may hold k rows for each row of the batch (the columns of a grid), one behind the other
    folded = {name: _unfolded(part, length.shape[0]) for name, part in _leaves(state, "")}
    return {"length": length} | folded


def _unfolded(part: Tensor, rows: int) -> Tensor:
    """[k B, ...] -> [B, k, ...]; [B, ...] as it is."""
    return part if part.shape[0] == rows else part.unflatten(0, (rows, -1))


def _leaves(state: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield place, state
    elif isinstance(state, tuple) and not isinstance(state, Progress):
        names = getattr(state, "_fields", range(len(state)))
        for name, part in zip(names, state, strict=True):
            yield from _leaves(part, f"{place}.{name}" if place else str(name))


def with_tensors(state: Any, tensors: Tensors, place: str = "") -> Any:
    """A state of the same form with these tensors: the inverse of `state_tensors`."""
    if isinstance(state, Tensor):
        part = tensors[place]
        return part if part.dim() == state.dim() else part.flatten(0, 1)
    if isinstance(state, Progress):
        return state._replace(length=tensors["length"])
    if not isinstance(state, tuple):
        return state
    names = getattr(state, "_fields", range(len(state)))
    parts = [
        with_tensors(part, tensors, f"{place}.{name}" if place else str(name))
        for name, part in zip(names, state, strict=True)
    ]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
