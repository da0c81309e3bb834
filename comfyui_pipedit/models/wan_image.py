"""Wan's image-to-video networks: channels beside the latent, and image tokens beside the text.

The channels are a latent of the given frames (any number of latents one after the other) and, in some networks, a mask
of four channels: 1 where a frame is given. What is missing, and sizes that differ, are treated as ComfyUI treats them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanImageEmbedding
from torch import Tensor, nn

from ..errors import InvalidJob
from ..job import Geometry
from .geometry import normalised

CONCAT, CONCAT_MASK, CONCAT_INDEX = "concat_latent_image", "concat_mask", "concat_mask_index"
IMAGE = "clip_vision_output"
"""Names of a job.Branch's extras, ComfyUI's own. CONCAT: [1, k * C, T, h', w'] in VAE space. CONCAT_MASK:
[1, any, T', h', w'], 0 where a frame is given. CONCAT_INDEX: [1], the channel before which the mask goes. IMAGE:
[1, N, D], hidden states of one or more images."""

MASK_CHANNELS = 4
IMAGE_TO_VIDEO_INPUTS = 36
TI2V_CHANNELS = 48
"""ComfyUI tells Wan 2.2 TI2V from the others by its output channels; so do we."""


# -- channels beside the latent -------------------------------------------------------------------------------------


def concat_channels(config: Any, extras: Mapping[str, Tensor], shape: tuple[int, ...], mask: Tensor | None,
                    geometry: Geometry) -> Tensor | None:
    """The channels that go behind a latent of `shape` into the network; None for a network that has no more.

    config: the network's. mask: the job's; it stands in for a missing CONCAT_MASK. InvalidJob naming the sizes if the
    channels or frames that are given are not those that the network takes.
    """
    free = config.in_channels - geometry.channels
    if free == 0:
        return None
    given = extras.get(CONCAT)
    if given is None:
        return torch.zeros(1, free, *shape[2:])
    image = _image(given, shape, geometry)
    beside_mask, fits = free - MASK_CHANNELS, image.shape[2] == shape[2]
    if fits and (image.shape[1] == beside_mask or (image.shape[1] != free and _makes_video_of_an_image(config))):
        image = _with_mask(image[:, :beside_mask], extras, shape, mask)
    if not fits or image.shape[1] != free:
        raise InvalidJob(
            f"{CONCAT} is {list(given.shape)} and the clip's latent {list(shape)}: this network takes {free} more "
            f"channels (or {beside_mask} and a mask) of the same {shape[2]} latent frames; use the node of this "
            "model's kind with the clip's own length")
    return image


def _makes_video_of_an_image(config: Any) -> bool:
    """Whether the network has a mask among its channels whatever image it is given; ComfyUI's own distinction."""
    return bool(config.image_dim and config.in_channels == IMAGE_TO_VIDEO_INPUTS) or is_ti2v(config)


def is_ti2v(config: Any) -> bool:
    """Whether a network is Wan 2.2 TI2V: frames that are kept have a timestep of their own and carry no noise."""
    return (config.out_channels or config.in_channels) == TI2V_CHANNELS


def _image(given: Tensor, shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """The given latents in model space, scaled to the clip's height and width."""
    if given.dim() != 5 or given.shape[1] % geometry.channels:
        raise InvalidJob(f"{CONCAT} is {list(given.shape)}, not [1, a multiple of {geometry.channels}, T, h, w]; use "
                         "the Loader's vae, or a VAELoader with this model's own VAE")
    return normalised(scaled(given, shape[-2], shape[-1]), geometry)


def _with_mask(image: Tensor, extras: Mapping[str, Tensor], shape: tuple[int, ...], mask: Tensor | None) -> Tensor:
    given = extras.get(CONCAT_MASK, mask)
    channels = image.new_zeros(1, MASK_CHANNELS, *shape[2:]) if given is None else _mask(given, shape)
    before = int(extras[CONCAT_INDEX]) if CONCAT_INDEX in extras else 0
    return torch.cat((image[:, :before], channels, image[:, before:]), dim=1)


def _mask(given: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[1, 4, T, h, w], 1 where a frame is given; frames that the mask lacks count as not given."""
    if given.dim() != 5 or given.shape[2] > shape[2]:
        raise InvalidJob(f"{CONCAT_MASK} is {list(given.shape)}, not [1, 1 or {MASK_CHANNELS}, {shape[2]}, h, w]")
    if given.shape[1] != MASK_CHANNELS:
        given = given.mean(dim=1, keepdim=True)
    mask = scaled(1.0 - given, shape[-2], shape[-1])
    mask = nn.functional.pad(mask, (0, 0, 0, 0, 0, shape[2] - mask.shape[2]))
    return mask.expand(-1, MASK_CHANNELS, -1, -1, -1)


def scaled(x: Tensor, height: int, width: int) -> Tensor:
    """x [B, C, T, H, W] at another height and width: cut in the middle to the new aspect, then bilinear."""
    rows, columns = x.shape[-2:]
    if (rows, columns) == (height, width):
        return x
    have, want = columns / rows, width / height
    left = round((columns - columns * (want / have)) / 2) if have > want else 0
    top = round((rows - rows * (have / want)) / 2) if have < want else 0
    cut = x[..., top:rows - top, left:columns - left]
    frames = nn.functional.interpolate(cut.transpose(1, 2).flatten(0, 1), size=(height, width), mode="bilinear")
    return frames.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


# -- image tokens beside the text -----------------------------------------------------------------------------------


class ImageTokens(WanImageEmbedding):
    """diffusers' embedding of image tokens for any number of them: of one image, of two, with and without positions."""

    def forward(self, encoder_hidden_states_image: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, dim]; a network with positions takes as many tokens as it has positions."""
        hidden = encoder_hidden_states_image
        if self.pos_embed is not None:
            hidden = hidden[:, :self.pos_embed.shape[1]] + self.pos_embed[:, :hidden.shape[1]]
        return self.norm2(self.ff(self.norm1(hidden)))


class Context:
    """Where the image tokens of a network's context end. diffusers takes the last 512 for text, and ours may be fewer
    or more; without images, image keys and values are computed from the text, as in ComfyUI."""

    def __init__(self) -> None:
        self.images: int | None = None

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pre-hook of the network's forward."""
        given = kwargs.get("encoder_hidden_states_image")
        self.images = None if given is None else given.shape[1]


class ContextProcessor(WanAttnProcessor):
    """Attention to text, and with keys and values of their own to images; the sum of both."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def __call__(self, attn: WanAttention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
                 attention_mask: Tensor | None = None, rotary_emb: Any = None) -> Tensor:
        """[B, S, dim] -> [B, S, dim]; encoder_hidden_states: [B, images + text, dim]."""
        assert encoder_hidden_states is not None
        images = self.context.images
        image, text = encoder_hidden_states[:, :images], encoder_hidden_states[:, images:]
        query = attn.norm_q(attn.to_q(hidden_states))
        seen = self._attend(attn.heads, query, attn.norm_k(attn.to_k(text)), attn.to_v(text))
        seen = seen + self._attend(attn.heads, query, attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image))
        return attn.to_out[0](seen)

    def _attend(self, heads: int, *projected: Tensor) -> Tensor:
        query, key, value = (tensor.unflatten(2, (heads, -1)) for tensor in projected)
        output = dispatch_attention_fn(query, key, value, backend=self._attention_backend, parallel_config=None)
        return output.flatten(2, 3).type_as(query)


def read_images(model: nn.Module) -> None:
    """Puts the two classes above into a network that has image keys; before its weights are assigned."""
    config: Any = model.config
    if config.image_dim is not None:
        inner = config.num_attention_heads * config.attention_head_dim
        model.condition_embedder.image_embedder = ImageTokens(config.image_dim, inner, config.pos_embed_seq_len)
    if config.added_kv_proj_dim is None:
        return
    context = Context()
    model.register_forward_pre_hook(context.note, with_kwargs=True)
    for block in model.blocks:
        block.attn2.set_processor(ContextProcessor(context))


def image_states(config: Any, given: Tensor) -> Tensor:
    """The hidden states of images [1, N, D] for a network with an image embedding; InvalidJob for other sizes."""
    if given.dim() != 3 or given.shape[0] != 1 or given.shape[2] != config.image_dim:
        raise InvalidJob(f"{IMAGE} has hidden states {list(given.shape)}, and this network takes [1, N, "
                         f"{config.image_dim}]; use CLIPVisionLoader with clip_vision_h")
    return given
