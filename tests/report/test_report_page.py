"""The page shows what a folder contains and says what is missing, for any folder."""

import dataclasses
import json
import math
import re
import shlex
import shutil
from html.parser import HTMLParser

import pytest
import torch
from cases import EVIL, SMALL, evil_study, own_scores, save_choice

import afterdrop as ad
from afterdrop import recipes
from afterdrop.cli import main
from afterdrop.evaluation.scores.schema import name_of
from afterdrop.files import sealed
from afterdrop.report.background_sections import trained_section, training_section
from afterdrop.report.report_input import ReportInput, read_input
from afterdrop.report.run_page import write_report
from afterdrop.report.shell_commands import repeat_commands
from afterdrop.report.study_page import build_study_page
from afterdrop.train.folder import RunFolder
from afterdrop.tune.study_files import read_result, write_result


class Reader(HTMLParser):
    """Collects tags, ids, links and text, and checks that elements are closed in order."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [v for k, v in attributes if k in ("href", "src", "xlink:href")]
        assert not any(name.startswith("on") for name, _ in attributes), attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text.append(text)


def read(path):
    reader = Reader()
    content = path.read_text(encoding="utf-8")
    reader.feed(content)
    assert not reader.open
    assert len(content) < 3_000_000
    assert len(set(reader.ids)) == len(reader.ids)
    assert {link for link in reader.links if not link.startswith("#")} <= {"data:,"}
    assert {link[1:] for link in reader.links if link.startswith("#")} <= set(reader.ids)
    assert not {"script", "iframe", "object", "embed", "img"} & set(reader.tags)
    assert not re.search(r"url\((?!#)|@import", content)
    reader.words = " ".join(" ".join(reader.text).split())
    return reader


def report(run, *options):
    assert main(["report", str(run), *options]) == 0
    return read(run / "report.html")


def test_the_report_of_a_trained_run_has_every_section(trained_copy, capsys):
    capsys.readouterr()
    page = report(trained_copy)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"Wrote {trained_copy / 'report.html'}." and len(out) == 4
    assert page.tags.count("svg") == 11
    for words in ("The chosen member", "The model", "The family of members", "How to reproduce",
                  "on test data", "deterministic, T = 1", "Training curves", "Perplexity",
                  "state carried from window to window", "afterdrop select",
                  "2 rounds of rank 3"):  # fmt: skip
        assert words in page.words, words
    scores = ad.Scores.load(trained_copy / "scores" / "valid.safetensors")
    assert f"{scores.xe(ad.DET).value:.4f}" in page.words
    assert "Missing from this report" not in page.words
    test = ad.Scores.load(trained_copy / "scores" / "test.safetensors")
    member = ad.Run.open(trained_copy).choice.member
    gain = test.difference(ad.DET, member).value
    shown = [f"{test.xe(m).value:.4f}" for m in (ad.DET, member)]  # the cards: what the gain is of
    assert re.findall(r"([\d.]+) nats per word, test", page.words) == shown
    assert f"{gain:.4f}".replace("-", "−") in page.words


@pytest.mark.parametrize("alpha, multiplier", [(0, 0), (0.5, 0.6), (1, 1)])
def test_the_chosen_member_is_the_one_that_is_marked(own_run, scores, alpha, multiplier):
    member = scores.fit(ad.Member(alpha, multiplier)).member
    save_choice(own_run, scores, member)
    assert main(["report", str(own_run)]) == 0
    content = (own_run / "report.html").read_text()
    marked = re.findall(r'<tr class="marked"><th[^>]*>([^<]*)</th><td[^>]*>([^<]*)</td>', content)
    assert marked[0][0].startswith("chosen: ")
    assert marked[0][1] == f"{scores.xe(member).value:.4f}"


def test_the_same_run_gives_the_same_bytes(trained_copy):
    for name in ("one", "other"):
        write_report(read_input(trained_copy), trained_copy / f"{name}.html")
    assert (trained_copy / "one.html").read_bytes() == (trained_copy / "other.html").read_bytes()


def test_scores_of_a_users_own_model_are_enough(own_run, scores):
    page = report(own_run)
    assert "your own model" in page.words
    assert "No choice is saved yet" in page.words and f"afterdrop select {own_run}" in page.words
    assert "--split test" in page.words and "--classes FILE" in page.words
    assert page.tags.count("svg") == 8
    assert str(scores.protocol.sites[0][0]) in page.words


def test_classes_of_a_users_own_model_come_from_a_file_and_are_escaped(own_run, tmp_path, capsys):
    file = tmp_path / "classes.json"
    file.write_text(json.dumps({name: 10 + i for i, name in enumerate(EVIL)}))
    page = report(own_run, "--classes", str(file))
    assert "Gain per class" in page.words
    assert "<script>" in page.words  # as text
    file.write_text(json.dumps({"a": 1, "b": 2}))
    assert "2 classes and the model has 5" in report(own_run, "--classes", str(file)).words
    for bad in ("[1, 2]", "{", '{"a": -1}', '{"a": "many"}', "{}"):
        file.write_text(bad)
        assert main(["report", str(own_run), "--classes", str(file)]) == 2
        assert "classes.json" in capsys.readouterr().err


def test_training_without_scores_still_gives_its_curves(trained_copy, capsys):
    (trained_copy / "scores" / "valid.safetensors").unlink()
    page = report(trained_copy)
    assert (
        "This run has not been evaluated yet" in page.words and "afterdrop evaluate" in page.words
    )
    assert page.tags.count("svg") == 1


def test_missing_test_scores_and_a_missing_choice_are_named(trained_copy):
    (trained_copy / "scores" / "test.safetensors").unlink()
    (trained_copy / "choice.json").unlink()
    page = report(trained_copy)
    assert f"afterdrop test {trained_copy}" in page.words
    assert f"afterdrop select {trained_copy}" in page.words
    assert "cross-fitted" in page.words


def test_scores_of_another_model_are_left_out(own_run, scores):
    own_scores("test", classes=6).save(own_run / "scores" / "test.safetensors")
    save_choice(own_run, scores, scores.fit(ad.AMC).member, fingerprint="other")
    page = report(own_run)
    assert "test scores are of another model" in page.words
    assert "choice.json was made for another model" in page.words
    assert "on test data" not in page.words


def test_scores_of_older_weights_are_named(trained_copy, scores, tmp_path):
    assert "other weights" not in report(trained_copy).words
    changes = [a for change in [*SMALL, "seed=9"] for a in ("--set", change)]
    text = json.loads((trained_copy / "config.json").read_text())["config"]["data"]["name"]
    other = tmp_path / "other"
    assert main(["train", "lm", "--data", text, "--out", str(other), "--quiet", *changes]) == 0
    shutil.copytree(trained_copy / "scores", other / "scores")
    page = report(other)
    assert "other weights than those in this folder's checkpoint" in page.words
    assert "The family of members" in page.words
    shutil.rmtree(other / "checkpoint")
    assert "other weights" not in report(other).words


def test_a_member_that_was_not_scored_is_named(own_run, scores):
    save_choice(own_run, scores, ad.Member(0.25, 0.9))
    assert "is not among those of these scores" in report(own_run).words


def test_a_choice_for_far_fewer_samples_than_there_are_now_is_shown_unranked(own_run, scores):
    save_choice(own_run, scores, ad.AMC, num_samples=1)
    page = report(own_run)
    assert "the ranking of members: num_samples=1" in page.words
    assert "arithmetic mean of 1 dropout sample at" in page.words


def test_test_scores_without_the_chosen_member_are_named(own_run, scores):
    save_choice(own_run, scores, ad.Member(0.5, 0.6))
    grid = ad.Grid((1,), (0, 1))
    own_scores("test", seed=5, grid=grid).save(own_run / "scores" / "test.safetensors")
    assert "do not contain the chosen member" in report(own_run).words


@pytest.mark.parametrize("what", ["truncated", "foreign"])
def test_damaged_scores_do_not_stop_the_rest(trained_copy, what):
    path = trained_copy / "scores" / "valid.safetensors"
    path.write_bytes(path.read_bytes()[:1000] if what == "truncated" else b"{}")
    page = report(trained_copy)
    assert "valid.safetensors" in page.words and "Training curves" in page.words


def test_damaged_metrics_and_settings_do_not_stop_the_rest(trained_copy):
    (trained_copy / "metrics.jsonl").write_text("{\n")
    page = report(trained_copy)
    assert "metrics.jsonl" in page.words and "The family of members" in page.words
    (trained_copy / "config.json").write_text("{}")
    page = report(trained_copy)
    assert "config.json" in page.words and "The family of members" in page.words


PARTS = (
    "config.json",
    "metrics.jsonl",
    "choice.json",
    "scores/valid.safetensors",
    "scores/test.safetensors",
    "checkpoint/best.safetensors",
)


@pytest.mark.parametrize("part", PARTS)
def test_a_report_over_a_damaged_part_names_it_and_shows_the_rest(trained_copy, capsys, part):
    path = trained_copy / part
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    assert main(["report", str(trained_copy)]) == 0
    said = capsys.readouterr().out
    assert "Missing: " in said and path.name in said
    words = report(trained_copy).words
    assert path.name in words
    assert "Training curves" in words
    assert ("The family of members" in words) == (part != "scores/valid.safetensors")


def test_a_folder_whose_name_is_not_unicode_is_reported(own_run):
    folder = own_run.rename(own_run.with_name("my \udcff run"))
    found = read_input(folder)
    write_report(found, folder / "report.html")
    text = (folder / "report.html").read_text("utf-8")
    assert r"my \udcff run" in text


def test_several_rates_are_several_words_of_a_command(own_run, scores):
    request = dataclasses.replace(scores.request, rates=("a.rate", "b; c"))
    protocol = dataclasses.replace(scores.protocol, request=request)
    ad.Scores(protocol, scores.tensors).save(own_run / "scores" / "valid.safetensors")
    command = next(c for c in repeat_commands(read_input(own_run)) if "--rates" in c)
    words = shlex.split(command)
    at = words.index("--rates")
    assert words[at + 1 : at + 3] == ["a.rate", "b; c"]


def test_no_command_has_an_option_that_was_smuggled_in(own_run, scores):
    """Names in scores of others may look like options; the page then shows no command."""
    request = dataclasses.replace(scores.request, rates=("--out=/elsewhere", "--overwrite"))
    protocol = dataclasses.replace(scores.protocol, request=request)
    ad.Scores(protocol, scores.tensors).save(own_run / "scores" / "valid.safetensors")
    content = report(own_run).words
    assert "which begins with a dash" in content and "afterdrop evaluate" not in content


def test_the_words_of_another_text_are_not_shown(tmp_path, monkeypatch):
    """The name of one's own text may be relative, and another text may lie there."""
    for place, words in (("a", "one two three"), ("b", "four five six")):
        (tmp_path / place / "text").mkdir(parents=True)
        for split in ("train", "valid", "test"):
            (tmp_path / place / "text" / f"{split}.txt").write_text(f"{words}\n" * 60)
    monkeypatch.chdir(tmp_path / "a")
    train = ["train", "lm", "--data", "text", "--out", "run", "--quiet", "--device", "cpu"]
    for setting in SMALL:
        train += ["--set", setting]
    assert main(train) == 0
    options = ["--num-samples", "2", "--alphas", "1", "--multipliers", "0", "1", "--quiet"]
    assert main(["evaluate", "run", *options]) == 0
    monkeypatch.chdir(tmp_path / "b")
    assert "four" not in report(tmp_path / "a" / "run").words
    (tmp_path / "a" / "text").rename(tmp_path / "moved")
    page = report(tmp_path / "a" / "run")
    assert "the data are not those of the run" in page.words
    assert "four" not in page.words
    page = report(tmp_path / "a" / "run", "--data", str(tmp_path / "moved"))
    assert "the data are not those of the run" not in page.words


