"""Exported predictors are the eager ones, at any batch size, in torch and in onnxruntime."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, ExtraError, SiteError
from afterdrop.selection import export as exporting
from afterdrop.selection.export import export_predictor

SAMPLED = ad.Member(0.5, 0.7, 1.3)


class LSTMClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.3, batch_first=True)
        self.dropout, self.output = nn.Dropout(0.4), nn.Linear(12, 5)

    def forward(self, tokens):
        return self.output(self.dropout(self.lstm(self.embedding(tokens))[0][:, -1]))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.output = nn.Linear(8, 5)

    def forward(self, tokens, padding):
        states = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return {"logits": self.output(states.mean(1)), "states": states}


def conv_net():
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(6)
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), norms[0], nn.ReLU(), nn.Dropout2d(0.2)),
        *(nn.Conv2d(4, 6, 3), norms[1], nn.ReLU(), nn.Flatten(), nn.Dropout(0.5)),
        nn.Linear(96, 5),
    )


def case(name, size):
    """A model and inputs of `size` examples."""
    torch.manual_seed(0)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5))
        return model, torch.randn(size, 6)
    if name == "cnn":
        return conv_net(), torch.randn(size, 1, 8, 8)
    tokens = torch.randint(20, (size, 7))
    if name == "lstm":
        return LSTMClassifier(), tokens
    return Encoder(), {"tokens": tokens, "padding": torch.arange(7).expand(size, 7) > 5}


def predict(predictor, inputs):
    return predictor(**inputs) if isinstance(inputs, dict) else predictor(inputs)


def tensors_of(inputs):
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def run_onnx(path, inputs):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = runtime.InferenceSession(str(path))
    assert [i.shape[0] for i in session.get_inputs()] == ["batch"] * len(tensors_of(inputs))
    feeds = zip(session.get_inputs(), tensors_of(inputs))
    (found,) = session.run(["log_probs"], {i.name: tensor.numpy() for i, tensor in feeds})
    return torch.from_numpy(found)


@pytest.mark.parametrize(
    "member",
    [
        SAMPLED,
        pytest.param(ad.Member(0, 1), marks=pytest.mark.slow),
        pytest.param(ad.Member(1, 0.5, 1.2, "sample"), marks=pytest.mark.slow),
        pytest.param(ad.Member(1, 0, 1.7), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "encoder", "lstm"])
def test_a_program_is_the_predictor_at_any_batch_size(name, member, tmp_path):
    predictor = ad.Predictor(case(name, 1)[0], member, num_samples=4)
    export_predictor(predictor, case(name, 3)[1], tmp_path / "p.pt2")
    program = torch.export.load(tmp_path / "p.pt2").module()
    for size in (1, 5, 12):
        _, inputs = case(name, size)
        found = program(*tensors_of(inputs))
        torch.testing.assert_close(found, predict(predictor, inputs), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("member", [SAMPLED, ad.Member(1, 0, 1.7)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn", "encoder", "lstm"])
def test_an_onnx_file_is_the_predictor_in_onnxruntime(name, member, tmp_path):
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    predictor = ad.Predictor(case(name, 1)[0], member, num_samples=4)
    export_predictor(predictor, case(name, 3)[1], tmp_path / "p.onnx", "onnx")
    for size in (1, 5, 12):
        _, inputs = case(name, size)
        found = run_onnx(tmp_path / "p.onnx", inputs)
        torch.testing.assert_close(found, predict(predictor, inputs), rtol=0, atol=1e-5)


def test_a_deterministic_member_is_the_model_and_one_division(tmp_path):
    model, inputs = case("mlp", 3)
    export_predictor(ad.Predictor(model, ad.Member(1, 0, 1.7)), inputs, tmp_path / "p.pt2")
    nodes = torch.export.load(tmp_path / "p.pt2").graph.nodes
    called = [node.target.__name__.split(".")[0] for node in nodes if node.op == "call_function"]
    no_work = {"to", "movedim", "alias", "_assert_tensor_metadata"}
    model_calls = ["linear", "relu", "dropout", "linear"]
    assert [name for name in called if name not in no_work] == [*model_calls, "div", "log_softmax"]


def test_labels_and_other_axes_are_exported(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Dropout(0.5), nn.Conv2d(4, 3, 1))
    x = torch.randn(3, 1, 2, 2)
    for options in ({"class_dim": 1}, {"likelihood": "multilabel"}):
        predictor = ad.Predictor(model, SAMPLED, 4, **options)
        export_predictor(predictor, x, tmp_path / "p.pt2")
        found = torch.export.load(tmp_path / "p.pt2").module()(x)
        torch.testing.assert_close(found, predictor(x), rtol=0, atol=1e-5)


class Flattened(nn.Module):
    """Drops with rows and positions in one dimension, in either order, and whole rows."""

    def __init__(self):
        super().__init__()
        self.alpha, self.path = nn.AlphaDropout(0.2), StochasticDepth()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.output = nn.Linear(6, 5)

    def forward(self, x):
        size, positions, _ = x.shape
        x = F.dropout(self.layers[0](x).flatten(0, 1), 0.3, self.training)
        x = x.unflatten(0, (size, positions)).transpose(0, 1)
        x = F.dropout(self.layers[1](x).flatten(0, 1), 0.3, self.training)
        x = x.unflatten(0, (positions, size)).transpose(0, 1)
        query = self.alpha(x)
        options = {"dropout_p": 0.2 if self.training else 0.0, "is_causal": True}
        x = x + self.path(F.scaled_dot_product_attention(query, x, self.layers[2](x), **options))
        return self.output(x.mean(1))


class StochasticDepth(nn.Module):
    p = 0.3

    def forward(self, x):
        if not self.training:
            return x
        kept = torch.empty(x.shape[0], 1, 1).bernoulli_(1 - self.p)
        return x * kept / (1 - self.p)


def test_rows_may_lie_anywhere(tmp_path):
    torch.manual_seed(0)
    predictor = ad.Predictor(Flattened(), SAMPLED, 4)
    export_predictor(predictor, torch.randn(3, 4, 6), tmp_path / "p.pt2")
    program, x = torch.export.load(tmp_path / "p.pt2").module(), torch.randn(7, 4, 6)
    torch.testing.assert_close(program(x), predictor(x), rtol=0, atol=1e-5)


def test_a_choice_exports_what_it_predicts(tmp_path):
    torch.manual_seed(0)
    model, x = case("mlp", 40)
    choice = ad.select(ad.evaluate(model, [(x, torch.arange(40) % 5)], num_samples=4))
    choice = dataclasses.replace(choice, member=SAMPLED)
    choice.export(model, x, tmp_path / "p.pt2", num_samples=6)
    found = torch.export.load(tmp_path / "p.pt2").module()(x[:7])
    expected = choice.predictor(model, num_samples=6)(x[:7])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(DataError, match="weights of the model are not those"):
        choice.export(model, x, tmp_path / "q.pt2")


def test_the_model_is_left_as_it_was(tmp_path):
    model, inputs = case("cnn", 3)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_predictor(ad.Predictor(model, SAMPLED, 4), inputs, tmp_path / "p.pt2")
    assert all(module.training for module in model.modules())
    assert all(not module._forward_hooks for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.output = nn.Dropout(0.5), nn.Linear(6, 5)

    def forward(self, x):
        if x.sum() > 1e9:
            x = -x
        return self.output(self.dropout(x))


class FixedBatch(Branching):
    def forward(self, x):
        return self.output(self.dropout(x)) + torch.zeros(len(x), 5)


class WeightDropout(nn.Linear):
    def __init__(self):
        super().__init__(6, 5)

    def forward(self, x):
        return F.linear(x, F.dropout(self.weight, 0.5, self.training), self.bias)


@pytest.mark.parametrize(
    ("make", "inputs", "path", "error", "message"),
    [
        (lambda: case("mlp", 3)[0], torch.randn(1, 6), "p.pt2", DataError, "give at least 2"),
        (lambda: case("mlp", 3)[0], torch.randn(3, 6), "p.onnx", DataError, "must end in .pt2"),
        (Branching, torch.randn(3, 6), "p.pt2", DataError, "torch.export cannot trace"),
        (FixedBatch, torch.randn(3, 6), "p.pt2", DataError, "fixes the batch size"),
        (WeightDropout, torch.randn(3, 6), "p.pt2", SiteError, "in one pass each"),
    ],
)
def test_what_cannot_be_exported_is_refused(make, inputs, path, error, message, tmp_path):
    predictor = ad.Predictor(make(), SAMPLED, 4, class_dim=-1)
    with pytest.raises(error, match=message):
        export_predictor(predictor, inputs, tmp_path / path)
    assert not list(tmp_path.iterdir())


def test_predictions_of_numbers_are_refused(tmp_path):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    predictor = ad.Predictor(model, SAMPLED, 4, likelihood="gaussian")
    with pytest.raises(DataError, match="distribution of numbers"):
        export_predictor(predictor, torch.randn(3, 6), tmp_path / "p.pt2")


def test_masks_that_are_too_large_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("afterdrop.selection.traceable_predictor.MASK_BYTES", 100)
    model, inputs = case("mlp", 3)
    with pytest.raises(DataError, match="smaller num_samples="):
        export_predictor(ad.Predictor(model, SAMPLED, 4), inputs, tmp_path / "p.pt2")


def test_a_missing_extra_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    model, inputs = case("mlp", 3)
    with pytest.raises(ExtraError, match=r"afterdrop\[export\]"):
        export_predictor(ad.Predictor(model, SAMPLED, 4), inputs, tmp_path / "p.onnx", "onnx")
