"""Claims on scripted GPUs: what is made to fit and how, in which order, and what is refused before it begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scripted_gpus import GIB, Bench, Gpu, expect_real_sizes, weights

from comfyui_pipedit.errors import OutOfMemory, WorkerDied
from comfyui_pipedit.host.claims import _enough
from comfyui_pipedit.host.neighbour import Held, Neighbour, Request
from comfyui_pipedit.host.pool import FromRank, RankLost
from comfyui_pipedit.host.shortage import Need
from comfyui_pipedit.host.tasks import Task
from comfyui_pipedit.job import Tiling
from comfyui_pipedit.wire.messages import Lease, Load, Measure, Memory, Refused, Unload


@pytest.fixture(autouse=True)
def _real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_real_sizes(monkeypatch)


class ComfyUI:
    """Holds models on one scripted GPU, and frees them when the prompt's thread looks in."""

    def __init__(self, gpu: Gpu, num_gib: float) -> None:
        self.gpu, self.held, self.asked = gpu, num_gib, list[Request]()
        gpu.others += num_gib

    def give(self, request: Request) -> tuple[Held, ...]:
        self.asked.append(request)
        freed = min(self.held, max(0.0, request.free / GIB - self.gpu.free))
        self.held -= freed
        self.gpu.others -= freed
        return (Held("WAN21", int(self.held * GIB)),) if self.held else ()


def all_well(*tasks: Task) -> bool:
    return all(task.ticket.done() and not task.ticket.failed() for task in tasks)


def error_of(task: Task) -> str:
    with pytest.raises(OutOfMemory) as caught:
        task.ticket.result()
    return str(caught.value)


def test_what_is_short_is_weights_and_activations_less_what_is_there() -> None:
    memory = Memory(free=10, total=24, cached=3)
    assert Need(weights=14, missing=14, activations=4).short_of(memory) == 5
    assert Need(weights=14, missing=0, activations=4).short_of(memory) == -9


def test_no_more_is_unloaded_than_is_missing_the_longest_unused_first() -> None:
    idle = [(weights("text"), 6), (weights("vae"), 1), (weights("transformer"), 14)]
    assert _enough(idle, 0) == []
    assert _enough(idle, 6) == [weights("text")]
    assert _enough(idle, 7) == [weights("text"), weights("vae")]
    assert len(_enough(idle, 100)) == 3


def test_a_clip_that_fits_measures_once_and_unloads_nothing() -> None:
    bench = Bench(Gpu(), Gpu())
    clip = bench.clip(ranks=(0, 1))
    bench.run()
    assert clip.ticket.done() and not clip.ticket.failed()
    assert [rank for rank, _ in bench.sent(Measure)] == [0, 1] and bench.sent(Unload) == []
    assert not bench.scheduler.tasks


def test_every_rank_is_asked_before_any_loads() -> None:
    bench = Bench(Gpu(), Gpu())
    bench.clip(ranks=(0, 1))
    bench.run(lambda: bool(bench.sent(Load)))
    kinds = [type(message) for _, message in bench.pool.sent]
    assert kinds == [Measure, Measure, Load, Load]


def test_the_same_work_again_asks_nothing() -> None:
    bench = Bench(Gpu())
    for _ in range(3):
        bench.clip()
        bench.run()
    assert len(bench.sent(Measure)) == len(bench.sent(Load)) == 1


def test_what_nobody_needs_goes_first_the_longest_unused_first() -> None:
    bench = Bench(Gpu(total=24))
    bench.text()
    bench.decode()
    bench.run()
    clip = bench.clip()
    bench.run()
    assert bench.unloaded() == ["text"], "6 of 24 are enough, and the VAE stays"
    assert not clip.ticket.failed()


def test_what_is_queued_stays_while_others_can_give() -> None:
    neighbour = Neighbour()
    bench = Bench(Gpu(total=40), Gpu(total=40), neighbour=neighbour)
    comfy = ComfyUI(bench.pool.gpus[0], 10)
    bench.clip("b")
    bench.run()
    clip, queued = bench.clip("a"), bench.clip("b", ranks=(0, 1))
    bench.run()
    assert clip.state == "loading" and len(bench.sent(Load)) == 1, "it waits for the prompt's thread"
    neighbour.serve(comfy.give)
    assert bench.pool.woken == 1
    bench.run()
    assert clip.ticket.done() and queued.ticket.done() and bench.unloaded() == []
    (request,) = comfy.asked
    assert (request.device, request.who, request.missing) == ("gpu:0", "gpu:0,gpu:1", 3 * GIB)
    assert comfy.held == 10 - (1 + 10 + 2 * 14 + 4 - 40), "what was missing, and no more"


