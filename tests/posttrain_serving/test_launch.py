"""Commands against the seeds, row by row: what is different is named here, with the reason."""

from __future__ import annotations

import pytest
import yaml
from tests.support.published_sizes import COOKBOOK
from tests.support.serving_cases import CONFIG_DIR, checkpoint, launch, launches, machine

from posttrain.plan.flags.flag import as_arguments, as_environment, as_mapping
from posttrain.plan.flags.sglang_flags import sglang_flags
from posttrain.plan.resolve import resolve
from posttrain_serving.flags.serving_flags import INDEX_CACHE, RENAMED, serving_flags
from posttrain_serving.launch import Launch, engine_config
from posttrain_serving.serve_request import ServeRequest

# Short spellings of the seeds that SGLang still takes, and what was renamed.
SHORT = {"--tp": "--tp-size", "--ep": "--ep-size", "--model": "--model-path"}
OLD = {old: new for new, (old, _) in RENAMED.items()}


def flags_of(found: Launch, place: int = 0) -> dict[str, object]:
    return as_mapping(found.processes[place].flags)


def translated(words: str) -> dict[str, object]:
    """Return a command line of a seed in SGLang 0.5.23's spelling."""
    found: dict[str, object] = {}
    given = words.split()
    for here, after in zip(given, [*given[1:], "--"], strict=True):
        if here.startswith("--"):
            value: object = True if after.startswith("--") else after
            name = OLD.get(f"{here} {after}", OLD.get(here, SHORT.get(here, here)))
            name, _, renamed = name.partition(" ")
            value = renamed or value
            found[name] = "auto" if name == "--flashinfer-allreduce-fusion-backend" else value
    return found


def as_text(flags: dict[str, object]) -> dict[str, object]:
    return {name: value if value is True else str(value) for name, value in flags.items()}


@pytest.mark.parametrize(("hardware", "precision", "num_gpus"), COOKBOOK)
def test_each_row_of_the_cookbooks_table(hardware: str, precision: str, num_gpus: int) -> None:
    found = launches()[f"{hardware}-{precision}"]
    nodes = num_gpus // 8
    assert len(found.processes) == nodes
    for rank in range(nodes):
        flags = flags_of(found, rank)
        assert flags["--tp-size"] == num_gpus
        assert flags["--model-path"] == {"fp8": "zai-org/GLM-5-FP8", "bf16": "zai-org/GLM-5"}[precision]
        assert flags["--ep-size"] == 1
        assert flags.get("--nnodes", 1) == nodes
        assert (flags.get("--node-rank"), flags.get("--dist-init-addr")) == (
            (rank, "node0:20000") if nodes > 1 else (None, None)
        )


def test_the_cookbooks_tip_for_fp8_on_b200() -> None:
    tip = translated(
        "--ep 1 --attention-backend nsa --nsa-decode-backend trtllm --nsa-prefill-backend trtllm "
        "--moe-runner-backend flashinfer_trtllm --enable-flashinfer-allreduce-fusion --quantization fp8"
    )
    ours = as_text(flags_of(launches()["b200-fp8"]))
    assert tip.items() <= ours.items()
    assert set(ours) - set(tip) == {
        *("--model-path", "--served-model-name", "--host", "--port", "--tp-size"),
        *("--reasoning-parser", "--tool-call-parser"),  # the cookbook, 4.3
        *("--mem-fraction-static", "--kv-cache-dtype", "--page-size"),
        *(name for name in ours if name.startswith("--speculative")),  # the cookbook's first tip
    }


@pytest.mark.parametrize("hardware", ["mi300x", "mi325x", "mi355x"])
def test_the_cookbooks_tip_for_amd(hardware: str) -> None:
    tip = translated(
        "--nsa-prefill-backend tilelang --nsa-decode-backend tilelang --chunked-prefill-size 131072 "
        "--watchdog-timeout 1200"
    )
    found = launches()[f"{hardware}-bf16"]
    ours = as_text(flags_of(found))
    assert tip.items() <= ours.items()
    assert not any("speculative" in name for name in ours)
    assert any(note.startswith("no EAGLE") for note in found.notes)
    assert not any(name.startswith(("--moe-runner", "--flashinfer")) for name in ours)


