"""The whole way in real ComfyUI: a graph goes in over POST /prompt, the pool's processes make the clip."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import safetensors.torch
import torch
from graphs import Graph, change, clip_graph, node, without
from server import Client, ComfyServer, Outcome

from comfyui_pipedit.job import Span
from comfyui_pipedit.timeline import clip_of, clips_in, is_decode, overlaps

LIMIT = 120.0
MODEL = "diffusers/tiny"
TEXT = "a red circle moving right"


@pytest.fixture(scope="module")
def pool_server(
    comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyServer]:
    base = tmp_path_factory.mktemp("pool")
    (base / "models" / "diffusers").mkdir(parents=True)
    sys.path.append(str(repository / "tests"))
    import tiny_wan

    tiny_wan.use_worker_site()
    tiny_wan.write_model(base / "models" / "diffusers" / "tiny")
    with ComfyServer.start(comfy_folder, base, packs=[repository]) as server:
        yield server


@pytest.fixture
def served(pool_server: ComfyServer) -> Iterator[Client]:
    with pool_server.client() as client:
        yield client


def tiny(**changes: Any) -> Graph:
    return clip_graph(**{"model": MODEL, "text": TEXT, **changes})


def run(client: Client, graph: Graph) -> Outcome:
    outcome = client.run(graph, LIMIT)
    assert outcome.status == "success", f"{outcome.error.get('node_type')}: {outcome.error.get('exception_message')}"
    return outcome


def latent(client: Client, outcome: Outcome, name: str = "8") -> torch.Tensor:
    (file,) = outcome.files(name)
    return safetensors.torch.load(client.view(**file))["latent_tensor"]


def frames(client: Client, outcome: Outcome, name: str = "7") -> torch.Tensor:
    """[F, H, W, 3] of 8-bit frames that PreviewImage saved."""
    images = [PIL.Image.open(io.BytesIO(client.view(**file))).convert("RGB") for file in outcome.files(name)]
    return torch.stack(
        [
            torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
            for image in images
        ]
    )


def test_a_clip(served: Client) -> None:
    outcome = run(served, tiny(seed=1))
    assert latent(served, outcome).shape == (1, 16, 3, 8, 8)
    clip = frames(served, outcome)
    assert clip.shape == (9, 64, 64, 3) and clip.float().std() > 5, "not one grey picture"


def cleared(client: Client, graph: Graph) -> Graph:
    """The graph, after a prompt that pushed its results out of ComfyUI's cache."""
    run(client, change(graph, "5", seed=time.monotonic_ns(), steps=2))
    return graph


def test_the_same_seed_twice_gives_the_same_bits(served: Client) -> None:
    graph = tiny(seed=2)
    first = run(served, graph)
    again = run(served, cleared(served, graph))
    assert torch.equal(latent(served, first), latent(served, again))
    assert torch.equal(frames(served, first), frames(served, again))
    assert not torch.equal(latent(served, first), latent(served, run(served, change(graph, "5", seed=3))))


def test_core_decode_nodes_give_the_same_frames(served: Client) -> None:
    graph = tiny(seed=2)
    ours = frames(served, run(served, graph))
    core = change(graph, "6") | {"6": node("VAEDecode", samples=["5", 0], vae=["1", 2])}
    assert torch.equal(frames(served, run(served, core)), ours)
    sizes = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
    graph = change(graph, "4", width=96, height=96)
    tiled = graph | {"6": node("VAEDecodeTiled", samples=["5", 0], vae=["1", 2], **sizes)}
    on = change(graph, "6", tiling="on", **sizes)
    found = frames(served, run(served, tiled))
    assert torch.equal(frames(served, run(served, on)), found)
    assert not torch.equal(frames(served, run(served, graph)), found), "tiles must be seen"


def test_a_batch_gives_the_clips_of_its_members(served: Client) -> None:
    graph = tiny(seed=4, batch=2)
    both = run(served, graph)
    latents, clips = latent(served, both), frames(served, both)
    assert latents.shape[0] == 2 and clips.shape[0] == 18
    for index in range(2):
        pick = node("LatentFromBatch", samples=["4", 0], batch_index=index, length=1)
        one = run(served, change(graph, "5", latent_image=["9", 0]) | {"9": pick})
        assert torch.equal(latent(served, one)[0], latents[index])
        assert torch.equal(frames(served, one), clips[9 * index : 9 * index + 9])


@pytest.mark.parametrize("cfg", [1.0, 5.0])
def test_an_empty_negative_works(served: Client, cfg: float) -> None:
    empty = latent(served, run(served, tiny(seed=5, cfg=cfg, negative="")))
    other = latent(served, run(served, tiny(seed=5, cfg=cfg, negative="a blue square")))
    assert torch.equal(empty, other) == (cfg == 1.0)


def test_odd_sizes_come_out_as_asked(served: Client) -> None:
    outcome = run(served, tiny(seed=6, width=72, height=56))
    assert latent(served, outcome).shape == (1, 16, 3, 7, 9)
    assert frames(served, outcome).shape == (9, 56, 72, 3)


