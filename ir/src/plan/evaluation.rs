//! What an evaluation plan hands out: the outputs of the model, and the sums from which losses over a
//! whole data set are made.

use super::Place;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The phase of a plan that runs the model forward only.
pub const EVAL: &str = "eval";

/// The results of the phase `eval`, all in the persistent arena.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalSpec {
    /// The outputs of the model, in its order.
    pub outputs: Vec<OutputSpec>,
    /// Names of the inputs that only the losses read.
    pub labels: Vec<String>,
    /// The losses; none in a plan compiled with `loss.kind = "none"`.
    pub losses: Vec<LossSpec>,
    /// What else is measured.
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
    /// What it is, as `cross_entropy(logits, labels)`.
    pub name: String,
    /// Its factor.
    pub weight: f64,
}

/// A number over the data set beside the losses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricSpec {
    /// What it is, as `accuracy`.
    pub name: String,
    /// The part of the statistics whose mean it is.
    pub part: usize,
    /// Whether it is e to the power of that mean.
    pub exponential: bool,
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
            (m.name.clone(), if m.exponential { mean.exp() } else { mean })
        };
        self.metrics.iter().map(metric).collect()
    }
}

/// The mean of a part of the statistics.
fn mean(statistics: &[f64], part: usize) -> f64 {
    statistics[2 * part] / statistics[2 * part + 1].max(1.0)
}
