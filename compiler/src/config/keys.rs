//! The table of configuration keys: name, type, default, meaning.

use super::choices::{
    Backward, BatchNorm, Decay, DeviceType, FrozenDtype, LossKind, Offload, Optimizer, Padding,
    Prefetch, Recompute, Reduction, Schedule, Strategy, Targets,
};
use super::{Override, ParamGroup};
use std::collections::BTreeMap;
use std::fmt::Write;

/// What values a key takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A whole number between these, both included.
    Integer(u64, u64),
    /// A number between these, both included; without an upper bound, any that an f32 holds.
    Number(f64, f64),
    /// `true` or `false`.
    Boolean,
    /// Any text.
    Text,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A float type: `fp64`, `fp32`, `fp16` or `bf16` (`f64`, `f32`, `f16` are read too), or one of
    /// these words.
    Float(&'static [&'static str]),
    /// One of these words, or a number between the bounds.
    ChoiceOrNumber(&'static [&'static str], f64, f64),
    /// One of these words, or a whole number of either sign.
    ChoiceOrInteger(&'static [&'static str]),
    /// A number of bytes such as `16e9` or `"24GiB"`, or one of these words.
    Bytes(&'static [&'static str]),
    /// Two numbers, each in `[0, 1)`.
    Pair,
    /// A list of texts.
    List,
    /// A list of texts, or a whole number N, which is read as the text `**=N`.
    ListOrInteger,
}

/// A value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number.
    Integer(u64),
    /// A whole number of either sign.
    Signed(i64),
    /// A number.
    Number(f64),
    /// `true` or `false`.
    Boolean(bool),
    /// A text or word.
    Text(String),
    /// Two numbers.
    Pair([f64; 2]),
    /// A list of texts.
    List(Vec<String>),
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Dotted name.
    pub name: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// The default, as TOML.
    pub default: &'static str,
    /// What it means, in a line.
    pub doc: &'static str,
}

