"""The component openai-gateway: the real gateway finds scheduler pods as its manifest tells it to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.deploy.manifests import Object, build, of_kind, tool, workloads
from tests.e2e.served import serving

START_S = 40.0
NAMESPACE = "fdfo"


def pod_of(labels: object, address: str) -> Object:
    """A pod as the API tells it, ready at an address."""
    metadata = {"name": "scheduler-0", "namespace": NAMESPACE, "uid": "1", "resourceVersion": "1", "labels": labels}
    status = {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": status}


@contextlib.contextmanager
def kubernetes_api(pod: Object, asked: list[urllib.parse.ParseResult]) -> Iterator[str]:
    """The part of the API that lists and watches pods; yields its URL, and notes what is asked."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

        def do_GET(self) -> None:
            asked.append(urllib.parse.urlparse(self.path))
            watches = "watch=true" in self.path
            listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [pod]}
            content = {"type": "ADDED", "object": pod} if watches else listed
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode() + b"\n")
            self.wfile.flush()
            if watches:
                over.wait(START_S)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def kubeconfig(url: str) -> str:
    context = {"cluster": "here", "user": "nobody", "namespace": NAMESPACE}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [{"name": "here", "context": context}],
            "current-context": "here",
        }
    )


def get(url: str, message: object = None) -> Any:
    data = None if message is None else json.dumps(message).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        body = reply.read()
    return json.loads(body) if body[:1] == b"{" else body


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_the_gateway_finds_scheduler_pods(tmp_path: Path) -> None:
    """With the manifest's arguments the gateway asks the API for nothing but what its Role allows, finds the scheduler
    by its pod's labels, and a chat goes through."""
    objects = build("overlays/multi-gpu")
    deployed = {one.name: one for one in workloads(objects)}
    (role,) = of_kind(objects, "Role")
    asked: list[urllib.parse.ParseResult] = []
    port = free_port()
    with (
        serving(tmp_path / "serve.log", "--vllm-grpc") as served,
        kubernetes_api(pod_of(deployed["scheduler"].labels, "127.0.0.1"), asked) as api,
    ):
        (tmp_path / "kubeconfig").write_text(kubeconfig(api))
        here = {  # what differs from the pod
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--port=8000": f"--port={port}",
            "--prometheus-port=9464": f"--prometheus-port={free_port()}",
            "--service-discovery-port=50051": f"--service-discovery-port={served.target.rpartition(':')[2]}",
            "--service-discovery-namespace=$(NAMESPACE)": f"--service-discovery-namespace={NAMESPACE}",
        }
        args = deployed["openai-gateway"].args
        assert set(here) <= set(args)
        command = [tool("smg"), "launch", *(here.get(word, word) for word in args)]
        environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}
        with (tmp_path / "smg.log").open("wb") as log:
            gateway = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    get(
                        f"http://127.0.0.1:{port}{deployed['openai-gateway'].container['readinessProbe']['httpGet']['path']}"
                    )
                    break
                except (urllib.error.URLError, ConnectionError):
                    assert time.monotonic() < deadline, (tmp_path / "smg.log").read_text()[-3000:]
                    time.sleep(0.1)
            message = {"model": "tiny-llada2", "messages": [{"role": "user", "content": "Count from 3 to 7."}]}
            answer = get(f"http://127.0.0.1:{port}/v1/chat/completions", message)
        finally:
            gateway.kill()
            gateway.wait()
    assert answer["choices"][0]["message"]["content"] == "3 4 5 6 7"
    assert {one.path for one in asked} == {f"/api/v1/namespaces/{NAMESPACE}/pods"}
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
