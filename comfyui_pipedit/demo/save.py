"""Writes the demo model in diffusers' folder layout, its tokenizer included."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from .text_encoder import CONFIG, TextEncoder
from .words import EOS, MAX_TOKENS, PAD, UNK, vocabulary

SHIFT = 3.0
SHARD = "12MB"
MODEL_INDEX = {
    "_class_name": "WanPipeline", "_diffusers_version": "0.39.0", "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"], "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"], "vae": ["diffusers", "AutoencoderKLWan"],
}
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler", "_diffusers_version": "0.39.0", "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": SHIFT, "solver_order": 2,
    "solver_type": "bh2",
}


def save_demo(out: Path, transformer: WanTransformer3DModel, text_encoder: TextEncoder, vae: Path) -> None:
    """Write a whole pipeline folder: the transformer as fp16 in shards, the VAE copied from its folder."""
    out.mkdir(parents=True, exist_ok=True)
    transformer.to(torch.float16).save_pretrained(out / "transformer", max_shard_size=SHARD)
    save_text_encoder(out / "text_encoder", text_encoder)
    save_tokenizer(out / "tokenizer")
    if vae.resolve() != (out / "vae").resolve():
        shutil.copytree(vae, out / "vae", dirs_exist_ok=True)
    _write(out / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write(out / "model_index.json", MODEL_INDEX)


def save_text_encoder(folder: Path, text_encoder: TextEncoder) -> None:
    """The encoder as transformers' UMT5EncoderModel reads it, in fp32: it is small."""
    _write(folder / "config.json", CONFIG)
    state = {name: value.detach().float().cpu().contiguous() for name, value in text_encoder.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json and the configs that PreTrainedTokenizerFast and the `tokenizers` library read."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_TOKENS, "padding_side": "right",
        **special,
    })
    _write(folder / "special_tokens_map.json", special)


def build_tokenizer() -> Tokenizer:
    """One token a word, whatever its case and the punctuation around it; the end token last."""
    words = {word: index for index, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[.,;!?]"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, words[EOS])])
    tokenizer.add_special_tokens([PAD, EOS, UNK])
    return tokenizer


def _write(path: Path, content: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
