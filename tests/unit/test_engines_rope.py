"""A row's logprobs do not depend on its neighbours: all families of transformers, with each kind of rotary embedding,
alone and beside others, in the learner and in the engines. What a family can't do is refused, with the reason.

A commit tries the families that the learner packs or `compact` computes, each with one kind, and Llama with all;
`make test-all` the others.
"""

from __future__ import annotations

from array import array
from itertools import cycle, pairwise
from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from causal_families import KINDS, LONGEST, ORIGINAL, families, has_kinds, tiny_config
from echo2.core.decide.model_config import context_length
from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef
from echo2.engines.compact import build_compact
from echo2.engines.hf_engine import build_transformers
from echo2.engines.hub_layout import text_module
from echo2.engines.model_values import MODEL_TYPES, ROPE_TYPES
from echo2.engines.torch_engine import Model
from echo2.learner.core.batch import Layout, collate
from echo2.learner.core.datum import Datum
from echo2.learner.core.model import MASKED_DECODERS, Policy, load_policy
from learner_cases import VOCAB

CPU = torch.device("cpu")
COMMON = sorted({*MODEL_TYPES, *MASKED_DECODERS, "gemma2", "gpt_oss", "cohere2"})
QUICK = {*zip(COMMON, cycle(KINDS), strict=False), *(("llama", kind) for kind in KINDS), ("phi3", "longrope")}
CASES = [
    pytest.param(family, kind, marks=() if (family, kind) in QUICK else pytest.mark.slow)
    for family in families()
    for kind in KINDS
    if family != "cpmant" and (kind == "default" or has_kinds(family))  # it is refused, see below
]
#: Families that the engine `transformers` does not run, and what it says.
NO_ENGINE = {
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"), "no positions"),
    **dict.fromkeys(("mvp", "pegasus", "plbart", "roformer", "trocr", "whisper"), "no positions"),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), "numbers positions itself"),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "xmod"), "numbers positions itself"),
    **dict.fromkeys(("minimax", "xlstm"), "cannot read with transformers' own cache"),
    **dict.fromkeys(("openai-gpt", "rwkv"), "takes no cache"),
    "deepseek_v4": "its cache compresses",
    "dory": "windows of the cache",
    "moshi": "its attention still sees",
    "recurrent_gemma": "of the rows that it read last",
    "xlm": "takes the lengths of rows from their tokens",
}
#: Kinds that transformers does not build in a family, or that are refused, and what is said.
NO_KIND = {
    **{(family, "proportional"): "rotates 8" for family in ("fuyu", "gpt_neox", "gpt_neox_japanese", "persimmon")},
    **{(family, "proportional"): "rotates 8" for family in ("phi", "stablelm")},
    **{("phi3", kind): r"must be one of \['longrope'\]|'rope_type'='longrope'" for kind in {*KINDS} - {"longrope"}},
    **{("phimoe", kind): "short_mscale field must be a number" for kind in {*KINDS} - {"longrope"}},
    **{("recurrent_gemma", kind): "does not support RoPE types|max_position_embeddings" for kind in KINDS},
}
NO_KIND |= {
    (one, "longrope"): "'head_dim' is a per-layer attribute" for one in ("gemma4_unified", "gemma4_unified_text")
}
for one in ("phi3", "phimoe", "recurrent_gemma"):
    del NO_KIND[one, "default"]


def rows(context: int) -> list[list[int]]:
    """Two short rows, and one that fills the context."""
    return [
        [3 + (7 * row + place) % (VOCAB - 3) for place in range(length)] for row, length in enumerate((5, context, 9))
    ]


def learned(policy: Policy, texts: list[list[int]], layout: Layout) -> list[list[float]]:
    data = [Datum(array("i", text[:2]), array("i", text[2:]), b"\x01" * (len(text) - 2)) for text in texts]
    batch = collate(data, layout, 0.1).to(policy.device, torch.float32)
    logp_n = iter(policy.logprobs(batch, 1.0)[0].tolist())
    by_place = {place: [next(logp_n) for _ in data[place].tokens] for place in batch.data_S}
    return [by_place[place] for place in range(len(data))]


def decoded(model: Model, text: list[int], other: list[int]) -> list[float]:
    """The engine's logprobs of `text`, read token by token, beside the prompt `other`."""
    cache = model.prefill([array("i", other), array("i", text[:1])])
    found = []
    for before, token in pairwise(text[1:]):
        logits_BV = model.step(cache, torch.tensor([before] * 2))
        found.append(float(logits_BV[-1].log_softmax(-1)[token]))
    return found


