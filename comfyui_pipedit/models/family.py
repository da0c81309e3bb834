"""What a model family tells the engine about its networks: where a sequence is cut and put together again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor of which a rank keeps only its own tokens.

    module: name below the model ("" = the model itself). value: name or position of an argument of its forward, or, with
    `output`, position in the tuple that it returns (0 for a lone tensor). dim: the token dimension.
    num_dims: split only a tensor of so many dimensions (0 = any); Wan's timestep has a token dimension in one variant only.
    """

    module: str
    value: str | int
    dim: int = 1
    num_dims: int = 0
    output: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """A module's output tensor that is put together from all ranks' tokens along `dim`."""

    module: str
    dim: int = 1


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """How a model runs on a slice of its tokens. `attention`: name patterns (fnmatch) of the self-attention modules whose
    Q, K, V must be exchanged; all other modules work token by token or see tensors that every rank has whole."""

    splits: tuple[Split, ...]
    gathers: tuple[Gather, ...]
    attention: tuple[str, ...]
