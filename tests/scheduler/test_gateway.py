"""What a gateway for OpenAI clients asks of the scheduler, and what it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer

from common.errors import InvalidField
from common.grpc_server import GrpcService
from common.model_folder import read_model_folder
from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.config_files import ServedModel
from tests.scheduler.in_memory import FOLDER, expected
from tests.security.services import Running, scheduler_and_worker
from tests.text.folders import LLADA2_TEMPLATE, llada2_tokenizer, write_folder

pytest.importorskip("smg_grpc_proto", reason="the extra gateway is not installed: make venv")

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from scheduler_svc.gateway import Replies, add_to_server, to_generate_request, tokenizer_bundle

MODEL = ServedModel("quick", algorithm="LowConfidence", algorithm_params={"threshold": 0.5})


def asked(**sampling: Any) -> vllm_engine_pb2.GenerateRequest:
    return vllm_engine_pb2.GenerateRequest(
        request_id="r",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6]),
        sampling_params=vllm_engine_pb2.SamplingParams(**sampling),
    )


def test_a_request_with_everything() -> None:
    """Each field that is served arrives, and the model's name brings algorithm and parameters."""
    given = asked(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        seed=9,
        max_tokens=20,
        stop=["x", "y"],
        stop_token_ids=[4],
        ignore_eos=True,
        n=3,
        logprobs=1,
    )
    assert to_generate_request(given, MODEL) == api.GenerateRequest(
        request_id="r",
        prompt_ids=api.TokenIds(ids=[5, 6]),
        sampling=api.SamplingParams(temperature=0.5, top_p=0.75, top_k=7, min_p=0.25, seed=9),
        max_new_tokens=20,
        stop=["x", "y"],
        stop_token_ids=[4],
        ignore_eos=True,
        algorithm="LowConfidence",
        algorithm_params={"threshold": 0.5},
        n=3,
        logprobs=True,
    )


def test_what_a_request_leaves_out_is_left_to_the_scheduler() -> None:
    """Zeros that mean "not said" are not taken for wishes, nor what a gateway sets for its own decoding."""
    unsaid = to_generate_request(
        asked(repetition_penalty=1.0, skip_special_tokens=True, spaces_between_special_tokens=True),
        ServedModel("plain"),
    )
    assert [unsaid.HasField(name) for name in ("n", "max_new_tokens")] == [False, False]
    assert not unsaid.sampling.HasField("top_p") and not unsaid.sampling.HasField("seed")
    assert (unsaid.sampling.temperature, unsaid.algorithm, unsaid.logprobs) == (0.0, "", False)


