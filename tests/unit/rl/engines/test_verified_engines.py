"""Before a measurement counts anything, each of its engines is held against the canary: real engines, asked."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.rejections import rejected
from tests.unit.rl.engines import conftest as engines
from tests.unit.rl.engines.embedded.test_server import engine
from tests.unit.rl.engines.test_reference_logprobs import SECRET, checkpoint, folder, fp8, tensors, tokenizer  # noqa: F401 fixtures

from posttrain.checkpoint.reference_logprobs import CANARY_NAME
from posttrain.errors import ConfigError
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.verified_engines import verify_all


def ask(served: Sequence[Path], canary_of: Path, has_chat: bool = False, secret: str = SECRET) -> list[str]:
    """Hold an engine of each folder against one checkpoint; their addresses."""

    async def story() -> list[str]:
        async with AsyncExitStack() as stack:
            servers = [(await stack.enter_async_context(engine(path)))[0] for path in served]
            urls = [str(server.make_url("/")) for server in servers]
            await verify_all(urls, secret, canary_of, has_chat)
            return urls

    return asyncio.run(story())


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Path:  # noqa: F811
    """The same model with other weights."""
    made = engines.write_checkpoint(tmp_path / "hf", "qwen3", engines.strong_tensors("qwen3", seed=5))
    for path in folder.iterdir():
        if not (made / path.name).exists():
            shutil.copy(path, made)
    return made


def test_who_serves_it_is_let_in(folder: Path, fp8: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    caplog.set_level(logging.INFO)
    for url in ask([folder, folder], folder):
        assert f"{url} serves {folder}: its log-probabilities are" in caplog.text
    ask([fp8], fp8)
    assert "(at most 0.1 in fp8)" in caplog.text


def test_who_serves_something_else_is_named_and_nobody_else(folder: Path, other: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError) as refused:
        ask([folder, other, other], folder)
    first, second = refused.value.problems
    assert first.key != second.key
    for problem in (first, second):
        assert problem.key.startswith("http://127.0.0.1:")
        assert problem.code == "logprobs-differ"


def test_a_base_model_has_nothing_to_compare(other: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (other / CANARY_NAME).unlink()
    ask([other, other], other)
    (record,) = [record for record in caplog.records if "compare" in record.getMessage()]
    assert record.levelname == "INFO"
    assert record.getMessage() == f"nothing to compare with what is served: {other} is no export of a training"


def test_a_template_counts_where_conversations_are_sent(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    served = tmp_path / "hf"
    shutil.copytree(folder, served)
    template = served / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|user|>", "<|user|>\n"))
    ask([served], folder)
    with rejected("template-differs", "tokens of prompt 1"):
        ask([served], folder, has_chat=True)


def test_who_cannot_be_asked_is_no_wrong_server(folder: Path) -> None:  # noqa: F811
    with pytest.raises(EngineError, match="another secret"):
        ask([folder], folder, secret="another")
