"""The kernels of the generic engine: masks of any site, and sums of any model's logits."""

import kernel_device
import pytest
import torch
from tiny_evaluation import Engines
from torch import nn

import afterdrop as ad
from afterdrop.evaluation.engines.generic import Operations
from afterdrop.evaluation.engines.kernel_sums import KernelSums
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.request import Request
from afterdrop.kernels.family_sums import LOWEST_MEAN_LOG_P
from afterdrop.kernels.mask_ops import fused_draw_mask
from afterdrop.masks.rows import Layout, Rows, draw_row_mask
from afterdrop.masks.uniforms import Plan, site_key

pytestmark = kernel_device.quiet
device = kernel_device.device


LAYOUTS = [
    (lambda n: (n, 5), Layout(0)),
    (lambda n: (3, n, 5), Layout(1)),
    (lambda n: (4 * n, 5), Layout(0)),
    (lambda n: (4 * n, 5), Layout(0, "outer")),
    (lambda n: (2, n, 3, 4), Layout(1)),
]


@pytest.mark.parametrize("multipliers", [(0.5,), (0.3, 1.0)])
@pytest.mark.parametrize(
    ("plan", "samples"),
    [
        (Plan(100, seed=5), range(53, 60)),
        (Plan(4), range(2)),
        (Plan(4), range(4)),  # both halves: left to the plain form
        (Plan(4, scheme="iid"), range(4)),  # not a Latin hypercube: likewise
    ],
)
def test_masks_equal_the_plain_form_to_the_bit(device, plan, samples, multipliers):
    rows = Rows(plan, multipliers, samples, torch.tensor([3, 99], device=device))
    rates = rows.multipliers.rates("x", 0.6)
    for shape, layout in LAYOUTS:
        like, key = torch.zeros(shape(len(rows)), device=device), site_key(1, "x", 0)
        fast = fused_draw_mask(rows, key, layout, like, rates)
        plain = draw_row_mask(rows, key, layout, like, rates)
        assert torch.equal(fast.mask, plain.mask)
        assert (fast.dim, fast.sizes) == (plain.dim, plain.sizes)
        assert torch.equal(torch.as_tensor(fast.rate).cpu(), torch.as_tensor(plain.rate).cpu())


def strided(shape, dtype, device, kind):
    """Random numbers with zeros, an infinity and a NaN, in a memory layout of a kind."""
    x = torch.randn(shape, dtype=torch.float64, device=device).mul_(100)
    x.view(-1)[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")], device=device)
    x = x.to(dtype)
    if kind == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "sliced":
        return torch.stack([x, x], -1)[..., 1]
    if kind == "expanded":
        return x.narrow(-1, 0, 1).expand(shape)
    return x


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("multipliers", [(0.7,), (0.3, 1.0)])
def test_dropout_equals_the_plain_form_to_the_bit(device, dtype, kind, multipliers):
    plan = Plan(40, seed=5)
    examples = torch.tensor([3, 99])
    rows, there = (
        Rows(plan, multipliers, range(20, 38), examples.to(where)) for where in (device, "cpu")
    )
    rates = rows.multipliers.rates("x", 0.6)
    for shape, layout in LAYOUTS:
        x, key = strided(shape(len(rows)), dtype, device, kind), site_key(1, "x", 0)
        before = x.clone()
        fast = fused_draw_mask(rows, key, layout, x, rates).drop(x)
        assert fast.shape == x.shape
        # Compared with a CPU: a GPU computes 1 / (1 - rate) differently if the rate is a number.
        fast, plain = fast.cpu(), x.cpu()
        slow = draw_row_mask(there, key, layout, plain, rates).drop(plain)
        # The interpreter truncates to bfloat16 where a device rounds.
        cut = device.type == "cpu" and dtype == torch.bfloat16
        rtol = torch.finfo(dtype).eps if cut else 0
        torch.testing.assert_close(fast, slow, rtol=rtol, atol=0, equal_nan=True)
        signs = [y.signbit() | y.isnan() for y in (fast, slow)]
        assert torch.equal(*signs)  # -0.0 equals 0.0 above
        torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


def test_dropout_of_whole_features_equals_the_plain_form(device):
    rows = Rows(Plan(4), (1.0,), range(2), torch.tensor([3, 4], device=device))
    x = torch.randn(4, 3, 5, device=device)
    like = x.new_empty(()).expand(4, 3, 1)
    fast = fused_draw_mask(rows, 9, Layout(0), like, (0.5,)).drop(x)
    assert torch.equal(fast, draw_row_mask(rows, 9, Layout(0), like, (0.5,)).drop(x))


SCORES = [
    (lambda n: (n, 2, 3, 5), Layout(0)),
    (lambda n: (4 * n, 6, 6), Layout(0)),  # rows · heads
    (lambda n: (n, 1, 4, 1), Layout(0)),
    (lambda n: (n, 3, 37), Layout(0)),
    (lambda n: (4 * n, 3, 3), Layout(0, "outer")),  # left to the plain form
    (lambda n: (2, n, 3, 4), Layout(1)),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("multipliers", [(0.7,), (0.3, 1.0)])
def test_attention_matches_the_plain_form(device, dtype, causal, multipliers):
    plan = Plan(40, seed=5)
    rows = Rows(plan, multipliers, range(20, 38), torch.tensor([3, 99], device=device))
    rates = rows.multipliers.rates("x", 0.6)
    for shape, layout in SCORES:
        scores = torch.randn(shape(len(rows)), device=device).mul_(10).to(dtype)
        scores.view(-1)[1::7] = float("-inf")
        scores[:, ..., 0] = 1  # every query sees a key
        scores[-1, ..., -1, :] = float("-inf")  # except one
        key = site_key(1, "x", 0)
        slow = draw_row_mask(rows, key, layout, scores, rates).attention(scores.clone(), causal)
        fast = fused_draw_mask(rows, key, layout, scores, rates).attention(scores.clone(), causal)
        # The kernel rounds a softmax in float32 or wider once, the plain form twice.
        rtol = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(fast, slow, rtol=rtol, atol=1e-7, equal_nan=True)
        assert fast.isnan().any()
        if dtype != torch.float16:  # its smallest weights round to 0 in one form only
            assert torch.equal(fast == 0, slow == 0)


def test_attention_of_more_keys_than_fit_is_left_to_the_plain_form(device):
    rows = Rows(Plan(4), (1.0,), range(2), torch.tensor([3, 4], device=device))
    scores = torch.randn(4, 3, 5, device=device)
    found = []
    for longest in (4096, 4):  # there are 5 keys
        mask = fused_draw_mask(rows, 9, Layout(0), scores, (0.5,), longest_line=longest)
        found.append(mask.attention(scores.clone(), True))
    plain = draw_row_mask(rows, 9, Layout(0), scores, (0.5,)).attention(scores.clone(), True)
    assert torch.equal(found[1], plain)
    torch.testing.assert_close(*found)


def test_dropout_preserves_the_strides_of_its_input(device):
    """As torch's own dropout does, so that later views need no copy."""
    rows = Rows(Plan(4), (1.0,), range(2), torch.tensor([3, 4], device=device))
    x = torch.randn(7, 4, 6, device=device).transpose(0, 1)
    assert fused_draw_mask(rows, 9, Layout(0), x, (0.5,)).drop(x).stride() == x.stride()


def test_masks_without_rows_are_left_to_the_plain_form(device):
    rows = Rows(Plan(4), (1.0,), range(1), torch.tensor([3], device=device))
    like = torch.zeros(7, device=device)
    fast = fused_draw_mask(rows, 9, Layout(None), like, (0.5,))
    assert torch.equal(fast.mask, draw_row_mask(rows, 9, Layout(None), like, (0.5,)).mask)


KERNEL_SUMS = Operations(sums=KernelSums, kernels=True)


def evaluations(device, scale):
    """The same evaluation with the plain accumulator and with the kernels, and their engines."""
    model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 7))
    with torch.no_grad():
        model[3].weight.mul_(scale)
    x, y = torch.randn(4, 5), torch.tensor([0, -100, 6, 3])
    batches = [(x.to(device), y.to(device))]
    request = Request(ad.Grid((0, 0.5, 1), (0, 0.5, 1)), Plan(6), temperatures=(0.125, 8))
    engines = Engines(KERNEL_SUMS, Operations())
    plain, fused = (
        run_evaluation(model.to(device), batches, request, Execution(), choose_engines=choose)
        for choose in (Engines(), engines)
    )
    return plain, fused, engines.made