def test_a_prompt_in_text_has_its_special_tokens() -> None:
    """As engines of this protocol read it."""
    request = to_generate_request(vllm_engine_pb2.GenerateRequest(text="<role>"), MODEL)
    assert (request.text, request.parse_special_tokens) == ("<role>", True)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"json_object": True}, "json_object"),
        ({"structural_tag": "x"}, "structural_tag"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_is_not_served_is_refused_by_name(sampling: dict[str, Any], field: str) -> None:
    """A wish that would have no effect is an error that names it, in the protocol's own words."""
    with pytest.raises(InvalidField) as caught:
        to_generate_request(asked(**sampling), MODEL)
    assert caught.value.field == field


def test_pictures_are_refused() -> None:
    """So is what stands beside the sampling parameters."""
    with pytest.raises(InvalidField, match="mm_inputs: is not supported"):
        to_generate_request(vllm_engine_pb2.GenerateRequest(mm_inputs={}), MODEL)


def committed(token_ids: list[int], more: list[int] = [], sample: int = 0, **fields: Any) -> api.GenerateResponse:  # noqa: B006
    """A message with these published ids, and with `more` committed ones."""
    return api.GenerateResponse(
        committed=api.Committed(token_ids=token_ids, committed_ids=more or token_ids, sample_index=sample, **fields)
    )


def finished(sample: int = 0, **fields: Any) -> api.GenerateResponse:
    usage = api.Usage(prompt_tokens=4, completion_tokens=2, cached_tokens=1)
    return api.GenerateResponse(finished=api.Finished(usage=usage, sample_index=sample, **fields))


STARTED = api.GenerateResponse(started=api.Started(prompt_tokens=4))


def answered(*events: api.GenerateResponse, is_stream: bool, with_logprobs: bool = False) -> list[Any]:
    replies = Replies(is_stream=is_stream, with_logprobs=with_logprobs)
    return [getattr(reply, reply.WhichOneof("response")) for event in events for reply in replies.of(event)]


def test_a_stream_has_a_chunk_a_publication_and_one_complete_a_sample() -> None:
    """Chunks of two samples keep their index, counts add up, and each Complete has all ids of its sample."""
    events = [
        STARTED,
        committed([7, 8], logprobs=[-0.5, -0.25]),
        committed([9], sample=1, logprobs=[-1.0]),
        finished(1, reason=api.FINISH_REASON_LENGTH),
        committed([6], logprobs=[-2.0]),
        finished(0, reason=api.FINISH_REASON_STOP, stop_token_id=3, committed_ids=[3]),
    ]
    one, other, end_of_other, two, end = answered(*events, is_stream=True, with_logprobs=True)
    assert [(c.index, list(c.token_ids), c.prompt_tokens, c.completion_tokens) for c in (one, other, two)] == [
        (0, [7, 8], 4, 2),
        (1, [9], 4, 1),
        (0, [6], 4, 3),
    ]
    assert list(two.output_logprobs.token_logprobs) == [-2.0] and list(two.output_logprobs.token_ids) == [6]
    assert (end_of_other.index, list(end_of_other.output_ids), end_of_other.finish_reason) == (1, [9], "length")
    assert (end.index, list(end.output_ids), end.finish_reason) == (0, [7, 8, 6], "stop"), "no stop token"
    assert (end.matched_token_id, end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (3, 4, 2, 1)
    assert list(end.output_logprobs.token_logprobs) == [-0.5, -0.25, -2.0]


def test_a_call_that_does_not_stream_has_completes_only() -> None:
    """Nothing comes before the one Complete, which has everything."""
    (end,) = answered(
        STARTED, committed([7]), committed([8]), finished(reason=api.FINISH_REASON_LENGTH), is_stream=False
    )
    assert list(end.output_ids) == [7, 8]
    assert not end.HasField("output_logprobs")


def test_samples_of_a_whole_answer_come_by_index() -> None:
    """Where nothing is streamed the gateway numbers choices as they come, so one that is done early waits its turn."""
    replies = Replies(is_stream=False, with_logprobs=False)
    came = []
    for sample in (2, 0, 3, 1):
        events = [committed([10 + sample], sample=sample), finished(sample, reason=api.FINISH_REASON_LENGTH)]
        came.append([(it.complete.index, *it.complete.output_ids) for event in events for it in replies.of(event)])
    assert came == [[], [(0, 10)], [], [(1, 11), (2, 12), (3, 13)]]


def test_a_stop_string_that_begins_inside_a_token() -> None:
    """The gateway gets the ids up to the string's end, streamed too: it cuts the text at the string itself."""
    events = [
        STARTED,
        committed([7], [7, 8]),
        finished(reason=api.FINISH_REASON_STOP, stop_string="x", committed_ids=[9]),
    ]
    chunk, rest, end = answered(*events, is_stream=True)
    assert (list(chunk.token_ids), list(rest.token_ids), list(end.output_ids)) == ([7], [8, 9], [7, 8, 9])
    assert (end.matched_stop_str, end.completion_tokens) == ("x", 2)


def test_an_aborted_request_says_so() -> None:
    """With what it had."""
    (end,) = answered(STARTED, committed([7]), finished(reason=api.FINISH_REASON_ABORT), is_stream=False)
    assert (end.finish_reason, list(end.output_ids)) == ("abort", [7])


class Engine:
    """The service over one connection, as a gateway has it."""

    def __init__(self, running: Running, channel: grpc.aio.Channel, service: GrpcService) -> None:
        self.running, self.service = running, service
        self.stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def generate(self, max_tokens: int, request_id: str = "r", **fields: Any) -> Any:
        request = asked(max_tokens=max_tokens)
        request.MergeFrom(vllm_engine_pb2.GenerateRequest(request_id=request_id, **fields))
        return self.stub.Generate(request, timeout=20)


def play(scene: Callable[[Engine], Awaitable[None]], **settings: Any) -> None:
    @contextlib.asynccontextmanager
    async def engine() -> AsyncIterator[Engine]:
        async with scheduler_and_worker(**settings) as running:
            service = GrpcService("127.0.0.1", 0, [])
            add_to_server(service.server, running.scheduler, ServedModel("quick"), lambda: service.is_serving)
            target = f"127.0.0.1:{await service.start()}"
            service.set_serving(True)
            try:
                async with grpc.aio.insecure_channel(target) as channel:
                    yield Engine(running, channel, service)
            finally:
                await service.stop(0)

    async def run() -> None:
        async with asyncio.timeout(20), engine() as the_engine:
            await scene(the_engine)

    asyncio.run(run())


def test_generate_over_grpc() -> None:
    """The ids are the core's, streamed and not; an error names the field as gateways' clients know it."""

    async def scene(engine: Engine) -> None:
        (whole,) = [reply.complete async for reply in engine.generate(40)]
        assert list(whole.output_ids) == expected(2, 40)
        replies = [reply async for reply in engine.generate(40, stream=True)]
        assert len(replies) == 3, "a chunk for each block, and the end"
        assert [token for reply in replies for token in reply.chunk.token_ids] == expected(2, 40)
        assert replies[-1].complete.finish_reason == "length"
        with pytest.raises(grpc.aio.AioRpcError, match="max_tokens: must be at most 1022") as caught:
            await engine.generate(5000).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    play(scene)


def test_both_ways_to_give_up() -> None:
    """Abort ends the stream with reason "abort", also of one that waits; a cancelled call frees its row. An Abort of
    what is over is nothing."""

    async def scene(engine: Engine) -> None:
        live = engine.running.scheduler.live
        waiting = [engine.generate(900, f"r{i}") for i in range(2)]
        while len(live) < 2:
            await asyncio.sleep(0.001)
        await engine.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r0", "r1", "over"]))
        for call in waiting:
            assert [reply.complete.finish_reason async for reply in call] == ["abort"]
        call = engine.generate(900)
        while not live:
            await asyncio.sleep(0.001)
        call.cancel()
        while live:
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError, match="at most 4096"):
            await engine.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["x"] * 4097))

    play(scene, max_running_requests_per_client=1)


