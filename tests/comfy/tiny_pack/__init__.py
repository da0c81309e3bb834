"""Core takes the sizes of these networks from files of its own, whatever a weight file holds: here they are tiny.

A pack that replaces them and has no nodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.clip_vision
import comfy.ldm.wan.vae2_2
import comfy.sd1_clip
import comfy.text_encoders.t5
import comfy.text_encoders.wan

HERE = Path(__file__).resolve().parent
WholeVAE = comfy.ldm.wan.vae2_2.WanVAE
WholeVision = comfy.clip_vision.ClipVisionModel
NODE_CLASS_MAPPINGS: dict[str, Any] = {}


class TinyVAE(WholeVAE):  # type: ignore[misc, valid-type]
    """Wan 2.2's VAE."""

    def __init__(self, dim: int = 160, **options: Any) -> None:
        super().__init__(dim=4, dec_dim=8, **options)


class TinyVision(WholeVision):  # type: ignore[misc, valid-type]
    """CLIP vision H."""

    def __init__(self, json_config: str) -> None:
        super().__init__(HERE / "clip_vision.json")


class TinyText(comfy.sd1_clip.SDClipModel):  # type: ignore[misc]
    """UMT5 XXL, with the arguments that core gives it."""

    def __init__(self, **options: Any) -> None:
        config = json.loads((HERE / "umt5.json").read_text(encoding="utf-8"))
        super().__init__(textmodel_json_config=config, special_tokens={"end": 1, "pad": 0},
                         model_class=comfy.text_encoders.t5.T5, enable_attention_masks=True, zero_out_masked=True,
                         **{"layer": "last", **options})


comfy.ldm.wan.vae2_2.WanVAE = TinyVAE
comfy.clip_vision.ClipVisionModel = TinyVision
comfy.text_encoders.wan.UMT5XXlModel = TinyText
