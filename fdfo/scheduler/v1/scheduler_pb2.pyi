from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class WatchedStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WATCHED_STATUS_UNSPECIFIED: _ClassVar[WatchedStatus]
    WATCHED_STATUS_RUNNING: _ClassVar[WatchedStatus]
    WATCHED_STATUS_PREFILLING: _ClassVar[WatchedStatus]
    WATCHED_STATUS_ENDED: _ClassVar[WatchedStatus]
    WATCHED_STATUS_RELEASED: _ClassVar[WatchedStatus]
    WATCHED_STATUS_NO_PLACE: _ClassVar[WatchedStatus]
    WATCHED_STATUS_FAILED: _ClassVar[WatchedStatus]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
WATCHED_STATUS_UNSPECIFIED: WatchedStatus
WATCHED_STATUS_RUNNING: WatchedStatus
WATCHED_STATUS_PREFILLING: WatchedStatus
WATCHED_STATUS_ENDED: WatchedStatus
WATCHED_STATUS_RELEASED: WatchedStatus
WATCHED_STATUS_NO_PLACE: WatchedStatus
WATCHED_STATUS_FAILED: WatchedStatus

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools", "chat_template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedScalarFieldContainer[str]
    chat_template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ..., chat_template_kwargs: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "prompt_ids", "messages", "sampling", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos", "algorithm", "algorithm_params", "parse_special_tokens", "logprobs", "first_unmask_steps", "n", "priority", "resumes", "provisional_every_forwards", "json_schema", "regex", "grammar", "logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
    class AlgorithmParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNMASK_STEPS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    PROVISIONAL_EVERY_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    prompt_ids: TokenIds
    messages: ChatMessages
    sampling: SamplingParams
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    algorithm: str
    algorithm_params: _containers.ScalarMap[str, float]
    parse_special_tokens: bool
    logprobs: bool
    first_unmask_steps: bool
    n: int
    priority: int
    resumes: _containers.RepeatedCompositeFieldContainer[Resume]
    provisional_every_forwards: int
    json_schema: str
    regex: str
    grammar: str
    logit_bias: _containers.ScalarMap[int, float]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., prompt_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., algorithm: _Optional[str] = ..., algorithm_params: _Optional[_Mapping[str, float]] = ..., parse_special_tokens: bool = ..., logprobs: bool = ..., first_unmask_steps: bool = ..., n: _Optional[int] = ..., priority: _Optional[int] = ..., resumes: _Optional[_Iterable[_Union[Resume, _Mapping]]] = ..., provisional_every_forwards: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_new_tokens: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("committed_ids", "value")
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    value: bytes
    def __init__(self, committed_ids: _Optional[_Iterable[int]] = ..., value: _Optional[bytes] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "seed", "queue_position", "prompt_tokens", "resume")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    queue_position: int
    prompt_tokens: int
    resume: bytes
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., queue_position: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., resume: _Optional[bytes] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("text", "token_ids", "forwards", "committed_ids", "resume", "logprobs", "first_unmask_steps", "sample_index")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNMASK_STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    forwards: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    resume: bytes
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    first_unmask_steps: _containers.RepeatedScalarFieldContainer[int]
    sample_index: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., forwards: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., resume: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[float]] = ..., first_unmask_steps: _Optional[_Iterable[int]] = ..., sample_index: _Optional[int] = ...) -> None: ...

class Provisional(_message.Message):
    __slots__ = ("block_index", "token_ids", "masked", "sample_index", "pieces", "forwards")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    masked: _containers.RepeatedScalarFieldContainer[bool]
    sample_index: int
    pieces: _containers.RepeatedCompositeFieldContainer[ProvisionalPiece]
    forwards: int
    def __init__(self, block_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., masked: _Optional[_Iterable[bool]] = ..., sample_index: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[ProvisionalPiece, _Mapping]]] = ..., forwards: _Optional[int] = ...) -> None: ...

class ProvisionalPiece(_message.Message):
    __slots__ = ("text", "num_masks")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_MASKS_FIELD_NUMBER: _ClassVar[int]
    text: str
    num_masks: int
    def __init__(self, text: _Optional[str] = ..., num_masks: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "forwards", "rounds")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    forwards: int
    rounds: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., forwards: _Optional[int] = ..., rounds: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "stop_string", "usage", "sample_index", "committed_ids", "resume")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    stop_string: str
    usage: Usage
    sample_index: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    resume: bytes
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., sample_index: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., resume: _Optional[bytes] = ...) -> None: ...

