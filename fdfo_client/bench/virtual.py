"""A scheduler and its workers in this process, under a clock that jumps: `fdfo replay --virtual-time`.

The scheduler core and the denoise loops are the real ones, and only their time is not: a forward takes what the profile
of a simulated model says, a message between scheduler and worker the delay of the network, and all else no time. The
same requests so get the same tokens at the same times on every machine.

This file alone imports the services, so it needs the extras `scheduler` and `worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from common import __version__
from common.architectures import CheckpointError
from common.errors import Refused, ServiceError
from common.model_folder import ModelFolder, ModelFolderError, read_model_folder
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo_client._errors import DeadlineExceeded, InvalidRequest
from fdfo_client._options import build_request
from fdfo_client._types import Event, ServerCounters, ServerInfo, event_from_proto, server_info_from_proto
from fdfo_client.bench.load import Load
from fdfo_client.bench.measure import Measurement, World, measure
from fdfo_client.bench.virtual_time import run_virtually
from fdfo_client.bench.workload import Item
from scheduler_svc.config_files import ConfigError, read_algorithm_params
from scheduler_svc.core import BadDefaults, Scheduler
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers import WorkerLost
from worker_svc.denoise import DenoiseLoop, page_usage_message
from worker_svc.loop_config import LoopConfig
from worker_svc.model_runner import ModelRunner
from worker_svc.server import algorithm_infos
from worker_svc.settings import WorkerSettings
from worker_svc.simulated import SimulatedRunner, TimeLine
from worker_svc.start_up import SettingsError, loop_config
from worker_svc.wire import decode_names, decode_round

TARGET = "virtual"
CONNECT_S = 1.0  # before a load starts

MakeLoop: TypeAlias = Callable[[ModelRunner, LoopConfig, Callable[[], float]], DenoiseLoop]


class LoopLink:
    """Takes the place of a WorkerLink: the worker's loop is in this process.

    Every round and reply is serialised on its way, and a call takes `delay_s` in each direction. `asked` is set when
    the loop has something new to look at.
    """

    def __init__(self, loop: DenoiseLoop, target: str, scheduler_id: str, delay_s: float = 0.0) -> None:
        self.loop = loop
        self.target = target
        self.scheduler_id = scheduler_id
        self.last_error = ""
        self.asked = asyncio.Event()
        self._delay_s = delay_s

    async def get_info(self) -> pb.GetWorkerInfoResponse:
        await asyncio.sleep(self._delay_s)
        config = self.loop.config
        info = pb.GetWorkerInfoResponse(
            worker_epoch=self.loop.epoch,
            fingerprint=config.fingerprint,
            block_size=config.block_size,
            page_size=config.page_size,
            context_length=config.context_length,
            max_running_requests=config.num_slots,
            pages=page_usage_message(self.loop.pool.usage()),
            draining=self.loop.draining,
            algorithms=algorithm_infos(config.logit_shift),
        )
        await asyncio.sleep(self._delay_s)
        return info

    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse:
        decoded = decode_round(pb.RunRoundRequest.FromString(request.SerializeToString()), self.loop.start_rules)
        result: asyncio.Future[pb.RunRoundResponse | ServiceError] = asyncio.get_running_loop().create_future()

        def deliver(outcome: pb.RunRoundResponse | ServiceError) -> None:
            if not result.done():
                result.set_result(outcome)

        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self._delay_s)
                self.loop.submit(decoded, deliver)
                self.asked.set()
                try:
                    outcome = await result
                except asyncio.CancelledError:
                    self.loop.withdraw(decoded, deliver)
                    raise
                await asyncio.sleep(self._delay_s)
        except TimeoutError:
            raise WorkerLost(f"no reply within {timeout_s:g} s") from None
        if isinstance(outcome, ServiceError):
            raise WorkerLost(str(outcome), isinstance(outcome, Refused) and outcome.reason == "EPOCH_CHANGED")
        return pb.RunRoundResponse.FromString(outcome.SerializeToString())

    async def release(self, generation: int, rows: pb.RowNames) -> None:
        await asyncio.sleep(self._delay_s)
        try:
            self.loop.release(self.loop.leases.touch(self.scheduler_id, generation), decode_names(rows, "rows"))
        except Refused as refused:
            raise WorkerLost(str(refused)) from None
        await asyncio.sleep(self._delay_s)

    async def heartbeat(self, generation: int) -> pb.HeartbeatResponse:
        await asyncio.sleep(self._delay_s)
        try:
            session = self.loop.leases.touch(self.scheduler_id, generation)
        except Refused as refused:
            raise WorkerLost(str(refused)) from None
        answer = pb.HeartbeatResponse(
            worker_epoch=self.loop.epoch,
            pages=page_usage_message(self.loop.pool.usage()),
            allowance=self.loop.allowance(session),
            draining=self.loop.draining,
        )
        await asyncio.sleep(self._delay_s)
        return answer

    async def probe(self) -> pb.GetWorkerInfoResponse:
        return await self.get_info()

    async def close(self) -> None:
        pass


async def run_device(link: LoopLink, time_line: TimeLine) -> None:
    """The device thread: a boundary and a forward at a time. What comes during a forward takes effect at its end."""
    clock = asyncio.get_running_loop().time
    while True:
        link.asked.clear()
        if link.loop.tick():
            await asyncio.sleep(time_line.end_s - clock())
        else:
            await link.asked.wait()


def read_simulated_folder(path: Path, settings: SchedulerSettings) -> ModelFolder:
    """The folder of a simulated model, with what the settings override. Raises InvalidRequest for any other."""
    try:
        folder = read_model_folder(
            path,
            block_size=settings.block_size,
            mask_token_id=settings.mask_token_id,
            context_length=settings.context_length,
        )
    except ModelFolderError as error:
        raise InvalidRequest(f"--model-path {error}") from None
    if folder.has_weights:
        raise InvalidRequest(
            f"--model-path {path}: {folder.architecture} computes in real time; --virtual-time needs a simulated "
            f"model, such as models/simulated-h200-llada2-mini"
        )
    return folder


@contextlib.asynccontextmanager
async def virtual_world(
    folder: ModelFolder,
    scheduler_settings: SchedulerSettings,
    worker_settings: WorkerSettings,
    *,
    num_workers: int = 1,
    network_delay_ms: float = 0.0,
    make_loop: MakeLoop = DenoiseLoop,
) -> AsyncIterator[World]:
    """A scheduler that is connected to its workers. Of the settings, addresses and the device do nothing.

    Runs in a loop of `run_virtually`. A request without a seed takes its number, counted from 0. Raises InvalidRequest
    for settings that do not fit.
    """
    clock = asyncio.get_running_loop().time
    delay_s = network_delay_ms / 1000
    devices: list[tuple[LoopLink, TimeLine]] = []

    def connect(target: str, scheduler_id: str) -> LoopLink:
        time_line = TimeLine(clock, sleep=lambda duration_s: None, overshoot_s=0.0)
        loop = make_loop(SimulatedRunner(folder, time_line), loop_config(folder, worker_settings), clock)
        link = LoopLink(loop, target, scheduler_id, delay_s)
        devices.append((link, time_line))
        return link

    targets = ",".join(f"{TARGET}:{number + 1}" for number in range(num_workers))
    try:
        params = read_algorithm_params(scheduler_settings.dllm_algorithm_config)
        scheduler = Scheduler(folder, dataclasses.replace(scheduler_settings, workers=targets), params, connect, 0.0)
    except (CheckpointError, ConfigError, SettingsError) as error:
        raise InvalidRequest(str(error)) from None

    def server() -> ServerInfo:
        info = scheduler.info()
        info.version = __version__
        return server_info_from_proto(info)

    async def counters() -> ServerCounters:
        return server().counters

    seeds = itertools.count()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_device(*device)) for device in devices]
            tasks.append(group.create_task(scheduler.run()))
            await asyncio.sleep(CONNECT_S + 4 * delay_s)  # two calls of a worker, there and back
            yield World(
                lambda options: _stream(scheduler, {"seed": next(seeds)} | options), counters, {TARGET: server()}
            )
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        if bad_defaults := failures.subgroup(BadDefaults):
            raise InvalidRequest(str(_first(bad_defaults))) from None
        raise


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _stream(scheduler: Scheduler, options: dict[str, Any]) -> AsyncIterator[Event]:
    """`AsyncClient.stream` without a server between. Raises ServiceError where that has errors of its own."""
    rest: Any = {name: value for name, value in options.items() if name != "prompt"}
    message, timeout = build_request(options.get("prompt"), rest)
    deadline = None if timeout.total is None else asyncio.get_running_loop().time() + timeout.total
    live = await scheduler.submit(message)
    responses = live.read()
    try:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    response = await anext(responses, None)
            except TimeoutError:
                raise DeadlineExceeded("the timeout passed; give a longer timeout, or ask for fewer tokens") from None
            if response is None:
                return
            event = event_from_proto(response, message)
            assert event is not None, "the scheduler is of this version"
            yield event
    finally:
        scheduler.leave(live)


def replay_virtually(
    items: Iterable[Item],
    folder: ModelFolder,
    scheduler_settings: SchedulerSettings,
    worker_settings: WorkerSettings,
    *,
    concurrency: int | None = None,
    num_workers: int = 1,
    network_delay_ms: float = 0.0,
    make_loop: MakeLoop = DenoiseLoop,
) -> Measurement:
    """Measure a load in a `virtual_world`: a closed loop with `concurrency`, else each item at its time. `make_loop`:
    another kind of loop for the workers."""

    async def play() -> Measurement:
        async with virtual_world(
            folder,
            scheduler_settings,
            worker_settings,
            num_workers=num_workers,
            network_delay_ms=network_delay_ms,
            make_loop=make_loop,
        ) as world:
            return await measure(world, Load(world.stream), items, concurrency=concurrency)

    return run_virtually(play())
