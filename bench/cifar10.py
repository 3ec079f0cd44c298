"""Training speed of the recipes of CIFAR-10 beside timm's models of the same size, whose step has no augmentation.

    python bench/cifar10.py --data FOLDER

FOLDER holds data_batch_1.bin to data_batch_5.bin and test_batch.bin of the binary version of CIFAR-10.
"""

import argparse
import time
from pathlib import Path

import speed
import torch
import torch.nn.functional as F

# timm's arguments for a model with the tokens and layers of both recipes; it has no stem like that of cifar10-cct
RIVAL = {"patch_size": 4, "depth": 6, "class_token": False, "global_pool": "avg"}
RATED = 100  # steps of a rival that are timed


def flags(data: Path, recipe: str, epochs: float | None) -> list[str]:
    given = ["--config", recipe, "--data.images", str(data)]
    return given if epochs is None else [*given, "--training.epochs", str(epochs)]


def rival_speed(batch: int, *, compiled: bool) -> float:
    """Images per second of timm's model: forward, backward and AdamW in bfloat16 autocast, as its users write it."""
    from timm.models.vision_transformer import VisionTransformer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"img_size": 32, "embed_dim": 256, "num_heads": 4, "mlp_ratio": 2, "qkv_bias": False, "num_classes": 10}
    model = VisionTransformer(**sizes, **RIVAL).to(device).train()
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

    steps = RATED if device == "cuda" else 2
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


def compare_rivals(data: Path, rounds: int, batch: int | None) -> None:
    """All in one run; ours with its augmentation."""
    print("| recipe | images/s | timm | times | timm compiled | times |\n|---|---:|---:|---:|---:|---:|")
    size = [] if batch is None else ["--data.batch", str(batch)]
    for recipe in ("cifar10-vit", "cifar10-cct"):
        bench = speed.Bench("images", [*flags(data, recipe, None), *size])
        ours = bench.speed([], rounds)
        theirs = [rival_speed(bench.batch, compiled=compiled) for compiled in (False, True)]
        cells = " | ".join(f"{their:,.0f} | {ours / their:.2f}" for their in theirs)
        print(f"| {recipe} | {ours:,.0f} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data")
    parser.add_argument("--rounds", type=int, default=8, help="rounds over the batches that are timed (default: 8)")
    parser.add_argument("--batch", type=int, help="images per batch (default: those of the config)")
    given = parser.parse_args()
    compare_rivals(given.data, given.rounds, given.batch)


if __name__ == "__main__":
    main()
