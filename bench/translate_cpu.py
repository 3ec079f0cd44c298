"""Training and translating on the CPU: Regard's Transformer against the libraries people use, on the same work.

Same sizes, same batches, a process for each, the same number of threads, in turns (A, B, C, A, B, C, ...): a round
gives one time for each, a ratio is taken within a round, and the median over the rounds counts. So noise of the machine
that lasts longer than a turn strikes all alike. Regard's processes keep their memory, as its commands do.

- training: forward, cross entropy with label smoothing, backward, clipping of the gradient, one step of Adam (PyTorch's
  fused one for all), dropout where the paper has it and no attention dropout, which some peers would have by default.
- translating: a batch of sources to exactly as many target tokens as asked, end of sentence suppressed, greedily and
  with a beam. Regard's weights, random, are copied into Hugging Face's Marian and into CTranslate2; JoeyNMT keeps
  weights of its own. The table says how many tokens come out the same, which says little: an untrained model repeats
  one token for a whole sentence, and its beams move less than those of a trained one.

Target tokens per second count; for a beam, those of its best hypothesis. A peer that is not installed is named
and omitted.
"""

import argparse
import copy
import json
import math
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.allocator import keep_memory
from regard.kernels.packed import pack_linears
from regard.models.config import ModelConfig
from regard.models.transformer import Transformer
from regard.training.loss import translation_loss

EXAMPLES = """examples:
  python bench/translate_cpu.py                      everything, a few minutes
  python bench/translate_cpu.py --quick              small sizes, two rounds: does it run?
  python bench/translate_cpu.py --only train --rounds 15 --json train.json
  python bench/translate_cpu.py --only greedy beam --without joeynmt
"""
PAD, BOS, EOS = 0, 2, 3
SMOOTHING, CLIP = 0.1, 1.0
OURS = "regard"
# precisions are compared with their like
AGAINST = {"ctranslate2 int8": "regard int8"}


@dataclass(frozen=True)
class Sizes:
    """What is trained and translated."""

    width: int = 512
    layers: int = 6
    inner: int = 2048
    heads: int = 8
    vocabulary: int = 8000
    pairs: int = 32  # of a training batch
    length: int = 24  # tokens of each side of a pair, and of each source to translate
    batch: int = 64  # sentences translated at once
    steps: int = 24  # target tokens of each
    beam: int = 4


QUICK = Sizes(width=64, layers=2, inner=128, heads=4, vocabulary=500, pairs=4, length=8, batch=4, steps=6)


class Batch(NamedTuple):
    source: Tensor
    source_keep: Tensor | None
    target_in: Tensor
    target_out: Tensor
    target_keep: Tensor | None


Builders = dict[str, Callable[[], Callable[[], Any]]]


class Contender:
    """A process that has built one model and does the work when asked."""

    def __init__(self, name: str, work: str, sizes: Sizes, threads: int):
        spawn = multiprocessing.get_context("spawn")
        self.name, (self.link, theirs) = name, spawn.Pipe()
        spawn.Process(target=serve, args=(theirs, name, work, sizes, threads), daemon=True).start()
        theirs.close()  # or the end of a process that died would never come
        self.missing = self.link.recv()

    def run(self) -> tuple[float, Any]:
        """Seconds, and what came out, which is compared, not timed."""
        self.link.send(True)
        return self.link.recv()

    def end(self) -> None:
        self.link.send(False)


def serve(link: Connection, name: str, work: str, sizes: Sizes, threads: int) -> None:
    torch.set_num_threads(threads)
    if name.startswith(OURS):
        keep_memory()
    try:
        run = builders(work, sizes, threads)[name]()
    except ImportError as error:
        link.send(f"{name}: {error}")
        return
    link.send(None)
    while link.recv():
        began = time.perf_counter()
        found = run()
        link.send((time.perf_counter() - began, found.tolist() if isinstance(found, Tensor) else found))


# the models


def ours(sizes: Sizes, dropout: float) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary=sizes.vocabulary,
        width=sizes.width,
        heads=sizes.heads,
        inner=sizes.inner,
        layers=sizes.layers,
        dropout=dropout,
    )
    return Transformer(config)


