import collections
import math
import types

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, FileError, MemberError, SiteError
from oracles.zoo import mlp

N = 12
GRID = ad.Grid((0, 1), (0, 0.5, 1))
OPTIONS = {"grid": GRID, "num_samples": 4, "temperatures": (0.25, 4.0)}


def same(a, b):
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name


class Two(nn.Module):
    """Takes two inputs and returns its logits in some form."""

    def __init__(self, form=lambda out: out):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.form = mlp(), form

    def forward(self, a, b, scale=1.0):
        return self.form(self.inner(a + b) * scale)


@pytest.fixture
def two():
    a, b, y = torch.randn(N, 5), torch.randn(N, 5), torch.randint(3, (N,))
    return a, b, y, ad.evaluate(Two(), [((a, b), y)], **OPTIONS)


class Encoding(collections.UserDict):
    """A mapping that is no dict, like transformers' BatchEncoding."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, b],
        lambda a, b: {"a": a, "b": b},
        lambda a, b: collections.OrderedDict(b=b, a=a),
        lambda a, b: Encoding(a=a, b=b),
        lambda a, b: {"a": a, "b": b, "scale": 1.0},
        lambda a, b: {"a": a, "b": b, "scale": torch.tensor(1.0)},
    ],
)
def test_inputs_as_tuple_list_and_mappings(two, wrap):
    a, b, y, expected = two
    same(ad.evaluate(Two(), [(wrap(a, b), y)], **OPTIONS), expected)


@pytest.mark.parametrize(
    "form",
    [
        lambda out: (out,),
        lambda out: (out, torch.zeros(3)),
        lambda out: [out],
        lambda out: types.SimpleNamespace(loss=torch.tensor(1.0), logits=out),
        lambda out: {"logits": out},
        lambda out: {"loss": torch.tensor(1.0), "logits": out},
        lambda out: {"features": out.new_zeros(len(out), 7), "logits": out},
    ],
)
def test_outputs_as_tensor_tuple_and_objects_with_logits(two, form):
    a, b, y, expected = two
    same(ad.evaluate(Two(form), [((a, b), y)], **OPTIONS), expected)


def test_a_tensor_and_a_loader(two):
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    model = mlp()
    expected = ad.evaluate(model, [(x[:8], y[:8]), (x[8:], y[8:])], **OPTIONS)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    same(ad.evaluate(model, loader, **OPTIONS), expected)
    same(ad.evaluate(model, iter(loader), **OPTIONS), expected)
    same(
        ad.evaluate(model, ((x[i : i + 8], y[i : i + 8].tolist()) for i in (0, 8)), **OPTIONS),
        expected,
    )


class Tagger(nn.Module):
    def __init__(self, time_major=False, flat=False):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.time_major, self.flat = mlp(), time_major, flat

    def forward(self, x):
        out = self.inner(x)
        return out.flatten(0, -2) if self.flat else out


def sequences():
    x, y = torch.randn(N, 4, 5), torch.randint(3, (N, 4))
    y[torch.rand(N, 4) < 0.3] = -100
    y[3] = -100  # a whole example that does not count
    return x, y


def test_sequences_with_ignored_targets():
    x, y = sequences()
    model = Tagger()
    scores = ad.evaluate(model, [(x, y)], **OPTIONS)
    counts = y != -100
    assert scores.num_targets == counts.sum()
    examples = torch.arange(N).unsqueeze(1).expand(N, 4)[counts]
    assert torch.equal(scores.tensors["examples"], examples)
    with torch.no_grad():
        lp = model.eval()(x).log_softmax(-1)
    expected = -lp[counts].gather(-1, y[counts].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(scores.values(ad.DET).whole.float(), expected)
    assert torch.equal(scores.clusters.unique(), torch.arange(N - 1))
    by_one = ad.evaluate(model, [(a[None], b[None]) for a, b in zip(x, y)], **OPTIONS)
    torch.testing.assert_close(by_one.values(ad.AMC).whole, scores.values(ad.AMC).whole)
    small = ad.evaluate(model, [(x, y)], memory=2**20, **OPTIONS)
    torch.testing.assert_close(small.values(ad.AMC).whole, scores.values(ad.AMC).whole)


def test_a_first_batch_without_any_target():
    x, y = sequences()
    none = torch.full_like(y, -100)
    scores = ad.evaluate(Tagger(), [(x, none), (x, y)], grid=GRID, num_samples=4)
    assert scores.num_targets == (y != -100).sum()


def test_another_ignore_index():
    x, y = sequences()
    a = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    b = ad.evaluate(Tagger(), [(x, y.where(y >= 0, torch.tensor(1)))], ignore_index=1, **OPTIONS)
    assert b.num_targets == ((y == 0) | (y == 2)).sum() < a.num_targets


def test_time_major_data_is_the_transposed_data():
    x, y = sequences()
    expected = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    got = ad.evaluate(Tagger(), [(x.transpose(0, 1), y.t())], batch_dim=1, **OPTIONS)
    assert torch.equal(got.tensors["targets"], expected.tensors["targets"])
    torch.testing.assert_close(got.values(ad.DET).whole, expected.values(ad.DET).whole)
    assert got.bounds(ad.AMC).variance > 0


def test_flattened_logits_of_batch_major_data():
    x, y = sequences()
    expected = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    try:
        got = ad.evaluate(Tagger(flat=True), [(x, y)], **OPTIONS)
    except ad.AfterdropError:
        return
    torch.testing.assert_close(got.values(ad.DET).whole, expected.values(ad.DET).whole)


def test_flattened_logits_of_time_major_data_are_right_or_refused():
    x, y = sequences()
    expected = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    try:
        got = ad.evaluate(Tagger(flat=True), [(x.transpose(0, 1), y.t())], batch_dim=1, **OPTIONS)
    except ad.AfterdropError:
        return
    torch.testing.assert_close(got.values(ad.DET).whole, expected.values(ad.DET).whole)


def test_logits_and_targets_that_are_each_others_transpose_are_refused():
    class TimeMajor(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x).transpose(0, 1)

    x, y = sequences()
    with pytest.raises(DataError, match="logits of shape"):
        ad.evaluate(TimeMajor(), [(x, y)], **OPTIONS)


def test_classes_in_the_second_dimension_are_refused():
    class Segmenter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x).transpose(1, 2)

    x, y = sequences()
    with pytest.raises(DataError, match="last dimension"):
        ad.evaluate(Segmenter(), [(x, y)], **OPTIONS)


def test_images_of_targets():
    x, y = torch.randn(3, 2, 4, 5), torch.randint(3, (3, 2, 4))
    scores = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    assert scores.num_targets == 24 and int(scores.clusters.max()) == 2


def test_grids_with_the_deterministic_member_alone_need_no_dropout():
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    scores = ad.evaluate(nn.Linear(5, 3), [(x, y)], grid=ad.Grid((0, 1), (0,)), num_samples=1)
    assert scores.members == [ad.DET] and scores.xe(ad.DET).mc_error == 0
    assert ad.select(scores).member.deterministic


def test_one_sample_with_one_alpha():
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    scores = ad.evaluate(mlp(), [(x, y)], grid=ad.Grid((1,), (0, 1)), num_samples=1)
    estimate = scores.xe(ad.AMC)
    assert math.isnan(estimate.mc_error) and estimate.error > 0
    bounds = scores.bounds(ad.AMC)
    assert bounds.jensen_gap == pytest.approx(0, abs=1e-6) == bounds.variance
    assert math.isnan(scores.difference(ad.AMC, ad.DET).mc_error)
    assert ad.select(scores).ranking


def test_float64_models_and_half_precision_logits():
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    model = mlp()
    expected = ad.evaluate(model, [(x, y)], **OPTIONS)
    double = ad.evaluate(model.double(), [(x.double(), y)], **OPTIONS)
    torch.testing.assert_close(
        double.values(ad.AMC).whole, expected.values(ad.AMC).whole, rtol=0, atol=1e-5
    )
    half = ad.evaluate(model.bfloat16(), [(x.bfloat16(), y)], **OPTIONS)
    torch.testing.assert_close(
        half.values(ad.AMC).whole, expected.values(ad.AMC).whole, rtol=0, atol=0.05
    )


def good():
    return torch.randn(N, 5), torch.randint(3, (N,))


def bad_logits(value):
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            out = self.inner(x).clone()
            out[1, 2] = value
            return out

    return Bad()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(value):
    with pytest.raises(DataError, match=r"NaN.*batch"):
        ad.evaluate(bad_logits(value), [good()], **OPTIONS)


def test_logits_that_overflow_in_one_sample_only_are_refused(tmp_path):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(5, 3)

        def forward(self, x):
            dropped = self.drop(torch.ones_like(x))
            return self.out(x) / (dropped.sum(-1, keepdim=True) <= 5).float()

    with pytest.raises(DataError, match="NaN"):
        ad.evaluate(Sometimes(), [good()], resume=tmp_path / "parts", **OPTIONS)
    assert not (tmp_path / "parts").exists()  # there is nothing to keep


@pytest.mark.parametrize("targets", [torch.tensor([0, 3] * 6), torch.tensor([-1, 0] * 6)])
@pytest.mark.parametrize("later", [False, True])
def test_targets_out_of_range_are_refused(targets, later):
    batches = [good()] * later + [(good()[0], targets)]
    with pytest.raises(DataError, match=rf"batch {int(later)}.*3 classes"):
        ad.evaluate(mlp(), batches, **OPTIONS)


@pytest.mark.parametrize(
    "targets",
    [
        torch.rand(N),
        torch.zeros(N).bool(),
        torch.tensor(1),
        torch.nn.functional.one_hot(torch.zeros(N).long(), 3).float(),
    ],
)
def test_targets_that_are_no_classes_are_refused(targets):
    with pytest.raises(DataError, match="targets of batch 0"):
        ad.evaluate(mlp(), [(good()[0], targets)], **OPTIONS)


@pytest.mark.parametrize("count", [N - 1, N + 1, 2 * N])
def test_targets_of_another_number_are_refused(count):
    with pytest.raises(DataError, match="logits of shape"):
        ad.evaluate(mlp(), [(good()[0], torch.zeros(count).long())], **OPTIONS)


@pytest.mark.parametrize(
    "batches",
    [
        [torch.randn(N, 5)],
        [(torch.randn(N, 5),)],
        [(torch.randn(N, 5), torch.zeros(N).long(), 3)],
        [{"x": 1, "y": 2}],
        [None],
        (torch.randn(N, 5), torch.zeros(N).long()),
    ],
)
def test_batches_that_are_no_pairs_are_refused(batches):
    with pytest.raises(DataError, match=r"batch 0.*pair"):
        ad.evaluate(mlp(), batches, **OPTIONS)


@pytest.mark.parametrize("batches", [[], iter([])])
def test_no_data_is_refused(batches):
    with pytest.raises(DataError, match="empty"):
        ad.evaluate(mlp(), batches, **OPTIONS)


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_without_examples_is_refused_or_skipped(first):
    empty = torch.zeros(0, 5), torch.zeros(0).long()
    batches = [empty, good()] if first else [good(), empty]
    try:
        scores = ad.evaluate(mlp(), batches, **OPTIONS)
    except ad.AfterdropError:
        return
    assert scores.num_targets == N


def test_data_that_all_is_ignored_is_refused():
    with pytest.raises(DataError, match="ignore_index"):
        ad.evaluate(mlp(), [(good()[0], torch.full((N,), -100))], **OPTIONS)


def test_one_logit_is_refused():
    with pytest.raises(DataError, match="2 classes"):
        ad.evaluate(mlp(classes=1), [(good()[0], torch.zeros(N).long())], **OPTIONS)


@pytest.mark.parametrize(
    "form", [lambda out: None, lambda out: {}, lambda out: out.argmax(-1), lambda out: "logits"]
)
def test_models_without_logits_are_refused(form):
    with pytest.raises(ad.AfterdropError, match="logits"):
        ad.evaluate(Two(form), [((good()[0], good()[0]), good()[1])], **OPTIONS)


def test_probabilities_are_refused_and_their_logarithms_are_not():
    data = [((good()[0], good()[0]), good()[1])]
    with pytest.raises(DataError, match="gives probabilities"):
        ad.evaluate(Two(lambda out: out.softmax(-1)), data, **OPTIONS)
    logs = ad.evaluate(Two(lambda out: out.softmax(-1).log()), data, **OPTIONS)
    wanted = ad.evaluate(Two(), data, **OPTIONS)
    assert logs.xe(ad.AMC).value == pytest.approx(wanted.xe(ad.AMC).value, rel=1e-6)


def test_a_dictionary_of_several_tensors_must_name_its_logits():
    with pytest.raises(DataError, match="'features', 'out'; name its logits"):
        ad.evaluate(
            Two(lambda out: {"features": out[:, :2], "out": out}),
            [((good()[0], good()[0]), good()[1])],
            **OPTIONS,
        )


def test_a_drop_path_that_also_changes_the_shape_is_refused():
    class MyDropPath(nn.Module):
        drop_prob = 0.5

        def forward(self, x):
            return x[:, :3]

    model = nn.Sequential(nn.Linear(4, 5), MyDropPath())
    with pytest.raises(SiteError, match=r"shape \(3, 5\), model.eval\(\) of \(3, 3\)"):
        ad.evaluate(model, [(torch.randn(3, 4), torch.randint(3, (3,)))], num_samples=2)


def test_a_scalar_output_is_refused():
    with pytest.raises(DataError, match="logits"):
        ad.evaluate(Two(lambda out: out.mean()), [((good()[0], good()[0]), good()[1])], **OPTIONS)


def test_the_loss_before_the_logits_of_a_tuple_is_refused():
    with pytest.raises(ad.AfterdropError, match="logits"):
        ad.evaluate(
            Two(lambda out: (out.mean(), out)), [((good()[0], good()[0]), good()[1])], **OPTIONS
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_samples": 1}, DataError, "num_samples=1"),
        ({"num_samples": 5}, DataError, "num_samples=5"),
        ({"num_samples": 0}, DataError, "num_samples=0"),
        ({"masks": "sobol"}, DataError, "sobol"),
        ({"blocks": 3}, DataError, "blocks=3"),
        ({"temperatures": (2.0, 1.0)}, MemberError, "temperatures"),
        ({"temperatures": (0.0, 1.0)}, MemberError, "temperatures"),
        ({"memory": 1000}, DataError, "memory=1000"),
        ({"rates": ("nothing",)}, SiteError, "nothing"),
        ({"grid": [ad.AMC]}, ad.AfterdropError, "grid"),
        ({"grid": ad.AMC}, ad.AfterdropError, "grid"),
        ({"batch_dim": 5}, ad.AfterdropError, "batch_dim"),
        ({"seed": 1.5}, DataError, "seed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        ad.evaluate(mlp(), [good()], **{**OPTIONS, **options})


def test_a_model_without_dropout_is_refused():
    with pytest.raises(SiteError, match="no dropout"):
        ad.evaluate(nn.Linear(5, 3), [good()], **OPTIONS)


def test_the_protocol_says_how_the_scores_were_made():
    scores = ad.evaluate(mlp(), [good()], seed=7, split="dev", masks="iid", **OPTIONS)
    protocol = scores.protocol
    assert (protocol.plan.num_samples, protocol.plan.seed, protocol.plan.scheme) == (4, 7, "iid")
    assert scores.split == "dev" and protocol.grid == GRID and protocol.num_classes == 3
    assert protocol.sites == (("2", "dropout", 0.5, 1),) and protocol.batched
    assert "K=4" in repr(scores) and "12 targets" in repr(scores)


def test_progress_shows_the_batches(capsys):
    ad.evaluate(mlp(), [good()] * 2, progress=True, **OPTIONS)
    assert "2/2" in capsys.readouterr().err


def test_inputs_whose_other_dimensions_equal_the_batch_size():
    class Side(nn.Module):
        """Takes a matrix that is no batch, of the batch's size by chance."""

        def __init__(self, matrix):
            super().__init__()
            self.inner, self.matrix = mlp(N, 7, 3), matrix

        def forward(self, x, matrix):
            return self.inner(x @ matrix)

    x, y, matrix = torch.randn(N, N), torch.randint(3, (N,)), torch.randn(N, N)
    options = {**OPTIONS, "memory": 2**20}
    try:
        ad.evaluate(Side(matrix), [((x, matrix), y)], **options)
    except ad.AfterdropError as error:
        assert "batch" in str(error)


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (None, [good()], "model is NoneType"),
        (nn.Linear, [good()], "model is the class Linear"),
        ([good()], mlp(), "model is list"),
        (mlp(), 5, "batches is int"),
        (torch.compile(mlp(), backend="eager"), [good()], "model._orig_mod"),
    ],
)
def test_what_is_no_model_or_no_data_is_named(model, batches, message):
    with pytest.raises(ad.AfterdropError, match=message):
        ad.evaluate(model, batches, **OPTIONS)


@pytest.mark.parametrize("temperatures", [2.0, (1.0,), "0.5 2"])
def test_temperatures_are_a_pair(temperatures):
    with pytest.raises(MemberError, match="must be a pair"):
        ad.evaluate(mlp(), [good()], **{**OPTIONS, "temperatures": temperatures})


def test_parts_that_cannot_be_kept_are_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("mine")

    def batches():
        yield good()
        pytest.fail("the second batch was asked for")

    with pytest.raises(FileError, match="cannot write to the folder"):
        ad.evaluate(mlp(), batches(), resume=tmp_path / "file" / "parts", **OPTIONS)
    assert (tmp_path / "file").read_text() == "mine"
