//! Every key of the configuration, declared once.

use super::choices::{BatchNorm, Decay, FrozenDtype, Prefetch, Reduction, Targets};
use super::declare::declare;
use super::field::{Field, LossScale};
use super::kind::Kind::{Float, Integer, ListOrInteger, Number};
use super::kind::{COUNT, INF, TINY};
use super::{Key, Values};
use frit_ir::DType;
use frit_ir::ops::{OptimizerKind, ScheduleKind};
use frit_ir::plan::{DeviceType, Strategy};
use frit_passes::autocast::Override;
use frit_passes::loss::LossKind;
use frit_passes::offload::Offload;
use frit_passes::pad_tensor_cores::PadMode;
use frit_passes::recompute::Recompute;
use frit_passes::schedule::BackwardPrefetch;
use frit_passes::update::ParamGroup;

/// Most ranks. Nothing that is compiled grows with their number, but messages and files name them all.
const RANKS: u64 = 1 << 16;

/// Most micro-steps that a history of magnitudes covers: it is kept for every tensor.
const HISTORY: u64 = 1 << 12;

/// Most of anything that an import may be allowed to make.
const AMOUNT: u64 = 1 << 40;

/// Most steps of a run: what an f32 counts exactly.
const STEPS: u64 = 1 << 24;

/// The word for `precision.compute` and `precision.pure` in one.
pub(super) const PURE: &str = "bf16-pure";
/// The word for `precision.compute` and `precision.fp8` in one.
pub(super) const FP8: &str = "fp8";

