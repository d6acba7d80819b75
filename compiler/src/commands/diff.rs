//! `frit diff`: shows the differences between two plans.

use crate::diagnostics::Report;
use crate::plan_dir;
use crate::predict;
use crate::render::{bytes, launches, table};
use frit_ir::Op;
use frit_ir::plan::{Action, Plan, TaskId};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Arguments of `frit diff`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit diff plan-bf16 plan-fp32
  frit diff before after --json | jq .change.peak_bytes

Every difference is B minus A. With --json: `a` and `b` hold the numbers of each plan, `change` their differences, `config`
the keys, `casts` the casts by scope, `collectives` the collectives by unit, `launches` the kernel launches, `lints` the findings of one plan only.")]
pub struct Args {
    /// The plan directory to start from.
    #[arg(value_name = "PLAN_A")]
    pub a: PathBuf,
    /// The plan directory to compare with it.
    #[arg(value_name = "PLAN_B")]
    pub b: PathBuf,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let (a, b) = (plan_dir::read(&args.a)?, plan_dir::read(&args.b)?);
    let difference = Difference::of(&a, &b)?;
    Ok(if args.json { format!("{:#}\n", difference.to_json()) } else { difference.text() })
}

/// The differences between two plans, as with `--json`.
///
/// # Errors
/// If a plan's configuration names a cluster that cannot be read any more.
pub fn compare(a: &Plan, b: &Plan) -> Result<Value, Report> {
    Ok(Difference::of(a, b)?.to_json())
}

/// Counts of one thing in both plans.
type Pair = (u64, u64);

/// What two plans have that the other has not.
#[derive(Debug, Default)]
struct Difference {
    /// Numbers of both plans, in the order in which they are shown.
    numbers: Vec<(&'static str, f64, f64)>,
    /// Configuration keys: name and both values.
    config: Vec<(String, String, String)>,
    /// Casts by scope and types.
    casts: BTreeMap<(String, String), Pair>,
    /// Collectives by kind, unit and type.
    collectives: BTreeMap<(String, String, String), Pair>,
    /// Launches by kind.
    launches: BTreeMap<String, Pair>,
    /// Findings of A only and of B only: id, scope, message.
    lints: [Vec<[String; 3]>; 2],
}

impl Difference {
    fn of(a: &Plan, b: &Plan) -> Result<Difference, Report> {
        let (x, y) = (numbers(a)?, numbers(b)?);
        let numbers = x.into_iter().zip(y).map(|((name, x), (_, y))| (name, x, y)).collect();
        let (keys_a, keys_b) = (keys(a), keys(b));
        let names: BTreeSet<&String> = keys_a.keys().chain(keys_b.keys()).collect();
        let value = |keys: &BTreeMap<String, String>, name: &String| {
            keys.get(name).cloned().unwrap_or_else(|| "(none)".into())
        };
        let config = names
            .into_iter()
            .map(|name| (name.clone(), value(&keys_a, name), value(&keys_b, name)))
            .filter(|(_, a, b)| a != b)
            .collect();
        let lints = |plan: &Plan| -> BTreeSet<[String; 3]> {
            let of = |d: &frit_ir::Diagnostic| {
                [d.code.clone(), d.origin.scope.to_string(), d.message.clone()]
            };
            plan.lints.iter().map(of).collect()
        };
        let (la, lb) = (lints(a), lints(b));
        let only = |x: &BTreeSet<[String; 3]>, y| x.difference(y).cloned().collect();
        Ok(Difference {
            numbers,
            config,
            casts: pairs(casts(a), casts(b)),
            collectives: pairs(collectives(a), collectives(b)),
            launches: pairs(launches_of(a), launches_of(b)),
            lints: [only(&la, &lb), only(&lb, &la)],
        })
    }

