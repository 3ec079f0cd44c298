"""What each attention learns in a short run: accuracy of a model of two layers on generated tasks.

    python bench/learn.py --jobs 16                                  the whole table
    python bench/learn.py --only softmax "local(window=16)" --tasks reverse --steps 500

A mechanism takes the tasks of its roles: copy and recall are causal, reverse and listops are not. MODELS are those that
are no word for the attention of a Transformer: they change the length, or read what is above them. Chance stands beside
each task. Accuracy is on fresh examples, of the answers that are asked for; copy and reverse have 128 tokens,
recall and listops 64. SPECS has options that are fair there, EXPECTED what a mechanism must reach at least with them; a
cell below is marked with ! and the exit status is 1. Cells that --json has from an earlier run are not run again. Each
cell runs on one thread of one process; the seconds of a row are those of its cells together.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

# before torch: a process has one core
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F

import regard
from regard.data.tasks import IGNORED, TASKS
from regard.models import build, kinds
from regard.spec import ATTENTION, parse

LENGTH = 128
LENGTHS = {"copy": LENGTH, "reverse": LENGTH, "recall": 64, "listops": 64}
# Others run with their defaults. Windows reach half of the tokens, and cannot learn what they do not see.
SPECS = {
    "axial": "axial(width=12)",
    "bigbird": "bigbird(block=8, window=3, globals=2, random=3)",
    "clustered": "clustered(clusters=32, topk=32)",
    "clusterformer": "clusterformer(clusters=8, chunk=32, bank=1024, every=50)",
    "compressive": "compressive(segment=32, memory=32, compressed=32, rate=2)",
    "entmax": "entmax(alpha=1.5)",
    "etc": "etc(globals=16, radius=32)",
    "gmlp": f"gmlp(longest={LENGTH})",
    "globals": "globals(tokens=16)",
    "heads": "heads(local(window=16), softmax)",
    "image": "image(block=32, memory=64)",
    "linformer": f"linformer(rank=64, longest={LENGTH})",
    "local": "local(window=64)",
    "location": f"location(longest={LENGTH})",
    "longformer": "longformer(window=64, globals=2)",
    "longshort": "longshort(window=32, rank=16, chunk=16)",
    "luna": "luna(length=32)",
    "mixer": f"mixer(longest={LENGTH}, inner=128)",
    "nystrom": "nystrom(landmarks=32)",
    "performer": "performer(features=128)",
    "poolingformer": "poolingformer(window=32, wide=96)",
    "predictive": "predictive(window=10)",
    "reformer": "reformer(chunk=32, buckets=8, rounds=4)",
    "rfa": "rfa(features=64)",
    # as in the paper, half of the heads are local
    "routing": "heads(local(window=32), routing(clusters=2))",
    "sinkhorn": f"sinkhorn(block=16, longest={LENGTH})",
    "sparse": "sparse(pattern='strided', stride=9)",
    "strided": "strided(stride=9)",
    "synthesizer": f"synthesizer(kinds=('dense', 'random'), longest={LENGTH})",
    "xl": "xl(segment=32, memory=64)",
}
# a query that is also the key attends to its own token first
MORE = ("routing(clusters=4, shared=False)",)
# role, kind and options
MODELS = {
    "Feedback": ("causal", "feedback", {}),
    "Perceiver AR, 64 latents": ("causal", "perceiver-ar", {"latents": 64}),
    "Perceiver, 64 latents": ("self", "perceiver", {"latents": 64}),
    "Funnel, 1+1 layers and 1 at full length": ("self", "funnel", {"layers": (1, 1), "decoder_layers": 1}),
    "TokenLearner, 32 tokens": ("self", "tokenlearner", {"tokens": 32}),
}
# Twice the chance: something is learned. The first operator alone gives 0.22 of the answers of listops, the values that
# were seen in a row 0.3 of those of recall.
SOMETHING = {"copy": 0.125, "reverse": 0.125, "recall": 0.25, "listops": 0.2}
ALL = {"copy": 0.9, "reverse": 0.9, "recall": 0.9, "listops": 0.3}
# In copy the answer stands 63 tokens back, in reverse half of the answers within 64.
NEAR = {"copy": 0.9, "reverse": 0.4, "recall": 0.9}
# positions, not contents, choose what is read
PLACES = {"copy": 0.9, "reverse": 0.9, "recall": 0.0}
STRIDES = {"copy": 0.9, "reverse": 0.0, "recall": 0.0}
MIRROR = {"reverse": 0.9}
EXPECTED = {
    **dict.fromkeys(("compressed", "entmax", "heads", "softmax"), ALL),
    # without a product of query and key, equality is hard to find: not in 2,000 updates either
    "additive": ALL | {"recall": 0.25},
    # a matrix more learns recall later, and scores that are not divided by the root of the width not in 1,500 updates
    **dict.fromkeys(("bilinear", "dot", "multiplicative"), ALL | {"recall": 0.25}),
    **dict.fromkeys(("local", "longformer", "image", "xl", "compressive", "longshort"), NEAR),
    **dict.fromkeys(("location", "synthesizer", "gmlp", "mixer", "fnet"), PLACES),
    "sparse": STRIDES,
    # the place that answers and the first operator are never in one stride
    "strided": STRIDES | {"listops": 0.0},
    **dict.fromkeys(("axial", "clustered", "reformer"), MIRROR),
    "globals": {"recall": 0.0},
    # 128 tokens pass through 32 vectors, which must be told apart first
    "luna": {"reverse": 0.0},
    "TokenLearner, 32 tokens": {"reverse": 0.0},
    "Feedback": {"copy": 0.9, "recall": 0.9},
    "Perceiver AR, 64 latents": {"copy": 0.9, "recall": 0.9},
    "Perceiver, 64 latents": {"reverse": 0.5},
    "Funnel, 1+1 layers and 1 at full length": {"reverse": 0.9},
    "nystrom": {"reverse": 0.5},
    "poolingformer": {"copy": 0.8, "reverse": 0.3, "recall": 0.9},
    # the block 64 tokens back, without the first of the one behind it
    "sinkhorn": {"copy": 0.5, "reverse": 0.9},
    "routing": {"copy": 0.5, "reverse": 0.25, "recall": 0.8},
}


def expected(spec: str, task: str) -> float:
    """The accuracy that a spec must reach."""
    named = {spec: name for name, spec in SPECS.items()} | {name: name for name in MODELS}
    name = named[spec] if spec in named else parse(spec).name
    return EXPECTED.get(name, {}).get(task, SOMETHING[task])


def roles(spec: str) -> tuple[str, ...]:
    return (MODELS[spec][0],) if spec in MODELS else regard.facts(spec).roles


def learn(spec: str, name: str, *, steps: int, batch: int, seed: int = 0) -> tuple[float, float]:
    """The accuracy after a run, and its seconds."""
    torch.set_num_threads(1)
    task, length, began = TASKS[name], LENGTHS[name], time.monotonic()
    torch.manual_seed(seed)
    word = ("", "decoder" if task.role == "causal" else "encoder", {"attention": spec})
    _, kind, options = MODELS.get(spec, word)
    sizes = {"width": 64, "heads": 4, "inner": 128, "layers": 2, "dropout": 0.0, "norm": "pre"}
    model = build(kinds()[kind][0](kind=kind, vocabulary=task.vocabulary, **(sizes | options)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        found = task.draw(batch, length, generator)
        logits, second, _ = model(found.tokens, keep=found.keep)
        loss = F.cross_entropy(logits.flatten(0, 1), found.answers.flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50, 3 * (1 - step / steps))
        optimizer.zero_grad()
        (loss if second is None else loss + second).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        found = task.draw(8 * batch, length, torch.Generator().manual_seed(seed + 1_000_000))
        best = model(found.tokens, keep=found.keep).logits.argmax(-1)
    asked = found.answers != IGNORED
    return float((best == found.answers)[asked].float().mean()), time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="SPEC", help="specs to train (default: all)")
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks to train on (default: all)"
    )
    parser.add_argument("--steps", type=int, default=600, help="updates (default: 600)")
    parser.add_argument("--batch", type=int, default=32, help="rows (default: 32)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="file for every number; results that it has are not computed again"
    )
    arguments = parser.parse_args()
    specs = [SPECS.get(spec, spec) for spec in arguments.only or (*ATTENTION.names(), *MORE, *MODELS)]
    options = {name: getattr(arguments, name) for name in ("steps", "batch")}
    found = {}
    if arguments.json and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        if kept["options"] != options:
            sys.exit(f"{arguments.json} is of other options, {kept['options']}: give another file")
        found = {(cell["spec"], cell["task"]): (cell["accuracy"], cell["seconds"]) for cell in kept["cells"]}
    cells = [(s, task) for s in specs for task in arguments.tasks if TASKS[task].role in roles(s)]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(learn, *cell, **options): cell for cell in cells if cell not in found}
        for count, done in enumerate(as_completed(running), 1):
            cell = running[done]
            found[cell] = done.result()
            accuracy, seconds = found[cell]
            print(f"{count}/{len(running)} {cell[0]} {cell[1]}: {accuracy:.3f}, {seconds:.0f} s", file=sys.stderr)
            if arguments.json:
                rows = [{"spec": s, "task": task, "accuracy": a, "seconds": t} for (s, task), (a, t) in found.items()]
                arguments.json.write_text(json.dumps({"options": options, "cells": rows}, indent=1))
    print("| attention | " + " | ".join(arguments.tasks) + " | seconds |")
    print("|---|" + "---:|" * (len(arguments.tasks) + 1))
    print("| chance | " + " | ".join(f"{TASKS[name].chance:.2f}" for name in arguments.tasks) + " | |")
    short = [cell for cell in cells if found[cell][0] < expected(*cell)]
    for spec in specs:
        row = {task: found.get((spec, task)) for task in arguments.tasks}
        shown = [f"{row[t][0]:.2f}{' !' if (spec, t) in short else ''}" if row[t] else "" for t in row]
        print(f"| `{spec}` | {' | '.join(shown)} | {sum(cell[1] for cell in row.values() if cell):.0f} |")
    for spec, task in short:
        print(f"! {spec} {task}: {found[spec, task][0]:.3f}, expected at least {expected(spec, task):g}")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
