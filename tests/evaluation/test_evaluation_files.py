"""Saving, merging, interrupting and resuming."""

import json
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import afterdrop as ad
from afterdrop.errors import FileError, ScoresError
from afterdrop.evaluation import result_buffer, resume_store
from afterdrop.evaluation.output_summary import summary
from afterdrop.evaluation.part_files import part_path, part_paths
from afterdrop.tensor_files import read_note, write_tensors
from oracles.zoo import AWD, mlp

N = 24
GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
OPTIONS = {"grid": GRID, "num_samples": 4, "temperatures": (0.25, 4.0)}


@pytest.fixture
def world():
    torch.manual_seed(0)
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    return mlp(), list(zip(x.split(4), y.split(4)))


def saved(scores, path):
    scores.save(path)
    return path.read_bytes()


def test_scores_survive_a_file(world, tmp_path):
    scores = ad.evaluate(*world, blocks=4, **OPTIONS)
    path = tmp_path / "deep" / "valid.safetensors"
    scores.save(path)
    again = ad.Scores.load(path)
    assert again.protocol == scores.protocol and again.tensors.keys() == scores.tensors.keys()
    for name, tensor in scores.tensors.items():
        assert torch.equal(tensor, again.tensors[name])
    assert again.xe(ad.AMC) == scores.xe(ad.AMC)
    assert saved(again, tmp_path / "b") == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "deep"]


def test_tempered_scores_survive_a_file(world, tmp_path):
    scores = ad.evaluate(*world, **{**OPTIONS, "grid": ad.Grid((0, 1), (1,), temper="sample")})
    scores.save(tmp_path / "s")
    member = ad.Member(1, 1, 1.3, "sample")
    assert ad.Scores.load(tmp_path / "s").xe(member) == scores.xe(member)


def test_the_same_evaluation_has_the_same_bytes(world, tmp_path):
    a, b = (ad.evaluate(*world, **OPTIONS) for _ in "ab")
    assert saved(a, tmp_path / "a") == saved(b, tmp_path / "b")


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.9, 0.999])
def test_truncated_files_are_refused(world, tmp_path, share):
    path = tmp_path / "scores"
    content = saved(ad.evaluate(*world, **OPTIONS), path)
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(FileError, match="scores"):
        ad.Scores.load(path)


def test_one_byte_less_or_more_is_refused(world, tmp_path):
    path = tmp_path / "scores"
    content = saved(ad.evaluate(*world, **OPTIONS), path)
    for changed in (content[:-1], content + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(FileError, match="scores"):
            ad.Scores.load(path)


def foreign(tmp_path, metadata):
    path = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(3)}, path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"afterdrop": "not json"},
        {"afterdrop": "[]"},
        {"afterdrop": "{}"},
        {"afterdrop": json.dumps({"kind": "afterdrop-scores", "version": 1})},
        {"afterdrop": json.dumps({"kind": "afterdrop-scores", "version": 1, "protocol": "{}"})},
    ],
)
def test_foreign_files_are_refused(tmp_path, metadata):
    with pytest.raises(FileError, match="foreign"):
        ad.Scores.load(foreign(tmp_path, metadata))


@given(at=st.integers(0, 2**30), bit=st.integers(0, 7))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_one_flipped_bit_is_noticed(world, tmp_path, at, bit):
    path = tmp_path / "scores"
    if not path.exists():
        ad.evaluate(*world, **OPTIONS).save(path)
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    (tmp_path / "flipped").write_bytes(content)
    with pytest.raises(FileError, match="flipped"):
        ad.Scores.load(tmp_path / "flipped")


def test_files_that_lack_tensors_are_refused(world, tmp_path):
    scores = ad.evaluate(*world, **OPTIONS)
    del scores.tensors["sampled.target"]
    scores.save(tmp_path / "scores")
    with pytest.raises(FileError, match="scores"):
        ad.Scores.load(tmp_path / "scores")