def test_nobody_is_asked_where_there_is_room() -> None:
    neighbour = Neighbour()
    bench = Bench(Gpu(total=24), neighbour=neighbour)
    comfy = ComfyUI(bench.pool.gpus[0], 4)
    clip = bench.clip()
    bench.run()
    neighbour.serve(comfy.give)
    assert clip.ticket.done() and comfy.asked == [] and comfy.held == 4


def test_a_text_under_the_node_says_what_it_waits_for() -> None:
    neighbour = Neighbour()
    bench = Bench(Gpu(total=24), neighbour=neighbour)
    ComfyUI(bench.pool.gpus[0], 8)
    clip = bench.clip()
    bench.run()
    assert clip.ticket.progress().text == "making room on gpu:0: 18.0 GiB are to be free"


def test_waiting_for_the_prompts_thread_is_not_a_stuck_rank() -> None:
    neighbour = Neighbour()
    bench = Bench(Gpu(total=24), neighbour=neighbour)
    ComfyUI(bench.pool.gpus[0], 8)
    clip = bench.clip()
    bench.run()
    clip.since -= 10_000
    bench.scheduler.check_deadlines()
    assert not clip.ticket.done()


def test_a_load_has_its_own_deadline_after_a_long_wait() -> None:
    neighbour = Neighbour()
    bench = Bench(Gpu(total=24), neighbour=neighbour)
    comfy = ComfyUI(bench.pool.gpus[0], 8)
    clip = bench.clip()
    bench.run()
    clip.since -= 10_000
    neighbour.serve(comfy.give)
    bench.run(lambda: bool(bench.sent(Load)))
    bench.scheduler.check_deadlines()
    assert not clip.ticket.done()


def test_a_cancelled_claim_asks_for_nothing_any_more() -> None:
    neighbour = Neighbour()
    bench = Bench(Gpu(total=24), neighbour=neighbour)
    comfy = ComfyUI(bench.pool.gpus[0], 8)
    clip = bench.clip()
    bench.run()
    bench.scheduler.cancel(clip.id)
    neighbour.serve(comfy.give)
    assert comfy.asked == [] and clip.ticket.failed()


def test_what_is_needed_later_goes_when_nobody_else_can_give() -> None:
    bench = Bench(Gpu(total=24))
    clips = [bench.clip("high", low="low"), bench.clip("high", low="low")]
    bench.run()
    assert all_well(*clips)
    assert bench.unloaded() == ["transformerhigh"], "both clips are through with it"
    again = bench.clip("high", low="low")
    bench.run()
    assert all_well(again) and bench.unloaded() == ["transformerhigh", "transformerlow", "transformerhigh"]


def test_a_decode_takes_the_place_of_the_clip_that_runs_at_a_boundary() -> None:
    bench = Bench(Gpu(total=20))
    clip = bench.clip(steps=12)
    decode = bench.decode()
    decode.ordinal = 0
    bench.scheduler.tasks.pop(decode.id)
    bench.run(lambda: clip.done == 1)
    bench.scheduler.add(decode)
    bench.run(decode.ticket.done)
    assert not clip.ticket.done() and bench.unloaded() == ["transformer"]
    bench.run()
    assert all_well(clip, decode)


def test_a_clip_waits_for_a_decode_that_gives_nothing_back_before_its_end() -> None:
    bench = Bench(Gpu(total=20))
    clip, decode = bench.clip(), bench.decode()
    bench.scheduler.tasks.pop(clip.id)
    bench.run(lambda: decode.state == "open")
    bench.scheduler.add(clip)
    bench.run()
    assert all_well(decode, clip), "the older clip does not keep the younger decode from its end"


