"""The content of a job as a key: equal keys, equal results. Kept latents are found by it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import torch
from torch import Tensor

from ..job import Job


def job_key(job: Job) -> str:
    """SHA-256 over all that decides a clip's numbers: weights, texts, latents, noise, solver table and guidance."""
    digest = hashlib.sha256()
    facts = {"weights": asdict(job.files.transformer), "cfg": job.cfg, "table": asdict(job.table),
             "branches": job.branches}
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for tensor in (job.positive, job.negative, job.latent, job.noise, *job.noises):
        digest.update(b"none" if tensor is None else _bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    data = tensor.detach().to("cpu").contiguous()
    return str((tuple(data.shape), data.dtype)).encode() + data.flatten().view(torch.uint8).numpy().tobytes()
