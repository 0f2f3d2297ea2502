"""The scheduler for gateways: `vllm.grpc.engine.VllmEngine`, the published protocol of the package smg-grpc-proto, as a
thin mapping onto the same core. docs/openai.md says what goes through it."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from common import __version__
from common.callers import current_caller
from common.errors import InvalidField, ServiceError, abort_with
from common.model_folder import ModelFolder
from common.tokenizer_files import load_tokenizer, read_chat_templates
from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.config_files import ServedModel
from scheduler_svc.core import Scheduler
from scheduler_svc.server import Context, reading, write
from scheduler_svc.text import TOOL_CALL_MARKS
from scheduler_svc.unserved import UNSUPPORTED
from scheduler_svc.validation import check_abort

CHUNK_BYTES = 64 * 1024

# What may be set. The last three are about decoding and grammars, which is the gateway's; it sets them unasked.
_READ = {"request_id", "tokenized", "text", "sampling_params", "stream"}
_READ_SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
}
_READ_SAMPLING |= {"n", "logprobs", "skip_special_tokens", "spaces_between_special_tokens", "grammar_from_first_token"}
_REASONS = {name: reason for name, (_, reason) in UNSUPPORTED.items()} | {
    "min_tokens": UNSUPPORTED["min_new_tokens"][1],
    "include_stop_str_in_output": "a stop string is never published",
    "prompt_logprobs": "log probabilities of the prompt are not served",
}

# Our names of fields in errors, where a gateway's client knows another one.
_THEIR_NAMES = {"max_new_tokens": "max_tokens", "prompt_ids": "prompt"}


def to_generate_request(message: vllm_engine_pb2.GenerateRequest, model: ServedModel) -> api.GenerateRequest:
    """Our request for theirs. What is absent, and what their zeros leave unsaid, takes our defaults. Raises
    InvalidField for what is asked for and cannot be served."""
    given = message.sampling_params
    _refuse_others(message, _READ)
    _refuse_others(given, _READ_SAMPLING)
    if given.logprobs not in (0, 1):
        raise InvalidField("logprobs", "only those of the chosen tokens are served: top_logprobs must be 0")
    request = api.GenerateRequest(
        request_id=message.request_id,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        algorithm=model.algorithm,
        algorithm_params=model.algorithm_params,
        logprobs=given.HasField("logprobs"),
        n=given.n or None,
        max_new_tokens=given.max_tokens if given.HasField("max_tokens") else None,
    )
    request.sampling.MergeFrom(
        api.SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p or None,
            top_k=given.top_k,
            min_p=given.min_p,
        )
    )
    if given.HasField("seed"):
        if given.seed < 0:
            raise InvalidField("seed", f"must not be below 0, is {given.seed}")
        request.sampling.seed = given.seed
    if message.WhichOneof("input") == "text":
        request.text, request.parse_special_tokens = message.text, True
    else:
        request.prompt_ids.ids.extend(message.tokenized.input_ids)
    return request


def _refuse_others(message: Any, read: set[str]) -> None:
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name not in read and (name, value) != ("repetition_penalty", 1.0):
            raise InvalidField(name, f"is not supported: {_REASONS.get(name, 'this engine has nothing for it')}")


@dataclass
class _Sample:
    """What was sent of one sample, and `committed_ids`, which go on to the end of a stop string."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    committed_ids: list[int] = field(default_factory=list)


