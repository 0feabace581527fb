"""Model files for the programs that people run at home, in the forms that the engines use (`forms.py`): one file with
its tokenizer for llama.cpp (GGUF), or a directory for MLX (package `mlx-lm`). Neither program is needed to write them;
GGUF needs the package `gguf`.

llama.cpp computes a tokenizer from its tokens, its merges and the name of a rule that splits texts before. The rule is
told from tokenizer.json here; another rule is refused, for its texts would become other tokens without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo2.core.documents import parse_json, safetensors_pieces
from echo2.core.errors import PeerError, UserError
from echo2.core.types import Snapshot, StoredTensor
from echo2.engines import forms, gguf_file
from echo2.engines.model_values import PLAIN_TYPES, Architecture, UnsupportedError, read_architecture
from echo2.engines.snapshot_tensors import computing_dtype, fill
from echo2.engines.tokenizer import Tokenizer, load_tokenizer
from echo2.weights.format.model_files import MLX_WEIGHTS
from echo2.weights.format.snapshot_files import end_tokens, read_config

#: The dtypes in which MLX may compute, by name, and safetensors' names of them.
MLX_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
#: What does what this module refuses.
OTHERWISE = {
    "gguf": "Export without --gguf (of an adapter, --merged), and convert that by llama.cpp's convert_hf_to_gguf.py.",
    "mlx": "Export without --mlx (of an adapter, --merged), and convert that by `mlx_lm.convert --hf-path PATH -q`.",
}
#: How texts are split into words and numbers before merges, by llama.cpp's name of the rule: what tokenizer.json says,
#: and whether a word that is a token is taken whole. The two expressions differ in the digits of a number.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES, _WORD_BYTES = ("ByteLevel", False), ("ByteLevel", True)
SPLITTING: Mapping[tuple[tuple[Any, ...], bool], str] = {
    ((_WORD_BYTES,), False): "gpt-2",
    ((("Digits", True), _WORD_BYTES), False): "smollm",
    ((("Split", _WORDS % r"\p{N}"), _BYTES), False): "qwen2",
    ((("Split", _WORDS % r"\p{N}{1,3}"), _BYTES), True): "llama-bpe",
}


def write_gguf(path: Path, snapshot: Snapshot, form: str) -> None:
    """Write a whole model in a form of llama.cpp, or `forms.HALF`, with its tokenizer and chat template.

    Raises:
        UserError: llama.cpp has no such model or tokenizer, a weight is not finite or too large, or `gguf` is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError("--gguf needs the package gguf: pip install 'gguf>=0.19'.") from error
    config, arch = _architecture(snapshot, "gguf", partial(gguf_file.misfit, form=form))
    try:
        tokenizer = load_tokenizer(snapshot.files)
        tokens = _tokens(tokenizer, _ends(snapshot.files, tokenizer, arch.vocab_size), arch.vocab_size)

        def describe(writer: Any) -> None:
            writer.add_file_type(
                gguf.LlamaFileType.MOSTLY_F16 if form == forms.HALF else gguf.LlamaFileType[f"MOSTLY_{form.upper()}"]
            )
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            tokens(writer)

        gguf_file.write_model(path, snapshot, config["model_type"], arch, computing_dtype(snapshot), form, describe)
    except PeerError as error:
        raise UserError(f"--gguf: {error.detail}.") from error


def _architecture(
    snapshot: Snapshot, kind: str, misfit: Callable[[str, Architecture], str]
) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's values and the sizes of a model. Raises UserError if the program has no place for it."""
    config = read_config(snapshot.files)
    try:
        arch = read_architecture(config, PLAIN_TYPES)
        trait = misfit(config["model_type"], arch)
    except UnsupportedError as error:
        trait = error.trait
    if trait:
        raise UserError(f"--{kind} does not support {trait}. {OTHERWISE[kind]}")
    return config, arch


