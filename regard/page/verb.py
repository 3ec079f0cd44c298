"""`regard show`."""

import argparse
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

from regard.page.engine import Engine
from regard.page.notebook import still
from regard.page.subjects import Subject, open_run
from regard.training.run import Run

SHIPPED = "shipped"


def show(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port must be from 0 to 65535, got {arguments.port}")
    folders: list[str | None] = [*arguments.runs] or [None]
    if arguments.out is not None:
        if arguments.text is None:
            raise ValueError('--out needs --text, what the model is to read, such as --text "Where is the station?"')
        if not arguments.text.strip():
            raise ValueError("--text is blank: give the model some words to read")
        if len(folders) > 1:
            raise ValueError(f"--out writes a page of one run, got {len(folders)}: name one")
        subject = open_run(folders[0], _name(folders[0]), arguments.device)
        made = still(subject, arguments.text, place=arguments.place)
        try:
            Path(arguments.out).write_text(made, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {arguments.out}: {error.strerror}") from error
        print(f"{arguments.out}: open it in any browser")
        return
    if arguments.place is not None:
        raise ValueError("--place is for --out: on the page, choose the view")
    opened: dict[str, Callable[[], Subject]] = {}
    for folder in dict.fromkeys([*folders, None]):
        name = _name(folder)
        while name in opened:
            name += "+"
        if folder is not None:
            Run.open(folder)
        opened[name] = lambda folder=folder, name=name: open_run(folder, name, arguments.device)
    engine = Engine(opened)
    state = {"run": next(iter(opened))} | ({"text": arguments.text} if arguments.text else {})

    def ready(address: str) -> None:
        address += "#" + urlencode(state)
        print(f"Regard is at {address}\nCtrl-C ends it.", flush=True)
        if not arguments.no_browser and sys.stdout.isatty():
            threading.Timer(0.5, webbrowser.open, [address]).start()

    # what cannot be read is said here, in full, and not by the page
    for name in opened:
        engine.subject(name)
    # imported late: only serving needs it
    from regard.page.server import is_loopback, serve

    if not is_loopback(arguments.host):
        print(
            f"regard: --host {arguments.host} lets other machines reach this page. Whoever has the address below, with "
            "its token, can read the runs it shows and use their models; nothing is encrypted on the way.",
            file=sys.stderr,
            flush=True,
        )
    try:
        serve(engine, arguments.host, arguments.port, ready)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {arguments.host} port {arguments.port}: {error.strerror}; choose another --port, "
            "or --port 0 for a free one"
        ) from error


def _name(folder: str | None) -> str:
    return SHIPPED if folder is None else Path(folder).resolve().name