def test_kernels_match_every_result_of_the_plain_accumulator(device):
    plain, fused, engines = evaluations(device, scale=1)
    assert len(engines) == 1  # the plain one was not needed
    assert set(plain.tensors) == set(fused.tensors)
    for name, tensor in plain.tensors.items():
        other = fused.tensors[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        # float32 sums over 6 samples and 7 classes; halves use every fourth power of the ladder
        near = 2e-3 if name.endswith("half") else 5e-5
        torch.testing.assert_close(other, tensor, rtol=1e-5, atol=near, msg=lambda m, n=name: n + m)


def test_probabilities_too_low_for_plain_sums_are_summed_in_log_space(device):
    plain, fused, engines = evaluations(device, scale=600)
    assert [engine.batches for engine in engines] == [[0], [0]]
    assert float(plain.field("sampled", "lowest").min()) < LOWEST_MEAN_LOG_P
    for name, tensor in plain.tensors.items():
        assert torch.equal(fused.tensors[name], tensor), name


class Small(nn.Module):
    """Dropout of every form that has a kernel, and one that has none."""

    def __init__(self):
        super().__init__()
        self.embedding, self.spatial = nn.Embedding(5, 4), nn.Dropout1d(0.3)
        options = {"dropout": 0.4, "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(4, 2, 6, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(4, 5)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(3, device=tokens.device)
        return self.out(self.encoder(self.spatial(self.embedding(tokens)), mask, is_causal=True))


def test_scores_are_the_same_with_masks_from_kernels(device):
    """Without the kernels for sums over samples, which interpolate."""
    torch.manual_seed(0)
    model, tokens = Small().to(device), torch.randint(5, (3, 3)).to(device)
    request = Request(ad.Grid((0, 1), (0.5, 1)), Plan(4), temperatures=(0.25, 4))
    plain, fused = (
        run_evaluation(
            model, [(tokens, tokens)], request, Execution(), choose_engines=Engines(operations)
        )
        for operations in (Operations(), Operations(fused_draw_mask, kernels=True))
    )
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(fused.tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_nan_logits_are_refused_with_the_batch(device):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(5, 3)

        def forward(self, x):
            logits = self.out(self.drop(x))
            # Only dropped inputs are broken: the deterministic pass is finite.
            return logits + torch.where((self.drop(x) == 0).any(), float("nan"), 0.0)

    batches = [(torch.ones(2, 5, device=device), torch.tensor([0, 1], device=device))]
    request, engines = Request(ad.Grid((0, 1), (0, 1)), Plan(4)), Engines(KERNEL_SUMS, Operations())
    with pytest.raises(ad.AfterdropError, match="NaN or infinite logits for batch 0"):
        run_evaluation(Broken().to(device), batches, request, Execution(), choose_engines=engines)
    assert [engine.batches for engine in engines.made] == [[0], [0]]