def test_other_versions_are_refused_with_both_numbers(tmp_path):
    path = tmp_path / "scores"
    write_tensors(path, {}, {"kind": "afterdrop-scores", "version": 99})
    with pytest.raises(FileError, match="99"):
        ad.Scores.load(path)


def test_missing_files_folders_and_text_are_refused(tmp_path):
    (tmp_path / "text").write_text("this is not a safetensors file")
    for name in ("nothing", ".", "text"):
        with pytest.raises(FileError):
            ad.Scores.load(tmp_path / name)


def test_unwritable_places_are_refused(world, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"):
        ad.evaluate(*world, **OPTIONS).save(tmp_path / "file" / "scores")


# Merging


def parts_of(world, edges):
    model, batches = world
    return [ad.evaluate(model, batches[a:b], first_example=4 * a, **OPTIONS) for a, b in edges]


def test_merged_parts_are_one_evaluation(world, tmp_path):
    whole = ad.evaluate(*world, **OPTIONS)
    parts = parts_of(world, [(0, 1), (1, 4), (4, 6)])
    merged = ad.Scores.merge([parts[2], parts[0], parts[1]])
    assert saved(merged, tmp_path / "m") == saved(whole, tmp_path / "w")
    loaded = []
    for i, part in enumerate(parts):
        part.save(tmp_path / str(i))
        loaded.append(ad.Scores.load(tmp_path / str(i)))
    assert saved(ad.Scores.merge(loaded), tmp_path / "l") == saved(whole, tmp_path / "w")


def test_merging_the_same_examples_is_refused(world):
    parts = parts_of(world, [(0, 2), (1, 3)])
    with pytest.raises(ScoresError, match="first_example=8"):
        ad.Scores.merge(parts)
    with pytest.raises(ScoresError, match="at least one"):
        ad.Scores.merge([])


@pytest.mark.parametrize(
    "other",
    [
        {"num_samples": 6},
        {"seed": 1},
        {"masks": "iid"},
        {"split": "dev"},
        {"blocks": 4},
        {"grid": ad.Grid((0, 1), (0, 0.5, 1))},
        {"grid": ad.Grid((0, 0.5, 1), (0, 1))},
        {"grid": ad.Grid((0, 0.5, 1), (0, 0.5, 1), "sample")},
        {"temperatures": (0.5, 2.0)},
        {"ignore_index": 7},
    ],
)
def test_merging_scores_of_other_settings_is_refused(world, other):
    model, batches = world
    a = ad.evaluate(model, batches[:1], **OPTIONS)
    b = ad.evaluate(model, batches[1:], first_example=4, **{**OPTIONS, **other})
    with pytest.raises(ScoresError, match="differ in"):
        ad.Scores.merge([a, b])


def test_merging_scores_of_other_weights_is_refused(world):
    model, batches = world
    a = ad.evaluate(model, batches[:1], **OPTIONS)
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    b = ad.evaluate(model, batches[1:], first_example=4, **OPTIONS)
    with pytest.raises(ScoresError, match="fingerprint"):
        ad.Scores.merge([a, b])


def test_merging_scores_of_other_dropout_rates_is_refused(world):
    model, batches = world
    a = ad.evaluate(model, batches[:1], **OPTIONS)
    model[2].p = 0.25
    b = ad.evaluate(model, batches[1:], first_example=4, **OPTIONS)
    with pytest.raises(ScoresError, match="sites"):
        ad.Scores.merge([a, b])


def test_merging_scores_with_other_brackets_is_refused_with_the_remedy(world):
    """The first batch chooses the bracket, so parts of one data set may differ in it."""
    model, batches = world
    with torch.no_grad():
        model[3].weight.mul_(3)
    easy = model.eval()(batches[0][0]).argmax(-1)
    options = {"grid": GRID, "num_samples": 4}
    a = ad.evaluate(model, [(batches[0][0].repeat(20, 1), easy.repeat(20))], **options)
    b = ad.evaluate(model, batches[1:], first_example=80, **options)
    with pytest.raises(
        ScoresError, match=r"evaluate each with the same temperatures=\(low, high\)"
    ):
        ad.Scores.merge([a, b])


# Interrupting


class Interrupt:
    """Batches that fail after some of them."""

    def __init__(self, batches, after, error):
        self.batches, self.after, self.error = batches, after, error

    def __iter__(self):
        for i, batch in enumerate(self.batches):
            if i == self.after:
                raise self.error
            yield batch


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk"), RuntimeError("x")])
@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_evaluation_ends_with_the_same_bytes(world, tmp_path, error, seed):
    model, batches = world
    whole = saved(ad.evaluate(model, batches, **OPTIONS), tmp_path / "whole")
    folder, rng = tmp_path / "parts", random.Random(seed)
    for _ in range(2):
        after = rng.randrange(1, len(batches))
        with pytest.raises(type(error)):
            ad.evaluate(model, Interrupt(batches, after, error), resume=folder, **OPTIONS)
        assert folder.exists()
    resumed = ad.evaluate(model, batches, resume=folder, **OPTIONS)
    assert saved(resumed, tmp_path / "resumed") == whole
    assert not folder.exists()


def test_an_interruption_inside_a_forward_pass(world, tmp_path):
    model, batches = world
    whole = saved(ad.evaluate(model, batches, **OPTIONS), tmp_path / "whole")
    calls = [0]

    def stop(module, args):
        calls[0] += 1
        if calls[0] == 26:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(model, batches, resume=tmp_path / "parts", **OPTIONS)
    hook.remove()
    passes = [0]
    model.register_forward_pre_hook(lambda m, a: passes.__setitem__(0, passes[0] + 1))
    resumed = ad.evaluate(model, batches, resume=tmp_path / "parts", **OPTIONS)
    assert saved(resumed, tmp_path / "resumed") == whole
    ahead = passes[0]
    ad.evaluate(model, batches, **OPTIONS)
    assert ahead < passes[0] - ahead


def test_resuming_a_language_model_with_its_own_masks(tmp_path):
    model = AWD()
    batches = [(torch.randint(13, (5, 3)), torch.randint(13, (5, 3))) for _ in range(3)]
    options = {**OPTIONS, "rates": AWD.RATES, "batch_dim": 1}
    whole = saved(ad.evaluate(model, batches, **options), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(
            model, Interrupt(batches, 2, KeyboardInterrupt()), resume=tmp_path / "p", **options
        )
    resumed = ad.evaluate(model, batches, resume=tmp_path / "p", **options)
    assert saved(resumed, tmp_path / "resumed") == whole


@pytest.fixture
def interrupted(world, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(
            world[0], Interrupt(world[1], 4, KeyboardInterrupt()), resume=tmp_path / "p", **OPTIONS
        )
    return tmp_path / "p"


def test_resuming_with_other_data_is_refused(world, interrupted):
    model, batches = world
    changed = [(x + (i == 2), y) for i, (x, y) in enumerate(batches)]
    with pytest.raises(FileError, match="batch 2"):
        ad.evaluate(model, changed, resume=interrupted, **OPTIONS)
    relabelled = [(x, (y + (i == 1)) % 3) for i, (x, y) in enumerate(batches)]
    with pytest.raises(FileError, match="batch 1"):
        ad.evaluate(model, relabelled, resume=interrupted, **OPTIONS)


def test_resuming_with_fewer_data_is_refused(world, interrupted):
    model, batches = world
    with pytest.raises(ad.AfterdropError):
        ad.evaluate(model, batches[:2], resume=interrupted, **OPTIONS)


@pytest.mark.parametrize(
    "other",
    [{"num_samples": 6}, {"seed": 1}, {"masks": "iid"}, {"split": "dev"}, {"first_example": 5}],
)
def test_resuming_with_other_settings_is_refused(world, interrupted, other):
    with pytest.raises(ad.AfterdropError):
        ad.evaluate(*world, resume=interrupted, **{**OPTIONS, **other})


def test_resuming_with_other_weights_is_refused(world, interrupted):
    model, batches = world
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(ScoresError, match="fingerprint"):
        ad.evaluate(model, batches, resume=interrupted, **OPTIONS)


def test_a_damaged_part_is_evaluated_again(world, tmp_path, monkeypatch):
    model, batches = world
    whole = saved(ad.evaluate(*world, **OPTIONS), tmp_path / "whole")
    monkeypatch.setattr(resume_store, "_SECONDS", 0.0)  # one part per batch
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(
            model, Interrupt(batches, 4, KeyboardInterrupt()), resume=tmp_path / "p", **OPTIONS
        )
    for number, damage in ((1, lambda content: content[:-100]), (2, flipped)):
        part = tmp_path / "p" / f"part-{number:09d}.safetensors"
        part.write_bytes(damage(part.read_bytes()))
    with pytest.warns(UserWarning, match=r"part-00000000[12].*evaluated again"):
        resumed = ad.evaluate(*world, resume=tmp_path / "p", **OPTIONS)
    assert saved(resumed, tmp_path / "resumed") == whole


def flipped(content):
    return content[:-50] + bytes([content[-50] ^ 4]) + content[-49:]


def test_a_file_that_is_not_a_part_is_refused_by_name(world, interrupted):
    write_tensors(interrupted / "part-00007.safetensors", {}, {"kind": "other"})
    with pytest.raises(FileError, match="part-00007"):
        ad.evaluate(*world, resume=interrupted, **OPTIONS)


def test_a_batch_in_two_parts_is_refused(world, interrupted):
    (part,) = interrupted.glob("part-*")
    (interrupted / "part-00001.safetensors").write_bytes(part.read_bytes())
    with pytest.raises(FileError, match=r"batch 0 is in .*part-00001.* and in another"):
        ad.evaluate(*world, resume=interrupted, **OPTIONS)


def test_parts_stay_until_the_scores_are_saved(world, tmp_path, interrupted):
    scores = ad.evaluate(*world, resume=interrupted, **OPTIONS)
    assert list(interrupted.glob("part-*"))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=f"cannot write.*parts are kept in {interrupted}"):
        scores.save(tmp_path / "file" / "scores")
    assert list(interrupted.glob("part-*"))
    scores.save(tmp_path / "scores")
    assert not interrupted.exists()


def test_a_part_is_written_for_every_full_block_of_results(world, tmp_path, monkeypatch):
    """Otherwise what must be written at once would grow with the number of targets."""
    whole = ad.evaluate(*world, **OPTIONS)
    each = sum(tensor.nbytes for tensor in whole.tensors.values()) // N
    monkeypatch.setattr(result_buffer, "_BLOCK", 10 * each)  # of the 24 targets
    found = ad.evaluate(*world, resume=tmp_path / "p", **OPTIONS)
    parts = [read_note(path)["numbers"] for path in part_paths(tmp_path / "p")]
    assert parts == [
        [0, 1, 2],
        [3, 4, 5],
    ]  # of four targets each; a block holds ten
    assert saved(found, tmp_path / "a") == saved(whole, tmp_path / "b")


def test_one_evaluation_at_a_time_uses_a_folder(world, tmp_path):
    model, batches = world
    whole = saved(ad.evaluate(*world, **OPTIONS), tmp_path / "whole")
    refusals = []

    def twice():
        for number, batch in enumerate(batches):
            if number == 0:  # the first batch is read before the folder is opened
                yield batch
                continue
            with pytest.raises(FileError, match="another process is evaluating into") as refused:
                ad.evaluate(*world, resume=tmp_path / "p", **OPTIONS)
            refusals.append(refused)
            yield batch

    (tmp_path / "p").mkdir()
    (tmp_path / "p" / ".lock").write_text("")  # of a process that was killed
    scores = ad.evaluate(model, twice(), resume=tmp_path / "p", **OPTIONS)
    assert len(refusals) == len(batches) - 1
    assert saved(scores, tmp_path / "scores") == whole


def test_resuming_with_other_code_or_state_is_refused(world, interrupted):
    """The weights are the same, but not what the model makes of them."""
    model, batches = world
    model.register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(FileError, match=r"has other outputs .* although its weights are the same"):
        ad.evaluate(model, batches, resume=interrupted, **OPTIONS)


def late_change(output):
    """Another last row of a batch with more rows than a few."""
    return torch.cat([output[:-1], output[-1:] + 0.01]) if len(output) > 65 else output


OTHER_CODE = {
    "another order of the classes": lambda output: output.flip(-1),
    "a slightly other scale": lambda output: output * 1.0002,
    "a change after the first rows": late_change,
}


@pytest.mark.parametrize("change", OTHER_CODE)
def test_resuming_with_slightly_other_code_is_refused(tmp_path, change):
    torch.manual_seed(0)
    model, batches = mlp(), [(torch.randn(80, 5), torch.randint(3, (80,))) for _ in range(2)]
    stopping = Interrupt(batches, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(model, stopping, resume=tmp_path, **OPTIONS)
    model.register_forward_hook(lambda module, inputs, output: OTHER_CODE[change](output))
    with pytest.raises(FileError, match="has other outputs"):
        ad.evaluate(model, batches, resume=tmp_path, **OPTIONS)


@pytest.mark.parametrize("mask", [-1e4, torch.finfo(torch.float16).min, -1e9, -torch.inf])
def test_classes_that_cannot_occur_do_not_hide_other_code(mask):
    logits = 3 * torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
    masked = logits.clone()
    masked[:, ::2] = mask
    found = summary(masked)
    for allowed in (masked, masked * (1 + torch.finfo().eps)):
        assert found.matches(summary(allowed).projections)
    other = masked.where(masked == mask, masked * 1.01)
    assert not found.matches(summary(other).projections)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_summary_of_logits_allows_for_rounding_only(dtype):
    torch.manual_seed(0)
    logits = 5 * torch.randn(3000, 40, dtype=torch.float64)
    logits[:, 7], logits[0, 3] = -torch.inf, torch.finfo(torch.float32).min
    epsilon = torch.finfo(dtype).eps
    found = summary(logits, epsilon)
    noise = epsilon * torch.randn_like(logits)
    assert found.matches(summary(logits * (1 + noise)).projections)
    for other in (logits.flip(0), logits.roll(1, -1), logits[:-1], logits.where(logits > -2, 0.0)):
        assert not found.matches(summary(other).projections)
    logits[:, 7] = 0
    assert not found.matches(summary(logits).projections)


def test_other_files_in_the_folder_survive(world, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "precious.txt").write_text("years of work")
    ad.evaluate(*world, resume=folder, **OPTIONS).save(tmp_path / "scores")
    assert [path.name for path in folder.iterdir()] == ["precious.txt"]


def test_finished_parts_are_kept_when_the_data_turn_out_bad(world, tmp_path):
    model, batches = world
    bad = [*batches[:3], (batches[3][0], torch.full((4,), 9))]
    with pytest.raises(ad.AfterdropError):
        ad.evaluate(model, bad, resume=tmp_path / "p", **OPTIONS)
    assert list((tmp_path / "p").glob("part-*"))


def test_files_that_only_look_like_parts_are_left_alone(tmp_path):
    """A copy by hand must not end an evaluation when it saves what it has finished."""
    for name in ("part-x", "part-00001 (copy)", "part-", "part-00003-rank-1"):
        (tmp_path / f"{name}.safetensors").touch()
    assert [path.name for path in part_paths(tmp_path)] == ["part-00003-rank-1.safetensors"]
    own = part_path(tmp_path, 12, "-rank-0")
    own.touch()
    assert own in part_paths(tmp_path)
