"""`regard serve` under load, and beside other servers with the same model.

--load N: a small language model with random weights, N requests from 64 clients: prompts and answers of mixed lengths,
streams, streams that the client leaves, and requests that must be refused. Every answer is compared with the one that
the model gives alone. Then the same clients against a short queue (overload), and SIGTERM in the middle of requests.

--compare: GPT-2 small with random weights, and the translator bundled with Regard, behind `regard serve`, `transformers
serve` (also with its continuous batching), LitServe, and CTranslate2's asynchronous translator. All get the same
requests from the same clients, in turns, each in a process of its own with as many threads. A server that is not
installed, or does not answer, is named and omitted.

--in-process: Regard's and Hugging Face's continuous batching of that GPT-2, without servers between.
"""

import argparse
import asyncio
import dataclasses
import gc
import importlib.util
import json
import operator
import os
import platform
import queue
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import load
import torch

from regard import models
from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig
from regard.models.config import ModelConfig
from regard.tasks.language.language_model import LanguageModel
from regard.tasks.load import BUNDLED
from regard.training import checkpoint
from regard.training.run import MANIFEST, Run

EXAMPLES = """examples:
  python bench/serve.py --load 20000                     about five minutes on two cores
  python bench/serve.py --load 20000 --attention linear
  python bench/serve.py --compare --requests 64 --json compared.json
  python bench/serve.py --compare --only translations
  python bench/serve.py --compare --only completions --device cuda --requests 512 --clients 64
  python bench/serve.py --in-process --device cuda --requests 512 --clients 128
"""
HERE = Path(__file__).parent
TEXT = "the cat sat on the mat and the dog ran over the hill while it rained and rained for days"
WORDS = TEXT.split()
START_SECONDS = 180