declare! {
    /// How the model is read.
    model: ModelSection {
        /// How BatchNorm computes its statistics: as the model says, per rank, or over all ranks.
        batch_norm: BatchNorm = "as_exported",
        /// Whether an embedding and its copy in a product, which an exporter made of one parameter, train as one.
        tie_weights: bool = false,
    }

    /// What the import of a model may make.
    import: ImportSection {
        /// Elements that constants made at import may have together; results that need not be known at import take
        /// half at most.
        max_elements: u64 = 67108864 => Integer(1, AMOUNT),
        /// Operations on elements to compute constants at import.
        max_operations: u64 = 268435456 => Integer(1, AMOUNT),
        /// Nodes that the import may make, once functions, loops and blocks are written out.
        max_nodes: u64 = 65536 => Integer(1, AMOUNT),
        /// Bytes of names and attributes that are copied to write out functions and loops.
        max_bytes: u64 = 268435456 => Integer(1, AMOUNT),
        /// Levels of functions, graphs and blocks inside one another; at most 256.
        max_depth: u64 = 64 => Integer(1, 256),
    }

    /// What trains; patterns of parameter names.
    params: ParamsSection {
        /// Patterns of parameter names that may train.
        trainable: Vec<String> = ["**"],
        /// Patterns of parameter names that are sharded but never updated.
        frozen: Vec<String> = [],
        /// Patterns of parameter names that stay replicated constants.
        ignored: Vec<String> = [],
        /// Dtype that parameters which do not train are held and gathered in: the one in which they are read, or
        /// `fp32`.
        frozen_dtype: FrozenDtype = "compute",
    }

    /// The loss.
    loss: LossSection {
        /// The loss; `output` takes the model's own, `none` compiles the forward pass only.
        kind: LossKind = "cross_entropy",
        /// The graph output that the loss reads, or that is the loss.
        logits: String = "logits",
        /// The tensor of the data that holds labels or targets.
        labels: String = "labels",
        /// The label that is left out of a cross-entropy.
        ignore_index: i64 = -100,
        /// Mean over all labels of the step, or of each rank and micro-step first.
        reduction: Reduction = "global_mean",
        /// Whether labels of a cross-entropy are class indices or probabilities of all classes.
        targets: Targets = "indices",
        /// The part of every label of a cross-entropy that is spread over all classes.
        label_smoothing: f64 = 0.0 => Number(0.0, 1.0),
        /// The difference at which smooth_l1 becomes linear.
        beta: f64 = 1.0 => Number(1e-12, INF),
        /// The factor of the loss.
        weight: f64 = 1.0,
        /// Further losses, each as "WEIGHT * KIND(OUTPUT, LABELS)", or "WEIGHT * output(OUTPUT)".
        also: Vec<String> = [],
        /// The axis of the logits that holds classes.
        class_axis: Option<i64> = "auto",
    }

    /// What is measured beside the losses.
    metrics: MetricsSection {
        /// What `frit eval` and validations report beside the losses: "accuracy", "top_K", "perplexity",
        /// "mean_absolute_error", also as "accuracy(OUTPUT, LABELS)"; "auto" is what is usual for each loss.
        report: Vec<String> = ["auto"],
    }

    /// The optimizer.
    optimizer: OptimizerSection {
        /// The update rule.
        kind: OptimizerKind = "adamw",
        /// Learning rate.
        lr: f64 = 1e-3,
        /// Decay of the first and second moment.
        betas: [f64; 2] = [0.9, 0.999],
        /// Added to the root of the second moment.
        eps: f64 = 1e-8,
        /// Weight decay.
        weight_decay: f64 = 0.01,
        /// Momentum of `momentum` and `nesterov`.
        momentum: f64 = 0.9 => Number(0.0, 1.0),
        /// The part of the gradient that `momentum` leaves out.
        dampening: f64 = 0.0 => Number(0.0, 1.0),
        /// Adafactor averages the second moment of step t with the weight t to the power of minus this.
        decay_exponent: f64 = 0.8,
        /// The least root mean square with which adafactor counts a parameter.
        relative_eps: f64 = 1e-3,
        /// The largest root mean square of adafactor's updates.
        update_threshold: f64 = 1.0 => Number(TINY, INF),
        /// Which parameters weight decay applies to; `matrices` leaves out norms and biases (at most one axis).
        decay: Decay = "all",
        /// Largest global norm of the gradients; 0 clips nothing.
        clip_grad_norm: f64 = 1.0,
        /// Largest absolute value of a gradient's element, after clipping by norm; 0 clips nothing.
        clip_grad_value: f64 = 0.0,
        /// Decay of the moving average of the parameters; 0 keeps none.
        ema: f64 = 0.0 => Number(0.0, 1.0),
    }, tables {
        /// Parameters with settings of their own; the last that covers one wins.
        groups: ParamGroup,
    }

    /// The learning rate over the steps taken.
    schedule: ScheduleSection {
        /// How the learning rate changes over the steps taken.
        kind: ScheduleKind = "constant",
        /// Steps over which the learning rate rises from zero.
        warmup_steps: u64 = 0 => Integer(0, STEPS),
        /// The step at which `min_lr` is reached.
        total_steps: u64 = 0 => Integer(0, STEPS),
        /// Learning rate at the end.
        min_lr: f64 = 0.0,
        /// Steps between two changes of `step`.
        step_size: u64 = 0 => Integer(0, STEPS),
        /// Factor of the learning rate at each change of `step`.
        gamma: f64 = 0.1,
        /// The part of all steps over which `one_cycle` rises.
        pct_start: f64 = 0.3 => Number(0.0, 1.0),
        /// The learning rate divided by this is where `one_cycle` begins.
        div_factor: f64 = 25.0 => Number(1.0, INF),
        /// Where `one_cycle` begins divided by this is where it ends.
        final_div_factor: f64 = 1e4 => Number(1.0, INF),
    }

    /// Dtypes and loss scale.
    precision: PrecisionSection {
        /// Dtype in which autocast runs matrix products and the like; `bf16-pure` is bf16 with `pure`, `fp8` is
        /// bf16 with `fp8`.
        compute: DType = "bf16" => Float(&[PURE, FP8]),
        /// Whether everything but the loss is computed in `compute`, with parameters rounded to it.
        pure: bool = false,
        /// Whether matrix products read operands rounded to 8-bit floats (e4m3, gradients e5m2), scaled by their
        /// largest magnitudes of late.
        fp8: bool = false,
        /// Micro-steps over which the largest magnitudes are kept for `fp8`.
        fp8_history: usize = 16 => Integer(1, HISTORY),
        /// Scale of the loss: `auto` is dynamic for fp16 and none otherwise; a number is fixed.
        loss_scale: LossScale = "auto",
        /// First dynamic scale.
        init_scale: f64 = 65536 => Number(TINY, INF),
        /// Factor of the scale after `growth_interval` good steps.
        growth_factor: f64 = 2 => Number(1.0, INF),
        /// Factor of the scale after a skipped step.
        backoff_factor: f64 = 0.5 => Number(TINY, 1.0),
        /// Good steps between two growths.
        growth_interval: u64 = 2000 => Integer(1, STEPS),
    }, tables {
        /// Exceptions; the last that covers a node wins.
        overrides: Override,
    }

    /// What is sharded, and how it is communicated.
    sharding: ShardingSection {
        /// Number of ranks.
        ranks: usize = 1 => Integer(1, RANKS),
        /// What is sharded: all, gradients and optimizer state, optimizer state, nothing, or all within groups.
        strategy: Strategy = "full_shard",
        /// Ranks of a group in `hybrid_shard`; it must divide the ranks.
        shard_group: usize = 0 => Integer(0, RANKS),
        /// How units are formed: `blocks`, `none`, `size=N` parameters, or patterns of modules such as `h.*, head`.
        wrap: String = "blocks",
        /// Patterns of units whose parameters are freed after forward and gathered again in backward; with
        /// `PATTERN=N` every N consecutive ranks keep a copy together and gather among themselves, and a number N
        /// is short for `**=N`.
        reshard_after_forward: Vec<String> = ["**"] => ListOrInteger,
        /// Whether gradients are reduced only after the last micro-step, not after each.
        no_sync: bool = false,
        /// Dtype that parameters are rounded to and gathered in; `auto` gathers each in what all its uses read.
        param_dtype: Option<DType> = "auto",
        /// Dtype in which ranks exchange gradients; sums are taken in fp32.
        reduce_dtype: DType = "fp32",
        /// Dtype that float buffers are rounded to; `auto` leaves them.
        buffer_dtype: Option<DType> = "auto",
        /// When units are gathered: as the next three keys say, or `auto`: as the cost model finds best within
        /// `memory.budget`.
        prefetch: Prefetch = "fixed",
        /// When backward gathers the next unit: before or after the current one's gradients.
        backward_prefetch: BackwardPrefetch = "pre",
        /// Units that forward gathers ahead.
        forward_prefetch: usize = 1,
        /// Gathered units that may be alive at once; 0 is any number.
        limit_all_gathers: usize = 2,
        /// Whether parameters and optimizer state rest in host memory: the same as `memory.offload = "parameters"`.
        cpu_offload: bool = false,
    }

    /// Padding.
    padding: PaddingSection {
        /// Whether matrix sizes are padded to what tensor cores like.
        tensor_cores: PadMode = "auto",
    }

    /// Memory.
    memory: MemorySection {
        /// Which activations backward computes again.
        recompute: Option<Recompute> = "none",
        /// What rests in host memory: nothing, optimizer state, that and parameters, or `auto`: what
        /// `memory.budget` asks for.
        offload: Option<Offload> = "none",
        /// Bytes that the plan may use per rank.
        budget: Option<u64> = "none",
    }

    /// Data.
    data: DataSection {
        /// Whether examples are shuffled at each epoch, from the seed.
        shuffle: bool = false,
        /// Whether an incomplete last step of an epoch is left out; otherwise the micro-steps that its data fill
        /// make a smaller one.
        drop_last: bool = true,
        /// A file of examples that `frit run` evaluates between steps but does not train on, or `none`.
        validation: String = "none",
        /// Ranges of float inputs for the lints, each as "NAME=LOW..HIGH".
        ranges: Vec<String> = [],
    }

    /// Advice.
    lints: LintsSection {
        /// Ids of lints that are only noted, such as "L02".
        allow: Vec<String> = [],
    }

    /// The run.
    run: RunSection {
        /// Micro-steps per step.
        accumulation: usize = 1 => Integer(1, COUNT),
        /// Seed of everything random.
        seed: u64 = 0 => Integer(0, i64::MAX as u64),
    }

    /// The machine.
    target: TargetSection {
        /// What the plan runs on.
        device: DeviceType = "cpu",
        /// The cluster for which durations are predicted: `a100-80g`, `h100`, `h200`, a TOML file, or `auto`: that
        /// of the architecture.
        cluster: String = "auto",
        /// CPU name, `native`, or a GPU architecture such as `sm_90`.
        arch: String = "native",
    }
}
