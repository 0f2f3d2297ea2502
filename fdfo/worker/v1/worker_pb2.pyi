from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_FDFO: _ClassVar[Mode]
    MODE_SYNC: _ClassVar[Mode]

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_RUNNING: _ClassVar[RowStatus]
    ROW_STATUS_PREFILLING: _ClassVar[RowStatus]
    ROW_STATUS_ENDED: _ClassVar[RowStatus]
    ROW_STATUS_RELEASED: _ClassVar[RowStatus]
    ROW_STATUS_NO_KV_SPACE: _ClassVar[RowStatus]
    ROW_STATUS_SLOT_MISSING: _ClassVar[RowStatus]
    ROW_STATUS_BAD_STATE: _ClassVar[RowStatus]
    ROW_STATUS_BAD_NUMERICS: _ClassVar[RowStatus]

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_REASON_UNSPECIFIED: _ClassVar[EndReason]
    END_REASON_STOP_TOKEN: _ClassVar[EndReason]
    END_REASON_LIMIT: _ClassVar[EndReason]
MODE_UNSPECIFIED: Mode
MODE_FDFO: Mode
MODE_SYNC: Mode
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_RUNNING: RowStatus
ROW_STATUS_PREFILLING: RowStatus
ROW_STATUS_ENDED: RowStatus
ROW_STATUS_RELEASED: RowStatus
ROW_STATUS_NO_KV_SPACE: RowStatus
ROW_STATUS_SLOT_MISSING: RowStatus
ROW_STATUS_BAD_STATE: RowStatus
ROW_STATUS_BAD_NUMERICS: RowStatus
END_REASON_UNSPECIFIED: EndReason
END_REASON_STOP_TOKEN: EndReason
END_REASON_LIMIT: EndReason

class RowNames(_message.Message):
    __slots__ = ("request_ids", "sample_indexes", "attempts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    sample_indexes: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., sample_indexes: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ...) -> None: ...

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

class StartRow(_message.Message):
    __slots__ = ("request_id", "sample_index", "attempt", "prompt_length", "prefix_ids", "block_index", "block_ids", "block_mask", "step_count", "algorithm", "algorithm_params", "algo_state", "sampling", "stop_token_ids", "tokens_left", "want_first_unmask_steps", "want_logprobs", "first_unmask_steps", "logprobs")
    class AlgorithmParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MASK_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ALGO_STATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    WANT_FIRST_UNMASK_STEPS_FIELD_NUMBER: _ClassVar[int]
    WANT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNMASK_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample_index: int
    attempt: int
    prompt_length: int
    prefix_ids: bytes
    block_index: int
    block_ids: bytes
    block_mask: bytes
    step_count: int
    algorithm: str
    algorithm_params: _containers.ScalarMap[str, float]
    algo_state: bytes
    sampling: SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens_left: int
    want_first_unmask_steps: bool
    want_logprobs: bool
    first_unmask_steps: bytes
    logprobs: bytes
    def __init__(self, request_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_length: _Optional[int] = ..., prefix_ids: _Optional[bytes] = ..., block_index: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., block_mask: _Optional[bytes] = ..., step_count: _Optional[int] = ..., algorithm: _Optional[str] = ..., algorithm_params: _Optional[_Mapping[str, float]] = ..., algo_state: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., tokens_left: _Optional[int] = ..., want_first_unmask_steps: bool = ..., want_logprobs: bool = ..., first_unmask_steps: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class RunRoundRequest(_message.Message):
    __slots__ = ("scheduler_id", "generation", "worker_epoch", "fingerprint", "round_id", "acked_round_id", "mode", "max_forwards", "max_round_ms", "releases", "starts", "continues", "want_forward_times", "traceparents")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ACKED_ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROUND_MS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    WANT_FORWARD_TIMES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    generation: int
    worker_epoch: str
    fingerprint: str
    round_id: int
    acked_round_id: int
    mode: Mode
    max_forwards: int
    max_round_ms: int
    releases: RowNames
    starts: _containers.RepeatedCompositeFieldContainer[StartRow]
    continues: RowNames
    want_forward_times: bool
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, scheduler_id: _Optional[str] = ..., generation: _Optional[int] = ..., worker_epoch: _Optional[str] = ..., fingerprint: _Optional[str] = ..., round_id: _Optional[int] = ..., acked_round_id: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., max_forwards: _Optional[int] = ..., max_round_ms: _Optional[int] = ..., releases: _Optional[_Union[RowNames, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[StartRow, _Mapping]]] = ..., continues: _Optional[_Union[RowNames, _Mapping]] = ..., want_forward_times: bool = ..., traceparents: _Optional[_Iterable[str]] = ...) -> None: ...

class RowReplies(_message.Message):
    __slots__ = ("statuses", "accept_lengths", "done_block_indexes", "done_ids", "has_block", "block_indexes", "block_ids", "block_masks", "step_counts", "algo_states", "forwards", "prefilled_tokens", "cached_tokens", "end_reasons", "end_positions", "errors", "done_first_unmask_steps", "done_logprobs", "block_first_unmask_steps", "block_logprobs", "forwards_before")
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DONE_BLOCK_INDEXES_FIELD_NUMBER: _ClassVar[int]
    DONE_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEXES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MASKS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ALGO_STATES_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_REASONS_FIELD_NUMBER: _ClassVar[int]
    END_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIRST_UNMASK_STEPS_FIELD_NUMBER: _ClassVar[int]
    DONE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIRST_UNMASK_STEPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[RowStatus]
    accept_lengths: _containers.RepeatedScalarFieldContainer[int]
    done_block_indexes: _containers.RepeatedScalarFieldContainer[int]
    done_ids: bytes
    has_block: _containers.RepeatedScalarFieldContainer[bool]
    block_indexes: _containers.RepeatedScalarFieldContainer[int]
    block_ids: bytes
    block_masks: bytes
    step_counts: _containers.RepeatedScalarFieldContainer[int]
    algo_states: _containers.RepeatedScalarFieldContainer[bytes]
    forwards: _containers.RepeatedScalarFieldContainer[int]
    prefilled_tokens: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    end_reasons: _containers.RepeatedScalarFieldContainer[EndReason]
    end_positions: _containers.RepeatedScalarFieldContainer[int]
    errors: _containers.ScalarMap[int, str]
    done_first_unmask_steps: bytes
    done_logprobs: bytes
    block_first_unmask_steps: bytes
    block_logprobs: bytes
    forwards_before: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, statuses: _Optional[_Iterable[_Union[RowStatus, str]]] = ..., accept_lengths: _Optional[_Iterable[int]] = ..., done_block_indexes: _Optional[_Iterable[int]] = ..., done_ids: _Optional[bytes] = ..., has_block: _Optional[_Iterable[bool]] = ..., block_indexes: _Optional[_Iterable[int]] = ..., block_ids: _Optional[bytes] = ..., block_masks: _Optional[bytes] = ..., step_counts: _Optional[_Iterable[int]] = ..., algo_states: _Optional[_Iterable[bytes]] = ..., forwards: _Optional[_Iterable[int]] = ..., prefilled_tokens: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., end_reasons: _Optional[_Iterable[_Union[EndReason, str]]] = ..., end_positions: _Optional[_Iterable[int]] = ..., errors: _Optional[_Mapping[int, str]] = ..., done_first_unmask_steps: _Optional[bytes] = ..., done_logprobs: _Optional[bytes] = ..., block_first_unmask_steps: _Optional[bytes] = ..., block_logprobs: _Optional[bytes] = ..., forwards_before: _Optional[_Iterable[int]] = ...) -> None: ...

