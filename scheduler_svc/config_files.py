"""What flags name a YAML file for: default parameters, and the names of models."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scheduler_svc.settings import SchedulerSettings


class ConfigError(Exception):
    """One line: what in which file or flag is wrong."""


@dataclass(frozen=True)
class ServedModel:
    """A name that clients of a gateway may ask for, and what it stands for: an algorithm ("": the default one) and its
    parameters; those that are missing take the defaults. `port`: where the gateway finds it; 0 = a free one."""

    name: str
    port: int = 0
    algorithm: str = ""
    algorithm_params: Mapping[str, float] = field(default_factory=dict)


def read_algorithm_params(path: Path | None) -> dict[str, float]:
    """Default parameters of the default algorithm: a mapping of names to numbers. Raises ConfigError."""
    if path is None:
        return {}
    where = f"--dllm-algorithm-config {path}"
    return _numbers(_load(path, where), where)


def served_models(settings: SchedulerSettings) -> list[ServedModel]:
    """The names under which gateways know the scheduler: its own first, then those of --served-models in the file's
    order. None without --vllm-grpc. Raises ConfigError."""
    path, own = settings.served_models, ServedModel(settings.model_name, settings.port)
    if path is not None and not settings.vllm_grpc:
        raise ConfigError("--served-models: these names are for gateways; add --vllm-grpc")
    if not settings.vllm_grpc:
        return []
    if importlib.util.find_spec("smg_grpc_proto") is None:
        raise ConfigError("--vllm-grpc: needs the package smg-grpc-proto; pip install 'fdfo[gateway]'")
    entries = _load_models(path, own.name) if path is not None else {}
    ports = settings.model_ports or (0,) * len(entries)
    if len(ports) != len(entries):
        raise ConfigError(f"--served-model-ports: names {len(ports)} ports for {len(entries)} models")
    where = f"--served-models {path}"
    return [own, *(_served_model(where, name, entries[name], port) for name, port in zip(entries, ports, strict=True))]


def _load_models(path: Path, own_name: str) -> dict[Any, Any]:
    where = f"--served-models {path}"
    content = _load(path, where)
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{where}: must map names of models to their algorithm and params")
    if own_name in content:
        raise ConfigError(f"{where}: {own_name}: is the scheduler's own name; see --dllm-algorithm-config")
    return content


def _served_model(where: str, name: Any, entry: Any, port: int) -> ServedModel:
    where = f"{where}: {name}"
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: the name of a model must be a text")
    if not isinstance(entry, dict) or not entry.keys() <= {"algorithm", "params"}:
        raise ConfigError(f"{where}: must have algorithm, params or both, and nothing else")
    algorithm = entry.get("algorithm", "")
    if not isinstance(algorithm, str):
        raise ConfigError(f"{where}: algorithm: must be a name, is {algorithm!r}")
    return ServedModel(name, port, algorithm, _numbers(entry.get("params", {}), f"{where}: params"))


class _Loader(yaml.SafeLoader):
    """YAML's own mappings keep the last of two equal keys; here the second one is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _load(path: Path, where: str) -> Any:
    try:
        return yaml.load(path.read_text(), _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: {error.problem or error.context}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: as a wrong date
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None


def _numbers(content: Any, where: str) -> dict[str, float]:
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: must map parameter names to numbers")
    return {name: _number(value, f"{where}: {name}") for name, value in content.items()}


def _number(value: Any, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    said = repr(value)
    raise ConfigError(f"{where}: must be a finite number, is {said if len(said) <= 40 else said[:40] + '...'}")
