//! `frit bench`: compares a plan with the same model in fp32.

use crate::bench::{Bench, Side};
use crate::diagnostics::Report;
use crate::render::{bytes, table};
use frit_runtime::device::cuda::{ChoiceTimes, times};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Arguments of `frit bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit bench plan
  frit bench plan --data data.safetensors --steps 20
  frit bench plan --json | jq .verdict

The model is recompiled in fp32 from the source in the plan, with the same configuration; both plans run alternately in this process.
For a GPU plan, the times of the candidates of its kernels follow; with run.deterministic = false
including those that add in any order.
Verdict by speed-up: below 1.1 fp32, up to 1.5 either, above that low precision.")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// Training data; by default random numbers.
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// Path of the model that the plan was compiled from, if it was moved.
    #[arg(long, value_name = "FILE.onnx")]
    pub model: Option<PathBuf>,
    /// Timed steps of each plan.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Threads per rank; by default the cores divided by the ranks.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Read external data of the model also outside of the model's folder.
    #[arg(long)]
    pub allow_external_data: bool,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let (data, model) = (args.data.as_deref(), args.model.as_deref());
    let (steps, external) = (args.steps as usize, args.allow_external_data);
    let bench = Bench::run(&args.plan, model, data, steps, args.threads, external)?;
    if args.json {
        let side = |s: &Side| {
            json!({"compute_dtype": s.compute_dtype, "step_seconds": s.step_seconds,
                   "peak_bytes": s.peak_bytes, "casts": s.casts, "losses": s.losses})
        };
        let value = json!({
            "steps": args.steps,
            "plan": side(&bench.plan),
            "fp32": side(&bench.fp32),
            "speedup": bench.speedup(),
            "predicted_speedup": bench.predicted_speedup,
            "memory_ratio": bench.memory_ratio(),
            "loss_deviation": bench.loss_deviation(),
            "verdict": bench.verdict().word(),
            "choices": times(&args.plan),
        });
        return Ok(format!("{value:#}\n"));
    }
    let row = |name: &str, f: &dyn Fn(&Side) -> String| {
        vec![name.to_string(), f(&bench.fp32), f(&bench.plan)]
    };
    let rows = [
        row("step, median", &|s| format!("{:.3} ms", 1e3 * s.step_seconds)),
        row("peak memory", &|s| bytes(s.peak_bytes as u64)),
        row("casts", &|s| s.casts.to_string()),
        row("last loss", &|s| s.losses.last().map_or(String::new(), |l| format!("{l:.5}"))),
    ];
    let (head, verdict) = (["", "fp32", &bench.plan.compute_dtype], bench.verdict());
    let choices = choices(&times(&args.plan));
    Ok(format!(
        "{}\nspeed-up       {:.2} times (predicted {:.2})\nmemory         {:.2} times\n\
         loss deviation {:.2e}, mean over {} steps, relative\nverdict        {}: {}\n",
        table(&head, &rows),
        bench.speedup(),
        bench.predicted_speedup,
        bench.memory_ratio(),
        bench.loss_deviation(),
        bench.plan.losses.len(),
        verdict.word(),
        verdict.why(),
    ) + &choices)
}

/// The times of candidates of kernels on GPUs.
fn choices(all: &BTreeMap<String, Vec<ChoiceTimes>>) -> String {
    let mut text = String::new();
    for (device, choices) in all {
        text += &format!("\ncandidates on {device}, in us, the selected one first\n");
        for ChoiceTimes { choice, chosen, us } in choices {
            let mut times: Vec<(&String, &f64)> = us.iter().collect();
            times.sort_by_key(|(name, _)| *name != chosen);
            let times = times.iter().map(|(name, us)| format!("{name} {us:.1}"));
            let what = choice.split_once(": ").map_or(choice.as_str(), |(_, what)| what);
            text += &format!("  {}  {what}\n", times.collect::<Vec<_>>().join(", "));
        }
    }
    text
}