const fn key(name: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Key {
    Key { name, kind, default, doc }
}

/// Most ranks. Nothing that is compiled grows with their number, but messages and files name them all.
const RANKS: u64 = 1 << 16;

/// Most micro-steps of a step, and most of anything else that is counted within one.
const COUNT: u64 = 1 << 20;

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

const INF: f64 = f64::INFINITY;

/// The least number above zero: plans hold numbers in f32.
const TINY: f64 = f32::MIN_POSITIVE as f64;

/// Every key, in the order in which it is printed.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key("model.batch_norm", Kind::Choice(BatchNorm::WORDS), "\"as_exported\"", "how BatchNorm computes its statistics: as the model says, per rank, or over all ranks"),
    key("model.tie_weights", Kind::Boolean, "false", "whether an embedding and its copy in a product, which an exporter made of one parameter, train as one"),
    key("import.max_elements", Kind::Integer(1, AMOUNT), "67108864", "elements that constants made at import may have together; results that need not be known at import take half at most"),
    key("import.max_operations", Kind::Integer(1, AMOUNT), "268435456", "operations on elements to compute constants at import"),
    key("import.max_nodes", Kind::Integer(1, AMOUNT), "65536", "nodes that the import may make, once functions, loops and blocks are written out"),
    key("import.max_bytes", Kind::Integer(1, AMOUNT), "268435456", "bytes of names and attributes that are copied to write out functions and loops"),
    key("import.max_depth", Kind::Integer(1, 256), "64", "levels of functions, graphs and blocks inside one another; at most 256"),
    key("params.trainable", Kind::List, "[\"**\"]", "patterns of parameter names that may train"),
    key("params.frozen", Kind::List, "[]", "patterns of parameter names that are sharded but never updated"),
    key("params.ignored", Kind::List, "[]", "patterns of parameter names that stay replicated constants"),
    key("params.frozen_dtype", Kind::Choice(FrozenDtype::WORDS), "\"compute\"", "dtype that parameters which do not train are held and gathered in: the one in which they are read, or `fp32`"),
    key("loss.kind", Kind::Choice(LossKind::WORDS), "\"cross_entropy\"", "the loss; `output` takes the model's own, `none` compiles the forward pass only"),
    key("loss.logits", Kind::Text, "\"logits\"", "the graph output that the loss reads, or that is the loss"),
    key("loss.labels", Kind::Text, "\"labels\"", "the tensor of the data that holds labels or targets"),
    key("loss.ignore_index", Kind::ChoiceOrInteger(&[]), "-100", "the label that is left out of a cross-entropy"),
    key("loss.reduction", Kind::Choice(Reduction::WORDS), "\"global_mean\"", "mean over all labels of the step, or of each rank and micro-step first"),
    key("loss.targets", Kind::Choice(Targets::WORDS), "\"indices\"", "whether labels of a cross-entropy are class indices or probabilities of all classes"),
    key("loss.label_smoothing", Kind::Number(0.0, 1.0), "0.0", "the part of every label of a cross-entropy that is spread over all classes"),
    key("loss.beta", Kind::Number(1e-12, INF), "1.0", "the difference at which smooth_l1 becomes linear"),
    key("loss.weight", Kind::Number(0.0, INF), "1.0", "the factor of the loss"),
    key("loss.also", Kind::List, "[]", "further losses, each as \"WEIGHT * KIND(OUTPUT, LABELS)\", or \"WEIGHT * output(OUTPUT)\""),
    key("loss.class_axis", Kind::ChoiceOrInteger(&["auto"]), "\"auto\"", "the axis of the logits that holds classes"),
    key("metrics.report", Kind::List, "[\"auto\"]", "what `frit eval` and validations report beside the losses: \"accuracy\", \"top_K\", \"perplexity\", \"mean_absolute_error\", also as \"accuracy(OUTPUT, LABELS)\"; \"auto\" is what is usual for each loss"),
    key("optimizer.kind", Kind::Choice(Optimizer::WORDS), "\"adamw\"", "the update rule"),
    key("optimizer.lr", Kind::Number(0.0, INF), "1e-3", "learning rate"),
    key("optimizer.betas", Kind::Pair, "[0.9, 0.999]", "decay of the first and second moment"),
    key("optimizer.eps", Kind::Number(0.0, INF), "1e-8", "added to the root of the second moment"),
    key("optimizer.weight_decay", Kind::Number(0.0, INF), "0.01", "weight decay"),
    key("optimizer.momentum", Kind::Number(0.0, 1.0), "0.9", "momentum of `momentum` and `nesterov`"),
    key("optimizer.dampening", Kind::Number(0.0, 1.0), "0.0", "the part of the gradient that `momentum` leaves out"),
    key("optimizer.decay_exponent", Kind::Number(0.0, INF), "0.8", "adafactor averages the second moment of step t with the weight t to the power of minus this"),
    key("optimizer.relative_eps", Kind::Number(0.0, INF), "1e-3", "the least root mean square with which adafactor counts a parameter"),
    key("optimizer.update_threshold", Kind::Number(TINY, INF), "1.0", "the largest root mean square of adafactor's updates"),
    key("optimizer.decay", Kind::Choice(Decay::WORDS), "\"all\"", "which parameters weight decay applies to; `matrices` leaves out norms and biases (at most one axis)"),
    key("optimizer.clip_grad_norm", Kind::Number(0.0, INF), "1.0", "largest global norm of the gradients; 0 clips nothing"),
    key("optimizer.clip_grad_value", Kind::Number(0.0, INF), "0.0", "largest absolute value of a gradient's element, after clipping by norm; 0 clips nothing"),
    key("optimizer.ema", Kind::Number(0.0, 1.0), "0.0", "decay of the moving average of the parameters; 0 keeps none"),
    key("schedule.kind", Kind::Choice(Schedule::WORDS), "\"constant\"", "how the learning rate changes over the steps taken"),
    key("schedule.warmup_steps", Kind::Integer(0, STEPS), "0", "steps over which the learning rate rises from zero"),
    key("schedule.total_steps", Kind::Integer(0, STEPS), "0", "the step at which `min_lr` is reached"),
    key("schedule.min_lr", Kind::Number(0.0, INF), "0.0", "learning rate at the end"),
    key("schedule.step_size", Kind::Integer(0, STEPS), "0", "steps between two changes of `step`"),
    key("schedule.gamma", Kind::Number(0.0, INF), "0.1", "factor of the learning rate at each change of `step`"),
    key("schedule.pct_start", Kind::Number(0.0, 1.0), "0.3", "the part of all steps over which `one_cycle` rises"),
    key("schedule.div_factor", Kind::Number(1.0, INF), "25.0", "the learning rate divided by this is where `one_cycle` begins"),
    key("schedule.final_div_factor", Kind::Number(1.0, INF), "1e4", "where `one_cycle` begins divided by this is where it ends"),
    key("precision.compute", Kind::Float(&[PURE, FP8]), "\"bf16\"", "dtype in which autocast runs matrix products and the like; `bf16-pure` is bf16 with `pure`, `fp8` is bf16 with `fp8`"),
    key("precision.pure", Kind::Boolean, "false", "whether everything but the loss is computed in `compute`, with parameters rounded to it"),
    key("precision.fp8", Kind::Boolean, "false", "whether matrix products read operands rounded to 8-bit floats (e4m3, gradients e5m2), scaled by their largest magnitudes of late"),
    key("precision.fp8_history", Kind::Integer(1, HISTORY), "16", "micro-steps over which the largest magnitudes are kept for `fp8`"),
    key("precision.loss_scale", Kind::ChoiceOrNumber(&["auto", "dynamic", "none"], 0.0, INF), "\"auto\"", "scale of the loss: `auto` is dynamic for fp16 and none otherwise; a number is fixed"),
    key("precision.init_scale", Kind::Number(TINY, INF), "65536", "first dynamic scale"),
    key("precision.growth_factor", Kind::Number(1.0, INF), "2", "factor of the scale after `growth_interval` good steps"),
    key("precision.backoff_factor", Kind::Number(TINY, 1.0), "0.5", "factor of the scale after a skipped step"),
    key("precision.growth_interval", Kind::Integer(1, STEPS), "2000", "good steps between two growths"),
    key("sharding.ranks", Kind::Integer(1, RANKS), "1", "number of ranks"),
    key("sharding.strategy", Kind::Choice(Strategy::WORDS), "\"full_shard\"", "what is sharded: all, gradients and optimizer state, optimizer state, nothing, or all within groups"),
    key("sharding.shard_group", Kind::Integer(0, RANKS), "0", "ranks of a group in `hybrid_shard`; it must divide the ranks"),
    key("sharding.wrap", Kind::Text, "\"blocks\"", "how units are formed: `blocks`, `none`, `size=N` parameters, or patterns of modules such as `h.*, head`"),
    key("sharding.reshard_after_forward", Kind::ListOrInteger, "[\"**\"]", "patterns of units whose parameters are freed after forward and gathered again in backward; with `PATTERN=N` every N consecutive ranks keep a copy together and gather among themselves, and a number N is short for `**=N`"),
    key("sharding.no_sync", Kind::Boolean, "false", "whether gradients are reduced only after the last micro-step, not after each"),
    key("sharding.param_dtype", Kind::Float(&["auto"]), "\"auto\"", "dtype that parameters are rounded to and gathered in; `auto` gathers each in what all its uses read"),
    key("sharding.reduce_dtype", Kind::Float(&[]), "\"fp32\"", "dtype in which ranks exchange gradients; sums are taken in fp32"),
    key("sharding.buffer_dtype", Kind::Float(&["auto"]), "\"auto\"", "dtype that float buffers are rounded to; `auto` leaves them"),
    key("sharding.prefetch", Kind::Choice(Prefetch::WORDS), "\"fixed\"", "when units are gathered: as the next three keys say, or `auto`: as the cost model finds best within `memory.budget`"),
    key("sharding.backward_prefetch", Kind::Choice(Backward::WORDS), "\"pre\"", "when backward gathers the next unit: before or after the current one's gradients"),
    key("sharding.forward_prefetch", Kind::Integer(0, COUNT), "1", "units that forward gathers ahead"),
    key("sharding.limit_all_gathers", Kind::Integer(0, COUNT), "2", "gathered units that may be alive at once; 0 is any number"),
    key("sharding.cpu_offload", Kind::Boolean, "false", "whether parameters and optimizer state rest in host memory: the same as `memory.offload = \"parameters\"`"),
    key("padding.tensor_cores", Kind::Choice(Padding::WORDS), "\"auto\"", "whether matrix sizes are padded to what tensor cores like"),
    key("memory.recompute", Kind::Choice(Recompute::WORDS), "\"none\"", "which activations backward computes again"),
    key("memory.offload", Kind::Choice(Offload::WORDS), "\"none\"", "what rests in host memory: nothing, optimizer state, that and parameters, or `auto`: what `memory.budget` asks for"),
    key("memory.budget", Kind::Bytes(&["none"]), "\"none\"", "bytes that the plan may use per rank"),
    key("data.shuffle", Kind::Boolean, "false", "whether examples are shuffled at each epoch, from the seed"),
    key("data.drop_last", Kind::Boolean, "true", "whether an incomplete last step of an epoch is left out; otherwise the micro-steps that its data fill make a smaller one"),
    key("data.validation", Kind::Text, "\"none\"", "a file of examples that `frit run` evaluates between steps but does not train on, or `none`"),
    key("data.ranges", Kind::List, "[]", "ranges of float inputs for the lints, each as \"NAME=LOW..HIGH\""),
    key("lints.allow", Kind::List, "[]", "ids of lints that are only noted, such as \"L02\""),
    key("run.accumulation", Kind::Integer(1, COUNT), "1", "micro-steps per step"),
    key("run.seed", Kind::Integer(0, i64::MAX as u64), "0", "seed of everything random"),
    key("target.device", Kind::Choice(DeviceType::WORDS), "\"cpu\"", "what the plan runs on"),
    key("target.cluster", Kind::Text, "\"auto\"", "the cluster for which durations are predicted: `a100-80g`, `h100`, `h200`, a TOML file, or `auto`: that of the architecture"),
    key("target.arch", Kind::Text, "\"native\"", "CPU name, `native`, or a GPU architecture such as `sm_90`"),
];

