"""Collects the numbers of evaluated runs in one small file, for tables and figures.

    python benchmarks/result_digest.py RUN [RUN ...] --out FILE.json [--data DIR]

For each run and split: every member's XE at T = 1 and at the T of validation data, its paired
difference from DET and its bounds; the choice, with cross-fitted gain and bootstrap; XE over T; T
from subsets; gains by training frequency; calibration. Scores take 15 kB per target; the size of
this file does not depend on the number of targets.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import afterdrop as ad
from afterdrop.errors import AfterdropError
from afterdrop.family.estimates import Estimate
from afterdrop.reproduce.tables.frequency_bands import FrequencyBand, suitable_bands
from afterdrop.reproduce.tables.table_input import TableInput, read_table_input
from result_subset import subset_rows

TEMPERATURES = [0.6 + 0.05 * step for step in range(29)]
SUBSETS = (250, 500, 1000, 5000, 20000)
INTERVALS_KEPT = 60


def numbers(found: Estimate) -> dict[str, float]:
    """An estimate: its value, its limit for infinitely many samples, and its errors."""
    return {
        "value": found.value,
        "corrected": found.corrected,
        "mc_error": found.mc_error,
        "data_error": found.data_error,
        "error": found.error,
    }


def named(member: ad.Member) -> dict[str, float]:
    return {"alpha": member.alpha, "multiplier": member.multiplier, "T": member.temperature}


def members_of(scores: ad.Scores, valid: ad.Scores) -> list[dict[str, Any]]:
    """Every member of the grid, compared with DET at T = 1."""
    tempered = valid.fit(ad.DET).member
    rows = []
    for member in scores.members:
        fitted = valid.fit(member).member if member in valid.members else None
        row = named(member) | {
            "xe": numbers(scores.xe(member)),
            "minus_det": numbers(scores.difference(member, ad.DET)),
            "bounds": dataclasses.asdict(scores.bounds(member)),
        }
        if fitted is not None:
            row |= {
                "T": fitted.temperature,
                "xe_T": numbers(scores.xe(fitted)),
                "minus_det_T": numbers(scores.difference(fitted, ad.DET)),
                "minus_tempered_det_T": numbers(scores.difference(fitted, tempered)),
                "minus_own": numbers(scores.difference(fitted, member)),
            }
        rows.append(row)
    return rows


def shown_members(valid: ad.Scores, chosen: ad.Member) -> dict[str, ad.Member]:
    """DET, AMC and the choice, each as it is and at its own temperature."""
    names = {"DET": ad.DET, "AMC x0.8": ad.Member(1, 0.8), "AMC x1": ad.AMC}
    names = {name: member for name, member in names.items() if member in valid.members}
    fitted = {f"{name} at T*": valid.fit(member).member for name, member in names.items()}
    return {**names, **fitted, "chosen": chosen, "chosen at T = 1": chosen.at_temperature(1.0)}


def selection_of(valid: ad.Scores) -> tuple[ad.Member, dict[str, Any]]:
    found = ad.select(valid)
    often = [
        named(member) | {"tuned": tuned, "share": share}
        for member, tuned, share in found.recurrence[:8]
    ]
    return found.member, {
        "chosen": named(found.member),
        "gain": numbers(found.gain),
        "crossfit": numbers(found.crossfit) if found.crossfit else None,
        "temperature_share": found.temperature_share,
        "recurrence": often,
        "text": str(found),
    }


def disjoint(bands: list[FrequencyBand]) -> list[FrequencyBand]:
    """Bands without overlap, cut where the given ones are."""
    edges = sorted({int(b.high + 1 if b.low < 0 else b.low + 1) for b in bands})
    lows, highs = [0, *edges], [*[edge - 1 for edge in edges], None]
    return [
        FrequencyBand(f"{low}+", low - 1, float("inf"))
        if high is None
        else FrequencyBand(f"{low}-{high}", low - 1, float(high))
        for low, high in zip(lows, highs)
    ]


def by_frequency(
    source: TableInput, members: dict[str, ad.Member], data: Path | None
) -> dict[str, Any]:
    """Gains over DET, and over DET at its T, by training frequency of the target."""
    counts = source.counts(data)
    cumulative = suitable_bands(source.data, counts, classes=source.unit == "image")
    found: dict[str, Any] = {}
    for split, scores in source.scores.items():
        known = {n: m for n, m in members.items() if m.at_temperature(1.0) in scores.members}
        for kind, bands in (("cumulative", cumulative), ("disjoint", disjoint(cumulative))):
            cuts = [(band.low, band.high) for band in bands]
            rows = [
                {"band": band.name, "targets": size, "det": numbers(e) if e else None}
                for band, (_, size, e) in zip(bands, scores.by_frequency(ad.DET, counts, cuts))
            ]
            for name, member in known.items():
                for against in ("DET", "DET at T*"):
                    gaps = scores.by_frequency(member, counts, cuts, members[against])
                    for row, (_, _, gap) in zip(rows, gaps):
                        row[f"{name} minus {against}"] = numbers(gap) if gap else None
            found[f"{split}, {kind}"] = rows
    return found


def calibration(scores: ad.Scores, members: dict[str, ad.Member]) -> dict[str, Any]:
    """Accuracy, Brier score, ECE, and the bins of a reliability diagram."""
    rows = {}
    for name, member in members.items():
        if member.at_temperature(1.0) not in scores.members:
            continue
        sure, right = scores.confidence(member).double(), scores.correct(member).double()
        at = (sure * 15).long().clamp_max(14)
        sizes = at.bincount(minlength=15)
        rows[name] = named(member) | {
            "xe": numbers(scores.xe(member)),
            "accuracy": scores.accuracy(member).value,
            "brier": scores.brier(member).value,
            "ece": scores.ece(member).value,
            "bins": [
                [int(n), c / max(1, int(n)), r / max(1, int(n))]
                for n, c, r in zip(
                    sizes,
                    at.bincount(sure, minlength=15).tolist(),
                    at.bincount(right, minlength=15).tolist(),
                )
            ],
        }
    return rows


def training_of(run: Path) -> dict[str, Any]:
    """The lines of metrics, thinned."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    every = max(1, len(lines) // INTERVALS_KEPT)
    best = min(lines, key=lambda line: line["xe_optimal"])
    return {"best": best, "last": lines[-1], "lines": lines[::every]}


