import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from posttrain.plan.resolve import resolve
from posttrain.plan.rule_chain import RuleNode, rule_chain
from posttrain.report.report_dag import NODE_HEIGHT, NODE_WIDTH, RuleState, draw_chain

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"


def draw(rules, **states):
    known = {rule.name: RuleState("planned") for rule in rules} | states
    return ElementTree.fromstring(str(draw_chain(rules, known)))


def boxes(svg):
    return [
        (float(box.attrib["x"]), float(box.attrib["y"])) for box in svg.iter("rect") if box.attrib["class"] == "box"
    ]


@pytest.mark.parametrize(
    "overrides", ["", "rollout.fp8=false", "rollout.fp8=false site.node_names=[]", "site.node_names=[]"]
)
@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_boxes_do_not_overlap_and_no_line_runs_through_one(model, overrides):
    config = resolve({"model": model, "site": "local", "set": overrides}, CONFIG_DIR).config
    svg = draw(rule_chain(config))
    corners = boxes(svg)
    assert len(corners) == len(set(corners)) == len(rule_chain(config))
    for path in svg.iter("path"):
        for (x1, y1), (x2, y2) in pairwise(corners_of(path)):
            assert x1 == x2 or y1 == y2
            low, high, top, bottom = min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)
            crossed = [
                (x, y) for x, y in corners if low < x + NODE_WIDTH and x < high and top < y + NODE_HEIGHT and y < bottom
            ]
            assert crossed == []
    # Text in its natural size, and all of it on a page of 1400 px.
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    assert svg.attrib["style"] == f"width:{width:g}px"
    assert width <= 1254
    assert all(x + NODE_WIDTH <= width and y + NODE_HEIGHT <= height for x, y in corners)


def corners_of(path):
    """Return the corners of a path of level and upright lines."""
    words = re.findall(r"([MhHV])([-0-9.]+)(?:,([-0-9.]+))?", path.attrib["d"])
    corners = [(float(words[0][1]), float(words[0][2]))]
    for letter, number, _ in words[1:]:
        x, y = corners[-1]
        corners.append({"h": (x + float(number), y), "H": (float(number), y), "V": (x, float(number))}[letter])
    return corners


def test_a_line_between_columns_that_are_not_neighbours_runs_below_all_boxes():
    rules = [RuleNode(name, "", after) for name, after in (("a", ()), ("b", ("a",)), ("c", ("b",)), ("e", ("c",)))]
    svg = draw(
        [*rules[:1], RuleNode("x", "", ()), *rules[1:3], RuleNode("d", "", ("a", "x")), RuleNode("e", "", ("c", "d"))]
    )
    boxes_bottom = max(y for _, y in boxes(svg)) + NODE_HEIGHT
    lanes = [corners_of(path) for path in svg.iter("path") if len(corners_of(path)) > 4]
    ((start, *_, end),) = lanes
    assert max(y for _, y in lanes[0]) > boxes_bottom
    assert (start[0], end[0]) == (boxes(svg)[0][0] + NODE_WIDTH, boxes(svg)[4][0])


def test_lines_go_from_left_to_right_and_what_follows_from_others_is_left_out():
    rules = [
        RuleNode("a", "", ()),
        RuleNode("b", "", ("a",)),
        RuleNode("c", "", ("a", "b")),
        RuleNode("d", "", ("c", "a")),
    ]
    svg = draw(rules)
    assert len(list(svg.iter("path"))) == 3  # a-b, b-c, c-d; a-c and a-d follow
    assert [x for x, _ in boxes(svg)] == sorted(x for x, _ in boxes(svg))


def test_a_box_tells_its_state_and_its_seconds():
    rules = [
        RuleNode("train", "learns", (), num_jobs=2),
        RuleNode("export_hf", "writes", ("train",)),
    ]
    svg = draw(rules, train=RuleState("done", 192.0), export_hf=RuleState("not run"))
    texts = [text.text for text in svg.iter("text")]
    assert texts == ["train", "3 min 12 s", "export_hf", "not run"]
    assert [group.attrib["class"] for group in svg.iter("g")] == ["node done", "node not-run"]
    assert "train: learns (done, 3 min 12 s)" in [title.text for title in svg.iter("title")]


def test_names_are_cut_at_their_words():
    for name, lines in (
        ("download_hf_checkpoint", ["download_", "hf_", "checkpoint"]),
        ("convert_hf_to_torch_dist", ["convert_", "hf_to_", "torch_dist"]),
        ("evaluate before", ["evaluate", "before"]),
        ("stage_to_node_local", ["stage_to_", "node_local"]),
        (
            "a_word_of_more_than_eleven_letters_everywhere",
            ["a_word_of_", "more_than_", "eleven_", "letters_", "everywhere"],
        ),
        ("incomprehensibilities", ["incomprehensibilities"]),
    ):
        svg = draw([RuleNode(name, "", ())])
        assert [text.text.strip() for text in svg.iter("text")][:-1] == lines
