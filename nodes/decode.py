"""Decoupled VAE Decode: takes over the decode that the pool began, or has it done now."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io
from safetensors import SafetensorError
from safetensors.torch import save_file

from comfyui_pipedit.errors import Cancelled, InvalidJob, OutOfMemory, PipeDiTError, not_one_of
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Tiling

from . import convert, waiting
from .compat import make
from .handles import PoolVAE
from .inputs import UNLINKED, refuse_plan
from .loader import CATEGORY, Plan

NAME = "Decoupled VAE Decode"
MODES = ("auto", "off", "on")

log = logging.getLogger("pipedit")


def refuse_later(tiling: str | None, plan: Any) -> None:
    """InvalidJob for an unknown mode and for a connected plan. None = not known yet."""
    if tiling is not None and tiling not in MODES:
        raise not_one_of("tiling", tiling, MODES)
    refuse_plan(plan)


class PipeDiTVAEDecode(io.ComfyNode):
    """Decodes on the pool's decode ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="PipeDiTVAEDecode",
            display_name=NAME,
            category=CATEGORY,
            description="VAE Decode on the pool's decode ranks, while others denoise the next clip. Linked straight to "
            "a Multi-GPU Sampler with the same Loader's vae, it begins by itself after the last step.",
            search_aliases=["vae decode", "multi gpu decode", "parallel vae", "dedivae"],
            inputs=[
                io.Latent.Input(
                    "samples", tooltip="A latent of the Loader's model; each clip of a batch is decoded in order."
                ),
                io.Vae.Input("vae", tooltip="From PipeDiT Loader. For any other VAE use core VAE Decode."),
                Plan.Input("plan", optional=True, tooltip="How the pool is divided. Comes in a later version."),
                io.Combo.Input(
                    "tiling",
                    options=list(MODES),
                    default="auto",
                    tooltip="off: whole frames, a few at a time. on: in tiles, as VAE Decode (Tiled) "
                    "does it. auto: whole frames, in tiles where memory is too small.",
                ),
                make(
                    io.Int.Input,
                    "tile_size",
                    default=512,
                    min=64,
                    max=4096,
                    step=32,
                    advanced=True,
                    tooltip="Pixels of a tile.",
                ),
                make(
                    io.Int.Input,
                    "overlap",
                    default=64,
                    min=0,
                    max=4096,
                    step=32,
                    advanced=True,
                    tooltip="Pixels that tiles share.",
                ),
                make(
                    io.Int.Input,
                    "temporal_size",
                    default=64,
                    min=8,
                    max=4096,
                    step=4,
                    advanced=True,
                    tooltip="Frames of a tile.",
                ),
                make(
                    io.Int.Input,
                    "temporal_overlap",
                    default=8,
                    min=4,
                    max=4096,
                    step=4,
                    advanced=True,
                    tooltip="Frames that tiles share.",
                ),
            ],
            outputs=[
                io.Image.Output("image", display_name="IMAGE", tooltip="Frames of all clips of the batch, in order.")
            ],
        )

    @classmethod
    def validate_inputs(cls, tiling: str, plan: Any = UNLINKED) -> bool | str:
        """True, or which value this version does not take."""
        try:
            refuse_later(tiling, plan)
        except InvalidJob as error:
            return str(error)
        return True

    @classmethod
    async def execute(
        cls,
        samples: convert.Latent,
        vae: PoolVAE,
        tiling: str,
        tile_size: int,
        overlap: int,
        temporal_size: int,
        temporal_overlap: int,
        plan: Any = UNLINKED,
    ) -> io.NodeOutput:
        """IMAGE float32 [B * F, H, W, 3]."""
        with waiting.naming(NAME):
            refuse_later(tiling, plan)
            check_vae(vae)
            sizes = (vae.geometry, tile_size, overlap, temporal_size, temporal_overlap)
            latent = samples["samples"]
            with keeping(latent):
                try:
                    tickets = await decoded(vae, latent, convert.tiling(tiling, *sizes))
                except OutOfMemory as error:
                    if tiling != "auto":
                        raise
                    log.warning("%s: %s; decoding again, in tiles", NAME, error)
                    tickets = await decoded(vae, latent, convert.tiling("on", *sizes))
        return io.NodeOutput(convert.image_output([ticket.result() for ticket in tickets]))


@contextlib.contextmanager
def keeping(latent: Any) -> Iterator[None]:
    """Writes a latent that the pool could not decode to ComfyUI's temp folder and puts the path into the error."""
    try:
        yield
    except (InvalidJob, Cancelled):
        raise
    except PipeDiTError as error:
        error.args = (f"{error}\n{written(latent)}",)
        raise


def written(latent: Any) -> str:
    """Writes a latent to ComfyUI's temp folder and says where it is, or why it could not be written."""
    path = Path(folder_paths.get_temp_directory()) / f"pipedit_undecoded_{uuid.uuid4().hex[:8]}.latent"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(convert.latent_file(latent), path)
    except (OSError, SafetensorError) as error:
        return f"The latent could not be written to {path} ({error}); queue again: it is still in ComfyUI's cache."
    return f"The latent is in {path}; copy it to ComfyUI's input folder for Load Latent."


def check_vae(vae: Any) -> None:
    """InvalidJob for a VAE that is not in the pool."""
    if vae is None:
        raise InvalidJob(
            "vae is empty: the Loader's vae_name is none; choose auto, or use core VAE Decode with a VAELoader"
        )
    if not isinstance(vae, PoolVAE):
        raise InvalidJob(
            f"vae is a {type(vae).__name__} in ComfyUI's own process, out of the pool's reach; connect the Loader's "
            "vae, or use core VAE Decode"
        )


async def decoded(vae: PoolVAE, latent: Any, tiling: Tiling | None) -> tuple[Ticket, ...]:
    """The ended tickets of a latent's decodes."""
    tickets = vae.begin_decode(latent, tiling)
    await waiting.follow(tickets, waiting.Reporter(tickets))
    return tickets