class Interrupted(_message.Message):
    __slots__ = ("usage", "sample_index", "committed_ids", "resume")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    sample_index: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    resume: bytes
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., sample_index: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., resume: _Optional[bytes] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "committed", "provisional", "finished", "interrupted")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PROVISIONAL_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    committed: Committed
    provisional: Provisional
    finished: Finished
    interrupted: Interrupted
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., provisional: _Optional[_Union[Provisional, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., interrupted: _Optional[_Union[Interrupted, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("target", "worker_epoch", "ready", "rows", "max_rows", "pages_free", "pages_cached", "pages_held", "pages_total", "last_error", "version", "device", "dtype", "page_size")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    target: str
    worker_epoch: str
    ready: bool
    rows: int
    max_rows: int
    pages_free: int
    pages_cached: int
    pages_held: int
    pages_total: int
    last_error: str
    version: str
    device: str
    dtype: str
    page_size: int
    def __init__(self, target: _Optional[str] = ..., worker_epoch: _Optional[str] = ..., ready: bool = ..., rows: _Optional[int] = ..., max_rows: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_held: _Optional[int] = ..., pages_total: _Optional[int] = ..., last_error: _Optional[str] = ..., version: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class SchedulerCounters(_message.Message):
    __slots__ = ("requests_finished", "requests_aborted", "rounds", "forwards", "denoise_row_forwards", "waiting_row_forwards", "prefill_tokens", "published_tokens", "blocks_done", "restarts", "preemptions", "device_ms", "round_trip_ms", "host_ms", "allocator_calls", "requests_rejected", "requests_expired", "times_parked")
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    DENOISE_ROW_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ROW_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DONE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_MS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_CALLS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REJECTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    TIMES_PARKED_FIELD_NUMBER: _ClassVar[int]
    requests_finished: int
    requests_aborted: int
    rounds: int
    forwards: int
    denoise_row_forwards: int
    waiting_row_forwards: int
    prefill_tokens: int
    published_tokens: int
    blocks_done: int
    restarts: int
    preemptions: int
    device_ms: float
    round_trip_ms: float
    host_ms: float
    allocator_calls: int
    requests_rejected: int
    requests_expired: int
    times_parked: int
    def __init__(self, requests_finished: _Optional[int] = ..., requests_aborted: _Optional[int] = ..., rounds: _Optional[int] = ..., forwards: _Optional[int] = ..., denoise_row_forwards: _Optional[int] = ..., waiting_row_forwards: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., published_tokens: _Optional[int] = ..., blocks_done: _Optional[int] = ..., restarts: _Optional[int] = ..., preemptions: _Optional[int] = ..., device_ms: _Optional[float] = ..., round_trip_ms: _Optional[float] = ..., host_ms: _Optional[float] = ..., allocator_calls: _Optional[int] = ..., requests_rejected: _Optional[int] = ..., requests_expired: _Optional[int] = ..., times_parked: _Optional[int] = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("scheduler_id", "version", "served_model_name", "fingerprint", "block_size", "context_length", "algorithm", "fdfo", "queued", "running", "max_queued_requests", "workers", "counters", "rounds_in_flight", "num_tokens", "uptime_s", "unix_time_s")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    FDFO_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    version: str
    served_model_name: str
    fingerprint: str
    block_size: int
    context_length: int
    algorithm: str
    fdfo: bool
    queued: int
    running: int
    max_queued_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    counters: SchedulerCounters
    rounds_in_flight: int
    num_tokens: int
    uptime_s: float
    unix_time_s: float
    def __init__(self, scheduler_id: _Optional[str] = ..., version: _Optional[str] = ..., served_model_name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., context_length: _Optional[int] = ..., algorithm: _Optional[str] = ..., fdfo: bool = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., counters: _Optional[_Union[SchedulerCounters, _Mapping]] = ..., rounds_in_flight: _Optional[int] = ..., num_tokens: _Optional[int] = ..., uptime_s: _Optional[float] = ..., unix_time_s: _Optional[float] = ...) -> None: ...

class WatchRoundsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchedRow(_message.Message):
    __slots__ = ("request_id", "sample_index", "status", "block_index", "accept_length", "forwards_before", "forwards", "began_next")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_NEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample_index: int
    status: WatchedStatus
    block_index: int
    accept_length: int
    forwards_before: int
    forwards: int
    began_next: bool
    def __init__(self, request_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., status: _Optional[_Union[WatchedStatus, str]] = ..., block_index: _Optional[int] = ..., accept_length: _Optional[int] = ..., forwards_before: _Optional[int] = ..., forwards: _Optional[int] = ..., began_next: bool = ...) -> None: ...

class WatchRoundsResponse(_message.Message):
    __slots__ = ("worker", "generation", "round_id", "sent_at_us", "replied_at_us", "forward_begins_us", "forward_ends_us", "forwards", "device_ms", "denoise_row_forwards", "waiting_row_forwards", "prefill_tokens", "rows", "other_rows", "missed_rounds")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_US_FIELD_NUMBER: _ClassVar[int]
    REPLIED_AT_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BEGINS_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ENDS_US_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    DENOISE_ROW_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ROW_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OTHER_ROWS_FIELD_NUMBER: _ClassVar[int]
    MISSED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    generation: int
    round_id: int
    sent_at_us: int
    replied_at_us: int
    forward_begins_us: _containers.RepeatedScalarFieldContainer[int]
    forward_ends_us: _containers.RepeatedScalarFieldContainer[int]
    forwards: int
    device_ms: float
    denoise_row_forwards: int
    waiting_row_forwards: int
    prefill_tokens: int
    rows: _containers.RepeatedCompositeFieldContainer[WatchedRow]
    other_rows: int
    missed_rounds: int
    def __init__(self, worker: _Optional[str] = ..., generation: _Optional[int] = ..., round_id: _Optional[int] = ..., sent_at_us: _Optional[int] = ..., replied_at_us: _Optional[int] = ..., forward_begins_us: _Optional[_Iterable[int]] = ..., forward_ends_us: _Optional[_Iterable[int]] = ..., forwards: _Optional[int] = ..., device_ms: _Optional[float] = ..., denoise_row_forwards: _Optional[int] = ..., waiting_row_forwards: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[WatchedRow, _Mapping]]] = ..., other_rows: _Optional[int] = ..., missed_rounds: _Optional[int] = ...) -> None: ...