def test_a_decode_waits_for_another_that_holds_its_cache() -> None:
    bench = Bench(Gpu(total=10))
    first = bench.decode()
    bench.run(lambda: first.done == 2)
    second = bench.decode(tiling=Tiling())
    bench.run(first.ticket.done)
    assert second.state == "loading", "2 of the 7 GiB are the first one's cache, until it ends"
    bench.run()
    assert all_well(first, second) and bench.unloaded() == []


def test_a_claim_that_is_not_needed_any_more_asks_nobody() -> None:
    neighbour = Neighbour()
    gpu = Gpu(total=24, takes=0.5)
    bench = Bench(gpu, neighbour=neighbour)
    first = bench.clip()
    bench.run(lambda: first.state == "opening")
    gpu.others = 6.5
    second = bench.clip()
    bench.run(lambda: bool(neighbour._waiting))
    assert bench.sent(Lease) and second.state == "loading", "3.5 GiB are free, and 4 expected"
    bench.run(lambda: second.state == "opening")
    neighbour.serve(lambda request: pytest.fail("2 GiB were measured, and the allocator holds them"))
    bench.run()
    assert all_well(first, second)


def test_work_that_takes_turns_on_a_gpu_has_room_for_the_larger_one() -> None:
    bench = Bench(Gpu(total=22))
    decode, clip = bench.decode(), bench.clip()
    bench.run(lambda: decode.ticket.done())
    assert clip.state == "loading", "14 and 1 and the decode's 7 are more than 22 less what others have"
    bench.run()
    assert all_well(decode, clip)


def test_two_clips_of_two_models_take_turns() -> None:
    bench = Bench(Gpu(total=24), Gpu(total=24))
    clips = [bench.clip(stamp, ranks=(0, 1)) for stamp in ("a", "b", "a")]
    bench.run()
    assert all_well(*clips)


def test_too_little_is_said_before_the_first_lease_with_the_numbers() -> None:
    neighbour = Neighbour()
    bench = Bench(Gpu(total=24, others=1), Gpu(total=24, others=4), neighbour=neighbour)
    comfy = ComfyUI(bench.pool.gpus[1], 3)
    clip = bench.clip(ranks=(0, 1))
    bench.run()
    neighbour.serve(lambda request: (Held("WAN21", 3 * GIB),))
    bench.run()
    assert error_of(clip) == (
        "GPU 1 (RTX 4090), 24.0 GiB, is 1.0 GiB short for 5x3x4: weights 14.0 GiB, activations 4.0 GiB, the pool's "
        "other networks 0.0 GiB, other programs 7.0 GiB (of these ComfyUI: WAN21 3.0 GiB). Connect PipeDiT Loader's "
        "clip and vae, so that ComfyUI loads none of its own, set weight_dtype to fp8_e4m3fn or use length 3. No step "
        "was finished yet, so nothing is kept")
    assert comfy.held == 3 and bench.sent(Load) == [] and bench.sent(Lease) == []


def test_what_no_gpu_of_this_size_can_hold_unloads_nothing() -> None:
    bench = Bench(Gpu(total=17, others=0))
    bench.text()
    bench.run()
    clip = bench.clip()
    bench.run()
    assert "is 1.0 GiB short" in error_of(clip) and bench.unloaded() == []


def test_a_measured_peak_takes_the_estimates_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import scripted_gpus

    bench = Bench(Gpu(total=24))
    monkeypatch.setitem(scripted_gpus.ACTIVATIONS, "denoise", 2)
    bench.clip()
    bench.run()
    assert [peak / GIB for peak in bench.scheduler.claims.peaks().values()] == [2]
    monkeypatch.setitem(scripted_gpus.ACTIVATIONS, "denoise", 9)
    bench.pool.gpus[0].held = 0
    bench.scheduler.claims.released(0)
    bench.pool.gpus[0].others = 7
    clip = bench.clip()
    monkeypatch.setitem(scripted_gpus.ACTIVATIONS, "denoise", 2)
    bench.run()
    assert clip.ticket.done() and not clip.ticket.failed(), "2 GiB were measured, whatever a formula says"


def test_a_lost_rank_leaves_no_claim_behind() -> None:
    bench = Bench(Gpu(), Gpu())
    bench.clip(ranks=(0, 1))
    other = bench.clip("b", ranks=(1,))
    bench.run(lambda: bool(bench.sent(Load)))
    for gpu in bench.pool.gpus:
        gpu.networks.clear()
    bench.scheduler.handle(RankLost(0, 0, WorkerDied("rank 0 was killed"), "idle"))
    bench.run()
    assert all_well(other)


