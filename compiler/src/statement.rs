//! What a configuration trains and how, for the certificate: read from its keys, not from the options of passes.

use crate::config::choices::Decay;
use crate::config::losses;
use crate::config::{Config, LossScale};
use frit_ir::DType;
use frit_ir::Diagnostic;
use frit_ir::ops::MuonRule;
use frit_passes::loss::{LossKind as Word, Term};
use frit_verify::step::{Group, LossKind, LossTerm, Update};
use std::collections::BTreeSet;

/// The losses of a configuration, none if it only evaluates.
///
/// # Errors
/// The text of `loss.also` that cannot be read.
pub fn losses(config: &Config) -> Result<Vec<LossTerm>, Diagnostic> {
    Ok(losses::terms(config)?.iter().filter_map(loss).collect())
}

fn loss(term: &Term) -> Option<LossTerm> {
    let smoothing = term.label_smoothing;
    let kind = match term.kind {
        Word::CrossEntropy if term.soft_targets => LossKind::SoftCrossEntropy { smoothing },
        Word::CrossEntropy => LossKind::CrossEntropy { ignore_index: term.ignore_index, smoothing },
        Word::Mse => LossKind::Mse,
        Word::L1 => LossKind::L1,
        Word::SmoothL1 => LossKind::SmoothL1 { beta: term.beta },
        Word::BceWithLogits => LossKind::BceWithLogits,
        Word::Kl => LossKind::Kl,
        Word::Output => LossKind::Output,
        Word::None => return None,
    };
    Some(LossTerm {
        kind,
        weight: term.weight,
        output: term.logits.clone(),
        labels: term.labels.clone(),
        class_axis: term.class_axis,
    })
}

/// The update of a configuration, of a loss of `capacity` elements per micro-step of a rank, where Muon steps these `matrices`.
pub fn update(config: &Config, capacity: f64, matrices: BTreeSet<String>) -> Update {
    let (o, p) = (&config.optimizer, &config.precision);
    let mut hypers: Vec<(String, f64)> =
        config.numbers().into_iter().map(|(key, x)| (key.to_string(), x)).collect();
    let mut set = |key: String, x: f64| hypers.push((format!("optimizer.{key}"), x));
    for (i, beta) in o.betas.into_iter().enumerate() {
        set(format!("beta{}", i + 1), beta);
    }
    for (word, coefficient) in ["a", "b", "c"].into_iter().zip(o.muon_ns_coefficients) {
        set(format!("muon_ns_{word}"), coefficient);
    }
    if o.decay == Decay::Matrices {
        set("weight_decay_of_vectors".into(), 0.0);
    }
    for (i, group) in o.groups.iter().enumerate() {
        for (what, x) in [("lr", group.lr), ("weight_decay", group.weight_decay)] {
            x.into_iter().for_each(|x| set(format!("group.{i}.{what}"), x));
        }
    }
    let dynamic_scale = match p.loss_scale {
        LossScale::Auto => p.compute == DType::F16,
        LossScale::Dynamic => true,
        LossScale::None | LossScale::Fixed(_) => false,
    };
    let init_scale = match p.loss_scale {
        LossScale::Fixed(scale) => scale,
        _ if dynamic_scale => p.init_scale,
        _ => 1.0,
    };
    Update {
        optimizer: o.kind,
        muon: MuonRule {
            nesterov: o.muon_nesterov,
            ns_steps: o.muon_ns_steps,
            adjust_lr: o.muon_adjust_lr,
        },
        matrices,
        schedule: config.schedule.kind,
        hypers: hypers.into_iter().collect(),
        groups: o.groups.iter().map(|g| Group { scope: g.scope.clone(), kind: g.kind }).collect(),
        ema: o.ema > 0.0,
        init_scale,
        dynamic_scale,
        accumulation: config.accumulation(),
        capacity,
        ranks: config.sharding.ranks,
        reproducible: config.run.reproducible.is_some(),
    }
}
