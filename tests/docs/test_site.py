"""The documentation: its links, its navigation, its notebooks. `make docs` builds it whole."""

import ast
import builtins
import json
import operator
import pkgutil
import re
import tomllib
from pathlib import Path

import layers
import notebooks
import paths
import pytest
import reference
import site_check
import site_pages
import torch
import yaml
from folders import ROOT

import regard.tasks
from regard.core.shape import Shape
from regard.spec import REGISTRIES
from regard.tasks.translate import Translator

SLUG = re.compile(r"[^\w\- ]")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Every page of the site as Markdown, generated and written ones."""
    torch.set_num_threads(1)
    found = {path: text for path, text in site_pages.generated().items() if path.endswith(".md")}
    for path in paths.DOCS.glob("*.md"):
        found[path.name] = paths.relocate(path.read_text(encoding="utf-8"), f"docs/{path.name}", path.name)
    return found


@pytest.fixture(scope="module")
def config() -> dict:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.+?)\s*$", paths.FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in headings]
    return {re.sub(r"[\s-]+", "-", SLUG.sub("", heading).strip().lower()) for heading in plain}


def listed(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in listed(part)]


def test_links_lead_somewhere(pages):
    pictures = {f"{kind}/pictures/{file}.png" for kind, name in drawn_names() for file in drawn(kind, name)}
    wrong = []
    for page, text in pages.items():
        for _, _, target in paths.LINK.findall(paths.FENCE.sub("", text)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            place = str(Path("/", page).parent.joinpath(path).resolve())[1:] if path else page
            known = place in pages or place in pictures or (paths.DOCS / place).is_file()
            if not known or (anchor and anchor not in anchors(pages[place])):
                wrong.append(f"{page}: {target}")
    assert not wrong


def drawn_names() -> list[tuple[str, str]]:
    return [(kind, name) for kind in ("attention", "position") for name in regard.names(kind)]


def drawn(kind: str, name: str) -> list[str]:
    return list(layers.drawn_specs(kind, name))


def test_every_page_is_in_the_navigation_once(pages, config):
    nav = listed(site_pages.navigation(config["nav"]))
    assert sorted(nav) == sorted(pages)


@pytest.mark.parametrize("kind", ["attention", "feedforward", "position"])
def test_a_page_for_each_layer(pages, kind):
    for name in regard.names(kind):
        page = pages[f"{kind}/{name}.md"]
        # a long formula is wrapped
        assert "".join(REGISTRIES[kind].find(name).facts.formula.split()) in "".join(page.split())
        assert f"[`{name}`]({name}.md)" in pages[f"{kind}/index.md"]


def test_what_decoding_keeps_is_read_from_the_layer(pages):
    kept = pages["attention/linear.md"].split("## What decoding keeps")[1].split("##")[0]
    assert "| `[1, 4, 16, 16]` | `[1, 4, 16, 16]` |" in kept  # sums of keys times values, however long the text
    kept = pages["attention/softmax.md"].split("## What decoding keeps")[1].split("##")[0]
    assert "| `[1, 4, 8, 16]` | `[1, 4, 64, 16]` |" in kept
    assert "## What decoding keeps" not in pages["attention/fnet.md"]


def test_the_reference_has_every_public_name(pages):
    for path in reference.public_objects():
        assert f"::: {path}\n" in pages["reference/index.md"]
    modules = re.findall(r"^::: (\S+)$", "\n".join(pages.values()), re.MULTILINE)
    for name in (
        "regard.tasks.translate.translator",
        "regard.layers.attention.base",
        "regard.core.rows",
        "regard.draw",
    ):
        assert name in modules
    assert not [name for name in modules if name.startswith(("regard.cli", "regard.layers.attention.local"))]


def test_the_command_line_has_every_verb_and_task(pages):
    page = pages["reference/command-line.md"]
    headings = re.findall(r"^#+ regard (.+)$", page, re.MULTILINE)
    assert {"list", "draw", "train", "resume", *(f"train {task}" for task in regard.tasks.TASKS)} <= set(headings)
    assert all(f"usage: regard {heading} " in page for heading in headings)
    assert "--data.maximum_length" in page.split("### regard train classify")[1]


def test_links_are_moved_with_their_page():
    text = "[a](docs/tour.md#x), [b](LICENSE), ![c](docs/images/page-heads.png), [d](https://example.org), `[e](f)`"
    moved = paths.relocate(text.rsplit(",", 1)[0], "README.md", "index.md")
    assert moved == "[a](tour.md#x), b (`LICENSE`), ![c](images/page-heads.png), [d](https://example.org)"
    assert (
        paths.relocate("[a](../../../docs/tour.md)", "regard/bundled/english/README.md", "bundled/english.md")
        == "[a](../tour.md)"
    )
    assert paths.relocate("```\n[a](b)\n```\n", "README.md", "index.md") == "```\n[a](b)\n```\n"
    with pytest.raises(ValueError, match=r"links to docs/nothing\.md.*mend"):
        paths.relocate("[a](docs/nothing.md)", "README.md", "index.md")


@pytest.mark.parametrize(
    "loads",
    [
        '<script src="https://unpkg.com/x.js"></script>',
        "<script defer src=//cdn.example/x.js></script>",
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<link rel="preconnect" href="https://fonts.example" crossorigin>',
        '<img alt="a" src="http://example.org/a.png">',
        "<style>@import 'https://example.org/a.css'</style>",
        "<style>a { background: url(https://example.org/a.png) }</style>",
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(tmp_path, loads):
    (tmp_path / "a").mkdir()
    page = tmp_path / "a" / "index.html"
    page.write_text(
        '<a href="https://example.org">x</a><link rel="canonical" href="https://example.org/">'
        '<script src="../b.js"></script><img src="data:image/svg+xml,http://www.w3.org/2000/svg">'
    )
    site_check.check(tmp_path)
    page.write_text(page.read_text() + loads)
    with pytest.raises(SystemExit, match=r"a/index.html loads (https?:)?//"):
        site_check.check(tmp_path)


CODE = re.compile(r"`([^`\n]+)`")
READ_FIRST = ("docs/tour.md", "docs/adding.md")  # pages whose names must all be those of the code


def test_files_that_the_docs_name_are_there():
    wrong = []
    for path in [*paths.DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`((?:regard|tests|bench|docs)/[\w./-]*)", path.read_text(encoding="utf-8")):
            wrong += [] if (ROOT / name.rstrip(".")).exists() else [f"{path.name}: {name}"]
    assert not wrong


@pytest.mark.parametrize("page", READ_FIRST)
def test_files_named_by_their_last_part_are_in_the_folder_named_before(page):
    """`softmax.py` is in the folder of the last whole path, or beside that folder."""
    folder, wrong = ROOT, []
    for code in CODE.findall(paths.FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
        if re.fullmatch(r"(regard|tests|docs|bench)/[\w./-]*", code):
            folder = ROOT / code if code.endswith("/") else (ROOT / code).parent
        elif re.fullmatch(r"[a-z]\w*\.py", code) and not any(
            (place / code).is_file() for place in (folder, folder.parent)
        ):
            wrong.append(f"{code} is not in {folder.relative_to(ROOT)}")
    assert not wrong


def defined_names() -> dict[str, set[str]]:
    """All names that the package and its tests define, under ""; and under each class those of its body."""
    found: dict[str, set[str]] = {"": {*dir(builtins)}}
    for path in [*ROOT.glob("regard/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        found[""].add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = names_of(node)
            found[""] |= names
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(*(names_of(part) for part in ast.walk(node)))
    return found


def names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.id if isinstance(node, ast.Name) else node.attr}
    # a variable of the environment
    is_variable = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("REGARD_")
    return {node.value} if is_variable else set()


def test_names_that_the_docs_mention_are_defined():
    """`name`, `Class.method`, `name(...)` and `name=value`: a renamed one is found here."""
    defined, wrong = defined_names(), []
    for page in READ_FIRST:
        for code in CODE.findall(paths.FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
            match = re.fullmatch(r"([A-Za-z_]\w*)(?:\.(?!py$)([A-Za-z_]\w*))?(?:\(.*\)| ?= ?.+)?", code)
            if not match or match[1] in ("regard", "torch"):
                continue
            name, attribute = match[1], match[2]
            if name not in defined[""] or (attribute and attribute not in defined.get(name, defined[""])):
                wrong.append(f"{page}: {code}")
    assert not wrong


def test_python_names_of_the_docs_can_be_imported():
    """Dotted paths in `code`, and what the examples import; `regard.X.*` of before is in the changelog only."""
    wrong = []
    for path in [*paths.DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"`(regard(?:\.\w+)+)", text)
        for module, imported in re.findall(r"^\s*from (regard[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            names += [f"{module}.{name.strip()}" for name in imported.split(",")]
        for name in names:
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{path.name}: {name} ({error})")
    assert not wrong


def test_names_that_the_tour_gives_are_there():
    import regard.core.rows
    import regard.page.maps
    import regard.spec
    from regard.layers.attention.linear import Linear

    tour = (paths.DOCS / "tour.md").read_text(encoding="utf-8")
    for module, names in {
        regard.core.rows: ("pack", "unpack", "Mask.dense", "Mask.sdpa", "Mask.where"),
        regard.page.maps: ("rows",),
        regard.spec: ("Registry.build",),
    }.items():
        for name in names:
            assert f"`{name}`" in tour
            assert callable(operator.attrgetter(name)(module))
    layer = regard.attention("linear", width=6, heads=2, role="causal")
    assert isinstance(layer, Linear)
    assert [list(part.shape) for part in layer.zero(1, torch.float32, torch.device("cpu"))] == [[1, 2, 3, 3], [1, 2, 3]]


def test_the_translation_on_the_front_page_is_that_of_the_bundled_translator():
    torch.set_num_threads(1)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence, translation = re.search(r'\$ echo "(.+)" \| regard translate\n(.+)\n', readme).groups()
    assert Translator.load(device="cpu")(sentence) == translation


def python_of(page):
    """All Python of a page, one block after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return compile("".join(blocks), page, "exec")


