"""Runs as ONNX files, for ONNX Runtime and whatever else reads them: neither Python nor PyTorch is needed there.

`torch.export` records each program (programs.py) in PyTorch's own operators. The sizes of batches and texts stay open
where the mechanism allows; otherwise the length is fixed, and shorter texts are padded. All files of a model share one
file of weights. As its last step an export runs in ONNX Runtime what it wrote and compares it with the model, so that a
wrong file is never left behind.
"""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim

from regard import models
from regard.core.model import Model
from regard.interop.programs import (
    BATCH,
    LENGTH,
    ROWS,
    SLOTS,
    SOURCE,
    Encoder,
    ImageClassifier,
    Prefill,
    Program,
    StateProgram,
    Step,
    Tensors,
    TextClassifier,
    TextEncoder,
    last_real,
)
from regard.layers.attention.base import Attention

OPSET = 20
WEIGHTS = "weights.bin"  # shared by the files of a model
ABOUT = "model.json"  # inputs, outputs and sizes
INLINE = 1024  # bytes of a constant that stays inside its file
CLOSE = 1e-4  # the largest difference allowed, as a share of the largest value
STEPS = 3  # of a decoder that are compared
SHORTEST = 8  # tokens that a decoder must have room for


class Span(NamedTuple):
    """The sizes that a dimension may have; `most` None: any."""

    least: int
    most: int | None

    def __str__(self) -> str:
        if self.most == self.least:
            return f"fixed at {self.least}"
        return f"from {self.least}" + ("" if self.most is None else f" to {self.most}")


class Written(NamedTuple):
    """What an export made: the sizes that stayed open or did not, the largest difference to the model as a share of the
    largest value, and what to tell the user."""

    sizes: dict[str, Span]
    difference: float
    notes: list[str]

    def describe(self) -> str:
        """What was checked, in a sentence."""
        spans = ", ".join(f"{axis} {span}" for axis, span in self.sizes.items())
        return f"checked in ONNX Runtime: {spans}; largest difference {self.difference:.1e} of the largest value"


class Refused(ValueError):
    """A program could not be recorded, or does not compute what the model computes."""


def write(
    folder: Path, model: Model, facts: Mapping[str, Any], about: Mapping[str, Any], length: int | None
) -> Written:
    """Writes the files of a model and checks them. `facts` are those of its run; `about` is added to model.json.
    `length` is the number of tokens of the longest text; None: that of the training."""
    _import_onnxruntime()
    longest = _longest(model, facts, length)
    programs = _programs(model, facts, longest)
    folder.mkdir(parents=True, exist_ok=True)
    attentions = [layer for layer in model.modules() if isinstance(layer, Attention)]
    needs_length = sorted({layer.facts.name for layer in attentions if not layer.facts.dynamic_length})
    closed = f"attention {', '.join(needs_length)} reads tokens one by one" if needs_length else ""
    with torch.no_grad(), _quiet():
        if not closed:
            try:
                return Written(*_attempt(folder, programs, longest, open_length=True, about=about), [])
            except Refused as error:
                if not longest:
                    raise
                closed = str(error)
        made = _attempt(folder, programs, longest, open_length=False, about=about)
    fixed = ", ".join(f"{axis} {size}" for axis, size in longest.items())
    return Written(*made, [f"the length is fixed ({fixed}), pad shorter texts with keep = false: {closed}"])


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError("exporting to ONNX needs its packages: pip install 'regard[onnx]'") from error
    return onnxruntime


# what is exported of a run


def _longest(model: Model, facts: Mapping[str, Any], length: int | None) -> dict[str, int]:
    """The longest inputs, by the name of their dimension."""
    task, bound = facts["task"], models.max_positions(model)
    if task == "images":
        return {}
    if length is None:
        # a classifier reads bos and eos too, a translator eos
        length = {"classify": 2, "translate": 1}.get(task, 0) + int(
            facts["longest" if "longest" in facts else "length"]
        )
        length = min(length, bound or length)
    if length < SHORTEST or (bound is not None and length > bound):
        most = "" if bound is None else f" to {bound}, the number of positions of the model"
        raise ValueError(f"--length must be from {SHORTEST}{most}, got {length}")
    return {SOURCE if task == "translate" else LENGTH: length}


def _programs(model: Model, facts: Mapping[str, Any], longest: Mapping[str, int]) -> list[Program]:
    task = facts["task"]
    padding = all(layer.facts.padding == "any" for layer in model.modules() if isinstance(layer, Attention))
    if task == "images":
        return [ImageClassifier(model, facts["mean"], facts["deviation"])]
    if task == "classify":
        return [TextClassifier(model, padding)]
    if task == "masked":
        return [TextEncoder(model, padding)]
    if task not in ("language", "translate"):
        raise ValueError(
            f"runs of {task!r} are not exported to ONNX: translate, language, masked, classify and images are"
        )
    if not hasattr(model, "fixed_state"):
        raise ValueError(
            f"models of kind {model.config.kind!r} are not exported to ONNX: a step there needs a state of fixed size, "
            "which they do not have; run them with regard generate or regard translate"
        )
    return _decoder(model, longest, padding)


