"""Graders that do what the answers say. Light to import: a worker does it within its first deadline."""

import operator
import os

from posttrain.rl.reward.answer import Grade


def obey(answers):
    """Grade by the words of the answers: "hang" never ends, "die" ends its process, and so on."""
    grades = []
    for answer in answers:
        while answer.text == "hang":
            pass
        if answer.text == "fail":
            raise ValueError("a grader with a defect")
        if answer.text == "die":
            os._exit(3)
        if answer.text == "fill":
            bytearray(2 << 30)
        grades.append(Grade(float(answer.text == "42"), {"length": len(answer.text)}))
    return tuple(grades) if "few" not in answers[0].text else ()


class ElsewhereOnly:
    """A grader that no worker can import."""

    def __reduce__(self):
        return (operator.getitem, ({}, "no such module"))

    def __call__(self, answers):
        return ()
