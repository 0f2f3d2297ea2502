"""What is said while a command has nothing to say yet."""

from __future__ import annotations

import re
import threading

import pytest

from fdfo_client._waiting import waiting


def test_what_takes_long_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """After the first pause what is waited for now is said, with the seconds, again and again."""
    said, words = threading.Event(), iter(["one", "two"])

    def what() -> str:
        word = next(words, None)
        if word is None:
            said.set()
        return word or "three"

    with waiting(what, first_s=0.001, every_s=0.001):
        assert said.wait(10)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"\d+ s", "N s", line) for line in lines[:2]] == ["fdfo: one ... (N s)", "fdfo: two ... (N s)"]


def test_what_is_quick_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is said of what ends before, or once it is over."""
    with waiting("that"):
        pass
    with waiting("this", first_s=0.01) as over:
        over.set()
        assert not threading.Event().wait(0.03)
    assert capsys.readouterr().err == ""
