"""A small random Wan in diffusers' folder layout, with a closed vocabulary: what loader, model and worker tests run on.

The networks are those of `verify --tiny`. They need the workers' packages on sys.path: `use_worker_site`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfyui_pipedit.tiny import (
    IMAGE_WIDTH,
    TEXT_TOKENS,
    TEXT_WIDTH,
    VARIANTS,
    randomise,
    transformer,
    use_worker_site,
    vae,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["IMAGE_WIDTH", "ROOT", "TEXT_TOKENS", "TEXT_WIDTH", "VARIANTS", "WORDS", "Weights", "randomise",
           "text_encoder", "transformer", "use_worker_site", "vae", "write_model", "write_tokenizer"]
ROOT = Path(__file__).resolve().parent.parent
WORDS = ("a", "red", "green", "blue", "circle", "square", "moving", "left", "right", "on", "black", "background")


class Weights:
    """The weights of a network of diffusers as a family takes them (models.family.WeightSource)."""

    root = Path("tiny")

    def __init__(self, network: nn.Module, device: Any = "cpu") -> None:
        import torch

        self.network, self.device, self.config = network, torch.device(device), dict(network.config)

    def tensors(self) -> Any:
        return ((name, tensor.to(self.device)) for name, tensor in self.network.state_dict().items())


def text_encoder() -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(vocab_size=len(WORDS) + 3, d_model=TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return randomise(UMT5EncoderModel(config)).eval()


def write_tokenizer(folder: Path) -> None:
    """WordLevel, one word a token; no post-processor, so that the end token is the encoder's business."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": TEXT_TOKENS, "eos_token": "</s>"}))


def write_model(root: Path, dtype: str = "float32", shards: bool = False) -> Path:
    """The whole folder; returns it. shards: the transformer in several files with an index."""
    import torch

    kind = getattr(torch, dtype)
    transformer().to(kind).save_pretrained(root / "transformer", max_shard_size="100KB" if shards else "1GB")
    vae().to(kind).save_pretrained(root / "vae")
    text_encoder().to(kind).save_pretrained(root / "text_encoder")
    write_tokenizer(root / "tokenizer")
    (root / "scheduler").mkdir()
    (root / "scheduler" / "scheduler_config.json").write_text(json.dumps(
        {"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0, "prediction_type": "flow_prediction"}))
    (root / "model_index.json").write_text(json.dumps({
        "_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"], "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"]}))
    return root
