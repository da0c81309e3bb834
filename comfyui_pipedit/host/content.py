"""The content of a job as a key: equal keys, equal results. Kept latents are found by it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from ..job import Branch, Job


def job_key(job: Job) -> str:
    """SHA-256 over all that decides a clip's numbers: weights, texts, latents, noise, solver table and guidance."""
    digest = hashlib.sha256()
    facts = {"experts": [asdict(expert) for expert in job.files.experts], "switch": job.switch, "cfg": job.cfg,
             "table": asdict(job.table), "branches": job.branches}
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in _tensors(job):
        digest.update(name.encode() + (b"none" if tensor is None else _bytes(tensor)))
    return digest.hexdigest()


def _tensors(job: Job) -> Iterator[tuple[str, Tensor | None]]:
    for name, branch in (("positive", job.positive), ("negative", job.negative)):
        yield from _branch(name, branch)
    yield from (("latent", job.latent), ("noise", job.noise), ("mask", job.mask))
    yield from (("noises", noise) for noise in job.noises)


def _branch(name: str, branch: Branch | None) -> Iterator[tuple[str, Tensor | None]]:
    if branch is None:
        yield name, None
    else:
        yield name, branch.text
        yield from sorted(branch.extras.items())


def _bytes(tensor: Tensor) -> bytes:
    data = tensor.detach().to("cpu").contiguous()
    return str((tuple(data.shape), data.dtype)).encode() + data.flatten().view(torch.uint8).numpy().tobytes()
