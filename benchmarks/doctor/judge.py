"""What the doctor says of the traces of ``run.py``, beside what was measured.

::

    python -m benchmarks.doctor.judge OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from crossfade.profile.doctor.diagnosis import Report, diagnose
from crossfade.profile.traces.reader import read_traces

_LEAST = 0.05  # a fix that wins less is not asked to be found


def main() -> None:
    folder = Path(sys.argv[1])
    print("| program | seed | measured gain | first diagnosis | predicted | right | of the program without the cause |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    num_asked = num_right = num_false = num_quiet = 0
    errors = []
    for line in (folder / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        if "error" in result:
            print(f"| {result['name']} | {result['seed']} | {result['error'][:60]} | | | | |")
            continue
        name, predicted = _first(_report(folder, result, "cause"))
        other, _ = _first(_report(folder, result, "fixed"))
        gain = result["gain"]
        is_asked = gain >= _LEAST and bool(result["cause"])
        is_right = name == result["cause"] if is_asked else name == ""
        if is_asked:
            num_asked, num_right = num_asked + 1, num_right + is_right
            errors += [abs(predicted - gain) / gain] if is_right else []
        else:
            num_quiet, num_false = num_quiet + 1, num_false + (not is_right)
        num_quiet, num_false = num_quiet + 1, num_false + bool(other)
        shown = f"{predicted:.1%}" if name else ""
        print(
            f"| {result['name']} | {result['seed']} | {gain:.1%} | {name or '-'} | {shown} |"
            f" {'yes' if is_right else 'NO'} | {other or '-'} |"
        )
    print(f"\nright first cause: {num_right} of {num_asked} whose fix wins at least {_LEAST:.0%}")
    print(f"diagnoses where nothing is to be won: {num_false} of {num_quiet} traces")
    if errors:
        print(
            f"predicted gain over the measured one: off by {median(errors):.0%} on the median, {max(errors):.0%} at most"
        )


def _report(folder: Path, result: dict[str, object], which: str) -> Report:
    files = sorted(folder.glob(f"{result['name']}-{result['seed']}-{which}-*.json.gz"))
    return diagnose(read_traces(files))


def _first(report: Report) -> tuple[str, float]:
    found = [diagnosis for diagnosis in report.diagnoses if not diagnosis.is_remark]
    return (str(found[0].finding.cause), found[0].gain.likely) if found else ("", 0.0)


if __name__ == "__main__":
    main()
