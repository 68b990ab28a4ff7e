"""Writes a diagnosis as text and as JSON."""

from typing import Any

import msgspec

from shoal.deploy.doctor.diagnosis import Diagnosis
from shoal.deploy.doctor.problem import Problem

_SIDES = {"you": "on this machine", "host": "at the host's", "nobody": "in between"}


def lines(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis for a person: first what is wrong, then what is well."""
    told = [line for problem in diagnosis.problems for line in problem_lines(problem)]
    told += [f"ok       {line}" for line in diagnosis.fine]
    if not diagnosis.problems:
        told.append("nothing is wrong that shoal can see")
    return told


def problem_lines(problem: Problem) -> list[str]:
    mark = "PROBLEM" if problem.fatal else "beware "
    return [f"{mark}  {problem.sentence} ({_SIDES[problem.side]})", f"         do this: {problem.remedy}"]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """`main` is the code of what keeps us out, or null."""
    return {
        "main": diagnosis.main.code if diagnosis.main else None,
        "problems": [msgspec.to_builtins(problem) for problem in diagnosis.problems],
        "fine": list(diagnosis.fine),
    }
