"""The model section of a config: a preset, and changes to it. Its options are those of the models themselves."""

import dataclasses
import functools
import operator
import types
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from regard.config import fit
from regard.core.options import Option, config_dataclass, options
from regard.models import registry
from regard.models.config import check_config

C = TypeVar("C", bound=type[Any])
# fields of model configs that follow from the data or from the task
GIVEN = (
    "kind",
    "vocabulary",
    "target_vocabulary",
    "classes",
    "image",
    "channels",
    "segments",
    "stems",
    "pooler",
    "cell",
    "body",
)


@config_dataclass
class ModelOptions:
    """A preset, and changes to it."""

    predicts: ClassVar[str] = ""  # what the models of the task predict, see regard.models.registry
    default: ClassVar[str] = ""  # the preset if none is named
    preset: Annotated[str | None, "name of the model and its sizes"] = None

    if TYPE_CHECKING:
        # the options of the models are added by `derived`
        def __init__(self, *, preset: str | None = None, **changes: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        check_config(self, "model.")
        if self.predicts:
            self.find()

    def changes(self) -> dict[str, Any]:
        """The options that are set, besides the preset."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None and name != "preset"}

    def changes_of_trained(self, *free: str) -> dict[str, Any]:
        """The changes to a pretrained model; only the options named in `free` may change."""
        changes = self.changes()
        fixed = [name for name in changes if name not in free]
        fixed += ["preset"] if self.preset not in (None, self.default) else []
        if fixed:
            options = ", ".join(f"model.{name}" for name in fixed)
            swap = any(name.endswith("attention") or name == "position" for name in fixed)
            raise ValueError(
                f"{options} cannot change with --init: of a pretrained model, only {', '.join(free)} can"
                + ("; 'regard swap' writes a run with another attention" if swap else "")
            )
        return changes

    def find(self) -> registry.Preset:
        """The preset that is named."""
        known, name = registry.presets(self.predicts), self.preset or self.default
        if name in registry.entries():
            # the name of a model stands for its first preset
            model = registry.find(name)
            if self.predicts not in model.forms:
                articles = {"class": "a ", "image class": "an ", "caption": "a "}
                does = " or ".join(f"{articles.get(what, '')}{what}" for what in model.predicts)
                raise ValueError(
                    f"model.preset {name!r} cannot be used here: {name} predicts {does}, and this task trains models "
                    f"that predict {self.predicts}; choose one of {', '.join(known)}"
                )
            name = next(iter(model.forms[self.predicts].presets))
        if name not in known:
            raise ValueError(f"model.preset must be one of {', '.join(known)}, got {name!r}")
        return known[name]

    def resolve(self, **sizes: Any) -> Any:
        """The config of a model: the preset, the changes to it, and sizes that follow from the data."""
        preset = self.find()
        known, changes = options(preset.form.config), self.changes()
        foreign = [name for name in changes if name not in preset.form.options()]
        if foreign:
            raise ValueError(f"preset {self.preset or self.default!r} has no model.{', model.'.join(foreign)}")
        extra = [name for name, size in sizes.items() if name not in known and size]
        if "stems" in extra:
            raise ValueError(f"data.tokenizer stems cannot be used with model.preset {self.preset!r}")
        sizes = {name: size for name, size in sizes.items() if name in known}
        changes = {name: fit(known[name].type, value, f"model.{name}") for name, value in changes.items()}
        return preset.form.config(**preset.values | changes | sizes)


def derived(cls: C) -> C:
    """Makes a dataclass with the options of every model that predicts `cls.predicts`, beside those that the class
    declares. All of them are None by default: the preset decides."""
    found: dict[str, dict[str, Option]] = {}
    for preset in registry.presets(cls.predicts).values():
        for name, option in preset.form.options().items():
            if name not in GIVEN:
                found.setdefault(name, {})[preset.model] = option
    everywhere = {preset.model for preset in registry.presets(cls.predicts).values()}
    for name, by_model in found.items():
        if name not in cls.__annotations__:
            kind = _union([option.type for option in by_model.values()])
            extras: list[Any] = [_help(by_model, everywhere)]
            ranges = [option.range for option in by_model.values() if option.range is not None]
            if len(ranges) == len(by_model):
                extras.append(functools.reduce(operator.or_, ranges))
            cls.__annotations__[name] = Annotated[kind, *extras]
            setattr(cls, name, None)
    return config_dataclass(cls)


def _help(by_model: dict[str, Option], everywhere: set[str]) -> str:
    """The help of an option, with the models that have it, if not all have it or it means different things."""
    senses: dict[str, list[str]] = {}
    for model, option in by_model.items():
        senses.setdefault(option.help, []).append(model)
    first, *others = senses
    text = first if set(by_model) == everywhere or "transformer" in by_model else f"{_listed(senses[first])}: {first}"
    return "; ".join([text, *(f"{_listed(senses[other])}: {other}" for other in others)])


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _union(kinds: list[Any]) -> Any:
    """One type that admits the values of all of them, and None."""
    unions = (Union, types.UnionType)
    parts = [part for kind in kinds for part in (get_args(kind) if get_origin(kind) in unions else (kind,))]
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    plain = [part for part in parts if get_origin(part) is not Literal and part is not type(None)]
    found = [*dict.fromkeys(plain)] + ([Literal[tuple(dict.fromkeys(words))]] if words else [])
    return functools.reduce(operator.or_, [*found, None])


def check_out(config: Any) -> None:
    """Refuses a config without a run folder."""
    if not config.out.strip():
        raise ValueError("out must name a folder for the run")
