"""The typed configuration: one frozen dataclass per section.

Rules of the house:
- A value that defines the experiment (what is learned) has no default here; it stands in `config/base.yaml` or in the
  model's file. These sections are `EXPERIMENT_SECTIONS`; their digest names the run.
- An engineering knob (how it is computed, and where) has its default here and nowhere else.
- A value that follows from others is no key: `derived.py` computes it.

Field comments become `config/README.md`. Units end the name. No torch in this package: it is read at every dry run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.cluster import Container, Kubernetes
from posttrain.config.data import Data
from posttrain.config.download import Download
from posttrain.config.engine import Engine
from posttrain.config.environment import EnvironmentSettings
from posttrain.config.evaluation import Evaluation
from posttrain.config.formats import Export, Quantize, Serving
from posttrain.config.hardware import Hardware
from posttrain.config.launch import Launch, Slurm
from posttrain.config.mismatch import MismatchLimits
from posttrain.config.optimizer import Optimizer
from posttrain.config.reward import Reward
from posttrain.config.rollout import Rollout
from posttrain.config.sandbox import SandboxSettings
from posttrain.config.stage import Stage
from posttrain.config.vision import VisionTower
from posttrain.document import _doc
from posttrain.rl.algorithm.settings import Algorithm

# What Megatron Core recomputes by module, but for the attention core: fused kernels keep no scores, and a core that
# chooses keys would choose them again.
RECOMPUTED_MODULES = ("layernorm", "mla_up_proj", "moe_act", "mlp", "shared_experts", "moe")


@dataclass(frozen=True)
class Source:
    """Source of the model's files."""

    kind: str = _doc(
        "hub: a Hugging Face repository; folder: a local folder; run: the export of another run; made: "
        "the output of the rule make_tiny_model",
        choices=("hub", "folder", "run", "made"),
    )
    repo_id: str = _doc("Hub repository, `owner/name`", "")
    revision: str = _doc(
        "Pinned commit of the repository, 40 hex digits, quoted; with `unpinned`, plans work but nothing "
        "is downloaded. With kind=run, the digest of the export's receipt, filled in when a "
        "configuration is resolved",
        "",
    )
    folder: str = _doc("Folder with a checkpoint in Hub layout, for kind=folder", "")
    run: str = _doc("Name of the run whose export is used, for kind=run", "", unnamed="")


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: longer positions than in the original training."""

    factor: float = _doc("Ratio of supported to original positions; 1: positions are not scaled", 1.0, minimum=1)
    original_max_position_embeddings: int = _doc("Longest position before scaling", 0, minimum=0)
    beta_fast: float = _doc(
        "A rotary pair with more turns over the original positions keeps its frequency", 32.0, minimum=0
    )
    beta_slow: float = _doc("A rotary pair with fewer turns has its frequency divided by the factor", 1.0, minimum=0)
    mscale: float = _doc("How much the rotated part grows with the logarithm of the factor", 1.0, exclusive_minimum=0)
    mscale_all_dim: float = _doc(
        "How much whole queries and keys grow with the logarithm of the factor, in the softmax's scale", 0.0, minimum=0
    )


@dataclass(frozen=True)
class Architecture:
    """Dimensions of the model under their names in `config.json`, which they are checked against.

    A part that the model's family does not have is left at its default: `posttrain.config.families` says who has what.
    """

    model_type: str = _doc(
        "Architecture family",
        choices=(
            *("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3", "qwen3_moe"),
            *("qwen3_5", "qwen3_5_moe"),
        ),
    )
    vocab_size: int = _doc("Vocabulary", minimum=1)
    hidden_size: int = _doc("Width of the residual stream", minimum=1)
    num_hidden_layers: int = _doc("Decoder layers, without the MTP layer", minimum=1)
    first_k_dense_replace: int = _doc("Leading layers with a dense MLP", 0, minimum=0)
    intermediate_size: int = _doc("Width of the dense MLP", 0, minimum=0)
    moe_intermediate_size: int = _doc("Width of one expert", 0, minimum=0)
    n_routed_experts: int = _doc("Routed experts per MoE layer (Qwen3-MoE spells it num_experts)", 0, minimum=0)
    n_shared_experts: int = _doc("Shared experts per MoE layer", 0, minimum=0)
    shared_expert_intermediate_size: int = _doc(
        "Width of the shared expert with a gated output (Qwen3.5-MoE)", 0, minimum=0
    )
    num_experts_per_tok: int = _doc("Experts per token", 0, minimum=0)
    routed_scaling_factor: float = _doc("Factor on the routed experts' weights (sigmoid routers)", 0.0, minimum=0)
    n_group: int = _doc("Groups of experts; a token first chooses some of them (DeepSeek-V3)", 1, minimum=1, unnamed=1)
    topk_group: int = _doc("Groups that a token chooses", 1, minimum=1, unnamed=1)
    num_attention_heads: int = _doc("Attention heads", minimum=1)
    num_key_value_heads: int = _doc("Heads of key and value, each shared by a group of query heads (GQA)", 0, minimum=0)
    head_dim: int = _doc("Head width (GQA)", 0, minimum=0)
    partial_rotary_factor: float = _doc(
        "Share of each head that is rotated (GLM-4-MoE, Qwen3.5)", 0.0, minimum=0, maximum=1
    )
    attention_bias: bool = _doc("Query, key and value projections have a bias (GLM-4-MoE)", False)
    use_qk_norm: bool = _doc("Queries and keys are normalised (GLM-4-MoE; Qwen3 always does)", False)
    full_attention_interval: int = _doc(
        "Every n-th layer attends, and the others are gated delta nets (Qwen3.5: 4); 0: all layers attend",
        0,
        minimum=0,
    )
    linear_num_key_heads: int = _doc("Heads of query and key (gated delta net)", 0, minimum=0)
    linear_num_value_heads: int = _doc("Heads of value, output gate and decay (gated delta net)", 0, minimum=0)
    linear_key_head_dim: int = _doc("Width of a query or key head (gated delta net)", 0, minimum=0)
    linear_value_head_dim: int = _doc("Width of a value head (gated delta net)", 0, minimum=0)
    linear_conv_kernel_dim: int = _doc("Tokens that the causal convolution sees (gated delta net)", 0, minimum=0)
    q_lora_rank: int = _doc("Rank of the query latent (MLA); 0: queries have no latent (Moonlight)", 0, minimum=0)
    kv_lora_rank: int = _doc("Rank of the key-value latent (MLA)", 0, minimum=0)
    qk_nope_head_dim: int = _doc("Head width without position (MLA)", 0, minimum=0)
    qk_rope_head_dim: int = _doc("Head width with rotary position (MLA)", 0, minimum=0)
    v_head_dim: int = _doc("Value head width (MLA)", 0, minimum=0)
    index_n_heads: int = _doc("Heads of the DSA indexer; 0: attention is dense", 0, minimum=0)
    index_head_dim: int = _doc("Head width of the DSA indexer", 0, minimum=0)
    index_topk: int = _doc("Keys that the indexer keeps per query", 0, minimum=0)
    index_topk_freq: int = _doc(
        "Every n-th layer selects keys, and the layers after it reuse its selection (GLM-5.2: 4)",
        1,
        minimum=1,
        unnamed=1,
    )
    index_skip_topk_offset: int = _doc(
        "Leading layers that all select their own keys, if later layers share a selection (GLM-5.2: 3)",
        0,
        minimum=0,
        unnamed=0,
    )
    num_nextn_predict_layers: int = _doc("MTP layers in the checkpoint", 0, minimum=0)
    tie_word_embeddings: bool = _doc("The output matrix is the embedding (Qwen3)", False)
    rope_theta: float = _doc("Base of the rotary embedding", exclusive_minimum=0)
    rope_scaling: RopeScaling = field(
        default_factory=RopeScaling, metadata={"doc": "Scaled positions (YaRN)", "unnamed": RopeScaling()}
    )
    vision: VisionTower = field(
        default_factory=VisionTower, metadata={"doc": "Vision tower (Qwen3.5)", "unnamed": VisionTower()}
    )
    rms_norm_eps: float = _doc("Epsilon of the layers' RMSNorm", exclusive_minimum=0)
    max_position_embeddings: int = _doc("Longest position that the model supports", minimum=1)


@dataclass(frozen=True)
class Patch:
    """Changes of `config.json` and tokenizer, in a copy whose weights are links."""

    target: str = _doc(
        "native: validate, change nothing; deepseek_v32: rewrite to the alias that older software loads",
        choices=("native", "deepseek_v32"),
    )
    copies: str = _doc(
        "What to do if a tensor should equal another one (lm_head of a tied model, embedding and output "
        "matrix of an MTP layer) but differs. reject: reject the checkpoint; drop: ignore it; keep: "
        "treat it as a separate tensor, so a tied model is untied "
        "(architecture.tie_word_embeddings=false) and an MTP layer keeps its own tensors",
        "reject",
        choices=("reject", "drop", "keep"),
        unnamed="reject",
    )


@dataclass(frozen=True)
class Model:
    """The model to train."""

    name: str = _doc("Name; the file `config/models/{name}.yaml`")
    source: Source = field(default_factory=Source, metadata={"doc": "Where its files come from"})
    architecture: Architecture = field(default_factory=Architecture, metadata={"doc": "Its dimensions"})
    patch: Patch = field(default_factory=Patch, metadata={"doc": "Change of its config"})
    tokenizer: str = _doc(
        "Folder with a `tokenizer.json` that replaces the checkpoint's tokenizer, for checkpoints whose "
        "tokenizer needs its own code. The folder's `tokenizer_config.json` and `chat_template.jinja` "
        "are used, too",
        "",
        unnamed="",
    )
    chat_template: str = _doc(
        "File with a Jinja chat template that replaces the checkpoint's, or adds a missing one", "", unnamed=""
    )
    own_digests: list[str] = _doc(
        "Digests of the files that `tokenizer` and `chat_template` name, computed for you", [], unnamed=[]
    )


@dataclass(frozen=True)
class Defaults:
    """Default nodes and hardware of a model."""

    nodes: int = _doc("Node count", minimum=1)
    hardware: str = _doc("Name of a file in `config/hardware`")


@dataclass(frozen=True)
class Training:
    """Length and seed of the run."""

    num_steps: int = _doc("Steps, each a rollout and its updates", minimum=1)
    global_batch_size: int = _doc("Samples per optimizer step", minimum=1)
    seed: int = _doc("Seed of sampling and of the model-parallel RNG", minimum=0)
    objective: str = _doc(
        "rl: sample responses and learn from their rewards (`algorithm`); sft: learn the responses of "
        "the data, without engines (docs/algorithms.md)",
        "rl",
        choices=("rl", "sft"),
        unnamed="rl",
    )


@dataclass(frozen=True)
class Parallel:
    """Parallel layout of the trainer, under Megatron's names."""

    tensor_model_parallel_size: int = _doc("Ranks that share a layer's matrices", 1, minimum=1)
    pipeline_model_parallel_size: int = _doc("Pipeline stages", 1, minimum=1)
    context_parallel_size: int = _doc("Ranks that share a sequence", 1, minimum=1)
    expert_model_parallel_size: int = _doc("Ranks that share a layer's experts", 1, minimum=1)
    expert_tensor_parallel_size: int = _doc("Ranks that share an expert's matrices", 1, minimum=1)
    num_layers_in_last_pipeline_stage: int = _doc("Layers of the last stage; 0: as the others", 0, minimum=0)
    virtual_pipeline_model_parallel_size: int = _doc(
        "Interleaved chunks of layers per stage: less pipeline idle time, more communication", 1, minimum=1
    )
    num_layers_in_first_pipeline_stage: int = _doc("Layers of the first stage; 0: as the others", 0, minimum=0)


