"""The fingerprint of weights: equal for equal ones, and another after any change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from afterdrop.models.fingerprint import CHUNK, fingerprint, tensors_fingerprint


class Holder(nn.Module):
    """A module that holds given tensors as buffers."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def of(*tensors):
    return fingerprint(Holder(**{f"t{i}": tensor for i, tensor in enumerate(tensors)}))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_changed_byte_changes_it(dtype, data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    tensor = torch.randint(0, 2, shape).to(dtype)
    raw = tensor.flatten().view(torch.uint8).clone()
    at = data.draw(st.integers(0, len(raw) - 1))
    other = raw.clone()
    other[at] = 1 - raw[at] if dtype == torch.bool else data.draw(st.integers(1, 255)) ^ raw[at]
    assert of(raw.view(dtype).view(shape)) == of(tensor)
    assert of(other.view(dtype).view(shape)) != of(tensor)


def test_what_compares_equal_or_to_nothing_still_counts():
    zero = torch.zeros(3)
    assert of(zero) != of(torch.tensor([0.0, -0.0, 0.0]))
    signs = torch.ones(64)
    flipped = signs.clone()
    flipped[[1, 5]] *= -1  # the highest bits of two words: their sum is 0 in a plain sum
    assert of(signs) != of(flipped)
    nans = [torch.tensor([word], dtype=torch.int32) for word in (0x7FC00000, 0x7FC00001)]
    assert of(nans[0].view(torch.float32)) != of(nans[1].view(torch.float32))
    assert of(nans[0].view(torch.float32)) == of(nans[0].clone().view(torch.float32))


def test_places_shapes_names_and_types_count():
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    assert of(a, b) != of(b, a)
    assert of(a) != of(a.t())
    assert of(a) == of(a.t().contiguous().t())  # strides do not
    assert of(a) != of(a.flatten())
    assert of(a) != of(a.view(torch.int32))
    assert of(torch.zeros(0, 3)) != of(torch.zeros(3, 0))
    assert fingerprint(Holder(x=a)) != fingerprint(Holder(y=a))
    assert of(a[0]) == of(a[0].clone())  # wherever the memory begins
    assert of(torch.arange(9, dtype=torch.uint8)[1:]) == of(torch.arange(1, 9, dtype=torch.uint8))


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 7 * CHUNK + 5])
def test_the_number_of_chunks_at_once_does_not_matter(size):
    tensor = torch.randn(size)
    found = {tensors_fingerprint({"t0": tensor}, at_once) for at_once in (None, 1, 2, 64)}
    assert found == {of(tensor)}
    for at in {0, CHUNK - 2, CHUNK - 1, CHUNK, 2 * CHUNK, size - 1} & set(range(size)):
        other = tensor.clone()
        other[at] += 1
        assert of(other) not in found
    if size > CHUNK:
        assert of(tensor.roll(CHUNK)) not in found  # chunks that change places


def test_it_is_the_same_everywhere():
    """Golden: scores of one machine are compared with weights on another."""
    net = Holder(a=torch.arange(300_000) / 7, b=torch.arange(5).to(torch.bfloat16))
    assert fingerprint(net) == "0948113e39c818b26219e3dd"
    assert fingerprint(nn.Dropout(0.5)) == fingerprint(nn.ReLU())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_finds_what_a_cpu_finds():
    net = nn.Sequential(nn.Linear(700, 701), nn.BatchNorm1d(701))
    assert fingerprint(net.cuda()) == fingerprint(net.cpu())
