"""Chat templates: the environment that they are written for, and contents that a template can look into."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from common.folder_files import ModelFolderError
from common.tokenizer_files import read_chat_templates

_ESCAPED_STAND_IN = re.compile(r"(?<!\\)\\ue000(\d+:\d+)\\ue001")


def stand_in(name: str) -> str:
    """What stands in a rendered prompt for a client's special-token text; `name`: two numbers with a colon between."""
    return f"\ue000{name}\ue001"


class ChatTemplates:
    """The templates of a model folder. Raises ModelFolderError, in one line, for one that does not parse."""

    def __init__(self, path: Path | str, now: Callable[[], datetime.datetime]) -> None:
        self._sources = read_chat_templates(path)
        self._compiled = {name: _compile(path, source, now) for name, source in self._sources.items()}

    def choose(self, has_tools: bool) -> tuple[str, jinja2.Template] | None:
        """Source and template: with tools the one named "tool_use" where there is one, as in transformers. None of a
        model without templates."""
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        return (self._sources[name], self._compiled[name]) if self._sources.get(name) else None


class Content(str):
    """A client's text with stand-ins for special tokens, which a template searches and cuts as if it had none.

    hide: puts the stand-ins into the template's own words, so that they are found.
    """

    _hide: Callable[[str], str]

    @classmethod
    def of(cls, text: str, hide: Callable[[str], str]) -> Self:
        content = cls(text)
        content._hide = hide
        return content

    def __str__(self) -> str:  # filters take it so
        return self


def _searching(name: str) -> Callable[..., Any]:
    """The method of str, which takes what it looks for hidden and gives texts that can be searched in turn."""
    method = getattr(str, name)

    def call(self: Content, *args: Any, **kwargs: Any) -> Any:
        def again(found: Any) -> Any:
            if isinstance(found, str):
                return Content.of(found, self._hide)
            return type(found)(map(again, found)) if isinstance(found, list | tuple) else found

        return again(method(self, *(self._hide(arg) if isinstance(arg, str) else arg for arg in args), **kwargs))

    call.__name__ = name
    return call


for _name in (
    *("__contains__", "__getitem__", "count", "endswith", "find", "index", "lstrip", "partition", "removeprefix"),
    *("removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("startswith", "strip"),
):
    setattr(Content, _name, _searching(_name))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what training learns to say. It changes nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compile(path: Path | str, source: str, now: Callable[[], datetime.datetime]) -> jinja2.Template:
    """The environment that Hugging Face chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Unlike jinja's own, without HTML escapes. What stands for special text stays as it is.
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return _ESCAPED_STAND_IN.sub(lambda match: stand_in(match[1]), text) if ensure_ascii else text

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    functions: Mapping[str, Callable[..., Any]] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.filters["tojson"] = tojson
    environment.globals.update(functions)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelFolderError(f"{path}: the chat template does not parse: {' '.join(str(error).split())}") from error
