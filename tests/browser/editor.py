"""ComfyUI's editor in a headless Chromium, driven as a person would: search, drag, templates, Run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync")
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False}
"""A first start would open the templates by itself."""

NO_BANNER = "localStorage.setItem('vueNodesBannerDismissed', 'true')"
LIMIT = 90_000.0
CANVAS = "#graph-canvas"
WATCH = """() => {
  window.watched = {ended: '', loaded: null}
  for (const kind of ['execution_success', 'execution_error', 'execution_interrupted'])
    app.api.addEventListener(kind, () => { watched.ended = kind })
  app.registerExtension({name: 'test.watch', afterConfigureGraph(missing) { watched.loaded = missing }})
}"""


def chromium() -> str | None:
    """Path of the browser: what PIPEDIT_CHROMIUM names, else the system's; None where there is none."""
    found = (shutil.which(name) for name in (os.environ.get("PIPEDIT_CHROMIUM") or "", *BROWSERS) if name)
    return next((path for path in found if path), None)


@contextmanager
def browser(executable: str) -> Iterator[Browser]:
    """A browser that keeps nothing."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, headless=True, args=list(ARGUMENTS))
        yield opened
        opened.close()


@contextmanager
def opened_editor(opened: Browser, url: str, width: int = 1600, height: int = 1000) -> Iterator[Editor]:
    """The editor of a server in a fresh profile."""
    context = opened.new_context(viewport={"width": width, "height": height})
    context.set_default_timeout(LIMIT)
    context.add_init_script(NO_BANNER)
    editor = Editor(context.new_page(), url)
    editor.open()
    yield editor
    context.close()


class Editor:
    """A page with the editor of a server."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url

    def open(self) -> None:
        """Loads it; nothing but the server can be reached."""
        self.page.route("**/*", self._only_the_server)
        self.page.goto(self.url)
        self.page.wait_for_function("window.app?.graph && window.app.extensionManager?.workflow?.activeWorkflow")
        self.page.evaluate(WATCH)

    def _only_the_server(self, route: Route) -> None:
        own = route.request.url.startswith((self.url, "data:", "blob:"))
        route.continue_() if own else route.abort()

    # -- placing nodes ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        self.page.evaluate("app.graph.clear()")

    def search(self, text: str, first: str) -> list[str]:
        """Double-click on the empty canvas, then typing; the names that are found, once `first` is the first."""
        self.page.mouse.dblclick(1000, 400)
        self.page.keyboard.type(text)
        found = self.page.locator(".p-autocomplete-option")
        expect(found.first).to_contain_text(first, timeout=LIMIT)
        return [entry.splitlines()[0].strip() for entry in found.all_inner_texts()]

    def drag(self, name: str, x: float, y: float) -> None:
        """From the node library to a place on the canvas."""
        self.page.keyboard.press("n")
        self.page.get_by_placeholder("Search Nodes").fill(name)
        entry = self.page.locator(".node-lib-node-container").filter(has_text=name).first
        entry.drag_to(self.page.locator(CANVAS), target_position={"x": x, "y": y})

    def wait_nodes(self, count: int) -> list[dict[str, Any]]:
        """Type and place of all nodes, once there are so many."""
        self.page.wait_for_function("count => app.graph._nodes.length === count", arg=count)
        nodes: list[dict[str, Any]] = self.page.evaluate(
            "app.graph._nodes.map(node => ({id: String(node.id), type: node.type, x: node.pos[0], y: node.pos[1]}))")
        return nodes

    # -- workflows ----------------------------------------------------------------------------------------------------

    def template(self, name: str) -> list[Any]:
        """Opens one from the template browser; the types that the editor does not know."""
        self.page.evaluate("() => { watched.loaded = null }")
        self.page.evaluate("app.extensionManager.command.execute('Comfy.BrowseTemplates')")
        self.page.get_by_test_id(f"template-workflow-{name}").first.click()
        return self._missing()

    def load(self, graph: dict[str, Any]) -> list[Any]:
        """Opens a graph in the editor's format, as a file that is dropped."""
        self.page.evaluate("graph => { watched.loaded = null; app.loadGraphData(graph) }", graph)
        return self._missing()

    def _missing(self) -> list[Any]:
        self.page.wait_for_function("watched.loaded !== null")
        missing: list[Any] = self.page.evaluate("watched.loaded")
        return missing

    def dialogs(self) -> list[str]:
        """The texts of the dialogs that are open two frames from now."""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return [dialog.inner_text() for dialog in self.page.get_by_role("dialog").all()]

    def sent(self) -> dict[str, Any]:
        """What Run would queue: class and inputs by node."""
        output = self.page.evaluate("app.graphToPrompt()")["output"]
        return {node: {"class_type": entry["class_type"], "inputs": entry["inputs"]} for node, entry in output.items()}

    # -- running ------------------------------------------------------------------------------------------------------

    def set_widget(self, node: int, name: str, value: Any) -> None:
        self.page.evaluate(
            "([node, name, value]) => { app.graph._nodes.find(one => String(one.id) === String(node)).widgets"
            ".find(widget => widget.name === name).value = value }", [node, name, value])

    def run(self) -> None:
        """Presses Run."""
        self.page.evaluate("() => { watched.ended = '' }")
        self.page.get_by_role("button", name="Run", exact=True).click()

    def wait_end(self) -> str:
        """The event that ended the prompt."""
        self.page.wait_for_function("watched.ended")
        return str(self.page.evaluate("watched.ended"))

    def wait_progress(self, nodes: Collection[int]) -> None:
        """Until the bar of one of the nodes has moved."""
        self.page.wait_for_function(
            "nodes => app.graph._nodes.some(node => nodes.includes(Number(node.id)) && node.progress > 0)",
            arg=list(nodes))

    def videos(self, count: int) -> list[str]:
        """Addresses of the videos on nodes, once so many can play; videos beside the view are not made yet."""
        ready = f"[...document.querySelectorAll('video')].filter(video => video.readyState >= 2).length >= {count}"
        self.page.wait_for_function(ready)
        sources: list[str] = self.page.evaluate("[...document.querySelectorAll('video')].map(video => video.src)")
        return sources

    def marked(self) -> list[str]:
        """Ids of the nodes that the editor marks as failed."""
        return json.loads(str(self.page.evaluate(
            "JSON.stringify([app.lastExecutionError?.node_id, ...Object.keys(app.lastNodeErrors ?? {})]"
            ".filter(one => one !== undefined).map(String))")))
