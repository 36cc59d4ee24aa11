"""The evidence for each of the paper's claims, as Markdown, from the digests of evaluated runs.

    python benchmarks/result_digest.py RUN [RUN ...] --out FILE.json
    python benchmarks/result_claims.py FILE.json [FILE.json ...]

± is one standard error of the paired difference before it, masks and data together.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

NINE = (0.8, 0.9, 1.0)

Row = dict[str, Any]


def said(found: Row | None, digits: int = 4) -> str:
    """A difference with its error."""
    if found is None:
        return "–"
    return f"{found['value']:+.{digits}f} ± {found['error']:.{digits}f}"


def name(row: Row) -> str:
    if row["multiplier"] == 0:
        return "DET"
    kind = {0: "GMC", 1: "AMC"}.get(row["alpha"], f"α = {row['alpha']:g}")
    return f"{kind} ×{row['multiplier']:g}"


def shown(run: Row, xe: float) -> str:
    """A cross entropy in nats, and as perplexity of words or bits per character."""
    if run["unit"] == "word":
        return f"{xe:.4f} ({math.exp(xe):.2f})"
    return f"{xe:.4f} ({xe / math.log(2):.4f} bits)" if run["unit"] == "char" else f"{xe:.4f}"


def find(rows: list[Row], alpha: float, multiplier: float) -> Row | None:
    at = [r for r in rows if (r["multiplier"], r["alpha"]) == (multiplier, alpha)]
    return at[0] if at else None


def members_table(run: Row) -> list[str]:
    """The nine settings and the choice, at T = 1 and at their T, compared with DET at T = 1."""
    splits = {s: run["splits"][s]["members"] for s in ("valid", "test") if s in run["splits"]}
    chosen = run["selection"]["chosen"]
    wanted = [(0.0, 0.0), *itertools.product((0.0, 0.5, 1.0), NINE)]
    wanted.append((chosen["alpha"], chosen["multiplier"]))
    heads = [f"{split} {what}" for split in splits for what in ("T = 1", "− DET", "T*", "− DET")]
    lines = ["| member | T* | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for alpha, multiplier in dict.fromkeys(wanted):
        rows = [
            find(m, alpha if multiplier else m[0]["alpha"], multiplier) for m in splits.values()
        ]
        if rows[0] is None:
            continue
        cells = [name(rows[0]), f"{rows[0]['T']:.3f}"]
        for row in rows:
            if row is None:
                cells += ["–"] * 4
                continue
            cells += [shown(run, row["xe"]["value"]), said(row["minus_det"])]
            cells += [shown(run, row["xe_T"]["value"]), said(row["minus_det_T"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def fit_to_training(run: Row) -> str:
    """Whether a higher multiplier makes the training fit worse (Table 1)."""
    rows = run["splits"].get("train", {}).get("members")
    if not rows:
        return "training fit: no training Scores"
    alphas = sorted({row["alpha"] for row in rows if row["multiplier"]})
    ups = steps = 0
    for alpha in alphas:
        own = [rows[0], *(row for row in rows if row["multiplier"] and row["alpha"] == alpha)]
        values = [row["xe"]["value"] for row in sorted(own, key=lambda row: row["multiplier"])]
        pairs = list(itertools.pairwise(values))
        steps, ups = steps + len(pairs), ups + sum(b > a for a, b in pairs)
    ends = [row for row in rows if row["multiplier"] in (0, 1)]
    told = ", ".join(f"{name(row)} {row['xe']['value']:.4f}" for row in ends)
    size = run["splits"]["train"]["targets"]
    return (
        f"training fit ({size:,} targets): {ups} of {steps} steps to the next higher multiplier "
        f"raise the XE (Table 1 has their errors). {told}"
    )


def winners(run: Row) -> list[str]:
    """The best member at T = 1 of the paper's settings and of the grid, and the gain from T."""
    rows = run["splits"]["valid"]["members"]
    nine = [r for r in rows if r["multiplier"] in (0, *NINE) and r["alpha"] in (0, 0.5, 1)]
    lines = []
    for label, among in (("the paper's nine and DET", nine), (f"all {len(rows)}", rows)):
        best = min(among, key=lambda row: row["xe"]["value"])
        tuned = min(among, key=lambda row: row["xe_T"]["value"])
        lines.append(
            f"best of {label} at T = 1: {name(best)}, {said(best['minus_det'])} to DET; at its own "
            f"T: {name(tuned)} (T = {tuned['T']:.3f}), {said(tuned['minus_det_T'])} to DET, "
            f"{said(tuned['minus_tempered_det_T'])} to DET at T*"
        )
    amc = find(rows, 1.0, 1.0)
    if amc:
        lines.append(
            f"AMC ×1 wants T = {amc['T']:.3f}, which changes it by {said(amc['minus_own'])}"
        )
    lines.append(
        f"DET wants T = {rows[0]['T']:.3f}, which changes it by {said(rows[0]['minus_own'])}"
    )
    return lines


