"""Hooks of the site: the start page is README.md, and links to files outside of docs go to where they are shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the start page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links out of docs into plain text, which says where the file lies."""

    def told(match: re.Match[str]) -> str:
        name, target = match.groups()
        path, _, _ = target.partition("#")
        here = (Path(config.docs_dir) / page.file.src_uri).parent
        is_inside = path == "" or (here / path).resolve().is_relative_to(Path(config.docs_dir).resolve())
        known = files.get_file_from_path(str((Path(page.file.src_uri).parent / path).as_posix()))
        return match.group(0) if "://" in target or (is_inside and (known is not None or path == "")) else f"{name} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", told, markdown)
