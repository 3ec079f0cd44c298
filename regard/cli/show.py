"""`regard show`: the page of one or several runs, served on this machine or written into one file."""

import argparse
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from regard.tasks.command import AddVerb

if TYPE_CHECKING:
    from regard.page.engine import Engine
    from regard.page.images import ImageSubject
    from regard.page.subjects import Subject

BUNDLED = "shipped"  # what the page calls the translator that is bundled with Regard, also in its addresses


def add_verbs(verb: AddVerb) -> None:
    added = verb(
        "show",
        show,
        "open a local page: translate, and see what attends to what in texts and images, by step, head and mechanism",
        [
            "regard show",
            "regard show runs/translate runs/other --port 8000",
            'regard show runs/translate --text "Where is the station?" --out page.html',
            "regard show runs/images --image cat.jpg --out cat.png",
        ],
    )
    added.add_argument("runs", metavar="RUN", nargs="*", help="run folders to show, beside the bundled ones")
    added.add_argument("--text", help="text to open the page with")
    added.add_argument("--image", metavar="FILE", help="image to open the page with, for a run that reads images")
    added.add_argument(
        "--out",
        metavar="FILE",
        help="write one HTML file that needs no server, instead of serving the page; of an image also .png, .svg, .pdf",
    )
    added.add_argument(
        "--place", choices=("encoder", "decoder", "cross", "aligner"), help="attention to draw with --out"
    )
    added.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    added.add_argument("--port", type=int, default=8642, help="port; 0: any free one (default: 8642)")
    added.add_argument("--device", default="cpu", help="device: cpu, cuda ... (default: cpu)")
    added.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")


def show(arguments: argparse.Namespace) -> None:
    """regard show"""
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port must be from 0 to 65535, got {arguments.port}")
    folders: list[str | None] = [*arguments.runs]
    if not folders:
        folders = [_bundled_images() if arguments.image is not None else None]
    if arguments.out is not None:
        _write_page(arguments, folders)
        return
    if arguments.place is not None:
        raise ValueError("--place needs --out: on the page, choose the view there")
    engine, first = _open_engine(folders, arguments.device)
    state = {"run": first} | ({"text": arguments.text} if arguments.text else {})
    if arguments.image is not None:
        data = _read_image(arguments.image)
        engine.viewer(first).decode(data, arguments.image)  # an error ends the verb here
        state["image"] = engine.keep_image(data)
    _serve(engine, arguments, state)


def _bundled_images() -> str | None:
    """The folder of the classifier of images that is bundled with Regard, if there is one."""
    from regard.tasks.images.verbs import BUNDLED as NAME
    from regard.tasks.load import BUNDLED as FOLDER

    return str(FOLDER / NAME) if (FOLDER / NAME).is_dir() else None


def _read_image(file: str) -> bytes:
    from regard.page.images import MOST_UPLOADED

    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    if len(data) > MOST_UPLOADED:
        raise ValueError(
            f"{file} has {len(data):,} bytes, the page takes at most {MOST_UPLOADED:,}: scale it down first"
        )
    return data


def _write_page(arguments: argparse.Namespace, folders: list[str | None]) -> None:
    """Writes one HTML file that needs no server."""
    from regard.page.notebook import still
    from regard.page.subjects import Subject, open_run

    if len(folders) > 1:
        raise ValueError(f"--out writes a page of one run, got {len(folders)}: name one")
    if arguments.image is not None:
        _write_image(arguments, folders[0])
        return
    if arguments.text is None:
        raise ValueError(
            '--out needs --text, what the model is to read, such as --text "Where is the station?", or --image for a '
            "run that reads images"
        )
    if not arguments.text.strip():
        raise ValueError("--text is blank: give the model some words to read")
    subject = open_run(folders[0], _name(folders[0]), arguments.device)
    if not isinstance(subject, Subject):
        raise ValueError(f"{subject.name} reads images and no texts: give --image, or a run that reads texts")
    page = still(subject, arguments.text, place=arguments.place)
    try:
        Path(arguments.out).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {arguments.out}: {error.strerror}") from error
    print(f"{arguments.out}: open it in a browser")


def _write_image(arguments: argparse.Namespace, folder: str | None) -> None:
    """Writes an image and its maps: one HTML file, or a picture."""
    from regard import draw
    from regard.page.images import ImageSubject
    from regard.page.notebook import still_image
    from regard.page.printed import image_picture
    from regard.page.subjects import open_run

    is_picture = Path(arguments.out).suffix.lower() in draw.SUFFIXES
    if is_picture:
        draw.check(arguments.out)
    data = _read_image(arguments.image)
    subject = open_run(folder, _name(folder), arguments.device)
    if not isinstance(subject, ImageSubject):
        raise ValueError(f"{subject.name} reads texts and no images: give --text, or a run that reads images")
    if is_picture:
        picture = image_picture(subject, subject.see(subject.decode(data, arguments.image)))
        print(f"{draw.save(picture, arguments.out)}: {arguments.image} and its maps")
        return
    page = still_image(subject, data, Path(arguments.image).name)
    try:
        Path(arguments.out).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {arguments.out}: {error.strerror}") from error
    print(f"{arguments.out}: open it in a browser")


def _open_engine(folders: list[str | None], device: str) -> "tuple[Engine, str]":
    """What answers the page, with every run opened, and the name of the first."""
    from regard.core.brief import in_brief_thread
    from regard.page.engine import Engine
    from regard.page.subjects import open_run
    from regard.training.run import Run

    subjects: dict[str, Callable[[], Subject | ImageSubject]] = {}
    images = _bundled_images()
    bundled: list[str | None] = [None] if images is None else [None, images]
    for folder in dict.fromkeys([*folders, *bundled]):
        name = _name(folder)
        while name in subjects:
            name += "+"
        if folder is not None:
            Run.open(folder)
        subjects[name] = lambda folder=folder, name=name: open_run(folder, name, device)
    engine = Engine(subjects)
    # a run that cannot be read ends the verb here, with the whole message
    for name in subjects:
        # the server computes in threads of its own
        in_brief_thread(lambda name=name: engine.subject(name))
    return engine, next(iter(subjects))


def _serve(engine: "Engine", arguments: argparse.Namespace, state: dict[str, str]) -> None:
    """Serves the page until Ctrl-C; `state` is what the page opens with."""
    from regard.page.server import is_loopback, serve

    def ready(address: str) -> None:
        address += "#" + urlencode(state)
        print(f"Regard is at {address}\nCtrl-C ends it.", flush=True)
        if not arguments.no_browser and sys.stdout.isatty():
            threading.Timer(0.5, webbrowser.open, [address]).start()

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
    return BUNDLED if folder is None else Path(folder).resolve().name
