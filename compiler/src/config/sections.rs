//! Every key of the configuration, declared once.

use super::choices::{
    AdapterKind, BatchNorm, Decay, FrozenDtype, Prefetch, Reduction, Residual, Targets,
};
use super::declare::declare;
use super::field::{Field, LossScale};
use super::kind::Kind::{Float, Integer, ListOrInteger, Number};
use super::kind::{COUNT, INF, TINY};
use super::{Key, Values};
use frit_ir::ops::{AdjustLr, OptimizerKind, ScheduleKind};
use frit_ir::plan::{DeviceType, Strategy};
use frit_ir::{DType, Diagnostic};
use frit_passes::autocast::Override;
use frit_passes::loss::LossKind;
use frit_passes::offload::Offload;
use frit_passes::pad_tensor_cores::PadMode;
use frit_passes::recompute::Recompute;
use frit_passes::schedule::BackwardPrefetch;
use frit_passes::update::ParamGroup;

/// Maximum number of ranks. Compile time does not depend on it, but messages and files list all ranks.
const RANKS: u64 = 1 << 16;

/// Maximum length of the amax history, which is kept for every tensor.
const HISTORY: u64 = 1 << 12;

/// Maximum of each import limit.
const AMOUNT: u64 = 1 << 40;

/// Maximum number of steps: the integers that an f32 represents exactly.
const STEPS: u64 = 1 << 24;

/// The value of `precision.compute` that also sets `precision.pure`.
pub(super) const PURE: &str = "bf16-pure";
/// The value of `precision.compute` that also sets `precision.fp8`.
pub(super) const FP8: &str = "fp8";