def waves(model: Transformer, length: int) -> Tensor:
    """The positions as a table [length, E]."""
    from regard.core.rows import Rows

    zeros = torch.zeros(1, length, model.config.width)
    return model.encoder.position.add(zeros, Rows.full(zeros))[0]


def marian(sizes: Sizes, dropout: float, model: Transformer | None = None) -> nn.Module:
    """Hugging Face's Marian, with our weights if a model is given."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = transformers.MarianConfig(
        vocab_size=sizes.vocabulary,
        max_position_embeddings=max(64, sizes.length, sizes.steps + 1),
        encoder_layers=sizes.layers,
        decoder_layers=sizes.layers,
        encoder_ffn_dim=sizes.inner,
        decoder_ffn_dim=sizes.inner,
        encoder_attention_heads=sizes.heads,
        decoder_attention_heads=sizes.heads,
        d_model=sizes.width,
        activation_function="relu",
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    torch.manual_seed(0)
    peer = transformers.MarianMTModel(config)
    if model is not None:
        with torch.no_grad():
            peer.model.shared.weight.copy_(model.encoder.embedding.weight)
            for ends, stack in ((peer.model.encoder, model.encoder), (peer.model.decoder, model.decoder)):
                ends.embed_positions.weight.copy_(waves(model, ends.embed_positions.weight.shape[0]))
                for layer, block in zip(ends.layers, stack.blocks, strict=True):
                    _fill_marian(layer, block)
    return peer


def _fill_marian(layer: nn.Module, block: nn.Module) -> None:
    norms = [layer.self_attn_layer_norm, layer.final_layer_norm]
    attentions = [(layer.self_attn, block.attention)]
    if block.cross is not None:
        attentions.append((layer.encoder_attn, block.cross))
        norms.insert(1, layer.encoder_attn_layer_norm)
    for peer, own in attentions:
        linears = (peer.q_proj, peer.k_proj, peer.v_proj, peer.out_proj)
        for linear, mine in zip(linears, (*own.project.values(), own.output), strict=True):
            linear.weight.copy_(mine.weight)
            linear.bias.zero_()
    for peer, own in (
        (layer.fc1, block.feedforward.inner),
        (layer.fc2, block.feedforward.outer),
        *zip(norms, block.norms, strict=True),
    ):
        peer.load_state_dict(own.state_dict())


def ctranslate(sizes: Sizes, model: Transformer, compute_type: str, threads: int) -> Any:
    """CTranslate2 with our weights."""
    import ctranslate2
    from ctranslate2.specs import TransformerSpec

    spec = TransformerSpec.from_config((sizes.layers, sizes.layers), sizes.heads, pre_norm=False)
    table = model.encoder.embedding.weight.detach().numpy()
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = spec.decoder.projection.weight = table
    for ends, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        ends.position_encodings.encodings = waves(model, max(64, sizes.length, sizes.steps + 1)).numpy()
        for layer, block in zip(ends.layer, stack.blocks, strict=True):
            _fill_ctranslate(layer, block)
    tokens = ["<blank>", "<unk>", "<s>", "</s>", *map(str, range(4, sizes.vocabulary))]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.add_source_eos, spec.config.add_source_bos = False, False
    spec.config.decoder_start_token = "<s>"
    with tempfile.TemporaryDirectory() as folder:
        spec.validate()
        spec.optimize(quantization=compute_type if compute_type != "float32" else None)
        spec.save(folder)
        return ctranslate2.Translator(folder, compute_type=compute_type, inter_threads=1, intra_threads=threads)


def _fill_ctranslate(layer: Any, block: nn.Module) -> None:
    def fill(peer: Any, linears: list[nn.Linear]) -> None:
        peer.weight = torch.cat([linear.weight for linear in linears]).detach().numpy()
        first = linears[0]
        peer.bias = torch.zeros(len(peer.weight)).numpy() if first.bias is None else first.bias.detach().numpy()

    def norm(peer: Any, own: nn.LayerNorm) -> None:
        peer.gamma, peer.beta = own.weight.detach().numpy(), own.bias.detach().numpy()

    q, k, v = block.attention.project.values()
    fill(layer.self_attention.linear[0], [q, k, v])
    fill(layer.self_attention.linear[1], [block.attention.output])
    norm(layer.self_attention.layer_norm, block.norms[0])
    if block.cross is not None:
        q, k, v = block.cross.project.values()
        fill(layer.attention.linear[0], [q])
        fill(layer.attention.linear[1], [k, v])
        fill(layer.attention.linear[2], [block.cross.output])
        norm(layer.attention.layer_norm, block.norms[1])
    fill(layer.ffn.linear_0, [block.feedforward.inner])
    fill(layer.ffn.linear_1, [block.feedforward.outer])
    norm(layer.ffn.layer_norm, block.norms[-1])


class Torch(nn.Module):
    """torch.nn.Transformer with the embedding and the output layer it leaves to its users."""

    def __init__(self, sizes: Sizes, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        nn.init.normal_(self.embedding.weight, std=sizes.width**-0.5)
        self.register_buffer("positions", waves(ours(sizes, dropout), sizes.length))
        self.layers = nn.Transformer(
            sizes.width, sizes.heads, sizes.layers, sizes.layers, sizes.inner, dropout, batch_first=True
        )
        for module in self.layers.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        self.dropout = nn.Dropout(dropout)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(x + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        y = self.layers(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.linear(y, self.embedding.weight)


def joey(sizes: Sizes, dropout: float) -> nn.Module:
    """JoeyNMT's model, its attention dropout taken out."""
    from types import SimpleNamespace

    from joeynmt.model import build_model
    from joeynmt.transformer_layers import MultiHeadedAttention
    from joeynmt.vocabulary import Vocabulary

    special = SimpleNamespace(
        **{"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "sep_token": None},
        **{"unk_id": 0, "pad_id": 1, "bos_id": BOS, "eos_id": EOS, "sep_id": None},
        lang_tags=[],
    )
    vocabulary = Vocabulary([str(number) for number in range(4, sizes.vocabulary)], special)
    part = {
        "type": "transformer",
        "num_layers": sizes.layers,
        "num_heads": sizes.heads,
        "hidden_size": sizes.width,
        "ff_size": sizes.inner,
        "dropout": dropout,
        "layer_norm": "post",
        "embeddings": {"embedding_dim": sizes.width, "scale": True},
    }
    torch.manual_seed(0)
    settings = {"encoder": part, "decoder": part, "tied_embeddings": True, "tied_softmax": True}
    model = build_model(settings, vocabulary, vocabulary)
    model.loss_function = ("crossentropy", SMOOTHING)
    for module in model.modules():
        if isinstance(module, MultiHeadedAttention):
            module.dropout.p = 0.0
    return model


# the work


def builders(work: str, sizes: Sizes, threads: int) -> Builders:
    """How to build what does it, by name."""
    return trainers(sizes) if work == "train" else translators(sizes, 1 if work == "greedy" else sizes.beam, threads)


def trainers(sizes: Sizes) -> Builders:
    """One training step of each."""
    drawn = torch.Generator().manual_seed(1)
    shape = (sizes.pairs, sizes.length)
    source, target_in, target_out = (torch.randint(4, sizes.vocabulary, shape, generator=drawn) for _ in range(3))
    batch, tokens = Batch(source, None, target_in, target_out, None), target_out.numel()

    def entropy(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target_out.flatten(), label_smoothing=SMOOTHING)

    def regard_losses() -> Callable[[], Tensor]:
        model = ours(sizes, 0.1).train()
        return model, lambda: translation_loss(model, batch, SMOOTHING).total / tokens

    def marian_losses() -> Callable[[], Tensor]:
        model = marian(sizes, 0.1).train()
        return model, lambda: entropy(model(input_ids=source, decoder_input_ids=target_in, use_cache=False).logits)

    def torch_losses() -> Callable[[], Tensor]:
        model = Torch(sizes, 0.1).train()
        return model, lambda: entropy(model(source, target_in))

    def joey_losses() -> Callable[[], Tensor]:
        model = joey(sizes, 0.1).train()
        length = torch.full((sizes.pairs,), sizes.length)
        mask = torch.ones(sizes.pairs, 1, sizes.length, dtype=torch.bool)
        asked = {"src": source, "trg_input": target_in, "trg": target_out, "src_mask": mask, "trg_mask": mask}
        return model, lambda: model(return_type="loss", src_length=length, **asked)[0] / tokens

    found = {
        OURS: regard_losses,
        "transformers": marian_losses,
        "torch.nn.Transformer": torch_losses,
        "joeynmt": joey_losses,
    }
    return {name: lambda build=build: stepper(*build()) for name, build in found.items()}


def stepper(model: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], float]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        value = forward()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        return value.item()

    return step


