"""Whole models on a GPU, compared with the same model on FlexAttention and Hugging Face's GPT-2.

    python bench/models_gpu.py training                       # 2 rows of 16,384 tokens and 1 of 65,536
    python bench/models_gpu.py training --ways eager --only local
    python bench/models_gpu.py decoding                       # contexts of 256 and 2,048 tokens, batches of 1 and 64
    python bench/models_gpu.py ring                           # the kernel of a step over its keys, launched variously

The size is that of GPT-2 small: 12 layers, width 768, 12 heads. `training` is one update in bfloat16 autocast (forward,
backward, AdamW) with a vocabulary of 16,384: tokens per second and peak memory. "compiled" compiles the layers as
`--training.compile` does, and the rival as a whole. `decoding` is greedy decoding of 256 tokens in bfloat16 after a
prompt whose prefill is not counted, with a vocabulary of 50,257; Hugging Face's has a static cache and is compiled.
`ring` is one layer's kernel of `softmax` for 64 rows behind 2,048 tokens: ms, and TB/s of keys and values read.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.data.documents import Text
from regard.decoding import DecodingConfig
from regard.training.loss import next_token_loss

ATTENTIONS = ("softmax", "local(window=256)", "linear")
WINDOW = 256


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def config(attention: str, small: bool, vocabulary: int, **more: Any) -> regard.ModelConfig:
    sizes = {"width": 64, "heads": 4, "inner": 128, "layers": 2} if small else {}
    whole = {"width": 768, "heads": 12, "inner": 3072, "layers": 12} | sizes
    rest = {"norm": "pre", "dropout": 0.0, "feedforward": "dense(activation='gelu')"}
    return regard.ModelConfig(kind="decoder", vocabulary=vocabulary, attention=attention, **whole, **rest, **more)


class FlexBlock(nn.Module):
    """A layer as one writes it by hand on FlexAttention."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, 2)
        )
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class FlexModel(nn.Module):
    """The same decoder on plain FlexAttention: a causal window, or all before."""

    def __init__(self, like: regard.ModelConfig, length: int, window: int | None):
        super().__init__()
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.embedding = nn.Embedding(like.vocabulary, like.width)
        nn.init.normal_(self.embedding.weight, std=like.width**-0.5)
        self.places = nn.Parameter(torch.zeros(length, like.width))
        self.blocks = nn.ModuleList(FlexBlock(like.width, like.heads, like.inner) for _ in range(like.layers))
        self.norm = nn.LayerNorm(like.width)

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) if window is None else (j <= i) & (i - j <= window)

        self.mask = create_block_mask(sees, None, None, length, length, device=device())
        self.flex = flex_attention

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places
        for block in self.blocks:
            x = block(x, lambda q, k, v: self.flex(q, k, v, block_mask=self.mask))
        logits = self.norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(name: str, compiled: bool, rows: int, length: int, small: bool, repeats: int) -> dict[str, Any]:
    """Median time of an update, and the peak of memory."""
    vocabulary = 256 if small else 16384
    torch.manual_seed(0)
    if name.startswith("flex"):
        model = FlexModel(config("softmax", small, vocabulary), length, WINDOW if "window" in name else None)
        model = model.to(device())
        loss = torch.compile(model) if compiled else model
    else:
        model = regard.Transformer(config(name, small, vocabulary)).to(device()).train()

        def loss(ids: Tensor, target: Tensor) -> Tensor:
            return next_token_loss(model, Text(ids, target, None, None)).total / target.numel()

        if compiled:
            for block in model.modules():
                if getattr(block, "compiles_alone", False):
                    block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids, target = (torch.randint(vocabulary, (rows, length), device=device()) for _ in range(2))

    def step() -> None:
        with torch.autocast(device(), torch.bfloat16):
            value = loss(ids, target)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = time.perf_counter()
    for _ in range(3):
        step()
    wait()
    first = time.perf_counter() - began
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    seconds = statistics.median(times)
    return {"tokens_s": rows * length / seconds, "ms": 1e3 * seconds, "gib": peak, "first_s": first}


