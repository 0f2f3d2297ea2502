"""A hook of mkdocs (mkdocs.yml): links that leave docs/ become the path, as the site has no copy of those files."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((\.\./[^)#\s]*)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """The page's text with `[words](../file)` as "words (`file`)" where file is outside docs/."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (ROOT / folder / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        path = target.relative_to(ROOT).as_posix()
        words = link[1].strip("`")
        return f"`{path}`" if words == path else f"{link[1]} (`{path}`)"

    return LINK.sub(shown, markdown)
