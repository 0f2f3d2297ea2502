"""The hooks that end or hang a worker cannot be there by accident."""

from __future__ import annotations

import sys

import pytest
import structlog.testing

from tests.worker.scripted import Driver, effort, make_loop, start
from worker_svc.denoise import DenoiseLoop
from worker_svc.fault_hook import EXIT_STATUS, HANG_TOKEN_ID, KILL_TOKEN_ID, loop_type


def test_without_the_variable_the_loop_is_the_real_one() -> None:
    """Nothing of the hook is in the way of a request."""
    assert loop_type({}) is DenoiseLoop


def test_with_the_variable_the_log_says_so_and_other_requests_run() -> None:
    """A warning at start; a request without the token is served."""
    with structlog.testing.capture_logs() as logs:
        ending = loop_type({KILL_TOKEN_ID: "50"})
    assert [(entry["event"], entry["log_level"], entry["token"]) for entry in logs] == [("test_hook", "warning", 50)]
    plain = make_loop()
    loop = ending(plain.runner, plain.config, plain.clock)
    assert Driver(loop).run(starts=[start("a", effort(2))]).work.forwards == 2


@pytest.mark.parametrize("prompt", [[50] + [5] * 40, [5] * 40 + [50]])
def test_the_token_ends_the_process(prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the prefix or in the block; at once, with the hook's own exit status."""
    monkeypatch.setattr("os._exit", sys.exit)
    plain = make_loop()
    loop = loop_type({KILL_TOKEN_ID: "50"})(plain.runner, plain.config, plain.clock)
    with pytest.raises(SystemExit) as ended:
        Driver(loop).run(starts=[start("a", prompt)])
    assert ended.value.code == EXIT_STATUS


def test_the_other_token_hangs_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with it waits for ever; a second variable does not disturb the first."""

    class Hung(Exception):
        pass

    def wait(_: object) -> None:
        raise Hung

    monkeypatch.setattr("threading.Event.wait", wait)
    plain = make_loop()
    loop = loop_type({KILL_TOKEN_ID: "50", HANG_TOKEN_ID: "51"})(plain.runner, plain.config, plain.clock)
    with pytest.raises(Hung):
        Driver(loop).run(starts=[start("a", [5] * 40 + [51])])
