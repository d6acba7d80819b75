//! The losses of an audit: written from their definitions in f64, and independent of the pass that attaches them to graphs.

use frit_ir::plan::InputSpec;
use frit_ir::{Code, Diagnostic, Graph, OutputKind, Tensor, ValueId};
use frit_passes::loss::{LossKind, Term};

/// A loss of the sum, and the output of the graph that it reads.
#[derive(Debug)]
pub(super) struct Loss {
    term: Term,
    pub(super) output: ValueId,
    /// The axis of the classes.
    axis: usize,
}

/// A sum of losses over elements, and the number of elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sum {
    pub(super) sum: f64,
    pub(super) count: f64,
}

impl Loss {
    /// The losses of a graph whose outputs are the model's.
    ///
    /// # Errors
    /// If an output is not there.
    pub(super) fn all(
        terms: Vec<Term>,
        graph: &Graph,
        inputs: &[InputSpec],
    ) -> Result<Vec<Loss>, Diagnostic> {
        terms.into_iter().map(|term| Loss::of(term, graph, inputs)).collect()
    }

    fn of(term: Term, graph: &Graph, inputs: &[InputSpec]) -> Result<Loss, Diagnostic> {
        let results: Vec<_> =
            graph.outputs.iter().filter(|o| o.kind == OutputKind::Result).collect();
        let named = results.iter().find(|o| o.name == term.logits);
        // The only output may have any name unless the configuration says one.
        let only = results.first().filter(|_| results.len() == 1);
        let only = only.filter(|_| term.logits == Term::default().logits);
        let Some(output) = named.or(only) else {
            let message = format!("the model has no output `{}`", term.logits);
            return Err(Diagnostic::error(Code::OutputUnknown, message));
        };
        let shape = graph.ty(output.value).shape.dims();
        let labels = inputs.iter().find(|i| i.name == term.labels);
        let labels = labels.map_or(&[][..], |i| i.ty.shape.dims());
        Ok(Loss { axis: class_axis(&term, shape, labels), output: output.value, term })
    }

    /// The factor of the loss.
    pub(super) fn weight(&self) -> f64 {
        self.term.weight
    }

    /// The input whose labels are counted, and which of them is not; none if the number of elements is known.
    pub(super) fn counted(&self) -> Option<(&str, i64)> {
        let Term { kind, soft_targets, labels, ignore_index, .. } = &self.term;
        (*kind == LossKind::CrossEntropy && !soft_targets).then_some((labels, *ignore_index))
    }

    /// The input with the labels, if there is one.
    pub(super) fn labels(&self) -> Option<&str> {
        (self.term.kind != LossKind::Output).then_some(self.term.labels.as_str())
    }

    /// The loss of one batch.
    pub(super) fn sum(&self, output: &Tensor, labels: Option<&Tensor>) -> Sum {
        let x = output.to_f64s();
        let Some(labels) = labels else { return Sum { sum: x[0], count: 1.0 } };
        let Term { kind, soft_targets, .. } = self.term;
        match kind {
            LossKind::CrossEntropy if !soft_targets => {
                self.of_indices(output, &x, &labels.to_i64s())
            }
            LossKind::CrossEntropy | LossKind::Kl => {
                self.of_probabilities(output, &x, &labels.to_f64s())
            }
            _ => {
                let pairs = x.iter().zip(labels.to_f64s());
                let sum = pairs.map(|(x, t)| self.element(*x, t)).sum();
                Sum { sum, count: x.len() as f64 }
            }
        }
    }

    /// The loss of an element with a target.
    fn element(&self, x: f64, t: f64) -> f64 {
        let distance = (x - t).abs();
        let beta = self.term.beta;
        match self.term.kind {
            LossKind::Mse => distance * distance,
            LossKind::L1 => distance,
            LossKind::SmoothL1 if distance < beta => 0.5 * distance * distance / beta,
            LossKind::SmoothL1 => distance - 0.5 * beta,
            // ln(1 + eˣ) − x·t, without overflow.
            _ => x.max(0.0) + (-x.abs()).exp().ln_1p() - x * t,
        }
    }

    /// Cross-entropy of class indices.
    fn of_indices(&self, output: &Tensor, x: &[f64], labels: &[i64]) -> Sum {
        let smoothing = self.term.label_smoothing;
        let mut all = Sum::default();
        for (row, label) in rows(output, self.axis).zip(labels) {
            if *label == self.term.ignore_index {
                continue;
            }
            let log = log_softmax(row.clone().map(|at| x[at]));
            let chosen = usize::try_from(*label).ok().and_then(|label| log.get(label));
            let own = chosen.copied().unwrap_or(f64::NAN);
            let mean = log.iter().sum::<f64>() / log.len() as f64;
            all.sum -= (1.0 - smoothing) * own + smoothing * mean;
            all.count += 1.0;
        }
        all
    }

    /// Cross-entropy or divergence of probabilities of all classes.
    fn of_probabilities(&self, output: &Tensor, x: &[f64], targets: &[f64]) -> Sum {
        let mut all = Sum::default();
        for row in rows(output, self.axis) {
            let log = log_softmax(row.clone().map(|at| x[at]));
            let smoothing = self.term.label_smoothing;
            let spread = smoothing / log.len() as f64;
            for (at, log) in row.zip(&log) {
                let t = targets[at];
                all.sum += match self.term.kind {
                    LossKind::Kl if t > 0.0 => t * (t.ln() - log),
                    LossKind::Kl => 0.0,
                    _ => -((1.0 - smoothing) * t + spread) * log,
                };
            }
            all.count += 1.0;
        }
        all
    }
}

/// The axis that the configuration names; else the last, unless only without axis 1 the output has the shape of the labels.
fn class_axis(term: &Term, shape: &[usize], labels: &[usize]) -> usize {
    let last = shape.len().saturating_sub(1);
    let without = |axis: usize| [&shape[..axis], &shape[axis + 1..]].concat();
    match term.class_axis {
        Some(axis) if axis < 0 => (axis + shape.len() as i64).max(0) as usize,
        Some(axis) => axis as usize,
        None if shape.len() > 2 && without(last) != labels && without(1) == labels => 1,
        None => last,
    }
}

/// The places of the classes of every row.
fn rows(output: &Tensor, axis: usize) -> impl Iterator<Item = impl Iterator<Item = usize> + Clone> {
    let dims = output.shape().dims();
    let classes = dims.get(axis).copied().unwrap_or(1);
    let inner: usize = dims.iter().skip(axis + 1).product();
    let outer: usize = dims.iter().take(axis).product();
    (0..outer * inner).map(move |row| {
        let first = row / inner.max(1) * classes * inner + row % inner.max(1);
        (0..classes).map(move |class| first + class * inner)
    })
}

fn log_softmax(x: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    let most = x.clone().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.clone().map(|x| (x - most).exp()).sum();
    x.map(|x| x - most - sum.ln()).collect()
}
