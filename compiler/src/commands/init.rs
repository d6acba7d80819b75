//! `frit init`: looks at a model and writes a commented train.toml.

use super::compile::binds;
use crate::config::Config;
use crate::diagnostics::Report;
use crate::import::symbols::symbols;
use crate::import::{self, ImportOptions};
use crate::render::quoted;
use frit_ir::ops::ParamKind;
use frit_ir::{Code, DType, Diagnostic, Graph, Op, OutputKind, TensorType, counted};
use frit_runtime::files;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Arguments of `frit init`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit init model.onnx
  frit init model.onnx --bind batch=16 --bind seq=512 -o train.toml")]
pub struct Args {
    /// The model: an .onnx or .pt2 file, or a .json model.
    pub model: PathBuf,
    /// Set the size of a symbolic dimension; by default 8 for the batch and 128 for any other.
    #[arg(long, value_name = "DIM=N")]
    pub bind: Vec<String>,
    /// The configuration to write.
    #[arg(short, long, value_name = "FILE", default_value = "train.toml")]
    pub output: PathBuf,
    /// Replace the file if it exists.
    #[arg(long)]
    pub force: bool,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    if args.output.exists() && !args.force {
        let what = format!("{} exists", args.output.display());
        let help = "give another file with -o, or --force";
        return Err(Diagnostic::error(Code::FileUnwritable, what).help(help).into());
    }
    let (mut binds, mut chosen) = (binds(&args.bind)?, Vec::new());
    for (i, name) in symbols(&args.model).into_iter().enumerate() {
        let is_batch = i == 0 || name.to_lowercase().contains("batch");
        let size = if is_batch { 8 } else { 128 };
        if let Entry::Vacant(open) = binds.entry(name) {
            chosen.push(format!("{}={size}", open.key()));
            open.insert(size);
        }
    }
    let options = ImportOptions { binds: binds.clone(), ..ImportOptions::default() };
    let imported = import::load(&args.model, &options).map_err(|mut report| {
        if let Some(first) = report.diagnostics.first_mut().filter(|_| !chosen.is_empty()) {
            let sizes = chosen.join(", ");
            first
                .notes
                .push(format!("the sizes {sizes} are guesses: give others with --bind DIM=N"));
        }
        report
    })?;
    let loss = Loss::of(&imported.graph);
    let text = configuration(&args.model, &imported.graph, &loss);
    Config::parse(&text, "train.toml", &[])?;
    files::deliver(&args.output, |out| out.write_all(text.as_bytes())).map_err(|e| {
        let what = format!("cannot write {}: {e}", args.output.display());
        Diagnostic::error(Code::FileUnwritable, what)
    })?;
    Ok(next_steps(args, &binds, &imported.graph, &loss))
}

/// The loss that a model most likely trains with.
struct Loss {
    kind: &'static str,
    output: String,
    /// Shape and type of the labels.
    labels: Option<TensorType>,
    /// The axis of the classes, where it is not the only one that it can be.
    class_axis: Option<usize>,
    reason: String,
}

impl Loss {
    fn of(graph: &Graph) -> Loss {
        // Running statistics leave the graph as well.
        let results = graph.outputs.iter().filter(|o| o.kind == OutputKind::Result);
        let outputs: Vec<(&str, &TensorType)> =
            results.map(|o| (o.name.as_str(), graph.ty(o.value))).collect();
        let floats = || outputs.iter().filter(|(_, ty)| ty.dtype.is_float());
        let named = |word: &str| floats().find(|(name, _)| name.contains(word));
        let scalar = named("loss").filter(|(_, ty)| ty.shape.numel() == 1);
        let scalar = scalar.or_else(|| floats().find(|(_, ty)| ty.shape.rank() == 0));
        if let Some((name, _)) = scalar {
            let reason = format!("`{name}` is a scalar: the model computes its loss");
            return Loss::without_labels("output", name.to_string(), reason);
        }
        let Some((name, ty)) = named("logits").or_else(|| floats().next()) else {
            let reason = "no output is a float tensor: nothing trains".into();
            return Loss::without_labels("none", String::new(), reason);
        };
        let output = name.to_string();
        let dims = ty.shape.dims();
        let like_output = |input: &TensorType| dims.len() > 1 && input.shape == ty.shape;
        let is_input = inputs(graph).iter().any(|(_, input)| like_output(input));
        // Images have their classes on the second axis, sequences on the last.
        let axis = if dims.len() > 3 { 1 } else { dims.len().saturating_sub(1) };
        if is_input || dims.len() < 2 || dims[axis] == 1 {
            let reason = match is_input {
                true => format!("`{name}` has the shape of an input"),
                false => format!("`{name}` has one number per example"),
            };
            let labels = Some((*ty).clone());
            return Loss { labels, ..Loss::without_labels("mse", output, reason) };
        }
        let mut shape = dims.to_vec();
        let classes = shape.remove(axis);
        let labels = Some(TensorType::new(DType::I64, shape));
        let reason = format!("`{name}` is {ty}: {classes} classes");
        let class_axis = (dims.len() > 2).then_some(axis);
        Loss { labels, class_axis, ..Loss::without_labels("cross_entropy", output, reason) }
    }

    fn without_labels(kind: &'static str, output: String, reason: String) -> Loss {
        Loss { kind, output, labels: None, class_axis: None, reason }
    }
}