def engines(family: str, kind: str, policy: Policy) -> list[Model]:
    """Of the policy's weights; those that refuse it are left out."""
    snapshot, made = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(), policy.files), []
    if family in NO_ENGINE:
        with pytest.raises(UserError, match=NO_ENGINE[family]):
            build_transformers(snapshot, CPU)
    else:
        made.append(build_transformers(snapshot, CPU))
    if family in MODEL_TYPES and kind in ROPE_TYPES:
        made.append(build_compact(snapshot, CPU))
    elif family in MODEL_TYPES:
        with pytest.raises(UserError, match=f"this model has rope_type = '{kind}'"):
            build_compact(snapshot, CPU)
    for model in made:
        model.fill(snapshot)
    return made


@pytest.mark.parametrize(("family", "kind"), CASES)
@torch.no_grad()
def test_a_row_has_the_same_logprobs_alone_and_beside_others(family: str, kind: str) -> None:
    torch.manual_seed(0)
    if (family, kind) in NO_KIND:
        with pytest.raises(Exception, match=NO_KIND[family, kind]):
            text_module(tiny_config(family, kind), torch.float32)
        return
    config = tiny_config(family, kind)
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    policy = Policy(text_module(config, torch.float32), files, CPU)
    models = engines(family, kind, policy)
    context = min(policy.max_positions or LONGEST, LONGEST)
    assert kind != "longrope" or context == ORIGINAL
    assert all(model.limits.max_positions >= context for model in models)
    texts = rows(context)
    alone = [learned(policy, [text], "plain")[0] for text in texts]
    layouts: list[Layout] = ["plain", "shared"] if policy.honours_masks else ["plain"]
    for layout in layouts:
        assert_same(learned(policy, texts, layout), alone)
    for model in models:  # with as many tokens more, the other row fills the context
        assert_same([decoded(model, text, texts[1][: max(1, context - len(text))]) for text in texts], alone)


def assert_same(found: list[list[float]], expected: list[list[float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=5e-5, rel=1e-4)


def test_all_kinds_of_rotary_embeddings_are_tried() -> None:
    assert KINDS.keys() == {"default", *ROPE_INIT_FUNCTIONS}
    assert NO_ENGINE.keys() <= {*families()}


@pytest.mark.parametrize("family", ["bert", "roberta", "rembert"])
def test_an_encoder_is_refused(family: str) -> None:
    with pytest.raises(UserError, match="reads each token together with those behind it"):
        text_module(tiny_config(family, is_decoder=False), torch.float32)


def test_a_model_that_mixes_its_rows_is_refused() -> None:
    with pytest.raises(UserError, match="puts tokens of its own in front of each row"):
        text_module(tiny_config("cpmant"), torch.float32)


def test_rotary_settings_that_transformers_passes_over_are_refused() -> None:
    """GPT-J knows no kinds; config.json may name one, and would be believed by other engines."""
    config = tiny_config("gptj")
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(UserError, match="rotary embeddings of the kind yarn, and transformers' GPTJForCausalLM"):
        text_module(config, torch.float32)


def test_rotary_settings_that_do_not_fit_together_are_refused_when_a_model_is_loaded(tmp_path: Path) -> None:
    """Gemma 4 rotates whole heads; a quarter, as its own kind has it, fits no other kind."""
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    ropes["full_attention"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = tiny_config("gemma4_text", rope_parameters=ropes)
    text_module(config, torch.float32).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="transformers' Gemma4ForCausalLM cannot compute with what config"):
        load_policy(str(tmp_path), "float32", "cpu")


def test_the_context_ends_where_rotary_frequencies_change() -> None:
    long = {"long_factor": [1.0], "original_max_position_embeddings": 4096}
    assert context_length({"max_position_embeddings": 131072}) == 131072
    assert context_length({"max_position_embeddings": 131072, "rope_parameters": {"factor": 32.0}}) == 131072
    assert context_length({"max_position_embeddings": 131072, "rope_parameters": long}) == 4096
    old = {"rope_scaling": {"type": "su", "long_factor": [1.0]}, "original_max_position_embeddings": 4096}
    assert context_length({"max_position_embeddings": 131072, **old}) == 4096
    by_layer = {"rope_parameters": {"full_attention": long, "sliding_attention": {"rope_type": "default"}}}
    assert context_length({"text_config": {"max_position_embeddings": 131072, **by_layer}}) == 4096
    assert context_length({"vocab_size": 3}) is None