def test_without_the_data_only_the_frequencies_are_missing(trained_copy):
    content = json.loads((trained_copy / "config.json").read_text())
    content["config"]["data"]["name"] = "/nowhere/text"
    (trained_copy / "config.json").write_text(json.dumps(sealed(content)))
    page = report(trained_copy)
    assert "/nowhere/text" in page.words and "with --data" in page.words
    assert "Reliability" in page.words


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_reported_and_the_rest_is_shown(own_run, scores, value):
    tensors = {name: tensor.clone() for name, tensor in scores.tensors.items()}
    sampled, plain = (name_of(group, "target") for group in ("sampled", "deterministic"))
    tensors[sampled][0, 1, 7] = value
    ad.Scores(scores.protocol, tensors).save(own_run / "scores" / "valid.safetensors")
    save_choice(own_run, scores, ad.AMC)
    page = report(own_run)
    assert "1 of 10 members give some target" in page.words
    assert "n/a" in page.words and "The family of members" in page.words
    tensors[plain][3] = value
    tensors[sampled][:, :, 7] = value
    ad.Scores(scores.protocol, tensors).save(own_run / "scores" / "valid.safetensors")
    page = report(own_run)
    assert "10 of 10 members" in page.words and "cannot be ranked" in page.words


def test_perplexities_beyond_the_range_of_floats_have_a_page(own_run, monkeypatch):
    monkeypatch.setattr(ReportInput, "unit", "word")
    scores = own_scores(grid=ad.Grid((0, 1), (0, 1)), scale=1e4)
    assert scores.xe(ad.DET).value > 710 and scores.perplexity(ad.DET).value == math.inf
    scores.save(own_run / "scores" / "valid.safetensors")
    page = report(own_run)
    assert "the correct answer more than a million times more probable" in page.words
    assert "inf →" in page.words


