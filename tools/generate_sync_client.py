"""Make the blocking client from the public methods of the async one (`make sync-client`)."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "fdfo_client"
SOURCE = FOLDER / "_async_client.py"
TARGET = FOLDER / "_sync_client.py"

HEAD = '''"""The blocking client. Made by tools/generate_sync_client.py from `_async_client.py`: `make sync-client`."""
'''
OPENING = (
    "Talks to one or several schedulers. Any number of threads may use it at once. Close it when done, or use `with`."
)
# What stands in Blocking, as it is another thing there.
NOT_THESE = ("close",)


def generate() -> str:
    """The text of `_sync_client.py`."""
    module = ast.parse(SOURCE.read_text())
    imports = [ast.unparse(node) for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    source = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "AsyncClient")
    lines = [
        HEAD,
        *imports,
        "from collections.abc import Generator",
        "from fdfo_client._async_client import AsyncClient",
        "from fdfo_client._blocking import Blocking",
        "class Client(Blocking):",
        *_indented(_docstring(source, OPENING)),
    ]
    for node in source.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            lines += _indented(_method(node))
    return _formatted("\n".join(lines))


def _is_public(name: str) -> bool:
    """`close` is another thing for the blocking client, which has it from Blocking."""
    return name == "__init__" or not (name.startswith("_") or name == "close")


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    yield from (f"@{ast.unparse(decorator)}" for decorator in node.decorator_list)
    returns = "" if node.returns is None else ast.unparse(node.returns)
    is_stream = returns.startswith("AsyncGenerator[")
    if is_stream:
        returns = returns.replace("AsyncGenerator[", "Generator[").replace(", None]", ", None, None]")
    yield f"def {node.name}({ast.unparse(node.args)}) -> {returns}:"
    if ast.get_docstring(node):
        yield from _indented(_docstring(node))
    call = f"{node.name}({', '.join(_passed_on(node.args))})"
    if node.name == "__init__":
        yield f"    super().__init__(AsyncClient{call.removeprefix(node.name)})"
    elif node.decorator_list:
        yield f"    return self._client.{node.name}"
    else:
        yield f"    return self._{'iterate' if is_stream else 'run'}(self._client.{call})"


def _passed_on(arguments: ast.arguments) -> Iterator[str]:
    yield from (argument.arg for argument in arguments.args[1:])
    yield from (f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs)
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"


def _docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, opening: str | None = None) -> list[str]:
    """Its lines, quoted; with another first line where one is given."""
    first, *rest = inspect.cleandoc(ast.get_docstring(node) or "").splitlines()
    return ['"""' + (opening or first), *rest, '"""']


def _indented(lines: list[str] | Iterator[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def _formatted(text: str) -> str:
    """Without the imports that are not needed, in the project's form."""
    ruff = [str(Path(sys.executable).parent / "ruff")]
    for arguments in (["format"], ["check", "--fix", "--quiet", "--select", "F401,I"], ["format"]):
        command = [*ruff, *arguments, "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    TARGET.write_text(generate())
