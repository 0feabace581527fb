"""Files for programs at home: llama.cpp and mlx-lm themselves read them, with tokens and logits of the learner's."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from echo2.core.errors import UserError
from echo2.core.types import Snapshot, TensorBytes
from echo2.engines import forms
from echo2.engines.home_files import SPLITTING, write_gguf, write_mlx
from echo2.engines.tokenizer import load_tokenizer
from echo2.weights.format.model_files import MLX_WEIGHTS, find_model
from rollout_cases import snapshot_of, tiny_module, tokenizer_files

needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="pip install 'echo2[llamacpp]'")
TEXTS = (
    "Say it 12345 times, don't stop. They'LL ask\n\n  why?",
    "<|im_start|>user\nÜnïcödé, 你好 <|im_end|>\n\n",
    "\t tabs and   spaces ",
)
CHAT = [{"role": "user", "content": "Say it 12 times"}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
#: Tokens of a model, and one that is a letter in all tokenizers here.
VOCAB, LETTER = 320, 40
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
#: Family, changes, and the rule by which its tokenizer splits texts.
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {}, "qwen2"),
    ("qwen2", {"tie_word_embeddings": False}, "qwen2"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 90.0}}, "gpt-2"),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}, "llama-bpe"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}}, "smollm"),
]


def text_files(rule: str, vocab_size: int = 300, **changes: Any) -> dict[str, bytes]:
    """A tokenizer that splits texts by this rule of llama.cpp. `changes`: of the core tokenizer's attributes."""
    (parts, whole_words), _ = next(item for item in SPLITTING.items() if item[1] == rule)
    core = Tokenizer(models.BPE(ignore_merges=whole_words))
    steps = [
        pre_tokenizers.Split(Regex(what), "isolated")
        if kind == "Split"
        else pre_tokenizers.Digits(what)
        if kind == "Digits"
        else pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=what)
        for kind, what in parts
    ]
    core.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    core.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    )
    if whole_words:  # as Llama 3 has it: each text begins with a token
        core.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 0)])
    for name, value in changes.items():
        setattr(core, name, value)
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    files = {"tokenizer.json": core.to_str().encode(), "chat_template.jinja": TEMPLATE.encode()}
    return files | {"tokenizer_config.json": json.dumps(said).encode()}


def model(family: str, rule: str, changes: Mapping[str, Any]) -> tuple[Any, Snapshot]:
    """A model with more tokens than its tokenizer, and its snapshot."""
    sizes = {"vocab_size": VOCAB, "intermediate_size": 64, "eos_token_id": [1, 5], "max_position_embeddings": 256}
    module = tiny_module(family, **(sizes | dict(changes)))
    snapshot = snapshot_of(module)
    config = {name: data for name, data in snapshot.files.items() if name == "config.json"}
    return module, replace(snapshot, files=config | text_files(rule))


def as_rounded(module: Any, form: str) -> Any:
    """The learner's module with what a form stands for."""
    found = copy.deepcopy(module)
    for name, weight in found.named_parameters():
        kind = forms.format_of(name, form)
        if kind:
            weight.data = weight.data.half().float() if kind == forms.HALF else forms.rounded(weight.data, kind)
    return found


