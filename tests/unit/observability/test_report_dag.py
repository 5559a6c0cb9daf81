import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from posttrain.config.load import resolve
from posttrain.observability.report_dag import NODE_HEIGHT, NODE_WIDTH, RuleState, draw_chain
from posttrain.observability.rule_chain import RuleNode, rule_chain

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
        start, level = path.attrib["d"].removeprefix("M").split("H")
        x1, y = map(float, start.split(","))
        x2 = float(level.split("C")[0])
        crossed = [
            box for box in corners if box[1] < y < box[1] + NODE_HEIGHT and x1 < box[0] + NODE_WIDTH and box[0] < x2
        ]
        assert crossed == []


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
        RuleNode("train_grpo", "learns", (), num_jobs=2),
        RuleNode("export_hf", "writes", ("train_grpo",)),
    ]
    svg = draw(rules, train_grpo=RuleState("done", 192.0), export_hf=RuleState("not run"))
    texts = [text.text for text in svg.iter("text")]
    assert texts == ["train_", "grpo", "3 min 12 s ×2", "export_", "hf", "not run"]
    assert [group.attrib["class"] for group in svg.iter("g")] == ["node done", "node not-run"]
    assert "train_grpo: learns (done, 3 min 12 s)" in [title.text for title in svg.iter("title")]
