//! What an evaluation plan hands out: the outputs of the model, and the sums from which losses over a
//! whole data set are made.

use super::Place;
use serde::{Deserialize, Serialize};

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
    /// f32 `[2 · losses]`: of each loss the sum and the count over the micro-batches of all ranks.
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

impl EvalSpec {
    /// The weighted sum of the mean losses; `statistics` are summed over batches.
    pub fn loss(&self, statistics: &[f64]) -> f64 {
        let mean = |i: usize| statistics[2 * i] / statistics[2 * i + 1].max(1.0);
        self.losses.iter().enumerate().map(|(i, l)| l.weight * mean(i)).sum()
    }
}