def test_a_single_deterministic_member_has_a_page(own_run):
    grid = ad.Grid((0,), (0,))
    own_scores(grid=grid).save(own_run / "scores" / "valid.safetensors")
    page = report(own_run)
    assert "--multipliers above 0" in page.words and "Reliability" in page.words


def test_tempered_samples_have_a_page(own_run):
    grid = ad.Grid((0, 1), (0, 1), temper="sample")
    scores = own_scores(grid=grid)
    scores.save(own_run / "scores" / "valid.safetensors")
    assert main(["select", str(own_run)]) == 0
    assert "each sample before averaging" in report(own_run).words


def test_one_alpha_and_one_example_have_a_page(own_run):
    grid = ad.Grid((0,), (0, 1))
    own_scores(grid=grid).save(own_run / "scores" / "valid.safetensors")
    page = report(own_run)
    assert (
        "2 candidates" not in page.words and "4 candidates" in page.words
    )  # both T of two members
    assert "The bound and the gaps" in page.words and "How tight" not in page.words  # needs α > 0
    net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
    one = ad.evaluate(net, [(torch.randn(1, 4), torch.tensor([2]))], num_samples=4)
    one.save(own_run / "scores" / "valid.safetensors")
    assert "1 in 1 examples" in report(own_run).words


def test_an_empty_folder_is_an_error_with_a_remedy(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["report", str(folder)]) == 2
        assert "afterdrop evaluate" in capsys.readouterr().err
        assert not (folder / "report.html").exists()


