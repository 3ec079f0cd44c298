"""Training speed of the models of the CIFAR-10 recipes beside timm's models of the same size, all in one run.

    python bench/cifar10.py --data FOLDER --workers 6

FOLDER holds data_batch_1.bin to data_batch_5.bin and test_batch.bin of the binary version of CIFAR-10.

The models are compared at equal work: no augmentation and no stochastic depth, AdamW, no average of the weights, mean
pooling, the same batch, bfloat16. In front of timm's blocks, `cifar10-cct` has our stem of convolutions. Beside it
stands the speed of each recipe as it is, with its augmentation, Muon and average of the weights.
"""

import argparse
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import speed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.vision.patches import Convolutions

RECIPES = ("cifar10-vit", "cifar10-cct")
# what timm's step has not either
EQUAL = (
    *("--augment.flip", "0", "--augment.crop", "none", "--augment.operations", "0", "--augment.erase", "0"),
    *("--augment.mixup", "0", "--augment.cutmix", "0", "--augment.unmixed_end", "0", "--model.drop_path", "0"),
    *("--model.pooling", "mean", "--training.optimizer", "adamw", "--training.ema", "null", "--training.clip", "null"),
)
RATED = 100  # steps of a rival that are timed


class Job(NamedTuple):
    """One measurement."""

    recipe: str
    is_rival: bool = False
    is_equal: bool = True  # otherwise the recipe as it is
    is_compiled: bool = True


class Stem(nn.Module):
    """The stem of cifar10-cct in the place of timm's patches."""

    num_patches = 64

    def __init__(self, embed_dim: int, **_: Any):
        super().__init__()
        sizes = {"layers": 3, "kernel": 3, "stride": 1, "between": 128, "pooling": 2, "norm": True}
        self.convolutions = Convolutions(3, embed_dim, **sizes)

    def forward(self, images: Tensor) -> Tensor:
        return self.convolutions.vectors(images)


def build_rival(recipe: str) -> nn.Module:
    """timm's model with the tokens, layers and widths of a recipe."""
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 256, "depth": 6, "num_heads": 4, "mlp_ratio": 2}
    form = {"qkv_bias": False, "num_classes": 10, "class_token": False, "global_pool": "avg"}
    return VisionTransformer(**sizes, **form, **({"embed_layer": Stem} if recipe == "cifar10-cct" else {}))


def rival_speed(model: nn.Module, batch: int, *, steps: int, compiled: bool) -> float:
    """Images per second of timm's model: forward, backward and AdamW in bfloat16 autocast, as its users write it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).train()
    answer = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.06, fused=True)
    images = torch.randn(batch, 3, 32, 32, device=device)
    labels = torch.randint(10, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(answer(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(steps // 4 + 1):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return steps * batch / (time.perf_counter() - began)


def measure(job: Job, bench: speed.Bench, batch: int, rounds: int) -> tuple[float, int]:
    """Images per second, and parameters."""
    torch.compiler.reset()
    if job.is_rival:
        rival = build_rival(job.recipe)
        steps = RATED if torch.cuda.is_available() else 2
        found = rival_speed(rival, batch, steps=steps if rounds > 0 else 1, compiled=job.is_compiled)
        return found, sum(part.numel() for part in rival.parameters())
    flags = ["--config", job.recipe, "--data.batch", str(batch), *(EQUAL if job.is_equal else ())]
    found = bench.speed([*flags, "--training.compile", str(job.is_compiled).lower()], rounds)
    return found, bench.parameters


def warm(job: Job, data: Path, batch: int) -> None:
    """Compiles what a measurement needs: it is kept on disk for the process that measures."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 4
    measure(job, speed.Bench("images", ["--data.images", str(data)]), batch, 1 - speed.WARMUP)


def compare(data: Path, *, rounds: int, batch: int, workers: int, is_eager: bool) -> None:
    """Prints a row for each recipe."""
    kinds = [Job("", is_equal=False)]
    kinds += [Job("", is_rival, is_compiled=compiled) for compiled in (False, True) for is_rival in (False, True)]
    kinds = [kind for kind in kinds if not (is_eager and kind.is_compiled)]
    jobs = [kind._replace(recipe=recipe) for recipe in RECIPES for kind in kinds]
    if workers:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(partial(warm, data=data, batch=batch), [job for job in jobs if job.is_compiled], 1)
    bench = speed.Bench("images", ["--data.images", str(data)])
    found = {}
    for job in jobs:
        found[job] = measure(job, bench, batch, rounds)
        # should the run be cut off
        print(f"{job}: {found[job][0]:,.0f} images/s", file=sys.stderr, flush=True)
    names = ["the recipe" if not kind.is_equal else "timm" if kind.is_rival else "Regard" for kind in kinds]
    heads = [f"{name}{', compiled' * kind.is_compiled}" for name, kind in zip(names, kinds, strict=True)]
    cells = ["images/s of", "parameters"]
    for kind, head in zip(kinds, heads, strict=True):
        cells += [head, "times"] if kind.is_rival else [head]
    print("| " + " | ".join(cells) + " |\n|---|" + "---:|" * (len(cells) - 1))
    for recipe in RECIPES:
        row = {kind: found[kind._replace(recipe=recipe)] for kind in kinds}
        counts = {parameters for kind, (_, parameters) in row.items() if kind.is_equal}
        cells = [f"`{recipe}`", " or ".join(f"{count:,}" for count in sorted(counts))]
        for kind, (rate, _) in row.items():
            cells.append(f"{rate:,.0f}")
            if kind.is_rival:
                cells.append(f"{row[kind._replace(is_rival=False)][0] / rate:.2f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data")
    parser.add_argument("--rounds", type=int, default=8, help="rounds over the batches that are timed (default: 8)")
    parser.add_argument("--batch", type=int, default=512, help="images per batch (default: 512, as in the recipes)")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile first (default: none)")
    parser.add_argument("--eager", action="store_true", help="only what is not compiled")
    given = parser.parse_args()
    more = {"rounds": given.rounds, "batch": given.batch, "workers": given.workers, "is_eager": given.eager}
    compare(given.data, **more)


if __name__ == "__main__":
    main()