def digest(run: Path, data: Path | None) -> dict[str, Any]:
    """All numbers of one run; what is not available is listed in `missing`."""
    source, missing = read_table_input(run), list[str]()
    missing += source.faults.values()
    out: dict[str, Any] = {
        "run": source.name,
        "data": source.data,
        "unit": source.unit,
        "parameters": source.parameters,
        "config": source.config.to_dict() if source.config else None,
        "training": training_of(run),
        "missing": missing,
    }
    valid = source.scores.get("valid")
    if valid is None:
        missing.append("no validation Scores")
        return out
    chosen, out["selection"] = selection_of(valid)
    members = shown_members(valid, chosen)
    out["splits"] = {
        split: {
            "targets": scores.num_targets,
            "examples": int(scores.clusters.max()) + 1,
            "K": scores.num_samples,
            "limit": scores.request.limit,
            "stream": dataclasses.asdict(stream) if (stream := scores.request.stream) else {},
            "members": members_of(scores, valid),
            "calibration": calibration(scores, members),
            "samples": {
                name: [[k, numbers(e)] for k, e in scores.curve(m)]
                for name, m in members.items()
                if m in scores.members  # curves are at T = 1
            },
        }
        for split, scores in source.scores.items()
    }
    out["over_temperature"] = {
        name: [[t, valid.xe(member.at_temperature(t)).value] for t in TEMPERATURES]
        for name, member in members.items()
        if member.temperature == 1
    }
    out["subset"] = {
        name: subset_rows(valid, member.at_temperature(1.0), SUBSETS, 50)
        for name, member in members.items()
        if name in ("DET", "AMC x1", "chosen")
    }
    try:
        out["frequency"] = by_frequency(source, members, data)
    except AfterdropError as error:
        missing.append(str(error))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    found = []
    for run in options.runs:
        start = time.perf_counter()
        found.append(digest(run, options.data))
        options.out.write_text(json.dumps(found, separators=(",", ":")))
        print(f"{run.name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
