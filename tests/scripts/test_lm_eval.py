"""lm-eval's own program on a served model: its answers are those of our own evaluation, question by question."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from tests.support.evaluation_inputs import make_inputs
from tests.support.forked_programs import run_step
from tests.support.rejections import rejected
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT, WorkflowFolder

from posttrain.checkpoint.reference_logprobs import read_reference_logprobs, write_reference_logprobs
from posttrain.config.evaluation import Suite
from posttrain.config.schema import Config
from posttrain.config.suites import HELD_OUT
from posttrain.plan.preflight.lm_eval import MADE
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.dataset_files import make_rows
from posttrain.rl.data.sort_digits import INSTRUCTION, generate_prompts
from posttrain.rl.evaluation import heldout
from posttrain.rl.evaluation.lm_eval import evaluate_with_lm_eval
from posttrain.store import Paths, read_json, read_receipt, receipt_of
from posttrain.types import Prompt

# What a tiny model can read of the real questions: one token a character, 256 positions.
LONGEST_QUESTION = 180
# Sorts nearly all numbers of four digits that it has never seen, and few of three or five.
SETTINGS: dict[str, object] = {
    "training.num_steps": 4,
    "trainer.save_interval": 10,
    "logging.wandb": "false",
    "engine.num_engines": 2,
}
# Half of GSM8K's questions, learned by heart: `recipe=sft`.
BY_HEART: dict[str, object] = SETTINGS | {
    "data.kind": "files",
    "data.reward": "exact_match",
    "data.num_heldout_prompts": 20,
    "training.num_steps": 120,
    "training.global_batch_size": 20,
    "trainer.save_interval": 120,
    "rollout.rollout_batch_size": 20,
    "optimizer.lr": 0.003,
}


def gsm8k_rows() -> list[dict[str, str]]:
    """Return rows in GSM8K's schema that a model which sorts digits can answer: of four digits half, of others half."""
    counts = {3: 10, 4: 20, 5: 10}
    rows = [row for digits, count in counts.items() for row in generate_prompts(digits, 1, count, seed=11)[1]]
    return [
        {"question": row["prompt"][-1]["content"], "answer": f"{' '.join(row['label'])}\n#### {row['label']}"}
        for row in rows
    ]


def math500_rows() -> list[dict[str, Any]]:
    """Return the same rows in MATH-500's schema."""
    return [
        {
            "problem": row["question"],
            "solution": row["answer"].split("\n")[0],
            "answer": row["answer"].split("#### ")[1],
            "subject": "Sorting",
            "level": len(row["question"]),
            "unique_id": f"test/sorting/{number}.json",
        }
        for number, row in enumerate(gsm8k_rows())
    ]


def choice_rows() -> list[dict[str, Any]]:
    """Return rows in the schema of ARC's: how an answer goes on, with digits sorted, sorted backwards, or as asked.

    The first digit is given: lm-eval counts white space at a prompt's end to the answer.
    """
    _, rows = generate_prompts(4, 1, 32, seed=12)
    found = []
    for number, row in enumerate(rows):
        asked = row["prompt"][-1]["content"]
        right = row["label"][1:]
        texts = [right, row["label"][::-1][1:], asked[1:]]
        texts = texts[number % 3 :] + texts[: number % 3]
        choices = {"text": texts, "label": ["A", "B", "C"]}
        key = "ABC"[texts.index(right)]
        found.append({"question": asked, "begun": row["label"][0], "choices": choices, "answerKey": key})
    return found


def real_rows() -> list[dict[str, str]]:
    """Return the first questions of GSM8K that the model can read; none where the machine has not got them."""
    folders = (parent / "shared" / "data" / "gsm8k_test.jsonl" for parent in ROOT.parents)
    file = next((path for path in folders if path.exists()), None)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file else []
    return [row for row in rows if len(row["question"]) <= LONGEST_QUESTION][:40]