def translators(sizes: Sizes, beam: int, threads: int) -> Builders:
    """One translated batch of each: ids [batch, steps]."""
    drawn = torch.Generator().manual_seed(2)
    source = torch.randint(4, sizes.vocabulary, (sizes.batch, sizes.length), generator=drawn)
    model = ours(sizes, 0.0).eval()

    def regard_run(precision: str) -> Callable[[], Tensor]:
        packed = pack_linears(copy.deepcopy(model), precision)
        return lambda: translate(packed, source, beam, sizes.steps)

    def marian_run() -> Callable[[], Tensor]:
        peer = marian(sizes, 0.0, model).eval()
        options = {"num_beams": beam, "min_new_tokens": sizes.steps, "max_new_tokens": sizes.steps, "do_sample": False}
        mask = torch.ones_like(source)

        def run() -> Tensor:
            with torch.inference_mode():
                return peer.generate(input_ids=source, attention_mask=mask, **options)[:, 1:]

        return run

    def ctranslate_run(compute_type: str) -> Callable[[], Tensor]:
        peer = ctranslate(sizes, model, compute_type, threads)
        lines = [[str(token) for token in row] for row in source.tolist()]
        limits = {"min_decoding_length": sizes.steps, "max_decoding_length": sizes.steps}

        def run() -> Tensor:
            found = peer.translate_batch(lines, beam_size=beam, **limits)
            rows = [result.hypotheses[0] for result in found]
            return torch.tensor([[int(token) if token.isdigit() else -1 for token in row] for row in rows])

        return run

    def joey_run() -> Callable[[], Tensor]:
        from joeynmt.search import beam_search, greedy

        peer = joey(sizes, 0.0).eval()
        length, mask = torch.full((sizes.batch,), sizes.length), torch.ones(sizes.batch, 1, sizes.length).bool()
        limits = {"max_output_length": sizes.steps, "min_output_length": sizes.steps}

        def run() -> Tensor:
            with torch.inference_mode():
                memory, hidden, *_ = peer(return_type="encode", src=source, src_length=length, src_mask=mask)
                if beam == 1:
                    found = greedy(mask, model=peer, encoder_output=memory, encoder_hidden=hidden, **limits)
                else:
                    shared = {"model": peer, "encoder_output": memory, "encoder_hidden": hidden, "src_mask": mask}
                    found = beam_search(beam_size=beam, alpha=1.0, **shared, **limits)
            return torch.as_tensor(found[0])

        return run

    return {
        OURS: lambda: regard_run("float32"),
        "transformers": marian_run,
        "ctranslate2": lambda: ctranslate_run("float32"),
        "joeynmt": joey_run,
        "regard bfloat16": lambda: regard_run("bfloat16"),
        "regard int8": lambda: regard_run("int8"),
        "ctranslate2 int8": lambda: ctranslate_run("int8"),
    }


