"""tinyshakespeare by characters: the loss on the last tenth of the text after a number of minutes of training.

    python bench/shakespeare.py --data FOLDER --device cpu --minutes 3
    python bench/shakespeare.py --data FOLDER --device cuda --minutes 5

FOLDER holds input.txt. The speed of the machine is measured first, and the schedule is then planned for the steps that
fit into the minutes (evaluations in between included), at most those of recipe shakespeare-DEVICE. The loss is
over the whole validation part, read in blocks of the training length, as nanoGPT measures it on a sample; nanoGPT's
published figures are 1.88 for its three minutes on a CPU and 1.4697 for three minutes on an A100. What follows -- is
passed to `regard train language`, such as `-- --model.attention performer`.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import side
import yaml

from regard.recipes import find

PROBE = 60  # steps to measure the speed, after as many to warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with input.txt")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device (default: cpu)")
    parser.add_argument("--minutes", type=float, default=3, help="minutes of training (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, help="keep the run here")
    parser.add_argument("more", nargs="*", help="after --: further flags of regard train language")
    given = parser.parse_args()
    recipe = find(f"shakespeare-{given.device}", "language")
    most = yaml.safe_load(recipe.path.read_text())["training"]["steps"]
    common = ["--config", recipe.name, "--data.text", side.file(given.data, "input.txt"), *given.more]
    common += ["--training.device", given.device, "--training.tensorboard", "false"]
    common += ["--training.threads", str(given.threads)]
    with tempfile.TemporaryDirectory() as scratch:
        probe = ["--training.steps", str(2 * PROBE), "--training.log_every", str(PROBE), "--training.evaluate_every"]
        train(Path(scratch) / "probe", [*common, *probe, str(2 * PROBE)])
        first, second = [part for part in log(Path(scratch) / "probe") if part["event"] == "step"]
        speed = PROBE / (second["seconds"] - first["seconds"])
        # a twentieth for evaluations and checkpoints
        steps = min(most, int(0.95 * 60 * given.minutes * speed))
        print(f"{speed:.1f} steps per second: {steps} steps", flush=True)
        out = given.out or Path(scratch) / "run"
        began = time.monotonic()
        train(out, [*common, "--training.steps", str(steps)])
        minutes = (time.monotonic() - began) / 60
        best = min((part for part in log(out) if part["event"] == "evaluation"), key=lambda part: part["loss"])
        facts = json.loads((out / "run.json").read_text())
        print(
            f"validation loss {best['loss']:.4f} at step {best['step']} of {steps}; {minutes:.2f} minutes in all, "
            f"start and evaluations included; {facts['parameters']:,} parameters on {given.device}"
        )


def train(out: Path, flags: list[str]) -> None:
    subprocess.run([*side.REGARD, "train", "language", "--out", str(out), *flags], check=True)


def log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