    fn to_json(&self) -> Value {
        let side = |pick: fn(&(&'static str, f64, f64)) -> f64| -> Value {
            self.numbers.iter().map(|n| (n.0.to_string(), number(pick(n)))).collect()
        };
        let changed = self.numbers.iter().filter(|(_, a, b)| a != b);
        let change: Value = changed.map(|(name, a, b)| (name.to_string(), number(b - a))).collect();
        let lints = |list: &[[String; 3]]| -> Vec<Value> {
            let of = |[id, scope, message]: &[String; 3]| json!({"id": id, "scope": scope, "message": message});
            list.iter().map(of).collect()
        };
        json!({
            "a": side(|n| n.1),
            "b": side(|n| n.2),
            "change": change,
            "config": self.config.iter()
                .map(|(key, a, b)| json!({"key": key, "a": a, "b": b})).collect::<Vec<_>>(),
            "casts": self.casts.iter()
                .map(|((scope, cast), (a, b))| json!({"scope": scope, "cast": cast, "a": a, "b": b}))
                .collect::<Vec<_>>(),
            "collectives": self.collectives.iter()
                .map(|((kind, unit, ty), (a, b))| {
                    json!({"kind": kind, "unit": unit, "type": ty, "a": a, "b": b})
                })
                .collect::<Vec<_>>(),
            "launches": self.launches.iter()
                .map(|(launch, (a, b))| json!({"launch": launch, "a": a, "b": b})).collect::<Vec<_>>(),
            "lints": {"only_a": lints(&self.lints[0]), "only_b": lints(&self.lints[1])},
        })
    }

    fn text(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .numbers
            .iter()
            .map(|(name, a, b)| {
                let shown = |x: f64| show(name, x);
                vec![name.replace('_', " "), shown(*a), shown(*b), change(*a, *b)]
            })
            .collect();
        let mut text = table(&["", "A", "B", "change"], &rows);
        let mut section = |title: &str, head: &[&str], rows: Vec<Vec<String>>| {
            if !rows.is_empty() {
                text += &format!("\n{title}\n{}", table(head, &rows));
            }
        };
        let pair = |(a, b): &Pair| [a.to_string(), b.to_string()];
        let config = self.config.iter().map(|(k, a, b)| vec![k.clone(), a.clone(), b.clone()]);
        section("configuration", &["key", "A", "B"], config.collect());
        let casts = self
            .casts
            .iter()
            .map(|((scope, cast), n)| [&[scope.clone(), cast.clone()][..], &pair(n)].concat());
        section("casts", &["scope", "cast", "A", "B"], casts.collect());
        let collectives = self.collectives.iter().map(|((kind, unit, ty), n)| {
            [&[kind.clone(), unit.clone(), ty.clone()][..], &pair(n)].concat()
        });
        section("collectives", &["kind", "unit", "type", "A", "B"], collectives.collect());
        let launches =
            self.launches.iter().map(|(launch, n)| [&[launch.clone()][..], &pair(n)].concat());
        section("launches", &["launch", "A", "B"], launches.collect());
        let lints = self.lints.iter().zip(["A", "B"]).flat_map(|(list, side)| {
            list.iter().map(move |[id, scope, message]| {
                vec![side.to_string(), id.clone(), scope.clone(), message.clone()]
            })
        });
        section("findings of one plan only", &["plan", "id", "scope", "message"], lints.collect());
        text
    }
}

/// A whole number as one.
fn number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 9e15 { json!(x as i64) } else { json!(x) }
}

fn show(name: &str, x: f64) -> String {
    if name.contains("bytes") {
        bytes(x as u64)
    } else if name.ends_with("seconds") {
        format!("{:.3} ms", 1e3 * x)
    } else {
        format!("{x}")
    }
}

fn change(a: f64, b: f64) -> String {
    match (a == b, a) {
        (true, _) => "=".into(),
        (false, 0.0) => "new".into(),
        _ => format!("{:+.1} %", 100.0 * (b / a - 1.0)),
    }
}

/// The numbers that are compared.
fn numbers(plan: &Plan) -> Result<Vec<(&'static str, f64)>, Report> {
    let s = plan.summary();
    let n = |x: usize| x as f64;
    let mut cast_bytes = 0;
    for i in plan.tasks.keys() {
        for (from, to, elements) in casts_of(plan, i) {
            cast_bytes += plan.runs(i) * elements * (from.size() + to.size());
        }
    }
    let p = predict::step(plan)?;
    Ok(vec![
        ("ranks", n(s.ranks)),
        ("parameters", n(s.parameters)),
        ("units", n(s.units)),
        ("tasks", n(s.tasks)),
        ("kernels", n(s.kernels)),
        ("casts", n(s.casts)),
        ("cast_bytes", n(cast_bytes)),
        ("all_gather", n(s.collectives.all_gather)),
        ("reduce_scatter", n(s.collectives.reduce_scatter)),
        ("all_reduce", n(s.collectives.all_reduce)),
        ("bytes_communicated_per_step", s.bytes_communicated_per_step as f64),
        ("peak_bytes", n(s.peak_bytes)),
        ("peak_lower_bound_bytes", n(s.peak_lower_bound_bytes)),
        ("scratch_bytes", n(s.scratch_bytes)),
        ("engine_bytes", n(s.engine_bytes)),
        ("persistent_bytes", n(s.persistent_bytes)),
        ("host_bytes", n(s.host_bytes)),
        ("bytes_copied_in_per_step", s.bytes_copied_in_per_step as f64),
        ("bytes_copied_out_per_step", s.bytes_copied_out_per_step as f64),
        ("flops_per_step", s.flops_per_step as f64),
        ("predicted_step_seconds", p.step_seconds),
        ("predicted_compute_seconds", p.compute_seconds),
        ("predicted_communication_seconds", p.communication_seconds),
        ("predicted_host_copy_seconds", p.host_copy_seconds),
    ])
}

/// The casts between float types of task `i`: from, to, number of elements.
fn casts_of(
    plan: &Plan,
    i: TaskId,
) -> impl Iterator<Item = (frit_ir::DType, frit_ir::DType, usize)> {
    let body = match &plan.tasks[i].action {
        Action::Kernel { kernel, .. } => Some(&plan.kernels[*kernel].body),
        _ => None,
    };
    body.into_iter().flat_map(|body| {
        body.nodes().filter_map(|(_, node)| match &node.op {
            Op::Cast(cast) => {
                let from = body.ty(node.inputs[0]);
                let floats = from.dtype.is_float() && cast.to.is_float();
                floats.then(|| (from.dtype, cast.to, from.shape.numel()))
            }
            _ => None,
        })
    })
}

fn casts(plan: &Plan) -> BTreeMap<(String, String), u64> {
    let mut counts = BTreeMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        for (from, to, _) in casts_of(plan, i) {
            let key = (task.origin.scope.to_string(), format!("{from} to {to}"));
            *counts.entry(key).or_default() += plan.runs(i) as u64;
        }
    }
    counts
}

