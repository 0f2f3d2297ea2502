"""What a worker can do, held against what the scheduler was started with."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from common.errors import InvalidField
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.config_files import ServedModel
from scheduler_svc.validation import AlgorithmInfo, ParamInfo, Rules, check_defaults


def algorithms(info: pb.GetWorkerInfoResponse) -> dict[str, AlgorithmInfo]:
    """The worker's algorithms by name."""
    return {
        algorithm.name: AlgorithmInfo(
            name=algorithm.name,
            params=tuple(
                ParamInfo(param.name, param.default_value, param.min_value, param.max_value, param.is_integer)
                for param in algorithm.params
            ),
        )
        for algorithm in info.algorithms
    }


def bad_defaults(rules: Rules, models: Iterable[ServedModel]) -> str:
    """What we were started with and the worker does not serve, in one line; "" for nothing."""
    flags = "--dllm-algorithm or --dllm-algorithm-config"
    try:
        check_defaults(rules)
        for model in models:
            if model.algorithm or model.algorithm_params:
                flags = f"--served-models: {model.name}"
                algorithm = model.algorithm or rules.default_algorithm
                check_defaults(
                    dataclasses.replace(rules, default_algorithm=algorithm, default_params=model.algorithm_params)
                )
    except InvalidField as error:
        return f"{flags}: {error.message}"
    return ""


def doubtful(info: pb.GetWorkerInfoResponse, fitting: Collection[str]) -> dict[str, str]:
    """By name why an algorithm may not fit, given those that fit the model's architecture."""
    hints = {
        algorithm.name: "its edits mean something only on checkpoints trained for editing, as LLaDA2.1; LLaDA2.0 is not"
        for algorithm in info.algorithms
        if algorithm.edits
    }
    misfits = {algorithm.name for algorithm in info.algorithms} - set(fitting)
    return hints | {name: f"this model is not trained for it; what fits is {', '.join(fitting)}" for name in misfits}
