"""Engines that somebody else has started, with other weights of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.tiny_checkpoint import TINY, make_random_checkpoint

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.config.schema import Config
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.rl.engines.ports import LOOPBACK, choose_free_ports
from posttrain.rl.engines.process import EngineProcess, started_engines

SECRET = "the secret of somebody else's engines"


@contextmanager
def engines_of_others(config: Config, folder: Path, count: int = 1) -> Iterator[list[EngineProcess]]:
    """Start embedded engines with the model of `evaluation_inputs`; they are not ready yet."""
    model = folder / "others"
    make_random_checkpoint(model, TINY, seed=1)
    make_tokenizer(TINY.max_position_embeddings).save_pretrained(model)
    commands = {
        number: render_engine_command(config, number, model, LOOPBACK, port)
        for number, port in enumerate(choose_free_ports(count))
    }
    with started_engines(commands, folder / "others.logs", SECRET) as engines:
        yield engines
