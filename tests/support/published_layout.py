"""GLM-5's layout on 16 nodes as miles publishes it; the recipe shares rows over four ranks and recomputes by choice."""

PUBLISHED_LAYOUT = (
    "parallel.context_parallel_size=2 trainer.max_tokens_per_gpu=16384 trainer.recompute_granularity=full"
)
