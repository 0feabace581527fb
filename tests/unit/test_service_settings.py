"""What `echo2 serve` reads and makes before it serves."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

import house
from echo2.cli import main
from echo2.core.errors import PeerError, UserError
from echo2.engines.tokenizer import load_tokenizer
from echo2_service import settings, tiny_model
from echo2_service.commands import serve
from echo2_service.front.database import sessions
from echo2_service.front.request_guard import ApiKeys


def test_the_example_is_read() -> None:
    found = settings.load(house.REPOSITORY / "examples" / "serve.toml")
    assert found.bases == {"echo2/tiny": ""}
    assert found.host == "127.0.0.1"


BILLS = '[bases]\n"a/b" = ""\n[bills]\n'
WRONG = {
    "": "object missing required field `bases`. Keys: bases, host, port, database, device, bills, fleet.",
    "bases = 3": "bases: expected `object`, got `int`.",
    "[bases]": "bases: expected `object` of length >= 1.",
    'prot = 1\n[bases]\n"a/b" = ""': "object contains unknown field `prot`. Keys: bases, host, port,",
    "port = 70000": "port: expected `int` <= 65535.",
    BILLS + "usd_per_million_tokens = { optim_step = 1.0 }": "bills: 'optim_step' has no price: only forward_backward",
    BILLS + "quota_usd = { ada = 'much' }": "bills.quota_usd[...]: expected `float`, got `str`.",
    BILLS + "quota = 1": "bills: object contains unknown field `quota`. Keys: usd_per_million_tokens, quota_usd",
}


@pytest.mark.parametrize("text", WRONG)
def test_the_error_names_wrong_settings(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        settings.load(file)
    assert str(caught.value).startswith(f"{file}: {WRONG[text]}")


@pytest.mark.parametrize("name", ["tiny", "../tiny", "a/b/c", "a/..", "a/b c"])
def test_the_name_of_a_base_model_has_an_owner(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="owner/name"):
        serve.base_directories({name: ""}, tmp_path)


def test_the_tiny_model_is_the_same_each_time_and_reads_its_own_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tiny_model.make(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    tokenizer = load_tokenizer({name: (tmp_path / "a" / name).read_bytes() for name in files})
    text = "<|im_start|>user\nZwölf Böxkämpfer 🥊<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len("user\nZwölf Böxkämpfer 🥊".encode()) + 2


def test_the_first_key_is_its_owners_alone_and_stays(tmp_path: Path) -> None:
    database = serve.open_database(tmp_path)
    api_keys = ApiKeys(database, lambda: 0.0)
    for _ in range(2):
        serve.first_key(tmp_path, database, api_keys)
    text = (tmp_path / "api-key").read_text().strip()
    assert text.startswith("tml-")
    assert api_keys.admit(text).tenant == "owner"
    assert api_keys.admit(text).scopes == {"train", "sample", "owner"}
    assert stat.S_IMODE((tmp_path / "api-key").stat().st_mode) == 0o600
    assert text.encode() not in (tmp_path / "service.sqlite").read_bytes()
    database.close()


def test_keys_are_added_listed_and_revoked_beside_the_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path)]) == 2
    database = serve.open_database(tmp_path)
    api_keys = ApiKeys(database, lambda: 0.0)
    assert main(["keys", str(tmp_path), "--add", "eve", "--scopes", "sample"]) == 0
    text = capsys.readouterr().out.strip()
    assert api_keys.admit(text).scopes == {"sample"}
    assert main(["keys", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert main(["keys", str(tmp_path), "--revoke", row["id"]]) == 0
    with pytest.raises(PeerError, match="revoked"):
        api_keys.admit(text)
    assert main(["keys", str(tmp_path), "--revoke", "key_none"]) == 2
    assert main(["keys", str(tmp_path), "--add", "eve", "--scopes", "all"]) == 2
    database.close()


def test_status_shows_whether_a_service_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "status", "--out", str(tmp_path)]) == 2
    database = serve.open_database(tmp_path)
    database.insert(sessions, id="s", tenant="ada", created=1.0, seen=1.0)
    database.close()
    capsys.readouterr()
    assert main(["serve", "status", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tenants"]["ada"]["sessions"] == 1
    assert main(["serve", "status", "--out", str(tmp_path)]) == 0
    assert "ada" in capsys.readouterr().out
    assert main(["serve", "status", "--out", str(tmp_path), "--port", "0"]) == 2
    assert "/owner" in capsys.readouterr().err
