//! `frit compile`: compiles a model into a plan directory.

use crate::compilation::{Compiled, Observer, Request, compile};
use crate::config::{self, Config};
use crate::diagnostics::Report;
use crate::lints;
use crate::plan_dir;
use crate::render::{self, bytes};
use crate::reproducer;
use frit_ir::plan::{DeviceType, Plan};
use frit_ir::{Code, Diagnostic, Graph, Severity, counted};
use frit_runtime::memory;
use frit_runtime::progress::Heartbeat;
use indicatif::ProgressBar;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `frit compile`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit compile model.onnx --bind batch=8 -o plan
  frit compile model.json --config train.toml --set precision.compute=bf16 --set sharding.ranks=4 -o plan
  frit compile model.onnx --bind batch=8 --stop-after autocast --print-after autocast")]
pub struct Args {
    /// The model: an .onnx or .pt2 file, or a .json model.
    #[arg(required_unless_present_any = ["list_ops", "help_config"])]
    pub model: Option<PathBuf>,
    /// The configuration.
    #[arg(long, value_name = "train.toml")]
    pub config: Option<PathBuf>,
    /// Set one key of the configuration; of several values of one key the last counts.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Set the size of a symbolic dimension; `batch` is the micro-batch of one rank.
    #[arg(long, value_name = "DIM=N")]
    pub bind: Vec<String>,
    /// The plan directory to write.
    #[arg(short, long, value_name = "PLAN", default_value = "plan")]
    pub output: PathBuf,
    /// Print the graph after this pass.
    #[arg(long, value_name = "PASS")]
    pub print_after: Vec<String>,
    /// Write the graph after every pass into this directory.
    #[arg(long, value_name = "DIR")]
    pub dump_ir: Option<PathBuf>,
    /// Stop after this pass; no plan is written.
    #[arg(long, value_name = "PASS")]
    pub stop_after: Option<String>,
    /// Demote findings of this lint, such as L02, to notes (docs/lints.md).
    #[arg(long, value_name = "LINT")]
    pub allow: Vec<String>,
    /// Disable this pass.
    #[arg(long, value_name = "PASS")]
    pub disable_pass: Vec<String>,
    /// Verify the graph after every pass.
    #[arg(long)]
    pub verify_each: bool,
    /// How the plan directory stores parameter values; without them it cannot run.
    #[arg(long, value_enum, default_value = "copy")]
    pub weights: plan_dir::Stored,
    /// Read external data of the model also outside of the model's folder.
    #[arg(long)]
    pub allow_external_data: bool,
    /// List the supported operators of ONNX, then those of PyTorch's archives (`aten.`).
    #[arg(long)]
    pub list_ops: bool,
    /// Explain every key of train.toml.
    #[arg(long)]
    pub help_config: bool,
}

struct Printer<'a> {
    args: &'a Args,
    progress: ProgressBar,
    /// Output without a terminal.
    heartbeat: Heartbeat,
    text: String,
    error: Option<std::io::Error>,
}

impl Observer for Printer<'_> {
    fn stage(&mut self, what: &str) {
        self.progress.set_message(what.to_string());
        self.heartbeat.now(what);
    }

    fn after(&mut self, index: usize, name: &str, graph: &Graph) {
        self.progress.set_message(format!("{name}: {} nodes", graph.len()));
        self.heartbeat.now(&format!("after {name}: {} nodes", graph.len()));
        if self.args.print_after.iter().any(|p| p == name) {
            self.text += &format!("; after {name}\n{graph}");
        }
        if let Some(dir) = &self.args.dump_ir {
            let file = dir.join(format!("{index:02}-{name}.frit"));
            let written =
                std::fs::create_dir_all(dir).and_then(|()| std::fs::write(file, graph.to_string()));
            if let Err(e) = written {
                self.error.get_or_insert(e);
            }
        }
    }
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    if args.list_ops {
        let onnx = crate::import::onnx::operators().into_iter().map(str::to_string);
        let aten = crate::import::pt2::operators().into_iter().map(|name| format!("aten.{name}"));
        return Ok(onnx.chain(aten).collect::<Vec<_>>().join("\n") + "\n");
    }
    if args.help_config {
        return Ok(config::help());
    }
    let known: Vec<&str> = super::passes::infos().iter().map(|i| i.name).collect();
    for name in args.print_after.iter().chain(&args.disable_pass).chain(&args.stop_after) {
        if !known.contains(&name.as_str()) {
            let message = format!("there is no pass `{name}`");
            let help = format!("passes are: {}", known.join(", "));
            return Err(Diagnostic::error(Code::PassUnknown, message).help(help).into());
        }
    }
    if args.stop_after.is_none() {
        plan_dir::check_free(&args.output)?;
    }
    let mut config = Config::load(args.config.as_deref(), &args.set)?;
    render::print(&config.unused);
    config.lints.allow.extend_from_slice(&args.allow);
    let request = Request {
        model: args.model.clone().unwrap_or_default(),
        binds: binds(&args.bind)?,
        disabled: args.disable_pass.clone(),
        stop_after: args.stop_after.clone(),
        verify_each: args.verify_each,
        allow_external_data: args.allow_external_data,
        evaluation: true,
        ..Request::default()
    };
    // Draws on standard error, and only on a terminal.
    let progress = ProgressBar::new_spinner().with_message("reading the model");
    progress.enable_steady_tick(Duration::from_millis(100));
    let heartbeat = Heartbeat::start("reading the model");
    let mut printer = Printer { args, progress, heartbeat, text: String::new(), error: None };
    let compiled =
        reproducer::guarded(&request, &config, || compile(&request, &config, &mut printer));
    printer.stage(&format!("writing {}", args.output.display()));
    let written = finish(args, compiled, &mut printer);
    printer.progress.finish_and_clear();
    written?;
    Ok(printer.text)
}

