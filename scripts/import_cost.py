"""What loading this pack adds to ComfyUI's start: seconds, and the modules it brings, on top of ComfyUI's own.

    python scripts/import_cost.py [--json]

A fresh interpreter imports what ComfyUI has imported by then (torch, comfy_api, server, nodes), then loads the pack as
ComfyUI does, entry point and node schemas included. The best of three runs counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import comfyui

ROOT = Path(__file__).resolve().parent.parent
RUNS = 3
CHILD = """
import asyncio, importlib.util, json, sys, time
pack_folder, comfy_folder = sys.argv[1:]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, comfy_folder)
import comfy.options
comfy.options.enable_args_parsing()
import utils.install_util  # before ComfyUI puts its own folder comfy, with a utils.py, in front
import torch, server, nodes
from comfy_api.latest import ComfyExtension
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
server.PromptServer(loop)
before, began = set(sys.modules), time.perf_counter()

name = pack_folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, pack_folder + "/__init__.py",
                                              submodule_search_locations=[pack_folder])
pack = importlib.util.module_from_spec(spec)
sys.modules[name] = pack
spec.loader.exec_module(pack)

async def load():
    extension = await pack.comfy_entrypoint()
    return [node.GET_SCHEMA().node_id for node in await extension.get_node_list()]

found = loop.run_until_complete(load())
print("RESULT " + json.dumps({
    "seconds": time.perf_counter() - began, "nodes": found, "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized()}))
"""


def measure(comfy: Path) -> dict[str, Any]:
    """One load in a fresh interpreter: seconds, node ids, modules that it added, whether CUDA was initialised."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(ROOT), str(comfy)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"the pack did not load:\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    arguments = parser.parse_args()
    comfy = comfyui.locate(ROOT / ".comfyui")
    if comfy is None:
        raise SystemExit("there is no ComfyUI here: run make setup, or set COMFYUI=/path/to/ComfyUI")
    best = min((measure(comfy) for _ in range(RUNS)), key=lambda result: result["seconds"])
    if arguments.json:
        print(json.dumps(best))
        return
    print(f"{best['seconds']:.3f} s for {', '.join(best['nodes'])} and {len(best['modules'])} modules")


if __name__ == "__main__":
    main()