def choice(run: Row) -> list[str]:
    """The gain of choosing from the family, on validation and on test data."""
    found, chosen = run["selection"], run["selection"]["chosen"]
    often = ", ".join(f"{name(row)} {100 * row['share']:.0f} %" for row in found["recurrence"][:4])
    lines = [
        f"chosen: {name(chosen)}, T = {chosen['T']:.4f}; gain {said(found['gain'])}, cross-fitted "
        f"{said(found['crossfit'])}; DET at T* has {100 * found['temperature_share']:.0f} % of it; "
        f"resamples choose {often}"
    ]
    test = run["splits"].get("test", {}).get("members", [])
    alpha = chosen["alpha"] if chosen["multiplier"] or not test else test[0]["alpha"]
    row = find(test, alpha, chosen["multiplier"])
    if test and not row:
        lines.append("evaluation only, on test data: the chosen member was not evaluated there")
    elif row:
        tuned = chosen["T"] != 1
        xe, gap = (row["xe_T"], row["minus_det_T"]) if tuned else (row["xe"], row["minus_det"])
        lines.append(
            f"evaluation only, on test data: DET at T = 1 {shown(run, test[0]['xe']['value'])}, at "
            f"T* {shown(run, test[0]['xe_T']['value'])}, the choice {shown(run, xe['value'])}: "
            f"{said(gap)} to DET at T = 1, {said(row['minus_tempered_det_T'])} to DET at T*"
        )
    return lines


def frequency_table(run: Row) -> list[str]:
    """Differences from DET by training frequency, at T = 1 and with DET at its T."""
    lines = []
    columns = ("AMC x0.8 minus DET", "AMC x1 minus DET", "DET at T* minus DET")
    columns += ("chosen minus DET", "chosen minus DET at T*")
    for split in ("valid", "train"):
        for kind in ("cumulative", "disjoint"):
            rows = run.get("frequency", {}).get(f"{split}, {kind}", [])
            if not rows:
                continue
            lines += ["", f"{split}, bands {kind}:", ""]
            lines += ["| training count | targets | DET | " + " | ".join(columns) + " |"]
            lines += ["|---" * (len(columns) + 3) + "|"]
            for row in rows:
                det = "–" if row["det"] is None else f"{row['det']['value']:.3f}"
                cells = [row["band"], f"{row['targets']:,}", det]
                cells += [said(row.get(column)) for column in columns]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def subset_table(run: Row) -> list[str]:
    """T fitted on subsets: its spread over draws, and the loss on all targets."""
    lines = [
        "| member | targets | T | ± draws | lost (mean) | lost (9 of 10 draws) |",
        "|---" * 6 + "|",
    ]
    for member, (*rows, whole) in run.get("subset", {}).items():
        for row in rows:
            lines.append(
                f"| {member} | {row['targets']:.0f} | {row['T']:.3f} | {row['spread']:.3f} | "
                f"{row['lost']:.5f} | {row['lost_often']:.5f} |"
            )
        lines.append(
            f"| {member} | all {whole['targets']:,} | {whole['T']:.3f} | | gains "
            f"{whole['gained']:.4f} | |"
        )
    return lines


def claims(run: Row) -> str:
    """All sections for one run."""
    best = run["training"].get("best", {})
    size = f"{run['parameters'] / 1e6:.1f}M weights" if run["parameters"] else "own model"
    lines = [f"## {run['run']}: {run['data']}, {size}", ""]
    if best:
        last = run["training"]["last"]
        lines.append(
            f"Trained {last['step']:,} steps in {last['seconds']:.0f} s; best interval "
            f"{best['interval']}: deterministic validation XE {best['xe']:.4f}, "
            f"{best['xe_optimal']:.4f} at T = {best['temperature']:.3f}."
        )
    lines += [f"Missing: {text}" for text in run["missing"]]
    if "splits" not in run:
        return "\n".join(lines)
    told = [fit_to_training(run), *winners(run), *choice(run)]
    lines += ["", *(f"- {line}" for line in told), "", *members_table(run)]
    lines += ["", "T from a subset (words: random windows):", "", *subset_table(run)]
    return "\n".join([*lines, *frequency_table(run)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("digests", type=Path, nargs="+")
    for path in parser.parse_args().digests:
        for run in json.loads(path.read_text()):
            print(claims(run), end="\n\n")


if __name__ == "__main__":
    main()
