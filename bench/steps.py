"""What a decoding step costs: milliseconds of one more token after a number of tokens, in one layer on the CPU.

    python bench/steps.py
    python bench/steps.py --only softmax "local(window=256)" linear --lengths 1024 4096 16384

The last column is the whole forward pass over the longest of them.
"""

import argparse
import time

import torch

import regard

SPECS = ("softmax", "sinkhorn(block=64)", "reformer(chunk=64, buckets=32, rounds=2)", "routing(clusters=32)")


def measure(spec: str, length: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the fastest step, and of the whole forward pass."""
    torch.manual_seed(0)
    layer = regard.attention(spec, width=arguments.width, heads=arguments.heads, role="causal").eval()
    x, steps, wholes = torch.randn(1, length + arguments.steps, arguments.width), [], []
    with torch.inference_mode():
        _, state = layer.extend(x[:, :length], layer.start(1, capacity=length + arguments.steps))
        for token in x[:, length:].split(1, 1):
            began = time.perf_counter()
            _, state = layer.extend(token, state)
            steps.append(time.perf_counter() - began)
        for _ in range(3):
            began = time.perf_counter()
            layer(x[:, :length])
            wholes.append(time.perf_counter() - began)
    return min(steps), min(wholes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=SPECS, metavar="SPEC", help=f"default: {' '.join(SPECS)}")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[512, 1024, 2048],
        help="tokens before the step (default: 512 1024 2048)",
    )
    parser.add_argument("--width", type=int, default=256, help="model width (default: 256)")
    parser.add_argument("--heads", type=int, default=4, help="heads (default: 4)")
    parser.add_argument("--steps", type=int, default=16, help="steps, of which the fastest counts (default: 16)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| attention | " + " | ".join(f"{length:,}" for length in arguments.lengths) + " | whole |")
    print("|---|" + "---:|" * (len(arguments.lengths) + 1))
    for spec in arguments.only:
        found = [measure(spec, length, arguments) for length in arguments.lengths]
        cells = [f"{1e3 * step:.2f}" for step, _ in found]
        print(f"| `{spec}` | {' | '.join(cells)} | {1e3 * found[-1][1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
