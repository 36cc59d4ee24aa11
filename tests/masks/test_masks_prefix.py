"""Modules before the first dropout site: found, run once per batch, and nothing else changes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import afterdrop as ad
from afterdrop.masks.lazy_rows import LazyRows, copied_rows
from afterdrop.masks.rows import Layout

GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
MEMBER = ad.Member(0.5, 0.8)


class Counted(nn.Module):
    """Counts the rows that its inner module sees."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.notes = inner, SimpleNamespace(rows=[])  # a list would be restored

    @property
    def rows(self):
        return self.notes.rows

    def forward(self, x):
        self.rows.append(len(x))
        return self.inner(x)


def head_only():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
    model = nn.Sequential(Counted(body), nn.Flatten(), nn.Dropout(0.5), nn.Linear(54, 4))
    return model.eval(), torch.randn(7, 2, 5, 5)


class Blocks(nn.Module):
    """Residual blocks whose last one alone drops, with a residual across its sites."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(9, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=rate, batch_first=True)
            for rate in (0.0, 0.0, 0.3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


class TimeMajor(nn.Module):
    """Flattens time and rows between its modules, and writes into what they return."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.rnn, self.last = nn.Linear(3, 8), nn.GRU(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.first(x.transpose(0, 1).flatten(0, 1)).relu_()
        h, _ = self.rnn(h.unflatten(0, (x.shape[1], x.shape[0])))
        h = nn.functional.dropout(h, 0.4, self.training)
        return self.last(h[-1] + 0.1 * x.mean((1, 2))[:, None])


class Adapter(nn.Module):
    """A low-rank adapter with dropout beside a layer without."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.base, self.drop = nn.Linear(16, 4), nn.Dropout(0.5)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        x = self.body(x)
        return self.base(x) + self.up(self.down(self.drop(x)))


class OneByOne(nn.Module):
    """Rows share a mask, so that samples run one per pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body, self.weight = nn.Linear(5, 8), nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        weight = nn.functional.dropout(self.weight, 0.5, self.training)
        return self.body(x) @ weight.t()


class BodyFirst(OneByOne):
    def forward(self, x):
        h = self.body(x)
        return h @ nn.functional.dropout(self.weight, 0.5, self.training).t()


MODELS = {
    "head": head_only,
    "blocks": lambda: (Blocks().eval(), torch.randint(9, (7, 5))),
    "time-major": lambda: (TimeMajor().eval(), torch.randn(7, 5, 3)),
    "adapter": lambda: (Adapter().eval(), torch.randn(7, 5)),
    "one by one": lambda: (BodyFirst().eval(), torch.randn(7, 5)),
}
FOUND = {
    "head": ("0", "1"),
    "blocks": ("embed", "blocks.0", "blocks.1"),
    "time-major": ("first", "rnn"),
    "adapter": ("body", "base"),
    "one by one": ("body",),
}


@pytest.mark.parametrize("name", MODELS)
def test_sites_list_the_modules_before_the_first_site(name):
    model, x = MODELS[name]()
    found = ad.find_sites(model, x)
    assert found.prefix is not None and found.prefix.names == FOUND[name]
    assert f"computed once per batch: {', '.join(FOUND[name])}" in str(found)
    assert found.batched is (name != "one by one")
    off = ad.find_sites(model, x, compute_once=False)
    assert off.prefix is None and "computed once" not in str(off)


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_gives_what_all_modules_give_in_each_pass(name):
    model, x = MODELS[name]()
    y = torch.randint(4, (7,), generator=torch.Generator().manual_seed(5))
    batches = [(x, y), (x[:4], y[:4])]
    options = {"grid": GRID, "num_samples": 8, "temperatures": (0.5, 2.0)}
    once = ad.evaluate(model, batches, **options)
    each = ad.evaluate(model, batches, compute_once=False, **options)
    small = ad.evaluate(model, batches, memory=2**20, **options)
    for member in each.members:
        for scores in (once, small):
            values, expected = scores.values(member).whole, each.values(member).whole
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory", [None, 2**20])
def test_a_predictor_gives_what_all_modules_give_in_each_pass(name, memory):
    model, x = MODELS[name]()
    once = ad.Predictor(model, MEMBER, num_samples=8, memory=memory)
    each = ad.Predictor(model, MEMBER, num_samples=8, compute_once=False)
    for part in (x, x[:1], x[2:5], x):
        torch.testing.assert_close(once(part), each(part), rtol=1e-5, atol=1e-6)


def test_the_body_runs_once_per_example():
    model, x = head_only()
    counted, y = model[0], torch.randint(4, (7,))
    ad.evaluate(model, [(x, y)], num_samples=4, temperatures=(0.5, 2.0))
    first = list(counted.rows)
    counted.rows.clear()
    ad.evaluate(model, [(x, y), (x[:4], y[:4])], num_samples=100, temperatures=(0.5, 2.0))
    assert counted.rows == [*first, 4]
    predict = ad.Predictor(model, MEMBER, num_samples=100)
    predict(x)
    counted.rows.clear()
    predict(x)
    assert counted.rows == [7]


