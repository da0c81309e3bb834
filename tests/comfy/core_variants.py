"""Core KSampler against our worker on Wan's variants with the same weights: python core_variants.py COMFY OUT SITE.

Writes OUT/core.safetensors, OUT/ours.safetensors and OUT/without.safetensors: the finished latent of each case, VAE
space, by the case's name. "without" is ours with nothing but the text. Core runs nodes.common_ksampler; ours goes the
way of a job: nodes/convert.py, the message that opens a clip, worker/denoise.py.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from core_grid import noise_offset
from inprocess import ROOT, enter, load
from reference import randomise
from variants import CONFIGS, Case, all_cases

if TYPE_CHECKING:
    from torch import Tensor, nn

SEED = 7


def draw(seed: int, *shape: int) -> Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- what goes in ---------------------------------------------------------------------------------------------------


def conditioning(case: Case, seed: int) -> list[list[Any]]:
    """CONDITIONING with what the case says, the same for core and for us."""
    extra: dict[str, Any] = {"pooled_output": None}
    if case.images:
        states = draw(21, 1, 257 * case.images, 1280)
        extra["clip_vision_output"] = SimpleNamespace(penultimate_hidden_states=states)
    if case.concat:
        extra["concat_latent_image"] = draw(22, *case.concat)
    if case.concat_mask:
        extra["concat_mask"] = (draw(23, *case.concat_mask) > 0).float()
    if case.index:
        extra["concat_mask_index"] = case.index
    if case.guides:
        size = case.shape[2:]
        extra["vace_frames"] = [draw(24 + i, 1, 32, *size) for i in range(len(case.guides))]
        extra["vace_mask"] = [(draw(34 + i, 1, 64, *size) > 0).float() for i in range(len(case.guides))]
        extra["vace_strength"] = list(case.guides)
    return [[draw(seed, 1, case.text, 4096), extra]]


def latent(case: Case) -> dict[str, Any]:
    """LATENT: empty, or of order 1 where a mask keeps some of it."""
    import torch

    if not case.mask:
        return {"samples": torch.zeros(case.shape)}
    mask = torch.rand(case.mask, generator=torch.Generator().manual_seed(4))
    if case.binary:
        mask = mask.round()
        mask[:, :, :1] = 0.0
    return {"samples": draw(3, *case.shape), "noise_mask": mask}


# -- the two sides --------------------------------------------------------------------------------------------------


def make_network(variant: str) -> nn.Module:
    """ComfyUI's network with random weights."""
    import comfy.ldm.wan.model as wan
    import comfy.ops
    import torch

    config = CONFIGS[variant]
    kind = wan.VaceWanModel if "vace_layers" in config else wan.WanModel
    model = kind(text_dim=4096, freq_dim=256, eps=1e-6, operations=comfy.ops.disable_weight_init, device="cpu",
                 dtype=torch.float32, **config)
    randomise(model, gain=1.0)
    return model


class Source:
    """ComfyUI's weights as a family wants them (models.family.WeightSource)."""

    root = Path("random")

    def __init__(self, variant: str, state: dict[str, Tensor]) -> None:
        import torch

        config = CONFIGS[variant]
        heads, image = config["num_heads"], config["model_type"] == "i2v"
        self.device, self.state = torch.device("cpu"), state
        self.config: dict[str, Any] = {
            "patch_size": (1, 2, 2), "num_attention_heads": heads, "attention_head_dim": config["dim"] // heads,
            "in_channels": config["in_dim"], "out_channels": config["out_dim"], "text_dim": 4096, "freq_dim": 256,
            "ffn_dim": config["ffn_dim"], "num_layers": config["num_layers"], "eps": 1e-6, "rope_max_seq_len": 64,
            "image_dim": 1280 if image else None, "added_kv_proj_dim": config["dim"] if image else None,
            "pos_embed_seq_len": config.get("flf_pos_embed_token_number")}
        if "vace_layers" in config:
            step = config["num_layers"] // config["vace_layers"]
            self.config |= {"vace_layers": list(range(0, config["num_layers"], step)), "vace_in_channels": 96}

    def tensors(self) -> Any:
        from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

        state = convert_wan_transformer_to_diffusers(dict(self.state))
        if "img_emb.emb_pos" in state:
            state["condition_embedder.image_embedder.pos_embed"] = state.pop("img_emb.emb_pos")
        return state.items()