/// Prints what was found and writes the plan.
fn finish(
    args: &Args,
    compiled: Result<Option<Compiled>, Report>,
    printer: &mut Printer<'_>,
) -> Result<(), Report> {
    let compiled = compiled?;
    if let Some(e) = &printer.error {
        return Err(Diagnostic::error(
            Code::FileUnwritable,
            format!("cannot write the graphs: {e}"),
        )
        .into());
    }
    let Some(compiled) = compiled else { return Ok(()) };
    let lints = &compiled.plan.lints;
    let warnings = lints.iter().filter(|d| d.severity == Severity::Warning);
    printer.progress.suspend(|| render::print(warnings));
    lints::refuse(lints)?;
    plan_dir::write(&args.output, &compiled, args.weights)?;
    let broken = compiled.weights_not_finite();
    printer.progress.suspend(|| render::print(&broken));
    printer.text += &super::inspect::summary(&compiled.plan);
    printer.text += &too_large(&compiled.plan).unwrap_or_default();
    let notes = lints.iter().filter(|d| d.severity == Severity::Info).count();
    if notes > 0 {
        let view = "frit inspect --view lints";
        printer.text += &format!(
            "advice        {}: {view} {}\n",
            counted(notes, "note"),
            args.output.display()
        );
    }
    printer.text += &format!("plan          {}\n", args.output.display());
    Ok(())
}

/// That a plan for CPUs does not fit into the memory of this one.
fn too_large(plan: &Plan) -> Option<String> {
    let limit = memory::available().filter(|_| plan.target.device == DeviceType::Cpu)?;
    let needed = memory::needed(plan, plan.world_size);
    (needed > limit.bytes).then(|| {
        format!(
            "warning       {} of memory are needed for {}, and {} are {}: take a smaller batch, more \
             run.accumulation, memory.recompute or memory.offload, or another machine\n",
            bytes(needed),
            counted(plan.world_size, "rank"),
            bytes(limit.bytes),
            limit.of
        )
    })
}

/// Sizes of symbolic dimensions, from `DIM=N`.
pub(super) fn binds(texts: &[String]) -> Result<BTreeMap<String, usize>, Report> {
    let mut binds = BTreeMap::new();
    for text in texts {
        let parsed = text.split_once('=').and_then(|(name, n)| Some((name, n.parse().ok()?)));
        let Some((name, size)) = parsed else {
            let message = format!("`--bind {text}` is not DIM=N");
            let help = "write for example --bind batch=8";
            return Err(Diagnostic::error(Code::CommandLine, message).help(help).into());
        };
        if size == 0 {
            let message = format!("`--bind {text}` makes tensors without elements");
            let help = "give the dimension a size of at least 1";
            return Err(Diagnostic::error(Code::CommandLine, message).help(help).into());
        }
        if let Some(other) = binds.insert(name.to_string(), size).filter(|other| *other != size) {
            let message = format!("`--bind` gives `{name}` two sizes, {other} and {size}");
            let help = format!("give one --bind {name}=N");
            return Err(Diagnostic::error(Code::CommandLine, message).help(help).into());
        }
    }
    Ok(binds)
}
