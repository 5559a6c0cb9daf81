"""End-to-end RL post-training of large language models as a Snakemake workflow."""

__version__ = "0.1.0"
