"""One recipe, one word changed: CIFAR-10 with each attention over the patches, trained under one budget.

    python bench/cifar10.py --data FOLDER --out runs/cifar10 --epochs 40 --jobs 4
    python bench/cifar10.py --data FOLDER --speed-only --workers 12 --json speed.json
    python bench/cifar10.py --data FOLDER --rival

FOLDER holds data_batch_1.bin to data_batch_5.bin and test_batch.bin of the binary version of CIFAR-10. Every row is
trained by recipe cifar10-vit and scored on the test images; --epochs makes the same schedule shorter for all.
Finished runs are not trained again. --speed-only measures images per second of training alone, one row after the other
in one process; --rival compares that of the two recipes with timm's model of the same size, whose step has no
augmentation, as it is and compiled.
"""

import time
from pathlib import Path
from statistics import median

import side
import speed
import torch
import torch.nn.functional as F

SWIN = "[swin(window=4), 'swin(window=4, shift=2)']"
SIZES = {"width": 256, "heads": 4, "inner": 512, "layers": 6, "patch": 4}
SAME_SIZE = [part for name, size in SIZES.items() for part in (f"--model.{name}", str(size))]
ROWS = {
    "softmax": [],
    "local(window=[2, 2])": ["--model.attention", "local(window=[2, 2])"],
    "local(window=12)": ["--model.attention", "local(window=12)"],
    "swin, windows of 4 x 4": ["--model.attention", SWIN],
    "axial": ["--model.attention", "axial"],
    "image(block=[2, 2], memory=[2, 2])": ["--model.attention", "image(block=[2, 2], memory=[2, 2])"],
    "sparse(stride=8)": ["--model.attention", "sparse(stride=8)"],
    "linear": ["--model.attention", "linear"],
    "performer": ["--model.attention", "performer"],
    "efficient": ["--model.attention", "efficient"],
    "linformer(rank=16)": ["--model.attention", "linformer(rank=16)"],
    "nystrom(landmarks=16)": ["--model.attention", "nystrom(landmarks=16)"],
    "luna(length=16)": ["--model.attention", "luna(length=16)"],
    "set(points=16)": ["--model.attention", "set(points=16)"],
    "routing(clusters=4)": ["--model.attention", "routing(clusters=4)"],
    "synthesizer": ["--model.attention", "synthesizer"],
    "mixer": ["--model.attention", "mixer"],
    "fnet": ["--model.attention", "fnet"],
    "gmlp": ["--model.attention", "gmlp"],
    "Perceiver, 32 latents": ["--model.preset", "perceiver", *SAME_SIZE, "--model.latents", "32"],
    "TokenLearner, 8 tokens": ["--model.preset", "tokenlearner", *SAME_SIZE, "--model.tokens", "8"],
    "residual network without attention": ["--model.preset", "convnet", "--model.pooling", "null"],
}
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
    parser = side.arguments(__doc__, ROWS, out=False)
    parser.add_argument("--epochs", type=float, help="passes over the images per row (default: those of the config)")
    parser.add_argument("--speed-only", action="store_true", help="only measure the training speed, in one process")
    parser.add_argument("--rival", action="store_true", help="only compare the speed of the recipes with timm's models")
    parser.add_argument("--rounds", type=int, default=8, help="rounds over the batches that are timed (default: 8)")
    parser.add_argument("--workers", type=int, default=0, help="--speed-only: processes that compile kernels first")
    parser.add_argument("--batch", type=int, help="--rival: images per batch (default: those of the config)")
    parser.add_argument("--json", type=Path, help="--speed-only: file to write the speeds to")
    given = parser.parse_args()
    if given.rival:
        compare_rivals(given.data, given.rounds, given.batch)
        return
    rows = {name: ROWS[name] for name in given.only or ROWS}
    common = flags(given.data, "cifar10-vit", given.epochs)
    if given.speed_only:
        speed.measure("images", rows, common, rounds=given.rounds, workers=given.workers, path=given.json)
        return
    if given.out is None:
        parser.error("--out is needed to train")
    side.train("images", rows, common, given.out, given.jobs, given.minutes)
    print("| attention | test accuracy | parameters | steps | images/s |\n|---|---:|---:|---:|---:|")
    for name, found in side.evaluate(list(rows), given.out, ["--data", str(given.data / "test_batch.bin")]).items():
        if "error" in found:
            print(f"| {name} | {found['error']} | | | |")
            continue
        run = side.facts(given.out, name)
        speeds = [record["images_per_second"] for record in side.records(given.out, name) if record["event"] == "step"]
        sizes = f"{100 * found['accuracy']:.2f} | {run['parameters'] / 1e6:.2f}M | {run['steps']}"
        print(f"| {name} | {sizes} | {median(speeds):,.0f} |")


if __name__ == "__main__":
    main()