declare! {
    /// Reading the model.
    model: ModelSection {
        /// Statistics of BatchNorm: as the model says, per rank, or over all ranks.
        batch_norm: BatchNorm = "as_exported",
        /// Whether an embedding table and its exported copy in a matmul train as one parameter.
        tie_weights: bool = false,
    }

    /// Limits of the import.
    import: ImportSection {
        /// Total elements of constants computed at import; results whose values import does not need take half at most.
        max_elements: u64 = 67108864 => Integer(1, AMOUNT),
        /// Element operations to compute constants at import.
        max_operations: u64 = 268435456 => Integer(1, AMOUNT),
        /// Nodes after functions, loops and blocks are expanded.
        max_nodes: u64 = 65536 => Integer(1, AMOUNT),
        /// Bytes of names and attributes copied to expand functions and loops.
        max_bytes: u64 = 268435456 => Integer(1, AMOUNT),
        /// Nesting depth of functions, graphs and blocks; at most 256.
        max_depth: u64 = 64 => Integer(1, 256),
    }

    /// Which parameters train, by patterns of their names.
    params: ParamsSection {
        /// Patterns of parameters that train.
        trainable: Vec<String> = ["**"],
        /// Patterns of parameters that are sharded but not updated.
        frozen: Vec<String> = [],
        /// Patterns of parameters that are replicated constants.
        ignored: Vec<String> = [],
        /// Dtype in which frozen parameters are stored and gathered: the one in which they are read, or `fp32`.
        frozen_dtype: FrozenDtype = "compute",
    }

    /// Low-rank adapters that train instead of the model.
    adapter: AdapterSection {
        /// The kind of adapter; with one, the parameters of the model train only if `params.trainable` names them.
        kind: AdapterKind = "none",
        /// Rank of the two matrices.
        rank: usize = 8 => Integer(1, 65536),
        /// Rank times the factor of the adapter's result.
        alpha: f64 = 8.0 => Number(0.0, INF),
        /// Probability that an element of the adapter's operand is dropped.
        dropout: f64 = 0.0 => Number(0.0, 0.999999),
        /// Patterns of modules whose weight gets an adapter, such as "**.q_proj".
        targets: Vec<String> = [],
    }

    /// The loss.
    loss: LossSection {
        /// The loss; `output` is a loss computed by the model, `none` compiles the forward pass only.
        kind: LossKind = "cross_entropy",
        /// The graph output that the loss reads or, with `output`, the loss.
        logits: String = "logits",
        /// The data tensor with labels or targets.
        labels: String = "labels",
        /// The label that a cross-entropy ignores.
        ignore_index: i64 = -100,
        /// Mean over all labels of the step, or first within each rank and micro-step, which is not implemented.
        reduction: Reduction = "global_mean",
        /// Whether labels of a cross-entropy are class indices or probabilities of all classes.
        targets: Targets = "indices",
        /// Fraction of every cross-entropy label that is distributed over all classes.
        label_smoothing: f64 = 0.0 => Number(0.0, 1.0),
        /// The difference above which smooth_l1 is linear.
        beta: f64 = 1.0 => Number(1e-12, INF),
        /// Factor of the loss.
        weight: f64 = 1.0,
        /// Further losses, each as "WEIGHT * KIND(OUTPUT, LABELS)", or "WEIGHT * output(OUTPUT)".
        also: Vec<String> = [],
        /// The class axis of the logits.
        class_axis: Option<i64> = "auto",
    }

    /// Metrics reported beside the losses.
    metrics: MetricsSection {
        /// Metrics of `frit eval` and validation: "accuracy", "top_K", "perplexity", "mean_absolute_error", also as
        /// "accuracy(OUTPUT, LABELS)"; "auto" selects the usual ones for each loss.
        report: Vec<String> = ["auto"],
    }

    /// The optimizer.
    optimizer: OptimizerSection {
        /// The update rule.
        kind: OptimizerKind = "adamw",
        /// Learning rate.
        lr: f64 = 1e-3,
        /// Decay rates of the first and second moment.
        betas: [f64; 2] = [0.9, 0.999],
        /// Added to the square root of the second moment.
        eps: f64 = 1e-8,
        /// Weight decay.
        weight_decay: f64 = 0.01,
        /// Momentum of `momentum` and `nesterov`.
        momentum: f64 = 0.9 => Number(0.0, 1.0),
        /// Fraction of the gradient that `momentum` omits.
        dampening: f64 = 0.0 => Number(0.0, 1.0),
        /// Adafactor: the gradient's weight in the second moment at step t is t to the power of minus this.
        decay_exponent: f64 = 0.8,
        /// Adafactor: lower bound of a parameter's root mean square.
        relative_eps: f64 = 1e-3,
        /// Adafactor: upper bound of an update's root mean square.
        update_threshold: f64 = 1.0 => Number(TINY, INF),
        /// Muon: momentum.
        muon_momentum: f64 = 0.95 => Number(0.0, 1.0),
        /// Muon: whether the gradient is mixed into the momentum once more.
        muon_nesterov: bool = true,
        /// Muon: Newton-Schulz iterations.
        muon_ns_steps: usize = 5 => Integer(1, 99),
        /// Muon: coefficients of the iteration, of X, of X·Xᵀ·X and of (X·Xᵀ)²·X.
        muon_ns_coefficients: [f64; 3] = [3.4445, -4.775, 2.0315],
        /// Muon: lower bound of the norm by which a matrix is divided first.
        muon_ns_eps: f64 = 1e-7 => Number(TINY, INF),
        /// Muon: how the learning rate depends on the shape of a matrix.
        muon_adjust_lr: AdjustLr = "original",
        /// Muon: learning rate of the parameters that AdamW steps; `auto` is `lr`.
        adamw_lr: Option<f64> = "auto",
        /// Muon: weight decay of the parameters that AdamW steps; `auto` is `weight_decay`.
        adamw_weight_decay: Option<f64> = "auto",
        /// Parameters that weight decay applies to; `matrices` excludes norms and biases (at most one axis).
        decay: Decay = "all",
        /// Maximum global norm of the gradients; 0 disables clipping.
        clip_grad_norm: f64 = 1.0,
        /// Maximum absolute value of a gradient element, after clipping by norm; 0 disables clipping.
        clip_grad_value: f64 = 0.0,
        /// Decay of the moving average of the parameters; 0 disables it.
        ema: f64 = 0.0 => Number(0.0, 1.0),
    }, tables {
        /// Parameters with settings of their own; the last match wins.
        groups: ParamGroup,
    }

    /// Learning rate schedule, by steps taken.
    schedule: ScheduleSection {
        /// The kind of schedule.
        kind: ScheduleKind = "constant",
        /// Steps of linear warm-up from zero.
        warmup_steps: u64 = 0 => Integer(0, STEPS),
        /// The step at which `min_lr` is reached.
        total_steps: u64 = 0 => Integer(0, STEPS),
        /// Final learning rate.
        min_lr: f64 = 0.0,
        /// Steps between two changes with `step`.
        step_size: u64 = 0 => Integer(0, STEPS),
        /// Factor of the learning rate at each change with `step`.
        gamma: f64 = 0.1,
        /// Fraction of steps in which `one_cycle` rises.
        pct_start: f64 = 0.3 => Number(0.0, 1.0),
        /// `one_cycle` starts at the learning rate divided by this.
        div_factor: f64 = 25.0 => Number(1.0, INF),
        /// `one_cycle` ends at its start divided by this.
        final_div_factor: f64 = 1e4 => Number(1.0, INF),
    }

    /// Dtypes and loss scale.
    precision: PrecisionSection {
        /// Dtype in which autocast runs matmul-class operations; `bf16-pure` is bf16 with `pure`, `fp8` is bf16 with
        /// `fp8`.
        compute: DType = "bf16" => Float(&[PURE, FP8]),
        /// Whether everything but the loss runs in `compute`, with parameters rounded to it.
        pure: bool = false,
        /// Dtype of the residual stream, the sums of a value and what matmuls make of it: `compute` is the dtype of
        /// `precision.compute`.
        residual: Residual = "fp32",
        /// Whether matmul operands are quantized to 8-bit floats (e4m3, gradients e5m2), scaled by their recent amax.
        fp8: bool = false,
        /// Length of the amax history for `fp8`, in micro-steps.
        fp8_history: usize = 16 => Integer(1, HISTORY),
        /// Loss scale: `auto` is dynamic for fp16 and none otherwise; a number is fixed.
        loss_scale: LossScale = "auto",
        /// Initial dynamic loss scale.
        init_scale: f64 = 65536 => Number(TINY, INF),
        /// Factor of the scale after `growth_interval` steps without overflow.
        growth_factor: f64 = 2 => Number(1.0, INF),
        /// Factor of the scale after a skipped step.
        backoff_factor: f64 = 0.5 => Number(TINY, 1.0),
        /// Steps without overflow between two growths.
        growth_interval: u64 = 2000 => Integer(1, STEPS),
    }, tables {
        /// Precision overrides; the last match wins.
        overrides: Override,
    }

    /// Sharding and communication.
    sharding: ShardingSection {
        /// Number of ranks.
        ranks: usize = 1 => Integer(1, RANKS),
        /// The state that is sharded: everything, gradients and optimizer state, optimizer state only, nothing, or
        /// everything within groups.
        strategy: Strategy = "full_shard",
        /// Ranks per group with `hybrid_shard`; must divide the number of ranks.
        shard_group: usize = 0 => Integer(0, RANKS),
        /// How units are formed: `blocks`, `none`, `size=N` parameters, or patterns of modules such as `h.*, head`.
        wrap: String = "blocks",
        /// Patterns of units whose parameters are freed after forward and regathered in backward;
        /// with `PATTERN=N` every N consecutive ranks share a copy and gather among themselves, and
        /// a number N is short for `**=N`.
        reshard_after_forward: Vec<String> = ["**"] => ListOrInteger,
        /// Whether gradients are reduced only after the last micro-step.
        no_sync: bool = false,
        /// Dtype to which parameters are rounded and in which they are gathered; `auto`: what all uses of each read.
        param_dtype: Option<DType> = "auto",
        /// Dtype in which gradients are exchanged; sums are accumulated in fp32.
        reduce_dtype: DType = "fp32",
        /// Dtype to which float buffers are rounded; `auto` leaves them unchanged.
        buffer_dtype: Option<DType> = "auto",
        /// When units are gathered: `fixed` by the next three keys, `auto` by the cost model within `memory.budget`.
        prefetch: Prefetch = "fixed",
        /// When backward gathers the next unit: before or after the current unit's gradients.
        backward_prefetch: BackwardPrefetch = "pre",
        /// Number of units that forward gathers ahead.
        forward_prefetch: usize = 1,
        /// Maximum number of gathered units alive at once; 0 is unlimited.
        limit_all_gathers: usize = 2,
        /// Store parameters and optimizer state in host memory; the same as `memory.offload = "parameters"`.
        cpu_offload: bool = false,
    }

    /// Padding.
    padding: PaddingSection {
        /// Whether matrix sizes are padded for tensor cores.
        tensor_cores: PadMode = "auto",
    }

    /// Memory.
    memory: MemorySection {
        /// Which activations backward recomputes: none, cheap ones (`selective`), all of a unit, or `auto`: as `memory.budget`
        /// requires, and on the CPU at least cheap ones.
        recompute: Option<Recompute> = "auto",
        /// What is stored in host memory: nothing, optimizer state, also parameters, or `auto`: as `memory.budget`
        /// requires.
        offload: Option<Offload> = "none",
        /// In how many chunks of tokens the logits, their loss and their gradient are computed, so that they never exist whole.
        /// 1 leaves them whole.
        loss_chunks: Option<i64> = "auto",
        /// Device memory that the plan may use per rank.
        budget: Option<u64> = "none",
    }

    /// Data.
    data: DataSection {
        /// Whether examples are shuffled in each epoch, from the seed.
        shuffle: bool = false,
        /// Whether an incomplete last step of an epoch is dropped; otherwise its full micro-steps form a smaller step.
        drop_last: bool = true,
        /// A file of examples that `frit run` evaluates between steps, or `none`.
        validation: String = "none",
        /// The token that ends a document, if examples are packed documents: neither attention nor positions go beyond it.
        document_separator: Option<usize> = "none",
        /// Ranges of float inputs for the lints, each as "NAME=LOW..HIGH".
        ranges: Vec<String> = [],
    }

    /// Lints.
    lints: LintsSection {
        /// Ids of lints to demote to notes, such as "L02".
        allow: Vec<String> = [],
    }

    /// The run.
    run: RunSection {
        /// Micro-steps per step.
        accumulation: usize = 1 => Integer(1, COUNT),
        /// Whether every run computes the same bits; otherwise cuDNN may add in any order, which can be faster on GPUs.
        deterministic: bool = true,
        /// The micro-batches of a step, a power of two up to 64, that any number of ranks which divides it share: with every
        /// such number a step computes the same bits.
        reproducible: Option<usize> = "none",
        /// Seed of all random numbers.
        seed: u64 = 0 => Integer(0, i64::MAX as u64),
    }

    /// The target machine.
    target: TargetSection {
        /// Device that the plan runs on.
        device: DeviceType = "cpu",
        /// Cluster for predicted durations: `a100-80g`, `h100`, `h100-alone`, `h200`, `h200-gemm`, a TOML file, or `auto`: by architecture.
        cluster: String = "auto",
        /// CPU name, `native`, or a GPU architecture such as `sm_90`.
        arch: String = "native",
    }
}
