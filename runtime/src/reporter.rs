//! Collects the results of a run as the metrics of its steps arrive.

use crate::RunError;
use crate::checkpoint::saver::Saved;
use crate::device::Device;
use crate::divergence::{Divergence, Judge, NO_GRADIENT, NO_GRADIENT_HELP};
use crate::eval::in_words;
use crate::files::Sink;
use crate::gradients::Parts;
use crate::memory::size;
use crate::metrics::{Scalars, StepMetrics, ValidationMetrics, Writer};
use crate::progress::Progress;
use crate::train::Outcome;
use crate::validation::Measured;
use frit_ir::plan::{Counted, DeviceType, MetricName, Plan};
use std::collections::BTreeMap;
use std::time::Instant;

/// Steps over which the rate is averaged.
const RECENT: usize = 20;

/// The rate at which this many elements of the loss take this long.
fn per_second(counted: Counted, elements: f64, seconds: f64) -> String {
    let rate = elements * counted.per_element / seconds.max(1e-9);
    let (number, prefix) = match rate {
        r if r < 1e3 => (r, ""),
        r if r < 1e6 => (r / 1e3, "k"),
        r => (r / 1e6, "M"),
    };
    let digits = if number < 100.0 { 1 } else { 0 };
    format!("{number:.digits$}{prefix} {}/s", counted.unit)
}

/// Receives the metrics of a rank's steps, writes and shows them.
pub(crate) struct Reporter<'a> {
    plan: &'a Plan,
    writer: Writer,
    progress: Progress,
    counted: Counted,
    /// Decides whether the run has failed.
    pub(crate) judge: Judge,
    /// When the last metrics arrived.
    clock: Instant,
    /// The first step's gradients, until its metrics give their factor.
    parts: Option<Parts>,
    pub(crate) outcome: Outcome,
    /// The metrics of the last step.
    pub(crate) last: Option<StepMetrics>,
}