def logprobs_of(module: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = module(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()
    return found


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


class LlamaCpp:
    """A file, read by llama.cpp's own server in this process."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.use_jinja = str(path), 256, 1, True
        params.cpuparams.n_threads = 1
        params.no_extra_bufts = True  # see `engines/llamacpp.py: Weights`
        self._server = xllamacpp.Server(params)

    def next(self, prompt: str | list[int]) -> tuple[int, dict[int, float]]:
        """Return the number of tokens of the prompt, and the logprobs of the likeliest that follow, by id."""
        asked = {"prompt": prompt, "max_tokens": 1, "logprobs": 20, "temperature": 0, "cache_prompt": False}
        asked["logit_bias"] = [[LETTER, 100.0]]  # for it says nothing where the text stays empty
        said = self._server.handle_completions(asked)
        said = said if isinstance(said, dict) else json.loads(said)
        top = said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return said["usage"]["prompt_tokens"], {one["id"]: one["logprob"] for one in top}

    def chat(self, messages: Any) -> int:
        """Return the number of tokens of a conversation in the file's own template."""
        said = self._server.handle_chat_completions({"messages": messages, "max_tokens": 1})
        said = said if isinstance(said, dict) else json.loads(said)
        return int(said["usage"]["prompt_tokens"])


@needs_gguf
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="pip install xllamacpp")
@pytest.mark.parametrize(("family", "changes", "rule"), MODELS)
def test_llama_cpp_reads_the_tokens_and_gives_the_logits_of_the_learner(
    family: str, changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    module, snapshot = model(family, rule, changes)
    tokenizer: Any = load_tokenizer(snapshot.files)
    distances = dict[str, float]()
    for form in ("f16", "q8_0", "q4_0"):
        write_gguf(tmp_path / "model.gguf", snapshot, form)
        server, learner, off = LlamaCpp(tmp_path / "model.gguf"), as_rounded(module, form), list[float]()
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=True)
            expected = logprobs_of(learner, ids)[-1]
            count, found = server.next(text)
            assert (count, found) == (len(ids), server.next(ids)[1])
            off += [abs(logprob - expected[token]) for token, logprob in found.items()]
        distances[form] = float(np.mean(off))
        assert server.chat(CHAT) == len(tokenizer.apply_chat_template(CHAT, return_dict=False))
    assert distances["f16"] < 0.01
    assert max(distances.values()) < 0.1  # llama.cpp rounds what it multiplies with blocks, too


@needs_gguf
def test_a_file_names_its_tokens_and_ends(tmp_path: Path) -> None:
    from gguf import GGUFReader

    _, snapshot = model("llama", "llama-bpe", MODELS[3][1])
    write_gguf(path := tmp_path / "model.gguf", snapshot, "q4_0")
    fields = GGUFReader(path).fields
    said = {name.removeprefix("tokenizer."): field.contents() for name, field in fields.items() if "token" in name}
    assert {name: said[f"ggml.{name}_token_id"] for name in ("bos", "eos", "eot")} == {"bos": 0, "eos": 1, "eot": 5}
    assert (said["ggml.add_bos_token"], said["ggml.add_eos_token"], said["ggml.pre"]) == (True, False, "llama-bpe")
    assert said["ggml.tokens"][:2] == ["<|im_start|>", "<|im_end|>"]
    assert said["ggml.tokens"][300:] == [f"[PAD{number}]" for number in range(300, VOCAB)]
    assert said["ggml.token_type"][:3] + said["ggml.token_type"][-1:] == [3, 3, 1, 5]
    assert said["chat_template"] == TEMPLATE
    assert fields["general.file_type"].contents() == 2


@needs_gguf
def test_a_tokenizer_may_have_several_templates(tmp_path: Path) -> None:
    """As those of Hermes: one for tools."""
    from gguf import GGUFReader

    _, snapshot = model("llama", "gpt-2", MODELS[2][1])
    files = {name: data for name, data in snapshot.files.items() if name != "chat_template.jinja"}
    said = json.loads(files["tokenizer_config.json"])
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": f"tools {TEMPLATE}"}]
    files["tokenizer_config.json"] = json.dumps({**said, "chat_template": named}).encode()
    write_gguf(path := tmp_path / "model.gguf", replace(snapshot, files=files), "q8_0")
    fields = GGUFReader(path).fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    assert fields["tokenizer.chat_template.tool_use"].contents() == f"tools {TEMPLATE}"


@needs_gguf
@pytest.mark.parametrize("said", ["[]", "{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, "x"]}'])
def test_invalid_end_tokens_are_refused(tmp_path: Path, said: str) -> None:
    _, snapshot = model("llama", "gpt-2", MODELS[2][1])
    files = {**snapshot.files, "generation_config.json": said.encode()}
    with pytest.raises(UserError, match=r"--gguf: .*generation_config\.json"):
        write_gguf(tmp_path / "model.gguf", replace(snapshot, files=files), "q8_0")
    files["generation_config.json"] = b'{"eos_token_id": [1, -5, 10000000000]}'  # of no token
    write_gguf(tmp_path / "model.gguf", replace(snapshot, files=files), "q8_0")


@needs_gguf
def test_the_error_names_a_weight_too_large_for_float16(tmp_path: Path) -> None:
    _, snapshot = model("qwen3", "qwen2", {})
    big = dict(snapshot.tensors)
    big["model.layers.0.mlp.up_proj.weight"] = TensorBytes(
        "F32", (64, 32), torch.full((64, 32), -1e6).numpy().tobytes()
    )
    with pytest.raises(
        UserError, match=r"up_proj.weight holds -1e\+06, and float16 ends at 65504. Choose the form q8_0"
    ):
        write_gguf(tmp_path / "model.gguf", replace(snapshot, tensors=big), "f16")


@needs_gguf
@pytest.mark.parametrize(
    ("files", "said"),
    [
        (tokenizer_files(), "a tokenizer of the kind WordLevel"),
        (text_files("qwen2", normalizer=normalizers.Lowercase()), "a tokenizer that normalises texts by Lowercase"),
        (text_files("gpt-2", pre_tokenizer=pre_tokenizers.ByteLevel()), "a tokenizer that splits texts by ByteLevel"),
        (text_files("gpt-2", pre_tokenizer=pre_tokenizers.Metaspace()), "a tokenizer that splits texts by Metaspace"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(
    files: dict[str, bytes], said: str, tmp_path: Path
) -> None:
    _, snapshot = model("qwen3", "qwen2", {})
    config = {"config.json": snapshot.files["config.json"]}
    with pytest.raises(UserError, match=f"--gguf does not support {said}.*Export without --gguf .*convert_hf_to_gguf"):
        write_gguf(tmp_path / "model.gguf", replace(snapshot, files=config | files), "q8_0")


@needs_gguf
@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"intermediate_size": 48}, "rows of 48 items in model.layers.0.mlp.down_proj.weight"),
        ("qwen3", {"attention_bias": True}, "attention_bias in a qwen3 model"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_a_model_that_a_program_has_no_place_for_is_refused(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    _, snapshot = model(family, "qwen2", changes)
    with pytest.raises(UserError, match=f"--gguf does not support {said}.*Export without --gguf"):
        write_gguf(tmp_path / "model.gguf", snapshot, "q8_0")
    with pytest.raises(UserError, match=f"--mlx does not support {said}.*Export without --mlx.*mlx_lm.convert"):
        write_mlx(tmp_path / "mlx", snapshot, "mlx-q8", "bfloat16")
    if "rows" in said:
        write_gguf(tmp_path / "model.gguf", snapshot, "f16")  # it has no blocks


# ---- MLX -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="pip install 'echo2[mlx]'")
@pytest.mark.parametrize(("family", "changes", "rule"), MODELS)
def test_mlx_lm_gives_the_logits_of_the_learner_rounded(
    family: str, changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    from echo2.engines.mlx import library

    mx = library()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    from mlx_lm import load

    module, snapshot = model(family, rule, changes)
    tokenizer: Any = load_tokenizer(snapshot.files)
    for form in ("mlx-q8", "mlx-q4"):
        write_mlx(tmp_path / form, snapshot, form, "float32")
        found, theirs = load(str(tmp_path / form))[:2]
        ids = tokenizer.apply_chat_template(CHAT, return_dict=False)
        assert theirs.apply_chat_template(CHAT, return_dict=False) == ids
        assert theirs.eos_token_ids == {1, 5}
        logits = torch.from_numpy(np.array(found(mx.array([ids]))[0].astype(mx.float32))).double()
        off = logits.log_softmax(-1).numpy() - logprobs_of(as_rounded(module, form), ids)
        assert np.abs(off).max() < 1e-3
        plain = logits.log_softmax(-1).numpy() - logprobs_of(module, ids)
        assert np.abs(plain).mean() > 10 * np.abs(off).mean()


def test_a_directory_for_mlx_holds_nothing_that_transformers_takes_for_weights(tmp_path: Path) -> None:
    _, snapshot = model("qwen3", "qwen2", {})
    write_mlx(to := tmp_path / "mlx", snapshot, "mlx-q4", "bfloat16")
    assert sorted(path.name for path in to.iterdir()) == sorted([MLX_WEIGHTS, *snapshot.files])
    said = json.loads((to / "config.json").read_text())
    rounding = {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}
    assert said["quantization"] == rounding | {"lm_head": {"group_size": 32, "bits": 8}}
    assert (said["dtype"], said["rope_theta"]) == ("bfloat16", 10000.0)


@pytest.mark.parametrize(("name", "program"), [("model-q8_0.gguf", "llama.cpp"), (MLX_WEIGHTS, "MLX")])
def test_files_for_a_program_at_home_are_refused_as_a_model(name: str, program: str, tmp_path: Path) -> None:
    """Nor is a GGUF of another base: each worker rounds the run's weights itself, and takes no file."""
    (tmp_path / name).write_text("weights")
    for path in (tmp_path, *([tmp_path / name] if name.endswith(".gguf") else [])):
        with pytest.raises(UserError, match=f"--base = .* is for {program}, .*Give the Hugging Face directory"):
            find_model(str(path), "--base")
    (tmp_path / "model.safetensors").write_text("weights")
    assert find_model(str(tmp_path)) == tmp_path
