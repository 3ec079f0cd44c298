"""The contract of a published family: their config and ours, their tensors and ours.

A family says which of its settings are which of ours (`fields`), what all its models have in common (`always`), and
which of our parameters each of its tensors holds (`links`). Import and export both follow from that. The config is that
of a Transformer, unless `config_class` is another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.limits import MOST, SIZES
from regard.models.config import ModelConfig
from regard.spec import FEEDFORWARD, POSITIONS, Registry, Spec, over_layers, parse

Tensors = dict[str, Tensor]
Values = dict[str, Any]  # the settings of a config.json
Fields = dict[str, tuple[str, Any]]  # our name -> their name, and the value if their file omits it


class Form(NamedTuple):
    """How one published tensor holds parameters of ours."""

    read: Callable[[Tensor], tuple[Tensor, ...]]
    write: Callable[[tuple[Tensor, ...]], Tensor]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT if tensor.dim() == 2 else tensor


SAME = Form(lambda tensor: (tensor,), lambda parts: parts[0])
TRANSPOSED = Form(lambda tensor: (_transposed(tensor),), lambda parts: _transposed(parts[0]))  # [in, out], as in GPT-2
JOINT_QKV = Form(lambda tensor: _transposed(tensor).chunk(3), lambda parts: _transposed(torch.cat(parts)))
JOINT_QKV_ROWS = Form(lambda tensor: tensor.chunk(3), lambda parts: torch.cat(parts))  # [3 out, in], as in timm
ROW = Form(lambda tensor: (tensor.squeeze(0),), lambda parts: parts[0][None])  # [1, V] or [1, T, E]
TOKEN = Form(lambda tensor: (tensor.flatten(),), lambda parts: parts[0][None, None])  # [1, 1, E]


def skip_rows(rows: int) -> Form:
    """A table whose first rows are not used."""
    return Form(lambda tensor: (tensor[rows:],), lambda parts: F.pad(parts[0], (0, 0, rows, 0)))


class Link(NamedTuple):
    """A published tensor, and the parameters of ours that it holds."""

    theirs: str
    ours: tuple[str, ...]
    form: Form = SAME


def link(theirs: str, *ours: str, form: Form = SAME, bias: bool = True) -> Iterator[Link]:
    """Links the weight of a layer, and its bias if there is one."""
    for name in ("weight", "bias") if bias else ("weight",):
        yield Link(f"{theirs}.{name}", tuple(f"{part}.{name}" for part in ours), form)


def link_output(theirs: str, config: ModelConfig) -> Iterator[Link]:
    """Links the output layer, unless it is tied to the embedding."""
    return iter(()) if config.tied else link(theirs, "output", bias=False)


# old files call the parameters of a norm gamma and beta
OLD_NORMS = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
# theirs: ours; where two of their names mean the same, the first is written
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def dense_spec(activation: str, **options: bool) -> str:
    """The spec of a feed-forward layer with the activation of this published name."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation is called {activation!r} here; known: {', '.join(ACTIVATIONS)}")
    return str(Spec("dense", options=(("activation", ACTIVATIONS[activation]), *options.items())))


def published_activation(config: Any) -> str:
    """The published name of a model's activation."""
    layers = config.layers if isinstance(config.layers, int) else sum(config.layers)
    ours = option_value(FEEDFORWARD, over_layers(config.feedforward, layers)[0], "activation")
    return next((theirs for theirs, name in ACTIVATIONS.items() if name == ours), "none")


def option_value(registry: Registry, spec: Spec | str, name: str) -> Any:
    """The value of an option of a spec, given or default; None if the mechanism has no such option."""
    spec = parse(spec)
    defaults = {option.name: option.default for option in registry.options(spec.name)}
    return (defaults | dict(spec.options)).get(name)


def table_length(config: ModelConfig) -> int:
    """The number of positions in a model's table; 0 without a table."""
    return option_value(POSITIONS, config.position, "longest") or 0


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """One published architecture, in both directions."""

    name: str
    architecture: str
    task: str
    prefix: str  # before the names of all tensors but those of the head
    fields: Fields
    always: Values
    required: Values = field(default_factory=dict)  # their settings that may have this value only; omitted means it
    unused: tuple[str, ...] = ()  # patterns of tensors that take no part in what is computed here
    # patterns of other names of tensors, without the prefix, as newer or older files have them, and what `links` says
    renamed: tuple[tuple[str, str], ...] = OLD_NORMS
    config_class: type[Any] = ModelConfig

    def config(self, values: Values, names: set[str]) -> Any:
        """Our config, from their settings and the names of their tensors, as `links` gives them."""
        for name, value in self.required.items():
            if values.get(name) not in (value, None):
                raise ValueError(f"{self.name} with {name}={values[name]!r} is not known here, only {name}={value!r}")
        ours = {name: values.get(theirs, default) for name, (theirs, default) in self.fields.items()}
        for name, (theirs, _) in self.fields.items():
            if isinstance(ours[name], int) and ours[name] > SIZES.get(name, MOST):
                raise ValueError(f"{theirs} must be at most {SIZES.get(name, MOST):,}, got {ours[name]:,}")
        return self.config_class(**ours | self.always | self.our_settings(values, names))

    def values(self, config: Any, special: Values) -> Values:
        """Their settings, from our config; `special` holds what is not in it: the ids of special tokens by their names,
        or the names of classes."""
        fields = {theirs: getattr(config, ours) for ours, (theirs, _) in self.fields.items()}
        values = {"model_type": self.name, "architectures": [self.architecture]} | fields | self.required | special
        return values | self.their_settings(config, values)

    @abstractmethod
    def our_settings(self, values: Values, names: set[str]) -> Values:
        """The fields of our config that are not simply one of their settings."""

    @abstractmethod
    def their_settings(self, config: Any, values: Values) -> Values:
        """The inverse of `our_settings`; `values` are the settings known so far."""

    @abstractmethod
    def links(self, config: Any, values: Values) -> Iterator[Link]:
        """All tensors of a model: those of the head by their full name, the others without the prefix."""

    def constants(self, config: Any, values: Values) -> Tensors:
        """Tensors in their files that are computed and not learned. Default: none."""
        return {}

    def aliases(self, config: Any) -> dict[str, str]:
        """Tensors that a file may omit, each with the tensor that then stands for it. Default: none."""
        return {}
