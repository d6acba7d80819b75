//! What a run reports, put together as the metrics of its steps arrive.

use crate::RunError;
use crate::device::Device;
use crate::gradients::Parts;
use crate::metrics::{StepMetrics, ValidationMetrics, Writer};
use crate::run::Outcome;
use frit_ir::plan::Plan;
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::IsTerminal;
use std::time::Instant;

/// Takes the metrics of a rank's steps, writes and shows them.
pub(crate) struct Reporter<'a> {
    plan: &'a Plan,
    writer: Writer,
    bar: ProgressBar,
    /// When the last metrics arrived.
    clock: Instant,
    /// The first step's gradients, until its metrics say by what to divide them.
    parts: Option<Parts>,
    pub(crate) outcome: Outcome,
}

impl<'a> Reporter<'a> {
    /// Of a run with a progress bar of so many steps, if it shall have one and standard error is a terminal.
    pub(crate) fn new(plan: &'a Plan, writer: Writer, bar: Option<usize>) -> Reporter<'a> {
        let outcome = Outcome::default();
        let bar = progress(bar.filter(|_| std::io::stderr().is_terminal()));
        Reporter { plan, writer, bar, clock: Instant::now(), parts: None, outcome }
    }

    /// The time of the first step counts from here.
    pub(crate) fn start_clock(&mut self) {
        self.clock = Instant::now();
    }

    /// The file of the metrics, if there is one.
    pub(crate) fn metrics_file(&self) -> Option<File> {
        self.writer.file()
    }

    /// Keeps the first step's gradients until its metrics arrive.
    pub(crate) fn keep(&mut self, parts: Option<Parts>) {
        self.parts = self.parts.take().or(parts);
    }

    /// All that was reported.
    pub(crate) fn finish(self) -> Outcome {
        self.bar.finish_and_clear();
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
            self.report(step, &values)?;
        }
        Ok(())
    }

    /// Reports the validation loss after `step` steps, and gives it back.
    pub(crate) fn validated(&mut self, step: usize, loss: f64) -> Result<f64, RunError> {
        self.writer.write(&ValidationMetrics { step: step - 1, validation_loss: loss })?;
        self.outcome.report.validation.push((step, loss));
        self.bar.set_message(format!("validation loss {loss:.4}"));
        self.clock = Instant::now();
        Ok(loss)
    }

    /// Takes the metrics of a step, in the plan's order.
    fn report(&mut self, step: usize, values: &[f32]) -> Result<(), RunError> {
        let names = self.plan.metrics.iter().map(|m| m.name.as_str());
        let metrics: BTreeMap<&str, f64> =
            names.zip(values.iter().map(|v| f64::from(*v))).collect();
        let seconds = self.clock.elapsed().as_secs_f64();
        self.clock = Instant::now();
        if let Some(parts) = self.parts.take() {
            let (tokens, scale) = (metrics["tokens"], metrics["loss_scale"]);
            self.outcome.gradients = parts.combine(self.plan, tokens, scale);
        }
        let report = &mut self.outcome.report;
        report.losses.push(metrics["loss"]);
        report.grad_norms.push(metrics["grad_norm"]);
        report.seconds.push(seconds);
        let line = StepMetrics {
            step,
            loss: metrics["loss"],
            grad_norm: metrics["grad_norm"],
            lr: metrics["lr"],
            loss_scale: metrics["loss_scale"],
            skipped: metrics["found_inf"] != 0.0,
            tokens_or_examples_per_s: metrics["tokens"] / seconds,
        };
        self.writer.write(&line)?;
        self.bar.set_message(format!("loss {:.4}", line.loss));
        self.bar.inc(1);
        Ok(())
    }
}

fn progress(steps: Option<usize>) -> ProgressBar {
    let Some(steps) = steps else { return ProgressBar::hidden() };
    let bar = ProgressBar::new(steps as u64);
    match ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {eta}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
