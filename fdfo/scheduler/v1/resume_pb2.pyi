from fdfo.scheduler.v1 import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResumeState(_message.Message):
    __slots__ = ("request", "sample")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    request: ResumedRequest
    sample: ResumedSample
    def __init__(self, request: _Optional[_Union[ResumedRequest, _Mapping]] = ..., sample: _Optional[_Union[ResumedSample, _Mapping]] = ...) -> None: ...

class ResumedRequest(_message.Message):
    __slots__ = ("fingerprint", "request_hash", "seed", "max_new_tokens", "algorithm", "algorithm_params")
    class AlgorithmParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_HASH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_PARAMS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    request_hash: bytes
    seed: int
    max_new_tokens: int
    algorithm: str
    algorithm_params: _containers.ScalarMap[str, float]
    def __init__(self, fingerprint: _Optional[str] = ..., request_hash: _Optional[bytes] = ..., seed: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., algorithm: _Optional[str] = ..., algorithm_params: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ResumedSample(_message.Message):
    __slots__ = ("sample_index", "published_characters", "usage", "logprobs", "first_unmask_steps")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNMASK_STEPS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    published_characters: int
    usage: _scheduler_pb2.Usage
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    first_unmask_steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample_index: _Optional[int] = ..., published_characters: _Optional[int] = ..., usage: _Optional[_Union[_scheduler_pb2.Usage, _Mapping]] = ..., logprobs: _Optional[_Iterable[float]] = ..., first_unmask_steps: _Optional[_Iterable[int]] = ...) -> None: ...