impl<'a> Reporter<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        writer: Writer,
        progress: Progress,
        judge: Judge,
    ) -> Reporter<'a> {
        let (clock, parts, outcome) = (Instant::now(), None, Outcome::default());
        let counted = plan.counted();
        Reporter { plan, writer, progress, counted, judge, clock, parts, outcome, last: None }
    }

    /// Shows and records a warning.
    pub(crate) fn warn(&mut self, text: String) {
        self.progress.warn(&text);
        self.outcome.report.warnings.push(text);
    }

    /// Starts the clock of the first step.
    pub(crate) fn start_clock(&mut self) {
        self.clock = Instant::now();
    }

    /// The file of the metrics, if there is one.
    pub(crate) fn metrics_file(&self) -> Option<Sink> {
        self.writer.file()
    }

    /// Handles the result of saving a checkpoint after `steps` steps.
    pub(crate) fn saved(&mut self, steps: usize, saved: Saved) {
        match saved {
            Saved::Yes => {}
            Saved::NotFinite(name) => self.judge.end(Divergence::Parameter { steps, name }),
            Saved::Lost(what) => self.outcome.lost = Some(what),
        }
    }

    /// Keeps the first step's gradients until its metrics arrive.
    pub(crate) fn keep(&mut self, parts: Option<Parts>) {
        self.parts = self.parts.take().or(parts);
    }

    /// Everything that was reported.
    pub(crate) fn finish(mut self) -> Outcome {
        self.progress.finish();
        if let Some(lost) = self.writer.lost() {
            self.warn(lost);
        }
        let steps = self.judge.steps();
        let is_unsaid = (1..NO_GRADIENT).contains(&steps) && self.judge.learns_nothing();
        self.outcome.report.skipped = self.judge.skipped;
        // A signal that ended the run is what it is reported with.
        let is_interrupted = self.outcome.report.interrupted.is_some();
        let verdict = std::mem::take(&mut self.judge).verdict(is_interrupted);
        if is_unsaid && verdict.is_none() {
            self.warn(format!(
                "the norm of the gradients is zero in {}; {NO_GRADIENT_HELP}",
                match steps {
                    1 => "the only step".into(),
                    n => format!("all {n} steps"),
                }
            ));
        }
        self.outcome.report.stopped = verdict;
        self.outcome
    }

    /// Reports the steps before `step` that are not reported yet.
    pub(crate) fn catch_up(
        &mut self,
        device: &mut impl Device,
        step: usize,
    ) -> Result<(), RunError> {
        let report = &self.outcome.report;
        for step in report.start + report.losses.len()..step {
            let values = device.take_metrics()?;
            let memory = (self.outcome.rank == 0).then(|| device.memory_in_use()).flatten();
            self.report(step, &values, memory);
        }
        Ok(())
    }

    /// Shows what is done between steps.
    pub(crate) fn doing(&self, what: &str) {
        self.progress.doing(what);
    }

    /// Reports the result of a validation after `step` steps.
    pub(crate) fn validated(&mut self, step: usize, found: Measured) {
        let Measured { loss, losses, metrics } = found;
        self.progress.note(format!("validation loss {loss:.4}{}", in_words(&metrics)));
        self.outcome.report.validation.push((step, loss));
        self.outcome.report.validation_metrics.clone_from(&metrics);
        self.write(&ValidationMetrics {
            step: step - 1,
            validation_loss: loss,
            validation_losses: if losses.len() > 1 { losses } else { BTreeMap::new() },
            validation_metrics: metrics,
        });
        self.clock = Instant::now();
    }

    /// Takes the metrics of a step, in the plan's order, and the memory in use after it.
    fn report(&mut self, step: usize, values: &[f32], memory_bytes: Option<u64>) {
        let names = self.plan.metrics.iter().map(|m| m.name);
        let metrics: BTreeMap<MetricName, f64> =
            names.zip(values.iter().map(|v| f64::from(*v))).collect();
        let seconds = self.clock.elapsed().as_secs_f64();
        self.clock = Instant::now();
        if let Some(parts) = self.parts.take() {
            let (tokens, scale) = (metrics[&MetricName::Tokens], metrics[&MetricName::LossScale]);
            self.outcome.gradients = parts.combine(self.plan, tokens, scale);
        }
        let report = &mut self.outcome.report;
        report.losses.push(metrics[&MetricName::Loss]);
        report.grad_norms.push(metrics[&MetricName::GradNorm]);
        report.seconds.push(seconds);
        let line = StepMetrics {
            step,
            loss: metrics[&MetricName::Loss],
            grad_norm: metrics[&MetricName::GradNorm],
            lr: metrics[&MetricName::Lr],
            loss_scale: metrics[&MetricName::LossScale],
            skipped: metrics[&MetricName::FoundInf] != 0.0,
            tokens_or_examples_per_s: metrics[&MetricName::Tokens] * self.counted.per_element
                / seconds,
            step_seconds: seconds,
            memory_bytes,
            gemm: (self.plan.target.device == DeviceType::Cpu).then(frit_kernels::cpu::paths),
        };
        self.write(&line);
        self.judge.note(step, line.loss, line.grad_norm, line.skipped);
        if self.judge.steps() == NO_GRADIENT && self.judge.learns_nothing() {
            self.warn(format!(
                "the norm of the gradients is zero in the first {NO_GRADIENT} steps; {NO_GRADIENT_HELP}"
            ));
        }
        let recent = &self.outcome.report.seconds;
        let recent = &recent[recent.len().saturating_sub(RECENT)..];
        let mean = recent.iter().sum::<f64>() / recent.len() as f64;
        let rate = per_second(self.counted, metrics[&MetricName::Tokens], mean);
        let details: Vec<String> = [rate].into_iter().chain(memory_bytes.map(size)).collect();
        self.progress.advance(&format!("loss {:.4}", line.loss), &details);
        self.last = Some(line);
    }

    fn write(&mut self, line: &impl Scalars) {
        let warning = match self.writer.shows_lines() {
            true => self.progress.beside(|| self.writer.write(line)),
            false => self.writer.write(line),
        };
        if let Some(warning) = warning {
            self.warn(warning);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_tokens_or_examples() {
        let tokens = Counted { unit: "tokens", per_element: 1.0 };
        assert_eq!(per_second(tokens, 8.0, 0.5), "16.0 tokens/s");
        assert_eq!(per_second(tokens, 524_288.0, 1.0), "524k tokens/s");
        // The loss of an image has an element per pixel.
        let examples = Counted { unit: "examples", per_element: 1.0 / 4096.0 };
        assert_eq!(per_second(examples, 8.0 * 4096.0, 2.0), "4.0 examples/s");
    }
}
