"""Targets of the fuzzer: what the service reads of its clients and machines, and the journal that its learner keeps."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from array import array
from pathlib import Path

import msgspec
from fuzz_target import Target, folder, from_file

from echo2.core.errors import InvariantError, PeerError, UserError
from echo2.weights.format.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from echo2_service import tinker_pb2 as pb
from echo2_service.backend import (
    Answer,
    JournalRecord,
    Request,
    SampleCall,
    SampledSequence,
    SampleOutput,
    SampleSpec,
    UnloadCall,
)
from echo2_service.calling import ANSWERS, REQUESTS, encode
from echo2_service.fleet.machines import checked
from echo2_service.front import bodies, own_adapters
from echo2_service.front.bodies import numbered
from echo2_service.front.data import read_json, read_protobuf
from echo2_service.learner.journal import Journal, _checked

_SPEC = SampleSpec(prompt=array("i", [4, 5]), max_tokens=8)
_SAMPLED = SampleOutput([SampledSequence(array("i", [7, 8]), array("f", [-0.5, -1.0]), "stop")])
_TENSOR = {"data": [5, 6, 7], "dtype": "int64", "shape": [3]}
_DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [4, 5, 6]}]},
    "loss_fn_inputs": {
        "target_tokens": _TENSOR,
        "weights": {"data": [0, 1, 0.5]},
        "logprobs": {"data": [1.5], "shape": [3, 1], "sparse_crow_indices": [0, 1, 1, 1], "sparse_col_indices": [0]},
    },
}
_TRAIN = {"model_id": "m", "seq_id": 1, "forward_backward_input": {"data": [_DATUM], "loss_fn": "cross_entropy"}}
_ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 32.0, "base_model_name_or_path": "base-0123456789abcdef"}


def targets() -> list[Target]:
    """All of them, with their seeds."""
    return [*_bodies(), *_frames(), *_adapters()]


def _bodies() -> list[Target]:
    """Bodies of calls, and the two forms of training data."""
    train = json.dumps(_TRAIN).encode()
    sample = {
        "prompt": _DATUM["model_input"],
        "sampling_params": {"max_tokens": 8},
        "base_model": "m",
        "num_samples": 2,
    }
    model = {"session_id": "s", "model_seq_id": 1, "base_model": "m", "lora_config": {"rank": 8}, "user_metadata": {}}
    others = tuple(json.dumps(one).encode() for one in (sample, model, {"model_id": "m", "adam_params": {"eps": 1e-8}}))
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy", loss_fn_config={"beta": 0.5})
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = array("i", [4, 5, 6]).tobytes()
    dense = datum.loss_fn_inputs["target_tokens"]
    dense.dense, dense.dtype = array("q", [5, 6, 7]).tobytes(), pb.DTYPE_INT64
    dense.shape.extend([3])
    sparse = datum.loss_fn_inputs["weights"]
    sparse.sparse_csr.values = array("f", [1.0]).tobytes()
    sparse.sparse_csr.crow_indices = array("q", [0, 1, 1, 1]).tobytes()
    sparse.sparse_csr.col_indices = array("q", [0]).tobytes()
    sparse.shape.extend([3, 1])
    seeds = (message.SerializeToString(),)
    return [
        Target("service.body", _read_body, (train, *others)),
        Target("service.train_json", lambda data: read_json(data, False), (train,)),
        Target("service.numbered", lambda data: numbered(data, not data.startswith(b"{"), False), (train, *seeds)),
        Target("service.train_protobuf", read_protobuf, seeds, pb.ForwardBackwardRequest),
    ]


def _read_body(data: bytes) -> None:
    """As every kind of body."""
    for name, kind in sorted(vars(bodies).items()):
        if name.endswith("Body"):
            with contextlib.suppress(PeerError):
                bodies.parse(kind, data)


# ---- between machines ------------------------------------------------------------------------------------------------


def _read_answer(data: bytes) -> None:
    """A machine's, to a call for two tokens at most."""
    answer = ANSWERS.decode(data)
    if not answer.fault:
        checked(_SPEC, answer.sampled)


def _read_journal(path: Path) -> None:
    Journal(path).close()


def _frames() -> list[Target]:
    record = JournalRecord(3, None, Answer(3, sampled=_SAMPLED))
    typed, journal = (
        (msgspec.MsgspecError, UnicodeDecodeError, RecursionError),
        from_file("service.journal", _read_journal),
    )
    answers = (encode(Answer(1, sampled=_SAMPLED)), encode(Answer(2, fault="it is gone", is_ours=True)))
    requests = (encode(Request(1, SampleCall("base", "", _SPEC))), encode(Request(2, UnloadCall("m"))))
    return [
        Target("service.answer", _read_answer, answers, errors=(*typed, PeerError)),
        Target("service.request", REQUESTS.decode, requests, errors=typed),
        Target("service.journal", journal, (_checked(record) * 2,), errors=(InvariantError, UserError)),
    ]


# ---- adapters of clients ---------------------------------------------------------------------------------------------


def _tar() -> bytes:
    with io.BytesIO() as made:
        with tarfile.open(fileobj=made, mode="w") as file:
            for name, data in ((ADAPTER_CONFIG, json.dumps(_ADAPTER).encode()), (ADAPTER_WEIGHTS, bytes(64))):
                entry = tarfile.TarInfo(f"adapter/{name}")
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
        return made.getvalue()


def _unpack(data: bytes) -> None:
    to = folder() / "adapter"
    to.mkdir(exist_ok=True)
    own_adapters._unpack(data, to)


def _adapters() -> list[Target]:
    def config(data: bytes) -> object:
        return own_adapters._read_config(data, "tiny", "base-0123456789abcdef")

    return [
        Target("service.adapter_tar", _unpack, (_tar(),)),
        Target("service.adapter_config", config, (json.dumps(_ADAPTER).encode(),)),
    ]
