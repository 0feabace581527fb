"""The table [reward.judge]: the model that gives the reward `judge`, and what it may cost (`reward/judge.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from echo2.config.values import template_pieces
from echo2.core.errors import UserError

Dollars = Annotated[float, Meta(ge=0.0)]
Limit = Annotated[int, Meta(ge=0)]


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model`: its name at the OpenAI-compatible endpoint `base_url`. `rubric`: what makes an answer good, in the
    user's words, where {name} stands for the column `name`. `form`: whether an answer gets a grade, or the answers of a
    group are compared in pairs (once in a drawn order, or in both), where wins are the reward. `api_key_env`: the
    environment variable of the head that has the key. `params`: more fields of each request. 0 means no limit.
    `usd_per_mtok`: prices of a million tokens that are read, and written.
    """

    model: str
    base_url: str
    rubric: str
    form: Literal["rubric", "pairwise", "pairwise_both"] = "rubric"
    api_key_env: str = ""
    params: dict[str, Any] = msgspec.field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 1024})
    max_concurrency: Annotated[int, Meta(ge=1, le=1024)] = 16
    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    usd_per_mtok: tuple[Dollars, Dollars] = (0.0, 0.0)
    budget_usd: Dollars = 0.0

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the rubric names."""
        return frozenset(name for _, name in template_pieces(self.rubric, "reward.judge.rubric =") if name is not None)

    def num_requests(self, group_size: int) -> int:
        """Return how many requests it takes to score a group."""
        pairs = group_size * (group_size - 1)
        return {"rubric": group_size, "pairwise": pairs // 2, "pairwise_both": pairs}[self.form]

    def groups_at_once(self, group_size: int) -> int:
        """Return how many groups are scored at once."""
        return max(1, self.max_concurrency // max(1, self.num_requests(group_size)))


def read_judge(table: Mapping[str, Any]) -> JudgeConfig:
    """Return the settings in a table.

    Raises:
        UserError: one is missing, unknown or wrong.
    """
    try:
        judge = msgspec.convert(table, JudgeConfig)
        url = urlsplit(judge.base_url)
        is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0 and not url.query
    except msgspec.ValidationError as error:
        complaint, _, key = str(error).partition(" - at `$.")
        raise UserError(f"reward.judge{f'.{key}'.rstrip('.`')}: {complaint[0].lower()}{complaint[1:]}.") from error
    except ValueError:
        is_url = False
    if not (is_url and judge.base_url.isascii() and judge.base_url.isprintable()) or "@" in url.netloc:
        raise UserError(
            f"reward.judge.base_url = {judge.base_url!r}: expected an address as http://127.0.0.1:8000/v1. A key "
            "belongs into the environment variable that reward.judge.api_key_env names."
        )
    if not judge.rubric.strip():
        raise UserError("reward.judge.rubric is empty: say what makes an answer good.")
    if judge.budget_usd and not any(judge.usd_per_mtok):
        raise UserError(
            f"reward.judge.budget_usd = {judge.budget_usd:g} would never be spent: usd_per_mtok is 0. Set the prices "
            "of a million tokens read and written, as in [0.15, 0.6]."
        )
    if fixed := judge.params.keys() & {"model", "messages", "n", "stream"}:
        raise UserError(f"reward.judge.params has {min(fixed)!r}, which every request has already. Leave it out.")
    judge.columns  # noqa: B018  checked when it is read
    return judge
