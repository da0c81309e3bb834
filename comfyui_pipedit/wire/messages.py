"""One frozen dataclass a message, both directions, and the codec: JSON tagged by class name, no pickle.

Tensors never travel in a frame: a `TensorRef` names one of the file descriptors that accompany the frame (wire.buffer).
Host to rank: Load Unload Measure Encode Open Evaluate Lease Help DecodeOpen VaeEncode Close Ping Exit. Rank to host:
Ready Loaded Measured Encoded Opened LeaseDone Refused Failed Pong. Host to launcher: Fork. Launcher to host: Launched
Forked Reaped.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import OutOfStep
from ..job import Expert, Geometry, LoraUse, Span, Tiling, Weights
from ..plan import Group, Plan
from ..sampling import Row, SolverTable


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a mapped buffer: `fd` is its place among the descriptors of the frame, `offset` in bytes."""

    fd: int
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class BranchRef:
    """A job.Branch whose tensors lie in mapped buffers; `names` and `extras` belong together."""

    text: TensorRef
    names: tuple[str, ...]
    extras: tuple[TensorRef, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork one rank and end all of older generations. Descriptors: its control socket, the write end of its log, the
    phase board. `deadline`: seconds after which an exchange or the forming of the world is given up."""

    rank: int
    world: int
    generation: int
    device: str
    rendezvous: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Launched:
    """The launcher has imported everything and waits."""

    pid: int


@dataclass(frozen=True, slots=True)
class Forked:
    rank: int
    generation: int
    pid: int


@dataclass(frozen=True, slots=True)
class Reaped:
    """A rank's process ended: `status` as os.waitstatus_to_exitcode gives it (negative = signal)."""

    rank: int
    generation: int
    pid: int
    status: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has its device and its world. `memory` bytes free on the device (0 on the CPU)."""

    rank: int
    generation: int
    pid: int
    device: str
    memory: int


@dataclass(frozen=True, slots=True)
class Memory:
    """A rank's device, in bytes. free: for anyone; cached: held by this rank's allocator, free for the rank alone."""

    free: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Use:
    """What work took of a rank's device, in bytes beside the weights. peak: at most; held: what the rank's allocator
    holds on to afterwards, for the next work."""

    peak: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Make a network resident. `buffer` (host-made, for all ranks) holds a converted copy; the `writer` fills it."""

    seq: int
    weights: Weights
    buffer: TensorRef | None
    writer: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    rank: int
    weights: Weights
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Unload:
    seq: int
    weights: tuple[Weights, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Answered by Measured, when all that was sent before is done. Only for ranks whose Ready tells of memory."""

    seq: int


@dataclass(frozen=True, slots=True)
class Measured:
    rank: int
    memory: Memory


@dataclass(frozen=True, slots=True)
class Encode:
    """Text encode on one rank; answered by Encoded with one descriptor that holds all embeddings."""

    seq: int
    job: str
    weights: Weights
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    rank: int
    job: str
    tensors: tuple[TensorRef, ...]
    spans: tuple[Span, ...]
    use: Use = Use()


@dataclass(frozen=True, slots=True)
class Open:
    """Prepare a clip on the denoise ranks: allocate, map inputs. `kept` is the kept latent (wire.buffer.KeptLatent);
    `first_step` > 0 resumes from what it holds. The last expert takes over at `switch_step`. Answered by Opened."""

    seq: int
    job: str
    experts: tuple[Expert, ...]
    switch_step: int
    geometry: Geometry
    plan: Plan
    table: SolverTable
    cfg: float
    positive: BranchRef
    negative: BranchRef | None
    latent: TensorRef
    noise: TensorRef
    noises: tuple[TensorRef, ...]
    mask: TensorRef | None
    kept: TensorRef
    first_step: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Prepare one call of a model on the denoise ranks; its one unit is the call. The leader writes the velocities,
    float32 [branches, C, T, h, w], to `velocities`. Answered by Opened."""

    seq: int
    job: str
    expert: Expert
    geometry: Geometry
    plan: Plan
    x: TensorRef
    sigma: float
    branches: tuple[BranchRef, ...]
    mask: TensorRef | None
    velocities: TensorRef


@dataclass(frozen=True, slots=True)
class DecodeOpen:
    """Prepare a decode on one rank. `latent` is final, in VAE space; frames go to `frames` float32 [F, H, W, 3]."""

    seq: int
    job: str
    weights: Weights
    geometry: Geometry
    latent: TensorRef
    frames: TensorRef
    tiling: Tiling | None


@dataclass(frozen=True, slots=True)
class VaeEncode:
    """Encode frames to a latent on one rank, in one lease; answered by Encoded with the latent."""

    seq: int
    job: str
    weights: Weights
    geometry: Geometry
    frames: TensorRef
    tiling: Tiling | None


@dataclass(frozen=True, slots=True)
class Opened:
    """All that the job needs on this rank is allocated; `units` = steps or decode pieces that leases will count."""

    rank: int
    job: str
    units: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Do units [first, last) of an open job: solver steps of a clip, or pieces of a decode. `helpers`: ranks that own
    a share of the heads meanwhile; each was sent a Help."""

    seq: int
    job: str
    first: int
    last: int
    helpers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attention:
    """Attentions that are alike: `calls` of them on [batch, tokens, heads, size], dtype by its name in torch."""

    calls: int
    batch: int
    heads: int
    size: int
    dtype: str
    scale: float | None
    causal: bool


@dataclass(frozen=True, slots=True)
class Help:
    """Own a share of the heads for a lease of others (PipeDiT's Aco): serve `attention.calls` exchanges of `num_tokens`
    tokens that `plan.denoise` holds. It needs no weights and nothing opened. Answered by LeaseDone."""

    seq: int
    job: str
    last: int
    plan: Plan
    helpers: tuple[int, ...]
    num_tokens: int
    attention: Attention


@dataclass(frozen=True, slots=True)
class LeaseDone:
    """`frames` finished so far (decode only). `attention`: what each row of the solver's table took of a clip's leased
    steps, for helpers; None if they did not all take the same."""

    rank: int
    job: str
    last: int
    spans: tuple[Span, ...]
    frames: int = 0
    use: Use = Use()
    attention: Attention | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a job."""

    seq: int
    job: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The job is at fault (or its files, or memory for it); this rank is fine."""

    rank: int
    job: str
    error: str
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank is lost: an exception that nobody expected, or a broken exchange."""

    rank: int
    error: str
    text: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Ping:
    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class Exit:
    """End politely."""


Message = (Fork | Launched | Forked | Reaped | Ready | Load | Loaded | Unload | Measure | Measured | Encode | Encoded
           | Open | Evaluate | DecodeOpen | VaeEncode | Opened | Lease | Help | LeaseDone | Close | Refused | Failed
           | Ping | Pong | Exit)

MESSAGES: dict[str, type] = {cls.__name__: cls for cls in get_args(Message)}
NOUNS: tuple[type, ...] = (TensorRef, BranchRef, Weights, LoraUse, Expert, Geometry, Plan, Group, SolverTable, Row,
                           Tiling, Span, Memory, Use, Attention)


def encode(message: Message) -> bytes:
    """The JSON of a message, tagged by its class."""
    body = {"type": type(message).__name__, "body": dataclasses.asdict(message)}
    return json.dumps(body, separators=(",", ":")).encode()


def decode(frame: bytes) -> Message:
    """The message of a frame. OutOfStep if its class is not one of this module's."""
    data = json.loads(frame)
    cls = MESSAGES.get(data.get("type"))
    if cls is None:
        raise OutOfStep(f"unknown message {data.get('type')!r}")
    return _build(cls, data["body"])


def _build(cls: type, data: dict[str, Any]) -> Any:
    hints = get_type_hints(cls)
    return cls(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(hint: Any, value: Any) -> Any:
    """Rebuilds tuples and nested nouns from JSON by the field's type."""
    if value is None:
        return None
    if get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        inner = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_value(arg, item) for arg, item in zip(inner, value, strict=True))
    return _build(hint, value) if hint in NOUNS else value
