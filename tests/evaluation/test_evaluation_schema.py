"""The tensors of Scores are those that the schema declares, in memory and in files."""

import itertools

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import FileError, ScoresError
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.scores_file import write_scores
from afterdrop.models import LanguageModel, LanguageModelConfig

GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))


def classifier(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    data = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (4, 3)]
    return ad.evaluate(net, data, **{"grid": GRID, "num_samples": 8, **options})


def text(**options):
    torch.manual_seed(0)
    config = LanguageModelConfig(vocabulary=9, hidden_sizes=(6,), output_dropout=0.5)
    tokens = torch.randint(1, 9, (23,))
    options = {"grid": GRID, "num_samples": 4, "window": 5, "lines": False, **options}
    return ad.evaluate_text(LanguageModel(config), tokens, 0, **options)


SCORES = {
    "mean": classifier,
    "sample": lambda: classifier(grid=ad.Grid((0, 0.5, 1), (0.5, 1), "sample")),
    "geometric sample": lambda: classifier(grid=ad.Grid((0,), (0, 1), "sample")),
    "one sample": lambda: classifier(grid=ad.Grid((1,), (0, 0.5, 1)), num_samples=1),
    "four blocks": lambda: classifier(blocks=4),
    "deterministic": lambda: classifier(grid=ad.Grid((0,), (0,))),
    "text": text,
    "text, sampled carry": lambda: text(carry="sampled", stripes=2),
    "text without alpha 0": lambda: text(grid=ad.Grid((0.5, 1), (0, 1), "sample")),
}
# Groups of tensors, and single ones, that some requests lack.
PRESENT = {
    "mean": {"sampled", "sampled.half"},
    "sample": {"sampled", "sampled.half", "tempered", "tempered.half"},
    "geometric sample": {"sampled", "sampled.half"},
    "one sample": {"sampled"},
    "four blocks": {"sampled", "sampled.half", "sampled.curve"},
    "deterministic": set(),
    "text": {"sampled", "sampled.half", "integrated", "integrated.half"},
    "text, sampled carry": {"sampled", "sampled.half", "integrated", "integrated.half"},
    "text without alpha 0": {"sampled", "sampled.half", "tempered", "tempered.half"},
}
DEPENDING = set().union(*PRESENT.values())


