"""PipeDiT Loader: names a model and the devices it runs on. It loads nothing; the pool does when a node needs it."""

from __future__ import annotations

import folder_paths
from comfy_api.latest import io

from . import catalog
from .catalog import DEMO, DTYPES, Catalog, Choice
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
        models = list(found.models)
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
                    options=models,
                    default=DEMO,
                    tooltip="The model: the demo that comes with this pack, a Wan file from models/diffusion_models, "
                    "a checkpoint, or a folder below models/diffusers.",
                ),
                make(
                    io.Combo.Input,
                    "unet_name_low",
                    options=["none", *models],
                    default="none",
                    advanced=True,
                    tooltip="The low-noise model of Wan 2.2 A14B; unet_name is then the high-noise one. One Sampler "
                    "switches between them. none: one model.",
                ),
                make(
                    io.Combo.Input,
                    "weight_dtype",
                    options=list(DTYPES),
                    default="default",
                    advanced=True,
                    tooltip="The transformer's weights. default: as in the file (fp8 stays fp8), 16-bit files as fp32 "
                    "on the CPU. fp8_e4m3fn_fast also multiplies in fp8, on cards that can.",
                ),
                make(
                    io.Combo.Input,
                    "clip_name1",
                    options=["auto", "none", *found.text_encoders],
                    default="auto",
                    advanced=True,
                    tooltip="Text encoder. auto: the model's own, or a umt5 file from models/text_encoders that fits; "
                    "none: use a core CLIPLoader.",
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
                    tooltip="VAE. auto: the model's own, or a file from models/vae that fits; none: no vae output.",
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
        choice = Choice(unet_name, unet_name_low, weight_dtype, clip_name1, clip_name2, vae_name)
        return catalog.complaint(Catalog.read(folder_paths), choice, devices) or True

    @classmethod
    def fingerprint_inputs(
        cls, unet_name: str, unet_name_low: str = "none", **rest: str
    ) -> tuple[tuple[str, int, int], ...]:
        """Changes when a file of the model does."""
        return catalog.fingerprint(Catalog.read(folder_paths), Choice(unet_name, unet_name_low))

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
        """Reads headers and JSON files."""
        found = Catalog.read(folder_paths)
        choice = Choice(unet_name, unet_name_low, weight_dtype, clip_name1, clip_name2, vae_name)
        with naming(NAME):
            catalog.check_loader(found, choice, devices)
            model = PoolModel(pools, devices, found.load(choice))
        clip = None if model.files.text is None else PoolClip(model, model.files.text)
        vae = None if model.files.vae is None else PoolVAE(model, model.files.vae)
        return io.NodeOutput(model, clip, vae)
