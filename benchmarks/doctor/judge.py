"""What the doctor says of the traces of ``run.py``, beside what was measured.

::

    python -m benchmarks.doctor.judge OUT              # of plain traces
    python -m benchmarks.doctor.judge OUT --record     # of those that crossfade.record wrote

Where the rounds of a program do not tell whether its fix wins 5 % (the second smallest and the second largest of their gains lie
on either side of it; of few rounds, the smallest and the largest), the cause and nothing are equally right answers, and the program
is set aside. Another cause is wrong there too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from crossfade.errors import TraceError
from crossfade.profile.doctor.diagnosis import Report, diagnose
from crossfade.profile.traces.reader import read_traces

_LEAST = 0.05  # a fix that wins less is not asked to be found
_ABSTAINS = "abstains"
_MANY_ROUNDS = 5


@dataclass
class _Counts:
    num_asked: int = 0
    num_right: int = 0
    num_abstained: int = 0
    num_quiet: int = 0
    num_false: int = 0
    num_aside: int = 0
    errors: list[float] = field(default_factory=list)

    def asked(self, gain: float, name: str, predicted: float, cause: str) -> bool:
        """A fix that wins enough; whether its cause came first."""
        self.num_asked += 1
        self.num_abstained += name == _ABSTAINS
        self.num_right += name == cause
        if name == cause:
            self.errors.append(abs(predicted - gain) / gain)
        return name == cause

    def quiet(self, name: str) -> bool:
        """A trace without a fix that wins enough; whether nothing was said."""
        is_right = name in ("", _ABSTAINS)
        self.num_quiet += 1
        self.num_false += not is_right
        return is_right


def main() -> None:
    folder, kind = Path(sys.argv[1]), ".record" if "--record" in sys.argv[2:] else ""
    print("| program | seed | measured gain | first diagnosis | predicted | right | of the program without the cause |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    counts = _Counts()
    for line in (folder / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        if "error" in result:
            print(f"| {result['name']} | {result['seed']} | {result['error'][:60]} | | | | |")
            continue
        found = {which: _first(folder, result, f"{which}{kind}") for which in ("cause", "fixed")}
        if None in found.values():
            print(f"| {result['name']} | {result['seed']} | no traces of this kind | | | | |")
            continue
        (name, predicted), (other, _) = found["cause"] or ("", 0.0), found["fixed"] or ("", 0.0)
        gain = result["gain"]
        is_asked = gain >= _LEAST and bool(result["cause"])
        right = "yes"
        if bool(result["cause"]) and not _is_told(result.get("gains", [])) and name in ("", _ABSTAINS, result["cause"]):
            counts.num_aside += 1
            right = "aside"
        elif not (counts.asked(gain, name, predicted, result["cause"]) if is_asked else counts.quiet(name)):
            right = "NO"
        counts.quiet(other)
        shown = f"{predicted:.1%}" if predicted else ""
        print(
            f"| {result['name']} | {result['seed']} | {gain:.1%} | {name or '-'} | {shown} | {right} | {other or '-'} |"
        )
    print(f"\nright first cause: {counts.num_right} of {counts.num_asked} whose fix wins at least {_LEAST:.0%}")
    print(f"of those, abstained: {counts.num_abstained}")
    print(f"set aside, since their rounds do not tell whether it does: {counts.num_aside}")
    print(f"diagnoses where nothing is to be won: {counts.num_false} of {counts.num_quiet} traces")
    if counts.errors:
        typical, worst = median(counts.errors), max(counts.errors)
        print(f"predicted gain over the measured one: off by {typical:.0%} on the median, {worst:.0%} at most")


def _is_told(gains: Sequence[float]) -> bool:
    """Whether the rounds agree that a fix wins enough, or that it does not. Older results have no rounds."""
    ordered = sorted(gains)
    inner = ordered[1:-1] if len(ordered) >= _MANY_ROUNDS else ordered
    return not inner or inner[0] >= _LEAST or inner[-1] < _LEAST


def _first(folder: Path, result: dict[str, Any], which: str) -> tuple[str, float] | None:
    """The first diagnosis of a program's traces and what it wins; None where there are no such traces."""
    files = sorted(folder.glob(f"{result['name']}-{result['seed']}-{which}-*.json.gz"))
    try:
        report: Report | None = diagnose(read_traces(files)) if files else None
    except TraceError as error:
        print(f"{which}: {error}", file=sys.stderr)
        return _ABSTAINS, 0.0
    if report is None:
        return None
    if report.abstains:
        return _ABSTAINS, 0.0
    found = [diagnosis for diagnosis in report.diagnoses if not diagnosis.is_remark]
    return (str(found[0].finding.cause), found[0].gain.likely) if found else ("", 0.0)


if __name__ == "__main__":
    main()
