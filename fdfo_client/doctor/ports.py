"""Whether a service could listen on a port of this machine, and who does."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from fdfo_client.doctor.finding import Finding, ok, warn

LISTENS = "0A"  # in /proc/net/tcp


def check_port(port: int, fdfo_service: str | None, host: str = "127.0.0.1") -> Finding:
    """`fdfo_service`: what answers there as one of ours, such as "a scheduler"; None when nothing does."""
    what = f"port {port}"
    if fdfo_service is not None:
        return ok(what, f"{fdfo_service} answers")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return warn(what, f"cannot be listened on: {error.strerror}", "give the services another --port")
            return warn(what, f"taken by {owner_of(port)}", "stop it, or give the services another --port")
    return ok(what, "free")


def owner_of(port: int, proc: Path = Path("/proc")) -> str:
    """The process that listens there, as far as this user may see it."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return "a process that is not to be seen from here"