/// The row of this name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.name == name)
}

impl Key {
    /// The default value.
    pub(super) fn default(&self) -> Value {
        let table: toml::Table =
            format!("x = {}", self.default).parse().expect("invariant: defaults are TOML");
        self.read(&table["x"]).expect("invariant: defaults have their key's type")
    }

    /// The value, if it is of the key's type.
    ///
    /// # Errors
    /// What was expected.
    pub fn read(&self, value: &toml::Value) -> Result<Value, String> {
        let number = match value {
            toml::Value::Integer(i) => Some(*i as f64),
            toml::Value::Float(x) => Some(*x),
            _ => None,
        };
        let text = value.as_str();
        let read = match self.kind {
            Kind::Integer(min, max) => {
                let whole = match value {
                    toml::Value::Integer(i) => u64::try_from(*i).ok(),
                    // `1e4` is a whole number too.
                    toml::Value::Float(x) if x.fract() == 0.0 && (0.0..9e15).contains(x) => {
                        Some(*x as u64)
                    }
                    _ => None,
                };
                whole.filter(|n| (min..=max).contains(n)).map(Value::Integer)
            }
            Kind::Number(min, max) => number.filter(|x| within(*x, min, max)).map(Value::Number),
            Kind::Boolean => value.as_bool().map(Value::Boolean),
            Kind::Text => text.map(|s| Value::Text(s.into())),
            Kind::Choice(words) => {
                text.filter(|s| words.contains(s)).map(|s| Value::Text(s.into()))
            }
            Kind::Float(words) => text.and_then(|s| match s {
                s if words.contains(&s) => Some(Value::Text(s.into())),
                s => float_name(s).map(|name| Value::Text(name.into())),
            }),
            Kind::ChoiceOrNumber(words, min, max) => text
                .filter(|s| words.contains(s))
                .map(|s| Value::Text(s.into()))
                .or(number.filter(|x| within(*x, min, max)).map(Value::Number)),
            Kind::ChoiceOrInteger(words) => text
                .filter(|s| words.contains(s))
                .map(|s| Value::Text(s.into()))
                .or(value.as_integer().map(Value::Signed)),
            Kind::Bytes(words) => match text {
                Some(s) if words.contains(&s) => Some(Value::Text(s.into())),
                Some(s) => bytes(s).map(Value::Number),
                None => number.filter(|x| within(*x, 0.0, 1e18)).map(Value::Number),
            },
            Kind::Pair => value.as_array().and_then(|list| {
                let list: Option<Vec<f64>> = list
                    .iter()
                    .map(|v| v.as_float().or(v.as_integer().map(|i| i as f64)))
                    .collect();
                match list?.as_slice() {
                    &[a, b] if [a, b].iter().all(|x| (0.0..1.0).contains(x)) => {
                        Some(Value::Pair([a, b]))
                    }
                    _ => None,
                }
            }),
            Kind::ListOrInteger if value.is_integer() => {
                Some(Value::List(vec![format!("**={value}")]))
            }
            Kind::List | Kind::ListOrInteger => value
                .as_array()
                .and_then(|list| {
                    list.iter().map(|v| v.as_str().map(String::from)).collect::<Option<_>>()
                })
                .map(Value::List),
        };
        read.ok_or_else(|| format!("`{}` must be {}, not {value}", self.name, self.kind.describe()))
    }
}

