"""`Run`: one door to what a training, an evaluation and a choice wrote."""

import dataclasses
import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop import train
from afterdrop.data import ImageSet, TextSet
from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.loop import Execution
from afterdrop.masks.uniforms import Plan
from afterdrop.models import Classifier, LanguageModel
from afterdrop.models.fingerprint import fingerprint
from afterdrop.train.checkpoint import read_checkpoint, write_checkpoint

# The temperature of a chosen member is interpolated in Scores; predictions are exact.
TOLERANCE = {"rtol": 0, "atol": 5e-5}


def copied(run, folder):
    return ad.Run.open(shutil.copytree(run.path, folder / "copy"))


def chosen_instead(run, folder, member):
    """A copy of a run in which another member is chosen."""
    run = copied(run, folder)
    run.save_choice(dataclasses.replace(run.choice, member=member))
    return run


def test_a_run_of_a_classifier_has_everything_that_was_written(image_run):
    run = ad.Run.open(str(image_run.path))
    assert run.trained and run.name == "images" and run.unit == "image"
    assert run.config.data.name == "builtin:digits"
    assert [line["interval"] for line in run.metrics] == [0, 1, 2]
    scores = run.scores("valid")
    assert run.splits == ["valid"] and scores.split == "valid"
    assert isinstance(run.model(), Classifier) and not run.model().training
    assert fingerprint(run.model("best")) == run.fingerprints["best"]
    assert run.choice.fingerprint == scores.protocol.fingerprint == run.fingerprints["best"]
    data = run.data()
    assert isinstance(data, ImageSet) and torch.equal(scores.targets, data.valid.labels)


def test_a_run_of_a_language_model_has_everything_that_was_written(text_run):
    run = ad.Run.open(text_run.path)
    assert run.trained and run.unit == "word" and run.config.objective.window == 6
    assert len(run.metrics) == 3 and run.splits == ["valid"]
    assert isinstance(run.model(), LanguageModel)
    data, scores = run.data(), run.scores()
    assert isinstance(data, TextSet) and torch.equal(scores.targets, data.valid.long())
    assert run.choice.request == scores.request and scores.request.stream == run.stream()


def test_scores_under_the_name_of_another_split_are_refused(own_run):
    """A copy of validation scores must not become a gain on test data."""
    shutil.copy(own_run.layout.scores("valid"), own_run.layout.scores("test"))
    with pytest.raises(FileError, match=r"test\.safetensors holds scores of the split 'valid'"):
        own_run.scores("test")
    assert own_run.scores("valid").split == "valid"


def test_scores_of_neighbouring_labels_are_of_other_data(tmp_path):
    """Labels agree exactly, however large they are."""
    net, labels = nn.Sequential(nn.Linear(2, 50_000), nn.Dropout(0.5)), torch.tensor([49_000])
    nn.init.zeros_(net[0].weight)
    nn.init.zeros_(net[0].bias)

    def scores(labels):
        return ad.evaluate(net, [(torch.ones(1, 2), labels)], grid=ad.Grid((0, 1)), num_samples=2)

    run, kept = ad.Run(tmp_path / "own"), scores(labels)
    run.save_scores(kept)
    weights = kept.protocol.fingerprint
    run.kept_scores(kept.asked, weights, lambda *_, **__: scores(labels))
    with pytest.raises(FileError, match="is of other data"):
        run.kept_scores(kept.asked, weights, lambda *_, **__: scores(labels + 1))


@pytest.mark.parametrize(("ties", "other"), [(1, False), (2, True)])
def test_rounding_may_decide_a_few_ties_between_classes(tmp_path, ties, other):
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    data = [(torch.randn(100, 4), torch.randint(3, (100,)))]
    run, kept = ad.Run(tmp_path / "own"), ad.evaluate(net, data, grid=ad.Grid((0, 1)))
    run.save_scores(kept)
    classes = kept.tensors["deterministic.class"].clone()
    classes[:ties] = (classes[:ties] + 1) % 3
    now = ad.Scores(kept.protocol, {**kept.tensors, "deterministic.class": classes})
    with pytest.raises(FileError, match="other data") if other else nullcontext():
        run.kept_scores(kept.asked, kept.protocol.fingerprint, lambda *_, **__: now)


