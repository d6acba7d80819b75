//! Runs the lints with facts from the configuration and the model file, and treats findings by their level.

use crate::config::Config;
use crate::diagnostics::Report;
use crate::pipeline;
use crate::weights::Weights;
use frit_ir::ops::{OptimizerKind, Param};
use frit_ir::plan::{Strategy, Target};
use frit_ir::{Code, Diagnostic, Graph, Severity};
use frit_passes::lint::catalog::LINTS;
use frit_passes::lint::range::Spread;
use frit_passes::lint::{self, Facts};
use std::collections::BTreeMap;

/// Lints of the forward graph.
///
/// # Errors
/// If a declared range cannot be read, or names no input of the graph.
pub fn forward(
    graph: &Graph,
    config: &Config,
    target: &Target,
    weights: &Weights,
) -> Result<Vec<Diagnostic>, Diagnostic> {
    let inputs = ranges(graph, &config.data.ranges)?;
    let spread = |param: &Param| {
        let drawn = Spread::drawn(&param.init, &param.ty.shape);
        drawn.or_else(|| {
            let values = weights.first_values(param, 0, 0..param.ty.shape.numel()).ok()?;
            Some(Spread::of(&values, &param.ty.shape))
        })
    };
    let c = config;
    let decoupled = matches!(
        c.optimizer.kind,
        OptimizerKind::Adamw | OptimizerKind::Lion | OptimizerKind::Muon
    );
    let facts = Facts {
        target,
        compute: c.precision.compute,
        reduce: c.sharding.reduce_dtype,
        gather: c.sharding.param_dtype,
        sharded: c.sharding.strategy != Strategy::NoShard,
        ranks: c.sharding.ranks,
        accumulation: c.accumulation(),
        scaling: pipeline::scaling(c),
        decay: decoupled.then_some(c.optimizer.lr * c.optimizer.weight_decay),
        inputs: &inputs,
        stored: &|name| weights.get(name).map(|w| w.stored),
        spread: &spread,
    };
    Ok(lint::forward(graph, &facts))
}

/// The declared ranges, by input.
fn ranges(graph: &Graph, texts: &[String]) -> Result<BTreeMap<String, (f64, f64)>, Diagnostic> {
    let mut ranges = BTreeMap::new();
    for text in texts {
        let parsed = text.split_once('=').and_then(|(name, range)| {
            let (lo, hi) = range.split_once("..")?;
            let (lo, hi): (f64, f64) = (lo.trim().parse().ok()?, hi.trim().parse().ok()?);
            (lo <= hi).then(|| (name.trim().to_string(), (lo, hi)))
        });
        let Some((name, range)) = parsed else {
            let message = format!("`data.ranges`: \"{text}\" is not NAME=LOW..HIGH");
            return Err(Diagnostic::error(Code::ConfigContradiction, message)
                .help("write for example \"x=-3..3\""));
        };
        let known: Vec<&str> = graph
            .nodes()
            .filter_map(|(_, n)| match &n.op {
                frit_ir::Op::Input(input) => Some(input.name.as_str()),
                _ => None,
            })
            .collect();
        if !known.contains(&name.as_str()) {
            let message =
                format!("`data.ranges` names `{name}`, which is not an input of the model");
            let help = format!("its inputs are {}", known.join(", "));
            return Err(Diagnostic::error(Code::ConfigContradiction, message).help(help));
        }
        ranges.insert(name, range);
    }
    Ok(ranges)
}

/// Makes findings that are allowed notes.
///
/// # Errors
/// If an id is none of a lint.
pub fn allow(found: &mut [Diagnostic], allowed: &[String]) -> Result<(), Diagnostic> {
    if let Some(id) = allowed.iter().find(|id| LINTS.iter().all(|l| l.id != id.as_str())) {
        let message = format!("`lints.allow` names `{id}`, which is not a lint");
        return Err(
            Diagnostic::error(Code::ConfigContradiction, message).help("docs/lints.md lists them")
        );
    }
    for lint in found.iter_mut().filter(|d| allowed.contains(&d.code)) {
        lint.severity = Severity::Info;
    }
    Ok(())
}

/// The findings that keep a plan from being written.
///
/// # Errors
/// These, if there are any.
pub fn refuse(found: &[Diagnostic]) -> Result<(), Report> {
    let mut report = Report::default();
    for lint in found.iter().filter(|d| d.severity == Severity::Error) {
        let note = format!("--allow {} demotes it to a note", lint.code);
        report.push(lint.clone().note(note));
    }
    report.or(())
}