def test_a_second_sampler_goes_on_from_the_first(served: Client) -> None:
    graph = tiny(seed=7)
    graph["15"] = change(graph, "5", latent_image=["5", 0], denoise=0.5, seed=8)["5"]
    outcome = run(served, change(graph, "6", samples=["15", 0]))
    assert frames(served, outcome).shape == (9, 64, 64, 3)


def test_four_branches_overlap_in_the_pool(served: Client) -> None:
    graph = without(tiny(seed=20, steps=8, width=96, height=96, length=17), "8")
    for i in range(1, 4):
        graph[f"5{i}"] = change(graph, "5", seed=20 + i)["5"]
        graph[f"6{i}"] = change(graph, "6", samples=[f"5{i}", 0])["6"]
        graph[f"7{i}"] = node("PreviewImage", images=[f"6{i}", 0])
    since = time.monotonic()
    run(served, graph)
    spans = [Span(**span) for span in served.get(f"/pipedit/spans?since={since}")]
    clips = clips_in(spans)
    assert len(clips) == 4 and {clip_of(span) for span in spans if is_decode(span)} == set(clips)
    assert overlaps(spans), "no clip was decoded while another was denoised"


@pytest.mark.parametrize("phase", ["first step", "later step", "decode"])
def test_cancel_then_the_same_seed_gives_the_same_clip(served: Client, phase: str) -> None:
    graph = tiny(seed=30)
    reference = run(served, graph)
    long = tiny(seed=31, steps=2, length=81, width=128, height=128) if phase == "decode" else tiny(seed=31, steps=400)
    prompt = served.queue(long)
    if phase == "decode":
        served.wait_event(lambda event: is_running(event, prompt, "6"), LIMIT)
    else:
        steps = 1 if phase == "first step" else 5
        served.wait_event(lambda event: is_at(event, prompt, "5", steps), LIMIT)
    served.interrupt()
    assert served.wait(prompt, 20.0).status == "interrupted"
    after = run(served, graph)
    assert torch.equal(latent(served, after), latent(served, reference))
    assert torch.equal(frames(served, after), frames(served, reference))


def is_running(event: dict[str, Any], prompt: str, name: str) -> bool:
    return event["type"] == "executing" and event["data"]["prompt_id"] == prompt and event["data"]["node"] == name


def is_at(event: dict[str, Any], prompt: str, name: str, steps: int) -> bool:
    data = event["data"]
    return (
        event["type"] == "progress" and data["prompt_id"] == prompt and data["node"] == name and data["value"] >= steps
    )


def test_free_unloads_the_weights_and_the_next_prompt_loads_them_again(served: Client) -> None:
    run(served, tiny(seed=40))
    (pool,) = served.get("/pipedit/status").values()
    assert pool["resident"]
    served.request("/free", {"unload_models": True})
    end = time.monotonic() + 20
    while (pool := next(iter(served.get("/pipedit/status").values())))["resident"]:
        assert time.monotonic() < end, f"still resident: {pool['resident']}"
        time.sleep(0.05)
    run(served, tiny(seed=41))


def test_times_of_the_stages_are_in_the_ui_output(served: Client) -> None:
    (account,) = run(served, tiny(seed=42)).outputs["5"]["pipedit"]
    assert account["seconds"]["denoise"] > 0 and "ranks 0, 1 denoise together" in account["plan"]


def test_a_lora_with_parts_that_are_not_supported(pool_server: ComfyServer, served: Client) -> None:
    import lora_files

    from comfyui_pipedit import loaders

    tiny_model = loaders.inspect(pool_server.base / "models" / "diffusers" / "tiny")
    shapes = {name: entry.shape for name, entry in loaders.open_weights(tiny_model.transformer).entries.items()}
    tensors = lora_files.state("comfy", shapes)
    folder = pool_server.base / "models" / "loras"
    lora_files.write(folder / "whole.safetensors", tensors)
    stem = "diffusion_model.blocks.0.self_attn.q"
    lora_files.write(folder / "part.safetensors", {**tensors, f"{stem}.dora_scale": torch.ones(64, 1)})

    def graph(name: str) -> Graph:
        adapted = node("PipeDiTLoRA", model=["1", 0], lora_name=name, strength_model=1.0, expert="both")
        return change(tiny(steps=1, cfg=1.0), "5", model=["9", 0]) | {"9": adapted}

    run(served, graph("whole.safetensors"))
    refused = served.run(graph("part.safetensors"), LIMIT)
    assert refused.error["node_type"] == "PipeDiTLoRA"
    assert "1 use DoRA, which is not supported" in refused.error["exception_message"]


def test_a_broken_model_folder(pool_server: ComfyServer, served: Client) -> None:
    broken = pool_server.base / "models" / "diffusers" / "broken"
    (broken / "transformer").mkdir(parents=True)
    (broken / "model_index.json").write_text((broken.parent / "tiny" / "model_index.json").read_text())
    outcome = served.run(tiny(model="diffusers/broken"), LIMIT)
    assert outcome.error["node_type"] == "PipeDiTLoader"
    assert outcome.error["exception_message"].startswith("PipeDiT Loader: ")
    assert "transformer/config.json" in outcome.error["exception_message"]
