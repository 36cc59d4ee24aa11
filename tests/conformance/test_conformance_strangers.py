"""Models of other libraries, whose dropout is controlled and which are left as they were."""

import pytest
import torch
import torch.nn.functional as F

import afterdrop as ad


def _tokens(*shape):
    return torch.randint(0, 20, shape)


def test_x_transformers():
    library = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    layers = library.Decoder(
        dim=16, depth=1, heads=2, attn_dim_head=8, attn_dropout=0.2, ff_dropout=0.3
    )
    model = library.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers).eval()
    tokens = _tokens(4, 9)
    found = ad.check(model, [(tokens[:, :-1], tokens[:, 1:])], class_dim=-1)
    assert found.passed, found


def test_layer_drop_of_x_transformers_stays_off_and_says_so():
    library = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    layers = library.Decoder(
        dim=16, depth=2, heads=2, attn_dim_head=8, layer_dropout=0.2, ff_dropout=0.3
    )
    model = library.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers).eval()
    tokens = _tokens(4, 9)
    batches = [(tokens[:, :-1], tokens[:, 1:])]
    with pytest.warns(UserWarning, match="attn_layers"):
        scores = ad.evaluate(model, batches, num_samples=4, class_dim=-1)
    assert "attn_layers draws python random" in str(ad.select(scores))


def test_a_performer_keeps_its_projections():
    library = pytest.importorskip("performer_pytorch", reason="performer-pytorch is not installed")
    model = library.PerformerLM(
        num_tokens=20,
        max_seq_len=16,
        dim=16,
        depth=1,
        heads=2,
        attn_dropout=0.1,
        ff_dropout=0.1,
        nb_features=8,
        feature_redraw_interval=5,
    ).eval()
    tokens = _tokens(3, 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(tokens)
        ad.evaluate(model, [(tokens, tokens)] * 3, num_samples=20, class_dim=-1)
        ad.Predictor(model, ad.AMC, num_samples=20, class_dim=-1)(tokens)
        assert torch.equal(model(tokens), expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_awd_lstm_of_fastai():
    """Masks of its own, logits in a tuple, state between calls, and weights that it sets itself."""
    awd = pytest.importorskip("fastai.text.models.awdlstm", reason="fastai is not installed")
    core = pytest.importorskip("fastai.text.models.core", reason="fastai is not installed")
    torch.manual_seed(0)
    config = {**awd.awd_lstm_lm_config, "emb_sz": 8, "n_hid": 12, "n_layers": 2, "embed_p": 0.2}
    model = core.get_language_model(awd.AWD_LSTM, 20, config).eval()
    rates = ("0.encoder_dp.embed_p", "0.input_dp.p", "0.hidden_dps.0.p", "1.output_dp.p")
    rates += tuple(f"0.rnns.{layer}.weight_p" for layer in range(2))
    options = {"rates": rates, "logits": 0, "reset": lambda model: model.reset()}
    tokens = _tokens(4, 9)
    batches = [(tokens[:, :-1], tokens[:, 1:])]
    found = ad.check(model, batches, num_samples=100, **options)
    assert found.passed, found
    model.reset()
    expected = model(tokens)[0]
    before = [weight for rnn in model[0].rnns for weight in rnn.module._flat_weights]
    scores = ad.evaluate(model, batches, num_samples=4, **options)
    assert scores.values(ad.AMC).whole.isfinite().all()
    after = [weight for rnn in model[0].rnns for weight in rnn.module._flat_weights]
    assert all(a is b for a, b in zip(after, before, strict=True))
    model.reset()
    assert torch.equal(model(tokens)[0], expected)


def test_a_graph_network_is_predicted_as_it_was_evaluated():
    library = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    nodes, classes = 30, 4
    model = library.GCN(8, 16, 2, classes, dropout=0.5).eval()
    x, edges = torch.randn(nodes, 8), torch.randint(0, nodes, (2, 120))
    targets = torch.randint(0, classes, (nodes,))
    targets[::3] = -100  # nodes that do not count
    grid = ad.Grid((1,), (0, 1))
    scores = ad.evaluate(model, [((x, edges), targets)], grid=grid, num_samples=400)
    predicted = ad.Predictor(model, ad.AMC, num_samples=400)(x, edges)
    model.train()
    with torch.no_grad():
        own = torch.stack([model(x, edges).softmax(-1) for _ in range(1000)]).mean(0).log()
    estimate = scores.xe(ad.AMC)
    tolerance = 4 * estimate.mc_error + 0.02  # 0.02: four errors of 1,000 passes of its own
    for log_probs in (predicted, own):
        assert F.cross_entropy(log_probs, targets).item() == pytest.approx(
            estimate.value, abs=tolerance
        )