class Switching(nn.Module):
    """Takes another path where the first number of a batch is negative."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.body, self.drop, self.head = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x):
        if (x[:, 0] < 0).all():
            return self.head(self.body(nn.functional.dropout(x, 0.2, self.training)))
        return self.head(self.drop(self.body(x)))


def test_another_path_than_in_the_dry_run_runs_all_modules():
    model, x = Switching().eval(), torch.randn(6, 5).abs()
    predictors = [
        ad.Predictor(model, MEMBER, num_samples=8, compute_once=once) for once in (True, False)
    ]
    torch.testing.assert_close(*(predict(x) for predict in predictors))
    assert predictors[0]._sites.prefix.names == ("body",)
    model.drop.p = 0.0  # the path with F.dropout did not run in the dry run, and is refused
    for predict in predictors:
        with pytest.raises(ad.AfterdropError, match="another path"):
            predict(-x)


class Stashing(nn.Module):
    """Its body hands its features to the head through an attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.body, self.drop, self.head = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x):
        self.kept = self.body(x)
        return self.head(self.drop(self.kept))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Stashing()
        self.body.drop.p = 0.0
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x):
        self.body(x)
        return self.head(self.drop(self.body.kept))


def test_a_module_that_keeps_attributes_runs_in_each_pass():
    model, x = Inner().eval(), torch.randn(6, 5)
    names = ad.find_sites(model, x).prefix.names
    assert "body" not in names and "body.body" in names
    once = ad.Predictor(model, MEMBER, num_samples=8)(x)
    torch.testing.assert_close(
        once, ad.Predictor(model, MEMBER, num_samples=8, compute_once=False)(x)
    )


def test_a_module_with_a_hook_of_the_user_runs_in_each_pass():
    model, x = head_only()
    seen = []
    model[0].inner[0].register_forward_hook(lambda *_: seen.append(1))
    assert ad.find_sites(model, x).prefix.names == ("0.inner.1", "0.inner.2", "1")
    predict = ad.Predictor(model, MEMBER, num_samples=8, memory=2**20)
    torch.testing.assert_close(
        predict(x), ad.Predictor(model, MEMBER, num_samples=8, compute_once=False)(x)
    )


class Overwriting(nn.Module):
    """A module of the prefix changes its input, which is read later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.body, self.relu = nn.Linear(5, 8), nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        h = self.body(x)
        self.relu(h)
        return self.head(nn.functional.dropout(h, 0.5, self.training))


def test_what_cannot_be_verified_runs_in_each_pass():
    model, x = Overwriting().eval(), torch.randn(6, 5)
    assert ad.find_sites(model, x).prefix is None
    got = ad.Predictor(model, MEMBER, num_samples=8)(x)
    expected = ad.Predictor(model, MEMBER, num_samples=8, compute_once=False)(x)
    assert torch.equal(got, expected)


def test_the_forward_of_modules_is_restored():
    model, x = head_only()
    own = model[0].forward
    model[0].forward = own
    ad.Predictor(model, MEMBER, num_samples=8)(x)
    assert model[0].__dict__["forward"] is own
    assert all("forward" not in module.__dict__ for module in model[0].inner.modules())


LAYERS = st.sampled_from(["linear", "relu", "norm", "dropout", "tanh", "residual"])


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def _layer(kind):
    if kind == "residual":
        return Residual(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)))
    made = {"linear": nn.Linear(6, 6), "relu": nn.ReLU(inplace=True), "norm": nn.LayerNorm(6)}
    return made.get(kind) or (nn.Dropout(0.4) if kind == "dropout" else nn.Tanh())


@settings(max_examples=25, deadline=None)
@given(st.lists(LAYERS, max_size=5), st.integers(1, 5))
def test_any_stack_of_layers_predicts_the_same(kinds, rows):
    torch.manual_seed(9)
    layers = [_layer(kind) for kind in kinds]
    model = nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    x = torch.randn(rows, 6)
    got, expected = (
        ad.Predictor(model, MEMBER, num_samples=4, compute_once=once)(x) for once in (True, False)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["inner", "outer"]))
def test_copied_rows_are_those_of_a_model_that_flattens(inside, rows, copies, order):
    x = torch.arange(inside * rows * 2).view(rows, inside, 2)

    def flattened(x):
        return (x if order == "inner" else x.transpose(0, 1)).flatten(0, 1)

    part = range(rows // 2, rows)
    expected = flattened(x[part.start :].repeat(copies, 1, 1))
    got = copied_rows(flattened(x), Layout(0, order), rows, part, copies)
    assert torch.equal(got, expected)


def test_a_lazy_tensor_has_no_memory_until_an_operator_reads_it():
    lazy = LazyRows(torch.zeros(1), (3,), lambda: torch.ones(3))
    assert lazy.shape == (3,) and not lazy.was_made
    lazy += 1
    assert torch.equal(lazy + 0, torch.full((3,), 2.0))
