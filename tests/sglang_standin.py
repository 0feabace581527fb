"""A stand-in for an SGLang server: answers as SGLang 0.5.23's source says, around the stand-in for vLLM's state.

Source: sglang/srt/managers/io_struct.py, sglang/srt/managers/tokenizer_manager.py (`meta_info`),
sglang/srt/utils/weight_versions.py, sglang/srt/entrypoints/http_server.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vllm_standin
from vllm_standin import weights_number


class Served(vllm_standin.Served):
    """State of the server."""

    def post(self, path: str, body: Any, is_gone: Any) -> tuple[int, Any]:
        if self.wrong == f"refuses {path}":
            self.wrong = ""
            return 400, {"success": False, "message": "as the test wants"}
        if path == "/generate":
            return self.generate_as_sglang(body, is_gone)
        with self.changed:
            if path == "/pause_generation" and body["mode"] == "in_place":
                self.is_paused = True
            elif path == "/continue_generation":
                self.is_paused = False
            elif path == "/update_weights_from_disk" and self.is_paused and not body["flush_cache"]:
                self.number = weights_number(Path(body["model_path"]) / "model.safetensors")
                self.label = body["weight_version"]
            else:
                return 404, {"detail": "Not Found"}
            self.changed.notify_all()
        return 200, {"success": True, "message": "", "status": "ok"}

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/health_generate":
            return 200, {}
        return (200, {"weight_version": self.label}) if path == "/model_info" else (404, {})

    def generate_as_sglang(self, body: Any, is_gone: Any) -> tuple[int, Any]:
        """What vLLM's stand-in draws, in SGLang's words."""
        params = body["sampling_params"]
        narrow, num_top = body["return_sampling_mask"], body["top_logprobs_num"]
        asked = {"max_tokens": params["max_new_tokens"], "stop_token_ids": params["stop_token_ids"]}
        asked |= {"top_k": params["top_k"] if narrow else 0, "logprobs": params["top_k"] if narrow else num_top}
        status, answer = self.generate({"sampling_params": asked, "asked": body}, is_gone)
        if status != 200:
            return status, answer
        (choice,) = answer["choices"]
        content = choice["logprobs"]["content"]
        meta = {
            "finish_reason": {"type": choice["finish_reason"]},
            "weight_version": self.label,
            "weight_versions": choice["weight_versions"],
            "output_token_logprobs": [[one["logprob"], one["token_id"], None] for one in content],
        }
        if num_top:
            meta["output_top_logprobs"] = [
                [[top["logprob"], top["token_id"], None] for top in one["top_logprobs"]] for one in content
            ]
        if narrow:
            kept = [[top for top in one["top_logprobs"] if top["logprob"] > -9999.0] for one in content]
            meta["output_token_sampling_mask"] = [[top["token_id"] for top in tops] for tops in kept]
            meta["output_token_sampling_logprobs"] = [-0.25] * len(content)
            meta["output_token_sampling_mask_length"] = len(content)
        return 200, {"text": "", "output_ids": choice["token_ids"], "meta_info": meta}
