//! `frit inspect`: shows a plan as text or JSON.

mod casts;
mod memory;
mod roofline;

use crate::clusters;
use crate::compilation::IMPORT;
use crate::diagnostics::Report;
use crate::plan_dir;
use crate::policy::{self, Policy};
use crate::predict;
use crate::render::{bytes, launches, table};
use frit_ir::ops::{ParamKind, StateName};
use frit_ir::plan::{
    Action, DeviceType, Group, KernelId, ParamHome, ParamSpec, Plan, Task, TaskId,
};
use frit_ir::{Code, Diagnostic, Op};
use frit_runtime::numerics::{Format, NumericsFile};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum View {
    /// Sizes, counts and memory.
    Summary,
    /// Units, and every parameter with its unit and the reason why it trains or not.
    Units,
    /// Every conversion between float types.
    Casts,
    /// The tasks in order, with streams and waits.
    Schedule,
    /// Memory use in every part of a step, and every buffer.
    Memory,
    /// The kernels.
    Kernels,
    /// Bytes, FLOP and bound of every kernel, and the plan against its lower bound.
    Roofline,
    /// Findings of the lints.
    Lints,
    /// The bodies of the kernels as text.
    Graph,
    /// Measurements of a run (`--numerics`), and the precision policy that follows.
    Numerics,
}

/// Arguments of `frit inspect`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit inspect plan
  frit inspect plan --view schedule
  frit inspect plan --view roofline --cluster h200
  frit inspect plan --view lints --json
  frit inspect plan --numerics numerics.json
  frit inspect plan --json | jq .peak_bytes")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// The view; `summary` unless another option implies one.
    #[arg(long, value_enum)]
    pub view: Option<View>,
    /// The file that `frit run --numerics` wrote, for the view `numerics`.
    #[arg(long, value_name = "FILE.json", required_if_eq("view", "numerics"))]
    pub numerics: Option<PathBuf>,
    /// Show the view `roofline` on this cluster, built-in or a TOML file, and not on the plan's.
    #[arg(long)]
    pub cluster: Option<String>,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
}

/// The view that the options ask for.
fn view(args: &Args) -> Result<View, Diagnostic> {
    let implied = match (&args.numerics, &args.cluster) {
        (Some(_), Some(_)) => {
            let message = "--numerics and --cluster are of different views";
            return Err(Diagnostic::error(Code::CommandLine, message)
                .help("give --numerics for the view numerics, or --cluster for roofline"));
        }
        (Some(_), None) => Some(("--numerics", View::Numerics)),
        (None, Some(_)) => Some(("--cluster", View::Roofline)),
        (None, None) => None,
    };
    match (args.view, implied) {
        (Some(view), Some((option, implied))) if view != implied => {
            let message = format!("{option} is not of the view that --view names");
            Err(Diagnostic::error(Code::CommandLine, message)
                .help(format!("leave out --view or {option}")))
        }
        (Some(view), _) | (None, Some((_, view))) => Ok(view),
        (None, None) => Ok(View::Summary),
    }
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let view = view(args)?;
    let plan = plan_dir::read(&args.plan)?;
    if let Some(file) = &args.numerics {
        return Ok(numerics(&policy::read(file)?, args.json));
    }
    if view == View::Roofline {
        let cluster = match &args.cluster {
            Some(name) => clusters::read(name)?,
            None => predict::cluster(&plan)?,
        };
        let found = frit_passes::simulate::roofline::roofline(&plan, &cluster);
        return Ok(match args.json {
            true => format!("{:#}\n", serde_json::to_value(&found).unwrap_or_default()),
            false => roofline::text(&found),
        });
    }
    if args.json {
        let value = to_json(&plan, view);
        return Ok(format!("{value:#}\n"));
    }
    Ok(match view {
        View::Summary => summary(&plan),
        View::Units => {
            let mut text = String::new();
            for (i, unit) in plan.units.iter_enumerated() {
                text += &format!("unit {i:<3} {}: {}\n", unit.name, unit.reason);
            }
            text += "\n";
            text += &rows_text(&plan, view);
            let (head, rows) = inlined(&plan);
            if !rows.is_empty() {
                text += "\n";
                text += &table(&head, &rows);
            }
            text
        }
        View::Casts => casts::text(&plan),
        View::Memory => memory::text(&plan),
        View::Graph => plan
            .kernels
            .iter()
            .map(|k| format!("; {} ({:?})\n{}", k.name, k.kind(), k.body))
            .collect(),
        View::Lints if plan.lints.is_empty() => {
            let ran: Vec<&str> = plan.reports.iter().map(|r| r.pass.as_str()).collect();
            format!("no advice from: {}\n", ran.join(", "))
        }
        view => rows_text(&plan, view),
    })
}

