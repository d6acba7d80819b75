//! Converts the section `[metrics]` to the metrics of an evaluation.
//!
//! `auto` selects the usual metrics of every loss; `accuracy`, `top_K`, `perplexity` and `mean_absolute_error` apply to every loss
//! they fit, or to one output and its labels: `accuracy(OUTPUT, LABELS)`.

use crate::config::Config;
use crate::config::losses;
use frit_ir::plan::MetricKind;
use frit_ir::{Code, Diagnostic};
use frit_passes::loss::metrics::{Metric, fits};
use frit_passes::loss::{LossKind, Term};

/// The metrics of a configuration.
///
/// # Errors
/// The text of `metrics.report` that cannot be read, or that fits no loss.
pub fn metrics(config: &Config) -> Result<Vec<Metric>, Diagnostic> {
    let terms = losses::terms(config)?;
    let mut all: Vec<Metric> = Vec::new();
    for text in &config.metrics.report {
        for metric in read(text, &terms)? {
            match all.iter_mut().find(|m| m.kind == metric.kind && m.term == metric.term) {
                Some(known) => known.by_default &= metric.by_default,
                None => all.push(metric),
            }
        }
    }
    Ok(all)
}

fn read(text: &str, terms: &[Term]) -> Result<Vec<Metric>, Diagnostic> {
    let of = |kind, term: &Term, by_default| Metric { kind, term: unweighted(term), by_default };
    if text == "auto" {
        let usual = |t: &Term| usual(t.kind).iter().map(|k| of(*k, t, true)).collect::<Vec<_>>();
        return Ok(terms.iter().flat_map(usual).collect());
    }
    let help = "write \"auto\", \"accuracy\", \"top_5\", \"perplexity\", \"mean_absolute_error\", or one of these with \
                an output and its labels, as \"accuracy(logits, labels)\"";
    let unknown = || {
        Diagnostic::error(Code::ConfigValue, format!("`metrics.report`: cannot read \"{text}\""))
            .help(help)
    };
    let (word, arguments) = match text.split_once('(') {
        None => (text.trim(), None),
        Some((word, rest)) => {
            let rest = rest.trim().strip_suffix(')').ok_or_else(unknown)?;
            let (output, labels) = rest.split_once(',').ok_or_else(unknown)?;
            (word.trim(), Some((output.trim(), labels.trim())))
        }
    };
    let kind: MetricKind = word.parse().map_err(|_| unknown())?;
    if let Some((logits, labels)) = arguments {
        if logits.is_empty() || labels.is_empty() {
            return Err(unknown());
        }
        let compared = terms.iter().find(|t| t.logits == logits && t.labels == labels);
        let term = compared.filter(|t| fits(kind, t.kind)).cloned().unwrap_or_else(|| Term {
            kind: match kind {
                MetricKind::MeanAbsoluteError => LossKind::L1,
                _ => LossKind::CrossEntropy,
            },
            logits: logits.into(),
            labels: labels.into(),
            ..terms.first().cloned().unwrap_or_default()
        });
        return Ok(vec![of(kind, &term, false)]);
    }
    let found: Vec<Metric> =
        terms.iter().filter(|t| fits(kind, t.kind)).map(|t| of(kind, t, false)).collect();
    if found.is_empty() {
        let losses: Vec<String> = terms.iter().map(Term::to_string).collect();
        let what = format!("`metrics.report`: \"{text}\" fits no loss");
        return Err(Diagnostic::error(Code::MetricUnknownOutput, what)
            .note(format!("the losses are {}", losses.join(", ")))
            .help(format!("name an output and its labels, as \"{word}(logits, labels)\"")));
    }
    Ok(found)
}

/// Factors do not affect metrics.
fn unweighted(term: &Term) -> Term {
    Term { weight: 1.0, ..term.clone() }
}

fn usual(loss: LossKind) -> &'static [MetricKind] {
    match loss {
        LossKind::CrossEntropy => {
            &[MetricKind::Accuracy, MetricKind::Top(5), MetricKind::Perplexity]
        }
        LossKind::Kl | LossKind::BceWithLogits => &[MetricKind::Accuracy],
        LossKind::Mse | LossKind::SmoothL1 => &[MetricKind::MeanAbsoluteError],
        LossKind::L1 | LossKind::Output | LossKind::None => &[],
    }
}