def _decoder(model: Model, longest: Mapping[str, int], padding: bool) -> list[Program]:
    bound = models.max_positions(model)
    if SOURCE in longest:
        # room for the longest translation: 1.5 times the source, and 10
        capacity = 2 * longest[SOURCE] + 16
        reader: StateProgram = Encoder(model, min(capacity, bound or capacity), padding)
    else:
        reader = Prefill(model, longest[LENGTH], padding)
    with torch.no_grad():
        return [reader, Step(reader, {axis: size // 2 for axis, size in longest.items()})]


# recording


def _attempt(
    folder: Path,
    programs: Sequence[Program],
    longest: Mapping[str, int],
    *,
    open_length: bool,
    about: Mapping[str, Any],
) -> tuple[dict[str, Span], float]:
    """Records, writes and checks all programs, with lengths open or as long as the longest."""
    files: dict[str, Any] = {}
    sizes: dict[str, Span] = {}
    for program in programs:
        files[program.name], found = _record(program, longest, open_length)
        for axis, span in found.items():
            before = sizes.get(axis, span)
            most = min((most for most in (before.most, span.most) if most is not None), default=None)
            sizes[axis] = Span(max(before.least, span.least), most)
    if sizes[BATCH].most is not None:
        raise Refused(f"{programs[0].name} cannot be recorded with an open batch, only for {sizes[BATCH].most} rows")
    _save(folder, files)
    difference = _compare(folder, programs, sizes, longest)
    described = {f"{name}.onnx": _describe(model) for name, model in files.items()}
    spans = {axis: span._asdict() for axis, span in sizes.items()}
    content = {**about, "sizes": spans, "files": described, "largest_difference": difference}
    (folder / ABOUT).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return sizes, difference


def _record(program: Program, longest: Mapping[str, int], open_length: bool) -> tuple[Any, dict[str, Span]]:
    """The ONNX model of a program, and the sizes that its dimensions may have."""
    from regard.interop.operators import translations

    # a little less than the longest: a size that is equal to another would be taken for the same
    lengths = {axis: size - 1 if open_length else size for axis, size in longest.items()}
    example = program.example(ROWS, lengths, torch.Generator().manual_seed(1))
    dims: dict[str, Any] = {BATCH: Dim.AUTO(min=1)}
    if open_length:
        bound = program.capacity if isinstance(program, Prefill) else models.max_positions(program.model)
        dims |= {axis: Dim.AUTO(min=1, max=bound) for axis in (*longest, SLOTS)}
    shapes = [{at: dims.get(axis) for at, axis in axes.items()} for axes in program.axes.values()]
    names = [{at: axis for at, axis in axes.items() if axis in dims} for axes in program.axes.values()]
    try:
        exported = torch.export.export(program, (list(example.values()),), dynamic_shapes=(shapes,), strict=False)
        made = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(program.axes),
            output_names=list(program.compute(example)),
            dynamic_shapes=(names,),
            custom_translation_table=translations(),
            verbose=False,
        )
    except Exception as error:
        # PyTorch raises many kinds; the first of a chain says what was wrong
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise Refused(f"{program.name} cannot be recorded: {' '.join(str(first).split())[:300]}") from error
    assert made is not None, "a program is returned where no file is named"
    return made.model, _spans(exported, program)


def _spans(exported: torch.export.ExportedProgram, program: Program) -> dict[str, Span]:
    """The sizes that the open dimensions of a program may have."""
    inputs = exported.graph_signature.user_inputs
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    found: dict[str, Span] = {}
    for name, axes in zip(inputs, program.axes.values(), strict=True):
        for at, axis in axes.items():
            size = values[name].shape[at]
            if isinstance(size, int) or size.node.expr.is_Integer:
                found[axis] = Span(int(size), int(size))
                continue
            span = exported.range_constraints[size.node.expr]
            most = int(span.upper) if span.upper.is_Integer and span.upper < 2**31 else None
            # PyTorch leaves 1 out of every range; one row is compared below
            found.setdefault(axis, Span(1 if axis == BATCH else max(int(span.lower), 1), most))
    return found


# writing


def _save(folder: Path, files: Mapping[str, Any]) -> None:
    """Writes the ONNX models, with one file for their weights: those of equal contents once."""
    import onnx_ir as ir

    tensors: dict[Any, Any] = {}
    places = []
    for model in files.values():
        for value in model.graph.initializers.values():
            if value.const_value is not None and value.const_value.nbytes > INLINE:
                content = (str(value.dtype), tuple(value.const_value.shape), value.const_value.tobytes())
                tensors.setdefault(content, value.const_value)
                places.append((value, content))
    (folder / WEIGHTS).unlink(missing_ok=True)
    outside = ir.external_data.convert_tensors_to_external(list(tensors.values()), folder, WEIGHTS)
    by_content = dict(zip(tensors, outside, strict=True))
    for value, content in places:
        value.const_value = by_content[content]
    for name, model in files.items():
        for node in model.graph.all_nodes():
            # lines of the source, with the paths of this machine
            node.metadata_props.clear()
        ir.save(model, folder / f"{name}.onnx")


def _describe(model: Any) -> dict[str, Any]:
    """Names, types and sizes of what a file reads and gives."""

    def described(values: Sequence[Any]) -> dict[str, str]:
        return {value.name: f"{value.dtype.numpy().name}{value.shape}" for value in values}

    return {"inputs": described(model.graph.inputs), "outputs": described(model.graph.outputs)}


# comparing


class _Runner:
    """The files of a folder in ONNX Runtime."""

    def __init__(self, folder: Path, names: Sequence[str]):
        runtime = _import_onnxruntime()
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised
        options.intra_op_num_threads = 1  # inputs are small, and threads that wait would keep other cores busy
        self.difference = 0.0
        try:
            self.sessions = {
                name: runtime.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
                for name in names
            }
        except Exception as error:
            raise Refused(f"ONNX Runtime does not load what was written: {str(error)[:300]}") from error

    def __call__(self, name: str, given: Tensors) -> Tensors:
        session = self.sessions[name]
        try:
            made = session.run(None, {key: part.numpy() for key, part in given.items()})
        except Exception as error:
            sizes = {key: list(part.shape) for key, part in given.items()}
            raise Refused(f"ONNX Runtime cannot run {name} on {sizes}: {str(error)[:300]}") from error
        return {out.name: torch.from_numpy(part) for out, part in zip(session.get_outputs(), made, strict=True)}

    def expect(self, what: str, made: Tensor, expected: Tensor) -> None:
        """Refuses an output that is not the model's to rounding."""
        if made.shape != expected.shape or made.dtype != expected.dtype:
            raise Refused(
                f"{what} is {made.dtype} {list(made.shape)}, expected {expected.dtype} {list(expected.shape)}"
            )
        if not made.numel():
            return
        made, expected = made.double(), expected.double()
        apart = float((made - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
        self.difference = max(self.difference, apart)
        # written so that NaN is refused too
        if not apart <= CLOSE:
            raise Refused(f"{what} differs from the model by {apart:.2g} of its largest value, more than {CLOSE:g}")


def _compare(folder: Path, programs: Sequence[Program], sizes: Mapping[str, Span], longest: Mapping[str, int]) -> float:
    """Runs what was written beside the model on random inputs of several sizes; returns the largest difference."""
    run = _Runner(folder, [program.name for program in programs])
    reader, draw = programs[0], torch.Generator().manual_seed(2)
    for rows, share in ((3, 0.5), (1, 0.0), (2, 1.0)):
        lengths = {axis: _between(sizes[axis], longest[axis], share) for axis in longest}
        given = reader.example(rows, lengths, draw)
        if isinstance(reader, Prefill) and reader.keep in given:
            # room for the steps behind
            given[reader.keep][:, reader.capacity - STEPS :] = False
        where = f"for {rows} rows of {lengths or 'images'}"
        made = run(reader.name, given)
        for name, part in reader.compute(given).items():
            run.expect(f"{name} of {reader.name} {where}", made[name], part)
        if isinstance(reader, StateProgram):
            _compare_steps(run, reader, given, made, where, draw)
    return run.difference


def _between(span: Span, longest: int, share: float) -> int:
    """A size from the least to the longest."""
    most = longest if span.most is None else min(span.most, longest)
    return span.least + round(share * (most - span.least))


def _compare_steps(
    run: _Runner, reader: StateProgram, given: Tensors, made: Tensors, where: str, draw: torch.Generator
) -> None:
    """Steps in ONNX Runtime, each with the state of the one before, beside the model with its usual state."""
    model: Any = reader.model
    tokens, keep = given[reader.tokens], given.get(reader.keep)
    if isinstance(reader, Encoder):
        state = model.start(len(tokens), memory=model.encode(tokens, keep=keep))
        room = reader.capacity
    else:
        logits, state = model.extend(tokens, model.start(len(tokens)), keep=keep)
        run.expect(f"logits of {reader.name} {where}", made["logits"], last_real(logits, keep))
        room = reader.capacity - int(tokens.shape[1] if keep is None else keep.sum(1).max())
    kept = {name: part for name, part in made.items() if name.startswith("state.")}
    for number in range(1, min(STEPS, room) + 1):
        token = torch.randint(0, reader.vocabulary, (len(tokens),), generator=draw)
        after = run("step", {"token": token} | kept)
        logits, state = model.extend(token[:, None], state)
        run.expect(f"logits of step {number} {where}", after["logits"], logits[:, 0])
        kept |= {f"state.{name.removeprefix('next.')}": part for name, part in after.items() if name != "logits"}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says to those who develop it."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
