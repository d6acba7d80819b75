//! Inspects the values that tasks write: stops at the first non-finite one, or counts exponents.
//!
//! Tasks run one at a time on any device, and their results are read back. For debugging, not for training.

mod cause;
mod check;
mod histogram;
mod values;

pub use check::NotFinite;
pub use histogram::{FORMAT, Format, Histogram, Kind, NumericsFile, Row};
pub(crate) use values::decode;

use crate::RunError;
use crate::device::Device;
use crate::files;
use check::Before;
use frit_ir::ops::StateName;
use frit_ir::plan::{Action, BufferClass, Plan, Task, TaskId};
use frit_ir::{Op, Region};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Watches one rank's tasks.
pub struct Watch<'a> {
    plan: &'a Plan,
    rank: usize,
    check: bool,
    histograms: Option<Histograms>,
    /// Whether the loss scale is dynamic, so that gradients may overflow and the step is skipped.
    adapts: bool,
    started: bool,
}

/// Histograms by scope, kind and dtype.
pub(crate) type Histograms = BTreeMap<(String, Kind, String), Histogram>;

/// Adds the counts of another rank.
pub(crate) fn merge(counted: &mut Histograms, other: Histograms) {
    for (key, histogram) in other {
        counted.entry(key).or_default().merge(&histogram);
    }
}

/// Writes the counts of this many ranks.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write(
    path: &Path,
    plan: &Plan,
    steps: usize,
    ranks: usize,
    counted: Histograms,
) -> Result<(), RunError> {
    let row = |((scope, kind, dtype), histogram)| Row { scope, kind, dtype, histogram };
    let file = NumericsFile {
        frit_numerics: FORMAT,
        compute_dtype: plan.compute_dtype.name().into(),
        steps,
        ranks,
        scopes: counted.into_iter().map(row).collect(),
    };
    let text = serde_json::to_string_pretty(&file).unwrap_or_default() + "\n";
    files::deliver(path, |out| out.write_all(text.as_bytes())).map_err(RunError::io(path))
}

impl<'a> Watch<'a> {
    /// `check` stops at the first non-finite value, `count` counts exponents.
    pub fn new(plan: &'a Plan, rank: usize, check: bool, count: bool) -> Self {
        let adapts = plan
            .kernels
            .iter()
            .any(|k| k.body.nodes().any(|(_, n)| matches!(n.op, Op::UpdateLossScale(_))));
        let histograms = count.then(Histograms::new);
        Watch { plan, rank, check, histograms, adapts, started: false }
    }

    /// Runs tasks on the device, one by one if checking or counting.
    ///
    /// # Errors
    /// The task that failed, or the first that wrote a non-finite value.
    pub fn run(&mut self, device: &mut impl Device, tasks: Range<TaskId>) -> Result<(), RunError> {
        if !self.check && self.histograms.is_none() {
            return device.run(tasks);
        }
        if self.check {
            check::inputs(self.plan, device, self.rank, !self.started)?;
            self.started = true;
        }
        let scale = self.loss_scale(device)?;
        for i in tasks.start.until(tasks.end) {
            let task = &self.plan.tasks[i];
            let watched = self.check && !self.may_overflow(task, scale);
            let before = if watched { Some(Before::read(device, task)?) } else { None };
            device.run(i..i.next())?;
            if let Some(before) = before {
                check::task(self.plan, device, i, self.rank, before)?;
            }
            self.count(device, task, scale)?;
        }
        Ok(())
    }

    /// The histograms.
    pub(crate) fn into_histograms(self) -> Histograms {
        self.histograms.unwrap_or_default()
    }

    /// The current loss scale of gradients.
    fn loss_scale(&self, device: &impl Device) -> Result<f64, RunError> {
        let Some(s) = self.plan.states.iter().find(|s| s.name == StateName::LossScale) else {
            return Ok(1.0);
        };
        let bytes = device.read(s.buffer, 0, s.ty.bytes())?;
        Ok(values::decode(s.ty.dtype, &bytes).first().copied().unwrap_or(1.0))
    }

    /// Whether an overflow here only lowers the loss scale.
    fn may_overflow(&self, task: &Task, scale: f64) -> bool {
        self.adapts && scale > 1.0 && task.region != Region::Forward
    }

    fn count(&mut self, device: &impl Device, task: &Task, scale: f64) -> Result<(), RunError> {
        let Some(histograms) = &mut self.histograms else { return Ok(()) };
        let (kind, factor) = match task.region {
            Region::Forward => (Kind::Activation, 1.0),
            Region::Backward => (Kind::Gradient, 1.0 / scale),
            Region::Recompute(_) | Region::Update => return Ok(()),
        };
        if !matches!(task.action, Action::Kernel { .. }) {
            return Ok(());
        }
        for place in task.action.writes().into_iter().filter(|p| p.ty.dtype.is_float()) {
            let class = self.plan.buffers[place.buffer].class;
            if !matches!(class, BufferClass::Activation | BufferClass::Gradient) {
                continue;
            }
            let bytes = device.read(place.buffer, place.offset, place.ty.bytes())?;
            let key = (task.origin.scope.to_string(), kind, place.ty.dtype.name().to_string());
            let histogram = histograms.entry(key).or_default();
            values::each(place.ty.dtype, &bytes, |x| histogram.add(x * factor));
        }
        Ok(())
    }
}