def training(given: argparse.Namespace) -> None:
    sizes = [(1, 256)] if given.small else [(2, 16384), (1, 65536)]
    sizes = [size for size in sizes if given.lengths is None or size[1] in given.lengths]
    names = (*ATTENTIONS, f"flex, window {WINDOW}", "flex, all")
    names = [name for name in names if given.only is None or any(name.startswith(part) for part in given.only)]
    for way, (rows, length) in itertools.product(given.ways, sizes):
        print(f"\na training step, {rows} x {length:,} tokens, {way}\n")
        print(f"{'attention':22}{'tokens/s':>12}{'ms':>10}{'peak GiB':>10}{'first three, s':>16}{'/ softmax':>11}")
        base = None
        for name in names:
            if way == "eager" and name.startswith("flex"):
                continue  # it forms all logits unless compiled
            try:
                found = train(name, way == "compiled", rows, length, given.small, given.repeats)
            except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
                print(f"{name:22}  omitted: {str(error).splitlines()[0][:120]}", flush=True)
                continue
            finally:
                torch._dynamo.reset()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            base = base or (found["tokens_s"] if name == "softmax" else None)
            ratio = f"{found['tokens_s'] / base:>11.2f}" if base else ""
            print(
                f"{name:22}{found['tokens_s']:>12,.0f}{found['ms']:>10.1f}{found['gib']:>10.1f}{found['first_s']:>16.1f}{ratio}",
                flush=True,
            )
            write(given, {"section": "training", "attention": name, "way": way, "rows": rows, "length": length} | found)


def ours(attention: str, longest: int, small: bool, graphs: bool) -> Callable[[Tensor, int], object]:
    """Decodes a number of tokens after a prompt."""
    model = regard.Transformer(config(attention, small, 50257, position=f"learned(longest={longest})"))
    model = model.to(device(), torch.float32 if small else torch.bfloat16).eval()

    def decode(prompt: Tensor, count: int) -> object:
        most = {"minimum": count, "maximum": count, "maximum_extra": count}
        # a single token is the prefill: it is not read, as Hugging Face does not read it either
        watch = (lambda *_: True) if count == 1 else None
        config = DecodingConfig(beam=1, graphs=graphs, **most)
        return regard.decoding.generate(model, prompt, config=config, watch=watch)

    return decode


