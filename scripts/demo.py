"""`make demo`: queue the four-branch graph on a real ComfyUI with this pack, and show what came of it.

Writes four videos, a contact sheet, an animation and a timeline (text and picture) into the output folder. The exit
code is 0 only if ComfyUI itself answered, every clip arrived, and no process or open port was left behind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import comfyui
import numpy
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "comfy")]
from server import Client, ComfyServer, Outcome, Rejected  # noqa: E402

sys.path.append(str(ROOT))
from comfyui_pipedit import contact_sheet, timeline  # noqa: E402
from comfyui_pipedit.job import Span  # noqa: E402

GRAPH = ROOT / "workflows" / "api" / "demo.json"
PATIENCE = 10.0
"""Seconds that processes may take to end after ComfyUI has."""
Graph = dict[str, dict[str, Any]]


class DemoFailed(Exception):
    """The demo did not show what it is there to show; the text says what is missing."""


@dataclass(frozen=True)
class Branch:
    """One clip of the graph: ids of its Sampler and of the node that saves it, and its prompt."""

    sampler: str
    save: str
    prompt: str


def upstream(graph: Graph, node: str) -> set[str]:
    """The node and everything that it depends on."""
    found, waiting = set(), [node]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            links = [value for value in graph[name]["inputs"].values() if isinstance(value, list)]
            waiting += [str(link[0]) for link in links]
    return found


def text_of(graph: Graph, node: str) -> str:
    """The prompt that a Sampler's `positive` comes from."""
    source = graph[str(graph[node]["inputs"]["positive"][0])]
    return str(source["inputs"]["text"])


def branches(graph: Graph) -> list[Branch]:
    """The clips of the graph, by the number of the node that saves them."""
    saves = sorted((node for node in graph if graph[node]["class_type"] == "SaveVideo"), key=int)
    found = []
    for save in saves:
        sampler = next(node for node in upstream(graph, save) if graph[node]["class_type"] == "PipeDiTSampler")
        found.append(Branch(sampler, save, text_of(graph, sampler)))
    return found


def check_comfyui(client: Client) -> str:
    """The version of the ComfyUI that answers; DemoFailed if what answers is something else, or lacks our nodes."""
    system = client.get("/system_stats").get("system", {})
    version = system.get("comfyui_version")
    nodes = client.get("/object_info")
    missing = [name for name in ("KSampler", "SaveVideo", "PipeDiTLoader", "PipeDiTSampler") if name not in nodes]
    if not version or missing:
        raise DemoFailed(f"what answers is not a ComfyUI with this pack: version {version!r}, missing nodes {missing}")
    return str(version)


class Progress:
    """Prints each branch's steps while the prompt runs: one line that is rewritten, or a line at each quarter."""

    def __init__(self, graph: Graph) -> None:
        self.names = {branch.sampler: number + 1 for number, branch in enumerate(branches(graph))}
        self.live = sys.stdout.isatty()
        self.state: dict[int, tuple[float, float]] = {}
        self.shown = ""

    def take(self, event: dict[str, Any]) -> None:
        """Use one event of the server."""
        if event["type"] == "progress_state":
            for node, entry in event["data"].get("nodes", {}).items():
                if node in self.names:
                    self.state[self.names[node]] = (float(entry["value"]), float(entry["max"]))
            self.show()

    def show(self) -> None:
        text = "   ".join(f"clip {number} {self.cell(*self.state[number])}" for number in sorted(self.state))
        if text != self.shown:
            self.shown = text
            print(f"\r  {text}" if self.live else f"  {text}", end="" if self.live else "\n", flush=True)

    def cell(self, value: float, total: float) -> str:
        """Steps done where they can be rewritten, else rounded down to a quarter."""
        share = value / total if total else 0.0
        return f"{share:4.0%}" if self.live else f"{int(share * 4) * 25}%"


def run_graph(client: Client, graph: Graph, timeout: float) -> Outcome:
    """Queue the graph, show progress, and return its outcome; DemoFailed with the node's message on an error."""
    try:
        prompt = client.queue(graph)
    except Rejected as error:
        raise DemoFailed(f"ComfyUI refused the graph: {error}") from error
    progress, deadline, seen = Progress(graph), time.monotonic() + timeout, 0
    while True:
        with client.changed:
            events = list(client.events)[seen:]
            if not events and not client.changed.wait(deadline - time.monotonic()):
                raise DemoFailed(f"the graph did not end within {timeout:.0f} s")
        seen += len(events)
        for event in events:
            progress.take(event)
        if any(event["type"] in client.ENDINGS and event["data"].get("prompt_id") == prompt for event in events):
            break
    print(flush=True)
    outcome = client.wait(prompt, timeout=10)
    if outcome.status != "success":
        raise DemoFailed(f"the graph ended with {outcome.status}: {outcome.error.get('exception_message', '')}")
    return outcome


