"""Does the worker compute on CUDA what it computes on the CPU, and how fast? One JSON line after each part.

Needs torch and a GPU; the part with the shipped checkpoint also tokenizers, transformers and safetensors.
`--device cpu --tiny` runs the same code here, at sizes that say nothing of speed.
Exit status: 0 all parts hold, 1 one does not, 2 there is no GPU here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import gpu_check_forward, gpu_check_mini, gpu_check_parallel  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from worker_svc.attention import AttentionBackend
    from worker_svc.kv.store import KVStore
    from worker_svc.model_runner import ForwardInput, ModelRunner
    from worker_svc.models.base import BlockModel

BLOCK_SIZE = 32
MAX_LOGIT_DIFFERENCE = 1e-3  # fp32 against fp32: other orders of summation
MAX_BF16_ERROR = 0.03  # of the norm of the logits
TIMED_FORWARDS = 20

# Every part of the architecture, quick on a CPU. As many experts as there are, so that rounding flips no choice.
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rotary_dim": 32,
    "rope_theta": 600000.0,
    "rms_norm_eps": 1e-6,
    "use_qk_norm": True,
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "n_group": 4,
    "topk_group": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}
# A fifth of LLaDA2.0-mini: its heads, its gate, fewer and smaller experts and layers.
MEDIUM = SMALL | {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2560,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "num_experts": 64,
    "n_group": 8,
    "moe_intermediate_size": 256,
}


def random_model(sizes: dict[str, Any], dtype: Any, device: str, seed: int = 0) -> BlockModel:
    """Random weights, drawn on the device: the same for one device, seed and dtype only."""
    import torch

    from common.architectures.llada2_moe import LLADA2_MOE
    from worker_svc.models.decoder import Decoder

    with torch.device(device):
        model = Decoder(LLADA2_MOE.backbone(sizes), dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, device=device, dtype=parameter.dtype)
        # Norm weights around 1; matrices so that activations keep their size.
        parameter.copy_(1 + 0.2 * values if parameter.dim() == 1 else values * parameter.shape[-1] ** -0.5)
    return model


def copy_model(model: BlockModel, sizes: dict[str, Any], dtype: Any, device: str) -> BlockModel:
    """The same weights elsewhere."""
    copy = random_model(sizes, dtype, device)
    for target, source in zip(copy.parameters(), model.parameters(), strict=True):
        target.copy_(source)
    return copy


def make_kv(model: BlockModel | ModelRunner, num_slots: int, num_blocks: int) -> KVStore:
    """A pool with scattered pages, the same on every device, and NaN in them as freed pages may hold."""
    import torch

    from worker_svc.kv.store import KVStore

    kv = KVStore.allocate(
        num_layers=model.num_layers,
        num_pages=num_slots * num_blocks,
        page_size=BLOCK_SIZE,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_slots=num_slots,
        max_pages_per_slot=num_blocks,
        dtype=model.dtype,
        device=model.device,
    )
    pages = torch.randperm(num_slots * num_blocks, generator=torch.Generator().manual_seed(0)) + 1
    kv.page_table.copy_(pages.view(num_slots, num_blocks))
    kv.k[:, 1:] = float("nan")
    kv.v[:, 1:] = float("nan")
    return kv


def make_input(segments: list[tuple[int, int, int]], vocab_size: int, device: Any) -> ForwardInput:
    """Segments (slot, first block, blocks) of random tokens; logits of every unit."""
    import torch

    from worker_svc.model_runner import ForwardInput, Segment

    units = [(slot, first + i) for slot, first, count in segments for i in range(count)]
    starts = [sum(count for _, _, count in segments[:i]) for i in range(len(segments))]
    ids = torch.randint(0, vocab_size, (len(units), BLOCK_SIZE), generator=torch.Generator().manual_seed(1))
    return ForwardInput(
        ids=ids.to(device),
        slots=torch.tensor([slot for slot, _ in units], device=device),
        block_index=torch.tensor([block for _, block in units], device=device),
        segments=tuple(Segment(start, count, first) for start, (_, first, count) in zip(starts, segments, strict=True)),
        logits_units=torch.arange(len(units), device=device),
    )


# A long and two short prompts; then rows of all lengths beside a chunk and a fused pair.
PREFILL = [(0, 0, 9), (1, 0, 1), (2, 0, 2), (3, 0, 4)]
MIXED = [(0, 9, 1), (1, 1, 1), (2, 2, 1), (3, 4, 2), (4, 0, 3), (5, 0, 1)]


def forwards(model: BlockModel) -> Tensor:
    """Logits of prefill and mixed forward, on the CPU."""
    from worker_svc.model_runner import TorchModelRunner

    return logits_of(TorchModelRunner(model, attention()))


def logits_of(runner: ModelRunner) -> Tensor:
    """Logits of prefill and mixed forward, on the CPU."""
    import torch

    kv = make_kv(runner, num_slots=6, num_blocks=10)
    logits = [
        runner.forward(make_input(segments, runner.vocab_size, runner.device), kv).cpu()
        for segments in (PREFILL, MIXED)
    ]
    return torch.cat(logits)


def attention() -> AttentionBackend:
    """The backend that is checked."""
    from worker_svc.attention import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS["torch"]()


def compare(expected: Tensor, got: Tensor) -> dict[str, Any]:
    """Largest difference of two sets of logits, and how often their best token is the same."""
    same_best = (expected.argmax(-1) == got.argmax(-1)).float().mean().item()
    difference = (expected - got).abs().max().item()  # NaN where one is NaN, and then nothing holds
    return {
        "max_abs_logit_difference": difference,
        "same_argmax": round(same_best, 4),
        "ok": difference < MAX_LOGIT_DIFFERENCE,
    }


def check_fp32(device: str) -> dict[str, Any]:
    """The same tokens through the same weights on the CPU and on the device, in fp32."""
    import torch

    model = random_model(SMALL, torch.float32, "cpu")
    return compare(forwards(model), forwards(copy_model(model, SMALL, torch.float32, device)))


def check_batch_invariant(device: str) -> dict[str, Any]:
    """In batch-invariant mode the units of a mixed forward have the bits they have alone."""
    import torch

    from worker_svc.model_runner import TorchModelRunner

    model = random_model(SMALL, torch.float32, device)
    return bits_alone_and_together(TorchModelRunner(model, attention(), batch_invariant=True))


def bits_alone_and_together(runner: ModelRunner) -> dict[str, Any]:
    """Whether the units of prefill and mixed forward have the bits they have in forwards of their own."""
    import torch

    together = logits_of(runner)
    kv = make_kv(runner, num_slots=6, num_blocks=10)
    alone = []
    for segments in (PREFILL, MIXED):
        inputs = make_input(segments, runner.vocab_size, runner.device)
        for (slot, first, count), segment in zip(segments, inputs.segments, strict=True):
            for i in range(count):
                single = make_input([(slot, first + i, 1)], runner.vocab_size, runner.device)
                single.ids = inputs.ids[segment.first_unit + i][None].clone()
                alone.append(runner.forward(single, kv).cpu())
    same = torch.equal(torch.cat(alone), together)
    return {"same_bits_alone_and_together": same, "ok": same}


def check_shipped(device: str) -> dict[str, Any]:
    """The shipped checkpoint, loaded from its folder onto both."""
    import torch

    try:
        from common.model_folder import read_model_folder
        from worker_svc.models.loading import load_model
    except ImportError as error:
        return {"skipped": f"a package is missing: {error}", "ok": True}
    folder = read_model_folder(ROOT / "models" / "tiny-llada2")
    return compare(*(forwards(load_model(folder, dtype=torch.float32, device=place)) for place in ("cpu", device)))


def check_bf16(device: str) -> dict[str, Any]:
    """In bf16 the logits are finite and close to those of fp32 on the same device."""
    import torch

    model = random_model(SMALL, torch.float32, device)
    expected = forwards(model)
    got = forwards(copy_model(model, SMALL, torch.bfloat16, device))
    error = ((got - expected).norm() / expected.norm()).item()
    return {"relative_error": error, "finite": bool(got.isfinite().all()), "ok": error < MAX_BF16_ERROR}


def time_denoise(device: str) -> dict[str, Any]:
    """Median milliseconds of a bf16 forward over rows that denoise behind 992 tokens of context."""
    import torch

    from worker_svc.model_runner import TorchModelRunner

    model = random_model(MEDIUM, torch.bfloat16, device)
    runner = TorchModelRunner(model, attention())
    context_blocks = 31
    milliseconds = {}
    for num_rows in (1, 16, 64):
        kv = make_kv(model, num_slots=num_rows, num_blocks=context_blocks + 1)
        kv.k[:, 1:].normal_()
        kv.v[:, 1:].normal_()
        inputs = make_input([(slot, context_blocks, 1) for slot in range(num_rows)], model.vocab_size, device)
        times = []
        for _ in range(3 + TIMED_FORWARDS):
            runner.forward(inputs, kv)
            times.append(runner.finish())
        milliseconds[str(num_rows)] = round(statistics.median(times[3:]), 3)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"ms_by_rows": milliseconds, "parameters": num_parameters, "context_tokens": 1024, "ok": True}


PARTS: tuple[Callable[[str], dict[str, Any]], ...] = (
    check_fp32,
    check_batch_invariant,
    check_shipped,
    check_bf16,
    *gpu_check_parallel.PARTS,
    time_denoise,
    *gpu_check_forward.PARTS,
)


def parts_on(device: str, scale: gpu_check_mini.Scale) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names and what to run, in order."""
    here = [part for part in PARTS if device == "cuda" or part is not time_denoise]
    return [(part.__name__, lambda part=part: part(device)) for part in here] + gpu_check_mini.MiniCheck(
        device, scale
    ).parts()


def header(device: str) -> dict[str, Any]:
    """What the first line says; `gpu` is None where there is none, with the reason."""
    try:
        import torch
    except ImportError:
        return {"gpu": None, "reason": "torch is not installed"}
    if device == "cpu":
        return {"gpu": None, "device": "cpu", "torch": torch.__version__}
    if not torch.cuda.is_available():
        built_for = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA finds no device"
        return {"gpu": None, "reason": f"{built_for} (torch {torch.__version__})"}
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tf32": False}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="What a GPU computes, and how fast.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the code")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for --device cpu")
    arguments = parser.parse_args(argv)
    first = header(arguments.device)
    print(json.dumps(first), flush=True)
    if "reason" in first:
        return 2
    import torch

    holds = True
    for name, part in parts_on(arguments.device, gpu_check_mini.TINY if arguments.tiny else gpu_check_mini.FULL):
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                result = part()
        except Exception as error:  # the other parts still say something
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}", "ok": False}
        holds = holds and result["ok"]
        print(json.dumps({"part": name, "s": round(time.perf_counter() - start, 2), **result}), flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