def theirs(longest: int, small: bool, compiled: bool) -> Callable[[Tensor, int], object]:
    """GPT-2 of Hugging Face."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.generation.configuration_utils import CompileConfig

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4} if small else {}
    model = GPT2LMHeadModel(GPT2Config(n_positions=longest, attn_implementation="sdpa", **sizes))
    model = model.to(device(), torch.float32 if small else torch.bfloat16).eval()

    def decode(prompt: Tensor, count: int) -> object:
        most = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        cache = {}
        if compiled:
            cache = {"cache_implementation": "static", "compile_config": CompileConfig(mode="reduce-overhead")}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **most, **cache)

    return decode


def decoding(given: argparse.Namespace) -> None:
    # the largest first
    contexts, batches, count = ([16], [2], 24) if given.small else ([2048, 256], [64, 1], 256)
    longest = max(contexts) + count + 8
    rows = {"softmax": lambda: ours("softmax", longest, given.small, True)}
    rows |= {"Hugging Face, compiled": lambda: theirs(longest, given.small, True)}
    rows |= {name: lambda name=name: ours(name, longest, given.small, True) for name in ATTENTIONS}
    rows |= {"softmax, no graphs": lambda: ours("softmax", longest, given.small, False)}
    rows |= {"Hugging Face, eager": lambda: theirs(longest, given.small, False)}
    print(f"\ngreedy decoding of {count} tokens: tokens per second, and milliseconds of a step\n")
    print(
        f"{'':24}"
        + "".join(f"{f'{batch} x {context:,}':>20}" for batch, context in itertools.product(batches, contexts))
    )
    for name, make in rows.items():
        if given.only is not None and not any(name.startswith(part) for part in given.only):
            continue
        decode, cells, prefills = make(), [], []
        for batch, context in itertools.product(batches, contexts):
            prompt = torch.randint(4, 50257, (batch, context), device=device())
            try:
                decode(prompt, count)
                first, whole = (
                    statistics.median(seconds(decode, prompt, n) for _ in range(given.repeats)) for n in (1, count)
                )
            except (RuntimeError, ValueError, ImportError, TypeError) as error:
                print(f"  ({name}, {batch} x {context}, omitted: {str(error).splitlines()[0][:120]})")
                cells.append("")
                prefills.append("")
                continue
            step = (whole - first) / (count - 1)
            cells.append(f"{batch / step:,.0f} ({1e3 * step:.2f})")
            found = {"section": "decoding", "name": name, "batch": batch, "context": context}
            write(given, found | {"tokens_s": batch / step, "ms": 1e3 * step, "prefill_ms": 1e3 * first})
            prefills.append(f"{1e3 * first:.1f}")
        print(f"{name:24}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
        print(f"{'  prefill, ms':24}" + "".join(f"{cell:>20}" for cell in prefills), flush=True)
        decode = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def seconds(decode: Callable[[Tensor, int], object], prompt: Tensor, count: int) -> float:
    wait()
    began = time.perf_counter()
    decode(prompt, count)
    wait()
    return time.perf_counter() - began


def ring(given: argparse.Namespace) -> None:
    """The kernel that writes a token's key and value and reads all before, with other blocks, warps and splits."""
    from regard.kernels import ring_triton

    rows, heads, slots, seen = (64, 12, 2312, 2176)
    new = [torch.randn(rows, heads, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    kept = [torch.randn(rows, heads, slots, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    length, read = torch.full((rows,), seen, device="cuda"), 2 * rows * heads * seen * 64 * 2
    chosen = ring_triton.BLOCK, ring_triton.WARPS, ring_triton.WAVES
    print(f"\n{'block, warps, waves':24}{'ms':>10}{'TB/s':>8}")
    for launch in (chosen, (32, 4, 8), (128, 4, 8), (128, 8, 8), (64, 4, 3), (64, 4, 16), (32, 4, 16), chosen):
        ring_triton.BLOCK, ring_triton.WARPS, ring_triton.WAVES = launch
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
        for mark in (None, None, None, *marks):
            ring_triton.attend_next(*new, *kept, length, 0.125)
            if mark is not None:
                mark.record()
        wait()
        ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
        print(f"{', '.join(map(str, launch)):24}{ms:>10.4f}{read / ms / 1e9:>8.2f}", flush=True)
        write(given, {"section": "ring", "launch": launch, "ms": ms, "tb_s": read / ms / 1e9})
    ring_triton.BLOCK, ring_triton.WARPS, ring_triton.WAVES = chosen


def write(given: argparse.Namespace, found: dict[str, Any]) -> None:
    if given.json:
        with open(given.json, "a") as file:
            file.write(json.dumps(found) + "\n")


SECTIONS = {"training": training, "decoding": decoding, "ring": ring}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"sections of {', '.join(SECTIONS)} (default: the first two)")
    parser.add_argument("--only", nargs="+", help="attentions whose names begin so")
    parser.add_argument("--lengths", type=int, nargs="+", help="training: rows of these lengths only")
    parser.add_argument("--ways", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="file to append each result to, one per line")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the benchmark, on a CPU too")
    given = parser.parse_args()
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}: choose from {', '.join(SECTIONS)}")
    if not given.small and not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: this benchmark measures one (--small tries it on a CPU)\n")
    for name in given.sections or ("training", "decoding"):
        SECTIONS[name](given)


if __name__ == "__main__":
    main()