fn within(x: f64, min: f64, max: f64) -> bool {
    x >= min && x <= max.min(f32::MAX.into())
}

/// The configuration's spelling of a float type that can be computed in.
fn float_name(text: &str) -> Option<&'static str> {
    match text {
        "fp64" | "f64" => Some("fp64"),
        "fp32" | "f32" => Some("fp32"),
        "fp16" | "f16" => Some("fp16"),
        "bf16" => Some("bf16"),
        _ => None,
    }
}

/// A float type in the configuration's spelling, from any.
pub(super) fn dtype_name(text: &str) -> Option<&'static str> {
    float_name(text)
}

fn bytes(text: &str) -> Option<f64> {
    let at = text.find(|c: char| c.is_ascii_alphabetic() && c != 'e').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let factor = match unit.trim() {
        "" | "B" => 1.0,
        "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => 1024f64.powi(2),
        "GiB" => 1024f64.powi(3),
        "TiB" => 1024f64.powi(4),
        _ => return None,
    };
    let n: f64 = number.trim().parse().ok()?;
    Some((n * factor).floor()).filter(|x| within(*x, 0.0, 1e18))
}

impl Kind {
    /// The type in words.
    pub fn describe(&self) -> String {
        let list = |words: &[&str]| {
            words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join(", ")
        };
        let range = |min: f64, max: f64| match (min, max) {
            (min, max) if min == TINY && max == INF => {
                "a number above 0 and below 3.4e38".to_string()
            }
            (min, max) if min == TINY => format!("a number above 0, at most {max}"),
            (min, max) if max == INF => format!("a number of at least {min} and below 3.4e38"),
            (min, max) => format!("a number from {min} to {max}"),
        };
        match *self {
            Kind::Integer(min, max) => format!("a whole number from {min} to {max}"),
            Kind::Number(min, max) => range(min, max),
            Kind::Boolean => "true or false".into(),
            Kind::Text => "a text".into(),
            Kind::Choice(words) => format!("one of {}", list(words)),
            Kind::Float(&[]) => "one of \"fp32\", \"bf16\", \"fp16\", \"fp64\"".into(),
            Kind::Float(words) => {
                format!("one of {}, \"fp32\", \"bf16\", \"fp16\", \"fp64\"", list(words))
            }
            Kind::ChoiceOrInteger(&[]) => "a whole number".into(),
            Kind::ChoiceOrInteger(words) => format!("{} or a whole number", list(words)),
            Kind::ChoiceOrNumber(words, min, max) => {
                format!("{} or {}", list(words), range(min, max))
            }
            Kind::Bytes(words) => format!("{} or bytes such as \"24GiB\"", list(words)),
            Kind::Pair => "two numbers from 0 to below 1".into(),
            Kind::List => "a list of texts".into(),
            Kind::ListOrInteger => "a list of texts or a whole number".into(),
        }
    }
}