/// The summary as text.
pub fn summary(plan: &Plan) -> String {
    let s = plan.summary();
    let gap = 100.0 * (s.peak_bytes as f64 / s.peak_lower_bound_bytes.max(1) as f64 - 1.0);
    let c = &s.collectives;
    let kernels = (s.scratch_bytes > 0).then(|| {
        let engines = match s.engine_bytes {
            0 => String::new(),
            n => format!("; up to {} more for cuDNN engines", bytes(n as u64)),
        };
        format!("of it         {} for kernels{engines}\n", bytes(s.scratch_bytes as u64))
    });
    let extra = extra_bytes(plan)
        .map(|n| format!("beside it     {} for data in transit\n", bytes(n as u64)));
    let host = (s.host_bytes > 0).then(|| {
        format!(
            "host memory   {} per rank; {} copied in and {} out per step\n",
            bytes(s.host_bytes as u64),
            bytes(s.bytes_copied_in_per_step),
            bytes(s.bytes_copied_out_per_step)
        )
    });
    format!(
        "model         {}\nranks         {} ({})\nprecision     {}\nparameters    {} in {} units\n\
         tasks         {} with {} kernels, {} casts\n\
         collectives   {} all_gather, {} reduce_scatter, {} all_reduce\n\
         communicated  {} per rank and step\n\
         peak memory   {} per rank ({} persistent), {gap:.1} % above its lower bound; {} on one stream\n{}{}{}\
         arithmetic    {:.2} GFLOP per rank and step\n",
        plan.name,
        s.ranks,
        s.strategy,
        s.compute_dtype,
        parameters(plan),
        s.units,
        s.tasks,
        s.kernels,
        s.casts,
        c.all_gather,
        c.reduce_scatter,
        c.all_reduce,
        bytes(s.bytes_communicated_per_step),
        bytes(s.peak_bytes as u64),
        bytes(s.persistent_bytes as u64),
        bytes(s.single_stream_live_bytes as u64),
        kernels.unwrap_or_default(),
        host.unwrap_or_default(),
        extra.unwrap_or_default(),
        s.flops_per_step as f64 / 1e9,
    )
}

/// How many parameters train.
fn parameters(plan: &Plan) -> String {
    let count = |of: &dyn Fn(&ParamKind) -> bool| {
        let chosen = plan.params.iter().filter(|p| of(&p.kind));
        chosen.fold((0, 0), |(n, elements), p| (n + 1, elements + p.ty.shape.numel()))
    };
    let (all, elements) = count(&|kind| *kind != ParamKind::Buffer);
    if plan.eval.is_some() {
        return format!("{elements} elements of {all} parameters");
    }
    let (trained, trained_elements) = count(&|kind| *kind == ParamKind::Trainable);
    format!("trains {trained} of {all} parameters ({trained_elements} of {elements} elements)")
}

/// Bytes that a rank of a plan for GPUs allocates in addition to the peak.
fn extra_bytes(plan: &Plan) -> Option<usize> {
    if plan.target.device != DeviceType::Cuda {
        return None;
    }
    let beside_arenas = frit_runtime::device::cuda::extra_bytes(plan).ok()?;
    Some(beside_arenas - plan.kernel_bytes())
}

/// A view as JSON: an object for the summary, a list of objects for the others.
pub fn to_json(plan: &Plan, view: View) -> Value {
    match view {
        View::Summary => {
            let mut summary = serde_json::to_value(plan.summary()).unwrap_or_default();
            if let Some(bytes) = extra_bytes(plan) {
                summary["extra_bytes"] = bytes.into();
            }
            // The cluster that it was compiled for may be a file that is gone.
            if let Ok(predicted) = predict::step(plan) {
                summary["predicted_step_seconds"] = predicted.step_seconds.into();
                summary["predicted_compute_seconds"] = predicted.compute_seconds.into();
            }
            summary
        }
        View::Lints => serde_json::to_value(
            plan.lints
                .iter()
                .map(|d| {
                    json!({"id": d.code, "severity": d.severity, "scope": d.origin.scope,
                           "message": d.message, "remedy": d.help})
                })
                .collect::<Vec<_>>(),
        )
        .unwrap_or_default(),
        View::Graph => {
            let body =
                |k: &frit_ir::plan::Kernel| json!({"name": k.name, "body": k.body.to_string()});
            plan.kernels.iter().map(body).collect()
        }
        View::Memory => memory::json(plan),
        view => {
            let (head, rows) = rows(plan, view);
            let object = |row: Vec<String>| -> Value {
                let cells = head.iter().zip(row);
                cells.map(|(h, cell)| (h.to_string(), typed(h, cell))).collect()
            };
            rows.into_iter().map(object).collect()
        }
    }
}