@dataclass(frozen=True)
class Trainer:
    """Computation of a step, and checkpoints."""

    params_dtype: str = _doc("Precision of the trainer's weights", "bf16", choices=("bf16", "fp32"))
    max_tokens_per_gpu: int = _doc("Token budget of a micro-batch per rank (dynamic batching)", 16384, minimum=1)
    log_probs_chunk_size: int = _doc("Tokens per chunk of logits", 1024, minimum=1)
    recompute_granularity: str = _doc(
        "Recomputation in the backward pass: full: of layers; selective: of `recompute_modules`; auto: the planner "
        "chooses it, with the optimizer's offload, context parallelism and chunks where these are not given",
        "full",
        choices=("auto", "full", "selective", "none"),
    )
    recompute_modules: list[str] = _doc(
        "Modules of every layer whose activations are dropped and computed again (recompute_granularity: selective): "
        f"{', '.join(RECOMPUTED_MODULES)}",
        [],
    )
    recompute_method: str = _doc("Megatron's method of full recomputation", "uniform", choices=("uniform", "block"))
    recompute_num_layers: int = _doc("Layers per recomputed chunk", 1, minimum=1)
    attention_chunk_tokens: int = _doc("Queries of a sequence per chunk of attention scores", 512, minimum=1)
    sparse_attention: str = _doc(
        "Kernel of sparse attention on GPUs; auto: the kernel of Megatron Core that supports the shapes",
        "auto",
        choices=("auto", "tilelang", "cudnn", "masked"),
    )
    indexer_kernel: str = _doc(
        "What chooses the keys of sparse attention; auto: Triton kernels on GPUs that can run them, otherwise torch",
        "auto",
        choices=("auto", "fused", "torch"),
    )
    keep_index_choice: str = _doc(
        "all: a layer that is computed again in full reads the keys that its forward pass has chosen; none: it chooses "
        "them again",
        "none",
        choices=("none", "all"),
    )
    optimizer_cpu_offload: bool = _doc("Keep optimizer state in host memory", False)
    deepep: bool = _doc("Dispatch tokens to experts with DeepEP (CUDA only)", True)
    save_interval: int = _doc("Steps between checkpoints", 20, minimum=1)
    keep_checkpoints: int = _doc("Number of newest checkpoints to keep", 2, minimum=1)
    mismatch_interval: int = _doc(
        "Steps between comparisons of trainer and engine on the served weights, and of two trainer "
        "passes on the same weights; the first and the last step always compare; 0: never",
        20,
        minimum=0,
    )
    mismatch: MismatchLimits = field(default_factory=MismatchLimits, metadata={"doc": "What it may be"})
    num_threads: int = _doc("CPU threads per rank; 0: torch's choice", 0, minimum=0)


