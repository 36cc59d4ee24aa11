"""Sections on the model, its training, the evaluation protocol, and how to reproduce them."""

import dataclasses
from typing import Any

from afterdrop.evaluation import Scores
from afterdrop.evaluation.dynamic_evaluation import DynamicEvaluation
from afterdrop.evaluation.request import Protocol
from afterdrop.report import figures
from afterdrop.report.figure_sections import picture
from afterdrop.report.page_elements import PageTable, Section
from afterdrop.report.prose import number
from afterdrop.report.report_input import ReportInput
from afterdrop.report.shell_commands import repeat_commands
from afterdrop.train.penalties import active_penalties
from afterdrop.train.sections import ObjectiveSection

_STREAM = {
    "window": "window (tokens)",
    "stripes": "parallel stripes of the text",
    "carry": "state carried from window to window",
    "lifetime": "lifetime of masks shared over time",
}


def trained_section(run: ReportInput) -> Section:
    """The model, its data and its dropout sites."""
    section = Section("trained", "The model")
    if run.config is None:
        section.paragraphs.append(
            "This folder holds no training run: the scores are those of your own model."
        )
    else:
        section.tables.append(_facts("Model, data and optimisation", _trained(run)))
    if run.study is not None:
        section.paragraphs.append(
            f"This run is one trial of a hyperparameter study; {run.study} shows all of them."
        )
    if run.scores is not None:
        rows = [
            (str(name), str(op), "set by the model" if rate is None else f"{rate:g}", str(calls))
            for name, op, rate, calls in run.scores.protocol.sites
        ]
        head = ("dropout site", "operator", "rate", "calls per pass")
        section.tables.append(PageTable("Dropout sites", head, rows, left=frozenset({0, 1})))
    return section


def _trained(run: ReportInput) -> list[tuple[str, str]]:
    config, facts = run.config, run.facts
    assert config is not None
    data = facts.get("data", {})
    kind = {"language_model": "LSTM language model", "classifier": "classifier"}
    model = facts.get("model", {})
    rows: list[tuple[str, Any]] = [
        ("data", data.get("name", config.data.name)),
        ("training targets", _count(data.get("targets"))),
        ("classes", _count(data.get("vocabulary", model.get("classes")))),
        ("model", kind.get(config.model.kind, config.model.kind)),
        ("hidden units", ", ".join(map(str, model.get("hidden_sizes", ()))) or None),
        ("Mogrifier", _mogrifier(model)),
        ("parameters", _count(facts.get("parameters"))),
        ("objective", _objective(config.objective)),
        ("optimiser", f"{config.optimiser.name}, learning rate {config.optimiser.learning_rate:g}"),
        ("L2 penalty", f"{config.objective.l2_penalty:g}"),
        ("seed", config.seed),
    ]
    if run.metrics:
        last = run.metrics[-1]
        rows.append(("training steps", _count(last.get("step"))))
        rows.append(("training time", f"{number(last.get('seconds', 0.0) / 60, 1)} minutes"))
    return [(what, str(value)) for what, value in rows if value is not None]


def _mogrifier(model: dict[str, Any]) -> str | None:
    rounds, rank = model.get("mogrifier_rounds", 0), model.get("mogrifier_rank", 0)
    if not rounds:
        return None
    return f"{rounds} {'round' if rounds == 1 else 'rounds'} of " + (
        f"rank {rank}" if rank else "full rank"
    )


def _facts(caption: str, rows: list[tuple[str, str]]) -> PageTable:
    return PageTable(caption, ("setting", "value"), list(rows), left=frozenset({0, 1}))


def _objective(section: ObjectiveSection) -> str:
    samples = "1 mask sample" if section.samples == 1 else f"{section.samples} mask samples"
    penalties = [
        f", {name.replace('_', '-')} penalty {coefficient:g}"
        for name, coefficient in active_penalties(section).items()
    ]
    return f"dropout, {samples} per example{''.join(penalties)}"


def _dynamic(settings: DynamicEvaluation) -> str:
    return f"eta {settings.eta:g}, kappa {settings.kappa:g}, epsilon {settings.epsilon:g}"


def _count(value: Any) -> str | None:
    return f"{value:,}" if isinstance(value, int) else None