def frames_of(video: Path) -> numpy.ndarray:
    """All frames of a video file, uint8 [F, H, W, 3]."""
    with av.open(str(video)) as container:
        return numpy.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def save_clips(client: Client, outcome: Outcome, graph: Graph, out: Path) -> list[contact_sheet.Clip]:
    """Fetch each branch's video over GET /view into `out`; the decoded clips. DemoFailed if one is missing or empty."""
    clips = []
    for number, branch in enumerate(branches(graph), start=1):
        files = outcome.files(branch.save)
        if len(files) != 1:
            raise DemoFailed(f"branch {number} ({branch.prompt!r}) saved {len(files)} files instead of one video")
        target = out / f"clip-{number}.mp4"
        target.write_bytes(client.view(**files[0]))
        frames = frames_of(target)
        if frames.std() < 1:
            raise DemoFailed(f"{target.name} ({branch.prompt!r}) shows one plain colour")
        clips.append(contact_sheet.Clip(branch.prompt, frames))
    return clips


def labels_of(outcome: Outcome, graph: Graph) -> dict[str, str]:
    """Job id -> prompt, from what each Sampler reported."""
    return {entry["job"]: branch.prompt for branch in branches(graph)
            for entry in outcome.outputs.get(branch.sampler, {}).get("pipedit", [])}


def save_timeline(client: Client, outcome: Outcome, graph: Graph, out: Path) -> str:
    """Write timeline.txt and timeline.png from the spans that the ranks recorded; the text."""
    spans = [Span(**entry) for entry in client.get("/pipedit/spans?since=0")]
    if not spans:
        raise DemoFailed("the ranks recorded no spans")
    labels = labels_of(outcome, graph)
    text = timeline.as_text(spans, labels)
    (out / "timeline.txt").write_text(text)
    timeline.draw(spans, labels, out / "timeline.png")
    return text


def make_everything(server: ComfyServer, graph: Graph, out: Path, timeout: float) -> str:
    """Run the graph on the server and write all files; the timeline's text."""
    with server.client() as client:
        version = check_comfyui(client)
        print(f"ComfyUI {version} answers at {server.url}; queueing {GRAPH.relative_to(ROOT)}", flush=True)
        outcome = run_graph(client, graph, timeout)
        clips = save_clips(client, outcome, graph, out)
        contact_sheet.draw(clips, out / "contact-sheet.png")
        contact_sheet.animate(clips, out / "clips.gif")
        return save_timeline(client, outcome, graph, out)


def check_nothing_left(processes: list[psutil.Process], port: int) -> None:
    """DemoFailed, after killing them, if processes of the demo outlive it, or if its port is still taken."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    for process in alive:
        process.kill()
    if alive:
        raise DemoFailed(f"processes were left running: {[process.pid for process in alive]}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise DemoFailed(f"port {port} is still taken: {error}") from error


def run(out: Path, timeout: float) -> None:
    """The whole demo. DemoFailed says what did not work."""
    graph: Graph = json.loads(GRAPH.read_text())
    comfy = comfyui.locate(ROOT / ".comfyui")
    if comfy is None:
        raise DemoFailed("there is no ComfyUI here: run make setup, or set COMFYUI=/path/to/ComfyUI")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    began = time.monotonic()
    print("starting ComfyUI ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="pipedit-demo-") as base:
        with ComfyServer.start(comfy, Path(base), packs=[ROOT]) as server:
            try:
                text = make_everything(server, graph, out, timeout)
            finally:
                (out / "comfyui.log").write_text(server.log())
                children = psutil.Process(server.pid).children(recursive=True)
        check_nothing_left(children, int(server.url.rsplit(":", 1)[1]))
    print(f"\n{text}\nin {out}: " + ", ".join(sorted(path.name for path in out.iterdir())))
    print(f"done in {time.monotonic() - began:.0f} s")


def main() -> None:
    """Parse the command line; exit with the reason when the demo fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "demo", help="folder to write to; emptied first")
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds that the graph may take")
    arguments = parser.parse_args()
    try:
        run(arguments.out.resolve(), arguments.timeout)
    except DemoFailed as error:
        raise SystemExit(f"demo failed: {error}") from error


if __name__ == "__main__":
    main()
