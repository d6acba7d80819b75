//! Results of an evaluation plan: the outputs of the model, and the sums that give losses over a whole data set.

use super::Place;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// The results of the phase `eval`, all in the persistent arena.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalSpec {
    /// The outputs of the model, in its order.
    pub outputs: Vec<OutputSpec>,
    /// Names of the inputs that only the losses read.
    pub labels: Vec<String>,
    /// The losses; none in a plan compiled with `loss.kind = "none"`.
    pub losses: Vec<LossSpec>,
    /// Additional metrics.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub metrics: Vec<MetricSpec>,
    /// f32 `[2 · parts]`: of each part the sum and the count over the micro-batches of all ranks. The first parts
    /// are those of the losses.
    pub statistics: Option<Place>,
    /// f32 `[batch]`: 1 for an example that counts, 0 for one that only fills the batch. Absent if a
    /// loss is not made of examples: then only whole batches can be evaluated.
    pub weights: Option<Place>,
}

/// An output of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputSpec {
    /// Its name in the model.
    pub name: String,
    /// Where it is after the phase.
    pub place: Place,
}

/// One loss of the weighted sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossSpec {
    /// Its name, such as `cross_entropy(logits, labels)`.
    pub name: String,
    /// Its factor.
    pub weight: f64,
}

/// A metric over the data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricSpec {
    /// What it is.
    pub name: EvalMetric,
    /// The part of the statistics from whose mean it is computed.
    pub part: usize,
}

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MetricKind {
    /// How often the most likely class is the right one.
    Accuracy,
    /// How often the right class is among so many most likely ones.
    Top(usize),
    /// e to the mean cross-entropy.
    Perplexity,
    /// The mean of absolute differences.
    MeanAbsoluteError,
}

/// A metric by name: `accuracy`, or of one loss among several `accuracy(logits, labels)`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct EvalMetric {
    /// The metric.
    pub kind: MetricKind,
    /// Output and labels of the loss, if the kind alone does not say which.
    pub of: Option<(String, String)>,
}

impl fmt::Display for MetricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricKind::Accuracy => f.write_str("accuracy"),
            MetricKind::Top(k) => write!(f, "top_{k}"),
            MetricKind::Perplexity => f.write_str("perplexity"),
            MetricKind::MeanAbsoluteError => f.write_str("mean_absolute_error"),
        }
    }
}

impl FromStr for MetricKind {
    type Err = String;

    fn from_str(text: &str) -> Result<MetricKind, String> {
        match text {
            "accuracy" => Ok(MetricKind::Accuracy),
            "perplexity" => Ok(MetricKind::Perplexity),
            "mean_absolute_error" => Ok(MetricKind::MeanAbsoluteError),
            _ => {
                let k = text.strip_prefix("top_").and_then(|k| k.parse().ok()).filter(|k| *k > 0);
                k.map(MetricKind::Top).ok_or_else(|| {
                    format!(
                        "unknown metric `{text}`, expected one of `accuracy`, `top_K`, `perplexity`, \
                         `mean_absolute_error`"
                    )
                })
            }
        }
    }
}

impl fmt::Display for EvalMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.of {
            None => self.kind.fmt(f),
            Some((output, labels)) => write!(f, "{}({output}, {labels})", self.kind),
        }
    }
}

impl From<EvalMetric> for String {
    fn from(metric: EvalMetric) -> String {
        metric.to_string()
    }
}

impl TryFrom<String> for EvalMetric {
    type Error = String;

    fn try_from(text: String) -> Result<EvalMetric, String> {
        let Some((kind, of)) = text.split_once('(') else {
            return Ok(EvalMetric { kind: text.parse()?, of: None });
        };
        let of = of.strip_suffix(')').and_then(|of| of.split_once(", "));
        let (output, labels) = of.ok_or_else(|| format!("`{text}` names no output and labels"))?;
        Ok(EvalMetric { kind: kind.parse()?, of: Some((output.into(), labels.into())) })
    }
}

impl EvalSpec {
    /// The weighted sum of the mean losses; `statistics` are summed over batches.
    pub fn loss(&self, statistics: &[f64]) -> f64 {
        let mean = |(i, loss): (usize, &LossSpec)| loss.weight * mean(statistics, i);
        self.losses.iter().enumerate().map(mean).sum()
    }

    /// The losses by themselves, without their factors, by name.
    pub fn losses(&self, statistics: &[f64]) -> BTreeMap<String, f64> {
        let loss = |(i, l): (usize, &LossSpec)| (l.name.clone(), mean(statistics, i));
        self.losses.iter().enumerate().map(loss).collect()
    }

    /// The metrics by name.
    pub fn metrics(&self, statistics: &[f64]) -> BTreeMap<String, f64> {
        let metric = |m: &MetricSpec| {
            let mean = mean(statistics, m.part);
            let exponential = m.name.kind == MetricKind::Perplexity;
            (m.name.to_string(), if exponential { mean.exp() } else { mean })
        };
        self.metrics.iter().map(metric).collect()
    }
}

/// The mean of a part of the statistics, of which there is none if nothing counts.
fn mean(statistics: &[f64], part: usize) -> f64 {
    match statistics[2 * part + 1] {
        0.0 => f64::NAN,
        count => statistics[2 * part] / count.max(1.0),
    }
}
