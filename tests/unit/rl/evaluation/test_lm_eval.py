from pathlib import Path

from posttrain.rl.evaluation.lm_eval import figures_of, request_of

WRITTEN = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.1,
            "exact_match,flexible-extract": 1,
            "exact_match_stderr,flexible-extract": "N/A",
        },
        "mmlu": {"acc,none": float("nan"), "alias": "mmlu"},
    },
    "versions": {"gsm8k": 3.0},
    "n-shot": {"gsm8k": 5},
    "higher_is_better": {"gsm8k": {"exact_match": True}},
    "n-samples": {"gsm8k": {"original": 1319, "effective": 40}},
}


def request(resolved, num_engines=1, **keys):
    overrides = " ".join(f"{key}={value}" for key, value in keys.items())
    config = resolved("tiny_qwen3", set=f"evaluation.lm_eval.tasks=[gsm8k] {overrides}").config
    return request_of(config, "run", Path("hf"), "http://127.0.0.1:30000", num_engines, Path("out"))


def test_a_row_per_metric_and_filter():
    strict, flexible, group = figures_of(WRITTEN)
    assert strict == {
        "task": "gsm8k",
        "metric": "exact_match",
        "filter": "strict-match",
        "value": 0.5,
        "stderr": 0.1,
        "higher_is_better": True,
        "num_rows": 40,
        "num_fewshot": 5,
        "version": 3.0,
    }
    assert (flexible["filter"], flexible["value"], flexible["stderr"]) == ("flexible-extract", 1.0, None)
    assert (group["task"], group["value"], group["num_rows"], group["version"]) == ("mmlu", None, None, None)


def test_text_goes_as_tokens_in_training_s_batches(resolved):
    asked = request(resolved)
    assert asked["model"] == "local-completions"
    arguments = asked["model_args"]
    assert arguments["base_url"] == "http://127.0.0.1:30000/v1/completions"
    assert (arguments["tokenizer"], arguments["tokenizer_backend"]) == ("hf", "huggingface")
    assert (arguments["max_length"], arguments["max_gen_toks"], arguments["max_retries"]) == (256, 8, 1)
    # 16 groups of 16 samples a request, and the engine runs 512.
    assert (asked["batch_size"], arguments["num_concurrent"]) == (256, 2)
    assert request(resolved, num_engines=3)["model_args"]["num_concurrent"] == 6
    assert not asked["apply_chat_template"]
    assert asked.keys().isdisjoint({"num_fewshot", "limit", "include_path", "gen_kwargs"})


def test_chat_goes_as_messages_with_the_variables_of_the_template(resolved):
    keys = {
        "evaluation.lm_eval.chat": "true",
        "evaluation.lm_eval.num_fewshot": 0,
        "evaluation.lm_eval.limit": 7,
        "evaluation.lm_eval.task_folder": "mine",
        "data.chat_template_kwargs": "[enable_thinking=false]",
    }
    asked = request(resolved, **keys)
    assert asked["model"] == "local-chat-completions"
    assert asked["model_args"]["base_url"] == "http://127.0.0.1:30000/v1/chat/completions"
    assert "tokenizer" not in asked["model_args"]
    assert asked["apply_chat_template"] is True
    assert (asked["batch_size"], asked["num_fewshot"], asked["limit"], asked["include_path"]) == (1, 0, 7, "mine")
    assert asked["gen_kwargs"] == {"chat_template_kwargs": {"enable_thinking": False}}


def test_the_secret_is_in_no_request(resolved):
    assert not any("key" in name or "token" in name.split("_") for name in request(resolved)["model_args"])
