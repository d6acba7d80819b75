//! The configuration as typed sections, made from the values of the key table.

use super::choices::{
    Backward, BatchNorm, Decay, DeviceType, FrozenDtype, LossKind, Offload, Optimizer, Padding,
    Prefetch, Recompute, Reduction, Schedule, Strategy, Targets,
};
use super::keys::{Value, dtype_name};
use crate::diagnostics::Report;
use frit_ir::{DType, Diagnostic};
use serde::Serialize;
use std::collections::BTreeMap;

type Values = BTreeMap<&'static str, Value>;

/// The type of one field, read from and written as the value of a key.
trait Field: Sized {
    fn get(value: &Value) -> Option<Self>;
    fn put(&self) -> Value;
}

impl Field for usize {
    fn get(value: &Value) -> Option<Self> {
        if let Value::Integer(i) = value { usize::try_from(*i).ok() } else { None }
    }
    fn put(&self) -> Value {
        Value::Integer(*self as u64)
    }
}

impl Field for u64 {
    fn get(value: &Value) -> Option<Self> {
        if let Value::Integer(i) = value { Some(*i) } else { None }
    }
    fn put(&self) -> Value {
        Value::Integer(*self)
    }
}

impl Field for i64 {
    fn get(value: &Value) -> Option<Self> {
        if let Value::Signed(i) = value { Some(*i) } else { None }
    }
    fn put(&self) -> Value {
        Value::Signed(*self)
    }
}

/// `"auto"`, or an integer.
impl Field for Option<i64> {
    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Signed(i) => Some(Some(*i)),
            Value::Text(_) => Some(None),
            _ => None,
        }
    }
    fn put(&self) -> Value {
        self.map_or_else(|| Value::Text("auto".into()), Value::Signed)
    }
}

impl Field for f64 {
    fn get(value: &Value) -> Option<Self> {
        if let Value::Number(x) = value { Some(*x) } else { None }
    }
    fn put(&self) -> Value {
        Value::Number(*self)
    }
}

/// `"none"`, or a number of bytes.
impl Field for Option<u64> {
    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Number(x) => Some(Some(*x as u64)),
            Value::Text(_) => Some(None),
            _ => None,
        }
    }
    fn put(&self) -> Value {
        self.map_or_else(|| Value::Text("none".into()), |n| Value::Number(n as f64))
    }
}

impl Field for bool {
    fn get(value: &Value) -> Option<Self> {
        if let Value::Boolean(b) = value { Some(*b) } else { None }
    }
    fn put(&self) -> Value {
        Value::Boolean(*self)
    }
}

impl Field for String {
    fn get(value: &Value) -> Option<Self> {
        if let Value::Text(s) = value { Some(s.clone()) } else { None }
    }
    fn put(&self) -> Value {
        Value::Text(self.clone())
    }
}

impl Field for [f64; 2] {
    fn get(value: &Value) -> Option<Self> {
        if let Value::Pair(pair) = value { Some(*pair) } else { None }
    }
    fn put(&self) -> Value {
        Value::Pair(*self)
    }
}

impl Field for Vec<String> {
    fn get(value: &Value) -> Option<Self> {
        if let Value::List(list) = value { Some(list.clone()) } else { None }
    }
    fn put(&self) -> Value {
        Value::List(self.clone())
    }
}

impl Field for DType {
    fn get(value: &Value) -> Option<Self> {
        if let Value::Text(s) = value { s.parse().ok() } else { None }
    }
    fn put(&self) -> Value {
        Value::Text(dtype_name(self.name()).unwrap_or(self.name()).into())
    }
}

/// `"auto"`, or a float type.
impl Field for Option<DType> {
    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Text(s) if s == "auto" => Some(None),
            other => DType::get(other).map(Some),
        }
    }
    fn put(&self) -> Value {
        self.map_or_else(|| Value::Text("auto".into()), |d| d.put())
    }
}

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossScale {
    /// Dynamic if `precision.compute` is fp16, else none.
    Auto,
    /// Dynamic.
    Dynamic,
    /// None.
    None,
    /// Always this.
    Fixed(f64),
}

impl Field for LossScale {
    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Number(x) => Some(LossScale::Fixed(*x)),
            Value::Text(s) => match s.as_str() {
                "auto" => Some(LossScale::Auto),
                "dynamic" => Some(LossScale::Dynamic),
                "none" => Some(LossScale::None),
                _ => None,
            },
            _ => None,
        }
    }
    fn put(&self) -> Value {
        match self {
            LossScale::Fixed(x) => Value::Number(*x),
            LossScale::Auto => Value::Text("auto".into()),
            LossScale::Dynamic => Value::Text("dynamic".into()),
            LossScale::None => Value::Text("none".into()),
        }
    }
}

