"""Publications: the weights of their version and no others, whatever training does meanwhile and the disk says."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from weights_cases import bytes_of, new_content

from echo2.core.errors import LinkError, UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef, StoredTensor, TensorBytes
from echo2.learner.core.publication import BasePayload, BorrowedWeights, Payload, Publisher
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.weights.format.segments import SEGMENT_BYTES, base_model_of
from echo2.weights.store.content import Content
from learner_cases import tiny_policy

ITEMS = SEGMENT_BYTES  # of two bytes: two segments


def ref(version: int, lineage: int = 1) -> SnapshotRef:
    return SnapshotRef(RUN_POLICY, lineage, version)


def weights(version: int) -> np.ndarray:
    """Some items more have changed in every version."""
    items = np.arange(ITEMS, dtype=np.uint32).astype(np.uint16)
    items[:: 1000 - version] += np.uint16(version)
    return items


def lent(items: np.ndarray) -> BorrowedWeights:
    return BorrowedWeights({"w": TensorBytes("BF16", items.shape, items.data)}, {"config.json": b"{}"})


def take(content: Content, payload: Payload | BasePayload) -> None:
    """Read all of it, and apply it as a worker does."""
    for _ in payload.parts():
        pass
    content.apply(payload.manifest, payload.chunk)


def test_each_version_is_what_was_lent_by_deltas_and_whole(tmp_path: Path) -> None:
    publisher, by_deltas = Publisher(tmp_path), new_content()
    for version in range(3):
        items = weights(version)
        tensor = TensorBytes("BF16", items.shape, items.tobytes())
        expected = Snapshot(ref(version), {"w": tensor}, {"config.json": b"{}"})
        loan = lent(items)
        payload = publisher.payload(ref(version), loan)
        assert not loan.returned.done()
        take(by_deltas, payload)
        assert loan.returned.done()
        assert (payload.manifest.base is None) == (version == 0)
        items[:] = 0  # the next update
        assert bytes_of(by_deltas.snapshot()) == bytes_of(expected)
        whole = new_content()
        take(whole, publisher.whole(ref(version)))
        assert bytes_of(whole.snapshot()) == bytes_of(expected)
    assert not any(path.is_file() for path in tmp_path.iterdir()), "a kill leaves nothing behind"


def test_after_the_head_fell_back_the_same_weights_go_whole_under_the_new_lineage(tmp_path: Path) -> None:
    publisher, content, items = Publisher(tmp_path), new_content(), weights(1)
    loan = lent(items)
    take(content, publisher.payload(ref(1), loan))
    items[:] = 0
    again = publisher.payload(ref(1, lineage=2), loan)
    take(content, again)
    assert again.manifest.ref == ref(1, lineage=2)
    assert again.manifest.base is None
    assert bytes_of(content.snapshot())[0]["w"][2] == weights(1).tobytes()
    other = publisher.payload(ref(2, lineage=3), lent(weights(2)))
    take(content, other)
    assert other.manifest.base is None, "a lineage begins with the whole content"


def test_an_aborted_publication_is_not_a_base(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    take(new_content(), publisher.payload(ref(0), lent(weights(0))))

    def torn(start: int, stop: int) -> bytes:
        if start:
            raise UserError("gone")
        return weights(1).tobytes()[start:stop]

    loan = BorrowedWeights({"w": StoredTensor("BF16", (ITEMS,), 2 * ITEMS, torn)}, {"config.json": b"{}"})
    with pytest.raises(UserError, match="gone"):
        take(new_content(), publisher.payload(ref(1), loan))
    assert loan.returned.done()
    content, payload = new_content(), publisher.payload(ref(2), lent(weights(2)))
    take(content, payload)
    assert payload.manifest.base is None
    assert bytes_of(content.snapshot())[0]["w"][2] == weights(2).tobytes()


def test_an_update_waits_until_the_weights_are_given_back(tmp_path: Path) -> None:
    trainer = Trainer(1000)
    trainer.add("a", tiny_policy())
    loan = trainer.save_weights_for_sampler("a", "float32")
    updating = threading.Thread(target=trainer.optim_step, args=("a", AdamParams(lr=1.0)))
    updating.start()
    saving = trainer.save_state("a", tmp_path / "step_1", {})
    saving.result()  # another reader waits for nobody
    updating.join(0.05)
    assert updating.is_alive()
    loan.release()
    updating.join()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool) -> None:
    """The disk has room again at the third try. A learner that is to stop waits no more."""
    publisher, content = Publisher(tmp_path), new_content()
    monkeypatch.setattr("echo2.learner.core.publication.NO_ROOM_SECONDS", 0.0)
    write, troubles = os.pwrite, list[str]()

    def full(file: int, data: memoryview, at: int) -> int:
        if len(troubles) < 3:
            troubles.append(publisher.trouble)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    loan = lent(weights(1))
    if is_stopped:
        publisher.stop()
        with pytest.raises(LinkError, match="is to stop"):
            take(content, publisher.payload(ref(1), loan))
        assert loan.returned.done()
        return
    take(content, publisher.payload(ref(1), loan))
    assert len(troubles) == 3
    assert bytes_of(content.snapshot())[0]["w"][2] == weights(1).tobytes()


def test_a_directory_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="Cannot write the weights"):
        Publisher(tmp_path / "file" / "learner")


def test_a_base_model_is_sent_from_where_it_lies() -> None:
    """Large tensors, small ones that share a segment, two widths of items; every chunk is read a second time."""
    draw = np.random.default_rng(0)
    sizes = {"large": SEGMENT_BYTES // 4 + 77, "small": 333, "middle": 70_000}
    tensors = {name: TensorBytes("F32", (size,), draw.bytes(4 * size)) for name, size in sizes.items()}
    tensors["half"] = TensorBytes("BF16", (77_777,), draw.bytes(2 * 77_777))
    files = {"config.json": b"{}", "tokenizer.json": b"words"}
    base_model = Snapshot(base_model_of(tensors, files["config.json"]), tensors, files)
    payload, content = BasePayload(base_model), new_content()
    take(content, payload)
    assert bytes_of(content.snapshot()) == bytes_of(base_model)
    assert set(payload.names) == set(payload.manifest.hashes)