def translate(model: Transformer, source: Tensor, beam: int, steps: int) -> Tensor:
    """Exactly `steps` tokens for each source."""
    from regard.decoding import DecodingConfig, decode

    config = DecodingConfig(beam=beam, minimum=steps, maximum=steps)
    return torch.tensor([best[0].ids for best in decode(model, source, None, config)])


# the measuring


def race(contenders: list[Contender], rounds: int, pause: float) -> dict[str, list[float]]:
    """Seconds of each in each round, after two turns to warm up."""
    times = {contender.name: [] for contender in contenders}
    for number in range(rounds + 2):
        for contender in contenders:
            # threads of the one before may still spin, waiting for work
            time.sleep(pause)
            seconds, _ = contender.run()
            if number >= 2:
                times[contender.name].append(seconds)
        print(f"  round {number - 1} of {rounds}" if number >= 2 else "  warm-up", file=sys.stderr, flush=True)
    return times


def judged(times: dict[str, list[float]], tokens: int) -> list[dict[str, Any]]:
    """For each: tokens/s, and for a peer the speed of ours of the same precision as a multiple of its own."""
    rows = []
    for name, seconds in times.items():
        row = {"name": name, "tokens_per_second": tokens / statistics.median(seconds), "seconds": seconds}
        row |= {"fastest": tokens / min(seconds), "against": AGAINST.get(name, OURS)}
        if not name.startswith(OURS):
            ratios = [theirs / own for theirs, own in zip(seconds, times[row["against"]], strict=True)]
            row |= {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}
        rows.append(row)
    return rows


