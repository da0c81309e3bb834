"""PipeDiT Model Bridge: a core MODEL whose network is in the pool, for ComfyUI's own samplers and those of other packs.

`patcher` makes a real ModelPatcher around a BaseModel without weights. Noise levels, latent format, guidance and what
patches do to outputs are ComfyUI's own code; each call of the model is one evaluation in the pool for each latent.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_management as management
import comfy.model_patcher
import comfy.supported_models_base
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from torch import Tensor

from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.job import Branch, EvaluateRequest, Geometry, ModelFiles

from . import conditioning, waiting
from .compat import make
from .handles import LivesInThePool, PoolModel
from .loader import CATEGORY, Model

NAME = "PipeDiT Model Bridge"
TIMESTEPS = 1000.0
TI2V_CHANNELS = 48
NETWORK_PATCHES = ("patches", "patches_replace", "rope_options", "optimized_attention_override")
"""Options of a transformer that reach into the network."""
CORE_KEYS = frozenset({
    "device", "noise", "latent_image", "denoise_mask", "seed", "latent_shapes", "model_conds", "uuid", "cross_attn",
    "area", "mask", "mask_strength", "set_area_to_bounds", "strength", "default", "hooks", "start_percent",
    "end_percent", "timestep_start", "timestep_end",
})
"""What ComfyUI's samplers add to a conditioning, or read themselves before and after each call of the model."""


def refuse(what: str, instead: str) -> NoReturn:
    raise InvalidJob(f"{NAME}: {what} needs the network in this process, and it is in the PipeDiT pool; {instead}")


class InThePool(torch.nn.Module):
    """Where a core model has its network: nothing that could be read or patched."""

    dtype = torch.float32

    def __getattr__(self, name: str) -> NoReturn:
        raise LivesInThePool(f"{name} of the diffusion model lives in the PipeDiT pool; connect a core UNETLoader here")


class Extras(comfy.conds.CONDRegular):
    """What a branch is told besides its text, one mapping for each item of the batch."""

    def process_cond(self, batch_size: int, area: Any = None, **_: Any) -> Extras:
        """For a batch of this size. InvalidJob for a part of the picture: extras are for the whole."""
        if area is not None and any(self.cond):
            raise InvalidJob(f"{NAME}: an area on a conditioning with {', '.join(self.cond[0])} is not supported")
        return Extras([self.cond[i % len(self.cond)] for i in range(batch_size)])

    def can_concat(self, other: Any) -> bool:
        return isinstance(other, Extras)

    def concat(self, others: Sequence[Any]) -> list[Mapping[str, Tensor]]:
        return [item for one in (self, *others) for item in one.cond]

    def size(self) -> list[int]:
        return [len(self.cond)]