@dataclass(frozen=True)
class Convert:
    """Work split of conversion and quantisation."""

    num_parts: int = _doc("Independent jobs that write one checkpoint", 8, minimum=1)


@dataclass(frozen=True)
class Site:
    """A cluster. A declared capacity is checked against the plan; 0: not declared."""

    name: str = _doc("Name; the file `config/sites/{name}.yaml`")
    store: str = _doc("Folder of the artefacts that do not depend on a run; a group may share it", "resources")
    store_group: str = _doc("Group whose members share the store and may write to it; empty: only the user", "")
    unused_days: int = _doc("`snakemake gc` keeps what was used in this many days", 14, minimum=0)
    results: str = _doc("Folder of the runs", "results")
    node_local: str = _doc("Folder on each node's own disk", "node_local")
    node_names: list[str] = _doc(
        "Nodes to stage to, in the order of their ranks; empty: the job stages to its own nodes", []
    )
    launcher: str = _doc("Launcher of processes on the nodes", "local", choices=("local", "slurm", "kubernetes"))
    network_interface: str = _doc(
        "Network interface between nodes (`ib0`, `eth0`); empty: that of a node's own name", ""
    )
    trainer_environment: list[str] = _doc(
        "Environment of every trainer rank, NAME=value: NCCL, NVSHMEM, UCX and the like. Exported "
        "variables of the shell also reach ranks and engines, except settings of torch's allocator "
        "(PYTORCH_CUDA_ALLOC_CONF), which must be set here",
        [],
    )
    engine_environment: list[str] = _doc("Environment of every engine, NAME=value, under the same rules", [])
    end_command: list[str] = _doc(
        "Words of a command that the driver runs at its end, for example to send you a message; its "
        "environment has POSTTRAIN_RUN, POSTTRAIN_STATE (ended, failed, interrupted) and "
        "POSTTRAIN_MESSAGE",
        [],
    )
    slurm: Slurm = field(default_factory=Slurm, metadata={"doc": "What jobs ask SLURM for (launcher: slurm)"})
    container: Container = field(default_factory=Container, metadata={"doc": "Image behind srun"})
    kubernetes: Kubernetes = field(default_factory=Kubernetes, metadata={"doc": "What pods get"})
    shared_disk_gb: float = _doc("Capacity of the shared storage for `store` and `results` together", 0.0, minimum=0)
    local_disk_gb: float = _doc("Capacity of each node's own disk", 0.0, minimum=0)
    host_memory_gib: float = _doc("Host memory of each node", 0.0, minimum=0)
    price_per_gpu_hour: float = _doc(
        "Price of a GPU per hour, for costs in plan and report; 0: no costs", 0.0, minimum=0
    )
    currency: str = _doc("Currency of that price, as it is printed: `EUR`", "")


