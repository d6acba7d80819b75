//! `frit simulate`: predicts a plan's step on a cluster.

use crate::clusters;
use crate::diagnostics::Report;
use crate::plan_dir;
use crate::reference;
use crate::render::{bytes, seconds};
use frit_ir::{Code, Diagnostic};
use frit_passes::cost::Cluster;
use frit_passes::simulate::emulate::{self, Emulation, emulate};
use frit_passes::simulate::{Simulation, simulate, trace};
use frit_runtime::files;
use std::path::PathBuf;

/// Arguments of `frit simulate`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit simulate plan --cluster h100
  frit simulate plan --cluster cluster.toml --trace trace.json   # open it at https://ui.perfetto.dev
  frit simulate plan --cluster a100-80g --json | jq .step_seconds
  frit simulate plan --cluster h100 --emulate fsdp2-compile --checkpointing full

A cluster file overrides keys of a built-in cluster (a100-80g, h100, h100-alone, h200, h200-gemm):
  base = \"h100\"
  inter.gb_per_s = 11.0     # per GPU, in 10^9 bytes per second")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// A built-in cluster (a100-80g, h100, h100-alone, h200, h200-gemm), or a TOML file that describes one.
    #[arg(long)]
    pub cluster: String,
    /// Predict the same model, precision, ranks and optimizer in PyTorch instead: see docs/simulator.md.
    #[arg(long, value_enum)]
    pub emulate: Option<System>,
    /// Path of the model that the plan was compiled from, if it was moved.
    #[arg(long, value_name = "FILE.onnx", requires = "emulate")]
    pub model: Option<PathBuf>,
    /// Activation checkpointing of the emulated system.
    #[arg(long, value_enum, default_value = "none", requires = "emulate")]
    pub checkpointing: Checkpointing,
    /// Write the timeline for Perfetto to this file.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
}

/// A system that can be emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum System {
    /// PyTorch FSDP2 in eager mode.
    Fsdp2Eager,
    /// PyTorch FSDP2 with torch.compile on every block, and the loss in eager mode.
    Fsdp2Compile,
    /// PyTorch FSDP2 with torch.compile on every block and on the loss.
    Fsdp2CompileAll,
}

impl From<System> for emulate::System {
    fn from(system: System) -> Self {
        match system {
            System::Fsdp2Eager => emulate::System::Eager,
            System::Fsdp2Compile => emulate::System::Compile,
            System::Fsdp2CompileAll => emulate::System::CompileAll,
        }
    }
}

/// Which activations an emulated system rematerializes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Checkpointing {
    /// None.
    None,
    /// All but attention and every other matmul.
    SelectiveOp,
    /// All of every other block.
    SelectiveLayer,
    /// All.
    Full,
}

impl From<Checkpointing> for emulate::Checkpointing {
    fn from(checkpointing: Checkpointing) -> Self {
        match checkpointing {
            Checkpointing::None => emulate::Checkpointing::None,
            Checkpointing::SelectiveOp => emulate::Checkpointing::SelectiveOp,
            Checkpointing::SelectiveLayer => emulate::Checkpointing::SelectiveLayer,
            Checkpointing::Full => emulate::Checkpointing::Full,
        }
    }
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let plan = plan_dir::read(&args.plan)?;
    let cluster = clusters::read(&args.cluster)?;
    let simulation = match args.emulate {
        None => simulate(&plan, &cluster),
        Some(system) => {
            let plan = reference::of(&args.plan, &plan, args.model.as_deref())?;
            let (system, checkpointing) = (system.into(), args.checkpointing.into());
            emulate(&plan, &cluster, Emulation::of(system, checkpointing))
        }
    };
    if let Some(path) = &args.trace {
        let text = trace::to_json(&simulation).to_string();
        files::deliver(path, |out| out.write_all(text.as_bytes())).map_err(|e| {
            Diagnostic::error(Code::FileUnwritable, format!("cannot write {}: {e}", path.display()))
        })?;
    }
    if args.json {
        let value = serde_json::to_value(&simulation).unwrap_or_default();
        return Ok(format!("{value:#}\n"));
    }
    Ok(text(&simulation, &cluster))
}

fn text(s: &Simulation, cluster: &Cluster) -> String {
    let nodes = s.ranks.div_ceil(cluster.devices_per_node);
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let bounds: Vec<String> =
        s.bounds.iter().map(|b| format!("{} {}", percent(b.fraction), b.what)).collect();
    let host = match s.host_bytes {
        0 => String::new(),
        n => {
            let copies = seconds(s.host_copy_seconds);
            format!("host memory   {} per rank; copies take {copies}\n", bytes(n))
        }
    };
    let fits = if s.fits { "" } else { ": does not fit" };
    format!(
        "cluster       {}: {} ranks on {nodes} nodes of {}\n\
         step          {}, {:.0} tokens or examples per second, {:.1} per rank; MFU {}\n\
         compute       {}\n\
         communication {}, of which {} exposed ({} of the step)\n\
         peak memory   {} of {}, with {} outside the plan{fits}\n{host}\
         bound by      {}\n",
        s.cluster,
        s.ranks,
        cluster.device.name,
        seconds(s.step_seconds),
        s.tokens_or_examples_per_s,
        s.tokens_or_examples_per_s / s.ranks as f64,
        percent(s.mfu),
        seconds(s.compute_seconds),
        seconds(s.communication_seconds),
        seconds(s.exposed_communication_seconds),
        percent(s.exposed_communication_seconds / s.step_seconds),
        bytes(s.peak_bytes + s.reserved_bytes),
        bytes(s.memory_bytes),
        bytes(s.reserved_bytes),
        bounds.join(", "),
    )
}
