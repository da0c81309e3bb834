"""PipeDiT Loader: names a model and the devices it runs on. It loads nothing; the pool does when a node needs it."""

from __future__ import annotations

import folder_paths
from comfy_api.latest import io

from . import catalog
from .catalog import DEMO, DTYPES, Catalog
from .compat import make
from .handles import PoolClip, PoolModel, PoolVAE
from .pools import pools
from .waiting import naming

CATEGORY = "PipeDiT"
Model = io.Custom("PIPEDIT_MODEL")
Plan = io.Custom("PIPEDIT_PLAN")
NAME = "PipeDiT Loader"


class PipeDiTLoader(io.ComfyNode):
    """Names the files; the pool loads them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        found = Catalog.read(folder_paths)
        return make(
            io.Schema,
            node_id="PipeDiTLoader",
            display_name=NAME,
            category=CATEGORY,
            description="Chooses a video model and the devices of the pool that runs it. Weights go into the pool's "
            "processes, once, when a node needs them, and stay there between prompts.",
            search_aliases=["multi gpu", "wan", "pipedit", "load diffusion model", "parallel"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=found.names,
                    default=DEMO,
                    tooltip="The model: the demo that comes with this pack, or a folder below models/diffusers. "
                    "Single files are listed for a later version.",
                ),
                make(
                    io.Combo.Input,
                    "unet_name_low",
                    options=["none", *found.names],
                    default="none",
                    advanced=True,
                    tooltip="Second model for low noise (Wan 2.2 A14B). Comes in a later version: none.",
                ),
                make(
                    io.Combo.Input,
                    "weight_dtype",
                    options=list(DTYPES),
                    default="default",
                    advanced=True,
                    tooltip="The transformer's weights. default: as in the file, fp32 on the CPU. fp8 comes later.",
                ),
                make(
                    io.Combo.Input,
                    "clip_name1",
                    options=["auto", "none", *found.text_encoders],
                    default="auto",
                    advanced=True,
                    tooltip="Text encoder. auto: the one in the model's folder; none: use a core CLIPLoader.",
                ),
                make(
                    io.Combo.Input,
                    "clip_name2",
                    options=["none", "auto", *found.text_encoders],
                    default="none",
                    advanced=True,
                    tooltip="Second text encoder, for models that have one. Comes in a later version: none.",
                ),
                make(
                    io.Combo.Input,
                    "vae_name",
                    options=["auto", "none", *found.vaes],
                    default="auto",
                    advanced=True,
                    tooltip="VAE. auto: the one in the model's folder; none: no vae output.",
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="auto: all GPUs that ComfyUI sees, or 3 CPU processes without one. "
                    "Or a list such as gpu:0,gpu:1 with ComfyUI's numbers, or cpu:N.",
                ),
            ],
            outputs=[
                Model.Output("model", display_name="model", tooltip="For the Multi-GPU Sampler."),
                io.Clip.Output("clip", display_name="clip", tooltip="The pool's text encoder, for CLIP Text Encode."),
                io.Vae.Output(
                    "vae", display_name="vae", tooltip="The pool's VAE, for Decoupled VAE Decode and core VAE nodes."
                ),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        unet_name: str,
        unet_name_low: str,
        weight_dtype: str,
        clip_name1: str,
        clip_name2: str,
        vae_name: str,
        devices: str,
    ) -> bool | str:
        """True, or what is wrong: names the value, the allowed ones and the nearest."""
        return (
            catalog.complaint(
                Catalog.read(folder_paths),
                {
                    "unet_name": unet_name,
                    "unet_name_low": unet_name_low,
                    "weight_dtype": weight_dtype,
                    "clip_name1": clip_name1,
                    "clip_name2": clip_name2,
                    "vae_name": vae_name,
                    "devices": devices,
                },
            )
            or True
        )

    @classmethod
    def fingerprint_inputs(cls, unet_name: str, **rest: str) -> tuple[tuple[str, int, int], ...]:
        """Changes when a file of the model does."""
        return catalog.fingerprint(Catalog.read(folder_paths).folder(unet_name))

    @classmethod
    def execute(
        cls,
        unet_name: str,
        unet_name_low: str,
        weight_dtype: str,
        clip_name1: str,
        clip_name2: str,
        vae_name: str,
        devices: str,
    ) -> io.NodeOutput:
        """Reads the model's JSON files."""
        found = Catalog.read(folder_paths)
        with naming(NAME):
            catalog.check_loader(
                found,
                {
                    "unet_name": unet_name,
                    "unet_name_low": unet_name_low,
                    "weight_dtype": weight_dtype,
                    "clip_name1": clip_name1,
                    "clip_name2": clip_name2,
                    "vae_name": vae_name,
                    "devices": devices,
                },
            )
            files = found.load(unet_name, weight_dtype)
        model = PoolModel(pools, devices, files)
        clip = PoolClip(model, files.text) if files.text is not None and clip_name1 == "auto" else None
        vae = PoolVAE(model, files.vae) if files.vae is not None and vae_name == "auto" else None
        return io.NodeOutput(model, clip, vae)
