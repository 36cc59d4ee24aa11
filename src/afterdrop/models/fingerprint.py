"""The fingerprint of a model's weights, computed where they lie.

A cryptographic hash reads less than a gigabyte a second on a CPU, and the weights of a GPU would
have to come there first. Instead each tensor is read as 32-bit words v_i, of which two sums

    Σ_i v_i · w_i   mod 2^64,   w_i odd

are made with different pseudo-random w: whole numbers, so that every device finds the same. As w_i
is odd, a single changed word always changes both sums. The worst case are words that differ in
their highest bit only, the signs of some weights, which go unseen once in about 2^64 times. That is
enough to tell weights apart, not to withstand a forger.
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor, nn

from afterdrop.masks.uniforms import hashed

# Words that share one vector of multipliers; then the sums of chunks have theirs. So few that a CPU
# does them without a team of threads, which on a busy machine wait for each other far longer.
_CHUNK = 2**13
_AT_ONCE = {"cpu": 1, "cuda": 512}  # chunks: caches of the one, few launches on the other


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter and buffer: equal weights, equal fingerprint on any device.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> before = fingerprint(net)
        >>> _ = nn.init.zeros_(net.bias)
        >>> fingerprint(net) == before
        False
    """
    state = {n: t.detach() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    names = sorted(state)
    sums = [_sums(state[name]) for name in names]
    # One copy brings all of them, for which the CPU waits once.
    found = torch.stack([s.to(sums[0].device) for s in sums]).tolist() if sums else []
    total = hashlib.blake2b(digest_size=12)
    for name, own in zip(names, found):
        tensor = state[name]
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {own}\n".encode())
    return total.hexdigest()


def _sums(tensor: Tensor) -> Tensor:
    """The two sums of a tensor [2], on its device."""
    words = _words(tensor)
    whole = len(words) // _CHUNK * _CHUNK
    step = _AT_ONCE.get(words.device.type, 1) * _CHUNK
    parts = [_products(part.view(-1, _CHUNK)) for part in words[:whole].split(step) if len(part)]
    if whole < len(words):
        parts.append(_products(words[whole:].unsqueeze(0)))
    sums = torch.cat(parts, 1) if parts else words.new_zeros(2, 0, dtype=torch.int64)
    return (sums * _multipliers(2, sums.shape[1], words.device)).sum(1)


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as 32-bit words, zeros behind them where the last is not full."""
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
    """Two vectors of odd pseudo-random numbers [2, size], of which a shorter one is a part."""
    return _all_multipliers(first, max(size, _CHUNK), device)[:, :size]


@lru_cache(maxsize=8)
def _all_multipliers(first: int, size: int, device: torch.device) -> Tensor:
    return torch.stack([hashed(first + number, size, device) | 1 for number in range(2)])
