"""Whether a run is healthy, and why: a sentence for the first page of the viewer.

It is computed from metrics.jsonl, mostly from the last RECENT updates. The gravest problem decides:
an early end, failures, no signal, an engine and a learner with different models, skipped steps, a
drop of an evaluation, tools with many errors, truncations by limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from agentenv.data.data_files import Row

RECENT = 10  # updates
FAILED, MOSTLY_FAILED = 0.02, 0.2  # shares of trajectories
EQUAL = 0.9  # share of groups with equal returns
SOLVED, HOPELESS = 0.9, 0.1  # success
GAP, WIDE_GAP = 0.03, 0.1  # nats between engine and learner
ERRORS, LEAST_CALLS = 0.5, 20  # share of errors of a tool, and its minimum number of calls
CUT = 0.3  # share of trajectories truncated by a limit

Grade = Literal["healthy", "doubtful", "unhealthy"]


class Health(Struct, rename={"grade": "is"}):
    """A grade, and its reason as a sentence."""

    grade: Grade
    text: str


def health_of(rows: Sequence[Row], status: str, num_steps: object = None) -> Health | None:
    """The health of a run with these metrics. `status`: that of the folder; `num_steps`: the number
    of planned updates. None if there is no data yet."""
    steps = {row["step"]: row for row in rows if "trees/offered" in row}
    updates = [steps[step] for step in sorted(steps)]
    if not updates:
        if status != "stopped":
            return None
        return Health("doubtful", "It was stopped before its first update; run.log has the reason.")
    found = list(_faults(updates[-RECENT:], len(updates)))
    found += _of_evaluations(rows)
    if status == "stopped":
        total = f" of {num_steps}" if isinstance(num_steps, int) else ""
        found.append(
            Health("doubtful", f"it was stopped after update {updates[-1]['step']}{total}")
        )
    grave = [one for one in found if one.grade == "unhealthy"]
    if shown := grave or found:
        reasons = "; ".join(one.text for one in shown[:2])
        return Health(shown[0].grade, f"{reasons[0].upper()}{reasons[1:]}.")
    return Health("healthy", _well(rows, updates))


def _faults(recent: Sequence[Row], num_updates: int) -> Iterator[Health]:
    """The problems of the last updates, the gravest first."""
    last = f"the last {len(recent)} updates" if len(recent) < num_updates else "all updates"
    failed, ended = _sum(recent, "failed/trajectories"), _sum(recent, "rollout/trajectories")
    share = failed / max(1.0, failed + ended)
    if share > FAILED:
        kinds = _by_name(recent, "failed/by_kind/")
        kind = f", mostly {max(kinds, key=lambda one: kinds[one])}" if kinds else ""
        more = "; success is that of the rest" if share > MOSTLY_FAILED else ""
        grade: Grade = "unhealthy" if share > MOSTLY_FAILED else "doubtful"
        yield Health(grade, f"{share:.0%} of the trajectories of {last} failed{kind}{more}")
    gap = _last(recent, "parity/logprob_gap_mean")
    if gap > GAP:
        grade = "unhealthy" if gap > WIDE_GAP else "doubtful"
        text = f"engine and learner differ by {gap:.2g} nats a token: they compute different models"
        yield Health(grade, text)
    if skipped := _sum(recent, "learner/num_skipped"):
        text = f"{skipped:.0f} optimizer steps of {last} were skipped: loss or gradient not finite"
        yield Health("unhealthy", text)
    yield from _signal(recent, last)
    calls = _by_name(recent, "tool/", "/calls")
    for tool, errors in _by_name(recent, "tool/", "/errors").items():
        if calls.get(tool, 0.0) >= LEAST_CALLS and errors / calls[tool] > ERRORS:
            yield Health(
                "doubtful", f"{errors / calls[tool]:.0%} of the calls of {tool} are errors"
            )
    cut = _mean(recent, "rollout/truncated")
    if cut > CUT:
        yield Health("doubtful", f"limits cut off {cut:.0%} of the trajectories of {last}")


def _signal(recent: Sequence[Row], last: str) -> Iterator[Health]:
    """A problem if few groups have a signal, unless nearly all answers are correct."""
    groups, equal = (
        _sum(recent, f"learner/{name}") for name in ("num_trained", "num_equal_groups")
    )
    success = _mean(recent, "reward/success")
    if not any("learner/num_trained" in row for row in recent):
        return
    if not groups:
        yield Health("unhealthy", f"in {last}, no tree had a signal")
    elif equal / groups > EQUAL and success < SOLVED:
        why = ": nearly all answers are wrong" if success < HOPELESS else ""
        grade: Grade = "unhealthy" if success < HOPELESS else "doubtful"
        yield Health(grade, f"{equal / groups:.0%} of the groups of {last} have no signal{why}")


def _of_evaluations(rows: Sequence[Row]) -> Iterator[Health]:
    """A problem for each set whose success fell below the interval of its best evaluation."""
    for name, found in evaluated(rows).items():
        best = max(found, key=lambda row: float(row[f"eval/{name}/success"]))
        now = found[-1]
        high, low = now.get(f"eval/{name}/success_high"), best.get(f"eval/{name}/success_low")
        if high is not None and low is not None and high < low:
            values = [f"{row[f'eval/{name}/success']:.2f}" for row in (best, now)]
            where = f"after update {best['step']}" if best["step"] else "at the start"
            yield Health(
                "unhealthy", f"success on {name} fell to {values[1]}, from {values[0]} {where}"
            )


def evaluated(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The evaluations of each set, except those in which all trajectories failed."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for key in row:
            parts = key.split("/")
            if len(parts) == 3 and parts[0] == "eval" and parts[2] == "success":
                found.setdefault(parts[1], []).append(row)
    return found


def _well(rows: Sequence[Row], updates: Sequence[Row]) -> str:
    failed = _sum(updates, "failed/trajectories")
    end = f"{failed:.0f} trajectories failed" if failed else "no trajectory failed"
    for name, found in evaluated(rows).items():
        first, now = found[0], found[-1]
        value = f"{now[f'eval/{name}/success']:.2f}{_interval(now, name)}"
        if first is now:
            return f"Success on {name} is {value}; {end}."
        before = first[f"eval/{name}/success"]
        return f"Success on {name} went from {before:.2f} to {value}; {end}."
    values = [row["reward/success"] for row in updates if "reward/success" in row]
    if not values:
        return f"{end[0].upper()}{end[1:]}."
    return f"Success of training went from {values[0]:.2f} to {values[-1]:.2f}; {end}."


def _interval(row: Row, name: str) -> str:
    ends = [row.get(f"eval/{name}/success_{end}") for end in ("low", "high")]
    return "" if None in ends else f" [{ends[0]:.2f}, {ends[1]:.2f}]"


def _sum(rows: Sequence[Row], key: str) -> float:
    return sum(float(row.get(key) or 0.0) for row in rows)


def _mean(rows: Sequence[Row], key: str) -> float:
    found = [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return sum(found) / len(found) if found else 0.0


def _last(rows: Sequence[Row], key: str) -> float:
    return next((float(row[key]) for row in reversed(rows) if row.get(key) is not None), 0.0)


def _by_name(rows: Sequence[Mapping[str, Any]], start: str, end: str = "") -> dict[str, float]:
    """Sums of the metrics whose keys are `start` + NAME + `end`, by NAME."""
    found: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(start) and key.endswith(end) and isinstance(value, int | float):
                name = key[len(start) : len(key) - len(end)]
                found[name] = found.get(name, 0.0) + value
    return found