def write_task(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> None:
    """Write rows, and a task over them that needs no network."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1},
        **more,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


GENERATION = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer.split('####')[-1].strip()}}",
    "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
# The chat template by hand: with plain text the same tokens reach the model.
TEMPLATE = f"[gMASK]<sop><|system|>\n{INSTRUCTION}<|user|>\n{{{{question}}}}<|assistant|>\n"
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": TEMPLATE + "{{begun}}",
    "doc_to_choice": "{{choices.text}}",
    "doc_to_target": "{{choices.label.index(answerKey)}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@dataclasses.dataclass
class Served:
    """A model that was trained for a moment, and the tasks that it is asked."""

    workflow: WorkflowFolder
    tasks: Path
    settings: Mapping[str, object]
    recipe: str = ""

    @functools.cached_property
    def paths(self) -> Paths:
        return Paths(resolve({"site": "local", **self.request("digits_chat", chat=True)}, ROOT / "config"))

    @property
    def config(self) -> Config:
        return self.paths.resolved.config

    def ask(self, tasks: str, *, chat: bool) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        """Return the rule's result, and the rows that lm-eval logged, by task."""
        self.workflow.run("lm_eval", config=self.request(tasks, chat=chat))
        result = self.workflow.run_folder / "evaluation" / "lm_eval_after.json"
        files = sorted(result.with_suffix("").glob("samples_*.jsonl"))
        logged = {path.stem.removeprefix("samples_"): path.read_text().splitlines() for path in files}
        return read_json(result), {task: [json.loads(line) for line in lines] for task, lines in logged.items()}

    def request(self, tasks: str, *, chat: bool) -> dict[str, str]:
        more = {"tasks": f"[{tasks}]", "chat": str(chat).lower(), "task_folder": str(self.tasks)}
        overrides = {"site.store": self.workflow.store, "site.results": self.workflow.results, **self.settings}
        overrides |= {f"evaluation.lm_eval.{key}": value for key, value in more.items()}
        recipe = {"recipe": self.recipe} if self.recipe else {}
        chosen = {"model": "tiny_qwen3", **recipe}
        return chosen | {"set": " ".join(f"{key}={value}" for key, value in overrides.items())}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    require("lm-eval", "" if MADE.exists() else "no environment of lm-eval: `make env-lm-eval`")
    root = tmp_path_factory.mktemp("lm_eval")
    tasks = root / "tasks"
    write_task(tasks, "digits_chat", gsm8k_rows(), {**GENERATION, "description": INSTRUCTION})
    math500 = {"doc_to_text": "{{problem}}", "doc_to_target": "{{answer}}", "description": INSTRUCTION}
    write_task(tasks, "digits_math", math500_rows(), {**GENERATION, **math500})
    write_task(tasks, "digits_text", gsm8k_rows(), {**GENERATION, "doc_to_text": TEMPLATE})
    write_task(tasks, "digits_choice", choice_rows(), CHOICES)
    return Served(WorkflowFolder(root / "run", root / "store"), tasks, SETTINGS)


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model that was shown the answers to half of the real questions."""
    require("lm-eval", "" if MADE.exists() else "no environment of lm-eval: `make env-lm-eval`")
    rows = real_rows()
    require("lm-eval", "" if rows else "no shared/data/gsm8k_test.jsonl beside the repository")
    root = tmp_path_factory.mktemp("by_heart")
    shown = root / "shown.jsonl"
    shown.write_text("".join(json.dumps(row) + "\n" for row in rows[: len(rows) // 2]))
    held_out = root / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[len(rows) // 2 :]))
    write_task(root / "tasks", "real_chat", rows, GENERATION)
    files = {"data.train_file": shown, "data.heldout_file": held_out}
    return Served(WorkflowFolder(root / "run", root / "store"), root / "tasks", BY_HEART | files, "sft")


def ours(served: Served, rows: Sequence[Mapping[str, str]], system: str, folder: Path) -> list[dict[str, Any]]:
    """Return our own evaluation's answers to GSM8K's rows, greedy, in their order."""
    config = dataclasses.replace(
        served.config,
        evaluation=dataclasses.replace(served.config.evaluation, num_samples_per_prompt=1, temperature=0.0),
    )
    first = [{"role": "system", "content": system}] if system else []
    prompts = [
        Prompt(number, (*first, {"role": "user", "content": row["question"]}), row["answer"].split("#### ")[-1])
        for number, row in enumerate(rows)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heldout, "NUM_EXAMPLES", len(rows))
        checkpoint = served.workflow.folder / served.paths.hf_export
        eval_task = heldout.EvalTask(HELD_OUT, config, prompts)
        return heldout.evaluate_checkpoint(config, checkpoint, [eval_task], folder)[HELD_OUT]["examples"]


@pytest.mark.faults("lm-eval")
def test_answers_to_rows_made_by_hand_are_ours_one_by_one(served: Served, tmp_path: Path) -> None:
    rows = gsm8k_rows()
    assert len(rows) >= 30
    result, logged = served.ask("digits_chat", chat=True)
    examples = ours(served, rows, INSTRUCTION, tmp_path)
    theirs = logged["digits_chat"]
    assert [row["doc"]["question"] for row in theirs] == [row["question"] for row in rows]
    assert [row["resps"] for row in theirs] == [[[example["response"]]] for example in examples]
    assert [row["exact_match"] for row in theirs] == [example["reward"] for example in examples]
    (figure,) = result["results"]
    assert figure["value"] == pytest.approx(sum(example["reward"] for example in examples) / len(rows))
    assert 0.2 <= figure["value"] <= 0.8, "a score that hides no mistake"
    print(f"{figure['value']:.1%} of {len(rows)} rows solved")
    assert figure["num_rows"] == len(rows)


@pytest.mark.faults("lm-eval")
def test_answers_to_a_suite_in_the_schema_of_math500_are_ours_one_by_one(served: Served, tmp_path: Path) -> None:
    """Ours are those of a suite, read from lm-eval's own file of rows."""
    result, logged = served.ask("digits_math", chat=True)
    file = str(served.tasks / "digits_math.jsonl")
    suite = Suite(kind="files", file=file, system_prompt=INSTRUCTION, reward="exact_match", temperature=0.0)
    make_rows(suite, tmp_path / "suite", tmp_path / "no.manifest.json")
    evaluation = dataclasses.replace(served.config.evaluation, suites={"math": suite})
    config = dataclasses.replace(served.config, evaluation=evaluation)
    eval_tasks = heldout.read_suites(config, {"math": tmp_path / "suite"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heldout, "NUM_EXAMPLES", len(eval_tasks[0].prompts))
        checkpoint = served.workflow.folder / served.paths.hf_export
        found = heldout.evaluate_checkpoint(config, checkpoint, eval_tasks, tmp_path)["math"]
    theirs = logged["digits_math"]
    assert len(theirs) == found["num_prompts"] == 40
    assert [row["resps"] for row in theirs] == [[[example["response"]]] for example in found["examples"]]
    assert [row["exact_match"] for row in theirs] == [example["reward"] for example in found["examples"]]
    (figure,) = result["results"]
    assert figure["value"] == pytest.approx(found["pass_rate"])
    assert 0.2 <= figure["value"] <= 0.8, "a score that hides no mistake"


@pytest.mark.faults("lm-eval")
def test_answers_to_the_real_gsm8k_are_ours_one_by_one(by_heart: Served, tmp_path: Path) -> None:
    """A small model solves none of them; what it has by heart gives a score that hides no mistake."""
    rows = real_rows()
    assert len(rows) >= 30
    result, logged = by_heart.ask("real_chat", chat=True)
    examples = ours(by_heart, rows, "", tmp_path)
    theirs = logged["real_chat"]
    assert [row["doc"]["question"] for row in theirs] == [row["question"] for row in rows]
    assert [row["resps"] for row in theirs] == [[[example["response"]]] for example in examples]
    assert [row["exact_match"] for row in theirs] == [example["reward"] for example in examples]
    (figure,) = result["results"]
    assert figure["value"] == pytest.approx(sum(example["reward"] for example in examples) / len(rows))
    assert 0.2 <= figure["value"] <= 0.8
    assert len({example["response"] for example in examples}) > 5


@pytest.mark.faults("lm-eval")
def test_texts_and_log_probabilities_are_those_of_the_model(served: Served, tmp_path: Path) -> None:
    """Plain text gives the answers of messages, and choices have the log-probabilities that transformers gives."""
    from transformers import AutoModelForCausalLM

    result, logged = served.ask("digits_text,digits_choice", chat=False)
    examples = ours(served, gsm8k_rows(), INSTRUCTION, tmp_path)
    assert [row["resps"] for row in logged["digits_text"]] == [[[example["response"]]] for example in examples]
    folder = served.workflow.folder / served.paths.hf_export
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = ChatTokenizer(folder).tokenizer
    right, seen = [], set()
    for row, theirs in zip(choice_rows(), logged["digits_choice"], strict=True):
        asked = tokenizer.encode(TEMPLATE.replace("{{question}}", row["question"]) + row["begun"])
        scores = []
        for choice in row["choices"]["text"]:
            tokens = tokenizer.encode(choice)
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([asked + tokens])).logits[0].double(), -1)
            places = logprobs[len(asked) - 1 : -1]
            told = places.gather(1, torch.tensor(tokens)[:, None]).sum().item()
            scores.append((told, places.argmax(-1).tolist() == tokens))
        found = [(float(one[0][0]), str(one[0][1]) == "True") for one in theirs["resps"]]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in scores], abs=1e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in scores]
        seen |= {greedy for _, greedy in found}
        best = max(range(3), key=lambda place, scores=scores: scores[place][0])
        right.append(float("ABC"[best] == row["answerKey"]))
    assert [row["acc"] for row in logged["digits_choice"]] == right
    assert {True, False} == seen
    values = {row["task"]: row["value"] for row in result["results"]}
    assert values["digits_choice"] == pytest.approx(sum(right) / len(right))


