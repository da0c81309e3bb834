"""A real ComfyUI server for tests, and a client that queues prompts and waits on the server's own events.

    with ComfyServer.start(comfy_folder, base_folder, packs=[repository]) as server, server.client() as client:
        outcome = client.run(graph, timeout=60)
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

LAUNCHER = Path(__file__).resolve().parents[2] / "scripts" / "run_comfyui.py"
READY_LINE = "To see the GUI go to"
Event = dict[str, Any]


class Rejected(Exception):
    """The server refused a prompt; `node_errors` maps node ids to its reasons."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(json.dumps(answer, indent=1))
        self.node_errors: dict[str, Any] = answer.get("node_errors", {})


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare_base(base: Path, packs: Sequence[Path]) -> None:
    """Make ComfyUI's base folder with the node packs linked into custom_nodes."""
    for name in ("custom_nodes", "models", "input", "output", "temp", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
    for pack in packs:
        link = base / "custom_nodes" / f"pack-{pack.name}"
        if not link.is_symlink():
            link.symlink_to(pack, target_is_directory=True)


class ComfyServer:
    """One running server: `url`, `base`, `pid`, `log()`. Stopped by its process id, with an interrupt first; it also
    ends by itself when the process that started it has ended."""

    def __init__(self, process: subprocess.Popen[str], url: str, base: Path, log_file: Path) -> None:
        self.process, self.url, self.base, self.log_file = process, url, base, log_file
        self.ready, self.ended = threading.Event(), threading.Event()
        self.changed = threading.Condition()
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @classmethod
    def start(
        cls,
        comfy: Path,
        base: Path,
        packs: Sequence[Path],
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        timeout: float = 120.0,
    ) -> ComfyServer:
        """Start ComfyUI on the CPU and wait until it listens. RuntimeError with the log's end if it does not."""
        prepare_base(base, packs)
        port = free_port()
        command = [sys.executable, str(LAUNCHER), str(comfy), "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
        command += ["--base-directory", str(base), "--database-url", f"sqlite:///{base}/user/comfyui.db"]
        command += ["--disable-auto-launch", "--disable-api-nodes", *arguments]
        settings = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "RUN_COMFYUI_UNTIL_EOF": "1"}
        process = subprocess.Popen(
            command, env={**settings, **(environment or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )
        server = cls(process, f"http://127.0.0.1:{port}", base, base / "server.log")
        server.wait_ready(timeout)
        return server

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log_file.open("w", encoding="utf-8") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                with self.changed:
                    self.lines.append(line)
                    self.changed.notify_all()
                if READY_LINE in line:
                    self.ready.set()
        self.ended.set()
        self.ready.set()

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server listens; stops it and raises when it does not, with the end of its log."""
        arrived = self.ready.wait(timeout)
        if not arrived or self.ended.is_set():
            self.stop()
            reason = "ended while starting" if arrived else f"did not listen within {timeout:.0f} s"
            raise RuntimeError(f"ComfyUI {reason}:\n{self.log()[-6000:]}")

    def wait_log(self, text: str, timeout: float) -> str:
        """The first line of the log that holds `text`; TimeoutError when none comes in time."""
        with self.changed:
            found = self.changed.wait_for(lambda: any(text in line for line in self.lines), timeout)
            if not found:
                raise TimeoutError(f"no {text!r} in ComfyUI's log within {timeout} s:\n{''.join(self.lines)[-6000:]}")
            return next(line for line in self.lines if text in line)

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """Everything the server has printed so far."""
        with self.changed:
            return "".join(self.lines)

    def client(self) -> Client:
        """A new client of this server, with an identity of its own."""
        return Client(self.url, self.log)

    def stop(self, timeout: float = 20.0) -> int:
        """Interrupt the server and wait for its end, kill it if it does not end; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(timeout)
        self.reader.join(timeout)
        return code

    def __enter__(self) -> ComfyServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True)
class Outcome:
    """How one prompt ended: status "success", "error" or "interrupted", and every event of it in order."""

    prompt_id: str
    status: str
    events: tuple[Event, ...]
    outputs: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> Event:
        """Data of the execution_error event: node_id, node_type, exception_type, exception_message, traceback."""
        return next((event["data"] for event in self.events if event["type"] == "execution_error"), {})

    def files(self, node_id: str) -> list[dict[str, Any]]:
        """Files that a node saved: mappings of filename, subfolder and type, as `Client.view` takes them."""
        groups = self.outputs.get(node_id, {}).values()
        return [item for group in groups if isinstance(group, list) for item in group
                if isinstance(item, dict) and "filename" in item]


class Client:
    """Queues prompts and keeps the events that the server sends about them. Use as a context manager."""

    ENDINGS = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}

    def __init__(self, url: str, log: Callable[[], str] = str) -> None:
        self.url, self.log, self.identity = url, log, uuid.uuid4().hex
        self.events: collections.deque[Event] = collections.deque()
        self.changed = threading.Condition()
        self.loop = asyncio.new_event_loop()
        self.connected = threading.Event()
        self.listening: asyncio.Task[None] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Client:
        self.thread.start()
        if not self.connected.wait(30):
            raise TimeoutError(f"no websocket to {self.url} within 30 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.listening is not None:
            self.loop.call_soon_threadsafe(self.listening.cancel)
        self.thread.join(10)
        if error is not None:
            print(f"---- the end of ComfyUI's log ----\n{self.log()[-6000:]}", file=sys.stderr)

    def _run(self) -> None:
        self.listening = self.loop.create_task(self._listen())
        try:
            self.loop.run_until_complete(self.listening)
        except (asyncio.CancelledError, aiohttp.ClientError):
            pass
        finally:
            self.loop.close()

    async def _listen(self) -> None:
        address = f"{self.url}/ws?clientId={self.identity}"
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as websocket:
            self.connected.set()
            async for message in websocket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._keep(json.loads(message.data))

    def _keep(self, event: Event) -> None:
        with self.changed:
            self.events.append({**event, "time": time.monotonic()})
            self.changed.notify_all()

    def request(self, path: str, body: Any = None, method: str | None = None) -> bytes:
        """The server's answer to GET (no body) or POST (JSON body); urllib.error.HTTPError for an error status."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: bytes = answer.read()
            return content

    def get(self, path: str) -> Any:
        """The JSON behind a path."""
        return json.loads(self.request(path))

    def queue(self, graph: dict[str, Any], **fields: Any) -> str:
        """POST /prompt with an API-format graph; its prompt id. Raises Rejected with the server's node errors."""
        body = {"prompt": graph, "client_id": self.identity, **fields}
        try:
            answer = json.loads(self.request("/prompt", body))
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            raise Rejected(json.loads(error.read())) from error
        if answer.get("node_errors"):
            raise Rejected(answer)
        return str(answer["prompt_id"])

    def wait_event(self, matches: Callable[[Event], bool], timeout: float) -> Event:
        """The first event, of those already here or to come, that `matches`; TimeoutError with the log's end."""
        with self.changed:
            if not self.changed.wait_for(lambda: any(map(matches, self.events)), timeout):
                seen = [event["type"] for event in self.events][-20:]
                raise TimeoutError(f"no such event in {timeout} s; the last: {seen}\n{self.log()[-6000:]}")
            return next(filter(matches, self.events))

    def wait(self, prompt_id: str, timeout: float) -> Outcome:
        """Wait until a prompt has ended in any way; TimeoutError otherwise."""
        ending = self.wait_event(
            lambda event: event["type"] in self.ENDINGS and event["data"].get("prompt_id") == prompt_id, timeout
        )
        with self.changed:
            events = tuple(event for event in self.events if event["data"].get("prompt_id") == prompt_id)
        status = self.ENDINGS[ending["type"]]
        return Outcome(prompt_id, status, events, self._outputs(prompt_id, events))

    def _outputs(self, prompt_id: str, events: tuple[Event, ...]) -> dict[str, Any]:
        """What the nodes put out: of the history where the prompt is there already, else of the events."""
        entry = self.history(prompt_id)
        seen = {event["data"]["node"]: event["data"]["output"] for event in events if event["type"] == "executed"}
        return {**seen, **entry.get("outputs", {})}

    def run(self, graph: dict[str, Any], timeout: float, **fields: Any) -> Outcome:
        """Queue a graph and wait for its end. An error is an outcome, not an exception."""
        return self.wait(self.queue(graph, **fields), timeout)

    def history(self, prompt_id: str) -> dict[str, Any]:
        """The prompt's entry in GET /history, empty while it is not there."""
        entry: dict[str, Any] = self.get(f"/history/{prompt_id}").get(prompt_id, {})
        return entry

    def view(self, filename: str, subfolder: str = "", type: str = "output", **rest: Any) -> bytes:
        """The content of a file that a node saved; takes an item of `Outcome.files` as keywords."""
        query = urllib.parse.urlencode({"filename": filename, "subfolder": subfolder, "type": type})
        return self.request(f"/view?{query}")

    def interrupt(self) -> None:
        """POST /interrupt: stop the prompt that runs."""
        self.request("/interrupt", {})

    def remove(self, prompt_id: str) -> None:
        """Take a waiting prompt out of the queue."""
        self.request("/queue", {"delete": [prompt_id]})

    def object_info(self, node: str) -> dict[str, Any]:
        """The server's description of a node class; KeyError when it has none of that name."""
        entry: dict[str, Any] = self.get(f"/object_info/{node}")[node]
        return entry
