"""Numbers as a person reads them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Its two largest units: 12 s, 3 min, 2 h 5 min, 4 d 1 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def size(num_bytes: float) -> str:
    """In MiB, or GiB from one on."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def count(number: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
