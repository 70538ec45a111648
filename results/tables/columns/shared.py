"""Columns that attempts and the ledger share: the experiment's fields, and the predicted step time."""

from __future__ import annotations

from results.tables.columns.column import BOOL, FLOAT, INT, TEXT, Column

CONFIG_COLUMNS: tuple[Column, ...] = (
    Column(
        "experiment_id", TEXT, "Readable name and hash of everything that can change a measured number", nullable=False
    ),
    Column("model", TEXT, "Name of the model shape"),
    Column("num_layers", INT, "Transformer layers"),
    Column("hidden_size", INT, "Width of the residual stream"),
    Column("num_heads", INT, "Query heads"),
    Column("num_kv_heads", INT, "Key and value heads"),
    Column("head_dim", INT, "Width of one head; with latent attention, of a query"),
    Column(
        "ffn_hidden_size",
        INT,
        "Width of the SwiGLU feed-forward layer; without dense layers, of a token's routed experts",
    ),
    Column("vocab_size", INT, "Rows of the embedding"),
    Column("tie_embeddings", BOOL, "True: input and output embedding share one matrix"),
    Column("world_size", INT, "Number of ranks of the layout", "ranks"),
    Column("dp", INT, "Data-parallel degree: dp_replicate times dp_shard"),
    Column("dp_replicate", INT, "Number of replicas (outer degree of HSDP)"),
    Column("dp_shard", INT, "Number of data-parallel ranks over which ZeRO shards one replica"),
    Column("tp", INT, "Tensor-parallel degree"),
    Column("cp", INT, "Context-parallel degree"),
    Column("pp", INT, "Pipeline-parallel degree"),
    Column("ep", INT, "Expert-parallel degree; these ranks are taken from dp and cp, and from tp if etp is 1"),
    Column("etp", INT, "Tensor-parallel degree inside routed experts: 1 or tp"),
    Column(
        "routing",
        TEXT,
        "How experts are chosen for tokens: balanced and skewed force the choice, learned uses the router",
    ),
    Column(
        "routing_imbalance",
        FLOAT,
        "Load of the most loaded expert divided by the mean load: set for skewed routing, assumed for learned routing",
    ),
    Column(
        "capacity_factor",
        FLOAT,
        "Limit of token copies that an expert takes, divided by their mean per expert; null: no limit",
    ),
    Column("micro_batch_size", INT, "Sequences in one forward pass of one data-parallel rank", "sequences"),
    Column("global_batch_size", INT, "Sequences in one optimizer step, over all ranks", "sequences"),
    Column(
        "num_microbatches", INT, "Micro-batches of one data-parallel rank in one optimizer step (gradient accumulation)"
    ),
    Column("seq_len", INT, "Tokens in one sequence", "tokens"),
    Column("tokens_per_step", INT, "Tokens in one optimizer step, over all ranks", "tokens"),
    Column("zero_stage", INT, "ZeRO stage 0 to 3"),
    Column(
        "recompute",
        TEXT,
        "Activation recomputation: none, selective, full, or a list of operations such as norm+swiglu",
    ),
    Column(
        "recompute_every", INT, "Only layers whose index is a multiple of this number are recomputed; 1: every layer"
    ),
    Column(
        "activation_offload",
        TEXT,
        "Activations that wait for their backward on the host: none, all that is not recomputed, or a list such as "
        "input+attention",
    ),
    Column("pp_schedule", TEXT, "Pipeline schedule; none if pp is 1"),
    Column("virtual_stages", INT, "Model chunks held by one pipeline rank"),
    Column(
        "pp_split",
        TEXT,
        "How layers are assigned to pipeline stages: balanced takes the head into account, even does not; with "
        "ends_count embedding and head count as a layer each",
    ),
    Column("pp_stages", TEXT, "Stages written out, such as Et|(tt|)*30L, instead of pp_split; null: as pp_split says"),
    Column("cp_kind", TEXT, "How context-parallel ranks exchange keys and values: ring, allgather or ulysses"),
    Column("sequence_parallel", BOOL, "True: activations are sharded over tokens between tensor-parallel regions"),
    Column("precision", TEXT, "Compute precision"),
    Column("attention", TEXT, "Requested attention backend"),
    Column("recurrence", TEXT, "What computes recurrent layers: torch operations, or the kernels of fla or mamba_ssm"),
    Column("compile", TEXT, "Part of the model to which torch.compile is applied: none or block"),
    Column(
        "cuda_graph",
        TEXT,
        "Whether a whole optimizer step is captured as a CUDA graph, as asked for: none, step or auto",
    ),
    Column("pad_vocab_to", INT, "The rows of embedding and head are a multiple of this times tp; null: not padded"),
    Column(
        "gradient_accumulation_fusion",
        BOOL,
        "True: products of weight gradients add to the fp32 sum over micro-batches; false: each gradient is "
        "rounded and cast first. Of this project's engine; others have false",
    ),
    Column(
        "grad_reduce",
        TEXT,
        "Number format in which gradients are summed over micro-batches and reduced over ranks; fp32 stands for the "
        "dtype of the master weights",
    ),
    Column("optimizer", TEXT, "What updates the weights"),
    Column("optimizer_states", TEXT, "Number format in which the optimizer keeps its states between two updates"),
    Column("master_weights", TEXT, "Number format of the weights that the optimizer updates"),
    Column("optimizer_offload", FLOAT, "Share of the optimizer's states that the host holds and updates; 0: none"),
    Column(
        "documents",
        TEXT,
        "Lengths of the documents that are packed into sequences, such as lognormal mean=1500 sigma=1.2 seed=7; null: "
        "every sequence is one document",
    ),
    Column(
        "document_balance",
        TEXT,
        "How packed sequences are dealt over data-parallel ranks and micro-batches, and their tokens over "
        "context-parallel ranks: none (in order) or greedy",
    ),
    Column(
        "attention_imbalance",
        FLOAT,
        "FLOPs of attention that the most loaded data-parallel rank waits for, divided by the mean over ranks, by the "
        "lengths of their documents: in every micro-batch those of its most loaded context-parallel rank; null without "
        "documents",
    ),
    Column("seed", INT, "Seed of weights and data"),
    Column("engine", TEXT, "Training engine"),
    Column("engine_version", TEXT, "Version of the engine's numerics and memory behaviour"),
    Column("config_json", TEXT, "All fields of the experiment, as JSON"),
)

PREDICTED_TIME_COLUMNS: tuple[Column, ...] = (
    Column("predicted_step_time_s", FLOAT, "Step time predicted when the sweep was planned", "s"),
    Column("predicted_step_time_low_s", FLOAT, "Lower end of the 90 % prediction interval of the step time", "s"),
    Column("predicted_step_time_high_s", FLOAT, "Upper end of the 90 % prediction interval of the step time", "s"),
)