/// A cell of a table as JSON: counts and times are numbers, waits a list of tasks.
fn typed(column: &str, cell: String) -> Value {
    let number = |text: &str| text.parse::<u64>().map_or(Value::Null, |n| json!(n));
    match column {
        "task" | "uses" | "ops" => number(&cell),
        "us" => cell.parse::<f64>().map_or(Value::Null, |x| json!(x)),
        "waits" => cell.split(',').filter(|w| !w.is_empty()).map(number).collect(),
        _ => Value::String(cell),
    }
}

fn rows_text(plan: &Plan, view: View) -> String {
    let (head, rows) = rows(plan, view);
    table(&head, &rows)
}

fn rows(plan: &Plan, view: View) -> (Vec<&'static str>, Vec<Vec<String>>) {
    match view {
        View::Units => units(plan),
        View::Casts => casts::rows(plan),
        View::Schedule => (
            vec!["task", "stream", "region", "action", "scope", "waits", "us"],
            plan.tasks.iter_enumerated().map(|(i, t)| schedule_row(i, t)).collect(),
        ),
        View::Kernels => kernels(plan),
        View::Lints => (
            vec!["id", "severity", "scope", "message", "remedy"],
            plan.lints
                .iter()
                .map(|d| {
                    let severity = format!("{:?}", d.severity).to_lowercase();
                    let remedy = d.help.clone().unwrap_or_default();
                    vec![
                        d.code.clone(),
                        severity,
                        d.origin.scope.to_string(),
                        d.message.clone(),
                        remedy,
                    ]
                })
                .collect(),
        ),
        View::Summary | View::Memory | View::Roofline | View::Graph | View::Numerics => {
            (vec![], vec![])
        }
    }
}

fn units(plan: &Plan) -> (Vec<&'static str>, Vec<Vec<String>>) {
    // Why each parameter is in its unit, by name.
    let remarks = plan.reports.iter().filter(|r| r.pass == "shard").flat_map(|r| &r.remarks);
    let placed: BTreeMap<&str, &str> = remarks
        .filter_map(|(text, origin)| {
            let (_, why) = text.strip_prefix("parameter: in unit `")?.split_once("`: ")?;
            Some((&*origin.source, why))
        })
        .collect();
    let row = |p: &ParamSpec| {
        let (unit, held) = match p.home {
            ParamHome::Group { group, .. } => {
                let group = &plan.groups[group];
                (plan.units[group.unit].name.clone(), group.dtype.name())
            }
            ParamHome::Buffer(_) => ("replicated".into(), p.ty.dtype.name()),
            ParamHome::Unused => ("unused".into(), ""),
        };
        let kind = format!("{:?}{}", p.kind, optimizer_of(plan, p)).to_lowercase();
        let place = placed.get(p.name.as_str()).map_or(String::new(), |why| why.to_string());
        let held = held.to_string();
        vec![p.name.clone(), p.ty.to_string(), held, unit, place, kind, p.reason.clone()]
    };
    (
        vec!["parameter", "type", "held", "unit", "because", "kind", "reason"],
        plan.params.iter().map(row).collect(),
    )
}

/// `, muon` or `, adamw` where a plan has both.
fn optimizer_of(plan: &Plan, param: &ParamSpec) -> &'static str {
    let is_muon = |g: &Group| g.states.iter().any(|s| s.name == StateName::MuonMomentum);
    match param.home {
        ParamHome::Group { group, .. } if plan.groups.iter().any(is_muon) => {
            match &plan.groups[group] {
                group if !group.trainable => "",
                group if is_muon(group) => ", muon",
                _ => ", adamw",
            }
        }
        _ => "",
    }
}

