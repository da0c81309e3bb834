"""What a person chooses about the pool; everything derivable is a property. Nothing here changes results."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from .errors import InvalidJob, not_one_of

PACKAGE_ROOT = Path(__file__).resolve().parent
WORKER_SITE = PACKAGE_ROOT.parent / ".workers"
DEMO_FOLDER = PACKAGE_ROOT / "demo" / "weights"
WORKERS_HINT = ("the workers' packages are missing; mend it with: python install.py "
                "(in the folder of this node pack, with ComfyUI's python)")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Devices, split and deadlines of one pool.

    devices: "auto", "cpu:N", or a comma list of "gpu:I" (ComfyUI's logical numbers).
    split: "auto", "N" (N ranks denoise, the last one decodes too) or "N+M" (N denoise, M decode).
    Seconds: ping_interval, ping_deadline (no answer = stuck), start_deadline, lease_deadline.
    helpers: idle decode ranks compute attention for a share of the heads (Aco); off, since its gain is not measured.
    worker_site: folder with the workers' own packages; worker_python: interpreter of the workers ("" = this one).
    preload: python files that the launcher imports; each may define `configure(runtime)` (called once in each rank),
        which is how model families outside this package are registered.
    """

    devices: str = "auto"
    split: str = "auto"
    worker_python: str = ""
    worker_site: str = str(WORKER_SITE)
    ping_interval: float = 1.0
    ping_deadline: float = 6.0
    start_deadline: float = 120.0
    lease_deadline: float = 600.0
    idle_timeout: float = 0.0
    helpers: bool = False
    preload: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("ping_interval", "ping_deadline", "start_deadline", "lease_deadline"):
            if not getattr(self, name) > 0:
                raise InvalidJob(f"{name} must be more than 0 seconds, not {getattr(self, name)!r}")
        if self.idle_timeout < 0:
            raise InvalidJob(f"idle_timeout must be 0 (never) or more seconds, not {self.idle_timeout!r}")

    @classmethod
    def from_yaml(cls, path: Path) -> EngineConfig:
        """Reads a YAML mapping of this class's fields; unknown keys are refused by name."""
        import yaml

        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise not_one_of(f"setting in {path.name}", key, known)
        if "preload" in data:
            data["preload"] = tuple(data["preload"])
        return cls(**data)