@pytest.fixture(scope="module", params=SCORES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def scores(kind):
    return SCORES[kind]()


def test_the_tensors_are_those_that_the_schema_declares(scores):
    schema.check(scores.tensors, scores.protocol)
    assert set(scores.tensors) == {spec.name for spec in schema.expected(scores.protocol)}
    for spec in schema.CATEGORICAL:
        assert spec.dims[-1] == "N"
        assert scores.has(spec.group, spec.field) == (spec.name in scores.tensors)


def test_tensors_are_there_when_the_request_asks_for_them(kind, scores):
    groups = {name.split(".")[0] for name in scores.tensors}
    assert (groups | set(scores.tensors)) & DEPENDING == PRESENT[kind]


def test_shapes_follow_the_dimensions_by_name(scores):
    size = schema.sizes(scores.protocol, scores.num_targets)
    assert size["N"] == len(scores.targets) and size["halves"] == 2
    for spec in schema.expected(scores.protocol):
        tensor = scores.field(spec.group, spec.field)
        assert tensor.shape == tuple(size[dim] for dim in spec.dims), spec.name
        assert tensor.dtype == spec.dtype, spec.name


def test_what_the_model_decides_may_be_lacking():
    whole = text()
    some = {n: t for n, t in whole.tensors.items() if not n.startswith("integrated.")}
    schema.check(some, whole.protocol)
    with pytest.raises(ScoresError, match="no integrated estimate"):
        ad.Scores(whole.protocol, some).integrated(ad.GMC)


def test_tensors_of_an_optional_group_come_together():
    whole = text()
    for name in [n for n in whole.tensors if n.startswith("integrated.")]:
        some = {n: t for n, t in whole.tensors.items() if n != name}
        with pytest.raises(ScoresError, match=f"lack {name}"):
            schema.check(some, whole.protocol)


def refused(path, scores, tensors, match):
    write_scores(path, scores.protocol, tensors)
    with pytest.raises(FileError, match=f"{path.name} is damaged.*{match}"):
        ad.Scores.load(path)


def test_a_file_is_read_back_as_it_was(scores, tmp_path):
    scores.save(tmp_path / "scores")
    loaded = ad.Scores.load(tmp_path / "scores")
    assert loaded.protocol == scores.protocol and loaded.tensors.keys() == scores.tensors.keys()
    for name, tensor in scores.tensors.items():
        assert torch.equal(loaded.tensors[name], tensor), name


def test_a_file_without_a_tensor_is_refused_by_its_name(scores, tmp_path):
    for name in scores.tensors:
        some = {n: t for n, t in scores.tensors.items() if n != name}
        refused(tmp_path / "scores", scores, some, f"lack {name}")


def test_a_file_with_an_additional_tensor_is_refused_by_its_name(scores, tmp_path):
    others = {spec.name for spec in schema.CATEGORICAL} - set(scores.tensors)
    for name in sorted(others | {"sampled.other", "foreign"}):
        more = {**scores.tensors, name: torch.zeros(3)}
        refused(tmp_path / "scores", scores, more, f"hold {name}")


def test_a_file_with_a_tensor_of_another_shape_is_refused_by_its_name(scores, tmp_path):
    for name, tensor in scores.tensors.items():
        for wrong in (tensor.unsqueeze(0), tensor.unsqueeze(-1), tensor.flatten()[0]):
            refused(tmp_path / "scores", scores, {**scores.tensors, name: wrong}, f"{name} is")
        short = {**scores.tensors, name: tensor[..., :-1]}
        refused(tmp_path / "scores", scores, short, "is" if name == "data.targets" else name)


def test_a_file_with_a_tensor_of_another_type_is_refused_by_its_name(scores, tmp_path):
    for name, tensor in scores.tensors.items():
        dtype = torch.float16 if tensor.is_floating_point() else torch.float64
        wrong = {**scores.tensors, name: tensor.to(dtype)}
        refused(tmp_path / "scores", scores, wrong, f"{name} is {dtype}")


def axis(name, dim):
    """The axis of a dimension in a tensor, or None."""
    dims = next(spec.dims for spec in schema.CATEGORICAL if spec.name == name)
    return dims.index(dim) if dim in dims else None


@pytest.mark.parametrize("sizes", [(1, 6), (2, 2, 3), (7,)], ids=str)
def test_joining_along_the_targets_is_the_inverse_of_splitting(sizes):
    for scores in (SCORES["sample"](), SCORES["four blocks"]()):
        assert sum(sizes) == scores.num_targets
        ends = list(itertools.accumulate(sizes))
        indices = [torch.arange(end - size, end) for size, end in zip(sizes, ends)]
        parts = [
            {n: schema.select_targets(n, t, index) for n, t in scores.tensors.items()}
            for index in indices
        ]
        for part, size in zip(parts, sizes):
            schema.check(part, scores.protocol)
            assert len(part["data.targets"]) == size
        assert_same(schema.join(parts, "N"), scores.tensors)


def test_joining_along_the_multipliers_is_the_inverse_of_splitting(scores):
    grid, count = scores.protocol.grid, len(scores.protocol.grid.stochastic)
    parts = []
    for row in range(count):
        part = {
            n: t if axis(n, "M") is None else t.narrow(axis(n, "M"), row, 1)
            for n, t in scores.tensors.items()
        }
        own = ad.Grid(grid.alphas, (grid.stochastic[row],), grid.temper)
        schema.check(part, scores.protocol.with_grid(own))
        parts.append(part)
    if count:
        assert_same(schema.join(parts, "M"), scores.tensors)
        assert_same(schema.join([scores.tensors], "M"), scores.tensors)


def test_multipliers_evaluated_apart_join_to_the_scores_of_all():
    options = {"temperatures": (0.5, 2.0), "temper": "sample"}
    temper = options.pop("temper")
    whole = classifier(grid=ad.Grid((0, 1), (0.5, 0.8, 1), temper), **options)
    apart = [classifier(grid=ad.Grid((0, 1), (m,), temper), **options) for m in (0.5, 0.8, 1)]
    joined = schema.join([scores.tensors for scores in apart], "M")
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(joined[name], tensor, rtol=1e-5, atol=1e-5)


def test_room_for_all_targets_has_the_shape_of_the_whole(scores):
    for name, tensor in scores.tensors.items():
        piece = schema.select_targets(name, tensor, torch.arange(2))
        room = torch.empty(schema.room_shape(name, piece, scores.num_targets), dtype=piece.dtype)
        assert room.shape == tensor.shape and room.dtype == tensor.dtype


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