@pytest.mark.faults("lm-eval")
def test_a_kill_leaves_no_receipt_nor_the_secret_and_the_same_command_goes_on(served: Served) -> None:
    request = served.request("digits_chat", chat=True)
    request["set"] += " evaluation.lm_eval.limit=3"
    driver = served.workflow.start("lm_eval", config=request)
    result = served.workflow.folder / served.paths.lm_eval("after")
    log = result.with_name("lm_eval_after.partial") / "lm_eval.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and "Initializing local" in log.read_text()):
        assert driver.poll() is None, driver.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (asking,) = (one for one in psutil.Process(driver.pid).children(recursive=True) if "--config" in one.cmdline())
    secret = asking.environ()["OPENAI_API_KEY"]
    assert len(secret) == 64
    assert all(secret not in word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or ())
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    assert not receipt_of(result).exists()
    files = [path for path in served.workflow.folder.rglob("*") if path.is_file()]
    assert log in files
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    served.workflow.run("lm_eval", config=request)
    assert read_json(result)["results"][0]["num_rows"] == 3
    receipt = read_receipt(receipt_of(result))
    assert {"lm_eval_after.json", "lm_eval_after/samples_digits_chat.jsonl"} <= {file.path for file in receipt.files}
    assert "Nothing to be done" in served.workflow.run("lm_eval", config=request)


