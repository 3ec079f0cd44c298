"""How far a Funnel-Transformer is from Hugging Face's with the same weights: the largest difference of a logit.

    python bench/authors.py

Both are in float64 (their softmax reads logits in float32), with random weights, 13 tokens and relative positions in
every layer; the rows differ in what positions count. Needs transformers, and the tests beside this folder, whose code
copies the weights.
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "models"), str(TESTS / "helpers")]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tests = importlib.import_module("test_funnel")
    print("| blocks | their attention | positions count | largest difference | largest logit |")
    print("|---|---|---|---:|---:|")
    for blocks in ([2, 2], [2, 2, 1]):
        for kind in ("relative_shift", "factorized"):
            for places in ("vectors", "tokens"):
                worst = largest = 0.0
                for apart in (False, True):
                    torch.manual_seed(0)
                    theirs = tests.peer(block_sizes=blocks, separate_cls=apart, attention_type=kind)
                    ours = tests.build(layers=tuple(blocks), apart=apart, position="xl", places=places)
                    mine, other = tests.theirs_and_ours(ours, theirs, 13)
                    worst = max(worst, (mine - other).abs().max().item())
                    largest = max(largest, other.abs().max().item())
                print(f"| {'+'.join(map(str, blocks))} | {kind} | {places} | {worst:.2g} | {largest:.1f} |")


if __name__ == "__main__":
    main()