@pytest.mark.parametrize(
    ("noise", "device", "same"),
    [
        (1e-5, "cpu", True),
        (3e-3, "cpu", False),
        (3e-3, "some GPU", True),
        (2e-2, "some GPU", True),
        (2e-1, "some GPU", False),
    ],
)
def test_another_device_may_round_more(tmp_path, noise, device, same):
    """ResNet-50 in TF32 differs by up to 2 % of the size of its logits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 300))
    data = [(torch.randn(200, 16), torch.randint(300, (200,)))]
    run = ad.Run(tmp_path / "own")
    found = ad.evaluate(net, data, num_samples=4)
    kept = ad.Scores(dataclasses.replace(found.protocol, device=device), found.tensors)
    run.save_scores(kept)

    def noisy(module, inputs, output):
        generator = torch.Generator().manual_seed(0)
        size = noise * output.square().mean().sqrt()
        return output + size * torch.randn(output.shape, generator=generator)

    net.register_forward_hook(noisy)
    now = ad.evaluate(net, data, num_samples=4)
    with nullcontext() if same else pytest.raises(FileError, match="other data"):
        run.kept_scores(kept.asked, kept.protocol.fingerprint, lambda *_, **__: now)


def test_scores_of_other_dropout_rates_are_of_other_code(tmp_path):
    """However far devices may round."""
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    data = [(torch.randn(100, 4), torch.randint(3, (100,)))]
    run, found = ad.Run(tmp_path / "own"), ad.evaluate(net, data, grid=ad.Grid((0, 1)))
    kept = ad.Scores(dataclasses.replace(found.protocol, device="some GPU"), found.tensors)
    run.save_scores(kept)
    name, op, rate, calls = found.protocol.sites[0]
    sites = ((name, op, rate + 1e-3, calls),)
    now = ad.Scores(dataclasses.replace(found.protocol, sites=sites), found.tensors)
    with pytest.raises(FileError, match="other code"):
        run.kept_scores(kept.asked, kept.protocol.fingerprint, lambda *_, **__: now)


@pytest.mark.parametrize("member", [None, ad.Member(0.0, 1.0, 0.8), ad.Member(1.0, 0.5, 1.3)])
def test_the_predictor_of_a_classifier_is_that_of_the_choice(image_run, tmp_path, member):
    run = image_run if member is None else chosen_instead(image_run, tmp_path, member)
    images = run.data().valid.images[:20]
    predict, choice = run.predictor(), run.choice
    assert isinstance(predict, ad.Predictor) and predict.member == choice.member
    assert predict.request.plan == Plan(8, 3, "iid")
    assert torch.equal(predict(images), choice.predictor(run.model())(images))
    expected = ad.Predictor(run.model(), choice.member, 8, 3, masks="iid")(images)
    assert torch.equal(predict(images), expected)
    fewer = run.predictor(num_samples=2)
    assert fewer.request.plan.num_samples == 2


def test_the_deterministic_predictor_of_a_classifier_predicts_what_was_scored(image_run, tmp_path):
    scores = image_run.scores()
    run = chosen_instead(image_run, tmp_path, scores.fit(ad.DET).member)
    valid = run.data().valid
    log_probs = run.predictor()(valid.images).gather(-1, valid.labels.unsqueeze(-1)).squeeze(-1)
    expected = -scores.values(run.choice.member).whole
    torch.testing.assert_close(log_probs.double(), expected, **TOLERANCE)


def predict_text(run, tokens):
    """Log-probability of each token under the run's predictor, in the windows of the choice."""
    predict, stream = run.predictor(), run.choice.request.stream
    assert isinstance(predict, ad.StreamPredictor) and stream.stripes == 1
    inputs = torch.cat([torch.tensor([run.data().vocabulary.eos_id]), tokens[:-1]])
    parts = []
    for x, y in zip(inputs.split(stream.window), tokens.split(stream.window)):
        parts.append(predict(x.unsqueeze(0))[0].gather(-1, y.unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts).double()


@pytest.mark.parametrize(
    "member",
    [None, ad.DET, ad.Member(0.0, 1.0, 0.8), ad.AMC, ad.Member(1.0, 0.5, 1.3)],
    ids=lambda member: "chosen" if member is None else str(member),
)
def test_the_predictor_of_a_language_model_predicts_what_was_scored(text_run, tmp_path, member):
    run = text_run if member is None else chosen_instead(text_run, tmp_path, member)
    found = predict_text(run, run.data().valid.long())
    expected = -run.scores().values(run.choice.member).whole
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("temper", ["mean", "sample"])
@pytest.mark.parametrize("lifetime", ["window", "stream"])
@pytest.mark.parametrize("carry", ["deterministic", "sampled"])
def test_a_stream_is_predicted_as_it_was_evaluated(text_run, tmp_path, carry, lifetime, temper):
    run = copied(text_run, tmp_path)
    request = ad.Request(
        ad.Grid((0.5,), (0, 1), temper),
        Plan(4, seed=2, scheme="antithetic"),
        temperatures=(0.5, 4.0),
        stream=run.stream(window=4, carry=carry, lifetime=lifetime),
        limit=60,
    )
    scores = run.evaluate(request, Execution())
    run.save_scores(scores)
    member = ad.Member(0.5, 1.0, 1.2, temper)
    run.save_choice(dataclasses.replace(ad.select(scores), member=member))
    found = predict_text(run, run.data().valid.long()[:60])
    torch.testing.assert_close(found, -scores.values(member).whole, **TOLERANCE)


def test_a_choice_of_the_last_weights_is_opened_with_them(text_run, tmp_path):
    run = copied(text_run, tmp_path)
    saved = read_checkpoint(run.layout.best)
    for tensor in saved.tensors.values():
        tensor.mul_(1.1)  # the last weights may happen to be the best
    write_checkpoint(run.layout.best, saved)
    for which in ("best", "last"):
        model = run.model(which)
        run.save_choice(dataclasses.replace(run.choice, fingerprint=fingerprint(model)))
        assert run.which() == which and run.fingerprints[which] == fingerprint(model)
        assert fingerprint(run.predictor().model) == fingerprint(model)
    assert run.fingerprints["last"] != run.fingerprints["best"]


def test_damaged_last_weights_do_not_stop_what_needs_the_best(text_run, tmp_path):
    run = copied(text_run, tmp_path)
    model = run.model("best")
    run.save_choice(dataclasses.replace(run.choice, fingerprint=fingerprint(model)))
    run.layout.last.write_bytes(b"damaged")
    assert run.which() == "best"
    assert fingerprint(run.predictor().model) == fingerprint(model)
    shutil.rmtree(run.layout.best.parent)
    with pytest.raises(FileError, match=r"has no weights: .*checkpoint is empty or missing"):
        run.which()


def test_a_text_is_found_from_any_folder_and_where_it_was_moved_to(tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "valid", "test"):
        (text / f"{split}.txt").write_text("one two three\n" * 60)
    settings = {"data.name": "text", "schedule.intervals": 1, "schedule.steps_per_interval": 1}
    config = ad.recipes.load("lm").config.override(settings)
    monkeypatch.chdir(tmp_path)
    train.run(config, "run", device="cpu", progress=False)
    run = ad.Run.open(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    assert run.data().name == "text"
    text.rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"'text' is neither a folder nor one of the sets"):
        run.data()
    assert run.data(tmp_path / "moved").name == "text"


def test_a_new_run_trains_on_the_text_that_its_configuration_names(tmp_path, monkeypatch):
    for name, words in (("text", "one two three\n"), ("sets", "four five six\n")):
        (tmp_path / name).mkdir()
        for split in ("train", "valid", "test"):
            (tmp_path / name / f"{split}.txt").write_text(words * 60)
    settings = {"data.name": "text", "schedule.intervals": 1, "schedule.steps_per_interval": 1}
    config = ad.recipes.load("lm").config.override(settings)
    monkeypatch.chdir(tmp_path)
    train.run(config, "run", data="sets", device="cpu", max_minutes=1e-9, progress=False)
    run = ad.Run.open(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    assert "three" in run.data().vocabulary.tokens
    (tmp_path / "text").rename(tmp_path / "moved")
    assert train.run(config, ".", data="../moved", device="cpu", progress=False).finished


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"nowhere is not a folder; .* afterdrop train"):
        ad.Run.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="file is not a folder"):
        ad.Run.open(tmp_path / "file")


