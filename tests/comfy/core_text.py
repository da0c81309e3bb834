"""Core's umt5 encoder against ours on the same tiny weights and tokenizer: python core_text.py COMFY OUT WORKER_SITE.

Writes OUT/core.safetensors and OUT/ours.safetensors: the embedding of each text by its place in TEXTS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inprocess import ROOT, enter, load

if TYPE_CHECKING:
    from torch import Tensor

TEXTS = (
    "a red circle moving left", "", "a (red:1.3) circle", "(a red circle) moving left",
    "((blue)) circle on (black:0.5)", "(a:0.25) red circle", r"two \(red\) squares",
    "(one (circle:1.4): blue) and green!", "a (red circle", "a red) circle", "(red:-0.5) circle",
    "The quick brown fox " * 40 + "(jumps:1.2)",
)


def by_core(weights: dict[str, Tensor], config: dict[str, Any], out: Path) -> dict[str, Tensor]:
    """What core's CLIPTextEncode would give: its tokenizer and model classes on this config."""
    from comfy import sd1_clip
    from comfy.text_encoders.spiece_tokenizer import SPieceTokenizer
    from comfy.text_encoders.t5 import T5

    file = out / "config.json"
    file.write_text(json.dumps(config))
    tokenizer = sd1_clip.SDTokenizer(
        weights["spiece_model"], pad_with_end=False, embedding_size=config["d_model"], embedding_key="umt5xxl",
        tokenizer_class=SPieceTokenizer, has_start_token=False, pad_to_max_length=False, max_length=99999999,
        min_length=512, pad_token=0)
    model = sd1_clip.SDClipModel(
        layer="last", textmodel_json_config=str(file), special_tokens={"end": 1, "pad": 0}, model_class=T5,
        enable_attention_masks=True, zero_out_masked=True)
    model.load_sd({name: tensor for name, tensor in weights.items() if name != "spiece_model"})
    return {str(i): model.encode_token_weights(tokenizer.tokenize_with_weights(text))[0].float()
            for i, text in enumerate(TEXTS)}


def by_us(file: Path) -> dict[str, Tensor]:
    """The same by the pool's encoder out of a single file."""
    from comfyui_pipedit import models
    from comfyui_pipedit.job import Weights
    from comfyui_pipedit.parallel.sequence import Context
    from comfyui_pipedit.worker.device import Device
    from comfyui_pipedit.worker.residency import Residency

    models.preload()
    weights = Weights("wan", "text", str(file))
    residency = Residency(Device.parse("cpu:0"), Context(0, None), lambda text: None)
    residency.load(weights)
    return {str(i): residency.get(weights).encode(text) for i, text in enumerate(TEXTS)}


def main() -> None:
    comfy, out, worker_site = map(Path, sys.argv[1:])
    enter(comfy)
    import torch
    from safetensors.torch import save_file

    sys.path.append(str(worker_site))
    load("comfyui_pipedit", ROOT / "comfyui_pipedit" / "__init__.py")
    load("tiny_wan", ROOT / "tests" / "tiny_wan.py")
    wan_files: Any = load("wan_files", ROOT / "tests" / "wan_files.py")

    pieces = wan_files.pieces()
    network = wan_files.text_encoder(wan_files.piece_count(pieces))
    weights = wan_files.text_tensors(network, pieces)
    file = wan_files.write(out / "umt5_tiny.safetensors", weights, wan_files.plain("float32"))
    config = {**network.config.to_dict(), "model_type": "umt5", "dense_act_fn": "gelu_pytorch_tanh"}
    with torch.inference_mode():
        for name, results in (("core", by_core(weights, config, out)), ("ours", by_us(file))):
            save_file({key: tensor.contiguous() for key, tensor in results.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
