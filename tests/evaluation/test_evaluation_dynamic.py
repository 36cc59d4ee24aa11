"""Dynamic evaluation against a plain loop over windows, written from the equations in float64."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.evaluation import StreamSettings
from afterdrop.evaluation.dynamic_evaluation import DynamicEvaluation, gradient_scale
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.models.kernel_support import why_unsupported
from afterdrop.ranks import Ranks

DET_ONLY = ad.Grid((0.0,), (0.0,))
SETTINGS = DynamicEvaluation(eta=0.01, kappa=0.05, epsilon=1e-3, stripes=3)
WINDOW = 4


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocabulary": 7, "hidden_sizes": (5, 5)}
    found = LanguageModel(LanguageModelConfig(**sizes, input_dropout=0.3, output_dropout=0.4))
    return found.double()


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 7, (n,), generator=generator) for n in (62, 30)]


def evaluate(model, texts, settings=SETTINGS, **options):
    options = {"window": WINDOW, "temperatures": (0.5, 2.0), "lines": False, **options}
    return ad.evaluate_text(
        model, texts[1], 0, grid=DET_ONLY, dynamic=settings, training=texts[0], **options
    )


def gradient(model, inputs, targets, state):
    """Of the mean of −log p over the targets, from a state; and log p, and the state after."""
    model.zero_grad()
    logits, after = model(inputs, state)
    log_p = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (-log_p.mean()).backward()
    after = tuple((h.detach(), c.detach()) for h, c in after)
    return {n: p.grad.clone() for n, p in model.named_parameters()}, log_p.detach(), after


def oracle_scale(model, training, stripes, windows=None):
    """m: the root of the mean of g², stripes of equal length, a zero state before the first."""
    rows = training.view(stripes, -1)
    inputs = torch.cat([torch.zeros(1, dtype=torch.int64), training])[:-1].view(stripes, -1)
    inputs[:, 0] = 0
    cuts = range(0, rows.shape[1], WINDOW)[:windows]
    squares = {n: 0.0 for n, _ in model.named_parameters()}
    state = None
    for cut in cuts:
        part = slice(cut, cut + WINDOW)
        grads, _, state = gradient(model, inputs[:, part], rows[:, part], state)
        squares = {n: squares[n] + grads[n] ** 2 / len(cuts) for n in squares}
    return {n: square.sqrt() for n, square in squares.items()}


def oracle(model, text, scale, settings):
    """log p of each token: predict a window, then update, then the next."""
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    if settings.mean == "tensors":
        mean = sum(m.mean() for m in scale.values()) / len(scale)
    else:
        mean = sum(m.sum() for m in scale.values()) / sum(m.numel() for m in scale.values())
    inputs, found, state = torch.cat([torch.zeros(1, dtype=torch.int64), text])[:-1], [], None
    for cut in range(0, len(text), WINDOW):
        part = slice(cut, cut + WINDOW)
        grads, log_p, state = gradient(model, inputs[None, part], text[None, part], state)
        found.append(log_p.flatten())
        with torch.no_grad():
            for n, p in model.named_parameters():
                m = scale[n]
                pull = torch.minimum(torch.ones_like(m), settings.kappa * m / mean)
                new = p - settings.eta * grads[n] / (m + settings.epsilon) + pull * (start[n] - p)
                p.copy_(new)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(start[n])
    return torch.cat(found)


@pytest.mark.parametrize("mean", ["tensors", "elements"])
@pytest.mark.parametrize("kappa", [0.0, 0.05, 5.0])  # the last pulls some weights all the way
def test_log_probabilities_are_those_of_the_equations(mean, kappa, model, texts):
    settings = dataclasses.replace(SETTINGS, mean=mean, kappa=kappa)
    texts[0] = texts[0][:60]  # stripes of equal length
    found = evaluate(model.eval(), texts, settings)
    scale = oracle_scale(model, texts[0], 3)
    wanted = oracle(model, texts[1], scale, settings)
    assert torch.equal(found.targets, texts[1])
    # Scores keep float32; the weights that they come from were float64.
    torch.testing.assert_close(-found.values(ad.DET).whole, wanted, rtol=0, atol=1e-6)
    plain = ad.evaluate_text(
        model, texts[1], 0, grid=DET_ONLY, window=WINDOW, temperatures=(0.5, 2.0), lines=False
    )
    moved = (found.values(ad.DET).whole - plain.values(ad.DET).whole).abs()
    assert moved[:WINDOW].max() < 1e-6 < 1e-3 < moved[WINDOW:].max()  # the first: nothing learnt


def test_statistics_are_the_root_mean_square_of_gradients(model, texts):
    settings = dataclasses.replace(SETTINGS, windows=2)
    model.eval()
    found = gradient_scale(model, texts[0][:60], 0, WINDOW, settings, lines=False)
    wanted = oracle_scale(model, texts[0][:60], 3, windows=2)
    for root, (name, _) in zip(found.roots, model.named_parameters()):
        torch.testing.assert_close(root, wanted[name], rtol=1e-10, atol=1e-14, msg=name)


def test_no_learning_rate_is_the_deterministic_member(model, texts):
    settings = dataclasses.replace(SETTINGS, eta=0.0)
    found = evaluate(model, texts, settings)
    plain = ad.evaluate_text(
        model, texts[1], 0, grid=DET_ONLY, window=WINDOW, temperatures=(0.5, 2.0), lines=False
    )
    torch.testing.assert_close(found.values(ad.DET).whole, plain.values(ad.DET).whole)


def test_weights_and_mode_are_restored_even_after_an_error(model, texts, tmp_path):
    model.train()
    before = [p.detach().clone() for p in model.parameters()]
    scores = evaluate(model, texts)
    scores.save(tmp_path / "scores.safetensors")
    assert ad.Scores.load(tmp_path / "scores.safetensors").request.dynamic == SETTINGS
    texts[1][17] = 99  # not a token of the model
    with pytest.raises(Exception, match="99"):
        evaluate(model, texts)
    assert model.training
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before))


def test_threads_that_share_a_model_take_turns_with_its_weights(model, texts):
    whole = evaluate(model, texts).values(ad.DET).whole
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: evaluate(model, texts), range(9)))
    assert all(torch.equal(scores.values(ad.DET).whole, whole) for scores in found)


def test_a_resumed_evaluation_is_the_whole_one(model, texts, tmp_path):
    whole = evaluate(model, texts)
    parts = evaluate(model, texts, resume=tmp_path / "parts")
    again = evaluate(model, texts, resume=tmp_path / "parts")
    for other in (parts, again):
        assert torch.equal(whole.values(ad.DET).whole, other.values(ad.DET).whole)


def test_it_is_refused_where_weights_cannot_follow_a_text(model, texts):
    stream = StreamSettings(WINDOW)
    with pytest.raises(DataError, match=r"multipliers .*weights of its own; give grid=Grid"):
        ad.Request(ad.Grid(), Plan(4), stream=stream, dynamic=SETTINGS)
    with pytest.raises(DataError, match="a text that is read in order; leave out dynamic="):
        ad.Request(DET_ONLY, Plan(4), dynamic=SETTINGS)
    with pytest.raises(DataError, match=r"stripes=2: .*give stripes=1"):
        evaluate(model, texts, stripes=2)
    request = ad.Request(DET_ONLY, Plan(4), stream=stream, dynamic=SETTINGS)
    with pytest.raises(DataError, match="give training=, the training text"):
        run_text(model, texts[1], 0, request, Execution())
    with pytest.raises(DataError, match="ranks cannot share it"):
        run_text(model, texts[1], 0, request, Execution(ranks=Ranks(0, 2)), training=texts[0])
    with pytest.raises(DataError, match="no parameter requires a gradient"):
        evaluate(model.requires_grad_(False), texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta": -1.0}, "eta=-1.0 must be a number of at least 0"),
        ({"kappa": float("nan")}, "kappa=nan"),
        ({"epsilon": 0.0}, "epsilon=0.0 must be a positive number"),
        ({"mean": "rows"}, "mean='rows'"),
        ({"windows": 0}, "windows=0 must be at least 1"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(DataError, match=message):
        DynamicEvaluation(**options)


def test_kernels_refuse_it():
    pytest.importorskip("triton", reason="kernels need Triton, which is not installed")
    from afterdrop.evaluation.engines.text_fused import SUPPORTED

    request = ad.Request(DET_ONLY, Plan(4), stream=StreamSettings(WINDOW), dynamic=SETTINGS)
    assert "dynamic is DynamicEvaluation" in why_unsupported(request, SUPPORTED)


def test_a_choice_of_dynamic_scores_makes_no_predictor(model, texts):
    choice = ad.select(evaluate(model, texts), resamples=0, folds=0)
    with pytest.raises(DataError, match="dynamic evaluation"):
        choice.predictor(model)
