//! `frit plan-search`: finds the fastest plans for a model on a cluster.
//!
//! Compiles the model once per choice (strategy, micro-batch, rematerialization, prefetching), without weights and kernels,
//! simulates every plan, and ranks those that fit by throughput.

use super::compile::binds;
use crate::clusters;
use crate::compilation::{Request, predict};
use crate::config::Config;
use crate::diagnostics::Report;
use crate::render::{bytes, quoted, seconds, table};
use frit_ir::plan::Plan;
use frit_ir::{Code, Diagnostic};
use frit_passes::cost::Cluster;
use frit_passes::simulate::{Simulation, simulate};
use frit_runtime::progress::Progress;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Arguments of `frit plan-search`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit plan-search examples/llama/model.json --cluster h100 --ranks 64 --micro-batch 1,2,4
  frit plan-search model.onnx --config train.toml --cluster a100-80g --ranks 128 --best 3 --json")]
pub struct Args {
    /// The model: an .onnx or .pt2 file, or a .json model.
    pub model: PathBuf,
    /// Configuration of all plans.
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// One setting, as SECTION.KEY=VALUE.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Size of a symbolic dimension other than the batch.
    #[arg(long, value_name = "DIM=N")]
    pub bind: Vec<String>,
    /// A built-in cluster (a100-80g, h100, h100-alone, h200, h200-gemm), or a TOML file that describes one.
    #[arg(long)]
    pub cluster: String,
    /// Number of ranks.
    #[arg(long)]
    pub ranks: usize,
    /// Micro-batches to try, per rank.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    pub micro_batch: Vec<usize>,
    /// Symbolic dimension of the batch.
    #[arg(long, default_value = "batch")]
    pub batch_dim: String,
    /// Strategies to try.
    #[arg(long, value_delimiter = ',', default_value = "full_shard,shard_grad_op,no_shard")]
    pub strategy: Vec<String>,
    /// Maximum memory per rank, such as 70GiB; by default that of the device.
    #[arg(long)]
    pub budget: Option<String>,
    /// Read external data of the model also outside of the model's folder.
    #[arg(long)]
    pub allow_external_data: bool,
    /// Number of plans to print.
    #[arg(long, default_value_t = 5)]
    pub best: usize,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
}

/// One way to train.
struct Choice {
    strategy: String,
    micro_batch: usize,
    recompute: &'static str,
    prefetch: &'static str,
}

impl Choice {
    /// What `frit compile` is given to make this plan.
    fn settings(&self) -> Vec<String> {
        vec![
            format!("sharding.strategy={}", self.strategy),
            format!("memory.recompute={}", self.recompute),
            format!("sharding.prefetch={}", self.prefetch),
        ]
    }
}

/// A choice with its prediction.
struct Found {
    choice: Choice,
    simulation: Simulation,
    collectives: usize,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let cluster = clusters::read(&args.cluster)?;
    let budget = budget(args, &cluster)?;
    let choices = choices(args);
    let mut progress = Progress::new("plan", 0, choices.len());
    let (mut found, mut refused, mut least) = (Vec::new(), Vec::new(), u64::MAX);
    for choice in choices {
        let compiled = compile(args, &choice);
        progress
            .advance(&format!("{} of micro-batch {}", choice.strategy, choice.micro_batch), &[]);
        match compiled {
            Ok(plan) => {
                let simulation = simulate(&plan, &cluster);
                least = least.min(simulation.peak_bytes);
                if simulation.peak_bytes <= budget {
                    let collective = |t: &&frit_ir::plan::Task| t.action.is_collective();
                    let collectives = plan.tasks.iter().filter(collective).count();
                    found.push(Found { choice, simulation, collectives });
                }
            }
            Err(report) => refused.push(report),
        }
    }
    progress.finish();
    if found.is_empty() {
        // If nothing compiles the first reason is everyone's.
        if least == u64::MAX {
            return Err(refused.into_iter().next().unwrap_or_default());
        }
        return Err(Diagnostic::error(
            Code::BudgetTooSmall,
            format!("no plan fits {}", bytes(budget)),
        )
        .help(format!(
            "the smallest one needs {}; use more ranks or a smaller micro-batch",
            bytes(least)
        ))
        .into());
    }
    // The stable sort keeps the simpler choice first among equals: it was tried first.
    found.sort_by(|a, b| {
        let rate = |f: &Found| f.simulation.tokens_or_examples_per_s;
        rate(b).total_cmp(&rate(a))
    });
    found.truncate(args.best.max(1));
    if args.json {
        let list: Vec<Value> = found.iter().map(|f| to_json(args, f)).collect();
        return Ok(format!("{:#}\n", Value::Array(list)));
    }
    Ok(text(args, &found))
}