class Replies:
    """Turns the events of one request into what a gateway expects of them: chunks where it streams, and one
    GenerateComplete a sample. A gateway that does not stream numbers its choices as these come, so they come by index
    then, and one that is early is held."""

    def __init__(self, *, is_stream: bool, with_logprobs: bool) -> None:
        self._is_stream = is_stream
        self._with_logprobs = with_logprobs
        self._prompt_tokens = 0
        self._samples: dict[int, _Sample] = {}
        self._early: dict[int, vllm_engine_pb2.GenerateComplete] = {}
        self._next_index = 0

    def of(self, event: api.GenerateResponse) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        match event.WhichOneof("event"):
            case "started":
                self._prompt_tokens = event.started.prompt_tokens
            case "committed":
                committed = event.committed
                sample = self._sample(committed)
                yield from self._publish(committed.sample_index, sample, committed.token_ids, committed.logprobs)
            case "finished":
                finished = event.finished
                sample = self._sample(finished)
                if finished.WhichOneof("match") == "stop_string":
                    # A stop string may begin inside a token. The gateway decodes the ids and cuts them at the string.
                    rest = sample.committed_ids[len(sample.token_ids) :]
                    yield from self._publish(finished.sample_index, sample, rest, ())
                yield from self._end(self._complete(finished, sample))

    def _sample(self, event: Any) -> _Sample:
        sample = self._samples.setdefault(event.sample_index, _Sample())
        sample.committed_ids += event.committed_ids
        return sample

    def _publish(
        self, index: int, sample: _Sample, token_ids: Any, logprobs: Any
    ) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        sample.token_ids += token_ids
        sample.logprobs += logprobs
        if self._is_stream and token_ids:
            chunk = vllm_engine_pb2.GenerateStreamChunk(
                token_ids=token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(sample.token_ids),
                output_logprobs=self._logprobs(token_ids, logprobs),
                index=index,
            )
            yield vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _end(self, complete: vllm_engine_pb2.GenerateComplete) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        if self._is_stream:
            yield vllm_engine_pb2.GenerateResponse(complete=complete)
            return
        self._early[complete.index] = complete
        while (next_one := self._early.pop(self._next_index, None)) is not None:
            self._next_index += 1
            yield vllm_engine_pb2.GenerateResponse(complete=next_one)

    def _complete(self, finished: api.Finished, sample: _Sample) -> vllm_engine_pb2.GenerateComplete:
        reasons = {api.FINISH_REASON_STOP: "stop", api.FINISH_REASON_LENGTH: "length", api.FINISH_REASON_ABORT: "abort"}
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=sample.token_ids,
            finish_reason=reasons[finished.reason],
            prompt_tokens=finished.usage.prompt_tokens,
            completion_tokens=finished.usage.completion_tokens,
            cached_tokens=finished.usage.cached_tokens,
            output_logprobs=self._logprobs(sample.token_ids, sample.logprobs),
            index=finished.sample_index,
        )
        match finished.WhichOneof("match"):
            case "stop_token_id":
                complete.matched_token_id = finished.stop_token_id
            case "stop_string":
                complete.matched_stop_str = finished.stop_string
        return complete

    def _logprobs(self, token_ids: Any, logprobs: Any) -> vllm_engine_pb2.OutputLogProbs | None:
        if not self._with_logprobs:
            return None
        return vllm_engine_pb2.OutputLogProbs(token_logprobs=logprobs, token_ids=token_ids[: len(logprobs)])


def tokenizer_bundle(folder: ModelFolder) -> bytes:
    """A zip of what a gateway needs to render, encode and decode as we do. Template and tokenizer are as we read them;
    as with us, the marks of tool calls are text."""
    tokenizer = json.loads(load_tokenizer(folder.path).to_str())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in TOOL_CALL_MARKS
    files = {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode()}
    if (template := read_chat_templates(folder.path).get("default")) is not None:
        files["chat_template.jinja"] = template.encode()
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        if (folder.path / name).is_file():
            files[name] = (folder.path / name).read_bytes()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return packed.getvalue()


class GatewayServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """VllmEngine over one Scheduler, under the name of one model. `is_serving`: what health says."""

    def __init__(self, scheduler: Scheduler, model: ServedModel, is_serving: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._model = model
        self._is_serving = is_serving
        self._started_at = time.monotonic()
        self._bundle: bytes | None = None

    async def Generate(self, message: vllm_engine_pb2.GenerateRequest, context: Context) -> None:
        try:
            request = to_generate_request(message, self._model)
            replies = Replies(is_stream=message.stream, with_logprobs=request.logprobs)
            stream = await self._scheduler.submit(request, current_caller())
            async with reading(self._scheduler, stream, context):
                async for event in stream.read():
                    for reply in replies.of(event):
                        await write(self._scheduler, reply, context)
        except InvalidField as error:
            name = error.field.removeprefix("sampling.")
            await abort_with(context, InvalidField(_THEIR_NAMES.get(name, name), error.message))
        except ServiceError as error:
            await abort_with(context, error)

    async def Abort(self, message: vllm_engine_pb2.AbortRequest, context: Context) -> vllm_engine_pb2.AbortResponse:
        try:
            check_abort(api.AbortRequest(request_ids=message.request_ids))
        except ServiceError as error:
            await abort_with(context, error)
        for request_id in message.request_ids:
            self._scheduler.abort(request_id, current_caller())
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, message: object, context: Context) -> vllm_engine_pb2.HealthCheckResponse:
        if self._is_serving():
            return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="serving")
        why = "shutting down" if self._scheduler.is_closing else "no worker is ready"
        return vllm_engine_pb2.HealthCheckResponse(healthy=False, message=why)

    async def GetModelInfo(self, message: object, context: Context) -> vllm_engine_pb2.GetModelInfoResponse:
        folder = self._scheduler.folder
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=self._model.name,
            served_model_name=self._model.name,
            is_generation=True,
            max_context_length=folder.context_length,
            max_req_input_len=folder.context_length - 1,
            vocab_size=folder.num_tokens,
            model_type=folder.config.get("model_type", ""),
            architectures=folder.config.get("architectures", ()),
            eos_token_ids=folder.stop_token_ids,
            default_sampling_params_json=json.dumps({"temperature": 0.0}),
        )

    async def GetServerInfo(self, message: object, context: Context) -> vllm_engine_pb2.GetServerInfoResponse:
        info = self._scheduler.info()
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=info.running + info.queued,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=info.block_size,
            max_num_seqs=sum(worker.max_rows for worker in info.workers),
        )

    async def GetLoads(self, message: object, context: Context) -> vllm_engine_pb2.GetLoadsResponse:
        info = self._scheduler.info()
        held = sum(worker.pages_held for worker in info.workers)
        total = sum(worker.pages_total for worker in info.workers)
        max_rows = sum(worker.max_rows for worker in info.workers)
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=info.running,
            num_waiting_reqs=info.queued,
            num_total_reqs=info.running + info.queued,
            token_usage=held / total if total else 0.0,
            utilization=info.running / max_rows if max_rows else 0.0,
            max_running_requests=max_rows,
        )
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return vllm_engine_pb2.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, message: object, context: Context) -> None:
        if self._bundle is None:
            self._bundle = await asyncio.to_thread(tokenizer_bundle, self._scheduler.folder)
        packed = self._bundle
        for start in range(0, len(packed), CHUNK_BYTES):
            part = packed[start : start + CHUNK_BYTES]
            is_last = start + CHUNK_BYTES >= len(packed)
            sha256 = hashlib.sha256(packed).hexdigest() if is_last else ""
            await context.write(common_pb2.GetTokenizerChunk(data=part, sha256=sha256))

    async def _unimplemented(self, message: object, context: Context) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not served here")

    # Their generated forms would answer the same, and log a traceback.
    Embed = FlushCache = StartProfile = StopProfile = SubscribeKvEvents = _unimplemented


def add_to_server(
    server: grpc.aio.Server, scheduler: Scheduler, model: ServedModel, is_serving: Callable[[], bool]
) -> None:
    """Serve VllmEngine under the name of one model; `is_serving`: what health says."""
    servicer = GatewayServicer(scheduler, model, is_serving)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