/// Initializers that became constants, and why.
fn inlined(plan: &Plan) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let remarks = plan.reports.iter().filter(|r| r.pass == IMPORT).flat_map(|r| &r.remarks);
    let rows =
        remarks.map(|(text, origin)| vec![origin.source.to_string(), text.clone()]).collect();
    (vec!["initializer", "is"], rows)
}

fn schedule_row(i: TaskId, t: &Task) -> Vec<String> {
    let waits: Vec<String> = t.waits.iter().map(|w| w.to_string()).collect();
    let stream = t.stream.name().to_string();
    vec![
        i.to_string(),
        stream,
        t.region.to_string(),
        t.name.clone(),
        t.origin.scope.to_string(),
        waits.join(","),
        format!("{:.1}", t.cost_us),
    ]
}

fn kernels(plan: &Plan) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut uses: BTreeMap<KernelId, (usize, f64)> = BTreeMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        if let Action::Kernel { kernel, .. } = task.action {
            let (n, us) = uses.entry(kernel).or_default();
            *n += plan.runs(i);
            *us += plan.runs(i) as f64 * task.cost_us;
        }
    }
    let row = |(i, k): (KernelId, &frit_ir::plan::Kernel)| {
        let (n, us) = uses.get(&i).copied().unwrap_or_default();
        let inputs = k.body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
        let types: Vec<String> = inputs.map(|(_, n)| k.body.ty(n.outputs[0]).to_string()).collect();
        let ops = k.body.nodes().filter(|(_, n)| !n.op.is_leaf()).count();
        let kind = format!("{:?}", k.kind()).to_lowercase();
        let scratch = bytes(k.entry.scratch_bytes() as u64);
        let launches = launches::words(plan, &k.entry).join(", ");
        let counts = [n.to_string(), ops.to_string(), format!("{us:.0}"), scratch];
        [&[k.name.clone(), kind][..], &counts, &[types.join(" "), launches]].concat()
    };
    let rows = plan.kernels.iter_enumerated().map(row).collect();
    let head = ["kernel", "kind", "uses", "ops", "us", "scratch", "operands", "launches"];
    (head.to_vec(), rows)
}

/// What was measured, by scope, and what follows from it.
fn numerics(file: &NumericsFile, json: bool) -> String {
    let policy = Policy::of(file);
    if json {
        let lost =
            |row: &frit_runtime::numerics::Row,
             part: fn(&frit_runtime::numerics::Histogram, &Format) -> f64| {
                let of = |f: &Format| (f.name.to_string(), json!(part(&row.histogram, f)));
                Value::Object(Format::ALL.iter().map(of).collect())
            };
        let scope = |row: &frit_runtime::numerics::Row| {
            json!({"scope": row.scope, "kind": row.kind, "dtype": row.dtype,
                   "elements": row.histogram.elements, "zeros": row.histogram.zeros,
                   "not_finite": row.histogram.not_finite, "max_abs": row.histogram.max_abs,
                   "min_abs": row.histogram.min_abs,
                   "underflow": lost(row, |h, f| h.underflow(f, 0)),
                   "subnormal": lost(row, |h, f| h.subnormal(f, 0)),
                   "overflow": lost(row, |h, f| h.overflow(f, 0))})
        };
        let scopes: Vec<Value> = file.scopes.iter().map(scope).collect();
        return format!("{:#}\n", json!({"scopes": scopes, "policy": policy}));
    }
    let percent = |x: f64| if x == 0.0 { "0".into() } else { format!("{:.2}", 100.0 * x) };
    let row = |row: &frit_runtime::numerics::Row| {
        let h = &row.histogram;
        let [f16, bf16, e4m3, _] = &Format::ALL;
        vec![
            policy::scope(row),
            format!("{:?}", row.kind).to_lowercase(),
            row.dtype.clone(),
            format!("{:.2e}", h.min_abs),
            format!("{:.2e}", h.max_abs),
            percent(h.underflow(f16, 0)),
            percent(h.overflow(f16, 0)),
            percent(h.underflow(bf16, 0)),
            percent(h.underflow(e4m3, 0)),
            percent(h.overflow(e4m3, 0)),
        ]
    };
    let head = [
        "scope", "kind", "dtype", "least", "most", "f16 <%", "f16 >%", "bf16 <%", "e4m3 <%",
        "e4m3 >%",
    ];
    let rows: Vec<Vec<String>> = file.scopes.iter().map(row).collect();
    format!(
        "{}\n< % of the nonzero values become 0, > % become infinite; no scaling.\n\n{}",
        table(&head, &rows),
        policy.text()
    )
}
