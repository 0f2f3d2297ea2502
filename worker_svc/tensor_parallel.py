"""Tensor parallel: rank 0 has slots, pages, rows and the loop, and tells the others of each forward.

    rank 0     header (host) ──► tensors (device) ──► forward ──► logits, step
    others     wait          ──► page table, input ──► forward          (each with its heads, over its own KV)

The others know nothing of rounds: a forward's page-table rows come with it, so nothing can get out of step.
Segments and pages stay away where they are those of the forward before: a slot gets no page while its batch stands.
"""

from __future__ import annotations

from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

from worker_svc.kv.store import KVStore
from worker_svc.memory import DeviceMemory, measure_memory
from worker_svc.model_runner import ForwardInput, ModelRunner, Segment, forget_pool
from worker_svc.models.shard import Shard

COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # within a forward
IDLE_TIMEOUT = timedelta(days=365)  # between two of them; a rank that is gone is noticed without it
SEGMENT_INTEGERS = 4
SEGMENTS_PER_SLOT = 3  # at most a chunk, a fused commit and the denoising row


class Order(IntEnum):
    """What rank 0 wants of the others."""

    STOP = 0
    FORWARD = 1
    MEASURE_MEMORY = 2


class Group:
    """The ranks, joined: torch.distributed's default group for tensors on the device, and one on the host for orders.

    An order is one message of fixed length: order, numbers, then the segments of a forward.
    """

    def __init__(self, shard: Shard, device: torch.device, rendezvous: Path, num_slots: int) -> None:
        """Meets the others through the file `rendezvous`; all pass the same one."""
        self.shard, self.device, self.num_slots = shard, device, num_slots
        is_cuda = device.type == "cuda"
        store = dist.FileStore(str(rendezvous), shard.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if is_cuda else None,
        )
        self._orders = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self.segments: tuple[Segment, ...] = ()  # of the last forward
        self._message = torch.zeros(1 + 8 + SEGMENT_INTEGERS * SEGMENTS_PER_SLOT * num_slots, dtype=torch.int64)

    def send(self, order: Order, *numbers: int) -> None:
        """Rank 0 tells all others."""
        self._message[: 1 + len(numbers)] = torch.tensor([order, *numbers])
        dist.broadcast(self._message, src=0, group=self._orders)

    def receive(self) -> tuple[Order, list[int]]:
        """Wait for what rank 0 sends; numbers beyond those sent are left over from before."""
        dist.broadcast(self._message, src=0, group=self._orders)
        order, *numbers = self._message.tolist()
        return Order(order), numbers

    def least(self, memory: DeviceMemory) -> DeviceMemory:
        """What the rank with the least room has; all call it."""
        figures = torch.tensor([memory.total_bytes, memory.free_bytes, -memory.warm_up_bytes])
        dist.all_reduce(figures, op=dist.ReduceOp.MIN, group=self._orders)
        total, free, warm_up = figures.tolist()
        return DeviceMemory(total, free, -warm_up)

    def leave(self) -> None:
        dist.destroy_process_group()


class LeadingRunner:
    """Rank 0's model runner: the others compute what it computes."""

    def __init__(self, runner: ModelRunner, group: Group) -> None:
        self.num_layers, self.num_kv_heads, self.head_dim = runner.num_layers, runner.num_kv_heads, runner.head_dim
        self.vocab_size, self.dtype, self.device = runner.vocab_size, runner.dtype, runner.device
        self.is_asynchronous = runner.is_asynchronous
        self._runner, self._group = runner, group

    def forward(self, inputs: ForwardInput, kv: KVStore) -> torch.Tensor:
        """See `ModelRunner.forward`."""
        send_forward(self._group, inputs, kv)
        return self._runner.forward(inputs, kv)

    def finish(self) -> float:
        """See `ModelRunner.finish`: of rank 0, which has summed what the others gave."""
        return self._runner.finish()

    def measure_memory(self) -> DeviceMemory:
        """See `memory.measure_memory`: of the rank with the least room."""
        self._group.send(Order.MEASURE_MEMORY)
        forget_pool(self._runner)
        return self._group.least(measure_memory(self.device))

    def stop(self) -> None:
        """The others end."""
        self._group.send(Order.STOP)


@torch.inference_mode()
def send_forward(group: Group, inputs: ForwardInput, kv: KVStore) -> None:
    """Rank 0's side of `receive_forward`."""
    num_units, block_size = inputs.ids.shape
    segments = () if inputs.segments is group.segments else inputs.segments
    group.segments = inputs.segments
    last_block = max((segment.first_block + segment.num_units for segment in segments), default=0)
    num_columns = -(-last_block * block_size // kv.page_size)
    sizes = (num_units, block_size, len(inputs.logits_units), num_columns, len(segments))
    pool = (kv.num_pages, kv.page_size, kv.page_table.shape[1])
    group.send(Order.FORWARD, *sizes, *pool, *[number for segment in segments for number in segment])
    pages = kv.page_table[inputs.slots, :num_columns]
    parts = (inputs.ids, inputs.slots, inputs.block_index, inputs.logits_units, pages)
    dist.broadcast(torch.cat([part.flatten() for part in parts]), src=0)


def receive_forward(
    group: Group, runner: ModelRunner, numbers: list[int], kv: KVStore | None
) -> tuple[ForwardInput, KVStore]:
    """The forward that rank 0 begins, and this rank's part of the pool, made anew where it has another size."""
    num_units, block_size, num_logits, num_columns, num_segments, num_pages, page_size, max_pages = numbers[:8]
    if kv is None or (kv.num_pages, kv.page_size, kv.page_table.shape[1]) != (num_pages, page_size, max_pages):
        kv = KVStore.allocate(
            num_layers=runner.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=runner.num_kv_heads,
            head_dim=runner.head_dim,
            num_slots=group.num_slots,
            max_pages_per_slot=max_pages,
            dtype=runner.dtype,
            device=group.device,
        )
    lengths = [num_units * block_size, num_units, num_units, num_logits, num_units * num_columns]
    received = torch.empty(sum(lengths), dtype=torch.int64, device=group.device)
    dist.broadcast(received, src=0)
    ids, slots, block_index, logits_units, pages = torch.split(received, lengths)
    kv.page_table[slots, :num_columns] = pages.view(num_units, num_columns)
    if num_segments:
        fields = iter(numbers[8 : 8 + SEGMENT_INTEGERS * num_segments])
        group.segments = tuple(
            Segment(first_unit, num, first_block, bool(is_prefill))
            for first_unit, num, first_block, is_prefill in zip(*[fields] * SEGMENT_INTEGERS, strict=True)
        )
    return ForwardInput(ids.view(num_units, block_size), slots, block_index, group.segments, logits_units), kv


@torch.inference_mode()
def follow(runner: ModelRunner, group: Group) -> None:
    """What a rank other than 0 does until rank 0 says stop. Raises when rank 0 or another rank is gone."""
    kv: KVStore | None = None
    while True:
        order, numbers = group.receive()
        if order is Order.STOP:
            return
        if order is Order.MEASURE_MEMORY:
            kv = None
            forget_pool(runner)
            group.least(measure_memory(group.device))
        else:
            inputs, kv = receive_forward(group, runner, numbers, kv)
            runner.forward(inputs, kv)
