"""What a worker refuses before it loads anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.model_folder import read_model_folder
from tests.text.folders import LLADA2_CONFIG, SHIPPED, write_folder
from worker_svc.loop_config import SettingsError, loop_config
from worker_svc.settings import WorkerSettings

REFUSED = """
import sys
from worker_svc.__main__ import main
for argv in sys.argv[1:]:
    assert main(argv.split()) == 2
assert "torch" not in sys.modules, "it takes seconds"
"""


def test_a_wrong_configuration_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Folder, configuration and sizes are looked at first: status 2 and one line each, at once."""
    scaled = LLADA2_CONFIG | {"rope_scaling": {"type": "yarn", "factor": 2}}
    write_folder(tmp_path, config=scaled)
    argvs = ["--model-path absent", f"--model-path {tmp_path}", f"--model-path {SHIPPED} --block-size 7"]
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED, *argvs], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("worker: ")]
    assert len(said) == 3
    for line, words in zip(said, ("no such folder", "config.json: ", "--block-size"), strict=True):
        assert words in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 7}, r"--chunked-prefill-size 2048 .* block size 7 \(--block-size\), such as 2044"),
        ({"chunked_prefill_size": 8}, r"--chunked-prefill-size 8 .* \(--block-size\), such as 32"),
        ({"page_size": 48}, r"--page-size 48 .* block size 32 \(--block-size\)"),
        ({"max_total_tokens": 31}, "--max-total-tokens 31"),
    ],
)
def test_sizes_that_do_not_go_together(settings: dict[str, int], words: str) -> None:
    """The error names the flags and what would do."""
    folder = read_model_folder(SHIPPED, block_size=settings.get("block_size"))
    with pytest.raises(SettingsError, match=words):
        loop_config(folder, WorkerSettings(model_path=SHIPPED, **settings))  # type: ignore[arg-type]
