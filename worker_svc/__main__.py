"""`python -m worker_svc`: read flags and folder, then serve.

What is wrong with them is said before torch is imported, which takes seconds.
"""

from __future__ import annotations

import sys

import structlog

from common.architectures import ARCHITECTURES, CheckpointError
from common.configuration import parse_settings
from common.errors import ServiceError
from common.logging import configure_logging
from common.model_folder import ModelFolder, ModelFolderError, read_model_folder
from common.settings import EXIT_WRONG_CONFIGURATION
from worker_svc.loop_config import SettingsError, loop_config
from worker_svc.settings import ENV_PREFIX, WorkerSettings

log = structlog.get_logger()


def read_folder(settings: WorkerSettings) -> ModelFolder:
    """The folder to serve. Raises ModelFolderError or CheckpointError."""
    folder = read_model_folder(
        settings.model_path,
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        context_length=settings.context_length,
    )
    if folder.has_weights:
        ARCHITECTURES[folder.architecture].backbone(folder.config)
    for warning in folder.warnings:
        log.warning("model_folder", path=str(folder.path), hint=warning)
    return folder


def main(argv: list[str] | None = None) -> int:
    settings = parse_settings(
        WorkerSettings,
        argv,
        env_prefix=ENV_PREFIX,
        prog="python -m worker_svc",
        description="Load a model and run rounds over it for schedulers.",
        examples=["python -m worker_svc --model-path models/tiny-llada2 --port 50052"],
    )
    configure_logging(settings.log_format, settings.log_level)
    structlog.contextvars.bind_contextvars(service="worker")
    try:
        folder = read_folder(settings)
        config = loop_config(folder, settings)
        from worker_svc.service import run  # heavy: it imports torch

        return run(settings, folder, config)
    except (ModelFolderError, CheckpointError, SettingsError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return EXIT_WRONG_CONFIGURATION
    except ServiceError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
