"""What builds the models of the engines that can check others; `mlx` where its packages are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from echo2.engines.compact import build_compact
from echo2.engines.hf_engine import build_transformers
from echo2.engines.mlx import MlxBuilder

HAS_MLX = all(find_spec(package) for package in ("mlx", "mlx_lm"))
BUILDERS: dict[str, Any] = {"compact": build_compact, "transformers": build_transformers}
if HAS_MLX:
    BUILDERS["mlx"] = MlxBuilder(device="cpu")