def test_the_python_of_the_front_page_runs_as_it_is_printed():
    torch.set_num_threads(1)
    namespace: dict = {}
    with torch.random.fork_rng(devices=[]):
        exec(python_of("README.md"), namespace)
    assert namespace["y"].shape == (2, 8, 300, 64)
    assert namespace["maps"].shape == (2, 8, 300, 300)


def test_the_python_of_the_page_about_layers_runs():
    torch.set_num_threads(1)
    ids, keep = torch.randint(3, 8000, (2, 6)), torch.tensor([[True] * 20, [True] * 15 + [False] * 5])
    namespace: dict = {"torch": torch, "keep": keep, "memory": torch.randn(2, 7, 256), "memory_keep": keep[:, :7]}
    namespace |= {name: torch.randn(2, 8, 20, 64) for name in "qkv"}
    namespace |= {"x": torch.randn(2, 20, 512), "prompt": torch.randn(2, 20, 512), "token": torch.randn(2, 1, 512)}
    namespace |= {"source": ids, "source_keep": keep[:, :6], "target": ids, "target_keep": keep[:, :6]}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        exec(python_of("docs/layers.md"), namespace)
    assert namespace["y"].shape[0] == 2


@pytest.mark.parametrize(("name", "roles"), [("Warm", ("self", "causal", "cross")), ("Retention", ("causal",))])
def test_the_mechanisms_of_adding_compute_their_formula(name, roles):
    """The suite proves a mechanism by much more; here: the formula, and decoding in any split."""
    text = (paths.DOCS / "adding.md").read_text(encoding="utf-8")
    [code] = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if f"class {name}(" in code]
    namespace: dict = {"__name__": "example"}
    exec(compile(code, "adding.md", "exec"), namespace)
    assert namespace[name].facts.roles == roles
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = namespace[name](Shape.of(width=12, heads=3, role="causal")).double()
        x = torch.randn(2, 9, 12, dtype=torch.float64)
    y = layer(x)
    torch.testing.assert_close(y[0], layer.reference(x[0]), rtol=1e-6, atol=1e-6)
    state, parts = layer.start(2), []
    for part in x.split([4, 1, 4], 1):
        o, state = layer.extend(part, state)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), y)