def test_a_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "scores").mkdir()
    with pytest.raises(FileError, match=r"neither a training run nor scores; .*evaluate"):
        ad.Run.open(tmp_path)


def test_what_a_run_does_not_have_yet_is_an_error_that_says_how_to_make_it(image_run, tmp_path):
    run = copied(image_run, tmp_path)
    with pytest.raises(FileError, match=r"no scores of the split 'test'.*--split test"):
        run.scores("test")
    with pytest.raises(FileError, match=r"split='\.\./x'"):
        run.scores("../x")
    run.layout.choice.unlink()
    for read in (lambda: run.choice, run.predictor):
        with pytest.raises(FileError, match=r"has no choice; .* afterdrop select"):
            read()
    assert run.which() == "best"
    run.layout.best.unlink()
    with pytest.raises(FileError, match="no best checkpoint"):
        run.model()
    assert isinstance(run.model("last"), Classifier) and isinstance(run.data(), ImageSet)


def test_a_choice_for_other_weights_is_refused(image_run, text_run, tmp_path):
    run = copied(image_run, tmp_path)
    run.save_choice(dataclasses.replace(run.choice, fingerprint="of others"))
    for read in (run.predictor, run.model):
        with pytest.raises(FileError, match=r"made for other weights .* afterdrop evaluate"):
            read()
    model = image_run.model()
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    with pytest.raises(DataError, match=r"not those that this choice was made for.*any_weights"):
        image_run.choice.predictor(model)
    x = torch.randn(2, 64)
    assert image_run.choice.predictor(model, any_weights=True)(x).shape == (2, 10)
    with pytest.raises(DataError, match="Classifier; this choice is of a LanguageModel"):
        text_run.choice.predictor(model, any_weights=True)


def test_a_run_of_ones_own_model_says_how_to_predict(own_run):
    run = ad.Run.open(own_run.path)
    assert not run.trained and run.unit == "example" and run.fingerprints == {}
    assert run.scores().num_targets == 12 and run.choice.request == run.scores().request
    for read in (run.model, run.predictor, run.data):
        with pytest.raises(FileError, match=r"your own model.*choice\.predictor\(model\)"):
            read()
    with pytest.raises(FileError, match=r"config\.json"):
        _ = run.config


def test_settings_of_a_text_are_refused_for_images(image_run):
    assert image_run.stream() is None
    with pytest.raises(DataError, match="builtin:digits, which is not a text"):
        image_run.stream(window=5)
    with pytest.raises(DataError, match="not 'dev'"):
        image_run.evaluate(ad.Request(ad.Grid(), Plan(4), split="dev"), Execution())
