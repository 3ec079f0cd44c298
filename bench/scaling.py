"""Projects the throughput of training on several GPUs from FLOPs and bytes; nothing is measured.

    python bench/scaling.py
    python bench/scaling.py --parameters 1.5e9 --tokens 524288 --flops 989e12 --used 0.45 --link 50e9

The formulas and their assumptions are in docs/scale.md.
"""

import argparse
from typing import NamedTuple


class Projection(NamedTuple):
    """A step on several GPUs."""

    gpus: int
    compute: float  # seconds
    communication: float  # seconds
    step: float  # seconds
    tokens_per_second: float
    utilization: float  # model FLOPs utilization: 6 N T / (step * GPUs * peak)


def project(
    parameters: float, tokens: float, gpus: int, *, flops: float, used: float, link: float, sharded: bool = False
) -> Projection:
    """A step of a model of so many parameters on so many tokens, of all GPUs together. `flops` are those of a GPU per
    second, of which it uses the share `used` alone; `link` is the bandwidth of the slowest link in bytes per second."""
    work = 6 * parameters * tokens
    compute = work / (gpus * flops * used)
    # data parallel: all-reduce of float32 gradients; sharded: bfloat16 weights twice, float32 gradients once
    moved = (2 * 2 + 4 if sharded else 2 * 4) * parameters * (gpus - 1) / gpus
    communication = moved / link
    step = compute / 3 + max(2 / 3 * compute, communication)
    return Projection(gpus, compute, communication, step, tokens / step, work / (step * gpus * flops))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.5e9)
    parser.add_argument("--tokens", type=float, default=524288, help="tokens per update of all GPUs together")
    parser.add_argument("--flops", type=float, default=989e12, help="dense bfloat16 operations per second of a GPU")
    parser.add_argument("--used", type=float, default=0.45, help="share of them that one GPU alone uses")
    parser.add_argument("--link", type=float, default=50e9, help="bytes per second through the slowest link")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    parser.add_argument("--sharded", action="store_true", help="FSDP in place of data parallel")
    given = parser.parse_args()
    print("| GPUs | compute | communication | step | tokens per second | MFU |\n|---|---|---|---|---|---|")
    for gpus in given.gpus:
        options = {"flops": given.flops, "used": given.used, "link": given.link, "sharded": given.sharded}
        found = project(given.parameters, given.tokens, gpus, **options)
        print(
            f"| {found.gpus} | {found.compute:.3f} s | {found.communication:.3f} s | {found.step:.3f} s | "
            f"{found.tokens_per_second:,.0f} | {100 * found.utilization:.1f} % |"
        )


if __name__ == "__main__":
    main()
