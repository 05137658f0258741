"""What the numbers say: the price of each step to a finer mode, the acceptance, a recommendation."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from seg4k.studies.arms import Arm, paired
from seg4k.studies.pareto import pareto_front
from seg4k.studies.words import percent, size, three_digits

LADDER = ("none", "stage", "block", "layer")
"""Modes from coarse to fine; the others (one side only, selective, planned) are no steps of it."""

ACCEPTED_PEAK_DROP = 0.30
"""The acceptance asks for a peak at least this much below the baseline's."""

USUAL_SLOWDOWN = (0.20, 0.40)
"""Rise of time per sample that activation checkpointing usually costs; above it, it is not accepted."""


SAME_SPEED = 0.02
"""Share of the throughput below which a difference does not decide a recommendation."""


def make_steps(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """The price of each step down `LADDER`, within each strategy and device count, in the order of `arms`.

    Each entry: `from`, `to` (labels), `saved_bytes` and `throughput_lost` (a share of the coarser mode's
    samples/s), medians over paired seeds, `throughput_lost_range`, and `words`.
    """
    steps = []
    for group in dict.fromkeys(arm.group for arm in arms):
        ladder = [arm for arm in arms if arm.group == group and arm.mode in LADDER and arm.completed]
        steps += [_make_step(coarse, fine) for coarse, fine in pairwise(ladder)]
    return [step for step in steps if step is not None]


def make_front_steps(arms: Sequence[Arm], front: Sequence[str]) -> list[dict[str, Any]]:
    """The same for each step along the Pareto front, from the fastest to the leanest."""
    by_label = {arm.label: arm for arm in arms}
    steps = [_make_step(by_label[coarse], by_label[fine]) for coarse, fine in pairwise(front)]
    return [step for step in steps if step is not None]


def _make_step(coarse: Arm, fine: Arm) -> dict[str, Any] | None:
    pairs = paired(coarse, fine)
    saved = [one.peak_bytes - other.peak_bytes for one, other in pairs if one.peak_bytes and other.peak_bytes]
    lost = [
        1 - (other.samples_per_second / other.devices) / (one.samples_per_second / one.devices)
        for one, other in pairs
        if one.samples_per_second and other.samples_per_second
    ]
    if not saved or not lost:
        return None
    step = {
        "from": coarse.label,
        "to": fine.label,
        "saved_bytes": round(statistics.median(saved)),
        "throughput_lost": statistics.median(lost),
        "throughput_lost_range": [min(lost), max(lost)],
    }
    return {**step, "words": _step_words(step)}


def _step_words(step: Mapping[str, Any]) -> str:
    saved, lost = step["saved_bytes"], step["throughput_lost"]
    low, high = step["throughput_lost_range"]
    spread = f" ({percent(low)} to {percent(high)})" if percent(low) != percent(high) else ""
    no_matter = low <= 0 <= high  # some seeds say faster, some slower
    memory = (
        f"saves {size(saved)}"
        if saved > 0
        else "saves nothing"
        if saved == 0
        else f"takes {size(-saved)} more"
    )
    if no_matter:
        return f"{memory}, at the same throughput within its spread{spread}"
    if lost < 0:
        return f"{memory} and gives {percent(-lost)} more throughput" + (
            ": better in both" if saved > 0 else ""
        )
    worse = "" if saved > 0 else ": no better in memory and slower, too fine"
    return f"{memory} and costs {percent(lost)} of throughput{spread}{worse}"


def make_acceptance(rows: Sequence[Mapping[str, Any]], baseline_mode: str) -> list[dict[str, Any]]:
    """Hold each mode against the acceptance: peak down 30%, slowdown known and at most 40%, mIoU parity.

    Entries: `mode` (label); `peak_down_30`, `slowdown_acceptable`, `parity` and `accepted`, each True, False,
    or None where it was not measured or not decided; `slowdown_known`; and `words`, one for each
    of the three.
    """
    entries = []
    for row in rows:
        if row["mode"] == baseline_mode:
            continue
        ratio, at_most, slowdown = row["peak_ratio"], row["peak_ratio_at_most"], row["slowdown"]
        enough = None
        if ratio is not None:
            enough = 1 - ratio >= ACCEPTED_PEAK_DROP
        elif at_most is not None and 1 - at_most >= ACCEPTED_PEAK_DROP:
            enough = True  # the baseline needs more than it had reached, so the true ratio is lower still
        acceptable = None if slowdown is None else slowdown - 1 <= USUAL_SLOWDOWN[1]
        parity = {"exact": True, "within_margin": True, "outside_margin": False}.get(row["parity"])
        checks = (enough, acceptable, parity)
        entries.append(
            {
                "mode": row["label"],
                "peak_down_30": enough,
                "slowdown_known": slowdown is not None,
                "slowdown_acceptable": acceptable,
                "parity": parity,
                "accepted": False if False in checks else None if None in checks else True,
                "words": [_peak_words(ratio, at_most), _slowdown_words(slowdown), row["parity_words"]],
            }
        )
    return entries


def _peak_words(ratio: float | None, at_most: float | None) -> str:
    if ratio is not None:
        return f"peak {percent(ratio - 1, signed=True)}"
    if at_most is not None:
        return f"peak {percent(at_most - 1, signed=True)} or better (the baseline ran out of memory)"
    return "peak not compared"


def _slowdown_words(slowdown: float | None) -> str:
    if slowdown is None:
        return "slowdown not measured"
    low, high = USUAL_SLOWDOWN
    rise = slowdown - 1
    place = "below" if rise < low else "above" if rise > high else "within"
    return f"time {percent(rise, signed=True)}, {place} the usual {percent(low)} to {percent(high)}"


def make_recommendations(rows: Sequence[Mapping[str, Any]], baseline_mode: str) -> list[dict[str, Any]]:
    """For each strategy and device count, the mode to take (`mode`, a label or None) and why (`words`).

    The fastest mode whose peak lies at least 30% below the baseline's and whose results have not been found
    to drift; of modes within 2% of its speed, the leanest. Where none reaches 30%, none is recommended over
    the baseline; where the baseline was not completed, the choice is among those that were.
    """
    found = []
    for group in dict.fromkeys((row["strategy"], row["devices"]) for row in rows):
        members = [row for row in rows if (row["strategy"], row["devices"]) == group]
        label, words = _recommend(members, baseline_mode)
        found.append({"strategy": group[0], "devices": group[1], "mode": label, "words": words})
    return found


def _recommend(rows: Sequence[Mapping[str, Any]], baseline_mode: str) -> tuple[str | None, str]:
    base = next((row for row in rows if row["mode"] == baseline_mode), None)
    measured = [row for row in rows if row["peak_bytes"] and row["samples_per_second"]]
    others = [row for row in measured if row["mode"] != baseline_mode and row["parity"] != "outside_margin"]
    if not others:
        return None, "No mode that could be recommended was measured to the end."
    enough = [
        row
        for row in others
        if 1 - (row["peak_ratio"] or row["peak_ratio_at_most"] or 1) >= ACCEPTED_PEAK_DROP
    ]
    if base not in measured:
        pick = _fastest(enough or others)
        return pick["label"], _without_baseline(pick, base, baseline_mode)
    assert base is not None
    if not enough:
        best = min(others, key=lambda row: row["peak_bytes"])
        return None, (
            f"Keep `{base['label']}`: no other mode lowers the peak by 30%. The leanest of them, "
            f"`{best['label']}`, reaches {size(best['peak_bytes'])} against {size(base['peak_bytes'])}."
        )
    pick = _fastest(enough)
    costs = {row["label"]: (row["peak_bytes"], row["samples_per_second"]) for row in measured}
    front = pareto_front(costs)
    leaner = [row for row in others if row["label"] in front and row["peak_bytes"] < pick["peak_bytes"]]
    leaner.sort(key=lambda row: -row["peak_bytes"])
    fall = f"{size(base['peak_bytes'])} to {size(pick['peak_bytes'])}"
    share = percent(pick["peak_ratio"] - 1, signed=True)
    parts = [f"Take `{pick['label']}`: the peak falls from {fall} ({share}){_cost_words(pick)}"]
    if leaner:
        saved = size(pick["peak_bytes"] - leaner[0]["peak_bytes"])
        lost = percent(1 - leaner[0]["samples_per_second"] / pick["samples_per_second"])
        parts.append(
            f"The next leaner, `{leaner[0]['label']}`, saves {saved} more for {lost} of throughput: "
            "worth it only where that decides whether it fits."
        )
    else:
        parts.append("No other mode measured here needs less memory.")
    if base["label"] in front:
        parts.append(f"Where there is room for {size(base['peak_bytes'])}, `{base['label']}` is the fastest.")
    drifting = [f"`{row['label']}`" for row in rows if row["parity"] == "outside_margin"]
    if drifting:
        parts.append(f"Do not use {', '.join(drifting)} before the drift is understood.")
    return pick["label"], " ".join(parts)


def _fastest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The fastest, or the leanest of those that are as good as equally fast."""
    best = max(row["samples_per_second"] for row in rows)
    near = [row for row in rows if row["samples_per_second"] >= (1 - SAME_SPEED) * best]
    return min(near, key=lambda row: (row["peak_bytes"], -row["samples_per_second"]))


def _cost_words(pick: Mapping[str, Any]) -> str:
    cost = ""
    if pick["slowdown"] is not None:
        cost = f" for {percent(pick['slowdown'] - 1, signed=True)} time per sample"
    settled = {
        "exact": ", with results equal to the last bit.",
        "within_margin": ", with mIoU within the margin.",
    }
    return cost + settled.get(pick["parity"], f". Parity is not settled yet: {pick['parity_words']}.")


def _without_baseline(pick: Mapping[str, Any], base: Mapping[str, Any] | None, baseline_mode: str) -> str:
    if base is not None and base["out_of_memory"]:
        why = f"`{base['label']}` ran out of memory; of the modes that fit this is the one to start with"
    else:
        why = f"no `{baseline_mode}` run was completed; of the others this is the one to start with"
    return (
        f"Take `{pick['label']}`: {why}, "
        f"with a peak of {size(pick['peak_bytes'])} at {three_digits(pick['samples_per_second'])} samples/s. "
        "That it changes no result has not been shown here."
    )