def same(contenders: list[Contender]) -> dict[str, float]:
    """The share of target tokens equal to ours."""
    found = {
        contender.name: torch.tensor(contender.run()[1]) for contender in contenders if contender.name != "joeynmt"
    }
    return {name: (ids == found[OURS]).float().mean().item() for name, ids in found.items() if name != OURS}


def show(title: str, rows: list[dict[str, Any]], agreement: dict[str, float]) -> None:
    print(f"\n{title}\n")
    print(f"{'':22}{'tokens/s':>10}{'at best':>10}{'regard is':>11}   {'(spread)':14}{'same tokens':>12}")
    for row in rows:
        ratio, spread = "", ""
        if "ratio" in row:
            ratio, spread = f"{row['ratio']:.2f}x", "({:.2f} to {:.2f})".format(*row["spread"])
        equal = f"{agreement[row['name']]:.0%}" if row["name"] in agreement else ""
        speeds = f"{row['tokens_per_second']:>10,.0f}{row['fastest']:>10,.0f}"
        print(f"{row['name']:22}{speeds}{ratio:>11}   {spread:14}{equal:>12}")
    for own in dict.fromkeys(row["against"] for row in rows):
        peers = [row for row in rows if "ratio" in row and row["against"] == own]
        if peers:
            best = min(peers, key=lambda row: row["ratio"])
            print(f"{own} is {best['ratio']:.2f}x as fast as the best peer, {best['name']}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=("train", "greedy", "beam"), default=["train", "greedy", "beam"])
    add("--without", nargs="+", default=[], metavar="PEER", help="peers to omit, such as joeynmt")
    add("--rounds", type=int, default=9)
    add("--threads", type=int, default=2)
    add("--pause", type=float, default=0.3, help="seconds before each turn (default: 0.3)")
    add("--quick", action="store_true", help="small sizes and two rounds, to try the benchmark")
    add("--json", type=Path, metavar="OUT", help="also write every number to this file")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("rounds and threads must be at least 1")
    return arguments


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "ctranslate2", "joeynmt"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    arguments = parsed()
    sizes, rounds = (QUICK, 2) if arguments.quick else (Sizes(), arguments.rounds)
    report = {"versions": versions(), "threads": arguments.threads, "sizes": asdict(sizes), "tables": {}}
    print(", ".join(f"{name} {number}" for name, number in report["versions"].items()), end="; ")
    print(f"{arguments.threads} threads, float32 unless said otherwise")
    print(f"{sizes.layers} + {sizes.layers} layers of width {sizes.width}, vocabulary {sizes.vocabulary}")
    titles = {
        "train": f"Training, {sizes.pairs} pairs of {sizes.length} tokens a step",
        "greedy": f"Translating greedily, {sizes.batch} sentences at once, {sizes.steps} tokens each",
        "beam": f"Translating with beam {sizes.beam}, {sizes.batch} sentences at once, {sizes.steps} tokens each",
    }
    for work in arguments.only:
        print(f"{work} ...", file=sys.stderr, flush=True)
        names = [name for name in builders(work, sizes, 1) if name.split()[0] not in arguments.without]
        asked = [Contender(name, work, sizes, arguments.threads) for name in names]
        missing = [contender.missing for contender in asked if contender.missing]
        contenders = [contender for contender in asked if not contender.missing]
        tokens = sizes.pairs * sizes.length if work == "train" else sizes.batch * sizes.steps
        agreement = {} if work == "train" else same(contenders)
        rows = judged(race(contenders, rounds, arguments.pause), tokens)
        for contender in contenders:
            contender.end()
        show(titles[work], rows, agreement)
        for line in missing:
            print(f"omitted: {line}")
        report["tables"][work] = {"rows": rows, "same_tokens": agreement, "missing": missing}
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
