"""Places for objects: a key is created once, objects are whole, and an absent place is an unreachable one."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.core.errors import LinkError, UserError
from echo2.core.objects import Objects, open_objects


@pytest.fixture(params=["directory", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        found: str = request.getfixturevalue("bucket")
        return found
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return f"memory://{tmp_path.name}"
    return str(tmp_path / "store")


def test_a_key_is_created_once(url: str) -> None:
    first, second = open_objects(url), open_objects(url)
    assert first.get("log/1") is None
    assert first.keys("log") == []
    assert first.create("log/1", b"first")
    assert not second.create("log/1", b"second")
    assert second.get("log/1") == b"first"
    assert second.keys("log") == ["log/1"]


def test_large_objects_come_in_pieces(url: str) -> None:
    objects: Objects = open_objects(url)
    pieces = [bytes([number]) * (3 << 20) for number in range(4)]
    objects.upload("copies/a", iter(pieces))
    assert b"".join(objects.download("copies/a")) == b"".join(pieces)
    with pytest.raises(FileNotFoundError):
        list(objects.download("copies/b"))
    objects.delete(["copies/a", "copies/b"])
    assert objects.keys("copies") == []


def test_an_unusable_location_counts_as_unreachable(tmp_path: Path) -> None:
    objects = open_objects((tmp_path / "store").as_uri())
    (tmp_path / "store" / "log").write_text("no folder")
    with pytest.raises(LinkError, match="cannot be used"):
        objects.create("log/1", b"")
    with pytest.raises(LinkError, match="cannot be used"):
        objects.get("log/1")


def test_an_unknown_kind_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"head\.store = 'nowhere://x' cannot be used"):
        open_objects("nowhere://x")


def test_files_are_private(tmp_path: Path) -> None:
    """A store holds the keys of its run."""
    open_objects(str(tmp_path / "store")).create("log/1", b"key")
    assert (tmp_path / "store" / "log" / "1").stat().st_mode & 0o077 == 0
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