@pytest.mark.parametrize("name", paths.NOTEBOOKS)
def test_notebook(name, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        page, files = notebooks.as_page(name)
    assert page.startswith("# ")
    assert all(
        content.startswith(b"\x89PNG" if file.endswith(".png") else b"<!doctype") for file, content in files.items()
    )
    assert all(f'"{file}"' in page or f"({file})" in page for file in files)
    cells = json.loads((paths.DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")  # the site has them fresh


def test_a_notebook_cell_shows_its_last_value():
    namespace: dict = {}
    shown = notebooks._run(notebooks.Cell("code", "print('a')\nx = 2\nx + 1"), "here", namespace)
    assert shown.text == "a\n3"
    assert notebooks._run(notebooks.Cell("code", "x;"), "here", namespace).text == ""
    with pytest.raises(NameError):
        notebooks._run(notebooks.Cell("code", "unknown"), "here", namespace)


def test_one_version_number():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "regard.__version__"}
    assert "version" not in project["project"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_pre_commit_has_the_pinned_linter():
    [hooks] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert hooks["rev"] == f"v{pins['ruff']}"


def test_the_workflow_calls_the_commands_of_the_readme():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    commands = workflow["jobs"]["commands"]["strategy"]["matrix"]["command"]
    assert {"make demo", "make test"} <= set(commands)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {command.removeprefix("make ") for command in commands} <= targets