class PooledModel(comfy.model_base.BaseModel):
    """A core model without weights; it calls the pool. `seconds` counts the pool's work by kind."""

    def __init__(self, model: PoolModel) -> None:
        super().__init__(model_config(model.files), comfy.model_base.ModelType.FLOW)
        self.diffusion_model = InThePool()
        self.pool = model
        self.seconds: Counter[str] = Counter()

    # -- what ComfyUI asks a model -----------------------------------------------------------------------------------

    def extra_conds(self, **given: Any) -> dict[str, Any]:
        """What the model is told in one branch, in ComfyUI's wrappers: text, extras, and the mask of the latent."""
        if given.get("cross_attn") is None:
            raise InvalidJob(f"{NAME}: a conditioning has no text; connect CLIP Text Encode")
        told = {key: value for key, value in given.items() if key not in CORE_KEYS}
        read = conditioning.read([[given["cross_attn"], told]], "conditioning", self.pool.files)
        count = len(given["noise"])
        extras = [read.branch(item, count).extras for item in range(count)]
        found: dict[str, Any] = {"c_crossattn": comfy.conds.CONDRegular(read.text), "extras": Extras(extras)}
        if given.get("denoise_mask") is not None:
            found["denoise_mask"] = comfy.conds.CONDNoiseShape(given["denoise_mask"])
        return found

    def _apply_model(
        self,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> Tensor:
        """Clean estimate of x [B, C, T, h, w] at the noise levels t [B]: an evaluation for each different latent."""
        check_patches(control, transformer_options or {})
        if c_crossattn is None:
            raise InvalidJob(f"{NAME}: the model was called without a text")
        sampling = self.model_sampling
        levels = t if getattr(sampling, "multiplier", None) == TIMESTEPS else sampling.timestep(t) / TIMESTEPS
        texts, extras = c_crossattn.to("cpu", torch.float32), given.get("extras", [{}] * len(x))
        branches = [Branch(texts[i : i + 1], extras[i]) for i in range(len(x))]
        mask = given.get("denoise_mask")
        mask = None if mask is None else mask.to("cpu", torch.float32).mean(dim=1, keepdim=True)
        velocity = self.velocities(x.to("cpu", torch.float32), levels.tolist(), branches, mask)
        return sampling.calculate_denoised(t, velocity.to(x), x)

    def scale_latent_inpaint(self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any) -> Tensor:
        """What a masked latent is where it is kept; Wan 2.2 TI2V sees it clean."""
        if self.pool.files.geometry.channels == TI2V_CHANNELS:
            return latent_image
        return super().scale_latent_inpaint(sigma=sigma, noise=noise, latent_image=latent_image, **kwargs)

    def memory_required(self, *_: Any, **__: Any) -> int:
        """Nothing is computed here."""
        return 0

    def state_dict_for_saving(self, *_: Any, **__: Any) -> NoReturn:
        refuse("saving a model", "its files are where PipeDiT Loader read them")

    # -- the pool ----------------------------------------------------------------------------------------------------

    def velocities(self, x: Tensor, levels: Sequence[float], branches: Sequence[Branch], mask: Tensor | None) -> Tensor:
        """float32 [B, C, T, h, w] on the CPU; items that differ in their branch alone are one evaluation."""
        groups = list(same_latents(x, levels))
        tickets = self.pool.submit(*(
            EvaluateRequest(
                files=self.pool.files,
                x=x[group[0] : group[0] + 1],
                sigma=levels[group[0]],
                branches=tuple(branches[item] for item in group),
                mask=None if mask is None else mask[group[0] : group[0] + 1],
            )
            for group in groups
        ))
        waiting.wait(tickets, waiting.Words(tickets))
        result = torch.empty_like(x)
        for group, ticket in zip(groups, tickets, strict=True):
            self.seconds.update(ticket.timings())
            for item, velocity in zip(group, ticket.result(), strict=True):
                result[item] = velocity[0]
        return result


class PoolPatcher(comfy.model_patcher.ModelPatcher):
    """ComfyUI's handle of a model; refuses what would have to change the network."""

    def add_patches(self, *_: Any, **__: Any) -> NoReturn:
        refuse("a LoRA or another change of weights", "use PipeDiT LoRA before the bridge")

    def add_hook_patches(self, *_: Any, **__: Any) -> NoReturn:
        refuse("a LoRA hook", "use PipeDiT LoRA before the bridge")

    def get_key_patches(self, *_: Any, **__: Any) -> NoReturn:
        refuse("merging models", "merge them with core nodes and load the result with PipeDiT Loader")

    def add_weight_wrapper(self, *_: Any, **__: Any) -> NoReturn:
        refuse("a wrapper of weights", "take the node before this sampler out")

    def set_injections(self, *_: Any, **__: Any) -> NoReturn:
        refuse("an injection", "take the node before this sampler out")

    def set_model_compute_dtype(self, *_: Any, **__: Any) -> NoReturn:
        refuse("another compute dtype", "choose PipeDiT Loader's weight_dtype")

    def add_object_patch(self, name: str, obj: Any) -> None:
        if name.startswith("diffusion_model"):
            refuse(f"a patch of {name}", "take the node before this sampler out")
        super().add_object_patch(name, obj)

    def get_model_object(self, name: str) -> Any:
        if name.startswith("diffusion_model"):
            refuse(f"{name}, for example to compile it,", "take the node before this sampler out")
        return super().get_model_object(name)


def patcher(model: PoolModel, shift: float = 0.0) -> PoolPatcher:
    """A core MODEL of a model in the pool. shift 0 = the model's own."""
    if shift:
        model = dataclasses.replace(model, files=dataclasses.replace(model.files, shift=shift))
    return PoolPatcher(PooledModel(model), management.get_torch_device(), torch.device("cpu"))


def model_config(files: ModelFiles) -> Any:
    """What ComfyUI knows of a kind of model, for one that creates no network."""
    config = comfy.supported_models_base.BASE({"disable_unet_model_creation": True})
    config.sampling_settings = {"shift": files.shift}
    config.latent_format = latent_format(files.geometry)
    return config


def latent_format(geometry: Geometry) -> comfy.latent_formats.LatentFormat:
    """ComfyUI's Wan format with this model's own numbers; colours of previews only where the numbers are Wan's."""
    wide = geometry.channels == TI2V_CHANNELS
    made = comfy.latent_formats.Wan22() if wide else comfy.latent_formats.Wan21()
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (geometry.mean, geometry.std))
    if mean.shape != made.latents_mean.shape or not torch.allclose(mean, made.latents_mean, atol=1e-3):
        made.latent_rgb_factors = made.taesd_decoder_name = None
    made.latent_channels, made.latents_mean, made.latents_std = geometry.channels, mean, std
    return made


def check_patches(control: Any, options: Mapping[str, Any]) -> None:
    """InvalidJob for what would have to reach into the network."""
    if control is not None:
        refuse("a ControlNet", "take it out")
    found = [name for name in NETWORK_PATCHES if options.get(name)]
    if options.get("wrappers", {}).get(WrappersMP.DIFFUSION_MODEL):
        found.append("a wrapper of the network")
    if found:
        refuse(f"a patch ({', '.join(found)})", "take the node that adds it out")


def same_latents(x: Tensor, levels: Sequence[float]) -> Iterator[list[int]]:
    """The items of a batch, those with the same latent and noise level together."""
    groups: list[list[int]] = []
    for item in range(len(x)):
        known = (group for group in groups if levels[group[0]] == levels[item] and torch.equal(x[group[0]], x[item]))
        found = next(known, None)
        if found is None:
            groups.append([item])
        else:
            found.append(item)
    return iter(groups)


class PipeDiTModelBridge(io.ComfyNode):
    """Gives a model in the pool to core nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="PipeDiTModelBridge",
            display_name=NAME,
            category=CATEGORY,
            description="A model in the pool as a core MODEL: KSampler, SamplerCustomAdvanced with its guiders, "
            "ModelSamplingSD3 and samplers of other packs work on it, and every call of the model runs on the pool's "
            "GPUs together. Multi-GPU Sampler is faster where it has what you need.",
            search_aliases=["bridge", "core model", "custom sampler", "sampler custom advanced"],
            inputs=[Model.Input("model", tooltip="From PipeDiT Loader or PipeDiT LoRA.")],
            outputs=[
                io.Model.Output(
                    "core_model",
                    display_name="MODEL",
                    tooltip="For core samplers and guiders. Patches that need the network itself are refused by name.",
                )
            ],
        )

    @classmethod
    def execute(cls, model: PoolModel) -> io.NodeOutput:
        """Starts nothing and loads nothing."""
        return io.NodeOutput(patcher(model))