def test_the_train_command_reproduces_the_configuration(trained):
    run = read_input(trained)
    words = shlex.split(repeat_commands(run)[0])
    assert words[:3] == ["afterdrop", "train", "lm"]
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    changes = {name: json.loads(value) for name, _, value in (s.partition("=") for s in sets)}
    config, _ = RunFolder(trained).read_config()
    own = {"data.name": words[words.index("--data") + 1], "data.level": "word"}
    own["data.min_count"] = int(words[words.index("--min-count") + 1])
    assert recipes.load("lm").config.override(own).override(changes) == config


def test_the_train_command_of_a_recipe_is_its_name_and_changes(tmp_path):
    run = tmp_path / "run"
    sets = ["--set", "optimiser.max_norm=none", "--set", "schedule.intervals=1"]
    assert main(["train", "digits-mlp", "--out", str(run), "--quiet", *sets]) == 0
    wanted = f"afterdrop train digits-mlp {' '.join(sets)} --out {run}"
    assert repeat_commands(read_input(run))[0] == wanted


def test_the_evaluate_command_reproduces_the_scores(trained, tmp_path):
    before = ad.Scores.load(trained / "scores" / "valid.safetensors")
    command = shlex.split(repeat_commands(read_input(trained))[1])
    assert main([*command[1:], "--out", str(tmp_path / "again"), "--quiet"]) == 0
    after = ad.Scores.load(tmp_path / "again" / "scores" / "valid.safetensors")
    before.protocol.require_same(after.protocol, "the repeated scores")
    assert torch.equal(before.field("sampled", "target"), after.field("sampled", "target"))


def test_scores_of_training_data_are_shown_if_they_are_of_the_same_model(trained_copy, scores):
    options = ["--split", "train", "--limit", "60", "--num-samples", "4", "--quiet"]
    assert main(["evaluate", str(trained_copy), *options]) == 0
    page = report(trained_copy)
    assert "Fit to the training data" in page.words
    assert "on the first 60 targets" in page.words
    command = repeat_commands(read_input(trained_copy))[2]
    assert "--split train --limit 60 --num-samples 4" in command
    request = dataclasses.replace(scores.request, split="train")
    other = ad.Scores(dataclasses.replace(scores.protocol, request=request), scores.tensors)
    other.save(trained_copy / "scores" / "train.safetensors")
    page = report(trained_copy)
    assert "Fit to the training data" not in page.words
    assert "the train scores are of another model" in page.words


def test_a_limit_is_shown_and_part_of_the_command(trained_copy):
    options = ["--limit", "50", "--num-samples", "4", "--overwrite", "--quiet"]
    assert main(["evaluate", str(trained_copy), *options]) == 0
    assert "--limit 50" in repeat_commands(read_input(trained_copy))[1]
    assert "the beginning of the split" in report(trained_copy).words