class PageUsage(_message.Message):
    __slots__ = ("free", "cached", "held", "total")
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    free: int
    cached: int
    held: int
    total: int
    def __init__(self, free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Allowance(_message.Message):
    __slots__ = ("rows", "pages")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    rows: int
    pages: int
    def __init__(self, rows: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class RoundWork(_message.Message):
    __slots__ = ("forwards", "device_ms", "denoise_row_forwards", "waiting_row_forwards", "prefill_tokens", "allocator_calls", "queued_ms", "begin_ms", "reply_ms", "forward_begins_us", "forward_ends_us")
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    DENOISE_ROW_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ROW_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_CALLS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_MS_FIELD_NUMBER: _ClassVar[int]
    REPLY_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BEGINS_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ENDS_US_FIELD_NUMBER: _ClassVar[int]
    forwards: int
    device_ms: float
    denoise_row_forwards: int
    waiting_row_forwards: int
    prefill_tokens: int
    allocator_calls: int
    queued_ms: float
    begin_ms: float
    reply_ms: float
    forward_begins_us: _containers.RepeatedScalarFieldContainer[int]
    forward_ends_us: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, forwards: _Optional[int] = ..., device_ms: _Optional[float] = ..., denoise_row_forwards: _Optional[int] = ..., waiting_row_forwards: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., allocator_calls: _Optional[int] = ..., queued_ms: _Optional[float] = ..., begin_ms: _Optional[float] = ..., reply_ms: _Optional[float] = ..., forward_begins_us: _Optional[_Iterable[int]] = ..., forward_ends_us: _Optional[_Iterable[int]] = ...) -> None: ...

class RunRoundResponse(_message.Message):
    __slots__ = ("worker_epoch", "round_id", "rows", "pages", "allowance", "work", "draining")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    ALLOWANCE_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: str
    round_id: int
    rows: RowReplies
    pages: PageUsage
    allowance: Allowance
    work: RoundWork
    draining: bool
    def __init__(self, worker_epoch: _Optional[str] = ..., round_id: _Optional[int] = ..., rows: _Optional[_Union[RowReplies, _Mapping]] = ..., pages: _Optional[_Union[PageUsage, _Mapping]] = ..., allowance: _Optional[_Union[Allowance, _Mapping]] = ..., work: _Optional[_Union[RoundWork, _Mapping]] = ..., draining: bool = ...) -> None: ...

class ReleaseRequestsRequest(_message.Message):
    __slots__ = ("scheduler_id", "generation", "rows")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    generation: int
    rows: RowNames
    def __init__(self, scheduler_id: _Optional[str] = ..., generation: _Optional[int] = ..., rows: _Optional[_Union[RowNames, _Mapping]] = ...) -> None: ...

class ReleaseRequestsResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: PageUsage
    def __init__(self, pages: _Optional[_Union[PageUsage, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("scheduler_id", "generation")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    generation: int
    def __init__(self, scheduler_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("worker_epoch", "draining", "pages", "allowance")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    ALLOWANCE_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: str
    draining: bool
    pages: PageUsage
    allowance: Allowance
    def __init__(self, worker_epoch: _Optional[str] = ..., draining: bool = ..., pages: _Optional[_Union[PageUsage, _Mapping]] = ..., allowance: _Optional[_Union[Allowance, _Mapping]] = ...) -> None: ...

class GetWorkerInfoRequest(_message.Message):
    __slots__ = ("scheduler_id",)
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    def __init__(self, scheduler_id: _Optional[str] = ...) -> None: ...

class AlgorithmParam(_message.Message):
    __slots__ = ("name", "default_value", "min_value", "max_value", "is_integer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_VALUE_FIELD_NUMBER: _ClassVar[int]
    MIN_VALUE_FIELD_NUMBER: _ClassVar[int]
    MAX_VALUE_FIELD_NUMBER: _ClassVar[int]
    IS_INTEGER_FIELD_NUMBER: _ClassVar[int]
    name: str
    default_value: float
    min_value: float
    max_value: float
    is_integer: bool
    def __init__(self, name: _Optional[str] = ..., default_value: _Optional[float] = ..., min_value: _Optional[float] = ..., max_value: _Optional[float] = ..., is_integer: bool = ...) -> None: ...

class AlgorithmInfo(_message.Message):
    __slots__ = ("name", "params", "edits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    EDITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    params: _containers.RepeatedCompositeFieldContainer[AlgorithmParam]
    edits: bool
    def __init__(self, name: _Optional[str] = ..., params: _Optional[_Iterable[_Union[AlgorithmParam, _Mapping]]] = ..., edits: bool = ...) -> None: ...

class WorkerCounters(_message.Message):
    __slots__ = ("rounds", "forwards", "device_ms", "denoise_row_forwards", "waiting_row_forwards", "prefill_tokens", "blocks_done", "allocator_calls", "expired_leases", "refused_generations")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    DENOISE_ROW_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ROW_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DONE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_CALLS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    forwards: int
    device_ms: float
    denoise_row_forwards: int
    waiting_row_forwards: int
    prefill_tokens: int
    blocks_done: int
    allocator_calls: int
    expired_leases: int
    refused_generations: int
    def __init__(self, rounds: _Optional[int] = ..., forwards: _Optional[int] = ..., device_ms: _Optional[float] = ..., denoise_row_forwards: _Optional[int] = ..., waiting_row_forwards: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., blocks_done: _Optional[int] = ..., allocator_calls: _Optional[int] = ..., expired_leases: _Optional[int] = ..., refused_generations: _Optional[int] = ...) -> None: ...

class GetWorkerInfoResponse(_message.Message):
    __slots__ = ("worker_epoch", "fingerprint", "version", "model_architecture", "block_size", "page_size", "vocab_size", "mask_token_id", "context_length", "max_running_requests", "chunked_prefill_size", "dtype", "device", "attention_backend", "batch_invariant", "algorithms", "pages", "counters", "draining", "slots_used")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_PREFILL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    ALGORITHMS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: str
    fingerprint: str
    version: str
    model_architecture: str
    block_size: int
    page_size: int
    vocab_size: int
    mask_token_id: int
    context_length: int
    max_running_requests: int
    chunked_prefill_size: int
    dtype: str
    device: str
    attention_backend: str
    batch_invariant: bool
    algorithms: _containers.RepeatedCompositeFieldContainer[AlgorithmInfo]
    pages: PageUsage
    counters: WorkerCounters
    draining: bool
    slots_used: int
    def __init__(self, worker_epoch: _Optional[str] = ..., fingerprint: _Optional[str] = ..., version: _Optional[str] = ..., model_architecture: _Optional[str] = ..., block_size: _Optional[int] = ..., page_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., mask_token_id: _Optional[int] = ..., context_length: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., chunked_prefill_size: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., attention_backend: _Optional[str] = ..., batch_invariant: bool = ..., algorithms: _Optional[_Iterable[_Union[AlgorithmInfo, _Mapping]]] = ..., pages: _Optional[_Union[PageUsage, _Mapping]] = ..., counters: _Optional[_Union[WorkerCounters, _Mapping]] = ..., draining: bool = ..., slots_used: _Optional[int] = ...) -> None: ...