@dataclass(frozen=True)
class Logging:
    """Metric sinks besides `metrics.jsonl`."""

    wandb: bool = _doc("Write a W&B run", True)
    wandb_mode: str = _doc(
        "online requires `wandb login`, or WANDB_API_KEY in the environment", "offline", choices=("offline", "online")
    )
    wandb_project: str = _doc("W&B project", "posttrain")
    wandb_entity: str = _doc("W&B team or user; empty: yours", "")
    wandb_group: str = _doc("W&B group that the run belongs to", "")
    wandb_tags: list[str] = _doc("W&B tags of the run", [])
    keep_rollouts: bool = _doc(
        "Keep the rollouts of finished steps, so that `posttrain replay` can train on them again", False
    )
    profile_steps: list[str] = _doc(
        "Numbers of the steps, from 1, that PyTorch's profiler traces on rank 0 into the run's folder `traces`", []
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    algorithm: Algorithm = field(default_factory=Algorithm)
    reward: Reward = field(default_factory=Reward)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    rollout: Rollout = field(default_factory=Rollout)
    quantize: Quantize = field(default_factory=Quantize)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    defaults: Defaults = field(default_factory=Defaults)
    nodes: int = _doc("Nodes of the training job", minimum=1)
    parallel: Parallel = field(default_factory=Parallel)
    trainer: Trainer = field(default_factory=Trainer)
    engine: Engine = field(default_factory=Engine)
    download: Download = field(default_factory=Download)
    convert: Convert = field(default_factory=Convert)
    serving: Serving = field(default_factory=Serving)
    export: Export = field(default_factory=Export)
    stage: Stage = field(default_factory=Stage)
    launch: Launch = field(default_factory=Launch)
    hardware: Hardware = field(default_factory=Hardware)
    site: Site = field(default_factory=Site)
    logging: Logging = field(default_factory=Logging)


# What is learned. The digest of these names the run; everything else may change from attempt to attempt.
EXPERIMENT_SECTIONS = (
    *("model", "data", "reward", "environment", "sandbox", "algorithm", "rollout", "quantize"),
    *("optimizer", "training"),
)