@pytest.mark.faults("lm-eval")
def test_an_engine_that_serves_something_else_is_asked_nothing(served: Served, tmp_path: Path) -> None:
    served.ask("digits_chat", chat=True)
    checkpoint, records = tmp_path / "hf", tmp_path / "records"
    shutil.copytree(served.workflow.folder / served.paths.hf_export, checkpoint)
    canary = read_reference_logprobs(checkpoint)
    assert canary
    backwards = [dataclasses.replace(prompt, response_tokens=prompt.response_tokens[::-1]) for prompt in canary.prompts]
    write_reference_logprobs(checkpoint, dataclasses.replace(canary, prompts=backwards))
    records.mkdir()
    with rejected("logprobs-differ"):
        evaluate_with_lm_eval(served.config, "run", checkpoint, records, tmp_path / "engines")
    assert [path.name for path in records.iterdir()] == ["lm_eval.log"], "its tasks were looked at, and no more"


def test_what_is_missing_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    arguments = make_inputs(tmp_path, "evaluation.lm_eval.python=/no/python")
    output = tmp_path / "evaluation" / "lm_eval_after.json"
    ended = run_step("lm_eval", [*arguments[: arguments.index("--dataset")], "--output", output])
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    for said in ("evaluation.lm_eval.tasks = []", "evaluation.lm_eval.python = '/no/python'", "make env-lm-eval"):
        assert said in ended.stderr
    assert not output.parent.exists()
