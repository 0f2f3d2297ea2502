"""Both services and the command as processes with everything on, and what their logs hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fdfo_client import Client, InvalidRequest, Unauthenticated
from tests.e2e.served import ROOT, serving
from tests.security.certificates import Authority

KEY, WRONG = "key-of-anna-7f3a9c5511", "key-of-nobody-e0d1b2"
PROMPT = "Repeat: Zanzibar Quetzal"
WRONG_PROMPT = "Xylophone 4711"


def test_no_secret_is_logged(tmp_path: Path) -> None:
    """At the most talkative level, a request with TLS, client certificate, key and prompt leaves nothing of key, prompt
    and private key in the logs of both services and of `fdfo`, nor in their command lines; nor do refused ones."""
    authority = Authority(tmp_path)
    cert_file, key_file = authority.issue("service")
    keys, own = tmp_path / "keys", tmp_path / "own"
    keys.write_text(f"anna:{KEY}\n")
    own.write_text(KEY)
    log = tmp_path / "log"
    flags = {
        "--tls-cert-file": cert_file,
        "--tls-key-file": key_file,
        "--tls-client-ca-file": authority.ca_file,
        "--api-keys-file": keys,
        "--worker-tls-ca-file": authority.ca_file,
        "--worker-tls-cert-file": cert_file,
        "--worker-tls-key-file": key_file,
        "--worker-api-key-file": own,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    with serving(log, *words, "--log-level", "debug") as served:
        environment = {
            "FDFO_API_KEY": KEY,
            "FDFO_TLS_CA_FILE": str(authority.ca_file),
            "FDFO_TLS_CERT_FILE": str(cert_file),
            "FDFO_TLS_KEY_FILE": str(key_file),
        }
        command = [sys.executable, "-m", "fdfo_client", "generate", "--json", "--target", served.target, PROMPT]
        done = subprocess.run(
            command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["token_ids"]
        tls = authority.tls((cert_file, key_file))
        with Client(served.target, tls=tls, api_key=WRONG) as client, pytest.raises(Unauthenticated):
            client.generate(WRONG_PROMPT)
        with Client(served.target, tls=tls, api_key=own) as client, pytest.raises(InvalidRequest):
            client.generate(WRONG_PROMPT, max_new_tokens=10**6)
        pid = served.process.pid
        pids = [str(pid), *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    written = log.read_text() + done.stderr
    assert "request_left" in written and "unauthenticated" in written, "the log is there"
    assert "caller=anna" in written
    for secret in (KEY, WRONG, PROMPT, "Zanzibar", WRONG_PROMPT, "Xylophone", key_file.read_text().splitlines()[1]):
        assert secret not in written
        assert not any(secret in line for line in lines)
    assert len(lines) == 3, "fdfo serve, a worker, a scheduler"