def test_drafts_are_for_latency_and_attention_of_ones_own_for_throughput() -> None:
    few, many = flags_of(launches()["h200-fp8"]), flags_of(launches()["throughput"])
    assert (few["--speculative-algorithm"], few["--speculative-num-draft-tokens"]) == ("EAGLE", 4)
    assert "--attn-dp-size" not in few
    assert (many["--attn-dp-size"], many["--moe-dense-tp-size"]) == (8, 1)
    assert not any("speculative" in name for name in many)
    # On B200 experts are cut all the same: its kernels of fixed weights take no others.
    b200 = flags_of(launches()["b200-throughput"])
    assert (b200["--ep-size"], b200["--attn-dp-size"]) == (1, 8)
    assert "--flashinfer-allreduce-fusion-backend" not in b200


def test_the_card_of_the_nvfp4_checkpoint_with_its_environment() -> None:
    card = translated(
        "--model lukealonso/GLM-5-NVFP4 --served-model-name glm-5 --reasoning-parser glm45 --tool-call-parser glm47 "
        "--trust-remote-code --tp 8 --mem-fraction-static 0.95 --max-running-requests 8 --kv-cache-dtype fp8_e4m3 "
        "--quantization modelopt_fp4 --attention-backend flashinfer --moe-runner-backend flashinfer_cutlass "
        "--disable-custom-all-reduce --enable-flashinfer-allreduce-fusion --host 0.0.0.0 --port 8000"
    )
    found = launches()["card"]
    ours = as_text(flags_of(found))
    assert ours.pop("--ep-size") == "1", "SGLang's default, which the card leaves out"
    assert ours == card
    assert as_environment(found.processes[0].environment) == {
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_LEVEL": "PHB",
        "NCCL_ALLOC_P2P_NET_LL_BUFFERS": "1",
        "NCCL_MIN_NCHANNELS": "8",
        "OMP_NUM_THREADS": "8",
        "SAFETENSORS_FAST_GPU": "1",
    }
    assert any("iommu=pt" in note for note in found.notes)


def test_between_nodes_infiniband_stays_on() -> None:
    found = launch("glm5", "rtx_pro_6000", precision="fp8")
    assert found.size.nodes == 2
    assert "NCCL_IB_DISABLE" not in as_environment(found.processes[0].environment)


@pytest.mark.parametrize(
    ("case", "model", "num_gpus"),
    [("vllm-fp8", "zai-org/GLM-5-FP8", 8), ("vllm-nvfp4", "lukealonso/GLM-5-NVFP4", 4)],
)
def test_both_commands_of_vllms_guide(case: str, model: str, num_gpus: int) -> None:
    (process,) = launches()[case].processes
    assert process.program == ("vllm", "serve", model)
    ours = as_mapping(process.flags)
    guide = {
        "--tensor-parallel-size": num_gpus,
        "--max-model-len": 32768,
        "--gpu-memory-utilization": "0.90",
        "--trust-remote-code": True,
    }
    assert guide.items() <= ours.items()
    assert {name: ours[name] for name in ours.keys() - guide.keys()} == {
        "--served-model-name": "glm-5",
        "--reasoning-parser": "glm45",
        "--tool-call-parser": "glm47",
        "--enable-auto-tool-choice": True,
        "--host": "127.0.0.1",
        "--port": 8000,
    }
    notes = " ".join(launches()[case].notes)
    assert "0.16.0" in notes
    assert ("2,259 kernels" in notes) == (case == "vllm-fp8")


def test_vllm_over_nodes_has_one_that_answers() -> None:
    first, second = launches()["vllm-nodes"].processes
    assert "--headless" not in as_mapping(first.flags)
    assert as_mapping(second.flags)["--headless"] is True
    assert (as_mapping(second.flags)["--nnodes"], as_mapping(second.flags)["--node-rank"]) == (2, 1)