fn budget(args: &Args, cluster: &Cluster) -> Result<u64, Report> {
    let gib = (1_u64 << 30) as f64;
    let device = ((cluster.device.memory_gib - cluster.reserved_gib) * gib).max(0.0) as u64;
    match &args.budget {
        None => Ok(device),
        Some(text) => {
            let config = Config::load(None, &[format!("memory.budget={text}")])?;
            Ok(config.memory.budget.unwrap_or(device))
        }
    }
}

fn choices(args: &Args) -> Vec<Choice> {
    let mut choices = Vec::new();
    for strategy in &args.strategy {
        for &micro_batch in &args.micro_batch {
            for recompute in ["none", "selective", "unit"] {
                for prefetch in ["fixed", "auto"] {
                    let strategy = strategy.clone();
                    choices.push(Choice { strategy, micro_batch, recompute, prefetch });
                }
            }
        }
    }
    // Without gathers there is nothing to prefetch.
    choices.retain(|c| c.strategy != "no_shard" || c.prefetch == "fixed");
    choices
}

/// All settings of a choice, in the order in which they count.
fn settings(args: &Args, choice: &Choice) -> Vec<String> {
    let mut settings = args.set.clone();
    settings.push(format!("sharding.ranks={}", args.ranks));
    settings.push(format!("target.cluster={}", args.cluster));
    settings.extend(choice.settings());
    settings
}

/// What makes the plan of a choice, as a line for a shell.
fn command(args: &Args, choice: &Choice) -> String {
    let mut words = vec!["frit".into(), "compile".into(), args.model.display().to_string()];
    let mut option = |name: &str, value: String| words.extend([name.to_string(), value]);
    if let Some(config) = &args.config {
        option("--config", config.display().to_string());
    }
    for bind in &args.bind {
        option("--bind", bind.clone());
    }
    option("--bind", format!("{}={}", args.batch_dim, choice.micro_batch));
    for setting in settings(args, choice) {
        option("--set", setting);
    }
    if args.allow_external_data {
        words.push("--allow-external-data".into());
    }
    words.extend(["-o".into(), "plan".into()]);
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    words.join(" ")
}

fn compile(args: &Args, choice: &Choice) -> Result<Plan, Report> {
    let config = Config::load(args.config.as_deref(), &settings(args, choice))?;
    let mut binds = binds(&args.bind)?;
    binds.insert(args.batch_dim.clone(), choice.micro_batch);
    let allow_external_data = args.allow_external_data;
    let request =
        Request { model: args.model.clone(), binds, allow_external_data, ..Request::default() };
    predict(&request, &config)
}

fn to_json(args: &Args, found: &Found) -> Value {
    let s = &found.simulation;
    json!({
        "strategy": found.choice.strategy,
        "micro_batch": found.choice.micro_batch,
        "recompute": found.choice.recompute,
        "prefetch": found.choice.prefetch,
        "step_seconds": s.step_seconds,
        "tokens_or_examples_per_s": s.tokens_or_examples_per_s,
        "mfu": s.mfu,
        "exposed_communication_seconds": s.exposed_communication_seconds,
        "peak_bytes": s.peak_bytes,
        "collectives": found.collectives,
        "settings": found.choice.settings(),
        "command": command(args, &found.choice),
    })
}

fn text(args: &Args, found: &[Found]) -> String {
    let head = ["rate", "MFU", "step", "exposed", "peak", "micro-batch", "settings"];
    let row = |f: &Found| {
        let s = &f.simulation;
        vec![
            format!("{:.0}", s.tokens_or_examples_per_s),
            format!("{:.1} %", 100.0 * s.mfu),
            seconds(s.step_seconds),
            seconds(s.exposed_communication_seconds),
            bytes(s.peak_bytes),
            f.choice.micro_batch.to_string(),
            f.choice.settings().join(" "),
        ]
    };
    let rows: Vec<Vec<String>> = found.iter().map(row).collect();
    format!("{}\n{}\n", table(&head, &rows), command(args, &found[0].choice))
}