def test_health_follows_the_service() -> None:
    """A scheduler that is not serving says why, which takes it out of the gateway's choice."""

    async def scene(engine: Engine) -> None:
        request = vllm_engine_pb2.HealthCheckRequest()
        assert (await engine.stub.HealthCheck(request)).healthy
        engine.service.set_serving(False)
        assert (await engine.stub.HealthCheck(request)).message == "no worker is ready"
        engine.running.scheduler.is_closing = True
        answer = await engine.stub.HealthCheck(request)
        assert (answer.healthy, answer.message) == (False, "shutting down")

    play(scene)


def test_what_a_gateway_asks_about() -> None:
    """Model, load and tokenizer; what is not there is UNIMPLEMENTED."""

    async def scene(engine: Engine) -> None:
        await engine.generate(1).read()
        model = await engine.stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("quick", 1024, 512)
        assert not model.tokenizer_path and list(model.eos_token_ids) == list(FOLDER.stop_token_ids)
        assert json.loads(model.default_sampling_params_json) == {"temperature": 0.0}
        server = await engine.stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert (server.server_type, server.max_num_seqs) == ("vllm-grpc", 64)
        (load,) = (await engine.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (0, 0, 64)
        chunks = [chunk async for chunk in engine.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        packed = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(packed).hexdigest()]
        assert {"tokenizer.json", "config.json"} <= set(zipfile.ZipFile(io.BytesIO(packed)).namelist())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine.stub.Embed(vllm_engine_pb2.EmbedRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    play(scene)


def test_the_bundle_reads_as_we_read(tmp_path: Path) -> None:
    """Template and tokens of the model folder, named templates resolved; the marks of tool calls are text there too."""
    templates = [{"name": "default", "template": LLADA2_TEMPLATE}, {"name": "other", "template": "{{ 1 }}"}]
    settings = {"chat_template": templates, "mask_token": "<|mask|>"}
    folder = read_model_folder(write_folder(tmp_path, tokenizer=llada2_tokenizer(), tokenizer_config=settings))
    with zipfile.ZipFile(io.BytesIO(tokenizer_bundle(folder))) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert files["chat_template.jinja"] == LLADA2_TEMPLATE
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"}
    theirs = Tokenizer.from_str(files["tokenizer.json"])
    text = "<role>one\n<tool_call>\n{}\n</tool_call><|role_end|>"
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ids == llada2_tokenizer().encode(text, add_special_tokens=False).ids
    assert theirs.decode(ids, skip_special_tokens=True) == "one\n<tool_call>\n{}\n</tool_call>"