def training_section(run: ReportInput) -> Section:
    """Loss and validation cross entropy during training."""
    section = Section("training", "Training curves")
    if len(run.metrics) > 1:
        section.pictures.append(
            picture(
                figures.training_curves(run.metrics),
                "training",
                "Loss during training",
                "The training loss is measured with dropout, which makes it higher than it would "
                "be without. Validation is deterministic, at temperature 1 and at the optimal "
                "temperature." + _samples(run),
            )
        )
    elif run.config is not None:
        section.missing.append(
            "metrics.jsonl has fewer than two validation intervals; continue training to get curves"
        )
    return section


def _samples(run: ReportInput) -> str:
    """A sentence about the masks that the training loss averages, if there are several."""
    found = run.metrics[-1].get("effective_samples")
    if found is None or run.config is None:
        return ""
    return (
        f" The loss averages {run.config.objective.samples} masks, whose effective number was "
        f"{number(found, 2)} in the last interval."
    )


def fit_section(train: Scores) -> Section:
    """How well each member fits the training data."""
    if not train.protocol.grid.stochastic:
        return Section("fit", "Fit to the training data")
    targets = f"{train.num_targets:,} targets"
    if train.request.limit is not None:
        targets = f"the first {targets}"
    return Section(
        "fit",
        "Fit to the training data",
        [
            "Lower dropout rates usually fit the training data better, whichever mean is used. If "
            "the best cell of the validation map is higher up than the best cell here, averaging "
            "over masks reduces overfitting."
        ],
        [
            picture(
                figures.family_map(train),
                "map-train",
                "Cross entropy on training data at temperature 1",
                f"The same map as for validation data, on {targets} of the training data.",
            )
        ],
    )


def protocol_section(protocol: Protocol, targets: int, examples: int) -> Section:
    """Everything that the numbers depend on, as recorded with the scores."""
    grid, plan, request = protocol.grid, protocol.plan, protocol.request
    stream = {} if request.stream is None else dataclasses.asdict(request.stream)
    names = {
        "lhs": "Latin hypercube",
        "iid": "independent",
        "antithetic": "antithetic pairs",
    }
    where = {
        "mean": "the averaged distribution",
        "sample": "each sample before averaging",
        "component": "each component before they are mixed",
    }
    part = "" if protocol.request.limit is None else " (the beginning of the split)"
    found = "" if request.adaptive is None else ", as a pilot found necessary"
    samples = [
        ("mask samples, K", f"{plan.num_samples}{found}"),
        ("masks", f"{names.get(plan.scheme, plan.scheme)}, {plan.blocks} independent blocks"),
        ("mask seed", str(plan.seed)),
        ("masks across examples", "shared" if protocol.shared else "independent"),
    ]
    if protocol.ensemble is not None:
        masks = protocol.ensemble.masks
        samples = [
            ("samples, K", str(plan.num_samples)),
            ("sources", ", ".join(protocol.ensemble.names)),
            ("masks per source", "dropout off" if masks is None else str(masks.num_samples)),
            ("groups of the jackknife", str(plan.blocks)),
        ]
    rows = [
        ("split", protocol.request.split),
        ("targets", f"{targets:,} in {examples:,} examples{part}"),
        *samples,
        ("alphas", ", ".join(f"{a:g}" for a in grid.alphas)),
        ("multipliers", ", ".join(f"{m:g}" for m in grid.multipliers)),
        ("temperature acts on", where[grid.temper]),
        ("temperature range", f"{protocol.low:g} to {protocol.high:g}"),
        ("likelihood", request.likelihood),
        *([("classes", f"{protocol.num_classes:,}")] if protocol.has_classes else []),
        *((_STREAM.get(name, name), str(value)) for name, value in stream.items()),
        *([] if request.dynamic is None else [("dynamic evaluation", _dynamic(request.dynamic))]),
        ("randomness disabled", ", ".join(" ".join(entry) for entry in protocol.off) or "none"),
        ("fingerprint of the weights", protocol.fingerprint),
    ]
    return Section(
        "protocol", "Evaluation protocol", tables=[_facts("Settings of the scores", rows)]
    )


def commands_section(run: ReportInput) -> Section:
    """The commands that reproduce the run and this report."""
    section = Section("repeat", "How to reproduce this", commands=repeat_commands(run))
    if run.scores is not None and run.scores.protocol.ensemble is not None:
        section.paragraphs.append(
            "Replace SAMPLES and TARGETS with the files of the samples and of their targets, which "
            "the scores do not record; an ensemble of models is evaluated in Python."
        )
    elif run.scores is not None and run.config is None:
        section.paragraphs.append(
            "Replace pkg.module:load_model and pkg.module:batches with the import paths of your "
            "model and data, which the scores do not record."
        )
    return section
