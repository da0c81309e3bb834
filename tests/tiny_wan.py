"""A small random Wan in diffusers' folder layout, with a closed vocabulary: what loader, model and worker tests run on.

Weights keep activations near variance 1 (standard deviation 1 / sqrt(inputs)), so that the velocity depends visibly on
the latent, the timestep and the text. Needs the workers' packages on sys.path: `use_worker_site`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("a", "red", "green", "blue", "circle", "square", "moving", "left", "right", "on", "black", "background")
TEXT_WIDTH, TEXT_TOKENS, IMAGE_WIDTH = 32, 16, 24
VARIANTS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "i2v-2.1": {"in_channels": 36, "image_dim": IMAGE_WIDTH},
    "flf-2.1": {"in_channels": 36, "image_dim": IMAGE_WIDTH, "pos_embed_seq_len": 10},
    "i2v-2.2": {"in_channels": 36},
    "control-2.1": {"in_channels": 48, "image_dim": IMAGE_WIDTH},
    "ti2v": {"in_channels": 48, "out_channels": 48},
    "vace": {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 96},
}
"""What the configs of Wan's variants have else than text to video; image keys are as wide as the network."""


def use_worker_site() -> None:
    """Puts the workers' packages where the launcher puts them: at the end of sys.path."""
    site = str(ROOT / ".workers")
    if site not in sys.path:
        sys.path.append(site)


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that keep variances near 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        near_one = ("norm" in name or "gamma" in name) and not name.endswith("bias")
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 and not near_one else 0.1
        parameter.data = scale * draw + (1.0 if near_one else 0.0)
    return module


def transformer(**changes: Any) -> nn.Module:
    """diffusers' own network: 4 heads of 16, 2 layers; `changes` may be one of VARIANTS."""
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    config: dict[str, Any] = {
        "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 16,
        "out_channels": 16, "text_dim": TEXT_WIDTH, "freq_dim": 64, "ffn_dim": 128, "num_layers": 2,
        "rope_max_seq_len": 64, **changes}
    if config.get("image_dim"):
        config["added_kv_proj_dim"] = config["num_attention_heads"] * config["attention_head_dim"]
    kind = WanVACETransformer3DModel if "vace_layers" in config else WanTransformer3DModel
    return randomise(kind(**config)).eval()


class Weights:
    """The weights of a network of diffusers as a family takes them (models.family.WeightSource)."""

    root = Path("tiny")

    def __init__(self, network: nn.Module, device: Any = "cpu") -> None:
        import torch

        self.network, self.device, self.config = network, torch.device(device), dict(network.config)

    def tensors(self) -> Any:
        return ((name, tensor.to(self.device)) for name, tensor in self.network.state_dict().items())


def vae() -> nn.Module:
    from diffusers import AutoencoderKLWan

    return randomise(AutoencoderKLWan(base_dim=4, num_res_blocks=1)).eval()


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