def _ends(files: Mapping[str, bytes], tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the tokens that end an answer, the tokenizer's own first. Raises PeerError: a file has none."""
    candidates = (tokenizer.eos_token_id, *end_tokens(files))
    return [token for token in dict.fromkeys(candidates) if token is not None and 0 <= token < vocab_size]


def _tokens(tokenizer: Tokenizer, ends: list[int], vocab_size: int) -> Callable[[Any], None]:
    """Return what adds a tokenizer to the package's writer. `ends`: tokens that end an answer.

    Raises:
        UserError: llama.cpp has no such tokenizer.
    """
    import gguf

    core: Any = getattr(tokenizer, "backend_tokenizer", None)
    values = parse_json(core.to_str().encode()) if core is not None else {}
    model, added = values.get("model") or {}, values.get("added_tokens") or []
    rule = _rule(values, model)
    named = {**model["vocab"], **{one["content"]: one["id"] for one in added}}
    if max(named.values()) >= vocab_size:
        raise UserError(f"--gguf: the tokenizer has a token {max(named.values())}, and the model {vocab_size} tokens.")
    texts = [f"[PAD{number}]" for number in range(vocab_size)]  # llama.cpp wants a text for each
    kinds = [gguf.TokenType.UNUSED] * vocab_size
    for text, number in named.items():
        texts[number], kinds[number] = text, gguf.TokenType.NORMAL
    for one in added:
        kinds[one["id"]] = gguf.TokenType.CONTROL if one["special"] else gguf.TokenType.USER_DEFINED
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    bare, full = (core.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    template: Any = getattr(tokenizer, "chat_template", None)

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(texts)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_add_bos_token(full[0] != bare[0])
        writer.add_add_eos_token(full[-1] != bare[-1])
        begins = full[0] if full[0] != bare[0] else getattr(tokenizer, "bos_token_id", None)
        ids = {"bos": begins, "pad": getattr(tokenizer, "pad_token_id", None)}
        ids |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
        for name, token in ids.items():
            if token is not None:
                getattr(writer, f"add_{name}_token_id")(token)
        if isinstance(template, Mapping):  # several, by name
            writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
        elif template:
            writer.add_chat_template(template)

    return add


def _rule(values: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the rule that splits texts. Raises UserError as `_tokens`."""
    first: Any = values.get("pre_tokenizer") or {}
    parts = tuple(map(_part, first.get("pretokenizers", [first])))
    rule = SPLITTING.get((parts, bool(model.get("ignore_merges"))))
    wrong = ""
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        wrong = f"a tokenizer of the kind {model.get('type', 'of transformers alone')}"
        wrong += " with byte_fallback" if model.get("byte_fallback") else ""
    elif (values.get("normalizer") or {"type": "NFC"}) != {"type": "NFC"}:
        wrong = f"a tokenizer that normalises texts by {values['normalizer']['type']}"
    elif rule is None:
        wrong = f"a tokenizer that splits texts by {' and '.join(str(part[0]) for part in parts)} in its way"
    if wrong or rule is None:
        raise UserError(f"--gguf does not support {wrong}. {OTHERWISE['gguf']}")
    return rule


def _part(step: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a step of tokenizer.json's splitting does, as in `SPLITTING`."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(words)}:
            return "ByteLevel", words
        case {"type": "Digits", "individual_digits": bool(each)}:
            return "Digits", each
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return "Split", pattern
    return str(step.get("type", "nothing")), None


# ---- MLX -------------------------------------------------------------------------------------------------------------


def write_mlx(directory: Path, snapshot: Snapshot, form: str, dtype: str) -> None:
    """Write a whole model in a form of MLX as a directory, with its tokenizer and chat template. `dtype`: that MLX
    shall compute in.

    Raises:
        UserError: mlx-lm, or the form, has no such model, or a weight is not finite.
        OSError: the directory can't be written.
    """
    config, arch = _architecture(snapshot, "mlx", partial(_mlx_misfit, form=form))
    compute = lru_cache(maxsize=1)(partial(_mlx_parts, snapshot, form, MLX_DTYPES[dtype]))
    tensors = dict[str, StoredTensor]()
    for name, shape in arch.tensor_shapes().items():
        tensors |= _mlx_tensors(name, shape, forms.format_of(name, form), MLX_DTYPES[dtype], compute)
    bits = forms.AFFINE_BITS
    rounding: dict[str, Any] = {"group_size": forms.BLOCK, "bits": bits[form]}
    if bits[forms.OF_TOKENS[form]] != bits[form]:
        tokens = {"group_size": forms.BLOCK, "bits": bits[forms.OF_TOKENS[form]]}
        rounding |= dict.fromkeys(("model.embed_tokens", "lm_head"), tokens)
    mlx_config = config | mlx_arguments(config["model_type"], arch) | {"dtype": dtype, "quantization": rounding}
    directory.mkdir(parents=True)
    try:
        with (directory / MLX_WEIGHTS).open("wb") as file:
            file.writelines(safetensors_pieces(tensors, {"format": "mlx"}))
    except PeerError as error:
        raise UserError(f"--mlx: {error.detail}.") from error
    for name, data in snapshot.files.items():
        (directory / name).write_bytes(data)
    (directory / "config.json").write_text(json.dumps(mlx_config, indent=2))


def mlx_arguments(model_type: str, arch: Architecture) -> dict[str, Any]:
    """Return a model's sizes by mlx-lm's names, those of transformers 4: its Llama finds `rope_theta` only there."""
    rope = {"rope_type": arch.rope.kind, "factor": arch.rope.factor}
    if arch.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": arch.rope.low_freq_factor,
            "high_freq_factor": arch.rope.high_freq_factor,
            "original_max_position_embeddings": arch.rope.original_positions,
        }
    return {
        "model_type": model_type,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "intermediate_size": arch.ffn_size,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "rms_norm_eps": arch.rms_eps,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_positions,
        "rope_theta": arch.rope.theta,
        "rope_scaling": None if arch.rope.kind == "default" else rope,
        "tie_word_embeddings": arch.tied,
        "attention_bias": arch.out_bias,
        "mlp_bias": arch.ffn_bias,
    }


def _mlx_misfit(model_type: str, arch: Architecture, form: str) -> str:
    """Return what mlx-lm's own classes, or the form, have no place for; empty: nothing."""
    if model_type == "qwen3" and arch.qkv_bias:
        return "attention_bias in a qwen3 model"
    if model_type == "qwen2" and arch.head_dim * arch.num_heads != arch.hidden_size:
        return f"head_dim = {arch.head_dim} in a qwen2 model of {arch.num_heads} heads"
    return forms.misfit(arch.tensor_shapes(), form)


def _mlx_tensors(
    name: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype, compute: Callable[..., tuple[memoryview, ...]]
) -> dict[str, StoredTensor]:
    """Return what MLX stores of a tensor, by name: it is computed when it is read. `compute`: `_mlx_parts`."""

    def source(at: int, stored_as: str, columns: tuple[int, ...], item_bytes: int) -> StoredTensor:
        sizes = (*shape[:1], *columns)
        num_bytes = item_bytes * prod(sizes)
        return StoredTensor(stored_as, sizes, num_bytes, lambda start, stop: compute(name, shape)[at][start:stop])

    item = dtype.itemsize
    if not kind:
        return {name: source(0, STORED[dtype], shape[1:], item)}
    words, blocks, module = (
        shape[1] * forms.AFFINE_BITS[kind] // 32,
        shape[1] // forms.BLOCK,
        name.removesuffix(".weight"),
    )
    return {
        name: source(0, "U32", (words,), 4),
        f"{module}.scales": source(1, STORED[dtype], (blocks,), item),
        f"{module}.biases": source(2, STORED[dtype], (blocks,), item),
    }


def _mlx_parts(
    snapshot: Snapshot, form: str, dtype: torch.dtype, name: str, shape: tuple[int, ...]
) -> tuple[memoryview, ...]:
    """Return the bytes of a tensor, or of what it is rounded to: q, d and e."""
    weight = torch.empty(shape, dtype=dtype)
    fill(snapshot, name if name in snapshot.tensors else "lm_head.weight", [weight])
    if not weight.isfinite().all():
        raise UserError(f"--mlx: {name} holds a value that is too large for {dtype}. Leave --dtype out.")
    kind = forms.format_of(name, form)
    if not kind:
        return (_bytes(weight),)
    q_NI, steps, edges = forms.affine(weight, kind)
    return _bytes(forms.packed(q_NI, kind)), _bytes(steps), _bytes(edges)


def _bytes(tensor: Tensor) -> memoryview:
    data: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)