def write_run(folder: Path, config: ModelConfig, tokenizer: Tokenizer, length: int) -> None:
    """A run of the task "language" with random weights."""
    torch.manual_seed(0)
    model = models.build(config)
    with Run.create(folder, "bench/serve.py") as run:
        tokenizer.save(run.folder / "tokenizer.json")
        run.record("tokenizer.json")
        checkpoint.write(run.checkpoints, checkpoint.step_name(0), {"model": model.state_dict()}, {"step": 0})
        digest = checkpoint.digest(run.folder / "tokenizer.json")
        facts = {"task": "language", "manifest": MANIFEST, "model": dataclasses.asdict(config), "length": length}
        facts["parameters"] = sum(part.numel() for part in model.parameters())
        run.write_json("run.json", facts | {"start": None, "tokenizers": {"tokenizer.json": digest}})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    """A server in a process of its own."""

    def __init__(self, name: str, command: list[str], path: str, threads: int, log: Path):
        self.name, self.path, self.log = name, path, log
        self.port = int(command[command.index("PORT_IS") + 1])
        command = [word for word in command if word != "PORT_IS"]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "0",
        }
        with log.open("wb") as file:
            # a group of its own, so that its children end with it
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self, body: dict[str, Any]) -> None:
        """Until it answers a request."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended with status {self.process.returncode}: {self.last_line()}")
            try:
                status, _, raw = asyncio.run(load.Connection(self.port, self.path).ask(json.dumps(body).encode()))
                if status == 200:
                    return
                if status < 500 and status != 404:
                    raise RuntimeError(f"it answers {status}: {raw[:200]!r}")
            except (OSError, asyncio.IncompleteReadError, IndexError):
                pass
            time.sleep(0.5)
        raise RuntimeError(f"no answer after {START_SECONDS} seconds: {self.last_line()}")

    def last_line(self) -> str:
        return (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]

    def resident(self) -> int:
        """Bytes of memory of all its processes; what several share is counted once."""
        found = 0
        for process, _ in self._processes():
            with suppress(OSError):
                lines = (process / "smaps_rollup").read_text().splitlines()
                found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        return found

    def cpu_seconds(self) -> float:
        """Of all its processes. What else the machine does hardly changes them."""
        # what they and the children that they waited for took
        return sum(sum(map(int, fields[11:15])) for _, fields in self._processes()) / os.sysconf("SC_CLK_TCK")

    def _processes(self) -> Iterator[tuple[Path, list[str]]]:
        """Those of its session: folders in /proc, with the fields of their states."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:
                    yield path.parent, fields

    def end(self) -> int:
        """Ends it and what it started, and returns its status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()
        finally:
            # what was started by it and stayed
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def regard_server(
    folder: Path, arguments: argparse.Namespace, log: Path, *flags: str, path: str = "/v1/completions"
) -> Server:
    command = [sys.executable, "-m", "regard", "serve", str(folder), "--device", arguments.device]
    command += ["--port", "PORT_IS", str(free_port()), *flags]
    return Server("regard serve", command, path, arguments.threads, log)


@contextmanager
def running(server: Server, body: dict[str, Any]) -> Iterator[Server]:
    try:
        server.wait(body)
        yield server
    finally:
        server.end()


# load


def small_run(folder: Path, attention: str) -> None:
    tokenizer = Tokenizer.train([" ".join(WORDS)], 260, "bytes")
    sizes = {"width": 64, "heads": 4, "layers": 2, "inner": 128, "position": "sinusoidal"}
    write_run(
        folder, ModelConfig(kind="decoder", vocabulary=tokenizer.size, attention=attention, **sizes), tokenizer, 256
    )


def known_asks(folder: Path, count: int, distinct: int, seed: int) -> list[load.Ask]:
    """Requests whose answers are computed alone, in turn as they are, as streams, and as streams that are left."""
    language, rng = LanguageModel.load(folder, device="cpu"), random.Random(seed)
    common = " ".join(rng.choices(WORDS, k=40))  # more than a piece: some prompts begin alike
    pool: list[load.Ask] = []
    for number in range(distinct):
        prompt = (common if number % 4 == 0 else "") + " ".join(rng.choices(WORDS, k=rng.randrange(1, 30)))
        tokens = rng.choice([1, 2, 4, 8, 16, 32])
        body: dict[str, Any] = {"model": folder.name, "prompt": prompt, "max_tokens": tokens}
        if number % 2:
            config = DecodingConfig(beam=1, maximum=tokens)
            body["temperature"] = 0
        else:
            config = DecodingConfig(sample=True, top_p=0.9, seed=number, maximum=tokens)
            body |= {"top_p": 0.9, "seed": number}
        pool.append(load.Ask(body, language.generate(prompt, config)[0].text))
    asks = []
    for _ in range(count):
        ask, kind = rng.choice(pool), rng.random()
        if kind < 0.15:
            ask = load.Ask(ask.body | {"stream": True, "max_tokens": 100}, None, cut=True)
        elif kind < 0.5:
            ask = load.Ask(ask.body | {"stream": True}, ask.expected)
        asks.append(ask)
    return asks


def under_load(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    folder = work / "small"
    small_run(folder, arguments.attention)
    asks = known_asks(folder, arguments.load, 300, 0)
    first = {**asks[0].body, "stream": False}
    found: dict[str, Any] = {}
    with running(regard_server(folder, arguments, work / "load.log"), first) as server:
        memory = [server.resident()]
        marks = {round(arguments.load * part / 4) for part in range(1, 5)}

        def look(done: int) -> None:
            if done in marks:
                memory.append(server.resident())
                print(f"  {done:,} requests, {memory[-1] / 2**20:.0f} MiB", flush=True)

        report = asyncio.run(
            load.load(server.port, asks, clients=arguments.clients, wrong=0.05, on_progress=look, patience=0.2)
        )
        found["load"] = report.summary() | {"MiB at the start and after each quarter": [m >> 20 for m in memory]}
        tell("load", found["load"], report)
    short = ("--rows", "2", "--queue", "4")
    with running(regard_server(folder, arguments, work / "overload.log", *short), first) as server:
        part = asks[: max(200, arguments.load // 10)]
        report = asyncio.run(load.load(server.port, part, clients=arguments.clients, patience=0.2))
        found["overload"] = report.summary()
        tell("overload: 2 rows, a queue of 4", found["overload"], report)
    found["SIGTERM"] = ended_in_the_middle(folder, asks, arguments, work / "sigterm.log")
    return found


def ended_in_the_middle(folder: Path, asks: list[load.Ask], arguments: argparse.Namespace, log: Path) -> dict[str, Any]:
    """SIGTERM while all clients wait for answers: what the server has accepted is answered, whole and right."""
    server = regard_server(folder, arguments, log)
    server.wait({**asks[0].body, "stream": False})
    some = [ask for ask in asks if not ask.cut][:2000]

    def look(done: int) -> None:
        if done == 300:
            server.process.send_signal(signal.SIGTERM)

    report = asyncio.run(load.load(server.port, some, clients=arguments.clients, on_progress=look))
    status = server.end()
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    answered = [line for line in lines if line.get("route") == "/v1/completions"]
    whole = sum(line["status"] == 200 for line in answered) - 1  # the first one was to see whether it runs
    found = {
        "right answers": report.right,
        "of requests that the server accepted": whole,
        "accepted and not answered": sum(line["status"] in (499, 500, 503, 504) for line in answered)
        - report.statuses[503],
        "told to go elsewhere (503)": report.statuses[503],
        "mixed up": len(report.mixed_up),
        "exit status": status,
    }
    print("SIGTERM after 300 requests", json.dumps(found, indent=2), flush=True)
    return found


def tell(name: str, found: dict[str, Any], report: load.Report) -> None:
    print(name, json.dumps(found, indent=2), flush=True)
    for line in (*report.lost[:3], *report.mixed_up[:3]):
        print("  ", line)


# beside others


def gpt2_folder(folder: Path) -> None:
    """GPT-2 small with random weights and a tokenizer of its size, learned from Python's own library."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, pre_tokenizers, trainers
    from tokenizers import models as vocabularies
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    end = "<|endoftext|>"
    tokenizer = Library(vocabularies.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    paths = [
        path
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
        if "site-packages" not in path.parts
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=50257,
        min_frequency=1,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text("utf-8", "replace") for path in paths[:1500]), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    id = tokenizer.token_to_id(end)
    config = GPT2Config(vocab_size=tokenizer.get_vocab_size(), bos_token_id=id, eos_token_id=id)
    GPT2LMHeadModel(config).save_pretrained(folder)


def completions(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    from regard.interop.runs import import_model

    folder, run = work / "gpt2", work / "gpt2-run"
    gpt2_folder(folder)
    import_model(folder, run)
    asks = random_asks(arguments.requests)
    log, path, threads = work / "log", "/v1/completions", arguments.threads
    begin = "from transformers.cli.transformers import main; main()"

    def theirs(name: str, *flags: str) -> Server:
        command = [sys.executable, "-c", begin, "serve", str(folder), "--device", arguments.device, *flags]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", "PORT_IS", str(free_port())]
        return Server(name, command, path, threads, log.with_name(f"log-{len(flags)}"))

    servers: list[tuple[str, str, Callable[[], Server]]] = [
        ("regard", run.name, lambda: regard_server(run, arguments, log, "--context", "1024")),
        ("transformers", str(folder), lambda: theirs("transformers serve")),
        (
            "transformers",
            str(folder),
            lambda: theirs("transformers serve, continuous batching", "--continuous-batching"),
        ),
        ("litserve", "", lambda: peer("litserve-generate", folder, "/predict", threads, log)),
    ]
    bodies = {name: [ask | {"model": name, "temperature": 0} for ask in asks] for _, name, _ in servers}
    return race(servers, bodies, lambda body, raw: json.loads(raw)["choices"][0]["text"], arguments)


def random_asks(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {"prompt": " ".join(rng.choices(WORDS, k=rng.randrange(8, 96))), "max_tokens": rng.choice([8, 16, 32])}
        for _ in range(count)
    ]


def in_process(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Continuous batching without HTTP: all requests are given at once, to Regard's generator and to Hugging Face's
    manager. Greedy, no end token, at most `clients` rows at a time."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from regard.interop.runs import import_model

    folder, run = work / "gpt2", work / "gpt2-run"
    gpt2_folder(folder)
    import_model(folder, run)
    dtype = getattr(torch, arguments.precision)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asks = [(tokenizer(ask["prompt"])["input_ids"], ask["max_tokens"]) for ask in random_asks(arguments.requests)]
    language = LanguageModel.load(run, device=arguments.device)
    language.model.to(dtype)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(arguments.device).eval()
    tokens, seconds, given = sum(count for _, count in asks), {}, {}
    # one after the other: theirs takes most of the memory of a GPU
    for name, opened in (
        ("regard", generator(language, arguments)),
        ("transformers", hugging_face(theirs, arguments.clients)),
    ):
        with opened as ask:
            ask(asks)  # what is compiled or captured at first use
            for _ in range(arguments.rounds):
                began = time.monotonic()
                given[name] = ask(asks)
                seconds.setdefault(name, []).append(time.monotonic() - began)
                print(f"{name}: {tokens / seconds[name][-1]:,.0f} tokens/s", flush=True)
        del ask
        gc.collect()
        torch.cuda.empty_cache()
    found: dict[str, Any] = {"transformers": transformers.__version__, "requests": len(asks), "tokens": tokens}
    if arguments.device != "cpu":
        found["device"] = torch.cuda.get_device_name(arguments.device)
    print(found, flush=True)
    for name, times in seconds.items():
        same = sum(map(operator.eq, given[name], given["regard"])) / len(asks)
        found[name] = {"tokens/s": [round(tokens / took) for took in times], "same answers": same}
        print(f"{name:42}", found[name], flush=True)
    return found


Answered = Callable[[list[tuple[list[int], int]]], list[list[int]]]  # prompts and numbers of tokens -> new tokens


@contextmanager
def generator(language: LanguageModel, arguments: argparse.Namespace) -> Iterator[Answered]:
    from regard.serve.generating import Generator, GeneratorLimits
    from regard.serve.requests import Failed, Generation

    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    limits = GeneratorLimits(rows=arguments.clients, waiting=arguments.requests, state_bytes=64 << 30, context=1024)

    def deliver(items: list[tuple[Generation, Any]]) -> None:
        for _, item in items:
            done.put(item)

    engine = Generator(language, limits, deliver)
    engine.start()

    def ask(asks: list[tuple[list[int], int]]) -> list[list[int]]:
        configs = {count: DecodingConfig(beam=1, minimum=count, maximum=count) for _, count in asks}
        given = [Generation(ids, configs[count], language.tokenizer, tokens=count) for ids, count in asks]
        engine.submit(given)
        for _ in given:
            if isinstance(item := done.get(), Failed):
                raise item.why
        return [one.samples[0].listener.ids for one in given]

    try:
        yield ask
    finally:
        engine.close()
        engine.thread.join()


@contextmanager
def hugging_face(model: Any, rows: int) -> Iterator[Answered]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=32)
    batching = ContinuousBatchingConfig(max_requests_per_batch=rows)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching
    ) as manager:
        print("Hugging Face's attention:", model.config._attn_implementation, flush=True)

        def ask(asks: list[tuple[list[int], int]]) -> list[list[int]]:
            names = [manager.add_request(ids, max_new_tokens=count, eos_token_id=-1) for ids, count in asks]
            given: dict[str, list[int]] = {}
            while len(given) < len(asks):
                found = manager.get_result(timeout=1)
                if found is not None and found.error:
                    raise RuntimeError(f"Hugging Face's continuous batching failed: {found.error}")
                if found is not None and found.is_finished():
                    given[found.request_id] = list(found.generated_tokens)
                elif not manager.is_running():
                    raise RuntimeError("Hugging Face's continuous batching has ended")
            return [given[name] for name in names]

        yield ask


def translations(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    from regard.data.generated import pairs
    from regard.interop.runs import export_run

    run, fast, log = BUNDLED / "english-german", work / "fast", work / "log"
    export_run(run, fast, "ctranslate2")
    asks = [{"text": pair[0]} for pair in pairs(arguments.requests * 8)]
    threads = arguments.threads
    servers: list[tuple[str, str, Callable[[], Server]]] = [
        ("regard", "", lambda: regard_server(run, arguments, log, "--processes", str(threads), path="/translate")),
        ("ctranslate2", "", lambda: peer("ctranslate2", fast, "/translate", threads, log)),
        ("litserve", "", lambda: peer("litserve-translate", run, "/predict", threads, log)),
    ]
    return race(servers, {"": asks}, lambda body, raw: json.loads(raw)["translations"][0]["text"], arguments)


def peer(name: str, folder: Path, path: str, threads: int, log: Path) -> Server:
    command = [sys.executable, str(HERE / "serve_peers.py"), name, str(folder), "PORT_IS", str(free_port())]
    return Server(name, command, path, threads, log)


def race(
    servers: list[tuple[str, str, Callable[[], Server]]],
    bodies: dict[str, list[dict[str, Any]]],
    read: Callable[[dict[str, Any], bytes], Any],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """The same requests to all servers, which run side by side and take turns: in a round each gets a part of them, so
    that what else the machine does strikes all alike. Answers are compared with those of the first."""
    entries: list[Entry] = []
    try:
        for package, name, start in servers:
            if importlib.util.find_spec(package) is None:
                print(f"{package} is not installed, and omitted")
            elif arguments.device != "cpu" and package in ("litserve", "ctranslate2"):
                print(f"{package} is measured on the CPU only, and omitted")
            else:
                entries.append(Entry(start(), bodies[name]))
        for entry in list(entries):
            try:
                entry.server.wait(entry.bodies[0])
            except RuntimeError as error:
                print(f"{entry.server.name} is omitted: {error}")
                entry.server.end()
                entries.remove(entry)
        count = len(next(iter(bodies.values())))
        size = -(-count // arguments.rounds)
        for first in range(0, count, size):
            for entry in entries:
                entry.turn(range(first, min(first + size, count)), read, arguments.clients)
    finally:
        for entry in entries:
            entry.server.end()
    found: dict[str, Any] = {}
    for entry in entries:
        summary = {key: entry.report.summary()[key] for key in ("requests/s", "p50", "p99", "lost")}
        summary["CPU ms per request"] = round(1e3 * entry.cpu / max(1, entry.report.right), 1)
        summary["same answers"] = sum(map(operator.eq, entry.given, entries[0].given)) / len(entry.given)
        found[entry.server.name] = summary
        print(f"{entry.server.name:42}", summary, *entry.report.lost[:1], flush=True)
    return found


class Entry:
    """A server of a race, its requests, and what came of them."""

    def __init__(self, server: Server, bodies: list[dict[str, Any]]):
        self.server, self.bodies, self.report = server, bodies, load.Report()
        self.given: list[Any] = [None] * len(bodies)
        self.cpu = 0.0

    def turn(self, places: range, read: Callable[[dict[str, Any], bytes], Any], clients: int) -> None:
        def note(body: dict[str, Any], raw: bytes) -> None:
            place = next(place for place in places if self.bodies[place] is body)
            self.given[place] = read(body, raw)

        asks = [load.Ask(self.bodies[place], None) for place in places]
        before = self.server.cpu_seconds()
        report = asyncio.run(load.load(self.server.port, asks, clients=clients, path=self.server.path, read=note))
        self.cpu += self.server.cpu_seconds() - before
        self.report.right += report.right
        self.report.lost += report.lost
        self.report.seconds += report.seconds
        self.report.took += report.took


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=int, metavar="N", help="requests to a small model, all answers compared")
    parser.add_argument("--attention", default="[softmax, local(window=32)]", help="attention of the small model")
    parser.add_argument("--compare", action="store_true", help="measure other servers with the same models")
    parser.add_argument("--in-process", action="store_true", help="continuous batching of Hugging Face, without HTTP")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of --in-process")
    parser.add_argument("--only", choices=("completions", "translations"), help="one of the two comparisons")
    parser.add_argument("--requests", type=int, default=64, help="of a comparison (default: 64)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each server in a comparison (default: 4)")
    parser.add_argument("--clients", type=int, help="at a time (default: 64 for --load, 16 for --compare)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each server (default: all cores)")
    parser.add_argument("--device", default="cpu", help="of Regard and transformers: cpu or cuda (default: cpu)")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    arguments = parser.parse_args()
    if not (arguments.load or arguments.compare or arguments.in_process):
        parser.error("give --load N, --compare or --in-process")
    return arguments


def main() -> None:
    arguments = parsed()
    found: dict[str, Any] = {"machine": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}
    clients = arguments.clients
    with tempfile.TemporaryDirectory() as folder:
        if arguments.load:
            arguments.clients = clients or 64
            found["load"] = under_load(arguments, Path(folder))
        if arguments.compare:
            arguments.clients = clients or 16
            for name, measure in (("completions", completions), ("translations", translations)):
                if arguments.only in (None, name):
                    print(name)
                    found[name] = measure(arguments, Path(folder))
        if arguments.in_process:
            arguments.clients = clients or 64
            print(f"continuous batching, {arguments.precision}")
            found["in process"] = in_process(arguments, Path(folder))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
