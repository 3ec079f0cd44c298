"""What each attention learns in a short run: accuracy of a model of two layers on tasks that a program makes up.

    python bench/learn.py --steps 1500 --length 128
    python bench/learn.py --only softmax "local(window=16)" --tasks reverse

A mechanism takes the tasks of its roles: copy and recall are causal, reverse and listops are not. Chance stands beside
each task. Accuracy is on fresh examples, of the answers that are asked for.
"""

import argparse
import time

import torch
import torch.nn.functional as F

import regard
from regard.data.tasks import IGNORED, TASKS
from regard.models.transformer import ModelConfig, Transformer
from regard.spec import ATTENTION


def learn(spec: str, name: str, *, steps: int, length: int, batch: int, seed: int = 0) -> float:
    """The accuracy after a run."""
    task = TASKS[name]
    torch.manual_seed(seed)
    kind = "decoder" if task.role == "causal" else "encoder"
    sizes = {"width": 64, "heads": 4, "inner": 128, "layers": 2, "dropout": 0.0, "norm": "pre"}
    model = Transformer(ModelConfig(kind=kind, vocabulary=task.vocabulary, attention=spec, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        found = task.draw(batch, length, generator)
        logits, second, _ = model(found.tokens, keep=found.keep)
        loss = F.cross_entropy(logits.flatten(0, 1), found.answers.flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 100) * (1 - step / steps)
        optimizer.zero_grad()
        (loss if second is None else loss + 0.1 * second).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        found = task.draw(8 * batch, length, torch.Generator().manual_seed(seed + 1_000_000))
        best = model(found.tokens, keep=found.keep).logits.argmax(-1)
    asked = found.answers != IGNORED
    return float((best == found.answers)[asked].float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="SPEC", help="only these (default: the first example of each)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="only these tasks")
    parser.add_argument("--steps", type=int, default=1500, help="updates (default: 1500)")
    parser.add_argument("--length", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("--batch", type=int, default=32, help="rows (default: 32)")
    arguments = parser.parse_args()
    specs = arguments.only or [ATTENTION.find(name).examples[0] for name in ATTENTION.names()]
    print("| attention | " + " | ".join(arguments.tasks) + " | seconds |")
    print("|---|" + "---|" * (len(arguments.tasks) + 1))
    print("| chance | " + " | ".join(f"{TASKS[name].chance:.2f}" for name in arguments.tasks) + " | |")
    for spec in specs:
        began, cells = time.monotonic(), []
        for name in arguments.tasks:
            options = {"steps": arguments.steps, "length": arguments.length, "batch": arguments.batch}
            takes = TASKS[name].role in regard.facts(spec).roles
            cells.append(f"{learn(spec, name, **options):.2f}" if takes else "")
        print(f"| `{spec}` | " + " | ".join(cells) + f" | {time.monotonic() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
