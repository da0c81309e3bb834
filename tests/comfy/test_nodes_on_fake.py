"""The nodes in real ComfyUI over a scripted engine: what is asked of the pool, and what becomes of its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from graphs import DECODE, Graph, change, clip_graph, node, without
from paper import NAME, SHIFT, WORDS, write_paper_model
from server import Client, ComfyServer, Outcome, Rejected

FAKE_PACK = Path(__file__).resolve().parent / "fake_pack"
MODEL = f"diffusers/{NAME}"
LIMIT = 20.0


@pytest.fixture(scope="module")
def fake_server(
    comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyServer]:
    base = tmp_path_factory.mktemp("fake")
    write_paper_model(base / "models")
    (base / "models" / "diffusion_models").mkdir(parents=True)
    (base / "models" / "diffusion_models" / "single.safetensors").write_bytes(b"")
    with ComfyServer.start(comfy_folder, base, packs=[repository, FAKE_PACK]) as server:
        yield server


@pytest.fixture
def fake(fake_server: ComfyServer) -> Iterator[Client]:
    with fake_server.client() as client:
        script(client)
        yield client


def script(client: Client, **settings: Any) -> None:
    client.request("/fake", settings)


def asked(client: Client, kind: str) -> list[dict[str, Any]]:
    return [request for request in client.get("/fake")["asked"] if request["kind"] == kind]


def await_asked(client: Client, kind: str, number: int = 1) -> list[dict[str, Any]]:
    """Waits until the engine was asked for so many."""
    end = time.monotonic() + LIMIT
    while len(found := asked(client, kind)) < number:
        assert time.monotonic() < end, f"no {kind} was asked for in {LIMIT} s: {client.get('/fake')}"
        time.sleep(0.02)
    return found


def await_cancelled(client: Client) -> list[str]:
    """What was cancelled, once anything is: ComfyUI says how a prompt ended before its other nodes have cleaned up."""
    end = time.monotonic() + LIMIT
    while not (found := client.get("/fake")["cancelled"]):
        assert time.monotonic() < end, f"nothing was cancelled in {LIMIT} s"
        time.sleep(0.02)
    return found


def paper(**changes: Any) -> Graph:
    """A graph whose cached results no other test has: its seed is new."""
    return clip_graph(model=MODEL, **{"seed": time.monotonic_ns(), **changes})


def run(client: Client, graph: Graph) -> Outcome:
    return client.run(graph, LIMIT)


def message(outcome: Outcome) -> str:
    assert outcome.status == "error"
    return str(outcome.error["exception_message"])


def refusal(client: Client, graph: Graph) -> str:
    with pytest.raises(Rejected) as caught:
        client.queue(graph)
    errors = [error for entry in caught.value.node_errors.values() for error in entry["errors"]]
    return " ".join(error["details"] for error in errors)


def test_one_clip(fake: Client) -> None:
    seed = time.monotonic_ns()
    outcome = run(fake, paper(seed=seed))
    assert outcome.status == "success"
    (clip,) = asked(fake, "clip")
    noise = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    assert clip["shape"] == [1, 16, 3, 8, 8] and clip["decode"] and clip["negative"] and clip["steps"] == 4
    (file,) = outcome.files("8")
    assert torch.equal(safetensors.torch.load(fake.view(**file))["latent_tensor"], noise)
    assert not asked(fake, "decode"), "the decode that the pool began must be taken over, not asked for again"
    assert len(outcome.files("7")) == 9


def test_times_and_plan_are_in_the_history(fake: Client) -> None:
    outcome = run(fake, paper())
    end = time.monotonic() + LIMIT
    while not (entry := fake.history(outcome.prompt_id)):
        assert time.monotonic() < end, "the prompt never came into the history"
    (account,) = entry["outputs"]["5"]["pipedit"]
    assert account["seconds"] == {"clip": 0.5} and account["devices"] == "cpu:3" and account["model"] == MODEL


def test_shift_is_the_models_own_unless_given(fake: Client) -> None:
    run(fake, paper())
    run(fake, paper(shift=8.0))
    own, given = (clip["sigma"] for clip in asked(fake, "clip"))
    assert own == pytest.approx(SHIFT * 0.75 / (1 + (SHIFT - 1) * 0.75), abs=1e-3)
    assert given == pytest.approx(8 * 0.75 / (1 + 7 * 0.75), abs=1e-3)


def test_cfg_1_does_not_evaluate_the_negative(fake: Client) -> None:
    assert run(fake, paper(cfg=1.0, negative="words that nobody knows")).status == "success"
    assert not asked(fake, "clip")[0]["negative"]
    assert "nobody" in message(run(fake, paper(cfg=1.5, negative="words that nobody knows")))


def test_missing_negative_is_named(fake: Client) -> None:
    text = message(run(fake, paper(negative=None)))
    assert text.startswith("Multi-GPU Sampler: negative is not connected and cfg is 5.0")
    assert run(fake, paper(negative=None, cfg=1.0)).status == "success"


def test_a_batch_is_one_job_a_clip_with_noise_drawn_whole(fake: Client) -> None:
    seed = time.monotonic_ns()
    graph = paper(seed=seed, batch=2)
    graph["9"] = node("FakeSource", text=["2", 0], what="two texts")
    outcome = run(fake, change(graph, "5", positive=["9", 0]))
    noise = torch.randn(2, 16, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    clips = asked(fake, "clip")
    assert [clip["noise"] for clip in clips] == pytest.approx([float(noise[0].sum()), float(noise[1].sum())])
    assert [clip["text"] for clip in clips] == [25.0, 26.0], "each clip its own text"
    assert len(outcome.files("7")) == 18 and not asked(fake, "decode")


def test_batch_index_chooses_the_noise_as_core_does(fake: Client) -> None:
    seed = time.monotonic_ns()
    graph = paper(seed=seed, batch=3)
    graph["9"] = node("LatentFromBatch", samples=["4", 0], batch_index=2, length=1)
    run(fake, change(graph, "5", latent_image=["9", 0]))
    generator = torch.Generator().manual_seed(seed)
    third = [torch.randn(1, 16, 3, 8, 8, generator=generator) for _ in range(3)][2]
    assert asked(fake, "clip")[0]["noise"] == pytest.approx(float(third.sum()))


def test_core_vae_nodes_work_on_our_vae(fake: Client) -> None:
    graph = without(paper(), "6")
    graph["6"] = node("VAEDecode", samples=["5", 0], vae=["1", 2])
    assert len(run(fake, graph).files("7")) == 9
    tiles = {"tile_size": 128, "overlap": 64, "temporal_size": 16, "temporal_overlap": 12}
    graph["6"] = node("VAEDecodeTiled", samples=["5", 0], vae=["1", 2], **tiles)
    assert len(run(fake, graph).files("7")) == 9
    graph["6"] = node("PipeDiTVAEDecode", samples=["5", 0], vae=["1", 2], **{**DECODE, **tiles, "tiling": "on"})
    assert len(run(fake, graph).files("7")) == 9
    whole, core, ours = (request["tiling"] for request in asked(fake, "decode"))
    assert whole is None
    assert core == ours == {"tile": 128, "overlap": 32, "temporal_tile": 16, "temporal_overlap": 4}


def test_core_vae_encode_works_on_our_vae(fake: Client) -> None:
    graph = change(without(paper(), "4"), "5", denoise=0.5)
    graph["9"] = node("EmptyImage", width=70, height=68, batch_size=7, color=0xFFFFFF)
    tiles = {"tile_size": 64, "overlap": 32, "temporal_size": 16, "temporal_overlap": 12}
    for kind, options in (("VAEEncode", {}), ("VAEEncodeTiled", tiles)):
        graph["4"] = node(kind, pixels=["9", 0], vae=["1", 2], **options)
        assert run(fake, graph).status == "success"
    assert [clip["shape"] for clip in asked(fake, "clip")] == [[1, 16, 2, 8, 8]] * 2
    whole, tiled = (request["tiling"] for request in asked(fake, "encode"))
    assert whole is None and tiled == {"tile": 64, "overlap": 32, "temporal_tile": 16, "temporal_overlap": 12}


def test_decode_begins_by_itself_only_if_the_graph_tells_how(fake: Client) -> None:
    two = paper() | {"9": node("PipeDiTLoader", **{**paper()["1"]["inputs"], "weight_dtype": "bf16"})}
    other_loader = change(two, "6", vae=["9", 2])
    linked_widget = change(paper(), "6", tile_size=["10", 0]) | {"10": node("PrimitiveInt", value=512)}
    for graph in (other_loader, linked_widget, without(paper(), "6", "7")):
        assert run(fake, graph).status == "success"
    assert [clip["decode"] for clip in asked(fake, "clip")] == [False, False, False]
    assert len(asked(fake, "decode")) == 2


def test_a_second_look_at_a_cached_latent_decodes_it_again(fake: Client) -> None:
    graph = paper()
    run(fake, graph)
    assert run(fake, change(graph, "6", tiling="on")).status == "success"
    assert len(asked(fake, "clip")) == 1 and [request["tiling"]["tile"] for request in asked(fake, "decode")] == [512]


def test_cancel_reaches_the_pool_and_the_next_prompt_runs(fake: Client) -> None:
    script(fake, hold=["clip"])
    prompt = fake.queue(paper())
    (clip,) = await_asked(fake, "clip")
    fake.interrupt()
    assert fake.wait(prompt, LIMIT).status == "interrupted"
    assert await_cancelled(fake) == [clip["id"]]
    script(fake)
    assert run(fake, paper()).status == "success"


def test_cancel_while_a_core_node_waits_for_the_text(fake: Client) -> None:
    script(fake, hold=["text"])
    prompt = fake.queue(paper(text="a blue square moving left"))
    (text,) = await_asked(fake, "text")
    fake.interrupt()
    assert fake.wait(prompt, LIMIT).status == "interrupted"
    assert await_cancelled(fake) == [text["id"]]


def test_cancel_of_a_decode_keeps_the_latent(fake: Client) -> None:
    script(fake, hold=["frames"])
    graph = paper()
    prompt = fake.queue(graph)
    (clip,) = await_asked(fake, "clip")
    fake.wait_event(lambda event: event["type"] == "executing" and event["data"]["node"] == "6", LIMIT)
    fake.interrupt()
    assert fake.wait(prompt, LIMIT).status == "interrupted"
    assert await_cancelled(fake) == [f"frames-of-{clip['id']}"]
    fake.request("/fake/release", {})
    assert run(fake, graph).status == "success"
    assert len(asked(fake, "clip")) == 1, "the Sampler's latent is still in ComfyUI's cache"


def test_an_error_of_one_branch_cancels_the_others(fake: Client) -> None:
    script(fake, hold=["clip"])
    graph = paper()
    graph["15"] = change(graph, "5", seed=1)["5"]
    graph["16"] = change(graph, "6", samples=["15", 0])["6"]
    graph["17"] = node("PreviewImage", images=["16", 0])
    prompt = fake.queue(graph)
    _, second = await_asked(fake, "clip", 2)
    fake.request("/fake/release", {"fail_first": "rank 0 was killed"})
    assert "rank 0 was killed" in message(fake.wait(prompt, LIMIT))
    assert await_cancelled(fake) == [second["id"]]


def test_branches_are_in_the_pool_together(fake: Client) -> None:
    script(fake, hold=["clip"])
    graph = paper()
    for i in range(1, 4):
        graph[f"5{i}"] = change(graph, "5", seed=i + time.monotonic_ns())["5"]
        graph[f"6{i}"] = change(graph, "6", samples=[f"5{i}", 0])["6"]
        graph[f"7{i}"] = node("PreviewImage", images=[f"6{i}", 0])
    prompt = fake.queue(graph)
    await_asked(fake, "clip", 4)
    fake.request("/fake/release", {})
    assert fake.wait(prompt, LIMIT).status == "success"


@pytest.mark.parametrize("what", ["clip", "frames"])
def test_the_pools_errors_keep_their_class_and_get_the_nodes_name(fake: Client, what: str) -> None:
    script(fake, fail={what: "rank 1 (gpu:1, pid 7) was killed"})
    outcome = run(fake, paper())
    name = "Multi-GPU Sampler" if what == "clip" else "Decoupled VAE Decode"
    assert what == "frames" or message(outcome).startswith(f"{name}: rank 1 (gpu:1, pid 7) was killed")
    if what == "clip":
        assert outcome.error["exception_type"] == "comfyui_pipedit.errors.WorkerDied"
        assert any("sampler.py" in line for line in outcome.error["traceback"])
    else:
        assert outcome.status == "success" and len(asked(fake, "decode")) == 1, "a lost decode is asked for again"


def test_a_latent_that_cannot_be_decoded_is_written(fake: Client) -> None:
    script(fake, fail={"frames": "rank 2 was killed", "decode": "rank 2 was killed"})
    seed = time.monotonic_ns()
    text = message(run(fake, without(paper(seed=seed), "8")))
    assert text.startswith("Decoupled VAE Decode: rank 2 was killed")
    kept = safetensors.torch.load_file(text.split("The latent is in ")[1].split(";")[0])
    assert kept.keys() == {"latent_tensor", "latent_format_version_0"}
    assert torch.equal(
        kept["latent_tensor"], torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    )


def test_a_latent_that_cannot_be_written_either_leaves_the_pools_error(fake: Client) -> None:
    script(fake, fail={"frames": "rank 2 was killed", "decode": "rank 2 was killed"})
    graph = without(paper(), "8")
    folder = Path(message(run(fake, graph)).split("The latent is in ")[1].split(";")[0]).parent
    away = folder.rename(folder.with_name("away"))
    folder.write_text("a file in the folder's place")
    try:
        text = message(run(fake, graph))
    finally:
        folder.unlink()
        away.rename(folder)
    assert text.startswith("Decoupled VAE Decode: rank 2 was killed") and "The latent could not be written to" in text


def test_an_engine_that_ended_is_replaced(fake: Client) -> None:
    script(fake, closed=1)
    assert run(fake, paper()).status == "success"
    script(fake, closed=2)
    assert "could not start" in message(run(fake, paper(text="a blue circle")))


@pytest.mark.parametrize(
    ("widgets", "parts"),
    [
        ({"unet_name": "diffusers/papre"}, ["unet_name 'diffusers/papre'", f"nearest: '{MODEL}'"]),
        ({"unet_name_low": "demmo"}, ["unet_name_low 'demmo'", "nearest: 'demo'"]),
        ({"weight_dtype": "fp17"}, ["weight_dtype 'fp17'", "nearest: 'fp16'"]),
        ({"clip_name2": "auto"}, ["clip_name2 'auto'", "later version"]),
        ({"vae_name": "x.safetensors"}, ["vae_name 'x.safetensors'"]),
        ({"devices": "gpu:0,gpu:1"}, ["gpu:0, gpu:1 not found", "cpu:N"]),
        ({"devices": "two"}, ["devices 'two'", "nearest: 'auto'"]),
    ],
)
def test_loader_refuses_by_name(fake: Client, widgets: dict[str, str], parts: list[str]) -> None:
    text = refusal(fake, change(paper(), "1", **widgets))
    assert all(part in text for part in parts), text


def test_a_file_that_is_no_model_is_named(fake: Client) -> None:
    text = message(run(fake, change(paper(), "1", unet_name="single.safetensors")))
    assert text.startswith("PipeDiT Loader: ") and "single.safetensors is not a safetensors file" in text


@pytest.mark.parametrize(
    ("widgets", "parts"),
    [
        ({"sampler_name": "eulre"}, ["sampler_name 'eulre'", "dpmpp_sde", "nearest: 'euler'"]),
        ({"scheduler": "carras"}, ["scheduler 'carras'", "simple", "nearest: 'karras'"]),
    ],
)
def test_sampler_refuses_by_name(fake: Client, widgets: dict[str, Any], parts: list[str]) -> None:
    text = refusal(fake, change(paper(), "5", **widgets))
    assert all(part in text for part in parts), text


def test_a_switch_step_needs_two_experts(fake: Client) -> None:
    text = message(run(fake, paper(switch_step=3)))
    assert text.startswith("Multi-GPU Sampler: switch_step 3 is for a model with two experts") and "use -1" in text


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("control", ["positive carries control,"]),
        ("wide", ["[1, 16, 4096]", "[1, length, 64]"]),
        ("mask", ["noise_mask is [8]"]),
    ],
)
def test_inputs_that_are_not_supported_are_named(fake: Client, what: str, parts: list[str]) -> None:
    graph = paper() | {"9": node("FakeSource", text=["2", 0], latent=["4", 0], what=what)}
    text = message(run(fake, change(graph, "5", positive=["9", 0], latent_image=["9", 1])))
    assert text.startswith("Multi-GPU Sampler: ") and all(part in text for part in parts), text


def test_latents_of_another_kind_are_named(fake: Client) -> None:
    flat = change(without(paper(), "4"), "5") | {"4": node("EmptyLatentImage", width=64, height=64, batch_size=1)}
    assert "4 dimensions" in message(run(fake, flat))
    mochi = without(paper(), "4") | {"4": node("EmptyMochiLatentVideo", width=64, height=64, length=7, batch_size=1)}
    assert "12 channels" in message(run(fake, mochi))
    one_step = message(run(fake, paper(sampler_name="uni_pc", steps=1)))
    assert "uni_pc needs 2 steps" in one_step


def test_unknown_words_are_refused_where_the_text_is(fake: Client) -> None:
    outcome = run(fake, paper(text="a red dragon moving left"))
    assert outcome.error["node_type"] == "CLIPTextEncode"
    assert all(word in message(outcome) for word in ("dragon", *WORDS))
    assert "dragon" in message(run(fake, paper(text="a (dragon:1.3) circle")))


def test_a_missing_attribute_says_where_it_lives(fake: Client) -> None:
    graph = paper() | {"9": node("CLIPSetLastLayer", clip=["1", 1], stop_at_clip_layer=-2)}
    text = message(run(fake, change(graph, "2", clip=["9", 0])))
    assert "clip_layer lives in the PipeDiT pool; connect a core CLIPLoader here" in text


def test_no_vae_is_named(fake: Client) -> None:
    graph = change(paper(), "1", vae_name="none")
    assert "vae_name is none; choose auto" in message(run(fake, graph))


def test_denoise_0_gives_the_latent_back(fake: Client) -> None:
    outcome = run(fake, paper(denoise=0.0))
    (file,) = outcome.files("8")
    assert not torch.count_nonzero(safetensors.torch.load(fake.view(**file))["latent_tensor"])
    assert not asked(fake, "clip")


def test_progress_shows_on_the_sampler(fake: Client) -> None:
    outcome = run(fake, paper())
    steps = [event["data"] for event in outcome.events if event["type"] == "progress" and event["data"]["node"] == "5"]
    assert steps[-1]["value"] == steps[-1]["max"] == 4


def test_free_unloads_idle_pools(fake: Client) -> None:
    run(fake, paper())
    fake.request("/free", {})
    assert fake.get("/fake")["freed"] == 0
    fake.request("/free", {"unload_models": True})
    fake.request("/api/free", {"free_memory": True})
    assert fake.get("/fake")["freed"] == 2


def test_routes(fake: Client) -> None:
    run(fake, paper())
    assert fake.get("/pipedit/status") == {
        "cpu:0,cpu:1,cpu:2": {"state": "fake", "asked": len(fake.get("/fake")["asked"])}
    }
    spans = fake.get("/api/pipedit/spans")
    assert [span["name"] for span in spans] == ["denoise", "decode"]
    assert fake.get("/pipedit/spans?since=2.5") == [{"rank": 1, "name": "decode", "job": "b", "start": 3.0, "end": 4.0}]


def test_loader_lists(fake: Client) -> None:
    required = fake.object_info("PipeDiTLoader")["input"]["required"]
    names = required["unet_name"][1]["options"]
    assert names[0] == "demo" and MODEL in names and names[-1] == "single.safetensors"
    assert required["unet_name_low"][1]["options"] == ["none", *names]
    assert json.dumps(required["devices"][1]["default"]) == '"auto"'
