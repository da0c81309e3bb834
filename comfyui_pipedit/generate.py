"""`python -m comfyui_pipedit generate`: a prompt becomes an mp4, on the same pool as in ComfyUI."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from torch import Tensor

from .config import EngineConfig
from .errors import InvalidJob, OutOfMemory, SetupError, StorageFull
from .host.engine import Engine
from .host.room import check_room
from .host.ticket import Ticket
from .job import DecodeRequest, ModelFiles, Tiling
from .loaders import check_text
from .requests import Clip, Settings, encode_texts, find_model, make_job, solver

FPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    settings = Settings()
    parser.add_argument("--model", default="demo", help="'demo' or a Wan 2.1 folder in diffusers' layout")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--negative", default="")
    parser.add_argument("--out", required=True, type=Path, help="the mp4 to write")
    parser.add_argument("--size", default="96x96x17", help="WIDTHxHEIGHTxFRAMES")
    parser.add_argument("--fps", type=int, default=FPS)
    parser.add_argument("--seed", type=int, default=settings.seed)
    parser.add_argument("--steps", type=int, default=settings.steps)
    parser.add_argument("--cfg", type=float, default=settings.cfg)
    parser.add_argument("--sampler", default=settings.sampler)
    parser.add_argument("--scheduler", default=settings.scheduler)
    parser.add_argument("--shift", type=float, default=settings.shift, help="0 = the model's own")
    parser.add_argument("--devices", default="auto", help="auto, cpu:N or gpu:0,gpu:1")
    parser.add_argument("--split", default="auto", help="auto, N or N+M (denoise + decode)")


def run(options: argparse.Namespace) -> int:
    """Makes the clip; 0. Raises PipeDiTError."""
    check_writable(options.out)
    if options.fps < 1:
        raise InvalidJob(f"--fps {options.fps} is not available here; allowed: 1 or more")
    files = find_model(options.model)
    for text in (options.prompt, options.negative):
        check_text(files, text)
    settings = Settings(options.seed, options.steps, options.cfg, options.sampler, options.scheduler,
                        shift=options.shift)
    solver(files, settings)
    shape = Clip.parse(options.size).latent_shape(files)
    check_room(shape, files.geometry, decode=True)
    engine = Engine(EngineConfig(devices=options.devices, split=options.split))
    try:
        print(f"{files.name}: {engine.describe_plan(files, shape)}", file=sys.stderr)
        wanted = (options.prompt, options.negative) if options.cfg != 1 else (options.prompt,)
        texts = encode_texts(engine, files, wanted)
        ticket = engine.submit(make_job(files, texts, shape, settings, decode=True, label="clip"))
        follow(ticket)
        save_video(decoded(engine, files, ticket).result(), options.out, options.fps)
    finally:
        engine.close()
    seconds = ", ".join(f"{stage} {value:.1f} s" for stage, value in times(ticket).items())
    print(f"{options.out}: {shape[2]} latent frames, {seconds}", file=sys.stderr)
    return 0


def decoded(engine: Engine, files: ModelFiles, ticket: Ticket) -> Ticket:
    """The ended ticket of a finished clip's frames: in tiles where a whole decode has too little memory."""
    assert ticket.frames is not None and files.vae is not None
    try:
        follow(ticket.frames)
    except OutOfMemory as error:
        print(f"{error}; decoding again, in tiles", file=sys.stderr)
        tiled = engine.submit(DecodeRequest(files.vae, files.geometry, ticket.result(), Tiling()))
        follow(tiled)
        return tiled
    return ticket.frames


def times(ticket: Ticket) -> dict[str, float]:
    """Seconds by stage of a clip and of its decode."""
    return ticket.timings() | (ticket.frames.timings() if ticket.frames else {})


def follow(ticket: Ticket) -> None:
    """Waits, with a line of progress on a terminal; raises what the ticket ended with."""
    while not ticket.wait(0.2):
        progress = ticket.progress()
        if sys.stderr.isatty():
            line = f"{progress.stage.value} {progress.done}/{progress.total} {progress.text:<40}"
            print(f"\r{line}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
    ticket.result()


def check_writable(path: Path) -> None:
    """InvalidJob before anything is computed if the folder of an output file is missing."""
    if path.is_dir():
        raise InvalidJob(f"--out {path} is a folder; name a file in it, like {path / 'clip.mp4'}")
    if not path.parent.is_dir():
        raise InvalidJob(f"--out {path}: the folder {path.parent} does not exist")


def save_video(frames: Tensor, path: Path, fps: int) -> None:
    """frames float32 [F, H, W, 3] in 0..1 -> H.264 mp4, written whole or not at all. StorageFull if that fails."""
    data = encode_video(frames, fps)
    try:
        write_whole(data, path)
    except OSError as error:
        raise StorageFull(f"{path} could not be written ({len(data):,} bytes): {error.strerror}. Free space or choose "
                          f"another --out; the same command with the same seed gives the same clip") from error


def write_whole(data: bytes, path: Path) -> None:
    """A file, by way of another beside it; what stood there stays if that fails. Into anything but a file directly."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def encode_video(frames: Tensor, fps: int) -> bytes:
    """The bytes of an mp4. SetupError if PyAV, which ComfyUI brings, is missing."""
    try:
        import av
    except ImportError as error:
        raise SetupError("writing mp4 needs PyAV: pip install av (ComfyUI has it)") from error
    pixels = (frames * 255).round().clamp(0, 255).byte().cpu().numpy()
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = (size + size % 2 for size in pixels.shape[1:3])
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "16"}
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return target.getvalue()

