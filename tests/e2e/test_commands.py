"""`fdfo info`, `fdfo top` and `fdfo doctor` on services that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fdfo_client import Client, cli
from tests.e2e.served import MODEL, serving


def test_what_they_tell_of_running_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All three see the same scheduler and worker, and what a request left behind; nothing fails."""

    def said_by(*words: str) -> Any:
        assert cli.main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    with serving(tmp_path / "log") as served:
        with Client(served.target) as client:
            usage = client.generate("x", max_new_tokens=40, ignore_eos=True).usage
        info = said_by("info", "--target", served.target)
        view = said_by("top", "--once", "--interval", "0.2", "--target", served.target)
        checked = said_by(
            "doctor", "--model-path", str(MODEL), "--target", served.target, "--workers", served.worker_target
        )
    counters = info["counters"]
    assert (counters["published_tokens"], counters["requests_finished"]) == (usage.completion_tokens, 1)
    assert (info["workers"][0]["device"], info["workers"][0]["page_size"]) == ("cpu", 32)
    (scheduler,) = view["schedulers"]
    assert scheduler["info"]["counters"] == counters and scheduler["rates"]["tokens_per_s"] == 0
    pages = view["workers"][0]
    assert pages["pages_held"] == 0 and pages["pages_cached"] + pages["pages_free"] == pages["pages_total"]
    findings = {(finding["what"], finding["level"]) for finding in checked["findings"]}
    for what in (f"scheduler {served.target}", f"worker {served.worker_target}", "memory", "torch"):
        assert (what, "OK") in findings
    assert checked["ok"]
