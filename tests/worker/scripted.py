"""A model whose blocks need a chosen number of forwards, and rounds to drive a DenoiseLoop with it."""

from __future__ import annotations

import torch

from common.packing import pack_bits, pack_ids, unpack_ids
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.denoise import DenoiseLoop
from worker_svc.kv.store import KVStore
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ForwardInput
from worker_svc.rounds import RoundRequest
from worker_svc.rows import RowKey, RowName
from worker_svc.starts import decode_starts

BLOCK, MASK, VOCAB = 32, 1, 64
FILL, STOP, BAD = 40, 2, 63  # tokens: what the model writes; the stop token; a prompt that makes logits NaN
FIRST_EFFORT = 3  # a block whose first token is FIRST_EFFORT + n needs n forwards, the commit included


class ScriptedRunner:
    """Writes FILL + (position mod 8), as many positions a forward as the block's first token asks for."""

    num_layers, num_kv_heads, head_dim, vocab_size = 1, 1, 2, VOCAB
    dtype, device = torch.float32, torch.device("cpu")
    is_asynchronous = False

    def __init__(self, writes: dict[int, int] | None = None) -> None:
        self.writes = writes or {}  # absolute position to token, instead of FILL
        self.inputs: list[ForwardInput] = []

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        self.inputs.append(ForwardInput(inputs.ids.clone(), *list(vars(inputs).values())[1:]))
        logits = torch.zeros(len(inputs.logits_units), BLOCK, VOCAB)
        for row, unit in enumerate(inputs.logits_units.tolist()):
            ids = inputs.ids[unit].tolist()
            first = int(inputs.block_index[unit]) * BLOCK
            effort = ids[0] - FIRST_EFFORT if FIRST_EFFORT < ids[0] < FILL else 2
            masked = [place for place, token in enumerate(ids) if token == MASK]
            a_step = -(-(BLOCK - 1) // max(effort - 1, 1))
            for place in range(BLOCK):
                token = self.writes.get(first + place, FILL + (first + place) % 8)
                logits[row, place, token] = 20.0 if place in masked[:a_step] or place not in masked else 1.0
            if BAD in ids:
                logits[row] = float("nan")
        return logits

    def finish(self) -> float:
        return 1.0


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_loop(
    num_slots: int = 4,
    num_pages: int = 64,
    page_size: int = BLOCK,
    chunk: int = 64,
    context: int = 1024,
    runner: ScriptedRunner | None = None,
    clock: Clock | None = None,
    fused_commit: bool = False,
    caching: bool = True,
) -> DenoiseLoop:
    config = LoopConfig(
        fingerprint="scripted",
        block_size=BLOCK,
        mask_token_id=MASK,
        context_length=context,
        page_size=page_size,
        num_slots=num_slots,
        num_pages=num_pages,
        chunked_prefill_size=chunk,
        fused_commit=fused_commit,
        lease_s=30.0,
        enable_prefix_caching=caching,
    )
    return DenoiseLoop(runner or ScriptedRunner(), config, clock or Clock())


def start(
    request_id: str, prompt: list[int], *, attempt: int = 1, tokens_left: int = 512, **fields: object
) -> pb.StartRow:
    """A fresh request with this prompt."""
    first = len(prompt) // BLOCK * BLOCK
    tail = prompt[first:]
    row = pb.StartRow(
        request_id=request_id,
        attempt=attempt,
        prompt_length=len(prompt),
        prefix_ids=pack_ids(prompt[:first]),
        block_index=first // BLOCK,
        block_ids=pack_ids(tail + [MASK] * (BLOCK - len(tail))),
        block_mask=pack_bits([False] * len(tail) + [True] * (BLOCK - len(tail))),
        algorithm="LowConfidence",
        sampling=pb.SamplingParams(top_p=1.0),
        tokens_left=tokens_left,
    )
    row.MergeFrom(pb.StartRow(**fields))  # type: ignore[arg-type]
    return row


def effort(forwards: int) -> list[int]:
    """A prompt of one token whose block needs so many forwards, the commit included."""
    return [FIRST_EFFORT + forwards]


class Driver:
    """One scheduler's side of the rounds."""

    def __init__(self, loop: DenoiseLoop, scheduler_id: str = "s", generation: int = 1) -> None:
        self.loop, self.scheduler_id, self.generation = loop, scheduler_id, generation
        self.next_id = 1

    def request(self, **fields: object) -> RoundRequest:
        values: dict[str, object] = {
            "scheduler_id": self.scheduler_id,
            "generation": self.generation,
            "worker_epoch": self.loop.epoch,
            "fingerprint": "scripted",
            "round_id": self.next_id,
            "acked_round_id": self.next_id - 1,
            "mode": pb.MODE_FDFO,
            "max_forwards": 0,
            "max_round_ms": 1_000_000,
            "releases": [],
            "starts": [],
            "continues": [],
        }
        values.update(fields)
        values["starts"] = decode_starts(values["starts"], self.loop.start_rules)  # type: ignore[arg-type]
        self.next_id += 1
        return RoundRequest(**values)  # type: ignore[arg-type]

    def send(self, **fields: object) -> list[object]:
        """Submit a round; the list gets its reply or error once it is there."""
        results: list[object] = []
        self.loop.submit(self.request(**fields), results.append)
        return results

    def run(self, **fields: object) -> pb.RunRoundResponse:
        """Submit a round and tick until it replies."""
        results = self.send(**fields)
        for _ in range(1000):
            if results:
                break
            self.loop.tick()
        assert results, "no reply after 1000 ticks"
        reply = results[0]
        assert isinstance(reply, pb.RunRoundResponse), reply
        return reply


def names(*request_ids: str, attempt: int = 1) -> list[RowName]:
    return [RowName(RowKey(request_id, 0), attempt) for request_id in request_ids]


def done_blocks(reply: pb.RunRoundResponse) -> list[list[int]]:
    """Ids of the done blocks, in row order."""
    ids = unpack_ids(reply.rows.done_ids)
    return [ids[at : at + BLOCK] for at in range(0, len(ids), BLOCK)]


def assert_whole(loop: DenoiseLoop, held: int | None = None) -> None:
    usage = loop.pool.usage()
    assert usage.free + usage.cached + usage.held == usage.total
    if held is not None:
        assert usage.held == held
