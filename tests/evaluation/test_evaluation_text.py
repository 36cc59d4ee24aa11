import dataclasses
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.evaluation import resume_store
from afterdrop.evaluation.engines.generic import GenericEngine
from afterdrop.evaluation.engines.integrated_mean import IntegratedMean
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.family.temperature import partitions
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig, product
from afterdrop.selection import StreamPredictor

EOS = 0


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocabulary=11,
        hidden_sizes=(12, 12),
        input_dropout=0.3,
        inter_layer_dropout=0.2,
        state_dropout=0.4,
        output_dropout=0.5,
    )
    made = LanguageModel(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2.0)  # sharper predictions, so that members differ
    return made.eval()


@pytest.fixture(scope="module")
def text():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 11, (203,), generator=generator)


def evaluated(model, text, stream, grid=None, plan=None, **execution):
    grid, plan = grid or ad.Grid((0, 0.5, 1), (0, 0.5, 1)), plan or Plan(8)
    request = Request(grid, plan, stream=stream)
    return run_text(model, text, EOS, request, Execution(**execution), lines=False)


def values(scores, member):
    return scores.values(member).whole


def test_weights_that_are_packed_for_the_cpu_give_the_same_scores(text):
    config = LanguageModelConfig(vocabulary=11, hidden_sizes=(256,), state_dropout=0.4)
    model = LanguageModel(config).eval()
    assert model.stack.layers[0].weight_h.numel() >= product.PACK_FROM_ELEMENTS

    def scores():
        return evaluated(model, text, StreamSettings(window=10))

    packed = scores()
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        plain = scores()
    for member in (ad.DET, ad.GMC, ad.AMC):
        torch.testing.assert_close(
            values(packed, member), values(plain, member), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(("samples", "batches"), [(2, 1), (64, 8)])
def test_a_short_text_has_several_batches_where_they_take_long(
    model, monkeypatch, tmp_path, samples, batches
):
    """A batch is what an interruption loses; with few samples small ones would be slower."""
    tokens, started = torch.randint(0, 11, (1000,)), []
    run = GenericEngine.run

    def counted(self, batch, number):
        started.append(number)
        if number == batches - 1:
            raise KeyboardInterrupt
        return run(self, batch, number)

    monkeypatch.setattr(GenericEngine, "run", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(model, tokens, StreamSettings(window=32), plan=Plan(samples), resume=tmp_path)
    assert started == list(range(batches))
    assert len(list(tmp_path.glob("part-*"))) == (batches > 1)


def test_deterministic_scores_are_those_of_one_pass_over_the_stream(model, text):
    scores = evaluated(model, text, StreamSettings(window=10))
    inputs = torch.cat([torch.tensor([EOS]), text[:-1]])
    with torch.no_grad():
        logits, _ = model(inputs.unsqueeze(0))
    expected = F.cross_entropy(logits[0], text, reduction="none").double()
    assert torch.equal(scores.targets, text)
    torch.testing.assert_close(values(scores, ad.DET), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("windows", [1, 3, 100])
def test_windows_handed_over_together_do_not_change_the_scores(model, text, windows):
    one = evaluated(model, text, StreamSettings(window=10))
    other = evaluated(model, text, StreamSettings(window=10), windows=windows)
    for member in one.members:
        torch.testing.assert_close(values(one, member), values(other, member), rtol=1e-4, atol=1e-5)


def test_sampled_carry_equals_the_stream_predictor_sample_by_sample(model, text):
    stream = StreamSettings(window=10, carry="sampled")
    scores = evaluated(model, text, stream)
    member = ad.Member(0.5, 1.0)
    predict = StreamPredictor(model, member, num_samples=8, stream=stream)
    inputs = torch.cat([torch.tensor([EOS]), text[:-1]])
    rows = [predict(part.unsqueeze(0))[0] for part in inputs.split(10)]
    expected = F.nll_loss(torch.cat(rows), text, reduction="none").double()
    torch.testing.assert_close(values(scores, member), expected, rtol=1e-4, atol=1e-4)


def test_memory_that_shrinks_midway_does_not_change_a_sampled_stream(model, text):
    """Carried states are those of the samples that ran together, so chunks are planned once."""
    found = []
    for later in (2**28, 2**20):
        stream = StreamSettings(window=10, carry="sampled")
        predict = StreamPredictor(model, ad.AMC, num_samples=20, stream=stream, memory=2**28)
        parts = []
        for part in text[:30].split(10):
            parts.append(predict(part.unsqueeze(0))[0])
            predict._engines.memory.budget = later
        found.append(torch.cat(parts))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("masks", ["lhs", "iid", "antithetic"])
def test_deterministic_carry_equals_the_stream_predictor(model, text, masks):
    stream = StreamSettings(window=10)
    plan = Plan(8, scheme=masks)
    scores = evaluated(model, text, stream, plan=plan)
    member = scores.fit(ad.Member(1.0, 0.5)).member
    predict = StreamPredictor(model, member, num_samples=8, stream=stream, masks=masks)
    inputs = torch.cat([torch.tensor([EOS]), text[:-1]])
    rows = [predict(part.unsqueeze(0))[0] for part in inputs.split(10)]
    expected = F.nll_loss(torch.cat(rows), text, reduction="none").double()
    torch.testing.assert_close(values(scores, member), expected, rtol=1e-4, atol=1e-4)


def test_carries_agree_in_the_first_window_and_differ_later(model, text):
    scores = [
        evaluated(model, text, StreamSettings(10, carry=carry))
        for carry in ("deterministic", "sampled")
    ]
    first, second = (values(s, ad.AMC) for s in scores)
    torch.testing.assert_close(first[:10], second[:10], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(first[10:], second[10:], atol=1e-3)


def test_a_stream_lifetime_keeps_shared_masks_and_redraws_the_others(model, text):
    short = StreamSettings(window=5, carry="sampled", lifetime="stream")
    long = StreamSettings(window=10, carry="sampled", lifetime="stream")
    # With shared masks only, the window length no longer matters.
    shared = LanguageModel(
        dataclasses.replace(
            model.config, input_dropout=0.0, inter_layer_dropout=0.0, output_dropout=0.0
        )
    )
    shared.load_state_dict(model.state_dict())
    a, b = (evaluated(shared, text, s) for s in (short, long))
    torch.testing.assert_close(values(a, ad.AMC), values(b, ad.AMC), rtol=1e-4, atol=1e-4)
    per_window = StreamSettings(window=5, carry="sampled")
    c = evaluated(shared, text, per_window)
    assert not torch.allclose(values(a, ad.AMC), values(c, ad.AMC), atol=1e-3)
    # So windows share masks, and their errors from them.
    assert a.protocol.shared and not c.protocol.shared
    halves = a.values(ad.AMC).halves
    assert a.xe(ad.AMC).mc_error == pytest.approx((halves[0] - halves[1]).mean().abs().item() / 2)


def test_integrated_output_dropout_estimates_the_same_member_with_less_variance(model, text):
    grid = ad.Grid((0,), (0, 1))
    exact = evaluated(model, text, StreamSettings(10), grid=grid, plan=Plan(1024))
    truth = exact.integrated(ad.GMC).at(float("inf")).mean()
    assert abs(truth - values(exact, ad.GMC).mean()) < 0.01
    plain, integrated = [], []
    for seed in range(6):
        few = evaluated(model, text, StreamSettings(10), grid, Plan(8, seed))
        plain.append(few.values(ad.GMC).at(float("inf")).mean() - truth)
        integrated.append(few.integrated(ad.GMC).at(float("inf")).mean() - truth)
    assert torch.stack(integrated).square().mean() < torch.stack(plain).square().mean()
    with pytest.raises(ad.AfterdropError, match="alpha 0"):
        exact.integrated(ad.AMC)


def test_integrated_means_do_not_depend_on_how_many_targets_are_held(model, text):
    protocol = evaluated(model, text, StreamSettings(10)).protocol
    features = torch.randn(10, 2 * 4 * 3, 12, generator=torch.Generator().manual_seed(2))
    targets, counts = text[:30], torch.ones(30, dtype=torch.bool)
    found = []
    for elements in (2**26, 7 * 11):  # all targets, and three of two multipliers at a time
        mean = IntegratedMean(
            model, protocol, targets, counts, lambda: features, partitions, elements
        )
        for _ in range(2):
            mean.add(torch.empty(4, 2, 30, 0))
            mean.end_block()
        found.append(mean.results())
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[1].items():  # products of other sizes round differently
        torch.testing.assert_close(tensor, found[0][name], rtol=1e-5, atol=1e-5)


def test_an_interrupted_sampled_carry_goes_on_with_its_states(model, text, tmp_path, monkeypatch):
    stream = StreamSettings(window=10, carry="sampled")
    whole = evaluated(model, text, stream)
    calls = {"left": 40}
    original = LanguageModel.forward

    def failing(self, *args, **kwargs):
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LanguageModel, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluated(model, text, stream, resume=tmp_path / "p")
    assert list((tmp_path / "p").glob("part-*"))
    monkeypatch.setattr(LanguageModel, "forward", original)
    resumed = evaluated(model, text, stream, resume=tmp_path / "p")
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, resumed.tensors[name]), name


@pytest.mark.parametrize("carry", ["sampled", "deterministic"])
def test_a_missing_part_is_evaluated_again(model, text, tmp_path, monkeypatch, carry):
    stream = StreamSettings(window=10 if carry == "sampled" else 1, carry=carry)
    whole = evaluated(model, text, stream)
    monkeypatch.setattr(resume_store, "_SECONDS", 0.0)  # one part per batch
    evaluated(model, text, stream, resume=tmp_path / "p")
    parts = sorted((tmp_path / "p").glob("part-*"))
    assert len(parts) > 3
    parts[1].unlink()
    warned = pytest.warns(UserWarning, match="continues from a part that is missing")
    with warned if carry == "sampled" else nullcontext():
        resumed = evaluated(model, text, stream, resume=tmp_path / "p")
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, resumed.tensors[name]), name


def test_stripes_cover_every_token_once_and_padding_does_not_count(model, text):
    scores = evaluated(model, text, StreamSettings(10, stripes=7))
    assert scores.num_targets == len(text)
    assert torch.equal(scores.targets.sort().values, text.sort().values)
    assert scores.request.stream.stripes == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"carry": "none"}, "carry='none'"),
        ({"lifetime": "x"}, "lifetime"),
        ({"window": 0}, "window=0"),
    ],
)
def test_bad_stream_settings_are_named(change, message):
    with pytest.raises(DataError, match=message):
        StreamSettings(**change)


def test_a_sampled_text_is_repeatable(model):
    texts = [StreamPredictor(model, ad.AMC, num_samples=4).sample(EOS, 12, seed=3) for _ in "ab"]
    assert texts[0] == texts[1]
    assert texts[0] != StreamPredictor(model, ad.AMC, num_samples=4).sample(EOS, 12, seed=4)
