"""`regard serve`: runs behind HTTP."""

import argparse
import os
import sys
from pathlib import Path

from regard.tasks.command import AddVerb

KEY = "REGARD_API_KEY"


def add_verbs(verb: AddVerb) -> None:
    added = verb(
        "serve",
        serve,
        "serve runs over HTTP: completions and embeddings for OpenAI's clients, translations, classes, gaps",
        [
            "regard serve",
            "regard serve runs/shakespeare runs/reviews --port 8000",
            "REGARD_API_KEY=$(cat key.txt) regard serve runs/shakespeare --host 0.0.0.0",
            "curl localhost:8000/translate -H 'Content-Type: application/json' -d '{\"text\": \"Where is it?\"}'",
        ],
    )
    about = "run folders of the tasks language, translate, classify and masked (default: those bundled with Regard)"
    added.add_argument("runs", metavar="RUN", nargs="*", help=about)
    added.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    added.add_argument("--port", type=int, default=8000, help="port; 0: any free one (default: 8000)")
    added.add_argument("--device", default="auto", help="device: cpu, cuda ... (default: a GPU if there is one)")
    added.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"file with the API key that requests must have (default: the environment variable {KEY}; beyond this "
        "machine, where neither is given, a key is made and printed)",
    )
    added.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="further name to answer to, as of a proxy"
    )
    added.add_argument(
        "--rows", type=int, default=16, help="texts that a model continues at a time in each process (default: 16)"
    )
    added.add_argument(
        "--queue",
        type=int,
        default=64,
        help="requests that may wait for a model in each process; others get status 429 (default: 64)",
    )
    added.add_argument(
        "--memory", default="1GiB", help="memory of the decoding states of a model, such as 2GiB (default: 1GiB)"
    )
    added.add_argument(
        "--prefix-memory",
        default="256MiB",
        help="memory of the kept states of prompts that begin alike; 0: none are kept (default: 256MiB)",
    )
    added.add_argument(
        "--context", type=int, default=2048, help="largest number of tokens of a prompt and its answer (default: 2048)"
    )
    added.add_argument(
        "--processes",
        type=int,
        default=0,
        help="processes that serve; they share --memory and --prefix-memory (default: one for each core, up to four, "
        "where all models are small and on a CPU; else one)",
    )
    added.add_argument(
        "--threads",
        type=int,
        default=0,
        help="CPU threads of each model in each process (default: those of PyTorch, shared by the processes)",
    )
    added.add_argument(
        "--deadline", type=float, default=120.0, metavar="SECONDS", help="longest time for a request (default: 120)"
    )
    added.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="longest time to answer what was accepted, after SIGTERM (default: 30)",
    )
    added.add_argument(
        "--log", choices=("info", "warning", "error"), default="info", help="what to log, as JSON lines (default: info)"
    )


def serve(arguments: argparse.Namespace) -> None:
    """regard serve"""
    # The variable belongs to another program: our metrics are in memory, or in a folder made for several processes.
    # Prometheus' client reads it on import, so it is removed before that.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    from regard.serve.app import quiet_asyncio
    from regard.serve.limits import Limits, read_bytes
    from regard.serve.observing import log_to_stderr
    from regard.serve.start import serve as listen

    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port must be from 0 to 65535, got {arguments.port}")
    limits = Limits(
        rows=arguments.rows,
        queue=arguments.queue,
        memory=read_bytes(arguments.memory),
        prefix_memory=read_bytes(arguments.prefix_memory),
        context=arguments.context,
        threads=arguments.threads,
        processes=arguments.processes,
        deadline=arguments.deadline,
        drain=arguments.drain,
    )
    key = _key(arguments.api_key_file)

    def ready(address: str, made: str | None) -> None:
        print(f"Regard serves at {address}; SIGTERM or Ctrl-C drains and ends it.", flush=True)
        if made is not None:
            print(
                f"regard: --host {arguments.host} lets other machines ask. They need this API key, made now: {made}\n"
                "Nothing is encrypted on the way: put a proxy with TLS before it.",
                file=sys.stderr,
                flush=True,
            )

    log_to_stderr(arguments.log)
    quiet_asyncio()
    try:
        listen(
            arguments.runs,
            host=arguments.host,
            port=arguments.port,
            device=arguments.device,
            limits=limits,
            key=key,
            names=arguments.allow_host,
            log=arguments.log,
            ready=ready,
        )
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise ValueError(
            f"cannot listen on {arguments.host} port {arguments.port}: {error.strerror}; choose another --port, "
            "or --port 0 for a free one"
        ) from error


def _key(file: str | None) -> str | None:
    """The API key of a file or of the environment."""
    if file is None:
        key, source = os.environ.get(KEY), KEY
    else:
        try:
            key, source = Path(file).read_text(encoding="utf-8").strip(), f"--api-key-file {file}"
        except OSError as error:
            raise ValueError(f"cannot read --api-key-file {file}: {error.strerror}") from error
    if key is not None and (len(key) < 16 or not key.isascii() or any(letter.isspace() for letter in key)):
        raise ValueError(f"{source} must have at least 16 characters of ASCII without spaces, got {len(key)}")
    return key
