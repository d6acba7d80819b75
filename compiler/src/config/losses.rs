//! Converts the section `[loss]` to the terms of the pass `loss`.
//!
//! Further losses are written as `0.4 * cross_entropy(aux_logits, labels)` or `0.1 * output(aux_loss)`; the factor is optional.
//! They share the other keys of the section.

use super::Config;
use super::choices::Targets;
use frit_ir::{Code, Diagnostic};
use frit_passes::loss::{LossKind, Term};

/// The losses of a configuration.
///
/// # Errors
/// The text of `loss.also` that cannot be read.
pub fn terms(config: &Config) -> Result<Vec<Term>, Diagnostic> {
    let c = &config.loss;
    let first = Term {
        kind: c.kind,
        weight: c.weight,
        logits: c.logits.clone(),
        labels: c.labels.clone(),
        ignore_index: c.ignore_index,
        class_axis: c.class_axis,
        label_smoothing: c.label_smoothing,
        soft_targets: c.targets == Targets::Probabilities,
        beta: c.beta,
    };
    let further = c.also.iter().map(|text| {
        let (weight, kind, logits, labels) = parse(text).ok_or_else(|| {
            Diagnostic::error(Code::ConfigValue, format!("`loss.also`: cannot read \"{text}\""))
                .help(format!(
                    "write \"0.5 * KIND(OUTPUT, LABELS)\" with KIND one of {}",
                    LossKind::WORDS.join(", ")
                ))
        })?;
        let labels = labels.unwrap_or_else(|| first.labels.clone());
        Ok(Term { kind, weight, logits, labels, ..first.clone() })
    });
    let further: Vec<Term> = further.collect::<Result<_, Diagnostic>>()?;
    Ok(std::iter::once(first).chain(further).collect())
}

/// `[WEIGHT *] KIND(OUTPUT[, LABELS])`
fn parse(text: &str) -> Option<(f64, LossKind, String, Option<String>)> {
    let (weight, call) = match text.split_once('*') {
        Some((weight, call)) => (weight.trim().parse::<f64>().ok()?, call.trim()),
        None => (1.0, text.trim()),
    };
    let (word, rest) = call.split_once('(')?;
    let arguments: Vec<&str> = rest.strip_suffix(')')?.split(',').map(str::trim).collect();
    let kind = LossKind::of(word.trim())?;
    let own = kind == LossKind::Output;
    match arguments[..] {
        _ if !weight.is_finite() || weight < 0.0 || kind == LossKind::None => None,
        [output] if own && !output.is_empty() => Some((weight, kind, output.into(), None)),
        [output, labels] if !own && !output.is_empty() && !labels.is_empty() => {
            Some((weight, kind, output.into(), Some(labels.into())))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_losses_are_read() {
        let term = |text| parse(text).map(|(w, k, o, l)| (w, k, o, l.unwrap_or_default()));
        let expected = (0.4, LossKind::CrossEntropy, "aux".to_string(), "labels".to_string());
        assert_eq!(term("0.4 * cross_entropy(aux, labels)"), Some(expected));
        assert_eq!(term("mse(y, t)"), Some((1.0, LossKind::Mse, "y".into(), "t".into())));
        let own = (2.0, LossKind::Output, "z".into(), String::new());
        assert_eq!(term("2*output(z)"), Some(own));
        for wrong in ["mse(y)", "0.5 * nothing(y, t)", "-1 * mse(y, t)", "mse(y, t", "none(y)", ""]
        {
            assert_eq!(term(wrong), None, "{wrong}");
        }
    }
}
