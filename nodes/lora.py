"""PipeDiT LoRA: a model with a LoRA more. Nothing is loaded; the pool's resident weights take it up when they run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import folder_paths
import torch
from comfy_api.latest import io

from comfyui_pipedit import loaders
from comfyui_pipedit.errors import InvalidJob, LoadError, not_one_of
from comfyui_pipedit.job import Expert, ModelFiles
from comfyui_pipedit.loaders import precision
from comfyui_pipedit.loaders.lora import LoraReport, fit, read_lora

from . import catalog
from .compat import make
from .handles import PoolModel
from .loader import CATEGORY, Model
from .waiting import naming

NAME = "PipeDiT LoRA"
EXPERTS = ("both", "high", "low")

log = logging.getLogger("pipedit")


class PipeDiTLoRA(io.ComfyNode):
    """Adds a LoRA to a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="PipeDiTLoRA",
            display_name=NAME,
            category=CATEGORY,
            description="Adds a LoRA to a model of the pool. LoRAs are a state of the resident weights: with and "
            "without, or at another strength, nothing is loaded again. Nodes can be chained.",
            search_aliases=["lora loader", "lightx2v", "wan lora"],
            inputs=[
                Model.Input("model", tooltip="From PipeDiT Loader, or from another PipeDiT LoRA."),
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="A LoRA for Wan, from models/loras.",
                ),
                io.Float.Input(
                    "strength_model",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How much of it. 0 is without.",
                ),
                io.Combo.Input(
                    "expert",
                    options=list(EXPERTS),
                    default="both",
                    tooltip="Which model takes it, where the Loader names two (Wan 2.2 A14B): both, high or low noise.",
                ),
            ],
            outputs=[Model.Output("adapted", display_name="model", tooltip="The model with this LoRA.")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **rest: object) -> tuple[tuple[str, int, int], ...]:
        """Changes when the file does."""
        path = folder_paths.get_full_path("loras", lora_name)
        return () if path is None else tuple(catalog.files_of(Path(path)))

    @classmethod
    def execute(cls, model: PoolModel, lora_name: str, strength_model: float, expert: str) -> io.NodeOutput:
        """Reads the file's header and says what of it takes effect, in the log and on the node."""
        with naming(NAME):
            adapted, reports = with_lora(model.files, lora_path(lora_name), strength_model, expert)
        for text in dict.fromkeys(report.text for report in reports):
            log.info("%s: %s", NAME, text)
        shown = [{"report": report.text, "complete": report.complete} for report in reports]
        return io.NodeOutput(replace(model, files=adapted), ui={"pipedit": shown})


def lora_path(name: str) -> Path:
    """The file of a name in ComfyUI's list. InvalidJob for others, LoadError for a link that leads nowhere."""
    names = folder_paths.get_filename_list("loras")
    if name not in names:
        raise not_one_of("lora_name", name, names)
    path = folder_paths.get_full_path("loras", name)
    if path is None:
        raise LoadError(f"lora_name {name!r} is a link to a file that is gone; download it again, or choose another")
    return Path(path)


def with_lora(files: ModelFiles, path: Path, strength: float, expert: str) -> tuple[ModelFiles, Sequence[LoraReport]]:
    """A model with a LoRA at the end of its chains, and what takes effect on each of its experts.

    InvalidJob for an expert that the model has not, and for a file with parts that are not supported; LoadError for a
    file without effect or of another size.
    """
    if expert != "both" and files.transformer_low is None:
        raise InvalidJob(f"expert {expert!r}: {files.name} is one model; choose 'both', or set unet_name_low in the "
                         "Loader")
    if expert not in EXPERTS:
        raise not_one_of("expert", expert, EXPERTS)
    lora = read_lora(path)
    use = lora.use(strength)
    wanted = {"both": files.experts, "high": files.experts[:1], "low": files.experts[1:]}[expert]
    reports = [fit(lora, *shapes(one)) for one in wanted]
    for report in reports:
        if report.unsupported:
            raise InvalidJob(f"{report.text}; a part of it alone would give another picture, so none is used")
    high = (use,) if expert != "low" else ()
    low = (use,) if expert != "high" and files.transformer_low is not None else ()
    return replace(files, loras=(*files.loras, *high), loras_low=(*files.loras_low, *low)), reports


def shapes(expert: Expert) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """(name -> shape of an expert's weights, the names of those that are held in fp8), from the file's header."""
    weights = expert.weights
    entries = loaders.open_weights(weights).entries
    rules = precision.rules(weights.family, weights.part, weights.dtype, torch.bfloat16)
    fp8 = {name for name, entry in entries.items() if rules.target(name, entry.dtype) in precision.FP8}
    return {name: entry.shape for name, entry in entries.items()}, fp8