macro_rules! choice_fields {
    ($($name:ident)*) => {$(
        impl Field for $name {
            fn get(value: &Value) -> Option<Self> {
                if let Value::Text(s) = value { $name::of(s) } else { None }
            }
            fn put(&self) -> Value {
                Value::Text(self.word().into())
            }
        }
    )*};
}

choice_fields! {
    Backward BatchNorm Decay DeviceType FrozenDtype LossKind Offload Optimizer Padding Prefetch Recompute
    Reduction
    Schedule Strategy Targets
}

/// Declares sections whose fields are keys of the table, and how they are read and written.
macro_rules! sections {
    ($($(#[$meta:meta])* $name:ident in $head:literal {
        $($(#[$doc:meta])* $field:ident: $ty:ty,)*
    } $({ $($(#[$extra_doc:meta])* $extra:ident: $extra_ty:ty,)* })?)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize)]
        pub struct $name {
            $($(#[$doc])* pub $field: $ty,)*
            $($($(#[$extra_doc])* pub $extra: $extra_ty,)*)?
        }

        impl $name {
            fn build(values: &Values) -> Result<Self, Report> {
                Ok($name {
                    $($field: field(values, concat!($head, ".", stringify!($field)))?,)*
                    $($($extra: Default::default(),)*)?
                })
            }

            fn put(&self, values: &mut Values) {
                $(values.insert(concat!($head, ".", stringify!($field)), self.$field.put());)*
            }
        }
    )*};
}

fn field<T: Field>(values: &Values, name: &'static str) -> Result<T, Report> {
    values.get(name).and_then(T::get).ok_or_else(|| {
        Diagnostic::error("E051", format!("`{name}` is too large for this machine")).into()
    })
}

/// A precision for a part of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Override {
    /// Pattern of scopes, if it is for scopes.
    pub scope: Option<String>,
    /// Name of an operation, if it is for an operation.
    pub op: Option<String>,
    /// The dtype to compute in, in the configuration's spelling.
    pub dtype: String,
    /// The dtype of the results, if it is another.
    pub output: Option<String>,
}

/// Settings of some parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ParamGroup {
    /// Pattern of parameter names, or of the scopes that hold them.
    pub scope: String,
    /// Learning rate, if it is another.
    pub lr: Option<f64>,
    /// Weight decay, if it is another.
    pub weight_decay: Option<f64>,
}

/// The lists of tables of a file.
#[derive(Default)]
pub(super) struct Lists {
    pub(super) overrides: Vec<Override>,
    pub(super) groups: Vec<ParamGroup>,
}

sections! {
    /// How the model is read.
    ModelSection in "model" {
        /// How BatchNorm computes its statistics.
        batch_norm: BatchNorm,
        /// Whether a table and its copy in a product train as one parameter.
        tie_weights: bool,
    }

    /// What the import of a model may make.
    ImportSection in "import" {
        /// Elements of constants.
        max_elements: u64,
        /// Operations on elements to compute constants.
        max_operations: u64,
        /// Nodes.
        max_nodes: u64,
        /// Bytes of names and attributes.
        max_bytes: u64,
        /// Levels of graphs inside one another.
        max_depth: u64,
    }

    /// What trains; patterns of parameter names.
    ParamsSection in "params" {
        /// What may train.
        trainable: Vec<String>,
        /// What is sharded but never updated.
        frozen: Vec<String>,
        /// What stays a replicated constant.
        ignored: Vec<String>,
        /// What parameters that do not train are held in.
        frozen_dtype: FrozenDtype,
    }

    /// The loss.
    LossSection in "loss" {
        /// What is minimized.
        kind: LossKind,
        /// The graph output that the loss reads, or that is the loss.
        logits: String,
        /// The tensor of the data with labels or targets.
        labels: String,
        /// The label that is left out.
        ignore_index: i64,
        /// Over what the loss is averaged.
        reduction: Reduction,
        /// What the labels of a cross-entropy are.
        targets: Targets,
        /// The part of every label that is spread over all classes.
        label_smoothing: f64,
        /// The difference at which smooth_l1 becomes linear.
        beta: f64,
        /// The factor of the loss.
        weight: f64,
        /// Further losses.
        also: Vec<String>,
        /// The axis of the classes; `None` to find it from the shapes.
        class_axis: Option<i64>,
    }

    /// What is measured beside the losses.
    MetricsSection in "metrics" {
        /// The metrics.
        report: Vec<String>,
    }

    /// The optimizer.
    OptimizerSection in "optimizer" {
        /// The update rule.
        kind: Optimizer,
        /// Learning rate.
        lr: f64,
        /// Decay of the first and second moment.
        betas: [f64; 2],
        /// Added to the root of the second moment.
        eps: f64,
        /// Weight decay.
        weight_decay: f64,
        /// Momentum of `momentum` and `nesterov`.
        momentum: f64,
        /// The part of the gradient that `momentum` leaves out.
        dampening: f64,
        /// By which power of the step adafactor averages.
        decay_exponent: f64,
        /// The least root mean square with which adafactor counts a parameter.
        relative_eps: f64,
        /// The largest root mean square of adafactor's updates.
        update_threshold: f64,
        /// Which parameters weight decay applies to.
        decay: Decay,
        /// Largest global norm of the gradients; 0 clips nothing.
        clip_grad_norm: f64,
        /// Largest absolute value of a gradient's element; 0 clips nothing.
        clip_grad_value: f64,
        /// Decay of the moving average of the parameters; 0 keeps none.
        ema: f64,
    } {
        /// Parameters with settings of their own; the last that covers one wins.
        groups: Vec<ParamGroup>,
    }

    /// The learning rate over the steps taken.
    ScheduleSection in "schedule" {
        /// How it changes.
        kind: Schedule,
        /// Steps over which it rises from zero.
        warmup_steps: u64,
        /// The step at which `min_lr` is reached.
        total_steps: u64,
        /// Learning rate at the end.
        min_lr: f64,
        /// Steps between two changes of `step`.
        step_size: u64,
        /// Factor at each change of `step`.
        gamma: f64,
        /// The part of all steps over which `one_cycle` rises.
        pct_start: f64,
        /// The learning rate over that with which `one_cycle` begins.
        div_factor: f64,
        /// What `one_cycle` begins with over what it ends with.
        final_div_factor: f64,
    }

    /// Dtypes and loss scale.
    PrecisionSection in "precision" {
        /// Dtype in which autocast runs matrix products and the like.
        compute: DType,
        /// Whether everything but the loss is computed in it.
        pure: bool,
        /// Whether matrix products read 8-bit floats.
        fp8: bool,
        /// Micro-steps over which their largest magnitudes are kept.
        fp8_history: usize,
        /// How the loss is scaled.
        loss_scale: LossScale,
        /// First dynamic scale.
        init_scale: f64,
        /// Factor after `growth_interval` good steps.
        growth_factor: f64,
        /// Factor after a skipped step.
        backoff_factor: f64,
        /// Good steps between two growths.
        growth_interval: u64,
    } {
        /// Exceptions; the last that covers a node wins.
        overrides: Vec<Override>,
    }

    /// What is sharded, and how it is communicated.
    ShardingSection in "sharding" {
        /// Number of ranks.
        ranks: usize,
        /// What is sharded.
        strategy: Strategy,
        /// Ranks of a group in `hybrid_shard`, else 0.
        shard_group: usize,
        /// How units are formed.
        wrap: String,
        /// Units that are freed after forward; patterns.
        reshard_after_forward: Vec<String>,
        /// Whether gradients are reduced only after the last micro-step.
        no_sync: bool,
        /// Dtype in which parameters are gathered; `None` chooses per parameter.
        param_dtype: Option<DType>,
        /// Dtype in which gradients are reduced.
        reduce_dtype: DType,
        /// Dtype of float buffers; `None` chooses per buffer.
        buffer_dtype: Option<DType>,
        /// Who decides when units are gathered.
        prefetch: Prefetch,
        /// When backward gathers the next unit.
        backward_prefetch: Backward,
        /// Units that forward gathers ahead.
        forward_prefetch: usize,
        /// Gathered units that may be alive at once; 0 is any number.
        limit_all_gathers: usize,
        /// Whether parameters and optimizer state rest in host memory.
        cpu_offload: bool,
    }

    /// Padding.
    PaddingSection in "padding" {
        /// Whether matrix sizes are padded.
        tensor_cores: Padding,
    }

    /// Memory.
    MemorySection in "memory" {
        /// Which activations backward computes again.
        recompute: Recompute,
        /// What rests in host memory.
        offload: Offload,
        /// Bytes per rank, if limited.
        budget: Option<u64>,
    }

    /// Data.
    DataSection in "data" {
        /// Whether examples are shuffled at each epoch.
        shuffle: bool,
        /// Whether an incomplete last batch is left out.
        drop_last: bool,
        /// A file of examples that are only evaluated, or `none`.
        validation: String,
        /// Ranges of inputs, `NAME=LOW..HIGH`.
        ranges: Vec<String>,
    }

    /// Advice.
    LintsSection in "lints" {
        /// Lints that are only noted.
        allow: Vec<String>,
    }

    /// The run.
    RunSection in "run" {
        /// Micro-steps per step.
        accumulation: usize,
        /// Seed of everything random.
        seed: u64,
    }

    /// The machine.
    TargetSection in "target" {
        /// What the plan runs on.
        device: DeviceType,
        /// The cluster for which durations are predicted; `auto` is that of the architecture.
        cluster: String,
        /// CPU name, `native`, or a GPU architecture.
        arch: String,
    }
}

macro_rules! config {
    ($($(#[$doc:meta])* $field:ident: $ty:ident,)*) => {
        /// A whole configuration.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        pub struct Config {
            $($(#[$doc])* pub $field: $ty,)*
        }

        fn sections(values: &Values) -> Result<Config, Report> {
            Ok(Config { $($field: $ty::build(values)?,)* })
        }

        /// The configuration as values of the table.
        pub(super) fn values(config: &Config) -> Values {
            let mut values = Values::new();
            $(config.$field.put(&mut values);)*
            values
        }
    };
}

config! {
    /// `[model]`
    model: ModelSection,
    /// `[import]`
    import: ImportSection,
    /// `[params]`
    params: ParamsSection,
    /// `[loss]`
    loss: LossSection,
    /// `[metrics]`
    metrics: MetricsSection,
    /// `[optimizer]`
    optimizer: OptimizerSection,
    /// `[schedule]`
    schedule: ScheduleSection,
    /// `[precision]`
    precision: PrecisionSection,
    /// `[sharding]`
    sharding: ShardingSection,
    /// `[padding]`
    padding: PaddingSection,
    /// `[memory]`
    memory: MemorySection,
    /// `[data]`
    data: DataSection,
    /// `[lints]`
    lints: LintsSection,
    /// `[run]`
    run: RunSection,
    /// `[target]`
    target: TargetSection,
}

/// The typed view of the values.
pub(super) fn build(values: &Values, lists: Lists) -> Result<Config, Report> {
    let mut config = sections(values)?;
    config.precision.overrides = lists.overrides;
    config.optimizer.groups = lists.groups;
    Ok(config)
}

/// What single keys cannot say: values that do not go together.
pub(super) fn check(config: &Config) -> Report {
    let mut report = Report::default();
    let s = &config.schedule;
    let kind = s.kind.word();
    let ends = matches!(s.kind, Schedule::Linear | Schedule::Cosine);
    if ends && s.total_steps <= s.warmup_steps {
        let message = format!(
            "`schedule.total_steps` is {}, not above `schedule.warmup_steps` = {}",
            s.total_steps, s.warmup_steps
        );
        let help = format!("a {kind} schedule needs to know where it ends");
        report.push(Diagnostic::error("E053", message).help(help));
    }
    if s.kind == Schedule::Step && s.step_size == 0 {
        let message = "`schedule.step_size` is 0";
        let help = "a step schedule needs the number of steps between two changes";
        report.push(Diagnostic::error("E053", message).help(help));
    }
    if s.kind == Schedule::OneCycle {
        let rise = s.pct_start * s.total_steps as f64;
        if !(rise > 1.0 && rise < s.total_steps as f64) {
            let message = format!(
                "`schedule.pct_start` = {} of `schedule.total_steps` = {} is no rise and fall",
                s.pct_start, s.total_steps
            );
            let help = "one_cycle needs total_steps, and more than one step on either side";
            report.push(Diagnostic::error("E053", message).help(help));
        }
        if s.warmup_steps > 0 {
            let message = "`schedule.warmup_steps` with a one_cycle schedule";
            let help = "one_cycle warms up itself, over schedule.pct_start of all steps";
            report.push(Diagnostic::error("E053", message).help(help));
        }
    }
    if config.precision.fp8 && config.precision.compute != DType::BF16 {
        let message =
            format!("`precision.fp8` with `precision.compute` = {}", config.precision.compute);
        let help = "products in fp8 read values rounded from bf16; set precision.compute = \"fp8\"";
        report.push(Diagnostic::error("E053", message).help(help));
    }
    let offload = config.memory.offload;
    if config.sharding.cpu_offload && matches!(offload, Offload::Optimizer | Offload::Auto) {
        let message =
            format!("`sharding.cpu_offload` = true with `memory.offload` = \"{}\"", offload.word());
        let help = "sharding.cpu_offload means memory.offload = \"parameters\"; set one of the two";
        report.push(Diagnostic::error("E053", message).help(help));
    }
    let (ranks, group) = (config.sharding.ranks, config.sharding.shard_group);
    let problem = match (config.sharding.strategy, group) {
        (Strategy::HybridShard, 0) => Some("`hybrid_shard` needs `sharding.shard_group`".into()),
        (Strategy::HybridShard, n) if !ranks.is_multiple_of(n) => {
            Some(format!("`sharding.shard_group` = {n} does not divide {ranks} ranks"))
        }
        (Strategy::HybridShard, _) | (_, 0) => None,
        (other, _) => Some(format!("`sharding.shard_group` has no meaning in `{}`", other.word())),
    };
    if let Some(message) = problem {
        let help = "the group is the ranks that hold one copy of the parameters together, such as the GPUs \
                    of a node; it is for hybrid_shard";
        report.push(Diagnostic::error("E053", message).help(help));
    }
    report
}
