"""Hooks of mkdocs: they add the generated pages, and change links so that they work on the site."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import site_check
import site_pages
from paths import relocate


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = site_pages.navigation(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, content in site_pages.generated(pictures=True).items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    # links of generated pages are right already
    if page.file.generated_by is not None:
        return markdown
    return relocate(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    site_check.check(Path(config.site_dir))