def test_tensorrt_llms_command_and_yaml() -> None:
    found = launch("warnold-nv/GLM-5-nvfp4-v1", "b200", engine="trtllm", host="localhost")
    (process,) = found.processes
    guide = (
        "trtllm-serve warnold-nv/GLM-5-nvfp4-v1 --host localhost --port 8000 --backend pytorch --max_batch_size 32 "
        "--max_num_tokens 8192 --tp_size 8 --ep_size 8 --pp_size 1 --config ./config.yml"
    )
    assert " ".join(process.argv) == guide
    expected = """
cuda_graph_config:
    enable_padding: true
    max_batch_size: 1024
enable_attention_dp: false
enable_chunked_prefill: true
kv_cache_config:
    enable_block_reuse: false
    dtype: fp8
stream_interval: 10
"""
    assert found.files == {"config.yml": yaml.safe_load(expected)}
    assert "was ever run or parsed here" in found.notes[0]
    many = launch("warnold-nv/GLM-5-nvfp4-v1", "b200", engine="trtllm", goal="throughput")
    assert flags_of(many)["--max_num_tokens"] == 3072
    assert many.files["config.yml"]["enable_attention_dp"] is True


def test_index_cache_is_asked_for_and_warned_of() -> None:
    found = launches()["index-cache"]
    assert flags_of(found)["--json-model-override-args"] == f'{{"index_topk_pattern": "{INDEX_CACHE}"}}'
    assert len(INDEX_CACHE) == checkpoint("glm5").architecture.num_hidden_layers
    assert any(note.startswith("IndexCache loses a little accuracy") for note in found.notes)
    assert "--json-model-override-args" not in flags_of(launches()["h200-fp8"])


def test_prefill_apart_has_engines_of_both_kinds_and_a_router() -> None:
    prefill, decode, router = launches()["prefill-apart"].processes
    kinds = [as_mapping(process.flags) for process in (prefill, decode)]
    assert [flags["--disaggregation-mode"] for flags in kinds] == ["prefill", "decode"]
    assert [flags["--host"] for flags in kinds] == ["prefill0", "decode0"]
    assert kinds[0]["--disaggregation-bootstrap-port"] == 8998
    assert "--disaggregation-decode-retraction-backup" not in kinds[1], "no trainer sleeps in host memory here"
    asked = as_mapping(router.flags)
    assert (asked["--prefill"], asked["--decode"], asked["--host"]) == (
        *("http://prefill0:8000", "http://decode0:8000", "127.0.0.1"),
    )


def test_renamed_flags_are_told() -> None:
    told = " ".join(launches()["b200-fp8"].notes)
    for old in ("--nsa-prefill-backend", "--nsa-decode-backend", "--enable-flashinfer-allreduce-fusion", "backend nsa"):
        assert old in told


def test_flags_of_the_same_meaning_are_trainings() -> None:
    """What training's engine and this one are both told, both are told by one table."""
    config = resolve({"model": "glm5", "site": "local", "set": "engine.mtp_steps=3"}, CONFIG_DIR).config
    asked = ServeRequest(precision="fp8", goal="throughput")
    found = checkpoint("glm5", "fp8")
    size = launches()["throughput"].size
    ours = engine_config(asked, found, machine("h200"), size)
    assert (ours.hardware, ours.engine.mtp_steps) == (config.hardware, 0)
    trained = as_mapping(sglang_flags(config))
    served = as_mapping(serving_flags(ours, "fp8", "throughput"))
    same = trained.keys() & served.keys() - {"--tp-size", "--ep-size", "--attn-dp-size", "--mem-fraction-static"}
    assert {"--page-size", "--kv-cache-dtype", "--dsa-decode-backend", "--moe-dense-tp-size"} <= same
    assert {name: served[name] for name in same} == {name: trained[name] for name in same}


def test_an_mi300x_has_room_for_one_request_alone() -> None:
    assert flags_of(launches()["mi300x-bf16"])["--mem-fraction-static"] == 0.95
    assert flags_of(launches()["mi325x-bf16"])["--mem-fraction-static"] == 0.85


def test_every_flag_has_a_reason() -> None:
    for name, found in launches().items():
        for process in found.processes:
            for item in process.flags:
                assert item.reason or item.keys, (name, item.name)
            assert len(as_arguments(process.flags)) > 5
