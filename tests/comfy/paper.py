"""A model that exists on paper only: the JSON files of a small Wan folder, for all that loads no weights."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "paper"
WORDS = ("a", "red", "blue", "circle", "square", "moving", "left", "right")
CHANNELS, WIDTH, TOKENS, SHIFT = 16, 64, 16, 3.0

FILES = {
    "model_index.json": {
        "_class_name": "WanPipeline",
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    },
    "transformer/config.json": {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "text_dim": WIDTH,
        "patch_size": [1, 2, 2],
        "num_attention_heads": 8,
    },
    "vae/config.json": {
        "z_dim": CHANNELS,
        "latents_mean": [0.0] * CHANNELS,
        "latents_std": [1.0] * CHANNELS,
        "dim_mult": [1, 2, 4, 4],
        "temperal_downsample": [False, True, True],
    },
    "text_encoder/config.json": {"d_model": WIDTH},
    "tokenizer/tokenizer_config.json": {"model_max_length": TOKENS},
    "tokenizer/tokenizer.json": {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, token in enumerate(("<pad>", "</s>", "<unk>"))
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "unk_token": "<unk>",
            "vocab": {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))},
        },
    },
    "scheduler/scheduler_config.json": {"flow_shift": SHIFT},
}


def write_paper_model(models: Path) -> Path:
    """Writes the folder below a ComfyUI models folder; a Loader lists it as "diffusers/paper"."""
    folder = models / "diffusers" / NAME
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