fn collectives(plan: &Plan) -> BTreeMap<(String, String, String), u64> {
    let mut counts = BTreeMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let (kind, group, place) = match &task.action {
            Action::AllGather { group, recv, .. } => ("all_gather", Some(*group), recv),
            Action::ReduceScatter { group, send, .. } => ("reduce_scatter", Some(*group), send),
            Action::AllReduce { group, send, .. } => ("all_reduce", *group, send),
            _ => continue,
        };
        let unit = group.map_or(String::new(), |g| plan.units[plan.groups[g].unit].name.clone());
        let key = (kind.to_string(), unit, place.ty.to_string());
        *counts.entry(key).or_default() += plan.runs(i) as u64;
    }
    counts
}

/// Launches of one step.
fn launches_of(plan: &Plan) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let Action::Kernel { kernel, .. } = task.action else { continue };
        for name in launches::names(plan, &plan.kernels[kernel].entry) {
            *counts.entry(name).or_default() += plan.runs(i) as u64;
        }
    }
    counts
}

/// Counts that differ.
fn pairs<K: Ord + Clone>(a: BTreeMap<K, u64>, b: BTreeMap<K, u64>) -> BTreeMap<K, Pair> {
    let keys: BTreeSet<&K> = a.keys().chain(b.keys()).collect();
    let pair = |key: &K| {
        let of = |map: &BTreeMap<K, u64>| map.get(key).copied().unwrap_or(0);
        (key.clone(), (of(&a), of(&b)))
    };
    keys.into_iter().map(pair).filter(|(_, (a, b))| a != b).collect()
}

/// The keys of the configuration with their values as text.
fn keys(plan: &Plan) -> BTreeMap<String, String> {
    let table: toml::Table = plan.config.parse().unwrap_or_default();
    let mut keys = BTreeMap::new();
    for (section, values) in &table {
        match values {
            toml::Value::Table(values) => {
                for (name, value) in values {
                    keys.insert(format!("{section}.{name}"), value.to_string());
                }
            }
            value => {
                keys.insert(section.clone(), value.to_string());
            }
        }
    }
    let target = &plan.target;
    keys.insert("target (resolved)".into(), format!("{} {}", target.device, target.arch));
    keys
}