/// The text of `--help-config`.
pub fn help() -> String {
    let mut out = String::from("Keys of train.toml and --set key=value, with their defaults:\n");
    let mut section = "";
    for key in KEYS {
        let (head, name) = key.name.split_once('.').unwrap_or(("", key.name));
        if head != section {
            section = head;
            let _ = write!(out, "\n[{head}]\n");
        }
        let _ =
            writeln!(out, "  {name} = {}\n      {}: {}", key.default, key.doc, key.kind.describe());
    }
    out.push_str(
        "\n[[precision.override]]\n  scope = \"h.*.attn\", op = \"softmax\" or both, and dtype = \"fp32\"\n      \
         computes what the pattern covers in another dtype; output = \"fp32\" is the dtype of its results, if \
         it is another; the last that covers a node wins\n\
         \n[[optimizer.group]]\n  scope = \"h.*.mlp.**\", and lr = 1e-4 or weight_decay = 0.0 or both\n      \
         settings of the parameters that the pattern covers by their name or by the scope that holds \
         them; the last that covers a parameter wins\n",
    );
    out
}

/// All values as TOML, in the order of the table.
pub(super) fn print(
    values: &BTreeMap<&'static str, Value>,
    overrides: &[Override],
    groups: &[ParamGroup],
) -> String {
    let mut out = String::new();
    let mut section = "";
    for (i, key) in KEYS.iter().enumerate() {
        let (head, name) = key.name.split_once('.').unwrap_or(("", key.name));
        if head != section {
            let blank = if section.is_empty() { "" } else { "\n" };
            section = head;
            let _ = writeln!(out, "{blank}[{head}]");
        }
        if let Some(value) = values.get(key.name) {
            let _ = writeln!(out, "{name} = {}", value.to_toml());
        }
        let next = KEYS.get(i + 1).and_then(|next| next.name.split_once('.'));
        let last = next.is_none_or(|(next, _)| next != head);
        for group in groups.iter().filter(|_| head == "optimizer" && last) {
            let scope = toml::Value::String(group.scope.clone());
            let _ = writeln!(out, "\n[[optimizer.group]]\nscope = {scope}");
            for (name, value) in [("lr", group.lr), ("weight_decay", group.weight_decay)] {
                if let Some(x) = value {
                    let _ = writeln!(out, "{name} = {}", Value::Number(x).to_toml());
                }
            }
        }
        if head == "precision" && last {
            for o in overrides {
                out.push_str("\n[[precision.override]]\n");
                for (name, value) in [("scope", &o.scope), ("op", &o.op)] {
                    if let Some(value) = value {
                        let _ = writeln!(out, "{name} = {}", toml::Value::String(value.clone()));
                    }
                }
                let _ = writeln!(out, "dtype = {}", toml::Value::String(o.dtype.clone()));
                if let Some(output) = &o.output {
                    let _ = writeln!(out, "output = {}", toml::Value::String(output.clone()));
                }
            }
        }
    }
    out
}

impl Value {
    /// The value as TOML.
    pub fn to_toml(&self) -> String {
        let number = |x: f64| match x {
            x if x.fract() == 0.0 && x.abs() < 1e15 => format!("{x:.1}"),
            x => toml::Value::Float(x).to_string(),
        };
        match self {
            Value::Integer(i) => i.to_string(),
            Value::Signed(i) => i.to_string(),
            Value::Number(x) => number(*x),
            Value::Boolean(b) => b.to_string(),
            Value::Text(s) => toml::Value::String(s.clone()).to_string(),
            Value::Pair([a, b]) => format!("[{}, {}]", number(*a), number(*b)),
            Value::List(list) => {
                let list: Vec<String> =
                    list.iter().map(|s| toml::Value::String(s.clone()).to_string()).collect();
                format!("[{}]", list.join(", "))
            }
        }
    }
}
