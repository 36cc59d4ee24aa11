"""The family of a model that mixes softmaxes: members, temperatures on components, refusals."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import afterdrop as ad
from afterdrop.errors import MemberError, ScoresError
from afterdrop.evaluation import resume_store
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.evaluation.scores import Scores
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.family.power_mean import log_power_mean
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.selection import StreamPredictor

EOS, V = 0, 11
CONFIG = LanguageModelConfig(
    V, (12,), 5, softmax_components=3, state_dropout=0.3, output_dropout=0.4, projection_dropout=0.2
)
GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
COMPONENTS = dataclasses.replace(GRID, temper="component")


def built(config=CONFIG):
    torch.manual_seed(0)
    made = LanguageModel(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2.5)  # sharper predictions, so that members differ
    return made.eval()


@pytest.fixture(scope="module")
def model():
    return built()


@pytest.fixture(scope="module")
def text():
    return torch.randint(0, V, (83,), generator=torch.Generator().manual_seed(1))


def evaluated(model, text, grid=GRID, carry="deterministic", **execution):
    stream = StreamSettings(10, carry=carry)
    request = Request(grid, Plan(8), temperatures=(0.25, 4.0), stream=stream)
    return run_text(model, text, EOS, request, Execution(**execution), lines=False)


def sampled(model, text, temperature=1.0):
    """Log-probabilities [M, S, N, V] of the samples, from the passes of an evaluation.

    A window has two passes, one per block of four samples, both multipliers together.
    """
    found = []
    with (
        model.mixture.tempered(temperature),
        model.register_forward_hook(lambda module, args, out: found.append(out[0])),
    ):
        evaluated(model, text, windows=1)
    halves = [p.unflatten(0, (2, 4)) for p in found if len(p) == 8]
    assert len(halves) == 2 * 9
    windows = [torch.cat(pair, 1) for pair in zip(halves[::2], halves[1::2])]
    return torch.cat(windows, 2)[:, :, : len(text)]


def test_sites_include_the_latent_dropout(model):
    found = {site.name for site in ad.find_sites(model, torch.zeros(2, 3, dtype=torch.int64))}
    assert any("mixture.projection_dropout" in name for name in found)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_members_are_power_means_of_the_samples_log_probabilities(model, text, alpha):
    scores = evaluated(model, text)
    samples = sampled(model, text)
    torch.testing.assert_close(
        samples.exp().sum(-1), torch.ones(samples.shape[:-1]), atol=1e-5, rtol=0
    )
    for row, multiplier in enumerate((0.5, 1.0)):
        log_mean = log_power_mean(samples[row].double(), alpha)
        for temperature in (1.0, 1.3):
            wanted = F.cross_entropy(log_mean / temperature, text, reduction="none")
            found = scores.values(ad.Member(alpha, multiplier, temperature)).whole
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_nothing_that_needs_linear_logits_applies(model, text):
    scores = evaluated(model, text)
    assert not scores.has("integrated")
    with pytest.raises(ScoresError, match="linear in the features"):
        scores.integrated(ad.GMC)
    one = built(dataclasses.replace(CONFIG, softmax_components=1))
    assert evaluated(one, text).has("integrated")


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_temperature_on_components_acts_before_they_are_mixed(model, text, alpha):
    scores = evaluated(model, text, COMPONENTS)
    for temperature in (0.8, 1.4):
        samples = sampled(model, text, temperature)
        for row, multiplier in enumerate((0.5, 1.0)):
            log_mean = log_power_mean(samples[row].double(), alpha)
            wanted = F.cross_entropy(log_mean, text, reduction="none")
            member = ad.Member(alpha, multiplier, temperature, "component")
            found = scores.values(member).whole
            # Between the 13 nodes of temperature it is interpolated.
            torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
            on_mean = scores.values(ad.Member(alpha, multiplier, temperature)).whole
            assert (on_mean - wanted).abs().max() > 1e-2


def test_det_has_a_temperature_on_components_of_its_own(model, text):
    scores = evaluated(model, text, dataclasses.replace(COMPONENTS, multipliers=(0.0,)))
    inputs = torch.cat([torch.tensor([EOS]), text[:-1]]).unsqueeze(0)
    member = ad.Member(0, 0, 1.4, "component")
    with torch.no_grad(), model.mixture.tempered(1.4):
        wanted = F.nll_loss(model(inputs)[0][0], text, reduction="none").double()
    torch.testing.assert_close(scores.values(member).whole, wanted, rtol=2e-4, atol=2e-4)
    assert scores.members == [ad.Member(0, 0, temper="component")]
    fitted = scores.fit(member).member
    assert scores.xe(fitted).value <= min(scores.xe(ad.DET).value, scores.xe(member).value) + 1e-6
    assert not torch.equal(scores.values(member).whole, scores.values(ad.Member(0, 0, 1.4)).whole)


@pytest.mark.parametrize("carry", ["deterministic", "sampled"])
@pytest.mark.parametrize("member", [ad.Member(0.5, 1, 1.2, "component"), ad.Member(1, 0.5, 0.9)])
def test_the_stream_predictor_is_the_evaluated_member(model, text, carry, member):
    grid = dataclasses.replace(GRID, temper=member.temper)
    scores = evaluated(model, text, grid, carry)
    stream = StreamSettings(10, carry=carry)
    predict = StreamPredictor(model, member, num_samples=8, stream=stream)
    inputs = torch.cat([torch.tensor([EOS]), text[:-1]])
    found = torch.cat([predict(part.unsqueeze(0))[0] for part in inputs.split(10)])
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(83), atol=1e-5, rtol=0)
    wanted = F.nll_loss(found, text, reduction="none").double()
    torch.testing.assert_close(scores.values(member).whole, wanted, rtol=3e-4, atol=3e-4)
    assert model.mixture.temperature == 1


def test_a_deterministic_predictor_tempers_components(model, text):
    member = ad.Member(0, 0, 1.4, "component")
    found = StreamPredictor(model, member)(text[:10].unsqueeze(0))
    with torch.no_grad(), model.mixture.tempered(1.4):
        torch.testing.assert_close(found, model(text[:10].unsqueeze(0))[0])


def test_bounds_hold_at_a_temperature_on_components(model, text):
    scores = evaluated(model, text, COMPONENTS)
    for alpha in (0.0, 0.5, 1.0):
        found = scores.bounds(ad.Member(alpha, 1, 1.3, "component"))
        total = found.bound + found.jensen_gap + found.normaliser_gap
        assert found.objective == pytest.approx(total, abs=1e-6)
        assert found.jensen_gap >= -1e-9 and found.normaliser_gap >= -1e-6
    with pytest.raises(ScoresError, match="temper='sample'"):
        scores.bounds(ad.Member(0, 1, 1.3))
    with pytest.raises(ScoresError, match="temper='component'"):
        evaluated(model, text).fit(ad.Member(1, 1, temper="component"))


def test_a_choice_of_components_survives_files_and_predicts(model, text, tmp_path):
    scores = evaluated(model, text, COMPONENTS)
    scores.save(tmp_path / "scores")
    choice = ad.select(Scores.load(tmp_path / "scores"))
    assert {c.member.temper for c in choice.ranking} == {"component"}
    choice.save(tmp_path / "choice.json")
    again = ad.Choice.load(tmp_path / "choice.json")
    assert again.member == choice.member and "on each component" in str(again)
    assert again.predictor(model)(text[:4].unsqueeze(0)).shape == (1, 4, V)
    assert again.test_request("test").grid.temper == "component"


@pytest.mark.parametrize("carry", ["deterministic", "sampled"])
def test_an_interrupted_evaluation_goes_on_to_the_bit(model, text, tmp_path, monkeypatch, carry):
    monkeypatch.setattr(resume_store, "_SECONDS", 0.0)  # one part per batch
    options = {"carry": carry, "windows": 2}
    whole = evaluated(model, text, COMPONENTS, **options)
    original, left = LanguageModel.forward, [14]

    def failing(self, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LanguageModel, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluated(model, text, COMPONENTS, resume=tmp_path / "p", **options)
    assert list((tmp_path / "p").glob("part-*"))
    monkeypatch.setattr(LanguageModel, "forward", original)
    resumed = evaluated(model, text, COMPONENTS, resume=tmp_path / "p", **options)
    assert {"tempered.xe", "tempered_deterministic.xe"} <= set(whole.tensors)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, resumed.tensors[name]), name


def test_components_are_refused_where_there_are_none(model, text):
    one = built(dataclasses.replace(CONFIG, softmax_components=1))
    with pytest.raises(MemberError, match=r"softmax_components above 1.*temper='sample'"):
        evaluated(one, text, COMPONENTS)
    with pytest.raises(MemberError, match="softmax_components above 1"):
        StreamPredictor(one, ad.Member(1, 1, 1.2, "component"))
    with pytest.raises(MemberError, match=r"temper='component' is for texts"):
        ad.evaluate(torch.nn.Linear(2, 2), [], grid=COMPONENTS)
    rows = {"embedding_dropout": 0.2, "embedding_rows": "input_and_softmax"}
    with pytest.raises(MemberError, match=r"embedding_rows is 'input_and_softmax'; use"):
        evaluated(built(dataclasses.replace(CONFIG, **rows)), text, COMPONENTS)
    with pytest.raises(MemberError, match="'component'"):
        ad.Member(1, 1, temper="components")
