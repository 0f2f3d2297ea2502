"""The files that flags of the scheduler name."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.config_files import ConfigError, ServedModel, read_algorithm_params, served_models
from scheduler_svc.core import BadDefaults, Scheduler
from scheduler_svc.settings import SchedulerSettings
from tests.scheduler.in_memory import FOLDER, InMemoryLink
from tests.worker.scripted import make_loop

MODELS = """
quick:
  algorithm: LowConfidence
  params: {threshold: 0.5}
careful:
  params: {threshold: 1}
"""


@pytest.fixture(autouse=True)
def with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra gateway were installed, whether it is or not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def settings(tmp_path: Path, text: str | None = None, **values: Any) -> SchedulerSettings:
    file = tmp_path / "file.yaml"
    if text is not None:
        file.write_text(text)
        values["served_models"] = file
    return SchedulerSettings(model_path=tmp_path / "tiny", **{"vllm_grpc": True, **values})


def test_the_names_that_are_served(tmp_path: Path) -> None:
    """Our own name at our own port, then those of the file in its order, at their ports."""
    quick = ServedModel("quick", 81, "LowConfidence", {"threshold": 0.5})
    careful = ServedModel("careful", 82, "", {"threshold": 1.0})
    given = settings(tmp_path, MODELS, port=80, served_model_ports="81,82")
    assert served_models(given) == [ServedModel("tiny", 80), quick, careful]
    assert [model.port for model in served_models(settings(tmp_path, MODELS))] == [50051, 0, 0]
    assert served_models(settings(tmp_path, served_model_name="mine")) == [ServedModel("mine", 50051)]
    assert served_models(settings(tmp_path, vllm_grpc=False)) == []


@pytest.mark.parametrize(
    ("text", "values", "says"),
    [
        (MODELS, {"vllm_grpc": False}, "--served-models: .*add --vllm-grpc"),
        (MODELS, {"served_model_ports": "81"}, "--served-model-ports: names 1 ports for 2 models"),
        (None, {"served_model_ports": "81"}, "--served-model-ports: names 1 ports for 0 models"),
        ("[1]", {}, "must map names of models"),
        ("", {}, "must map names of models"),
        ("a: {}\nb: {", {}, "--served-models .*, line 2: expected the node content"),
        ("a: {}\nb: {}\na: {}", {}, "--served-models .*, line 3: a is there twice"),
        ("a: 2026-13-01", {}, "--served-models .*: month must be in 1..12"),
        ("tiny: {}", {}, "tiny: is the scheduler's own name"),
        ("1: {}", {}, "the name of a model must be a text"),
        ("a: fast", {}, "a: must have algorithm, params or both"),
        ("a: {speed: 1}", {}, "a: must have algorithm, params or both"),
        ("a: {algorithm: 3}", {}, "a: algorithm: must be a name, is 3"),
        ("a: {params: {threshold: high}}", {}, "a: params: threshold: must be a finite number, is 'high'"),
        (f"a: {{params: {{threshold: {'9' * 400}}}}}", {}, "threshold: must be a finite number, is 9{40}\\.\\.\\.$"),
    ],
)
def test_a_wrong_file_is_refused_at_start(tmp_path: Path, text: str | None, values: dict[str, Any], says: str) -> None:
    """In one line, with the flag and the entry."""
    with pytest.raises(ConfigError, match=says):
        served_models(settings(tmp_path, text, **values))


def test_without_the_extra_the_flag_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--vllm-grpc is refused before anything is started."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--vllm-grpc: .*pip install 'fdfo\[gateway\]'"):
        served_models(settings(tmp_path))


def test_default_parameters(tmp_path: Path) -> None:
    """Numbers by name; a file that is none of that is refused by its flag."""
    file = tmp_path / "params.yaml"
    file.write_text("threshold: 0.9\nsteps: 3\n")
    assert read_algorithm_params(file) == {"threshold": 0.9, "steps": 3.0}
    for wrong in (b"threshold: true", b"threshold: .nan", b"steps: 1\nsteps: 2", b"- 1", b"\xff\xfe\xfa"):
        file.write_bytes(wrong)
        with pytest.raises(ConfigError, match="--dllm-algorithm-config"):
            read_algorithm_params(file)


@pytest.mark.parametrize("model", [ServedModel("quick", 0, "Nonesuch"), ServedModel("quick", 0, "", {"speed": 1.0})])
def test_a_name_that_no_worker_serves_ends_the_scheduler(model: ServedModel) -> None:
    """A wrong algorithm or parameter of a name is said at the first worker, not at every request."""
    loop = make_loop()

    async def scene() -> None:
        given = SchedulerSettings(model_path=Path("models/tiny-llada2"))
        connect = lambda _, name: InMemoryLink(loop, name, 1024)  # noqa: E731
        with pytest.raises(ExceptionGroup) as caught:
            await Scheduler(FOLDER, given, {}, connect, served_models=[ServedModel("tiny"), model]).run()
        assert isinstance(caught.value.exceptions[0], BadDefaults)
        assert "--served-models: quick: " in str(caught.value.exceptions[0])

    asyncio.run(scene())