def give_back(bench: Bench, num_gib: float, device: str = "gpu:0") -> float:
    """GiB that the pool says it gave."""
    heard: list[int] = []
    bench.scheduler.give_back(device, int(num_gib * GIB), heard.append)
    bench.run(lambda: bool(heard))
    (num_bytes,) = heard
    return num_bytes / GIB


def used_pool(gpu: Gpu | None = None) -> Bench:
    """A pool that has done everything once: 6 + 14 + 1 GiB of networks and 7 of an allocator's on a large GPU."""
    bench = Bench(gpu or Gpu(total=80))
    for make in (bench.text, bench.clip, bench.decode):
        make()
        bench.run()
    assert bench.pool.gpus[0].held == 7 and len(bench.pool.gpus[0].networks) == 3
    return bench


@pytest.mark.parametrize(("asked", "given", "unloaded"), [
    (5, 7, []), (7, 7, []), (8, 13, ["text"]), (14, 27, ["text", "transformer"]),
    (100, 28, ["text", "transformer", "vae"]),
])
def test_an_idle_pool_gives_what_is_asked_its_allocators_rest_first(asked: float, given: float,
                                                                   unloaded: list[str]) -> None:
    bench = used_pool()
    assert bench.scheduler.claims.held(0) == 28 * GIB
    assert give_back(bench, asked) == given and bench.unloaded() == unloaded
    assert bench.scheduler.claims.held(0) == (28 - given) * GIB


def test_what_runs_gives_nothing_of_its_own() -> None:
    bench = used_pool()
    clip = bench.clip()
    bench.run(lambda: clip.done == 1)
    give_back(bench, 100)
    assert set(bench.unloaded()) == {"text", "vae"}
    bench.run()
    assert clip.ticket.done() and not clip.ticket.failed()


def test_what_waits_for_another_rank_is_not_given() -> None:
    bench = Bench(Gpu(total=80), Gpu(total=80))
    clip = bench.clip(ranks=(0, 1))
    bench.run(lambda: bench.scheduler.residence.has(0, clip.weights))
    slow = bench.pool.inbox.popleft()
    assert slow[0] == 1 and isinstance(slow[1], Load)
    assert give_back(bench, 100) == 0 and bench.unloaded() == []
    bench.pool.inbox.append(slow)
    bench.run()
    assert all_well(clip)


def test_what_is_out_of_memory_gave_back_what_its_allocator_held() -> None:
    bench = Bench(Gpu())
    for _ in range(2):
        bench.clip()
        bench.run()
        bench.scheduler.handle(FromRank(0, Refused(0, "nobody", "OutOfMemory", "in mid-step"), ()))
    assert len(bench.sent(Measure)) == 2


def test_a_pool_that_ends_answers_what_it_was_asked() -> None:
    bench, heard = used_pool(), list[int]()
    bench.scheduler.give_back("gpu:0", GIB, heard.append)
    bench.scheduler.fail_all(WorkerDied("the engine ends"))
    assert heard == [0]


def test_a_pool_that_is_not_ready_has_nothing_to_give() -> None:
    bench = used_pool()
    bench.pool.state = "starting"
    assert give_back(bench, 5) == 0 and bench.unloaded() == []


def test_what_was_to_be_given_back_by_a_rank_that_died_is_answered() -> None:
    bench, heard = used_pool(), list[int]()
    bench.scheduler.give_back("gpu:0", GIB, heard.append)
    bench.scheduler.handle(RankLost(0, 0, WorkerDied("rank 0 was killed"), "idle"))
    assert heard == [0]


def test_an_answer_that_fails_is_an_answer() -> None:
    neighbour, woken = Neighbour(), list[str]()
    request = Request("gpu:0", GIB, GIB, "gpu:0", lambda: woken.append("woken"))
    neighbour.ask(request)

    def fail(asked: Request) -> tuple[Held, ...]:
        raise RuntimeError("ComfyUI's own trouble")

    with pytest.raises(RuntimeError, match="own trouble"):
        neighbour.serve(fail)
    assert request.done and woken == ["woken"]
    served: Callable[[Request], tuple[Held, ...]] = fail
    neighbour.serve(served)
