"""Write the protocol reference of the site from the comments in protos/ (part of `make protos`).

A page for each package. Indented lines of a comment become a block of code, the rest is Markdown.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).parent / "buf"
PAGES = {
    "fdfo.scheduler.v1": ("docs/protocol-scheduler.md", "Protocol: what clients call"),
    "fdfo.worker.v1": ("docs/protocol-worker.md", "Protocol: what schedulers call"),
}

# Where a comment belongs in the descriptor: numbers of fields and places in lists, as descriptor.proto has them.
Where = tuple[int, ...]
MESSAGE, ENUM, SERVICE, SYNTAX = 4, 5, 6, 12  # of a file
FIELD, ONEOF, VALUE, METHOD = 2, 8, 2, 2  # of a message, a message, an enum, a service
SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


def pages() -> dict[str, str]:
    """Path in the repository -> text, for each package."""
    command = [str(BUF), "build", "--as-file-descriptor-set", "--output", "-"]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    files = FileDescriptorSet.FromString(built.stdout).file
    made = {}
    for package, (path, title) in PAGES.items():
        parts = [part for file in files if file.package == package for part in _File(file).parts()]
        made[path] = "\n\n".join([f"# {title}", *parts]) + "\n"
    return made


class _File:
    """One .proto file and its comments."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}

    def parts(self) -> Iterator[str]:
        file = self._file
        yield f"## {file.name.rpartition('/')[2]}"
        yield f"Package `{file.package}`, made by `make protos` from the comments of `protos/{file.name}`."
        yield self._text((SYNTAX,))
        for place, service in enumerate(file.service):
            yield from self._service(service, (SERVICE, place))
        for place, message in enumerate(file.message_type):
            yield from self._message(message, (MESSAGE, place))
        for place, enum in enumerate(file.enum_type):
            yield from self._enum(enum, (ENUM, place))

    def _service(self, service: ServiceDescriptorProto, where: Where) -> Iterator[str]:
        yield f"### {service.name}"
        yield self._text(where)
        for place, method in enumerate(service.method):
            yield f"### {method.name}"
            stream = "a stream of " if method.server_streaming else ""
            yield f"Takes {_link(method.input_type)}, gives {stream}{_link(method.output_type)}."
            yield self._text((*where, METHOD, place))

    def _message(self, message: DescriptorProto, where: Where) -> Iterator[str]:
        yield f"### {message.name}"
        yield self._text(where)
        if message.field:
            rows = ["| field | type | number | meaning |", "|---|---|---|---|"]
            for place, field in enumerate(message.field):
                what = self._line((*where, FIELD, place))
                rows.append(f"| `{field.name}` | {_type(field, message)} | {field.number} | {what} |")
            yield "\n".join(rows)
        named = {f.oneof_index for f in message.field if f.HasField("oneof_index") and not f.proto3_optional}
        for place in sorted(named):
            yield f"One of `{message.oneof_decl[place].name}`: {self._line((*where, ONEOF, place))}"

    def _enum(self, enum: EnumDescriptorProto, where: Where) -> Iterator[str]:
        yield f"### {enum.name}"
        yield self._text(where)
        rows = ["| value | number | meaning |", "|---|---|---|"]
        for place, value in enumerate(enum.value):
            rows.append(f"| `{value.name}` | {value.number} | {self._line((*where, VALUE, place))} |")
        yield "\n".join(rows)

    def _text(self, where: Where) -> str:
        """The comment as paragraphs and blocks of code."""
        lines: list[str] = []
        in_code = False
        for line in [*self._comments[where].rstrip().splitlines(), " "]:
            if in_code != line.startswith("   ") and (line.strip() or in_code):
                lines += ["```"] if in_code else ["", "```"]
                in_code = not in_code
            lines.append(line.removeprefix("   ") if in_code else line.removeprefix(" "))
        return "\n".join(lines).strip().replace("\n\n\n", "\n\n")

    def _line(self, where: Where) -> str:
        """The comment as a cell of a table."""
        return " ".join(self._comments[where].split()).replace("|", "\\|")


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f".{message.name}.{entry.name}"):
            key, value = (_type(part, entry) for part in entry.field)
            return f"map of {key} to {value}"
    name = _link(field.type_name) if field.type_name else SCALARS[field.type]
    if field.HasField("oneof_index") and not field.proto3_optional:
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _link(type_name: str) -> str:
    """A type of the same package, which stands on the same page."""
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text)