def by_core(model: Any, case: Case) -> Tensor:
    """The latent of core KSampler."""
    import nodes

    (out,) = nodes.common_ksampler(model, SEED, case.steps, case.cfg, case.sampler, "simple", conditioning(case, 1),
                                   conditioning(case, 2), latent(case))
    samples: Tensor = out["samples"]
    return samples


def by_us(network: nn.Module, files: Any, case: Case, plain: bool) -> Tensor:
    """The latent of our worker; plain: without mask and extras."""
    import torch
    from pipedit_nodes import convert

    from comfyui_pipedit import sampling

    given = latent(case)
    if plain:
        given.pop("noise_mask", None)
    levels = sampling.sigmas("simple", case.steps, shift=files.shift, sampler=case.sampler)
    settings = convert.Settings(SEED, case.cfg, case.sampler, levels, noise_offset=noise_offset())
    told = [conditioning(case, seed) for seed in (1, 2)]
    if plain:
        told = [[[entries[0][0], {}]] for entries in told]
    return torch.cat([denoised(network, job) for job in convert.jobs(files, *told, given, settings)])


def denoised(network: nn.Module, job: Any) -> Tensor:
    """A job's finished latent on one rank, without a pool."""
    from comfyui_pipedit.host.tasks import ClipTask
    from comfyui_pipedit.host.ticket import Ticket
    from comfyui_pipedit.parallel.sequence import Context
    from comfyui_pipedit.plan import Group, Plan
    from comfyui_pipedit.wire.buffer import KeptLatent
    from comfyui_pipedit.worker.denoise import Denoise
    from comfyui_pipedit.worker.device import Device

    kept = KeptLatent.create(tuple(job.latent.shape), job.table.num_state_tensors)
    task = ClipTask(Ticket("clip", lambda name: None), 1, job, Plan(Group((0,)), Group((0,))), kept)
    residency: Any = SimpleNamespace(check=lambda expert: network, take=lambda expert: network)
    clip = Denoise(task.open_message(1), task.fds.numbers, residency, Context(0, None), Device.parse("cpu:0"),
                   lambda text: None)
    clip.run(0, clip.units)
    finished: Tensor = task.finish()
    task.fds.close()
    kept.close()
    return finished


@functools.cache
def model_files(channels: int) -> Any:
    """What the host knows of a model with so many latent channels."""
    import comfy.latent_formats as formats

    from comfyui_pipedit.job import Geometry, ModelFiles, Weights

    space = formats.Wan22() if channels == 48 else formats.Wan21()
    mean, std = (tuple(values.flatten().tolist()) for values in (space.latents_mean, space.latents_std))
    geometry = Geometry(channels, 16 if channels == 48 else 8, 4, (1, 2, 2), 4096, 512, 2, mean, std)
    return ModelFiles("random", geometry, Weights("wan", "transformer", "/random"), shift=8.0)


def main() -> None:
    comfy, out, worker_site = map(Path, sys.argv[1:])
    enter(comfy)
    sys.path.append(str(worker_site))
    import comfy.sd
    import comfy.utils
    import torch
    from safetensors.torch import save_file

    comfy.utils.PROGRESS_BAR_ENABLED = False
    load("comfyui_pipedit", ROOT / "comfyui_pipedit" / "__init__.py")
    load("pipedit_nodes", ROOT / "nodes" / "__init__.py")
    from comfyui_pipedit import models

    results: dict[str, dict[str, Tensor]] = {"core": {}, "ours": {}, "without": {}}
    with torch.inference_mode():
        for variant in CONFIGS:
            state = {name: tensor.contiguous() for name, tensor in make_network(variant).state_dict().items()}
            patcher = comfy.sd.load_diffusion_model_state_dict(dict(state))
            network = models.family("wan").load_transformer(Source(variant, state))
            files = model_files(CONFIGS[variant]["out_dim"])
            for case in (case for case in all_cases() if case.variant == variant):
                results["core"][case.name] = by_core(patcher, case).clone().contiguous()
                for name, plain in (("ours", False), ("without", True)):
                    results[name][case.name] = by_us(network, files, case, plain).contiguous()
    for name, latents in results.items():
        save_file(latents, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