/// The model's own inputs.
fn inputs(graph: &Graph) -> Vec<(&str, &TensorType)> {
    let own = graph.nodes().filter_map(|(_, node)| match &node.op {
        Op::Input(input) => Some((input.name.as_str(), graph.ty(node.outputs[0]))),
        _ => None,
    });
    own.collect()
}

/// The text of train.toml.
fn configuration(model: &Path, graph: &Graph, loss: &Loss) -> String {
    let trained = graph.params().filter(|(_, p)| p.kind == ParamKind::Trainable);
    let (mut tensors, mut elements) = (0, 0);
    for (_, param) in trained {
        tensors += 1;
        elements += param.ty.shape.numel();
    }
    let lr = match elements {
        0..10_000_000 => "1e-3",
        10_000_000..1_000_000_000 => "3e-4",
        _ => "1e-4",
    };
    let name = model.file_name().unwrap_or_default().to_string_lossy();
    let size = match elements {
        0..100_000 => elements.to_string(),
        _ => format!("{:.1} million", elements as f64 / 1e6),
    };
    let tensors = counted(tensors, "tensor");
    let mut text = format!(
        "# Training of {name}: {size} parameters in {tensors}.\n\
         # All keys: `frit compile --help-config`, docs/configuration.md.\n\n"
    );
    let Loss { kind, output, labels, class_axis, reason } = loss;
    let _ = write!(text, "[loss]\n# {reason}.\nkind = \"{kind}\"\n");
    if *kind != "none" {
        let _ = writeln!(text, "logits = {output:?}");
    }
    if let Some(axis) = class_axis {
        let _ = writeln!(text, "class_axis = {axis}");
    }
    let others = graph.outputs.iter().map(|o| o.name.as_str()).filter(|name| name != output);
    let others: Vec<&str> = others.collect();
    if !others.is_empty() {
        let _ = writeln!(text, "# Other outputs of the model: {}.", others.join(", "));
    }
    if let Some(labels) = labels {
        let _ = writeln!(
            text,
            "# The tensor of the data with the targets: {labels} here.\nlabels = \"labels\""
        );
    }
    let _ = write!(
        text,
        "\n[optimizer]\n\
         kind = \"adamw\"\n\
         lr = {lr}\n\
         weight_decay = 0.1\n\
         # Neither biases nor norms decay.\n\
         decay = \"matrices\"\n\
         clip_grad_norm = 1.0\n\
         \n\
         [schedule]\n\
         # The learning rate rises for 100 steps and falls to zero at the last.\n\
         kind = \"cosine\"\n\
         warmup_steps = 100\n\
         total_steps = 1000\n\
         \n\
         [precision]\n\
         # Matmuls in bf16, everything sensitive in f32, as torch.autocast does. \"fp32\" turns it off.\n\
         compute = \"bf16\"\n"
    );
    if graph.nodes().any(|(_, node)| node.outputs.iter().any(|v| graph.ty(*v).dtype == DType::F16))
    {
        text += "# The model has f16 tensors, in which small gradients are zero unless the loss is scaled.\n\
                 loss_scale = \"dynamic\"\n";
    }
    let _ = write!(
        text,
        "\n\
         [run]\n\
         # Micro-steps whose gradients are added before an update.\n\
         accumulation = 1\n\
         seed = 0\n\
         \n\
         [data]\n\
         shuffle = true\n\
         \n\
         [sharding]\n\
         # Ranks that share parameters, gradients and optimizer state (FSDP).\n\
         ranks = 1\n\
         \n\
         # Low-rank adapters instead of the whole model:\n\
         # [adapter]\n\
         # kind = \"lora\"\n\
         # rank = 16\n\
         # alpha = 32\n\
         # targets = [\"**\"]\n"
    );
    text
}

/// What the model needs, and the commands to go on with.
fn next_steps(args: &Args, binds: &BTreeMap<String, usize>, graph: &Graph, loss: &Loss) -> String {
    let mut text = format!("{}\n\nThe data needs\n", args.output.display());
    for (name, ty) in inputs(graph) {
        let _ = writeln!(text, "  {name:<20} {ty}");
    }
    if let Some(labels) = &loss.labels {
        let _ = writeln!(text, "  {:<20} {labels}", "labels");
    }
    let binds: String = binds
        .iter()
        .map(|(name, size)| format!(" --bind {}", quoted(&format!("{name}={size}"))))
        .collect();
    let model = quoted(&args.model.display().to_string());
    // Not the model itself, whatever its name.
    let stem = args.model.file_stem().unwrap_or_default().to_string_lossy();
    let trained = quoted(&format!("{stem}-trained.onnx"));
    let config = quoted(&args.output.display().to_string());
    let types = inputs(graph).into_iter().map(|(_, ty)| ty).chain(&loss.labels);
    let batches: BTreeSet<usize> =
        types.filter_map(|ty| ty.shape.dims().first().copied()).collect();
    let examples = match batches.len() {
        0 | 1 => "any number of examples instead of the batch",
        _ => "an axis of examples in front, as their first axes differ",
    };
    let _ = write!(
        text,
        "with {examples} (docs/data.md). Then\n\
         \x20 frit compile {model} --config {config}{binds} -o plan\n\
         \x20 frit inspect plan\n\
         \x20 frit run plan --data DATA --steps 1000 --checkpoint checkpoints --checkpoint-every 100\n\
         \x20 frit export checkpoints -o {trained}\n"
    );
    text
}
