"""The fingerprint of a model's weights, computed on the device that holds them.

A cryptographic hash reads less than a gigabyte per second on a CPU, and the weights of a GPU would
have to be copied there first. Instead each tensor is read as 32-bit words v_i, and two sums

    Σ_i v_i · w_i   mod 2^64,   w_i odd

are computed with different pseudo-random w. The arithmetic is on integers, so every device gives
the same result. Because w_i is odd, a single changed word always changes both sums. The worst case
is words that differ in their highest bit only (the signs of some weights), where a change goes
unnoticed with a probability of about 2^-64. That is enough to tell weights apart, but not to
withstand a forger.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from afterdrop.masks.uniforms import hashed

# Words that share one vector of multipliers; the sums of the chunks have multipliers of their own.
# Small enough for a CPU to process without several threads, which on a busy machine would wait for
# each other far longer.
CHUNK = 2**13
_CHUNKS_AT_ONCE = {"cpu": 1, "cuda": 512}  # fits into a CPU's cache; few launches on a GPU


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter and buffer; equal weights have equal fingerprints on any device.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> before = fingerprint(net)
        >>> _ = nn.init.zeros_(net.bias)
        >>> fingerprint(net) == before
        False
    """
    return tensors_fingerprint(
        {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    )


def tensors_fingerprint(tensors: Mapping[str, Tensor], chunks_at_once: int | None = None) -> str:
    """The fingerprint of the model whose state dict holds these tensors.

    Args:
        tensors: Parameters and buffers by name.
        chunks_at_once: Chunks of `CHUNK` words per operation. It changes the speed, never the
            result; None is a good number for the device.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> tensors_fingerprint(net.state_dict()) == fingerprint(net)
        True
    """
    state = {name: tensors[name].detach() for name in sorted(tensors)}
    sums = [_sums(tensor, chunks_at_once) for tensor in state.values()]
    # One copy for all sums, so that the CPU waits for a GPU only once.
    found = torch.stack([s.to(sums[0].device) for s in sums]).cpu().tolist() if sums else []
    total = hashlib.blake2b(digest_size=12)
    for (name, tensor), own in zip(state.items(), found):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {own}\n".encode())
    return total.hexdigest()


def _sums(tensor: Tensor, chunks_at_once: int | None) -> Tensor:
    """The two sums of a tensor [2], on its device."""
    words = _words(tensor)
    if words.device.type == "cpu" and len(words) <= CHUNK:
        return _small_sums(words)
    whole = len(words) // CHUNK * CHUNK
    step = (chunks_at_once or _CHUNKS_AT_ONCE.get(words.device.type, 1)) * CHUNK
    parts = [_products(part.view(-1, CHUNK)) for part in words[:whole].split(step) if len(part)]
    if whole < len(words):
        parts.append(_products(words[whole:].unsqueeze(0)))
    sums = torch.cat(parts, 1) if parts else words.new_zeros(2, 0, dtype=torch.int64)
    return (sums * _multipliers(2, sums.shape[1], words.device)).sum(1)


def _small_sums(words: Tensor) -> Tensor:
    """The two sums of a single chunk, in NumPy: models may have thousands of small tensors."""
    inner, outer = _small_multipliers(len(words))
    return torch.from_numpy((inner * words.numpy().astype(np.int64)).sum(-1) * outer)


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as 32-bit words, the last one padded with zero bytes."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    missing = -len(data) % 4
    if missing:
        data = torch.cat([data, data.new_zeros(missing)])
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _products(words: Tensor) -> Tensor:
    """Σ v·w of chunks [C, n]: [2, C]."""
    return (_multipliers(0, words.shape[1], words.device).unsqueeze(1) * words.long()).sum(-1)


def _multipliers(first: int, size: int, device: torch.device) -> Tensor:
    """Two vectors of odd pseudo-random numbers [2, size]; shorter ones are prefixes of longer."""
    return _all_multipliers(first, max(size, CHUNK), device)[:, :size]


@lru_cache(maxsize=64)
def _small_multipliers(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The multipliers of a single chunk on the CPU: of its words [2, size], and of its sums [2]."""
    cpu = torch.device("cpu")
    return _multipliers(0, size, cpu).numpy(), _multipliers(2, 1, cpu)[:, 0].numpy()


@lru_cache(maxsize=8)
def _all_multipliers(first: int, size: int, device: torch.device) -> Tensor:
    return torch.stack([hashed(first + number, size, device) | 1 for number in range(2)])
