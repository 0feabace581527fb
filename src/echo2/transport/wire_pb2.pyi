from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("protocol", "csr_der")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    csr_der: bytes
    def __init__(self, protocol: _Optional[int] = ..., csr_der: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("peer_id", "certificate_der")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_DER_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    certificate_der: bytes
    def __init__(self, peer_id: _Optional[str] = ..., certificate_der: _Optional[bytes] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start", "version")
    START_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    version: int
    def __init__(self, start: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("tokens", "logprobs", "loss_mask", "version_spans", "finish", "reward_parts", "support_tokens", "support_offsets")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    logprobs: bytes
    loss_mask: bytes
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish: str
    reward_parts: _containers.ScalarMap[str, float]
    support_tokens: bytes
    support_offsets: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish: _Optional[str] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., support_tokens: _Optional[bytes] = ..., support_offsets: _Optional[bytes] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("reward", "reward_parts")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    def __init__(self, reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RolloutGroup(_message.Message):
    __slots__ = ("kind", "number", "step", "lineage", "cursor", "prompt_tokens", "rollouts", "worker_id", "generate_seconds", "logged", "policy", "scores", "routes", "teacher", "teacher_prompt", "samples")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    TEACHER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    number: int
    step: int
    lineage: int
    cursor: int
    prompt_tokens: bytes
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    worker_id: str
    generate_seconds: float
    logged: bool
    policy: str
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    routes: bytes
    teacher: str
    teacher_prompt: bytes
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[str] = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., lineage: _Optional[int] = ..., cursor: _Optional[int] = ..., prompt_tokens: _Optional[bytes] = ..., rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ..., worker_id: _Optional[str] = ..., generate_seconds: _Optional[float] = ..., logged: _Optional[bool] = ..., policy: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., routes: _Optional[bytes] = ..., teacher: _Optional[str] = ..., teacher_prompt: _Optional[bytes] = ..., samples: _Optional[_Iterable[int]] = ...) -> None: ...

class RouteShape(_message.Message):
    __slots__ = ("layers", "chosen", "experts")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    chosen: int
    experts: int
    def __init__(self, layers: _Optional[int] = ..., chosen: _Optional[int] = ..., experts: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "kind", "number", "step", "cursor", "num_samples", "min_version", "exact_version", "deadline", "seconds", "seed", "temperature", "top_p", "top_k", "max_tokens", "environment", "max_turns", "prompt_tokens", "columns_json", "is_chat", "policy", "min_p", "stop", "routes", "first_sample")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_CHAT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    kind: str
    number: int
    step: int
    cursor: int
    num_samples: int
    min_version: int
    exact_version: int
    deadline: float
    seconds: float
    seed: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    environment: str
    max_turns: int
    prompt_tokens: bytes
    columns_json: str
    is_chat: bool
    policy: str
    min_p: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    routes: bool
    first_sample: int
    def __init__(self, lease_id: _Optional[int] = ..., kind: _Optional[str] = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., cursor: _Optional[int] = ..., num_samples: _Optional[int] = ..., min_version: _Optional[int] = ..., exact_version: _Optional[int] = ..., deadline: _Optional[float] = ..., seconds: _Optional[float] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., environment: _Optional[str] = ..., max_turns: _Optional[int] = ..., prompt_tokens: _Optional[bytes] = ..., columns_json: _Optional[str] = ..., is_chat: _Optional[bool] = ..., policy: _Optional[str] = ..., min_p: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., routes: _Optional[bool] = ..., first_sample: _Optional[int] = ...) -> None: ...

class RunFacts(_message.Message):
    __slots__ = ("engine", "forms", "model_config", "slots", "max_tokens", "value_bytes", "has_adapter")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    FORMS_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    engine: str
    forms: _containers.RepeatedScalarFieldContainer[str]
    model_config: str
    slots: int
    max_tokens: int
    value_bytes: int
    has_adapter: bool
    def __init__(self, engine: _Optional[str] = ..., forms: _Optional[_Iterable[str]] = ..., model_config: _Optional[str] = ..., slots: _Optional[int] = ..., max_tokens: _Optional[int] = ..., value_bytes: _Optional[int] = ..., has_adapter: _Optional[bool] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol", "price_usd_per_hour", "held_leases", "engine", "device", "pid", "host", "listen_port", "advertise", "offer", "environments", "installed", "slots", "servers")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PRICE_USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LISTEN_PORT_FIELD_NUMBER: _ClassVar[int]
    ADVERTISE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    price_usd_per_hour: float
    held_leases: _containers.RepeatedScalarFieldContainer[int]
    engine: str
    device: str
    pid: int
    host: str
    listen_port: int
    advertise: str
    offer: str
    environments: _containers.RepeatedScalarFieldContainer[str]
    installed: SnapshotId
    slots: int
    servers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., price_usd_per_hour: _Optional[float] = ..., held_leases: _Optional[_Iterable[int]] = ..., engine: _Optional[str] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., listen_port: _Optional[int] = ..., advertise: _Optional[str] = ..., offer: _Optional[str] = ..., environments: _Optional[_Iterable[str]] = ..., installed: _Optional[_Union[SnapshotId, _Mapping]] = ..., slots: _Optional[int] = ..., servers: _Optional[_Iterable[str]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("settings", "leases", "snapshot", "revoked", "stop", "routes", "dial", "revoked_peers", "check", "sample", "slots")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    DIAL_FIELD_NUMBER: _ClassVar[int]
    REVOKED_PEERS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    settings: RunSettings
    leases: LeaseBatch
    snapshot: SnapshotNotice
    revoked: LeaseRevoked
    stop: Stop
    routes: Routes
    dial: DialPeer
    revoked_peers: RevokedPeers
    check: Check
    sample: bytes
    slots: int
    def __init__(self, settings: _Optional[_Union[RunSettings, _Mapping]] = ..., leases: _Optional[_Union[LeaseBatch, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotNotice, _Mapping]] = ..., revoked: _Optional[_Union[LeaseRevoked, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., routes: _Optional[_Union[Routes, _Mapping]] = ..., dial: _Optional[_Union[DialPeer, _Mapping]] = ..., revoked_peers: _Optional[_Union[RevokedPeers, _Mapping]] = ..., check: _Optional[_Union[Check, _Mapping]] = ..., sample: _Optional[bytes] = ..., slots: _Optional[int] = ...) -> None: ...

class Check(_message.Message):
    __slots__ = ("lease", "group", "ref", "is_from_stream", "form")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    IS_FROM_STREAM_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    group: bytes
    ref: SnapshotId
    is_from_stream: bool
    form: str
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., group: _Optional[bytes] = ..., ref: _Optional[_Union[SnapshotId, _Mapping]] = ..., is_from_stream: _Optional[bool] = ..., form: _Optional[str] = ...) -> None: ...

class CheckReport(_message.Message):
    __slots__ = ("policy", "number", "num_tokens", "fault", "missed", "num_skipped", "surprise", "variance")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SURPRISE_FIELD_NUMBER: _ClassVar[int]
    VARIANCE_FIELD_NUMBER: _ClassVar[int]
    policy: str
    number: int
    num_tokens: int
    fault: str
    missed: str
    num_skipped: int
    surprise: float
    variance: float
    def __init__(self, policy: _Optional[str] = ..., number: _Optional[int] = ..., num_tokens: _Optional[int] = ..., fault: _Optional[str] = ..., missed: _Optional[str] = ..., num_skipped: _Optional[int] = ..., surprise: _Optional[float] = ..., variance: _Optional[float] = ...) -> None: ...

class SnapshotId(_message.Message):
    __slots__ = ("lineage", "version", "policy")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    version: int
    policy: str
    def __init__(self, lineage: _Optional[int] = ..., version: _Optional[int] = ..., policy: _Optional[str] = ...) -> None: ...

class PayloadId(_message.Message):
    __slots__ = ("ref", "base")
    REF_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ref: SnapshotId
    base: SnapshotId
    def __init__(self, ref: _Optional[_Union[SnapshotId, _Mapping]] = ..., base: _Optional[_Union[SnapshotId, _Mapping]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("peer_id", "address")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    address: str
    def __init__(self, peer_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Routes(_message.Message):
    __slots__ = ("payload", "sources", "stripes")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    payload: PayloadId
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    stripes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, payload: _Optional[_Union[PayloadId, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., stripes: _Optional[_Iterable[int]] = ...) -> None: ...

class DialPeer(_message.Message):
    __slots__ = ("peer_id", "address")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    address: str
    def __init__(self, peer_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class RevokedPeers(_message.Message):
    __slots__ = ("peer_ids",)
    PEER_IDS_FIELD_NUMBER: _ClassVar[int]
    peer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RunSettings(_message.Message):
    __slots__ = ("run_id", "heartbeat_seconds", "swap", "slots", "engine", "deterministic", "chat_template_args", "server", "routes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_ARGS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    heartbeat_seconds: float
    swap: str
    slots: int
    engine: str
    deterministic: bool
    chat_template_args: str
    server: str
    routes: bool
    def __init__(self, run_id: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., swap: _Optional[str] = ..., slots: _Optional[int] = ..., engine: _Optional[str] = ..., deterministic: _Optional[bool] = ..., chat_template_args: _Optional[str] = ..., server: _Optional[str] = ..., routes: _Optional[bool] = ...) -> None: ...

class LeaseBatch(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class SnapshotNotice(_message.Message):
    __slots__ = ("lineage", "version", "manifest", "signature", "policy")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    version: int
    manifest: bytes
    signature: bytes
    policy: str
    def __init__(self, lineage: _Optional[int] = ..., version: _Optional[int] = ..., manifest: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., policy: _Optional[str] = ...) -> None: ...

class LeaseRevoked(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: str
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("doing", "bytes_received", "pause_seconds", "bytes_sent", "installed", "refused", "engine")
    DOING_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    doing: str
    bytes_received: int
    pause_seconds: float
    bytes_sent: int
    installed: SnapshotId
    refused: str
    engine: str
    def __init__(self, doing: _Optional[str] = ..., bytes_received: _Optional[int] = ..., pause_seconds: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., installed: _Optional[_Union[SnapshotId, _Mapping]] = ..., refused: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("heartbeat_seconds", "of_no_use")
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OF_NO_USE_FIELD_NUMBER: _ClassVar[int]
    heartbeat_seconds: float
    of_no_use: str
    def __init__(self, heartbeat_seconds: _Optional[float] = ..., of_no_use: _Optional[str] = ...) -> None: ...

class LeaseFailed(_message.Message):
    __slots__ = ("lease_id", "reason", "detail")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: str
    detail: str
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SampleAnswers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, answers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("lease_id", "group", "rewards", "rows", "lost")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    group: RolloutGroup
    rewards: _containers.RepeatedScalarFieldContainer[float]
    rows: _containers.RepeatedScalarFieldContainer[int]
    lost: _containers.RepeatedCompositeFieldContainer[Lost]
    def __init__(self, lease_id: _Optional[int] = ..., group: _Optional[_Union[RolloutGroup, _Mapping]] = ..., rewards: _Optional[_Iterable[float]] = ..., rows: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[_Union[Lost, _Mapping]]] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("sample", "detail")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    sample: int
    detail: str
    def __init__(self, sample: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class DeliveryReply(_message.Message):
    __slots__ = ("accepted", "reason")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Deliveries(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Delivery]
    def __init__(self, items: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ...) -> None: ...

class DeliveryReplies(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DeliveryReply]
    def __init__(self, items: _Optional[_Iterable[_Union[DeliveryReply, _Mapping]]] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("lineage", "version", "base", "policy")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    version: int
    base: SnapshotId
    policy: str
    def __init__(self, lineage: _Optional[int] = ..., version: _Optional[int] = ..., base: _Optional[_Union[SnapshotId, _Mapping]] = ..., policy: _Optional[str] = ...) -> None: ...

class ChunkRequest(_message.Message):
    __slots__ = ("hashes", "payload", "number")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    payload: PayloadId
    number: int
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., payload: _Optional[_Union[PayloadId, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("hash", "data")
    HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    data: bytes
    def __init__(self, hash: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class Tally(_message.Message):
    __slots__ = ("source", "num_bytes", "seconds")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_bytes: int
    seconds: float
    def __init__(self, source: _Optional[str] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class FetchReport(_message.Message):
    __slots__ = ("payload", "bytes_stored", "bytes_total", "whole", "tallies", "failed_source", "failure", "up", "down")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    BYTES_STORED_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    FAILED_SOURCE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    payload: PayloadId
    bytes_stored: int
    bytes_total: int
    whole: bool
    tallies: _containers.RepeatedCompositeFieldContainer[Tally]
    failed_source: str
    failure: str
    up: float
    down: float
    def __init__(self, payload: _Optional[_Union[PayloadId, _Mapping]] = ..., bytes_stored: _Optional[int] = ..., bytes_total: _Optional[int] = ..., whole: _Optional[bool] = ..., tallies: _Optional[_Iterable[_Union[Tally, _Mapping]]] = ..., failed_source: _Optional[str] = ..., failure: _Optional[str] = ..., up: _Optional[float] = ..., down: _Optional[float] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class LearnerHello(_message.Message):
    __slots__ = ("protocol", "version", "pid", "host", "device", "vocab_size", "policy", "epoch", "routes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: int
    pid: int
    host: str
    device: str
    vocab_size: int
    policy: str
    epoch: int
    routes: RouteShape
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., policy: _Optional[str] = ..., epoch: _Optional[int] = ..., routes: _Optional[_Union[RouteShape, _Mapping]] = ...) -> None: ...

class LearnerWelcome(_message.Message):
    __slots__ = ("lineage", "max_steps", "published", "epoch", "stop", "base_models", "unscored")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BASE_MODELS_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    max_steps: int
    published: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    stop: str
    base_models: _containers.RepeatedScalarFieldContainer[str]
    unscored: bytes
    def __init__(self, lineage: _Optional[int] = ..., max_steps: _Optional[int] = ..., published: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., stop: _Optional[str] = ..., base_models: _Optional[_Iterable[str]] = ..., unscored: _Optional[bytes] = ...) -> None: ...

class TakeGroups(_message.Message):
    __slots__ = ("step", "epoch")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class FedGroups(_message.Message):
    __slots__ = ("groups", "done")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[RolloutGroup]
    done: StepDone
    def __init__(self, groups: _Optional[_Iterable[_Union[RolloutGroup, _Mapping]]] = ..., done: _Optional[_Union[StepDone, _Mapping]] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("cursor", "stop", "reason", "publish_every")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_EVERY_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    stop: bool
    reason: str
    publish_every: int
    def __init__(self, cursor: _Optional[int] = ..., stop: _Optional[bool] = ..., reason: _Optional[str] = ..., publish_every: _Optional[int] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "groups", "metrics_json", "epoch", "logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    metrics_json: str
    epoch: int
    logprobs: _containers.RepeatedCompositeFieldContainer[GroupLogprobs]
    def __init__(self, step: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., metrics_json: _Optional[str] = ..., epoch: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[GroupLogprobs, _Mapping]]] = ...) -> None: ...

class GroupLogprobs(_message.Message):
    __slots__ = ("group", "rollouts")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    group: int
    rollouts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, group: _Optional[int] = ..., rollouts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ChunkOffer(_message.Message):
    __slots__ = ("hashes", "epoch")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    epoch: int
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., epoch: _Optional[int] = ...) -> None: ...

class OfferedChunk(_message.Message):
    __slots__ = ("hash", "data", "epoch")
    HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    data: bytes
    epoch: int
    def __init__(self, hash: _Optional[bytes] = ..., data: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("manifest", "encode_seconds", "epoch")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    encode_seconds: float
    epoch: int
    def __init__(self, manifest: _Optional[bytes] = ..., encode_seconds: _Optional[float] = ..., epoch: _Optional[int] = ...) -> None: ...

class MissingChunks(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CheckpointReport(_message.Message):
    __slots__ = ("version", "oldest_kept", "epoch", "versions")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_KEPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    version: int
    oldest_kept: int
    epoch: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., oldest_kept: _Optional[int] = ..., epoch: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("spared",)
    SPARED_FIELD_NUMBER: _ClassVar[int]
    spared: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spared: _Optional[_Iterable[int]] = ...) -> None: ...

class LearnerReport(_message.Message):
    __slots__ = ("doing", "epoch")
    DOING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    doing: str
    epoch: int
    def __init__(self, doing: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
