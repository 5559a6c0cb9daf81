"""Evaluates the policy between steps, on the engines that sample for training.

A result belongs to one weight version: the engines have just received it, and every response must report it. When a
run resumes from a checkpoint, results of that step and later ones are repeated with the current weights.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.report.rank_progress import EVALUATION, keep_reporting
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.event_loop import EventLoop
from posttrain.rl.evaluation.heldout import EvalTask, grade_episodes, summarize
from posttrain.rl.evaluation.sampling import sample_episodes
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.rollout.coordinator import check_versions
from posttrain.store import write_json

_RESULT = re.compile(r"step_(\d+)\.json")


def result_of(folder: Path, finished: int) -> Path:
    """Return the path of the result for the weights after `finished` steps."""
    return folder / f"step_{finished:06d}.json"


class StepEvaluation:
    """Rank 0's evaluation between steps.

    Args:
        eval_tasks: The evaluation tasks.
        tokenizer: Renders prompts and decodes responses.
        client: Client of the engines.
        graders: Grade responses.
        folder: Output folder of the results.
        runner: Event loop for everything that talks to engines.
    """

    def __init__(
        self,
        eval_tasks: Sequence[EvalTask],
        tokenizer: ChatTokenizer,
        client: EngineClient,
        graders: GraderPool,
        folder: Path,
        runner: EventLoop,
    ):
        self._exams, self._tokenizer, self._client, self._graders = eval_tasks, tokenizer, client, graders
        self._folder, self._runner = folder, runner

    def forget_from(self, finished: int) -> None:
        """Delete the results of steps that the run will repeat."""
        for path in self._folder.glob("step_*.json"):
            if (match := _RESULT.fullmatch(path.name)) and int(match[1]) >= finished:
                path.unlink()

    def measure(self, finished: int) -> dict[str, float]:
        """Run the evaluation tasks on the engines, save the result, and return metrics.

        Args:
            finished: Number of finished steps that the engines' weights have.

        Raises:
            RuntimeError: An engine served other weights, or graders failed too often.
        """
        results = self._runner.run(self._measure(finished))
        write_json(result_of(self._folder, finished), {"finished": finished, "exams": results})
        return {
            f"evaluation/{name}/{key}": result[key]
            for name, result in results.items()
            for key in ("pass_rate", "reward_mean")
            if result[key] is not None
        }

    async def _measure(self, finished: int) -> dict[str, dict[str, Any]]:
        alive = asyncio.create_task(keep_reporting(finished, EVALUATION))
        results = {}
        try:
            for eval_task in self._exams:
                episodes = await sample_episodes(
                    eval_task.config, eval_task.name, eval_task.prompts, self._client, self._tokenizer
                )
                check_versions(finished, episodes)
                results[eval_task.name] = summarize(
                    await grade_episodes(eval_task, self._tokenizer, self._graders, episodes)
                )
        finally:
            alive.cancel()
        return results
