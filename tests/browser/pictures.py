"""Makes the pictures of the editor anew: .venv/bin/python tests/browser/pictures.py.

docs/images/editor.png, search.png, error.png, templates.png, and beside each workflow the thumbnail that the template
browser shows: its graph, or for the demo what it makes.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import PIL.Image
import PIL.ImageOps

if TYPE_CHECKING:
    from editor import Editor
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
IMAGES, WORKFLOWS = ROOT / "docs" / "images", ROOT / "workflows"
SQUARE = 384
SIDE = 960
"""Of the square of a graph that its thumbnail shows, in the graph's units: the nodes on the left."""

PLACE = """([margin, title]) => {
  const {scale, offset} = app.canvas.ds
  const corner = axis => Math.min(...app.graph._nodes.map(node => node.pos[axis]))
  return [(corner(0) - margin + offset[0]) * scale, (corner(1) - title - margin + offset[1]) * scale, scale]
}"""


def save_png(content: bytes, file: Path, width: int) -> None:
    """A screenshot as a small PNG."""
    picture = PIL.Image.open(io.BytesIO(content)).convert("RGB")
    picture = picture.resize((width, picture.height * width // picture.width), PIL.Image.Resampling.LANCZOS)
    picture.quantize(256, method=PIL.Image.Quantize.FASTOCTREE, dither=PIL.Image.Dither.NONE).save(file, optimize=True)


def save_thumbnail(picture: PIL.Image.Image, file: Path) -> None:
    """A square picture, small."""
    small = PIL.ImageOps.fit(picture.convert("RGB"), (SQUARE, SQUARE), PIL.Image.Resampling.LANCZOS)
    small.save(file, quality=80, optimize=True)


def graph_picture(editor: Editor, name: str) -> PIL.Image.Image:
    """The beginning of a workflow's graph, without the menus around it."""
    editor.template(name)
    editor.page.evaluate("app.extensionManager.command.execute('Workspace.ToggleFocusMode')")
    left, top, scale = editor.page.evaluate(PLACE, [10, 30])
    clip = {"x": left, "y": top, "width": SIDE * scale, "height": SIDE * scale}
    return PIL.Image.open(io.BytesIO(editor.page.screenshot(clip=clip)))


def demo_thumbnail() -> None:
    """Out of the picture of its four clips."""
    with PIL.Image.open(IMAGES / "demo.gif") as clips:
        clips.seek(clips.n_frames // 2)
        save_thumbnail(clips, WORKFLOWS / "demo.jpg")


def demo_picture(editor: Editor) -> None:
    """The whole demo after a run."""
    editor.template("demo")
    editor.run()
    editor.wait_end()
    editor.videos(4)
    save_png(editor.page.screenshot(), IMAGES / "editor.png", 1400)


def search_picture(editor: Editor) -> None:
    editor.clear()
    editor.search("multi gpu", first="Multi-GPU Sampler")
    save_png(editor.page.screenshot(), IMAGES / "search.png", 900)


def error_picture(editor: Editor) -> None:
    editor.template("demo")
    editor.set_widget(10, "text", "a purple elephant")
    editor.run()
    editor.wait_end()
    editor.page.get_by_role("dialog").first.wait_for()
    save_png(editor.page.screenshot(), IMAGES / "error.png", 900)


def templates_picture(editor: Editor) -> None:
    editor.page.evaluate("app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    editor.page.get_by_test_id("template-workflow-demo").first.wait_for()
    editor.page.wait_for_load_state("networkidle")
    save_png(editor.page.screenshot(), IMAGES / "templates.png", 900)


def make(opened: Browser, url: str) -> None:
    """All of them."""
    from editor import opened_editor

    demo_thumbnail()
    for name in sorted(path.stem for path in WORKFLOWS.glob("wan*.json")):
        with opened_editor(opened, url, 1700, 1000) as editor:
            save_thumbnail(graph_picture(editor, name), WORKFLOWS / f"{name}.jpg")
    for picture, width, height in ((demo_picture, 1480, 1320), (search_picture, 1200, 750), (error_picture, 1200, 750),
                                   (templates_picture, 1400, 900)):
        with opened_editor(opened, url, width, height) as editor:
            picture(editor)


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "comfy")]
    import served
    from editor import browser, chromium

    comfy, executable = served.comfy_folder(), chromium()
    if comfy is None or executable is None:
        raise SystemExit("this needs make setup and make browser")
    with (tempfile.TemporaryDirectory() as base, served.serve(comfy, Path(base)) as server,
          browser(executable) as opened):
        make(opened, server.url)


if __name__ == "__main__":
    main()