def test_a_trial_links_to_its_study_and_compare_refuses_a_study(trained, tmp_path, capsys):
    folder = tmp_path / "study"
    run = shutil.copytree(trained, folder / "trials" / "0000")
    write_result(evil_study(), folder)
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert not (folder / "study.html").exists()
    assert main(["report", str(folder)]) == 0
    assert (folder / "study.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    assert "This run is one trial of a hyperparameter study" in report(run).words
    assert main(["compare", str(folder), str(run), "--out", str(tmp_path / "c.html")]) == 2
    assert "is a study" in capsys.readouterr().err


def test_a_damaged_or_unfinished_study_is_refused(tmp_path, capsys):
    (tmp_path / "journal.log").write_text("")
    assert main(["report", str(tmp_path)]) == 2
    assert "has not finished" in capsys.readouterr().err
    (tmp_path / "study.json").write_text(
        json.dumps(sealed({"kind": "afterdrop-study", "version": 2}))
    )
    assert main(["report", str(tmp_path)]) == 2
    assert "is missing); run the command of the study again" in capsys.readouterr().err


def test_a_study_page_says_how_reliable_its_best_trial_is(tmp_path):
    result = evil_study()
    write_result(result, tmp_path)
    assert read_result(tmp_path) == result
    page = build_study_page(result, tmp_path)
    best = result.ranking[0]
    assert f"Trial {best.number} is the best of 29" in page.headline
    assert "differ by +0.0150 nats" in page.lead[0]
    assert [s.name for s in page.sections] == [
        "ranking", "history", "axes", "failures", "search", "next"
    ]  # fmt: skip
    few = build_study_page(dataclasses.replace(result, trials=result.trials[:5]), tmp_path)
    assert "needs 10 trials" in few.sections[2].missing[0]


def test_runs_are_compared_on_one_page(trained, own_run, tmp_path, capsys):
    own_scores(seed=1).save(tmp_path / "other" / "scores" / "valid.safetensors")
    out = tmp_path / "all.html"
    runs = [str(own_run), str(tmp_path / "other"), str(trained)]
    assert main(["compare", *runs, "--out", str(out)]) == 0
    page = read(out)
    assert "evaluated on different data" in page.words and page.tags.count("svg") == 5
    assert "mine" in page.words and "other" in page.words


def test_runs_on_the_same_data_are_compared_target_by_target(own_run, scores, tmp_path, capsys):
    other = tmp_path / "deep" / "mine"  # the same folder name, so paths tell them apart
    save_choice(other, scores, ad.AMC)
    scores.save(other / "scores" / "valid.safetensors")
    out = tmp_path / "all.html"
    assert main(["compare", str(own_run), str(other), "--out", str(out)]) == 0
    page = read(out)
    assert f"{own_run} is the best run" in page.words
    best = ad.select(scores).member
    difference = scores.difference(ad.AMC, best)
    assert f"+{difference.value:.4f} ± {difference.error:.4f}" in page.words
    assert main(["compare", str(own_run)]) == 2
    assert "two or more" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_help_has_a_description_and_examples(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "self-contained HTML page" in out and f"afterdrop {verb} runs/" in out


@pytest.mark.parametrize("samples", [1, 8])
def test_the_training_curves_say_how_many_masks_the_loss_averages(samples, tmp_path):
    config = recipes.load("ptb-24m-2layer").config.override({"objective.samples": samples})
    line = {"step": 0, "loss": None, "xe": 2.3, "xe_optimal": 2.2, "learning_rate": 1.0}
    lines = [line, line | {"step": 10, "loss": 1.5}]
    if samples > 1:
        lines = [line | {"effective_samples": found} for line, found in zip(lines, (None, 5.251))]
    found = training_section(ReportInput(ad.Run(tmp_path), "valid", config, metrics=lines))
    (shown,) = found.pictures
    said = "averages 8 masks, whose effective number was 5.25 in the last interval"
    assert (said in str(shown)) == (samples == 8)


def test_the_facts_name_the_penalties_of_the_objective(tmp_path):
    config = recipes.load("ptb-24m-2layer").config
    penalties = {"objective.fraternal_penalty": 0.1, "objective.temporal_activation_penalty": 1.0}
    for changes, said in (
        ({}, "dropout, 1 mask sample per example"),
        (
            penalties,
            "dropout, 1 mask sample per example, fraternal penalty 0.1, "
            "temporal-activation penalty 1",
        ),
    ):
        run = ReportInput(ad.Run(tmp_path), "valid", config.override(changes))
        assert ("objective", said) in trained_section(run).tables[0].rows
